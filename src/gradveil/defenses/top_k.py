"""Top-k: share only the largest values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradveil.core.parameters import number
from gradveil.core.randomness import Draws
from gradveil.defenses._selection import keep_ranks, share_of
from gradveil.defenses.base import DEFENSES, Perturbation
from gradveil.defenses.knowledge import Knowledge, read_arrived, read_ranked
from gradveil.task import Task
from gradveil.update import LocalSteps


@DEFENSES.register("top-k")
@dataclass(frozen=True, repr=False)
class TopK(Perturbation):
    r"""Share the largest values of each layer and zero the rest (gradient compression).

    Of a layer's n values the ``ceil(keep n)`` largest in magnitude are shared; ties go to the earlier position.

    Args:
        keep: share of values that are sent; 1 is the identity.

    References:
        Lin et al., Deep Gradient Compression, ICLR 2018.

    Example:
        >>> import torch
        >>> TopK(keep=0.5).perturb({"w": torch.tensor([1.0, -4.0, 2.0, 0.5])})["w"].tolist()
        [0.0, -4.0, 2.0, 0.0]
    """

    paper = "Lin et al., ICLR 2018"
    has_adaptive_attacker = True
    adds_noise, keeps_zeros = False, True

    keep: float = number(0.2, above=0, high=1, strength=(1.0, 1e-4), log=True)

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Keep the largest values."""
        kept = share_of(self.keep, rows.shape[1], math.ceil)
        return keep_ranks(rows, 0, kept)

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """What arrived is the gradient; what did not is smaller than everything that did."""
        return {
            "ordered": Knowledge(
                "matches what arrived; the rest must be smaller",
                read=read_ranked(withheld_top=False),
                sends_values=True,
            ),
            "arrived": Knowledge("matches what arrived", read=read_arrived, sends_values=True),
        }
