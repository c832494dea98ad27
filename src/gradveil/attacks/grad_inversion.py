"""GradInversion: several seeds that agree with each other, image priors, and batch-norm statistics if granted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil import checks
from gradveil.attacks.base import ATTACKS, Attack, Found, Targets, ThreatModel
from gradveil.attacks.engine import Objective, Progress, adam
from gradveil.attacks.matching import (
    NOTHING,
    Prior,
    audible,
    check_variation,
    comparison,
    relative_unit,
    squared_distance,
    victim_bytes,
)
from gradveil.errors import ThreatModelError
from gradveil.modality.image import total_variation
from gradveil.task import Gradients, Task


@ATTACKS.register("grad-inversion")
@dataclass(repr=False)
class GradInversion(Attack):
    r"""Find images whose gradient is near the shared one, from several seeds that are held together.

    .. math:: \min_{x_1..x_S} \frac1S \sum_s \frac{|\nabla L(x_s) - u|^2}{|u|^2} + tv\, TV(x_s) + l2\, mean(x_s^2)
              + group\, mean (x_s - \bar x)^2 + statistics\, |bn(x_s) - bn|^2 / |bn|^2

    by Adam in the box [0, 1]. The distance is divided by \|u\|^2, so that the weights of the priors mean the same for
    every model; the paper leaves the scale open. The group term is the paper's consistency without its registration
    step (which aligns shifted copies; our seeds see the same unshifted gradient). Batch-norm statistics are used only
    where the threat model grants them. The seed with the lowest matching distance is returned.

    Args:
        iterations: Adam steps.
        lr: step size in image units.
        tv: weight of the total variation.
        l2: weight of the squared pixel values.
        group: weight of the distance to the mean of the seeds.
        seeds: number of starting points.
        statistics: weight of the batch-norm statistics, where they are granted.
        mute: layers left out of the matching, by the names of parameters or modules, separated by ``|``: the attacker's
            answer to a defense that spoils only some layers. ``"none"``: all are matched.

    References:
        Yin et al., See through Gradients: Image Batch Recovery via GradInversion, CVPR 2021.

    Example:
        >>> import gradveil
        >>> from gradveil import models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> image, label = torch.rand(1, 1, 4, 4, generator=torch.manual_seed(1)), torch.tensor([2])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> attack, generator = GradInversion(iterations=300, tv=0.0, l2=0.0), torch.manual_seed(0)
        >>> found = attack.reconstruct(task, update, ThreatModel(), generator=generator)
        >>> bool((found.inputs[0] - image).abs().mean() < 0.1)
        True
    """

    paper = "Yin et al., CVPR 2021"

    adapts = True

    iterations: int = 1000
    lr: float = 0.02
    tv: float = 1e-2
    l2: float = 1e-4
    group: float = 1e-2
    seeds: int = 4
    statistics: float = 0.1
    mute: str = NOTHING

    def __post_init__(self) -> None:
        self.iterations = checks.integer(self.name, "iterations", self.iterations, low=1)
        self.lr = checks.number(self.name, "lr", self.lr, above=0)
        for weight in ("tv", "l2", "group", "statistics"):
            setattr(self, weight, checks.number(self.name, weight, getattr(self, weight), low=0))
        self.seeds = checks.integer(self.name, "seeds", self.seeds, low=1)

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Total variation needs images; granted statistics are those of one step."""
        super().check_threat(task, threat)
        check_variation(self.name, self.tv, task)
        if threat.statistics is not None and threat.local is not None:
            raise ThreatModelError(f"{self.name}: batch-norm statistics are used for single gradients only")

    def run(
        self,
        task: Task,
        targets: Targets,
        labels: Tensor,
        threat: ThreatModel,
        generator: torch.Generator,
        progress: Progress | None,
        execution: str,
    ) -> Found:
        """Minimise the sum over the seeds, then choose the seed that matches best."""
        parameters, images = task.parameters, labels.shape[1]
        targets = audible(self.name, targets, self.mute)
        updates = [seen for _, seen in targets.rounds]
        tiny = torch.finfo(task.dtype).tiny

        def relative_distance(gradients: Gradients, target: Gradients) -> Tensor:
            scale = torch.stack([value.square().sum() for value in target.values()]).sum().clamp_min(tiny)
            return squared_distance(gradients, target) / scale

        def prior(inputs: Tensor) -> Tensor:
            return self.tv * total_variation(inputs) + self.l2 * inputs.square().mean()

        def compared(images_prior: Prior | None) -> Callable[[Tensor, Sequence[Gradients], Tensor], Tensor]:
            stages = [seen for seen, _ in targets.rounds]
            return comparison(
                stages, targets, distance=relative_distance, unit=relative_unit, prior=images_prior, local=threat.local
            )

        with_prior, bare = compared(prior), compared(None)

        def one_seed(inputs: Tensor, target: Sequence[Gradients], label: Tensor, granted: Gradients) -> Tensor:
            loss = with_prior(inputs, target, label)
            if granted and self.statistics:
                scale = torch.stack([value.square().sum() for value in granted.values()]).sum().clamp_min(tiny)
                loss = loss + self.statistics * squared_distance(task.statistics(parameters, inputs), granted) / scale
            return loss

        def cost(candidate: Tensor, target: list[Gradients], label: Tensor, granted: Gradients) -> Tensor:
            losses = torch.stack([one_seed(seed, target, label, granted) for seed in candidate])
            return losses.mean() + self.group * (candidate - candidate.mean(0)).square().mean()

        objective = Objective(
            cost,
            updates,
            labels,
            threat.statistics or {},
            execution=execution,
            evaluations=self.iterations,
            victim_bytes=len(updates) * self.seeds * victim_bytes(task, images, threat.local),
        )
        shape = (len(labels), self.seeds, images, *task.input_shape)
        start = torch.rand(shape, generator=generator, dtype=task.dtype, device=task.device)
        solution = adam(objective, start, iterations=self.iterations, lr=self.lr, box=(0.0, 1.0), progress=progress)
        inputs = []
        for victim, seeds in enumerate(solution.candidates):
            seen = [{name: value[victim] for name, value in round_.items()} for round_ in updates]
            matched = torch.stack([bare(seed, seen, labels[victim]).detach() for seed in seeds])
            inputs.append(seeds[matched.argmin()])
        return Found(torch.stack(inputs), solution, objective.execution, labels)
