"""No defense: the baseline."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradveil.core.randomness import Draws
from gradveil.defenses.base import DEFENSES, Perturbation
from gradveil.defenses.knowledge import NOTHING_TO_KNOW, Knowledge
from gradveil.task import Task
from gradveil.update import LocalSteps


@DEFENSES.register("none")
@dataclass(frozen=True, repr=False)
class NoDefense(Perturbation):
    """Share the update unchanged; every figure of a defense is compared with this one.

    Example:
        >>> import torch
        >>> NoDefense().perturb({"w": torch.tensor([1.0, 2.0])})["w"].tolist()
        [1.0, 2.0]
    """

    paper = "-"
    has_adaptive_attacker, explained_by_noise = True, True
    adds_noise, keeps_zeros = False, True

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """A copy."""
        return rows.clone()

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """The update is the plain one."""
        return NOTHING_TO_KNOW
