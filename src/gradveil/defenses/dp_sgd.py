"""DP-SGD: clip every example's gradient, add noise, and account for it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from gradveil.core.parameters import number
from gradveil.core.randomness.discrete import grid_step
from gradveil.defenses._clipping import clipped_sum
from gradveil.defenses.accounting import PrivacySpent, SampledGaussian, privacy_spent
from gradveil.defenses.base import DEFENSES, StepDefense, check_result
from gradveil.defenses.knowledge import Knowledge, clip_to, each_round
from gradveil.task import Gradients, Task
from gradveil.update import ClientRound, LocalSteps, sizes_of, step_weights


@DEFENSES.register("dp-sgd")
@dataclass(frozen=True, repr=False)
class DPSGD(StepDefense):
    r"""Clip the gradient of every example to norm `clip`, sum, add normal noise, divide by the batch size.

    .. math:: \tilde g = \frac1B \Big( \sum_{j=1}^B g_j \min(1, clip / |g_j|) + N(0, (noise\_multiplier \cdot clip)^2 I)
              \Big)

    The norm is taken over all layers of one example together. Under FedAvg it acts in every local step.

    Its reconstruction bound is that of its noise without the clipping, which holds because clipping only lowers tr J_F.
    Where an example's gradient g is longer than `clip`, the derivative of the clipping is :math:`(clip / |g|) (I - g
    g^T / |g|^2)`, whose norm is at most 1, and elsewhere it is the identity; so no example's Jacobian grows, and the
    trace of a batch is the sum over its examples. Where much is clipped, the true bound is higher.

    **In use** (without a generator) the clipped gradients are truncated to a grid, which never makes one longer, and
    summed exactly; the noise is a discrete Gaussian on that grid from a cryptographic stream. The guarantee below is
    that of this mechanism, floating point included; the argument is in `core.randomness.discrete`. With a torch
    generator the noise is added in floating point, and all of it can be computed from a part: the epsilon is then only
    what the simulated mechanism would have.

    `privacy_spent` gives the (epsilon, delta) towards a server that sees every update of a client, per example and only
    for the client's own data. gradveil's training draws batches of a *fixed* size without replacement, and that is what
    is accounted for (neighbours differ in one example that is replaced; see `accounting.privacy_spent`). The result is
    an upper bound, and larger than the figures usually published, which assume Poisson sampling. Sampling of clients is
    not counted as protection, since the server does it. A batch-norm layer in train mode mixes the examples, so there
    is no per-example gradient; `Task` refuses it.

    Args:
        clip: largest norm of one example's gradient.
        noise_multiplier: standard deviation of the noise on the sum, in units of `clip`; with 0 it only clips, and
            epsilon is infinite.
        delta: delta of the guarantee that is reported.

    References:
        Abadi et al., Deep Learning with Differential Privacy, CCS 2016.

    Example:
        >>> import torch
        >>> import gradveil
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> task = gradveil.Task(model, input_shape=(1, 2, 2), classes=3)
        >>> images, labels = torch.rand(8, 1, 2, 2), torch.zeros(8, dtype=torch.long)
        >>> update = DPSGD(clip=0.1, noise_multiplier=0.0).share(task, images, labels)
        >>> bool(torch.cat([value.flatten() for value in update.values()]).norm() <= 0.1)
        True
    """

    paper = "Abadi et al., CCS 2016"
    has_adaptive_attacker, explained_by_noise = True, True

    clip: float = number(1.0, above=0)
    noise_multiplier: float = number(1.0, low=0, strength=(1e-3, 100.0), log=True)
    delta: float = number(1e-5, above=0, below=1)

    def step_gradients(self, client: ClientRound) -> Gradients:
        """The noisy mean of the clipped gradients."""
        std = self.noise_multiplier * self.clip
        grid = grid_step(std) if client.source.secure and std else None
        total = clipped_sum(client.task, client.inputs, client.targets, self.clip, grid=grid)
        result = {
            name: (client.source.add_normal(value, std) / len(client.inputs)).to(client.task.dtype)
            for name, value in total.items()
        }
        check_result(self, result)
        return result

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """Clip the candidate's gradient too (exact for one image), and weigh a prior by the noise."""
        std = self.noise_multiplier * self.clip  # on a sum of gradients; a step divides it by its number of examples
        steps = zip(step_weights(local, batch_size), sizes_of(local, batch_size), strict=True)
        return {
            "prior": Knowledge(
                "clips candidates too, weighs a prior by the noise",
                expect=None if local else each_round(clip_to(self.clip)),
                variance=sum((std * weight / count) ** 2 for weight, count in steps),
            )
        }

    def noise_variance(self, *, batch_size: int = 1) -> float | None:
        """The variance of the noise on the mean of a batch; None if it only clips."""
        return (self.noise_multiplier * self.clip / batch_size) ** 2 or None

    def privacy_spent(
        self, *, rounds: int, batch_size: int, examples: int, local: LocalSteps | None = None
    ) -> PrivacySpent:
        """The (epsilon, delta) of one client's examples; each local epoch uses every drawn example once."""
        mechanism = self.sampled_gaussian(rounds=rounds, batch_size=batch_size, examples=examples, local=local)
        return privacy_spent(delta=self.delta, **dataclasses.asdict(mechanism))

    def sampled_gaussian(
        self, *, rounds: int, batch_size: int, examples: int, local: LocalSteps | None = None
    ) -> SampledGaussian:
        """Fixed-size batches; each local epoch is one more noised gradient that an example takes part in."""
        return SampledGaussian(
            noise_multiplier=self.noise_multiplier,
            rounds=rounds,
            batch_size=batch_size,
            examples=examples,
            sampling="fixed",
            passes=1 if local is None else local.epochs,
        )
