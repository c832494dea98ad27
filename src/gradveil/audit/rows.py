"""What an audit writes: `config.json`, and a row for each attack on a victim, each set of identification games, each
training and each match.

Each field is declared once, with the kind of value that it holds. Writer, reader, report and experiments all use that.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from gradveil.attacks.threat import LOCAL_KNOWN
from gradveil.audit import schema as kinds
from gradveil.audit.schema import DIGEST, Json, Kind, Schema
from gradveil.core.errors import ParameterError
from gradveil.metrics import Metric

VERSION = 7
"""Version of the files in an audit folder; other versions are refused."""

DEFENSES = (
    "none",
    "gaussian-noise:std=0.3",
    "dual-pruning:k1=0.05,k2=0.75+error-feedback",
    "gradient-dropout:keep=0.8,std=0.005",
)
ATTACKS = (
    "idlg:iterations=150",
    "inverting-gradients:optimiser=lbfgs,iterations=100,tv=0.01",
    "lti:directions=300,draws=6,hidden=512,epochs=30",
)
MODES = ("train", "inference")
"""The modes of batch norm and dropout."""
PUBLISHERS = ("honest", "lying", "victim")


def _field(kind: Kind | Callable[[Sequence[Metric]], Kind], default: Any = dataclasses.MISSING) -> Any:
    """A field that holds what `kind` says, which may depend on the metrics of the audit."""
    return dataclasses.field(default=default, metadata={"kind": kind})


def with_lists(values: Mapping[str, Any]) -> Json:
    """Convert the values of fields to what JSON holds: tuples become lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of JSON to what fields hold: lists become tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


@dataclass(frozen=True)
class Settings:
    """The fields of `AuditConfig`, whose docstring explains them.

    Example:
        >>> Settings(victims=4).victims, SETTINGS["victims"].description
        (4, 'a whole number from 1 to 1,000,000')
    """

    dataset: str = _field(kinds.text(), "mnist")
    model: str = _field(kinds.text(), "lenet:init=uniform")
    defenses: tuple[str, ...] = _field(kinds.list_of(kinds.text(), kinds.MAX_METHODS), DEFENSES)
    attacks: tuple[str, ...] = _field(kinds.list_of(kinds.text(), kinds.MAX_METHODS), ATTACKS)
    victims: int = _field(kinds.integer(1, kinds.MAX_ITEMS), 8)
    batch_size: int = _field(kinds.integer(1, kinds.MAX_ITEMS), 1)
    victim_classes: int | None = _field(kinds.optional(kinds.integer(1, kinds.MAX_ITEMS)), None)
    labels: str = _field(kinds.choice("infer", "known"), "infer")
    adaptive: bool | None = _field(kinds.optional(kinds.FLAG), None)
    aggregated: int = _field(kinds.integer(1, kinds.MAX_ITEMS), 1)
    match: str | None = _field(kinds.optional(kinds.text(100)), None)
    chunk: int = _field(kinds.integer(1, kinds.MAX_ITEMS), 8)
    rounds: int = _field(kinds.integer(1), 500)
    clients: int = _field(kinds.integer(1), 8)
    client_batch: int = _field(kinds.integer(1), 16)
    lr: float = _field(kinds.number(0, 1e6), 0.015)
    seed: int = _field(kinds.integer(0, 2**63 - 1), 0)
    local_epochs: int | None = _field(kinds.optional(kinds.integer(1)), None)
    local_batch: int | None = _field(kinds.optional(kinds.integer(1)), None)
    local_lr: float = _field(kinds.number(0, 1e6), 0.05)
    local_momentum: float = _field(kinds.number(0, 1), 0.0)
    local_known: str = _field(kinds.choice(*LOCAL_KNOWN), "full")
    observed_rounds: int = _field(kinds.integer(1, kinds.MAX_ITEMS), 1)
    publisher: str = _field(kinds.choice(*PUBLISHERS), "honest")
    public: int = _field(kinds.integer(0, kinds.MAX_ITEMS), 4000)
    candidates: int = _field(kinds.integer(2, kinds.MAX_ITEMS), 200)
    games: int = _field(kinds.integer(0, kinds.MAX_ITEMS), 100)
    weights: str | None = _field(kinds.optional(kinds.text()), None)
    stage: float = _field(kinds.SHARE, 0.0)
    shared: str | None = _field(kinds.optional(kinds.text()), None)
    norms: str | None = _field(kinds.optional(kinds.choice(*MODES)), None)
    dropout: str = _field(kinds.choice(*MODES), "train")
    mean: tuple[float, ...] | None = _field(kinds.optional(kinds.list_of(kinds.ANY_NUMBER, kinds.MAX_ITEMS)), None)
    std: tuple[float, ...] | None = _field(kinds.optional(kinds.list_of(kinds.AMOUNT, kinds.MAX_ITEMS)), None)
    device: str = _field(kinds.text(100), "cpu")


