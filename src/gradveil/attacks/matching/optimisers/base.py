"""The contract of an optimiser: many victims at once, each with its own state."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.findings import LossHistory, Reconstruction
from gradveil.attacks.matching.objective import Objective
from gradveil.attacks.problem import Progress

Limits = Callable[[Tensor], Tensor] | None
"""Brings candidates back within the limits that inputs have; None: there are none."""

LATE = 0.9
"""The share of the steps after which `LossHistory.late` is taken."""


@dataclass(frozen=True)
class Solution:
    """Where an optimiser ended.

    Args:
        candidates: ``[victims, ...]``, the best of each victim by its own loss.
        losses: ``[victims]``, of these.
        iterations: ``[victims]``, steps taken.
        history: how the losses fell.
        interrupted: True if Ctrl-C ended it; then this is the best so far.

    Example:
        >>> losses = torch.tensor([0.5])
        >>> Solution(torch.ones(1, 2), losses, torch.tensor([9]), LossHistory(losses, losses, losses[:, None])).losses
        tensor([0.5000])
    """

    candidates: Tensor
    losses: Tensor
    iterations: Tensor
    history: LossHistory
    interrupted: bool = False

    def found(self, labels: Tensor) -> Reconstruction:
        """The candidates as inputs, with their labels."""
        return Reconstruction(
            self.candidates, labels, self.losses, self.iterations, history=self.history, interrupted=self.interrupted
        )


class Optimiser(ABC):
    """Moves the candidates of many victims to where their cost is low.

    A new one is a class with `minimise`; any attack may hand it to `matching.match`. Victims that have finished or are
    stuck should leave the batch, and Ctrl-C should end the search with the best so far.
    """

    precision: ClassVar[torch.dtype | None] = None
    """What it computes in; None: whatever the task does."""

    @abstractmethod
    def minimise(
        self, objective: Objective, start: Tensor, *, iterations: int, project: Limits = None, progress: Progress = None
    ) -> Solution:
        """Look for the minimum.

        Args:
            objective: losses and gradients of candidates.
            start: first candidates ``[victims, ...]``.
            iterations: number of steps at most.
            project: brings candidates back within the limits that inputs have; None: there are none.
            progress: called after every step.
        """


class Clock:
    """Tells a progress callback how many seconds are left at the pace so far.

    Args:
        progress: the callback; None: nobody listens.
        total: steps in all.

    Example:
        >>> Clock(lambda done, total, left: print(done, total), total=2).tick(1)
        1 2
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._started = progress, total, time.perf_counter()

    def tick(self, done: int) -> None:
        """Say that so many steps are done."""
        if self._progress:
            elapsed = time.perf_counter() - self._started
            self._progress(done, self._total, elapsed / max(done, 1) * (self._total - done))
