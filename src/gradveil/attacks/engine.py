"""The optimisers the attacks share: many victims at once, each with its own state.

A cost is written for one victim. `Objective` evaluates it for many in one batched program; `adam` moves all of them
in step, `lbfgs` runs one plain line-searching optimiser per victim and batches their evaluations.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all) after every step."""


class Objective:
    """Losses and gradients of one cost for many victims.

    Args:
        cost: ``cost(candidate, *victim)`` for one victim, a scalar; must be vmap-able.
        victims: tensors with a leading victim dimension, handed to `cost` one victim each.

    Example:
        >>> objective = Objective(lambda x, target: (x - target).square().sum(), torch.tensor([[1.0], [3.0]]))
        >>> losses, gradients = objective(torch.zeros(2, 1), torch.tensor([0, 1]))
        >>> losses.tolist(), gradients.tolist()
        ([1.0, 9.0], [[-2.0], [-6.0]])
    """

    def __init__(self, cost: Callable[..., Tensor], *victims: object) -> None:
        self._victims = victims
        self._evaluate = vmap(grad_and_value(cost))

    def __call__(self, candidates: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
        """Losses ``[n]`` and gradients ``[n, ...]`` of the candidates of victims `who`."""
        victims = torch.utils._pytree.tree_map(lambda tensor: tensor[who], self._victims)
        gradients, losses = self._evaluate(candidates, *victims)
        return losses.detach(), gradients.detach()


@dataclass(frozen=True)
class Solution:
    """Where the optimiser ended: the best candidate of each victim by its own loss, and the steps it took."""

    candidates: Tensor
    losses: Tensor
    iterations: Tensor


def adam(
    objective: Objective,
    start: Tensor,
    *,
    iterations: int,
    lr: float,
    signed: bool = False,
    box: tuple[float, float] | None = None,
    milestones: Sequence[float] = (3 / 8, 5 / 8, 7 / 8),
    progress: Progress | None = None,
) -> Solution:
    """Adam (Kingma and Ba, ICLR 2015) on all victims in step.

    Args:
        objective: what is minimised.
        start: first candidates ``[victims, ...]``.
        iterations: number of steps.
        lr: step size; a tenth of it after each milestone (a share of the iterations).
        signed: use only the sign of each gradient (Geiping et al., NeurIPS 2020).
        box: candidates are clamped to this interval after every step.
        milestones: when the step size falls.
        progress: called after every step.
    """
    everyone = torch.arange(len(start), device=start.device)
    candidates = start.clone()
    first, second = torch.zeros_like(start), torch.zeros_like(start)
    best, best_losses = (
        start.clone(),
        torch.full((len(start),), math.inf, dtype=start.dtype, device=start.device),
    )

    def remember(losses: Tensor) -> None:
        better = losses < best_losses
        best[better], best_losses[better] = candidates[better], losses[better]

    for step in range(1, iterations + 1):
        losses, gradients = objective(candidates, everyone)
        remember(losses)
        if signed:
            gradients = gradients.sign()
        first.lerp_(gradients, 0.1)
        second.lerp_(gradients.square(), 0.001)
        size = lr * 0.1 ** sum(step > milestone * iterations for milestone in milestones)
        move = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        candidates = candidates - size * move
        if box is not None:
            candidates = candidates.clamp(*box)
        if progress:
            progress(step, iterations)
    remember(objective(candidates, everyone)[0])
    return Solution(best, best_losses, torch.full((len(start),), iterations))


def lbfgs(
    objective: Objective,
    start: Tensor,
    *,
    iterations: int,
    history: int = 50,
    tolerance: float = 1e-12,
    progress: Progress | None = None,
) -> Solution:
    """L-BFGS with a strong-Wolfe line search (Nocedal and Wright, Numerical Optimization, chapters 3 and 7).

    Every victim runs the textbook algorithm for one; what is batched is the evaluation of whatever candidates the
    victims ask for next. A victim that has converged or is stuck asks for nothing more and leaves the batch.

    Args:
        objective: what is minimised.
        start: first candidates ``[victims, ...]``; use float64.
        iterations: accepted steps a victim may take.
        history: pairs of steps and gradient changes remembered.
        tolerance: a victim stops when its largest gradient entry is below this.
        progress: called after every batched evaluation with (steps of the slowest victim, iterations).
    """
    runs = [_Run(point.reshape(-1), iterations, history, tolerance) for point in start]
    while alive := [index for index, run in enumerate(runs) if run.wanted is not None]:
        wanted = torch.stack([runs[index].wanted for index in alive]).reshape(len(alive), *start.shape[1:])  # type: ignore[misc]
        losses, gradients = objective(wanted, torch.tensor(alive, device=start.device))
        for index, loss, gradient in zip(alive, losses.tolist(), gradients, strict=True):
            runs[index].answer(loss, gradient.reshape(-1))
        if progress:
            progress(min((run.steps for run in runs if run.wanted is not None), default=iterations), iterations)
    return Solution(
        torch.stack([run.best for run in runs]).reshape(start.shape),
        torch.tensor([run.best_loss for run in runs], dtype=start.dtype, device=start.device),
        torch.tensor([run.steps for run in runs]),
    )


_Evaluations = Generator[Tensor, tuple[float, Tensor], None]


class _Run:
    """L-BFGS for one victim as a coroutine: it says at which point it wants loss and gradient, and is told."""

    def __init__(self, start: Tensor, iterations: int, history: int, tolerance: float) -> None:
        self.best, self.best_loss, self.steps = start, math.inf, 0
        self._history, self._tolerance = history, tolerance
        self._search = self._minimise(start, iterations)
        self.wanted: Tensor | None = next(self._search)

    def answer(self, loss: float, gradient: Tensor) -> None:
        if loss < self.best_loss:
            self.best, self.best_loss = self.wanted, loss  # type: ignore[assignment]
        try:
            self.wanted = self._search.send((loss, gradient))
        except StopIteration:
            self.wanted = None

    def _minimise(self, point: Tensor, iterations: int) -> _Evaluations:
        loss, gradient = yield point
        pairs: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=self._history)
        while self.steps < iterations and math.isfinite(loss) and gradient.abs().max() > self._tolerance:
            direction = _quasi_newton_direction(gradient, pairs)
            slope = float(direction @ gradient)
            first = 1.0 if pairs else min(1.0, 1.0 / float(gradient.abs().sum()))
            if slope < 0:
                found = yield from _strong_wolfe(point, direction, loss, slope, first)
            else:
                found = None
            if found is None:
                if not pairs:
                    return  # not even the steepest descent leads down: as far as the precision goes
                pairs.clear()
                continue
            size, loss, new_gradient = found
            step, change = size * direction, new_gradient - gradient
            curvature = float(step @ change)
            if curvature > 1e-10 * float(change @ change) ** 0.5 * float(step @ step) ** 0.5:
                pairs.append((step, change, curvature))
            point, gradient = point + step, new_gradient
            self.steps += 1


