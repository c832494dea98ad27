"""The optimisers the attacks share: many victims at once, each with its own state.

A cost is written for one victim. `Objective` evaluates it for many, one by one or as one batched program, whichever
is faster; `adam` moves all of them in step, `lbfgs` runs one plain line-searching optimiser per victim and batches
their evaluations. Victims that have finished or stalled leave the batch. Ctrl-C ends a run with the best so far.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from gradveil import checks, compilation
from gradveil.attacks.findings import LossHistory
from gradveil.attacks.problem import Progress
from gradveil.task import differentiate_by_autograd

EXECUTIONS = ("auto", "loop", "batch", "compile", "compile-loop")


class Objective:
    """Losses and gradients of one cost for many victims.

    Args:
        cost: ``cost(candidate, *victim)`` for one victim, a scalar; must be vmap-able.
        victims: tensors with a leading victim dimension (or nests of them), handed to `cost` one victim each.
        execution: ``"loop"``: victim by victim; ``"batch"``: one vmapped program; ``"compile-loop"`` and ``"compile"``:
            these two compiled; ``"auto"``: whichever is faster, found out by timing the first evaluations.
        evaluations: how many evaluations of all victims are to come, so that ``"auto"`` can tell whether compiling
            earns its time back.
        victim_bytes: memory one victim takes while it is evaluated.
        memory_budget: bytes that the victims evaluated at once may take; more victims are cut into chunks.

    Example:
        >>> objective = Objective(lambda x, target: (x - target).square().sum(), torch.tensor([[1.0], [3.0]]))
        >>> losses, gradients = objective(torch.zeros(2, 1), torch.tensor([0, 1]))
        >>> losses.tolist(), gradients.tolist()
        ([1.0, 9.0], [[-2.0], [-6.0]])
    """

    def __init__(
        self,
        cost: Callable[..., Tensor],
        *victims: Any,
        execution: str = "auto",
        evaluations: int = 1,
        victim_bytes: int = 1,
        memory_budget: int = 2 << 30,
    ) -> None:
        self.execution = checks.choice("attack", "execution", execution, EXECUTIONS)
        self._victims = victims
        self._cost = cost
        self._many = vmap(grad_and_value(cost))
        self._evaluations = evaluations
        self._chunk = max(1, memory_budget // victim_bytes)
        self._compiled = self._compile(execution)

    def __call__(self, candidates: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
        """Losses ``[n]`` and gradients ``[n, ...]`` of the candidates of victims `who`."""
        if self.execution == "auto":
            self.execution = self._find_fastest(candidates, who)
        places = range(0, len(who), self._chunk)
        parts = [self._evaluate(candidates[at : at + self._chunk], who[at : at + self._chunk]) for at in places]
        return torch.cat([losses for losses, _ in parts]), torch.cat([gradients for _, gradients in parts])

    def _evaluate(self, candidates: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
        if self.execution == "loop":
            return self._loop(candidates, who)
        if self.execution == "batch":
            return self._batch(self._many, candidates, who)
        if self.execution == "compile-loop":
            parts = [self._batch(self._compiled, c, w) for c, w in zip(candidates, who, strict=True)]
            return torch.stack([loss for loss, _ in parts]), torch.stack([gradient for _, gradient in parts])
        # One shape, one compilation: a batch that has shrunk is filled up with its first victim.
        missing = min(self._chunk, self._count) - len(who)
        filled = torch.cat([candidates, candidates[:1].expand(missing, *candidates.shape[1:])])
        losses, gradients = self._batch(self._compiled, filled, torch.cat([who, who[:1].expand(missing)]))
        return losses[: len(who)], gradients[: len(who)]

    def _compile(self, execution: str) -> Any:
        functions = {"compile": self._many, "compile-loop": grad_and_value(self._cost)}
        return compilation.compiled(functions[execution]) if execution in functions else None

    def _batch(self, function: Any, candidates: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
        gradients, losses = function(candidates, *tree_map(lambda tensor: tensor[who], self._victims))
        return losses.detach(), gradients.detach()

    def _loop(self, candidates: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
        losses, gradients = [], []
        with differentiate_by_autograd():
            for candidate, index in zip(candidates, who.tolist(), strict=True):
                leaf = candidate.detach().requires_grad_()
                loss = self._cost(leaf, *tree_map(lambda tensor, index=index: tensor[index], self._victims))
                losses.append(loss.detach())
                gradients.append(torch.autograd.grad(loss, leaf)[0])
        return torch.stack(losses), torch.stack(gradients)

    @property
    def _count(self) -> int:
        return len(tree_leaves(self._victims)[0])

    def _find_fastest(self, candidates: Tensor, who: Tensor) -> str:
        """Time a victim alone and a victim in the batch; compile if the whole run is long enough to earn it back."""
        chunk = min(self._chunk, len(who))
        alone = _seconds(lambda: self._loop(candidates[:1], who[:1]))
        batched = math.inf
        if chunk > 1:
            batched = _seconds(lambda: self._batch(self._many, candidates[:chunk], who[:chunk])) / chunk
        uncompiled = min(alone, batched) * self._count * self._evaluations
        if compilation.is_worth_it(uncompiled, len(tree_leaves(self._victims))):
            chosen = "compile" if batched < alone else "compile-loop"
            self._compiled = self._compile(chosen)
            return chosen
        return "batch" if batched < alone else "loop"


def _seconds(work: Callable[[], object]) -> float:
    """The time of one call, the better of two after a first one that warms up."""
    work()
    times = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


@dataclass(frozen=True)
class Solution:
    """Where the optimiser ended: the best candidate of each victim by its own loss, and the steps it took."""

    candidates: Tensor
    losses: Tensor
    iterations: Tensor
    history: LossHistory
    interrupted: bool = False


LATE = 0.9
"""The share of the steps after which `LossHistory.late` is taken."""


class _Clock:
    """Tells a progress callback how many seconds are left at the pace so far."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._started = progress, total, time.perf_counter()

    def tick(self, done: int) -> None:
        if self._progress:
            elapsed = time.perf_counter() - self._started
            self._progress(done, self._total, elapsed / max(done, 1) * (self._total - done))


