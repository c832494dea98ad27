"""Adam, which moves all victims in lockstep."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.findings import LossHistory
from gradveil.attacks.matching.objective import Objective
from gradveil.attacks.matching.optimisers.base import LATE, Clock, Limits, Optimiser, Solution
from gradveil.attacks.problem import Progress


@dataclass(frozen=True)
class Adam(Optimiser):
    """Adam (Kingma and Ba, ICLR 2015), in the precision of the task.

    Args:
        lr: step size in units of the inputs, one for all or one per victim; it falls to a tenth at each milestone.
        signed: use only the sign of each gradient (Geiping et al., NeurIPS 2020).
        milestones: when the step size falls, as fractions of the iterations.
        tolerance: a victim has finished when its loss is at most this. It has stalled if, after the last milestone, its
            loss has not improved for a twentieth of the iterations. Either way it leaves the batch.

    Example:
        >>> objective = Objective(lambda x, target: (x - target).square().sum(), torch.tensor([[1.0], [3.0]]))
        >>> found = Adam(lr=0.1).minimise(objective, torch.zeros(2, 1), iterations=200)
        >>> found.candidates.flatten().round(decimals=1)
        tensor([1., 3.])
    """

    lr: float | Tensor
    signed: bool = False
    milestones: Sequence[float] = (3 / 8, 5 / 8, 7 / 8)
    tolerance: float = -math.inf

    def minimise(
        self, objective: Objective, start: Tensor, *, iterations: int, project: Limits = None, progress: Progress = None
    ) -> Solution:
        """Take the steps, each followed by the projection."""
        count = len(start)
        step_sizes = torch.as_tensor(self.lr, dtype=start.dtype, device=start.device).expand(count)
        alive = torch.arange(count, device=start.device)
        candidates, first_moment, second_moment = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        best, best_losses = start.clone(), torch.full((count,), math.inf, dtype=start.dtype, device=start.device)
        improved_at = torch.zeros(count, dtype=torch.long, device=start.device)
        taken = torch.zeros(count, dtype=torch.long)
        last_milestone, patience = max(self.milestones, default=0.0) * iterations, max(1, iterations // 20)
        clock, interrupted = Clock(progress, iterations), False
        first_losses, late_losses = best_losses.clone(), None

        def remember(losses: Tensor, step: int) -> None:
            better = losses < best_losses[alive]
            chosen = alive[better]
            best[chosen], best_losses[chosen], improved_at[chosen] = candidates[chosen], losses[better], step

        try:
            for step in range(1, iterations + 1):
                losses, gradients = objective(candidates[alive], alive)
                remember(losses, step)
                if step == 1:
                    first_losses = losses.clone()
                if late_losses is None and step > LATE * iterations:
                    late_losses = best_losses.clone()
                stalled = (step - improved_at[alive] > patience) & (step > last_milestone)
                unfinished = ~(stalled | (losses <= self.tolerance))
                if not unfinished.all():
                    alive, gradients = alive[unfinished], gradients[unfinished]
                    if len(alive) == 0:
                        clock.tick(iterations)
                        break
                if self.signed:
                    gradients = gradients.sign()
                first_moment[alive] = first_moment[alive].lerp(gradients, 0.1)
                second_moment[alive] = second_moment[alive].lerp(gradients.square(), 0.001)
                decay = 0.1 ** sum(step > milestone * iterations for milestone in self.milestones)
                mean, mean_square = first_moment[alive] / (1 - 0.9**step), second_moment[alive] / (1 - 0.999**step)
                move = mean / (mean_square.sqrt() + 1e-8)
                moved = candidates[alive] - (decay * step_sizes[alive]).view(-1, *[1] * (start.ndim - 1)) * move
                candidates[alive] = moved if project is None else project(moved)
                taken[alive.cpu()] = step
                clock.tick(step)
            if len(alive):
                remember(objective(candidates[alive], alive)[0], iterations + 1)
        except KeyboardInterrupt:
            interrupted = True
        history = LossHistory(first_losses, best_losses if late_losses is None else late_losses, best_losses[:, None])
        return Solution(best, best_losses, taken, history, interrupted)
