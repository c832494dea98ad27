"""No defense: the yardstick."""

from dataclasses import dataclass

from torch import Tensor

from gradveil.defenses.base import DEFENSES, Perturbation
from gradveil.randomness import Draws


@DEFENSES.register("none")
@dataclass(repr=False)
class NoDefense(Perturbation):
    """Share the update as it is; every figure of a defense is read against this one.

    Example:
        >>> import torch
        >>> NoDefense().perturb({"w": torch.tensor([1.0, 2.0])})["w"].tolist()
        [1.0, 2.0]
    """

    paper = "-"

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """A copy."""
        return rows.clone()
