"""Optimal DP-SGD: coordinate clipping and optimal noise. It is not differentially private."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradveil.core.parameters import choice, flag, integer, number, state
from gradveil.core.randomness import Source
from gradveil.defenses._optimal import FORMS, Measured, SensitivityNoise, add_noise, optimal_variance
from gradveil.defenses.base import DEFENSES
from gradveil.task import Gradients


@DEFENSES.register("optimal-dp-sgd")
@dataclass(frozen=True, repr=False)
class OptimalDpSgd(SensitivityNoise):
    r"""Clip each coordinate and add optimal noise to those that were not clipped; has **no (epsilon, delta)**.

    .. math:: \tilde g_i = \max(-P, \min(P, g_i)) + N(0, \Sigma_{ii}), \quad
        \Sigma_{ii} = \lambda \, |\partial g_i / \partial x| \, / \max(|g_i|, 10^{-6}) \text{ where } |g_i| < P,
        \text{ else } 0

    The paper's name for it is misleading: clipping coordinates does not bound any example's influence, the noise level
    depends on the data, and clipped coordinates are sent without noise. None of the accounting of DP-SGD applies.

    The mean variance over the coordinates that were not clipped is ``std^2``; ratios are capped at `cap` as in
    ``optimal-noise``. In the global form the variance is :math:`\lambda \sqrt{E |\partial g_{P,i} / \partial x|^2 /
    E g_{P,i}^2}` over a public set and does not depend on the client: every coordinate gets its noise, clipped or not.
    The global form has a reconstruction bound, the local one does not.

    Under FedAvg it acts in every local step.

    Args:
        clip: P, the largest magnitude of a coordinate.
        std: square root of the mean variance; with 0 it only clips.
        directions: number of random input directions that estimate the sensitivity; its relative error is
            sqrt(2 / directions).
        form: ``"local"``, by the client's own batch, or ``"global"``, by a public set.
        cap: largest ratio, as a multiple of the median ratio; None: no limit.
        every: number of rounds for which a client reuses its sensitivity, to save time (local form only).
        layerwise: whether to use one variance per layer.

    References:
        Chen, Gürsoy & Lei, Optimal Defenses Against Gradient Reconstruction Attacks, 2024, theorem 3. **Correction**:
        it is not differentially private, see above.

    Example:
        >>> import torch
        >>> from gradveil import Task, models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = Task(model, input_shape=(1, 4, 4), classes=3)
        >>> batch = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
        >>> sent = OptimalDpSgd(clip=1e-4, std=0.0).share(task, *batch)
        >>> bool(max(value.abs().max() for value in sent.values()) <= 1e-4)
        True
    """

    paper = "Chen et al., Optimal Defenses, 2024"
    caveat = (
        "despite its name it is not differentially private, so there is no (epsilon, delta): it clips coordinates, not "
        "examples, and its noise depends on the data."
    )

    clip: float = number(1.0, above=0)
    std: float = number(0.1, low=0, strength=(1e-4, 10.0), log=True)
    directions: int = integer(10, low=1)
    form: str = choice("local", FORMS)
    cap: float | None = number(100.0, low=1, optional=True)
    every: int = integer(1, low=1)
    layerwise: bool = flag(False)
    measured: Measured | None = state()

    @property
    def idle(self) -> bool:
        """Never, because it always clips."""
        return False

    def clipped(self, gradients: Gradients) -> Gradients:
        """The gradients with each coordinate clipped to [-clip, clip]."""
        return {name: value.clamp(-self.clip, self.clip) for name, value in gradients.items()}

    def defend(
        self, gradients: Gradients, sensitivity: Mapping[str, Tensor], weight: Mapping[str, Tensor], source: Source
    ) -> Gradients:
        """Clip the gradients, and add noise to the coordinates that were not clipped."""
        clipped = self.clipped(gradients)
        if self.std == 0:
            return clipped
        unclipped = None
        if self.form == "local":
            unclipped = {name: value.abs() < self.clip for name, value in gradients.items()}
        return self.checked(add_noise(clipped, self._variance(sensitivity, weight, unclipped), self.std, source))

    def noise_variance(self, *, batch_size: int = 1) -> Mapping[str, Tensor] | None:
        """The variance of the prepared global form."""
        return None if self.measured is None or self.std == 0 else self._variance(*self.measured, None)

    def variance(self, sensitivity: Mapping[str, Tensor], weight: Mapping[str, Tensor]) -> Gradients:
        """The noise variance of each coordinate that was not clipped, from its s^2 and g^2."""
        return self._variance(sensitivity, weight, None)

    def _variance(
        self, sensitivity: Mapping[str, Tensor], weight: Mapping[str, Tensor], where: Gradients | None
    ) -> Gradients:
        return optimal_variance(sensitivity, weight, std=self.std, cap=self.cap, layerwise=self.layerwise, where=where)