SETTINGS: Schema = {one.name: one.metadata["kind"] for one in dataclasses.fields(Settings)}

CONFIG_SCHEMA: Schema = {
    "gradveil": kinds.text(100),
    "version": kinds.integer(VERSION, VERSION),
    "command": kinds.text(kinds.MAX_COMMAND),
    **SETTINGS,
    "adapted": kinds.list_of(kinds.list_of(kinds.text(), 2), kinds.MAX_METHODS**2),
    "generic": kinds.list_of(kinds.text(), kinds.MAX_METHODS),
    "learned": kinds.list_of(kinds.text(), kinds.MAX_METHODS),
    "simulating": kinds.list_of(kinds.text(), kinds.MAX_METHODS),
    "public_examples": kinds.integer(0, kinds.MAX_ITEMS),
    "public_overlap": kinds.integer(0, kinds.MAX_ITEMS),
    "caveats": kinds.object_of(kinds.list_of(kinds.text(), 100), 2 * kinds.MAX_METHODS),
    "dataset_source": kinds.WORDS,
    "data_digest": kinds.digest(),
    "modality": kinds.text(100),
    "metrics": kinds.object_of(kinds.FLAG, 1000),
    "disclosed": kinds.list_of(kinds.text(), 10),
    "input_shape": kinds.list_of(kinds.integer(1, 1_000_000), 8),
    "classes": kinds.list_of(kinds.WORDS, kinds.MAX_CLASSES),
    "largest_class": kinds.optional(kinds.SHARE),
    "parameters": kinds.integer(1, 10**15),
    "dropout_rates": kinds.object_of(kinds.SHARE, kinds.MAX_ITEMS),
    "weights_accuracy": kinds.optional(kinds.SHARE),
    "modes": kinds.object_of(kinds.text(100), 10),
    "weights_digest": kinds.digest(),
    "model_file_digest": kinds.optional(kinds.digest()),
    "plugin_files": kinds.object_of(kinds.digest(), 100),
    "plugin_packages": kinds.object_of(kinds.text(100), 100),
    "victim_labels": kinds.list_of(kinds.list_of(kinds.TARGET)),
    "torch": kinds.text(100),
    "threads": kinds.integer(1, 65_536),
    "platform": kinds.text(1000),
    DIGEST: kinds.digest(),
}

_SHOWN = re.compile(r"images/[a-zA-Z0-9=_-][a-zA-Z0-9.=_-]*\.(png|json)")
_PICTURE = Kind(
    "a path images/NAME.png or images/NAME.json",
    lambda value: isinstance(value, str) and bool(_SHOWN.fullmatch(value)),
)

STAMPS: Schema = {"audit": kinds.digest(), DIGEST: kinds.digest()}
"""What every row carries on disk: the identity of its audit, which is the digest of config.json, and its own digest."""


@dataclass(frozen=True, order=True)
class MethodId:
    """An attack as it ran.

    Args:
        spec: its name and parameters.
        adaptive: whether the attacker knew the defense.

    Example:
        >>> method = MethodId("idlg:iterations=300", adaptive=True)
        >>> method.name, method.title
        ('idlg', 'idlg:iterations=300 (adaptive)')
    """

    spec: str
    adaptive: bool = False

    @property
    def name(self) -> str:
        """The name without parameters."""
        return self.spec.partition(":")[0]

    @property
    def title(self) -> str:
        """The method as reports show it."""
        return f"{self.spec} (adaptive)" if self.adaptive else self.spec


def _kinds_of(metrics: Sequence[Metric]) -> dict[str, Kind]:
    """For each metric, a number in its range."""
    ranges = {metric: kinds.number(metric.low, metric.high) for metric in metrics}
    return {metric.name: kinds.optional(kind) if metric.optional else kind for metric, kind in ranges.items()}


