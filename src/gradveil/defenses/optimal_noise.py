"""Optimal gradient noise: more on coordinates that leak much and contribute little to training."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradveil.core.parameters import choice, flag, integer, number, state
from gradveil.core.randomness import Source
from gradveil.defenses._optimal import FORMS, SCALES, Measured, SensitivityNoise, add_noise, optimal_variance
from gradveil.defenses.base import DEFENSES
from gradveil.task import Gradients


@DEFENSES.register("optimal-noise")
@dataclass(frozen=True, repr=False)
class OptimalNoise(SensitivityNoise):
    r"""Add normal noise whose variance is proportional to sensitivity over gradient.

    .. math:: \tilde g_i = g_i + N(0, \Sigma_{ii}), \quad
        \Sigma_{ii} = \lambda \, |\partial g_i / \partial x| \, / \max(|g_i|, 10^{-6})

    In the global form :math:`\Sigma_{ii} = \lambda \sqrt{E s_i^2 / E g_i^2}` over a public set, fixed in `prepare`.
    Ratios are first capped at `cap` times their median; then lambda is chosen so that the mean variance is ``std^2``,
    the power of ``gaussian-noise`` with the same std. With ``scale_by="frobenius"`` the covariance has the Frobenius
    norm of that Gaussian noise instead, :math:`|\Sigma|_F = \sqrt{\sum_i \Sigma_{ii}^2} = std^2 \sqrt d`, by which
    the paper measures noise; the power is then smaller, because a few large variances decide the norm.

    Among all diagonal covariances it minimises tr J_F, and so maximises the reconstruction bound, **at equal U2**, the
    variance of the loss after a step. At equal power or equal :math:`|\Sigma|_F` it does not: a few coordinates with
    tiny gradients take most of the power, and tr J_F is larger than under uniform noise. All three comparisons are in
    experiments/optimal_defenses.

    The local form's noise level depends on the data, so the level itself leaks and there is no reconstruction bound;
    the global form has one. A coordinate that reacts to the input in no public example (behind a ReLU that is off in
    all of them) gets no noise; if it reacts in one of a client's examples, the bound is 0.

    Under FedAvg it acts in every local step.

    Args:
        std: standard deviation of the Gaussian noise that is as strong, by the measure `scale_by`; 0 is the identity.
        directions: number of random input directions that estimate the sensitivity; its relative error is
            sqrt(2 / directions).
        form: ``"local"``, by the client's own batch, or ``"global"``, by a public set.
        cap: largest ratio, as a multiple of the median ratio; None: no limit.
        every: number of rounds for which a client reuses its sensitivity, to save time (local form only).
        layerwise: whether to use one variance per layer, the best such choice: less exact, but next to no extra draws.
        scale_by: what `std` fixes: ``"power"``, the mean variance, or ``"frobenius"``, the norm of the covariance.

    References:
        Chen, Gürsoy & Lei, Optimal Defenses Against Gradient Reconstruction Attacks, 2024. **Correction**: its
        Algorithm 1 prints s_i^2; theorem 2 and equation 8 derive s_i, which is used here. **Our choice**: the upper
        limit, which the paper requires but does not state, is relative to the median.

    Example:
        >>> import torch
        >>> from gradveil import Task, models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = Task(model, input_shape=(1, 4, 4), classes=3)
        >>> batch = torch.rand(2, 1, 4, 4, generator=torch.manual_seed(0)), torch.tensor([0, 2])
        >>> clean, sent = task.gradients(*batch), OptimalNoise(std=0.1).share(task, *batch)
        >>> noise = torch.cat([(sent[name] - clean[name]).flatten() for name in sent])
        >>> bool(0.07 < noise.square().mean().sqrt() < 0.13)
        True
    """

    paper = "Chen et al., Optimal Defenses, 2024"

    std: float = number(0.1, low=0, strength=(1e-4, 10.0), log=True)
    directions: int = integer(10, low=1)
    form: str = choice("local", FORMS)
    cap: float | None = number(100.0, low=1, optional=True)
    every: int = integer(1, low=1)
    layerwise: bool = flag(False)
    scale_by: str = choice("power", SCALES, quiet=True)
    measured: Measured | None = state()

    @property
    def idle(self) -> bool:
        """Whether there is no noise to add."""
        return self.std == 0

    def variance(self, sensitivity: Mapping[str, Tensor], weight: Mapping[str, Tensor]) -> Gradients:
        """The noise variance of each coordinate, from its s^2 and g^2."""
        return optimal_variance(
            sensitivity, weight, std=self.std, scale_by=self.scale_by, cap=self.cap, layerwise=self.layerwise
        )

    def defend(
        self, gradients: Gradients, sensitivity: Mapping[str, Tensor], weight: Mapping[str, Tensor], source: Source
    ) -> Gradients:
        """Add the noise."""
        return self.checked(add_noise(gradients, self.variance(sensitivity, weight), self.std, source))

    def noise_variance(self, *, batch_size: int = 1) -> Mapping[str, Tensor] | None:
        """The variance of the prepared global form."""
        return None if self.measured is None or self.idle else self.variance(*self.measured)
