"""What the gradient-matching attacks share: a cost from a distance and a prior, and the way to its minimum."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.engine import Objective, adam, lbfgs
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.problem import Problem
from gradveil.defenses.knowledge import Knowledge, Reading
from gradveil.errors import ParameterError, ThreatModelError
from gradveil.modality.image import total_variation
from gradveil.registry import suggest
from gradveil.task import Gradients, Task
from gradveil.update import LocalSteps, steps_of, with_momentum

NOTHING = "none"
"""What `mute` says when every layer is matched."""

Distance = Callable[[Gradients, Gradients], Tensor]
Unit = Callable[[Tensor, Tensor], Tensor]
Prior = Callable[[Tensor], Tensor]

LEAST_PRIOR = 0.004
"""`least_prior` of attacks that have no prior of their own."""

# Memory of one victim's evaluation, in units of its activations and the model's parameters together. Measured peaks:
# resnet18 3.9, lenet 4.5, convnet 7.3; this leaves room.
VALUES_PER_UNIT = 12


@dataclass(frozen=True)
class Search:
    """How a minimum is looked for.

    Args:
        optimiser: ``"lbfgs"`` (float64, for smooth costs) or ``"adam"``.
        iterations: steps, in each stage of the smoothing.
        lr: Adam's step size in image units.
        signed: Adam on the signs of the gradients.
        smoothing: stages of ReLU smoothing, from smooth to sharp; empty: the model as it is. See `Task.smoothed`.

    Example:
        >>> Search(optimiser="lbfgs", iterations=300).signed
        True
    """

    optimiser: str
    iterations: int
    lr: float = 0.02
    signed: bool = True
    smoothing: Sequence[float] = ()


def matched_layers(owner: str, layers: Iterable[str], mute: str) -> list[str]:
    """The layers an attacker matches: all but those in `mute`.

    Args:
        owner: who asks, for the error message.
        layers: the names of all parameters.
        mute: ``"none"``, or names of parameters or modules to leave out, separated by ``|``.

    >>> matched_layers("idlg", ["0.weight", "0.bias", "1.weight"], "0.bias|1")
    ['0.weight']
    """
    left = every = list(layers)
    for entry in mute.split("|") if mute != NOTHING else ():
        named = [name for name in every if name == entry or name.startswith(f"{entry}.")]
        if not named:
            raise ParameterError(f"{owner}: mute names no layer of the model: {entry!r}; {suggest(entry, every)}")
        left = [name for name in left if name not in named]
    if not left:
        raise ParameterError(f"{owner}: mute={mute} leaves no layer to match; name fewer")
    return left


def simulate(task: Task, parameters: Gradients, inputs: Tensor, labels: Tensor, local: LocalSteps | None) -> Gradients:
    """The update a client with these inputs would send, as a pure function; its images come in the given order."""
    if local is None:
        return task.gradient(parameters, inputs, labels)
    total: Gradients = {}
    velocity: Gradients = {}
    current = parameters
    size = local.batch_size or len(inputs)
    for _ in range(local.epochs):
        for first in range(0, len(inputs), size):
            batch = slice(first, first + size)
            step = task.gradient(current, inputs[batch], labels[batch])
            velocity = with_momentum(velocity, step, local.momentum)
            total = {name: total[name] + velocity[name] if total else velocity[name] for name in velocity}
            current = {name: value - local.lr * velocity[name] for name, value in current.items()}
    return total


def match(
    problem: Problem,
    start: Tensor,
    search: Search,
    *,
    layers: Sequence[str],
    distance: Distance,
    unit: Unit,
    prior: Prior | None = None,
    least_prior: float = 0.0,
    unpack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Reconstruction:
    """Find candidates whose update is near the target, and that the prior likes.

    Args:
        problem: the updates in all their rounds, and what is known.
        start: first candidates ``[victims, ...]``.
        search: how to look.
        layers: the parameters that are matched, see `matched_layers`.
        distance: between the simulated and the shared update of one victim.
        unit: what a squared error of 1 is in units of `distance`, see `squared_unit`.
        prior: what is added to the cost of a candidate.
        least_prior: weight of the total variation for someone who knows the defense, see `comparison`.
        unpack: turns ``(candidate, label)`` into inputs and labels; default: the candidate is the inputs.
    """
    local = problem.threat.local
    precision = torch.float64 if search.optimiser == "lbfgs" else problem.task.dtype
    targets = [{name: value.to(precision) for name, value in updates.items()} for _, updates in problem.rounds]
    stages = search.smoothing or (None,)
    total = search.iterations * len(stages)
    candidates, taken, execution = start.to(precision), torch.zeros(len(start), dtype=torch.long), problem.execution
    first_loss: Tensor | None = None
    for number, sharpness in enumerate(stages):
        tasks = [(seen if sharpness is None else seen.smoothed(sharpness)).to(precision) for seen, _ in problem.rounds]
        compare = comparison(
            tasks,
            problem.knowledge,
            layers=layers,
            distance=distance,
            unit=unit,
            prior=prior,
            least_prior=least_prior,
            local=local,
        )
        objective = Objective(
            _unpacked(compare, unpack),
            targets,
            problem.labels,
            execution=execution,
            evaluations=search.iterations,
            victim_bytes=len(targets) * victim_bytes(tasks[0], problem.examples, local),
        )

        def tell(done: int, _steps: int, left: float, before: int = number * search.iterations) -> None:
            if problem.progress:
                later = total - before - search.iterations
                problem.progress(before + done, total, left + later * left / max(1, search.iterations - done))

        options: dict[str, Any] = {"iterations": search.iterations, "progress": tell}
        if search.optimiser == "lbfgs":
            solution = lbfgs(objective, candidates, history=100, **options)
        else:
            solution = adam(objective, candidates, lr=search.lr, signed=search.signed, box=(0.0, 1.0), **options)
        candidates, taken, execution = solution.candidates, taken + solution.iterations, objective.execution
        first_loss = solution.history.start if first_loss is None else first_loss
        if solution.interrupted:
            break
    assert first_loss is not None
    return Reconstruction(
        inputs=candidates,
        labels=problem.labels,
        loss=solution.losses,
        iterations=taken,
        history=replace(solution.history, start=first_loss),
        execution=execution,
        interrupted=solution.interrupted,
    )


def _unpacked(
    compare: Callable[[Tensor, Sequence[Gradients], Tensor], Tensor],
    unpack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
) -> Callable[..., Tensor]:
    def cost(candidate: Tensor, updates: list[Gradients], label: Tensor) -> Tensor:
        inputs, label = unpack(candidate, label) if unpack else (candidate, label)
        return compare(inputs, updates, label)

    return cost


def comparison(
    tasks: Sequence[Task],
    knowledge: Knowledge | None,
    *,
    layers: Sequence[str],
    distance: Distance,
    unit: Unit,
    prior: Prior | None = None,
    least_prior: float = 0.0,
    local: LocalSteps | None = None,
) -> Callable[[Tensor, Sequence[Gradients], Tensor], Tensor]:
    r"""The cost ``(inputs, updates, labels)`` of one victim's candidate, `updates` having one entry a round.

    A plain attacker takes the mean over the rounds of the distance between simulated and shared updates, plus the
    prior. One who knows the defense (`Knowledge`) compares what the defense should make of the candidate's gradient e
    with what the update tells, v, by what each coordinate is worth, w; coordinates that tell nothing must at least have
    allowed values a; and the more noise there is, the more an image prior counts:

    .. math:: distance(\sqrt w e, \sqrt w v) + unit \cdot \Big(\sum_{w_i = 0} (e_i - a_i)^2 +
              (4 \, variance \cdot pixels + least \cdot |u|^2) \, TV(x)\Big) + prior(x)

    4 variance is what a prior of independent Laplace differences of neighbours of mean 0.5 gives. Such differences are
    0.05 in photographs, but they are far from independent. Tried by idlg on four CIFAR-10 images and LeNet, from 0.02
    to 2: under normal noise of 0.1 a mean of 0.5 was best, under 0.01 a mean of 0.17, by half a decibel.

    Args:
        tasks: of the rounds.
        knowledge: of the defense; None: the plain attacker.
        layers: the parameters that are matched.
        distance: between the simulated and the shared update.
        unit: what a squared error of 1 is in units of `distance`.
        prior: what is added to the cost of a candidate.
        least_prior: weight of the total variation for someone who knows the defense even where there is no noise, in
            units of the update's squared length: defended updates leave directions of the image open.
        local: the clients' local steps.
    """
    parameters = [task.parameters for task in tasks]

    def matched(gradients: Gradients) -> Gradients:
        return {name: gradients[name] for name in layers}

    def plain(inputs: Tensor, updates: Sequence[Gradients], labels: Tensor) -> Tensor:
        parts = [
            distance(simulate(task, weights, inputs, labels, local), matched(update))
            for task, weights, update in zip(tasks, parameters, updates, strict=True)
        ]
        loss = parts[0] if len(parts) == 1 else torch.stack(parts).mean()
        return loss if prior is None else loss + prior(inputs)

    if knowledge is None or not knowledge.changes_matching:
        return plain
    know = knowledge  # for the type checker

    def informed(inputs: Tensor, updates: Sequence[Gradients], labels: Tensor) -> Tensor:
        expected = []
        for task, weights, update in zip(tasks, parameters, updates, strict=True):
            own = know.task(task, update) if know.task else task
            expected.append(simulate(own, weights, inputs, labels, local))
        if know.expect:
            expected = know.expect(expected, updates)
        images = len(tasks[0].input_shape) == 3
        variation = total_variation(inputs, rounding=1e-2) if images else inputs.new_zeros(())
        parts = []
        for task, values, update in zip(tasks, expected, updates, strict=True):
            noise = know.variance(update) if callable(know.variance) else know.variance
            smooth = 4 * noise / len(updates) * inputs.numel() * variation
            drawn = know.draw(task, values, inputs, labels) if know.draw else [values]
            parts += [judge(matched(one), matched(update), noise, smooth, variation) for one in drawn]
        loss = torch.stack(parts).mean()
        return loss if prior is None else loss + prior(inputs)

    def judge(values: Gradients, update: Gradients, noise: Tensor | float, smooth: Tensor, variation: Tensor) -> Tensor:
        reading = know.read(values, update) if know.read else Reading(update)
        told, squares = reading.values, smooth + least_prior * _squared_length(update) * variation
        if reading.weights is not None:
            roots = {name: weight.sqrt() for name, weight in reading.weights.items()}
            if reading.allowed is not None:
                outside = [((values[n] - reading.allowed[n]).square() * (root == 0)).sum() for n, root in roots.items()]
                squares = squares + torch.stack(outside).sum()
            values, told = _times(roots, values), _times(roots, told)
        length = _squared_length(told).clamp_min(torch.finfo(squares.dtype).tiny)
        signal = (length - noise * sum(value.numel() for value in told.values())).maximum(0.01 * length)
        return distance(values, told) + unit(length, signal) * squares

    return informed


def _squared_length(gradients: Gradients) -> Tensor:
    return torch.stack([value.square().sum() for value in gradients.values()]).sum()


def _times(factors: Gradients, values: Gradients) -> Gradients:
    return {name: factors[name] * values[name] for name in factors}


def victim_bytes(task: Task, images: int, local: LocalSteps | None) -> int:
    """Memory that one victim takes while its cost and the cost's gradient are evaluated."""
    values = images * task.activations + task.size
    return VALUES_PER_UNIT * values * steps_of(local, images) * task.dtype.itemsize