def _compared(metrics: Sequence[Metric]) -> Kind:
    return kinds.optional(kinds.record(_kinds_of([metric for metric in metrics if metric.compares])))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a file; each field is stored under its name.

    Example:
        >>> row = MatchRow(
        ...     asked="top-k",
        ...     found="top-k:keep=0.1",
        ...     kind="power",
        ...     target=0.5,
        ...     tolerance=0.05,
        ...     cost=0.48,
        ...     tries=4,
        ...     reason=None,
        ... )
        >>> MatchRow.from_json(row.to_json()) == row, row.key
        (True, ('top-k',))
    """

    identity: ClassVar[tuple[str, ...]]
    """The fields whose values together identify a row: no two rows of a file agree in all of them."""

    @classmethod
    def schema(cls, metrics: Sequence[Metric] = ()) -> dict[str, Kind]:
        """The kind of every key except the stamps; `metrics` are those of the audit."""
        declared = {one.name: one.metadata["kind"] for one in dataclasses.fields(cls) if one.metadata}
        return {name: kind if isinstance(kind, Kind) else kind(metrics) for name, kind in declared.items()}

    @property
    def key(self) -> tuple[Any, ...]:
        """The values of the fields in `identity`."""
        return tuple(getattr(self, name) for name in self.identity)

    def to_json(self) -> Json:
        """The row as it is stored in its line, without the stamps."""
        return with_lists(vars(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The row that `to_json` wrote, after it was checked against the schema; the stamps are ignored."""
        return cls(**with_tuples({one.name: values[one.name] for one in dataclasses.fields(cls)}))


@dataclass(frozen=True, kw_only=True)
class ResultRow(Row):
    """One attack on one victim under one defense. The blind guess is an attack without a defense.

    On disk every score is stored under its metric's name, and is null if the metric could not be computed.

    Args:
        scores: the scores by metric.
        trained_on: the scores against what the client really used, if the defense changed that.
        label_correct: the share of labels that the attacker got right.
        leak_rule: the rule of the modality by which the victim has leaked; None if it has not.
        power: how much of the update the defense changed.
        bound_mse: the least mean squared error of any attacker on smoothed inputs; None: no bound is known.
        loss: the attacker's own loss at the end of its search; `loss_start` is that at its beginning, `loss_late` that
            after nine tenths of it, `loss_restarts` that at the end of each restart.
        image: path of the reconstruction's picture in the folder, or of its text if the modality is written, and
            `image_digest` the digest of that file; `original_digest` is that of the victim's own, in the rows of the
            blind guess.
    """

    identity = ("defense_spec", "attack_spec", "adaptive", "victim")

    defense: str | None = _field(kinds.optional(kinds.text()))
    defense_params: Mapping[str, Any] = _field(kinds.PARAMETERS)
    defense_spec: str | None = _field(kinds.optional(kinds.text()))
    attack: str = _field(kinds.text())
    attack_params: Mapping[str, Any] = _field(kinds.PARAMETERS)
    attack_spec: str = _field(kinds.text())
    adaptive: bool = _field(kinds.FLAG)
    server: str = _field(kinds.choice("passive", "active"))
    dataset: str = _field(kinds.text())
    model: str = _field(kinds.text())
    seed: int = _field(kinds.integer(0, 2**63 - 1))
    victim: int = _field(kinds.integer(0, kinds.MAX_ITEMS))
    batch_size: int = _field(kinds.integer(1, kinds.MAX_ITEMS))
    aggregated: int = _field(kinds.integer(1, kinds.MAX_ITEMS))
    scores: Mapping[str, float | None]
    label_correct: float | None = _field(kinds.optional(kinds.SHARE))
    leaked: bool = _field(kinds.FLAG)
    leak_rule: str | None = _field(kinds.optional(kinds.text(100)))
    power: float | None = _field(kinds.optional(kinds.AMOUNT))
    bound_mse: float | None = _field(kinds.optional(kinds.AMOUNT))
    trained_on: Mapping[str, float | None] | None = _field(_compared)
    loss: float | None = _field(kinds.optional(kinds.ANY_NUMBER))
    loss_start: float | None = _field(kinds.optional(kinds.ANY_NUMBER))
    loss_late: float | None = _field(kinds.optional(kinds.ANY_NUMBER))
    loss_restarts: tuple[float, ...] | None = _field(kinds.optional(kinds.list_of(kinds.ANY_NUMBER, 100_000)))
    iterations: int = _field(kinds.integer(0))
    seconds: float | None = _field(kinds.optional(kinds.AMOUNT))
    image: str | None = _field(kinds.optional(_PICTURE))
    image_digest: str | None = _field(kinds.optional(kinds.digest()))
    original_digest: str | None = _field(kinds.optional(kinds.digest()))

    @property
    def method(self) -> MethodId:
        """The attack."""
        return MethodId(self.attack_spec, self.adaptive)

    @classmethod
    def schema(cls, metrics: Sequence[Metric] = ()) -> dict[str, Kind]:
        """The kinds of the fields, and for each metric a number in its range."""
        own, scores = super().schema(metrics), _kinds_of(metrics)
        if taken := scores.keys() & {*own, *STAMPS}:
            raise ParameterError(f"metric {min(taken)!r}: expected a name that is not a key of a row; choose another")
        return {**own, **scores}

    def to_json(self) -> Json:
        """The row, with each score under its metric's name."""
        values = super().to_json()
        scores = values.pop("scores")
        return {**values, **scores}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The row, with its scores gathered: every key that is not a field or a stamp is a score."""
        others = {*cls.__dataclass_fields__, *STAMPS}
        return super().from_json({**values, "scores": {k: value for k, value in values.items() if k not in others}})


@dataclass(frozen=True, kw_only=True)
class IdentificationRow(Row):
    """How well an attacker tells which of some candidates a client trained on, under one defense.

    In every game one example of a client's batch is among the candidates.

    Args:
        candidates: how many candidates there were in a game.
        games: how many games were played.
        named: games in which the client's example had the highest score.
        named_low: the lower end of the 95 % interval of that share, and `named_high` its upper end.
        auc: how often the client's example scores higher than another candidate, with its interval.
        tpr: the share of games in which it scores higher than all but 1 % of the others, with its interval.
        bits: a lower bound on what an update tells about which candidate it was.
        seconds: wall time of the attacker for all games.
    """

    identity = ("defense_spec", "adaptive")

    defense: str = _field(kinds.text())
    defense_params: Mapping[str, Any] = _field(kinds.PARAMETERS)
    defense_spec: str = _field(kinds.text())
    attack_spec: str = _field(kinds.text())
    adaptive: bool = _field(kinds.FLAG)
    candidates: int = _field(kinds.integer(2, kinds.MAX_ITEMS))
    games: int = _field(kinds.integer(1, kinds.MAX_ITEMS))
    named: int = _field(kinds.integer(0, kinds.MAX_ITEMS))
    named_low: float = _field(kinds.SHARE)
    named_high: float = _field(kinds.SHARE)
    auc: float = _field(kinds.SHARE)
    auc_low: float | None = _field(kinds.optional(kinds.SHARE))
    auc_high: float | None = _field(kinds.optional(kinds.SHARE))
    tpr: float = _field(kinds.SHARE)
    tpr_low: float | None = _field(kinds.optional(kinds.SHARE))
    tpr_high: float | None = _field(kinds.optional(kinds.SHARE))
    bits: float = _field(kinds.AMOUNT)
    bits_low: float = _field(kinds.AMOUNT)
    seconds: float | None = _field(kinds.optional(kinds.AMOUNT))

    @property
    def share(self) -> float:
        """The share of games in which the client's example was named."""
        return self.named / self.games

    @property
    def chance(self) -> float:
        """The share that a guess would name."""
        return 1 / self.candidates


