"""Everything an audit depends on, so that equal configs give equal rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.attacks import create as create_attack
from gradveil.attacks.threat import LOCAL_KNOWN
from gradveil.audit import schema
from gradveil.audit.match import Price
from gradveil.audit.rows import MODES, PUBLISHERS, SETTINGS, Settings, with_lists, with_tuples
from gradveil.audit.store import command_line, read_json
from gradveil.core import checks
from gradveil.core.errors import ParameterError
from gradveil.core.registry import format_spec, parse_spec
from gradveil.defenses import create as create_defense
from gradveil.federation.digests import json_digest
from gradveil.update import LocalSteps


@dataclass(frozen=True)
class AuditConfig(Settings):
    """What is audited. Two equal configs give the same rows, to the bit, on the same machine.

    Names are written out in full when the config is made, so that ``std=.1`` and ``std=0.1`` are one defense.
    The undefended row is always part of an audit: without it no other figure means anything.

    Args:
        dataset: name or path, with parameters, such as ``faces-orl:size=64``.
        model: name with parameters, such as ``lenet:init=uniform``.
        defenses: specs such as ``dual-pruning:k1=0.05,k2=0.75+error-feedback``.
        attacks: specs such as ``idlg:iterations=300``.
        victims: updates attacked under each defense.
        batch_size: images behind each update.
        victim_classes: how many classes the examples of each victim come from, so that labels repeat within a batch, as
            they do at clients whose data is of few kinds; None: examples are drawn whatever their class.
        labels: ``"infer"``: the attacker must find the labels; ``"known"``: it is given them.
        adaptive: False: attackers that do not know the defense; True: attackers that do (or plain ones, if an attack
            has no adaptive form against a defense); None: both.
        aggregated: clients behind each victim, who share in one round: the attacker gets what the defense lets the
            server see of them; under secure aggregation that is their sum.
        match: ``"accuracy"``, ``"power"``, ``"bytes"`` or ``"named"``, with ``=TARGET`` or a default target: every
            defense is first set to the strength at which it costs that, see `gradveil.audit.match`; None: as given.
        chunk: victims attacked together; an unfinished chunk is run again completely.
        rounds: federated training rounds behind accuracy, time and bytes.
        clients: clients in that training.
        client_batch: images that a client trains on in a round.
        lr: learning rate of that training.
        seed: everything random derives from it.
        local_epochs: FedAvg: the clients' local passes over their examples; None: a single gradient.
        local_batch: FedAvg: examples per local step; None: all of them.
        local_lr: FedAvg: learning rate of the local steps.
        local_momentum: FedAvg: momentum of the local steps.
        local_known: FedAvg: what attackers know about the local steps: ``"full"``, ``"part"`` (epochs and learning
            rate) or ``"none"`` (they take the update for one gradient), see `ThreatModel`.
        observed_rounds: rounds of each victim, on the same data, that the attacker sees; between them the server takes
            a step of `lr` along the mean update.
        publisher: who announces for the victims' rounds, under defenses in which a client does: ``"honest"``: another
            client, as it should; ``"lying"``: another client, which passes its smallest values off as its largest;
            ``"victim"``: the victim itself, which thereby tells more than the others. In the training everybody is
            honest.
        public: training examples, at most, that attackers who learn may learn from; victims come from the test split.
        candidates: test examples, at most, among which an attacker is to find the one that a client trained on.
        games: how often it has to, each time from another client's update; 0: not at all.
        weights: safetensors file of the user's own weights; None: the initial ones.
        stage: the share of the training after which victims are attacked, in [0, 1]: the audit itself first trains the
            model undefended for that share of `rounds`. 0: at the weights as they are given.
        shared: patterns such as ``"layer1*,*.bias"`` (`fnmatch`), with commas between them, of the parameters that
            leave the client; None: all but the embedding of a text model. The attacker is granted the values of the
            others. In the training they stay as they are.
        norms: batch norm in ``"train"`` or ``"inference"`` mode; None: as the model is built.
        dropout: ``"train"``: clients draw fresh dropout masks in every step, as they do in training, and matching
            attackers search for these masks too; ``"inference"``: dropout is off. Without dropout in the model, both
            are the same.
        mean: the model's normalisation, one number per channel or column, together with `std`; None: none.
        std: see `mean`.
        device: the device to compute on.

    Example:
        >>> config = AuditConfig(defenses=("gaussian-noise:std=.1",), attacks=("idlg",))
        >>> config.defenses, config.attacks
        (('none', 'gaussian-noise:std=0.1'), ('idlg:iterations=300,restarts=1,mute=none',))
    """

    def __post_init__(self) -> None:
        counts = ("victims", "batch_size", "aggregated", "chunk", "rounds", "clients", "client_batch")
        for name in (*counts, "observed_rounds"):
            checks.integer("audit", name, getattr(self, name), low=1)
        if self.local_batch is not None and self.local_epochs is None:
            raise ParameterError("audit: local_batch belongs to local steps; give the passes too: local_epochs")
        epochs = 1 if self.local_epochs is None else self.local_epochs
        LocalSteps(epochs, self.local_batch, self.local_lr, self.local_momentum)  # checks its arguments
        checks.choice("audit", "local_known", self.local_known, LOCAL_KNOWN)
        if self.local_known != "full" and self.local_epochs is None:
            raise ParameterError(
                f"audit: local_known={self.local_known} is about local steps, of which there are none; give "
                "local_epochs or leave it out"
            )
        checks.number("audit", "stage", self.stage, low=0, high=1)
        if self.shared is not None and self.local_epochs is not None:
            raise ParameterError(
                "audit: shared is about single gradients, because in local steps the layers that stay at the client "
                "change too; leave local_epochs or shared out"
            )
        if self.norms is not None:
            checks.choice("audit", "norms", self.norms, MODES)
        checks.choice("audit", "dropout", self.dropout, MODES)
        checks.choice("audit", "publisher", self.publisher, PUBLISHERS)
        if self.victim_classes is not None:
            checks.integer("audit", "victim_classes", self.victim_classes, low=1, high=self.batch_size)
        checks.integer("audit", "seed", self.seed, low=0)
        checks.integer("audit", "public", self.public, low=0)
        checks.integer("audit", "candidates", self.candidates, low=2)
        checks.integer("audit", "games", self.games, low=0)
        given = [name for name in ("match", "weights", "shared") if getattr(self, name) is not None]
        for name in ("dataset", "model", "labels", "device", *given):
            _check_text(name, getattr(self, name))
        for name in ("defenses", "attacks"):
            specs = getattr(self, name)
            if not isinstance(specs, tuple | list):
                raise ParameterError(f"audit: {name} must be a list of texts, got {specs!r} ({type(specs).__name__})")
            for spec in specs:
                _check_text(name, spec)
        checks.number("audit", "lr", self.lr, above=0)
        # Building each method checks its name and parameters before anything runs.
        defenses = _unique("defense", [str(create_defense(spec)) for spec in self.defenses])
        if self.publisher != "honest" and not any(create_defense(spec).announces for spec in defenses):
            raise ParameterError(
                f"audit: publisher={self.publisher} is about defenses in which a client publishes something, such as "
                "aligned-dual-pruning, and none of them is audited; leave it out"
            )
        attacks = _unique("attack", [str(create_attack(spec)) for spec in self.attacks])
        if not attacks:
            raise ParameterError("audit: expected at least one attack, got none")
        checks.choice("audit", "labels", self.labels, ["infer", "known"])
        if self.adaptive is not None:
            checks.flag("audit", "adaptive", self.adaptive)
        set_field = object.__setattr__  # how a frozen dataclass normalises its own fields
        # "none" comes first, because the others are measured against it.
        set_field(self, "defenses", ("none", *(defense for defense in defenses if defense != "none")))
        set_field(self, "attacks", tuple(attacks))
        if self.match is not None:
            set_field(self, "match", str(Price.parse(self.match)))
            if Price.parse(self.match).kind == "named" and (self.games == 0 or self.aggregated > 1):
                raise ParameterError(
                    f"audit: match={self.match} takes identification games, got games={self.games} and "
                    f"aggregated={self.aggregated}; ask for games of single clients, or match something else"
                )
            _refuse_equal_but_for_strength(defenses)
        set_field(self, "model", format_spec(*parse_spec(self.model)))
        set_field(self, "dataset", format_spec(*parse_spec(self.dataset)))

    @property
    def local(self) -> LocalSteps | None:
        """The clients' local steps."""
        if self.local_epochs is None:
            return None
        return LocalSteps(self.local_epochs, self.local_batch, self.local_lr, self.local_momentum)

    @property
    def command(self) -> str:
        """The command that runs this audit again."""
        return command_line(self.to_json())

    @property
    def digest(self) -> str:
        """Eight hex digits that differ between different configs."""
        return json_digest(self.to_json())[:8]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON holds them."""
        return with_lists(vars(self))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "AuditConfig":
        """The config that `to_json` wrote, each field of its type and in its range; other keys are ignored."""
        kept = {name: value for name, value in fields.items() if name in SETTINGS}
        schema.check("config.json", kept, SETTINGS)
        return cls(**with_tuples(kept))


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ParameterError(f"audit: {name} must be a text, got {value!r} ({type(value).__name__})")


def _unique(kind: str, specs: list[str]) -> list[str]:
    for spec in specs:
        if specs.count(spec) > 1:
            raise ParameterError(f"audit: {kind} {spec} is given twice")
    return specs


def _refuse_equal_but_for_strength(specs: list[str]) -> None:
    seen: dict[str, str] = {}
    for spec in specs:
        defense = create_defense(spec)
        weakest = str(defense.with_strength(defense.strength.at(0))) if defense.strength else spec
        if weakest in seen:
            raise ParameterError(
                f"audit: {seen[weakest]} and {spec} differ only in the strength, which --match chooses; give one"
            )
        seen[weakest] = spec


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json; anything that is not a JSON object raises `DataError`."""
    return read_json(path, "choose another --out")