def _quasi_newton_direction(gradient: Tensor, pairs: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
    """The two-loop recursion: -H g with H built from the remembered pairs."""
    direction = -gradient
    weights = []
    for step, change, curvature in reversed(pairs):
        weight = float(step @ direction) / curvature
        weights.append(weight)
        direction = direction - weight * change
    if pairs:
        _, change, curvature = pairs[-1]
        direction = direction * (curvature / float(change @ change))
    for (step, change, curvature), weight in zip(pairs, reversed(weights), strict=True):
        direction = direction + (weight - float(change @ direction) / curvature) * step
    return direction


_SUFFICIENT, _CURVATURE, _TRIALS = 1e-4, 0.9, 25


def _strong_wolfe(
    point: Tensor, direction: Tensor, loss: float, slope: float, first: float
) -> Generator[Tensor, tuple[float, Tensor], tuple[float, float, Tensor] | None]:
    """Find a step with enough decrease and a flat enough slope; None if the trials run out without any decrease."""
    low_size, low_loss, low_slope, low_gradient = 0.0, loss, slope, None
    high_size, high_loss, high_slope = math.inf, math.nan, math.nan
    size = first
    for _ in range(_TRIALS):
        trial_loss, trial_gradient = yield point + size * direction
        trial_slope = float(trial_gradient @ direction)
        finite = math.isfinite(trial_loss) and math.isfinite(trial_slope)
        if not finite or trial_loss > loss + _SUFFICIENT * size * slope or trial_loss >= low_loss:
            high_size, high_loss, high_slope = size, trial_loss, trial_slope
        else:
            if abs(trial_slope) <= -_CURVATURE * slope:
                return size, trial_loss, trial_gradient
            if math.isfinite(high_size):
                if trial_slope * (high_size - low_size) >= 0:
                    high_size, high_loss, high_slope = low_size, low_loss, low_slope
            elif trial_slope >= 0:
                high_size, high_loss, high_slope = low_size, low_loss, low_slope
            low_size, low_loss, low_slope, low_gradient = size, trial_loss, trial_slope, trial_gradient
        if math.isinf(high_size):
            size *= 2.0 if first == 1.0 else 10.0
        else:
            size = _between(low_size, low_loss, low_slope, high_size, high_loss, high_slope)
            if abs(high_size - low_size) * float(direction.abs().max()) < 1e-12:
                break
    if low_gradient is None:
        return None
    return low_size, low_loss, low_gradient


def _between(a: float, fa: float, ga: float, b: float, fb: float, gb: float) -> float:
    """The minimiser of the cubic through two points and slopes, kept away from both ends."""
    middle = (a + b) / 2
    if not (math.isfinite(fb) and math.isfinite(gb)):
        return middle
    d1 = ga + gb - 3 * (fa - fb) / (a - b)
    square = d1 * d1 - ga * gb
    if square < 0:
        return middle
    d2 = math.copysign(math.sqrt(square), b - a)
    denominator = gb - ga + 2 * d2
    if denominator == 0:
        return middle
    size = b - (b - a) * (gb + d2 - d1) / denominator
    margin = 0.1 * abs(b - a)
    return min(max(size, min(a, b) + margin), max(a, b) - margin)
