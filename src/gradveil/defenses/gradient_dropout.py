"""Gradient Dropout: replace a random share of the coordinates by noise."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil import checks
from gradveil.defenses.base import DEFENSES, Perturbation
from gradveil.randomness import Draws


@DEFENSES.register("gradient-dropout")
@dataclass(repr=False)
class GradientDropout(Perturbation):
    r"""Share each coordinate with probability `keep`, scaled up, and a normal decoy otherwise.

    .. math:: \tilde g_i = g_i / keep \text{ with probability } keep, \text{ else } N(0, std^2)

    Unbiased: the expectation is g. The expected squared distance per coordinate is
    ``(1 - keep) / keep * mean(g^2) + (1 - keep) std^2`` (the paper's appendix has a slip, (1 - keep)^2).

    Args:
        keep: probability of sharing a coordinate; 1 is the identity.
        std: standard deviation of the decoys.

    References:
        Sotthiwat et al., Safeguarding Federated Learning from Data Reconstruction Attacks via Gradient Dropout.

    Example:
        >>> sent = GradientDropout(keep=0.5, std=0.0).perturb({"w": torch.ones(1000)})["w"]
        >>> sorted({abs(value) for value in sent.tolist()})
        [0.0, 2.0]
    """

    paper = "Sotthiwat et al., Gradient Dropout"

    keep: float = 0.8
    std: float = 5e-3

    def __post_init__(self) -> None:
        self.keep = checks.number(self.name, "keep", self.keep, above=0, high=1)
        self.std = checks.number(self.name, "std", self.std, low=0)

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Draw the mask and the decoys."""
        shared = draws.uniform(rows) < self.keep
        return torch.where(shared, rows / self.keep, self.std * draws.normal(rows))
