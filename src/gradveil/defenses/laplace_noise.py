"""Additive Laplace noise."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradveil.core.parameters import number
from gradveil.core.randomness import Draws
from gradveil.defenses.base import DEFENSES, Perturbation
from gradveil.defenses.knowledge import NOTHING_TO_KNOW, Evidence, Knowledge
from gradveil.task import Gradients, Task
from gradveil.update import LocalSteps


@DEFENSES.register("laplace-noise")
@dataclass(frozen=True, repr=False)
class LaplaceNoise(Perturbation):
    r"""Add independent Laplace noise to every coordinate.

    .. math:: \tilde g_i = g_i + Laplace(0, std / \sqrt 2)

    A Laplace variable of scale b has variance 2 b^2, so `std` is its standard deviation.

    Args:
        std: standard deviation of the noise; 0 is the identity.

    References:
        Zhu et al., Deep Leakage from Gradients, NeurIPS 2019 (as a defense against inversion).

    Example:
        >>> import torch
        >>> noisy = LaplaceNoise(std=0.1).perturb({"w": torch.zeros(10_000)})["w"]
        >>> abs(float(noisy.std()) - 0.1) < 0.01
        True
    """

    paper = "Zhu et al., NeurIPS 2019"
    has_adaptive_attacker, explained_by_noise = True, True

    std: float = number(0.01, low=0, strength=(1e-4, 10.0), log=True)

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Add the noise."""
        return draws.add_laplace(rows, self.std)

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        r"""The noise level says how far to trust an image prior, as with normal noise.

        "absolute" also uses the likelihood of Laplace noise, which is absolute values, with the kink rounded off:

        .. math:: \frac{s \, r^2}{\sqrt{r^2 + (s / 5)^2}} \approx s |r|, \quad s = E |r| = std / \sqrt 2

        It is better than "prior" for attacks that add up squares (by about 1 dB on LeNet), and worse for those that
        compare directions, because weights that change with the candidate spoil a cosine.
        """
        if self.std == 0:
            return NOTHING_TO_KNOW
        size = self.std / 2**0.5

        def read(expected: Gradients, update: Gradients) -> Evidence:
            misfit = {name: expected[name] - value for name, value in update.items()}
            return Evidence(update, {n: size * (r.square() + (size / 5) ** 2).rsqrt() for n, r in misfit.items()})

        # The negative log-likelihood is |r| / s here, and r^2 / (2 variance) for normal noise. The cost s |r| is s^2
        # times the first, and r^2 is 2 variance times the second, so the equivalent variance is s^2 / 2.
        absolute = Knowledge("adds up absolute values, weighs a prior", read=read, variance=size**2 / 2)
        return {
            "prior": Knowledge("weighs a prior by the noise", variance=self.std**2),
            "absolute": absolute,
        }
