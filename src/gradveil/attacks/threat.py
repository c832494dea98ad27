"""The threat model: what an attacker may know and do."""

from dataclasses import dataclass, replace

from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import ParameterError
from gradveil.defenses import Defense
from gradveil.defenses.base import Batch
from gradveil.update import LocalSteps

LOCAL_KNOWN = ("full", "part", "none")
"""How much an attacker may know about the clients' local steps, see `ThreatModel`."""


@dataclass(frozen=True)
class ThreatModel:
    """What the attacker knows besides the model and the updates, and what it may do.

    Args:
        labels: ``"infer"``: the attacker must find the labels; ``"known"``: they are given in `known_labels`.
        batch_size: examples behind each update.
        adaptive: True if the attacker knows the defense and its parameters, but not its random draws; the name of a
            form (see `Defense.adapt`) selects that form instead of the strongest.
        defense: the defense in use.
        local: the clients' local steps (FedAvg); None: each update is a single gradient.
        server: ``"passive"``: an honest but curious server; ``"active"``: it may change the model.
        known_labels: ``[victims, batch_size, ...]``, in the form the task takes; only with ``labels="known"``.
        statistics: batch-norm buffers after the victims' step, ``[victims, ...]`` by name, if the attacker sees them
            (they are sent in ``update.meta.buffers``); None: it does not.
        rounds: how many rounds of each victim, on the same data, the attacker saw (see `gradveil.Rounds`).
        public: inputs and labels that anybody may have, none of them a victim's, which the attacker may learn from;
            None: there are none.
        public_attributes: ``[N]``, whole numbers from 0: a property of each public example that is not its label, for
            an attack that infers it; None: it is not known.
        known_members: inputs ``[K, ...]``, labels ``[K, ...]`` and a mask ``[victims, K]``, True for examples that the
            attacker knows to be in a victim's data; of the others it knows that they are not. None: it knows of none.
        local_known: what the attacker knows of `local`: ``"full"``: everything but the order of the examples;
            ``"part"``: epochs and learning rate, but neither batch size nor momentum, so that it assumes steps over all
            examples without momentum; ``"none"``: it takes the update for a single gradient.

    Example:
        >>> import torch
        >>> ThreatModel(labels="known", known_labels=torch.tensor([[7], [2]])).batch_size
        1
    """

    labels: str = "infer"
    batch_size: int = 1
    adaptive: bool | str = False
    defense: Defense | None = None
    local: LocalSteps | None = None
    server: str = "passive"
    known_labels: Tensor | None = None
    statistics: dict[str, Tensor] | None = None
    rounds: int = 1
    public: Batch | None = None
    public_attributes: Tensor | None = None
    known_members: tuple[Tensor, Tensor, Tensor] | None = None
    local_known: str = "full"

    def __post_init__(self) -> None:
        checks.choice("ThreatModel", "labels", self.labels, ["infer", "known"])
        checks.choice("ThreatModel", "local_known", self.local_known, LOCAL_KNOWN)
        checks.choice("ThreatModel", "server", self.server, ["passive", "active"])
        checks.integer("ThreatModel", "batch_size", self.batch_size, low=1)
        checks.integer("ThreatModel", "rounds", self.rounds, low=1)
        if not isinstance(self.adaptive, str):
            checks.flag("ThreatModel", "adaptive", self.adaptive)
        if (self.labels == "known") != (self.known_labels is not None):
            raise ParameterError(
                f"ThreatModel: known_labels must be given exactly when labels='known', got labels={self.labels!r} "
                f"and {'no' if self.known_labels is None else 'some'} known_labels"
            )

    def as_known(self) -> "ThreatModel":
        """The threat model as the attacker has it: with the local steps that it assumes.

        >>> real = LocalSteps(epochs=2, batch_size=4, lr=0.1, momentum=0.9)
        >>> ThreatModel(local=real, local_known="part").as_known().local
        LocalSteps(epochs=2, batch_size=None, lr=0.1, momentum=0.0)
        """
        if self.local is None or self.local_known == "full":
            return self
        assumed = LocalSteps(self.local.epochs, lr=self.local.lr) if self.local_known == "part" else None
        return replace(self, local=assumed, local_known="full")
