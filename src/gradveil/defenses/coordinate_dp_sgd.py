"""DP-SGD as the optimal-defenses paper has it: coordinate clipping and uniform noise. It is not accounted for."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradveil.core.parameters import number
from gradveil.core.randomness import Draws
from gradveil.defenses.base import DEFENSES, Perturbation
from gradveil.defenses.knowledge import Knowledge, each_round
from gradveil.task import Gradients, Task
from gradveil.update import LocalSteps


@DEFENSES.register("coordinate-dp-sgd")
@dataclass(frozen=True, repr=False)
class CoordinateDpSgd(Perturbation):
    r"""Clip each coordinate of the gradient and add normal noise; gives **no (epsilon, delta)**.

    .. math:: \tilde g_i = \max(-clip, \min(clip, g_i)) + N(0, std^2)

    This is what ``optimal-dp-sgd`` is to be compared with, since both clip in the same way. ``dp-sgd`` is the real one.

    What is clipped is the mean gradient of the batch. Replacing one example can move each of its d coordinates from
    -clip to clip, so the only bound on an example's influence is :math:`2 \, clip \sqrt d` in L2 norm, however large
    the batch is: for the 119,530 parameters of mnist-cnn, clip 1 and std .1, a noise multiplier of 0.00014, for which
    no useful epsilon exists. So `privacy_spent` answers None. (Clipping every *example* per coordinate would give
    :math:`2 \, clip \sqrt d / B` for a batch of B, which is no better than ``dp-sgd`` at a clip of
    :math:`clip \sqrt d`.)

    It has a reconstruction bound: a coordinate that is clipped no longer reacts to the input, and the level of the
    noise does not depend on the data.

    Under FedAvg it acts once, on the finished update.

    Args:
        clip: the largest magnitude of a coordinate.
        std: standard deviation of the noise; with 0 it only clips.

    References:
        Chen, Gürsoy & Lei, Optimal Defenses Against Gradient Reconstruction Attacks, 2024, equations 9 and 10 with
        Sigma = std^2 I. **Correction**: the paper calls this DP-SGD; it has no (epsilon, delta), see above.

    Example:
        >>> import torch
        >>> CoordinateDpSgd(clip=1.0, std=0.0).perturb({"w": torch.tensor([0.5, -3.0])})["w"].tolist()
        [0.5, -1.0]
    """

    paper = "Chen et al., Optimal Defenses, 2024"
    caveat = (
        "despite its name there is no (epsilon, delta): it clips coordinates of the batch's gradient, not examples."
    )
    has_adaptive_attacker, explained_by_noise = True, True

    clip: float = number(1.0, above=0)
    std: float = number(0.1, low=0, strength=(1e-4, 10.0), log=True)

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Clip, then add the noise."""
        return draws.add_normal(rows.clamp(-self.clip, self.clip), self.std)

    def clipped(self, gradients: Gradients) -> Gradients:
        """The gradients with each coordinate clipped to [-clip, clip]."""
        return {name: value.clamp(-self.clip, self.clip) for name, value in gradients.items()}

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """Clip candidates in the same way, and weigh a prior by the noise."""
        return {
            "prior": Knowledge(
                "clips candidates too, weighs a prior by the noise",
                expect=each_round(self.clipped),
                variance=self.std**2,
            )
        }

    def noise_variance(self, *, batch_size: int = 1) -> float | None:
        """The variance, the same for every value; None if it only clips."""
        return self.std**2 or None