@dataclass(frozen=True, kw_only=True)
class UtilityRow(Row):
    """What training under one defense costs; `diverged` is the round in which it diverged, None if it did not."""

    identity = ("defense_spec",)

    defense: str = _field(kinds.text())
    defense_params: Mapping[str, Any] = _field(kinds.PARAMETERS)
    defense_spec: str = _field(kinds.text())
    accuracy: float = _field(kinds.SHARE)
    baseline_accuracy: float = _field(kinds.SHARE)
    pmm: float | None = _field(kinds.optional(kinds.AMOUNT))
    loss: float | None = _field(kinds.optional(kinds.ANY_NUMBER))
    round_seconds: float | None = _field(kinds.optional(kinds.AMOUNT))
    upload_bytes: float | None = _field(kinds.optional(kinds.AMOUNT))
    download_bytes: float | None = _field(kinds.optional(kinds.AMOUNT))
    history: tuple[float, ...] = _field(kinds.list_of(kinds.SHARE, 100_000))
    diverged: int | None = _field(kinds.optional(kinds.integer(0)))
    privacy: str | None = _field(kinds.optional(kinds.text()))
    epsilon: float | None = _field(kinds.optional(kinds.AMOUNT))


@dataclass(frozen=True, kw_only=True)
class MatchRow(Row):
    """The strength at which a defense costs the price, or the reason why there is none (`found` is None).

    `target` and `tolerance` are the price, `cost` is the cost that was reached.
    """

    identity = ("asked",)

    asked: str = _field(kinds.text())
    found: str | None = _field(kinds.optional(kinds.text()))
    kind: str = _field(kinds.choice("accuracy", "power", "bytes", "named"))
    target: float = _field(kinds.AMOUNT)
    tolerance: float = _field(kinds.AMOUNT)
    cost: float | None = _field(kinds.optional(kinds.ANY_NUMBER))
    tries: int = _field(kinds.integer(0, 10_000))
    reason: str | None = _field(kinds.optional(kinds.text()))
