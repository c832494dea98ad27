"""What the gradient-matching attacks share: a cost from a distance and a prior, and the way to its minimum."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.base import Found
from gradveil.attacks.engine import Course, Objective, Progress, Solution, adam, best_restarts, lbfgs
from gradveil.errors import ParameterError, ThreatModelError
from gradveil.registry import suggest
from gradveil.task import Gradients, Task
from gradveil.update import LocalSteps, steps_of, with_momentum

NOTHING = "none"
"""What `mute` says when every layer is matched."""

Distance = Callable[[Gradients, Gradients], Tensor]
Prior = Callable[[Tensor], Tensor]

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
        restarts: independent starting points.
        smoothing: stages of ReLU smoothing, from smooth to sharp; empty: the model as it is. See `Task.smoothed`.
        execution: how victims are evaluated, see `Objective`.

    Example:
        >>> Search(optimiser="lbfgs", iterations=300).restarts
        1
    """

    optimiser: str
    iterations: int
    lr: float = 0.02
    signed: bool = True
    restarts: int = 1
    smoothing: Sequence[float] = ()
    execution: str = "auto"


def audible(owner: str, targets: Gradients, mute: str) -> Gradients:
    """The layers an attacker matches: all but those in `mute`.

    Args:
        owner: who asks, for the error message.
        targets: the updates by parameter name.
        mute: ``"none"``, or names of parameters or modules to leave out, separated by ``|``.

    >>> sorted(audible("idlg", {"conv.weight": torch.zeros(1), "fc.weight": torch.zeros(1)}, "fc"))
    ['conv.weight']
    """
    if mute == NOTHING:
        return targets
    left = dict(targets)
    for entry in mute.split("|"):
        named = [name for name in targets if name == entry or name.startswith(f"{entry}.")]
        if not named:
            raise ParameterError(f"{owner}: mute names no layer of the model: {entry!r}; {suggest(entry, targets)}")
        for name in named:
            left.pop(name, None)
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
    task: Task,
    targets: Gradients,
    labels: Tensor,
    start: Tensor,
    search: Search,
    *,
    distance: Distance,
    prior: Prior | None = None,
    local: LocalSteps | None = None,
    unpack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    progress: Progress | None = None,
) -> Found:
    """Find candidates whose update is near the target, and that the prior likes; the best restart of each victim.

    Args:
        task: the model at the weights the victims saw.
        targets: the updates, ``[victims, ...]`` by name.
        labels: ``[victims, images]``.
        start: ``[victims * restarts, ...]``, a victim's restarts next to each other.
        search: how to look.
        distance: between the simulated and the shared update of one victim.
        prior: what is added to the cost of a candidate.
        local: the clients' local steps.
        unpack: turns ``(candidate, label)`` into inputs and labels; default: the candidate is the inputs.
        progress: called after every step, over all stages.
    """
    precision = torch.float64 if search.optimiser == "lbfgs" else task.dtype
    repeated = {name: value.to(precision).repeat_interleave(search.restarts, 0) for name, value in targets.items()}
    repeated_labels = _label_orders(labels, search.restarts) if local else labels.repeat_interleave(search.restarts, 0)
    stages = search.smoothing or (None,)
    total = search.iterations * len(stages)
    candidates, taken, execution = start.to(precision), torch.zeros(len(start), dtype=torch.long), search.execution
    started: Tensor | None = None
    for number, sharpness in enumerate(stages):
        stage = (task if sharpness is None else task.smoothed(sharpness)).to(precision)
        objective = Objective(
            _cost(stage, distance, prior, local, unpack),
            repeated,
            repeated_labels,
            execution=execution,
            evaluations=search.iterations,
            victim_bytes=victim_bytes(stage, labels.shape[1], local),
        )

        def tell(done: int, _steps: int, left: float, before: int = number * search.iterations) -> None:
            if progress:
                later = total - before - search.iterations
                progress(before + done, total, left + later * left / max(1, search.iterations - done))

        options: dict[str, Any] = {"iterations": search.iterations, "progress": tell}
        if search.optimiser == "lbfgs":
            solution = lbfgs(objective, candidates, history=100, **options)
        else:
            solution = adam(objective, candidates, lr=search.lr, signed=search.signed, box=(0.0, 1.0), **options)
        candidates, taken, execution = solution.candidates, taken + solution.iterations, objective.execution
        course = solution.course
        assert course is not None  # both optimisers tell
        started = course.start if started is None else started
        if solution.interrupted:
            break
    best = best_restarts(solution.losses, search.restarts)
    assert started is not None
    assert course is not None
    course = Course(started[best], course.late[best], solution.losses.view(-1, search.restarts))
    kept = Solution(solution.candidates[best], solution.losses[best], taken[best.cpu()], solution.interrupted, course)
    return Found(kept.candidates, kept, execution, repeated_labels[best])


def _label_orders(labels: Tensor, orders: int) -> Tensor:
    """Each row in `orders` different orders, next to each other: with local steps it matters which image came when.

    The orders are spread evenly over all permutations; the first is the given one.
    """
    images = labels.shape[1]
    every = math.factorial(images)
    picked = [_permutation(images, place * every // orders) for place in range(orders)]
    return torch.stack([row[order] for row in labels for order in picked])


def _permutation(count: int, number: int) -> list[int]:
    """Permutation `number` of `count` things in lexical order."""
    rest, order = list(range(count)), []
    for left in range(count, 0, -1):
        block = math.factorial(left - 1)
        order.append(rest.pop(number // block % left))
        number %= block
    return order


def _cost(
    task: Task,
    distance: Distance,
    prior: Prior | None,
    local: LocalSteps | None,
    unpack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
) -> Callable[..., Tensor]:
    parameters = task.parameters

    def cost(candidate: Tensor, target: Gradients, label: Tensor) -> Tensor:
        inputs, label = unpack(candidate, label) if unpack else (candidate, label)
        loss = distance(simulate(task, parameters, inputs, label, local), target)
        return loss if prior is None else loss + prior(inputs)

    return cost


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


def check_variation(owner: str, tv: float, task: Task) -> None:
    """Refuse total variation where the inputs are no images."""
    if tv and len(task.input_shape) != 3:
        raise ThreatModelError(
            f"{owner}: total variation is defined for images [channels, height, width], the inputs have shape "
            f"{list(task.input_shape)}; use tv=0"
        )


def total_variation(images: Tensor, *, rounding: float = 0.0) -> Tensor:
    """Mean absolute difference of neighbouring pixels, down plus across.

    Args:
        images: any tensor whose last two axes are height and width.
        rounding: rounds the kink of the absolute value off, ``sqrt(d^2 + rounding^2)``, for optimisers that need
            a smooth cost.
    """
    down = images[..., 1:, :] - images[..., :-1, :]
    across = images[..., :, 1:] - images[..., :, :-1]
    axes = [axis for axis in (down, across) if axis.numel()] or [images.new_zeros(1)]
    sizes = [(axis.square() + rounding**2).sqrt() if rounding else axis.abs() for axis in axes]
    return torch.stack([size.mean() for size in sizes]).sum()