def adam(
    objective: Objective,
    start: Tensor,
    *,
    iterations: int,
    lr: float | Tensor,
    signed: bool = False,
    box: tuple[float, float] | None = None,
    milestones: Sequence[float] = (3 / 8, 5 / 8, 7 / 8),
    tolerance: float = -math.inf,
    progress: Progress | None = None,
) -> Solution:
    """Adam (Kingma and Ba, ICLR 2015) on all victims in step.

    Args:
        objective: what is minimised.
        start: first candidates ``[victims, ...]``.
        iterations: number of steps.
        lr: step size, one for all or one a victim; a tenth of it after each milestone (a share of the iterations).
        signed: use only the sign of each gradient (Geiping et al., NeurIPS 2020).
        box: candidates are clamped to this interval after every step.
        milestones: when the step size falls.
        tolerance: a victim has finished when its loss is at most this; it has stalled when, after the last milestone,
            a twentieth of the iterations brought it nothing. Both leave the batch.
        progress: called after every step.
    """
    count = len(start)
    sizes = torch.as_tensor(lr, dtype=start.dtype, device=start.device).expand(count)
    alive = torch.arange(count, device=start.device)
    candidates, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    best, best_losses = start.clone(), torch.full((count,), math.inf, dtype=start.dtype, device=start.device)
    improved = torch.zeros(count, dtype=torch.long, device=start.device)
    taken = torch.zeros(count, dtype=torch.long)
    last, patience = max(milestones, default=0.0) * iterations, max(1, iterations // 20)
    clock, interrupted = _Clock(progress, iterations), False
    started, late = best_losses.clone(), None

    def remember(losses: Tensor, step: int) -> None:
        better = losses < best_losses[alive]
        chosen = alive[better]
        best[chosen], best_losses[chosen], improved[chosen] = candidates[chosen], losses[better], step

    try:
        for step in range(1, iterations + 1):
            losses, gradients = objective(candidates[alive], alive)
            remember(losses, step)
            if step == 1:
                started = losses.clone()
            if late is None and step > LATE * iterations:
                late = best_losses.clone()
            stalled = (step - improved[alive] > patience) & (step > last)
            going = ~(stalled | (losses <= tolerance))
            if not going.all():
                alive, gradients = alive[going], gradients[going]
                if len(alive) == 0:
                    clock.tick(iterations)
                    break
            if signed:
                gradients = gradients.sign()
            first[alive] = first[alive].lerp(gradients, 0.1)
            second[alive] = second[alive].lerp(gradients.square(), 0.001)
            decay = 0.1 ** sum(step > milestone * iterations for milestone in milestones)
            move = (first[alive] / (1 - 0.9**step)) / ((second[alive] / (1 - 0.999**step)).sqrt() + 1e-8)
            moved = candidates[alive] - (decay * sizes[alive]).view(-1, *[1] * (start.ndim - 1)) * move
            candidates[alive] = moved if box is None else moved.clamp(*box)
            taken[alive.cpu()] = step
            clock.tick(step)
        if len(alive):
            remember(objective(candidates[alive], alive)[0], iterations + 1)
    except KeyboardInterrupt:
        interrupted = True
    history = LossHistory(started, best_losses if late is None else late, best_losses[:, None])
    return Solution(best, best_losses, taken, history, interrupted)


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
        start: first candidates ``[victims, ...]``; float64 gets furthest.
        iterations: accepted steps a victim may take.
        history: pairs of steps and gradient changes remembered.
        tolerance: a victim stops when its largest gradient entry is below this.
        progress: called after every batched evaluation with the steps of the slowest victim.
    """
    runs = [_Run(point.reshape(-1), iterations, history, tolerance) for point in start]
    clock, interrupted = _Clock(progress, iterations), False
    try:
        while alive := [index for index, run in enumerate(runs) if run.wanted is not None]:
            wanted = torch.stack([runs[index].wanted for index in alive]).reshape(len(alive), *start.shape[1:])  # type: ignore[misc]
            losses, gradients = objective(wanted, torch.tensor(alive, device=start.device))
            for index, loss, gradient in zip(alive, losses.tolist(), gradients, strict=True):
                runs[index].answer(loss, gradient.reshape(-1))
            clock.tick(min((run.steps for run in runs if run.wanted is not None), default=iterations))
    except KeyboardInterrupt:
        interrupted = True

    def losses_of(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=start.dtype, device=start.device)

    ended = losses_of([run.best_loss for run in runs])
    late = losses_of([run.best_loss if run.late_loss is None else run.late_loss for run in runs])
    return Solution(
        torch.stack([run.best for run in runs]).reshape(start.shape),
        ended,
        torch.tensor([run.steps for run in runs]),
        LossHistory(losses_of([run.first_loss for run in runs]), late, ended[:, None]),
        interrupted,
    )


_Evaluations = Generator[Tensor, tuple[float, Tensor], None]


class _Run:
    """L-BFGS for one victim as a coroutine: it says at which point it wants loss and gradient, and is told."""

    def __init__(self, start: Tensor, iterations: int, history: int, tolerance: float) -> None:
        self.best, self.best_loss, self.steps = start, math.inf, 0
        self.first_loss = math.inf
        self.late_loss: float | None = None
        self._late = LATE * iterations
        self._history, self._tolerance = history, tolerance
        self._search = self._minimise(start, iterations)
        self.wanted: Tensor | None = next(self._search)

    def answer(self, loss: float, gradient: Tensor) -> None:
        if math.isinf(self.first_loss):
            self.first_loss = loss
        if self.late_loss is None and self.steps >= self._late:
            self.late_loss = self.best_loss
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
