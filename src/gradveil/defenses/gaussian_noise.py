"""Additive normal noise."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradveil.core.parameters import number
from gradveil.core.randomness import Draws
from gradveil.defenses.base import DEFENSES, Perturbation
from gradveil.defenses.knowledge import Knowledge
from gradveil.task import Task
from gradveil.update import LocalSteps


@DEFENSES.register("gaussian-noise")
@dataclass(frozen=True, repr=False)
class GaussianNoise(Perturbation):
    r"""Add independent normal noise to every coordinate.

    .. math:: \tilde g_i = g_i + N(0, std^2)

    Nothing is clipped, so this alone gives no (epsilon, delta).

    Args:
        std: standard deviation of the noise; 0 is the identity.

    References:
        Zhu et al., Deep Leakage from Gradients, NeurIPS 2019 (as a defense against inversion).

    Example:
        >>> import torch
        >>> noisy = GaussianNoise(std=0.1).perturb({"w": torch.zeros(10_000)})["w"]
        >>> abs(float(noisy.std()) - 0.1) < 0.01
        True
    """

    paper = "Zhu et al., NeurIPS 2019"
    has_adaptive_attacker, explained_by_noise = True, True

    std: float = number(0.01, low=0, strength=(1e-4, 10.0), log=True)

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Add the noise."""
        return draws.add_normal(rows, self.std)

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """Squared distances are the likelihood already; the noise level says how far to trust an image prior."""
        return {"prior": Knowledge("weighs a prior by the noise", variance=self.std**2)}

    def noise_variance(self, *, batch_size: int = 1) -> float | None:
        """The variance, the same for every value."""
        return self.std**2 or None
