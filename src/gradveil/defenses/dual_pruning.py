"""Dual Gradient Pruning: zero the largest and the smallest values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradveil.core.errors import ParameterError
from gradveil.core.parameters import Strength, number
from gradveil.core.randomness import Draws
from gradveil.defenses._selection import keep_ranks, share_of
from gradveil.defenses.base import DEFENSES, Perturbation
from gradveil.defenses.knowledge import Knowledge, read_arrived, read_ranked
from gradveil.task import Task
from gradveil.update import LocalSteps


@DEFENSES.register("dual-pruning")
@dataclass(frozen=True, repr=False)
class DualPruning(Perturbation):
    r"""Dual Gradient Pruning (DGP): zero the largest *and* the smallest values of each layer.

    Of a layer's n values, ordered by magnitude, the top ``ceil(k1 n)`` and the bottom ``floor(k2 n)`` are zeroed and
    the band between them is shared. The large values reveal the label, and removing them moves the attacker's target
    most; removing the small ones saves bytes and weakens active attacks. The paper combines it with error feedback:
    ``ErrorFeedback(DualPruning())``.

    Rounding up at the top is our choice (the paper does not say): even the largest of ten bias entries, which reveals
    the label, is never sent. Ties are broken by position, so the counts are exact. A layer of one value sends zero.

    What it does not stop: an attacker who compares only what arrived, which is the gradient to the bit, recovers single
    images almost as well as from an undefended update; and the sign of its row of weights still reveals the label
    (docs/findings.md).

    Args:
        k1: share of the largest values removed.
        k2: share of the smallest values removed. k1 = k2 = 0 is the identity.

    References:
        Xue et al., Revisiting Gradient Pruning: A Dual Realization for Defending against Gradient Attacks, AAAI 2024.

    Example:
        >>> import torch
        >>> DualPruning(k1=0.25, k2=0.25).perturb({"w": torch.tensor([1.0, -4.0, 2.0, 0.5])})["w"].tolist()
        [1.0, 0.0, 2.0, 0.0]
    """

    paper = "Xue et al., AAAI 2024"
    has_adaptive_attacker = True
    adds_noise, keeps_zeros = False, True

    k1: float = number(0.05, low=0)
    k2: float = number(0.75, low=0)

    def check(self) -> None:
        """Refuse shares that leave nothing to send."""
        if self.k1 + self.k2 >= 1:
            raise ParameterError(
                f"{self.name}: k1 + k2 must be below 1, got {self.k1:g} + {self.k2:g} = {self.k1 + self.k2:g}"
            )

    @property
    def strength(self) -> Strength:
        """The share dropped at the top, up to all that `k2` leaves."""
        return Strength("k1", 1e-4, 0.99 * (1 - self.k2), log=True)

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Keep the band between the largest and the smallest values."""
        values = rows.shape[1]
        top = share_of(self.k1, values, math.ceil)
        bottom = min(share_of(self.k2, values, math.floor), values - top)
        return keep_ranks(rows, top, values - bottom)

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """What arrived is the gradient; what did not is either larger or smaller than everything that did."""
        return {
            "arrived": Knowledge("matches what arrived", read=read_arrived, sends_values=True),
            "ordered": Knowledge(
                "matches what arrived; the rest must be larger or smaller than all of it",
                read=read_ranked(withheld_top=True),
                sends_values=True,
            ),
        }
