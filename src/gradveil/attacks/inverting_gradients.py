"""Inverting Gradients: match the direction of the gradient, with an image prior."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil import checks
from gradveil.attacks.base import ATTACKS, Attack, ThreatModel
from gradveil.attacks.engine import Objective, Progress, adam
from gradveil.errors import ThreatModelError
from gradveil.task import Task


@ATTACKS.register("inverting-gradients")
@dataclass(repr=False)
class InvertingGradients(Attack):
    r"""Find images whose gradient points where the shared one points, and that are smooth.

    .. math:: \min_{x \in [0, 1]} 1 - \frac{\langle \nabla L(x, y), u \rangle}{|\nabla L(x, y)| |u|} + tv \cdot TV(x)

    by Adam on the signs of the gradients; the step size falls to a tenth after 3/8, 5/8 and 7/8 of the iterations.
    TV is the mean absolute difference of neighbouring pixels. The cosine runs over all layers together.

    Args:
        iterations: Adam steps.
        lr: step size in image units.
        tv: weight of the total variation.
        restarts: independent starting points; the best by the attacker's own loss is returned.

    References:
        Geiping et al., Inverting Gradients: How easy is it to break privacy in federated learning?, NeurIPS 2020.

    Example:
        >>> import gradveil
        >>> from gradveil import models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> image, label = torch.rand(1, 1, 4, 4), torch.tensor([2])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> found = InvertingGradients(iterations=200, tv=0.0).reconstruct(task, update, ThreatModel())
        >>> bool((found.inputs[0] - image).abs().mean() < 0.1)
        True
    """

    paper = "Geiping et al., NeurIPS 2020"

    iterations: int = 1000
    lr: float = 0.02
    tv: float = 1e-2
    restarts: int = 1

    def __post_init__(self) -> None:
        self.iterations = checks.integer(self.name, "iterations", self.iterations, low=1)
        self.lr = checks.number(self.name, "lr", self.lr, above=0)
        self.tv = checks.number(self.name, "tv", self.tv, low=0)
        self.restarts = checks.integer(self.name, "restarts", self.restarts, low=1)

    def run(
        self,
        task: Task,
        targets: dict[str, Tensor],
        labels: Tensor,
        threat: ThreatModel,
        generator: torch.Generator,
        progress: Progress | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Minimise one minus the cosine, plus the total variation."""
        parameters = task.parameters

        def cost(candidate: Tensor, target: dict[str, Tensor], label: Tensor) -> Tensor:
            gradients = task.gradient(parameters, candidate, label)
            distance = cosine_distance(gradients, target)
            return distance + self.tv * total_variation(candidate) if self.tv else distance

        # Restarts are more victims: [restart of victim 0, restart of victim 0, ..., restart of victim 1, ...].
        repeated = {name: value.repeat_interleave(self.restarts, 0) for name, value in targets.items()}
        objective = Objective(cost, repeated, labels.repeat_interleave(self.restarts, 0))
        shape = (len(labels) * self.restarts, labels.shape[1], *task.input_shape)
        start = torch.rand(shape, generator=generator, dtype=task.dtype, device=task.device)
        solution = adam(
            objective,
            start,
            iterations=self.iterations,
            lr=self.lr,
            signed=True,
            box=(0.0, 1.0),
            progress=progress,
        )
        losses, chosen = solution.losses.view(-1, self.restarts).min(1)
        best = chosen + torch.arange(len(labels), device=chosen.device) * self.restarts
        return solution.candidates[best], losses, solution.iterations[best.cpu()]

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Total variation needs images."""
        super().check_threat(task, threat)
        if self.tv and len(task.input_shape) != 3:
            raise ThreatModelError(
                f"{self.name}: total variation is defined for images [channels, height, width], the inputs have shape "
                f"{list(task.input_shape)}; use tv=0"
            )


def cosine_distance(gradients: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """One minus the cosine between two gradients, over all layers together."""
    tiny = torch.finfo(next(iter(gradients.values())).dtype).tiny

    def dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        return torch.stack([(a[name] * b[name]).sum() for name in target]).sum()

    lengths = dot(gradients, gradients).clamp_min(tiny) * dot(target, target).clamp_min(tiny)
    return 1 - dot(gradients, target) / lengths.sqrt()


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, down plus across."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs()
    across = (images[..., :, 1:] - images[..., :, :-1]).abs()
    return torch.stack([axis.mean() for axis in (down, across) if axis.numel()] or [images.new_zeros(())]).sum()