def squared_distance(gradients: Gradients, target: Gradients) -> Tensor:
    """The squared Euclidean distance between two gradients."""
    return torch.stack([(gradients[name] - target[name]).square().sum() for name in target]).sum()


def cosine_distance(gradients: Gradients, target: Gradients) -> Tensor:
    """One minus the cosine between two gradients, over all layers together."""
    tiny = torch.finfo(next(iter(gradients.values())).dtype).tiny

    def dot(a: Gradients, b: Gradients) -> Tensor:
        return torch.stack([(a[name] * b[name]).sum() for name in target]).sum()

    lengths = dot(gradients, gradients).clamp_min(tiny) * dot(target, target).clamp_min(tiny)
    return 1 - dot(gradients, target) / lengths.sqrt()


def squared_unit(length: Tensor, _signal: Tensor) -> Tensor:
    """`squared_distance` counts squared errors as they are.

    Args:
        length: squared length of the update.
        _signal: what of it is not noise.
    """
    return torch.ones_like(length)


def relative_unit(length: Tensor, _signal: Tensor) -> Tensor:
    """Squared errors in units of the update's squared length."""
    return length.reciprocal()


def cosine_unit(length: Tensor, signal: Tensor) -> Tensor:
    """Near a target u, an error of the signal g counts 1 / (2 |u| |g|) times its square in `cosine_distance`."""
    return 0.5 * (length * signal).rsqrt()


def check_variation(owner: str, tv: float, task: Task) -> None:
    """Refuse total variation where the inputs are no images."""
    if tv and len(task.input_shape) != 3:
        raise ThreatModelError(
            f"{owner}: total variation is defined for images [channels, height, width], the inputs have shape "
            f"{list(task.input_shape)}; use tv=0"
        )
