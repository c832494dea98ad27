"""L-BFGS: one textbook optimiser per victim; their evaluations are batched."""

import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.findings import LossHistory
from gradveil.attacks.matching.objective import Objective
from gradveil.attacks.matching.optimisers.base import LATE, Clock, Limits, Optimiser, Solution
from gradveil.attacks.problem import Progress


@dataclass(frozen=True)
class LBFGS(Optimiser):
    """L-BFGS with a strong-Wolfe line search (Nocedal and Wright, Numerical Optimization, chapters 3 and 7).

    Every victim runs the textbook algorithm on its own; only the evaluation of the points that the victims request next
    is batched. A victim that has converged or is stuck requests nothing more and leaves the batch. The algorithm works
    in float64, which gets it furthest, and on smooth costs without bounds: candidates are not projected.

    Args:
        history: number of remembered pairs of steps and gradient changes.
        tolerance: a victim stops when its largest gradient entry is below this.

    Example:
        >>> objective = Objective(lambda x, target: (x - target).square().sum(), torch.tensor([[1.0], [3.0]]))
        >>> found = LBFGS().minimise(objective, torch.zeros(2, 1), iterations=9)
        >>> found.candidates.flatten(), found.iterations
        (tensor([1., 3.]), tensor([1, 2]))
    """

    precision = torch.float64

    history: int = 100
    tolerance: float = 1e-12

    def minimise(
        self, objective: Objective, start: Tensor, *, iterations: int, project: Limits = None, progress: Progress = None
    ) -> Solution:
        """Take at most `iterations` accepted steps per victim; the reported progress is that of the slowest."""
        runs = [_Run(point.reshape(-1), iterations, self.history, self.tolerance) for point in start]
        clock, interrupted = Clock(progress, iterations), False
        try:
            while alive := [index for index, run in enumerate(runs) if run.requested is not None]:
                points = torch.stack([runs[index].requested for index in alive])  # type: ignore[misc]
                points = points.reshape(len(alive), *start.shape[1:])
                losses, gradients = objective(points, torch.tensor(alive, device=start.device))
                for index, loss, gradient in zip(alive, losses.tolist(), gradients, strict=True):
                    runs[index].receive(loss, gradient.reshape(-1))
                clock.tick(min((run.steps for run in runs if run.requested is not None), default=iterations))
        except KeyboardInterrupt:
            interrupted = True

        def as_tensor(losses: list[float]) -> Tensor:
            return torch.tensor(losses, dtype=start.dtype, device=start.device)

        best_losses = as_tensor([run.best_loss for run in runs])
        late_losses = as_tensor([run.best_loss if run.late_loss is None else run.late_loss for run in runs])
        return Solution(
            torch.stack([run.best for run in runs]).reshape(start.shape),
            best_losses,
            torch.tensor([run.steps for run in runs]),
            LossHistory(as_tensor([run.first_loss for run in runs]), late_losses, best_losses[:, None]),
            interrupted,
        )


_Evaluations = Generator[Tensor, tuple[float, Tensor], None]


class _Run:
    """L-BFGS for one victim as a coroutine: it requests the loss and gradient at a point, and receives them."""

    def __init__(self, start: Tensor, iterations: int, history: int, tolerance: float) -> None:
        self.best, self.best_loss, self.steps = start, math.inf, 0
        self.first_loss = math.inf
        self.late_loss: float | None = None
        self._late_step = LATE * iterations
        self._history, self._tolerance = history, tolerance
        self._search = self._minimise(start, iterations)
        self.requested: Tensor | None = next(self._search)  # None: the search has ended

    def receive(self, loss: float, gradient: Tensor) -> None:
        if math.isinf(self.first_loss):
            self.first_loss = loss
        if self.late_loss is None and self.steps >= self._late_step:
            self.late_loss = self.best_loss
        if loss < self.best_loss:
            self.best, self.best_loss = self.requested, loss  # type: ignore[assignment]
        try:
            self.requested = self._search.send((loss, gradient))
        except StopIteration:
            self.requested = None

    def _minimise(self, point: Tensor, iterations: int) -> _Evaluations:
        loss, gradient = yield point
        pairs: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=self._history)
        while self.steps < iterations and math.isfinite(loss) and gradient.abs().max() > self._tolerance:
            direction = _quasi_newton_direction(gradient, pairs)
            slope = float(direction @ gradient)
            first_size = 1.0 if pairs else min(1.0, 1.0 / float(gradient.abs().sum()))
            if slope < 0:
                accepted = yield from _strong_wolfe(point, direction, loss, slope, first_size)
            else:
                accepted = None
            if accepted is None:
                if not pairs:
                    return  # not even steepest descent lowers the loss: the limit of the precision is reached
                pairs.clear()
                continue
            size, loss, new_gradient = accepted
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


_SUFFICIENT_DECREASE, _CURVATURE, _TRIALS = 1e-4, 0.9, 25


def _strong_wolfe(
    point: Tensor, direction: Tensor, loss: float, slope: float, first_size: float
) -> Generator[Tensor, tuple[float, Tensor], tuple[float, float, Tensor] | None]:
    """Find a step that decreases the loss enough and has a flat enough slope; None if no trial decreased it."""
    low_size, low_loss, low_slope, low_gradient = 0.0, loss, slope, None
    high_size, high_loss, high_slope = math.inf, math.nan, math.nan
    size = first_size
    for _ in range(_TRIALS):
        trial_loss, trial_gradient = yield point + size * direction
        trial_slope = float(trial_gradient @ direction)
        finite = math.isfinite(trial_loss) and math.isfinite(trial_slope)
        if not finite or trial_loss > loss + _SUFFICIENT_DECREASE * size * slope or trial_loss >= low_loss:
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
            size *= 2.0 if first_size == 1.0 else 10.0
        else:
            size = _cubic_minimiser(low_size, low_loss, low_slope, high_size, high_loss, high_slope)
            if abs(high_size - low_size) * float(direction.abs().max()) < 1e-12:
                break
    if low_gradient is None:
        return None
    return low_size, low_loss, low_gradient


def _cubic_minimiser(a: float, fa: float, ga: float, b: float, fb: float, gb: float) -> float:
    """The minimiser of the cubic with values f and slopes g at a and b, kept away from both ends."""
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
