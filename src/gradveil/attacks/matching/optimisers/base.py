"""The interface of an optimiser, which handles many victims at once, each with its own state."""

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
"""Projects candidates into the allowed range of inputs; None: there is no such range."""

LATE = 0.9
"""The share of the steps after which `LossHistory.late` is taken."""


@dataclass(frozen=True)
class Solution:
    """The result of an optimiser.

    Args:
        candidates: ``[victims, ...]``, each victim's candidate with the lowest loss.
        losses: ``[victims]``, the losses of these candidates.
        iterations: ``[victims]``, steps taken.
        history: how the losses fell.
        interrupted: True if Ctrl-C ended the search; the result is then the best so far.

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
        """The result as a reconstruction whose inputs are the candidates."""
        return Reconstruction(
            self.candidates, labels, self.losses, self.iterations, history=self.history, interrupted=self.interrupted
        )


class Optimiser(ABC):
    """Minimises the cost of many victims' candidates.

    A new optimiser is a class with `minimise`; any attack may pass it to `matching.match`. Victims that have finished
    or are stuck should leave the batch, and Ctrl-C should end the search with the best so far.
    """

    precision: ClassVar[torch.dtype | None] = None
    """The dtype it computes in; None: that of the task."""

    @abstractmethod
    def minimise(
        self, objective: Objective, start: Tensor, *, iterations: int, project: Limits = None, progress: Progress = None
    ) -> Solution:
        """Search for the minimum.

        Args:
            objective: gives losses and gradients of candidates.
            start: first candidates ``[victims, ...]``.
            iterations: maximum number of steps.
            project: projects candidates into the allowed range of inputs; None: there is no such range.
            progress: called after every step.
        """


class Clock:
    """Reports progress to a callback, with the seconds left at the pace so far.

    Args:
        progress: the callback; None: nothing is reported.
        total: total number of steps.

    Example:
        >>> Clock(lambda done, total, left: print(done, total), total=2).tick(1)
        1 2
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._started = progress, total, time.perf_counter()

    def tick(self, done: int) -> None:
        """Report that `done` steps are done."""
        if self._progress:
            elapsed = time.perf_counter() - self._started
            self._progress(done, self._total, elapsed / max(done, 1) * (self._total - done))
