"""GradInversion: several seeds kept close to each other, image priors, and batch-norm statistics if granted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.matching import NOTHING, RELATIVE, Adam, Matching, Objective, check_prior, matched_layers
from gradveil.attacks.matching.cost import victim_bytes
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ThreatModelError
from gradveil.core.parameters import integer, number, text
from gradveil.task import Gradients, Task


@ATTACKS.register("grad-inversion")
@dataclass(frozen=True, repr=False)
class GradInversion(Attack):
    r"""Find images whose gradient is near the shared one, from several seeds that are kept close to each other.

    .. math:: \min_{x_1..x_S} \frac1S \sum_s \frac{|\nabla L(x_s) - u|^2}{|u|^2} + tv\, TV(x_s) + l2\, mean(x_s^2)
              + group\, mean (x_s - \bar x)^2 + statistics\, |bn(x_s) - bn|^2 / |bn|^2

    by Adam in the box [0, 1]. The distance is divided by \|u\|^2, so that the weights of the priors mean the same for
    every model; the paper leaves the scale open. The group term is the paper's group consistency without its
    registration step (which aligns shifted copies; our seeds see the same unshifted gradient). Batch-norm statistics
    are used only if the threat model grants them. The seed with the lowest matching distance is returned.

    Args:
        iterations: Adam steps.
        lr: step size in image units.
        tv: weight of the total variation.
        l2: weight of the squared pixel values.
        group: weight of the distance to the mean of the seeds.
        seeds: number of starting points.
        statistics: weight of the batch-norm statistics, if they are granted.
        mute: layers left out of the matching, as names of parameters or modules separated by ``|``: the attacker's
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

    iterations: int = integer(1000, low=1)
    lr: float = number(0.02, above=0)
    tv: float = number(1e-2, low=0)
    l2: float = number(1e-4, low=0)
    group: float = number(1e-2, low=0)
    seeds: int = integer(4, low=1)
    statistics: float = number(0.1, low=0)
    mute: str = text(NOTHING)

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse `tv` for inputs that have no prior, and batch-norm statistics after several local steps."""
        super().check_threat(task, threat)
        if self.tv:
            check_prior(self.name, "tv", task)
        if threat.statistics is not None and threat.local is not None:
            raise ThreatModelError(
                f"{self.name}: batch-norm statistics are used for single gradients only, got local={threat.local}; "
                "use ThreatModel(statistics=None)"
            )

    def run(self, problem: Problem) -> Reconstruction:
        """Minimise the sum over the seeds, then choose the seed that matches best."""
        task, labels, modality = problem.task, problem.labels, problem.modality
        parameters, updates = task.parameters, [round_updates for _, round_updates in problem.rounds]

        def prior(inputs: Tensor) -> Tensor:
            penalty = modality.prior(inputs)
            return (0.0 if penalty is None else self.tv * penalty) + self.l2 * inputs.square().mean()

        matching = Matching(matched_layers(self.name, problem.updates, self.mute), RELATIVE, prior)
        tasks = [round_task for round_task, _ in problem.rounds]
        matching_cost = replace(matching, prior=None).cost(problem, tasks)

        def cost_of(tasks: Sequence[Task]) -> Callable[..., Tensor]:
            cost_with_prior = matching.cost(problem, tasks)

            def one_seed(inputs: Tensor, target: Sequence[Gradients], label: Tensor, statistics: Gradients) -> Tensor:
                loss = cost_with_prior(inputs, target, label)
                if statistics and self.statistics:
                    loss = loss + self.statistics * RELATIVE.between(task.statistics(parameters, inputs), statistics)
                return loss

            def cost(candidate: Tensor, target: list[Gradients], label: Tensor, statistics: Gradients) -> Tensor:
                losses = torch.stack([one_seed(seed, target, label, statistics) for seed in candidate])
                return losses.mean() + self.group * (candidate - candidate.mean(0)).square().mean()

            return cost

        objective = Objective(
            cost_of(tasks),
            updates,
            labels,
            problem.threat.statistics or {},
            alone=cost_of([round_task.by_autograd() for round_task in tasks]),
            execution=problem.execution,
            evaluations=self.iterations,
            victim_bytes=self.seeds * victim_bytes(task, problem),
        )
        solution = Adam(self.lr).minimise(
            objective,
            problem.start(self.seeds),
            iterations=self.iterations,
            project=modality.project,
            progress=problem.progress,
        )
        inputs = []
        for victim, seeds in enumerate(solution.candidates):
            own_updates = [{name: value[victim] for name, value in round_updates.items()} for round_updates in updates]
            costs = torch.stack([matching_cost(seed, own_updates, labels[victim]).detach() for seed in seeds])
            inputs.append(seeds[costs.argmin()])
        return replace(solution.found(labels), inputs=torch.stack(inputs), execution=objective.execution)
