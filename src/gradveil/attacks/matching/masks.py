"""Dropout masks that a search finds together with the inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.problem import Problem
from gradveil.task import Gradients
from gradveil.update import sizes_of

StepMasks = Sequence[Gradients]
"""The masks of every local step of one round; empty if no dropout is active."""


@dataclass(frozen=True)
class MaskSearch:
    r"""Candidates extended by the unknown dropout masks of the client: one mask for every round and local step.

    .. math:: mask = sigmoid(z) / (1 - rate), \qquad z = logit(1 - rate) \text{ at the start}

    The attacker knows the model and so its dropout, but not the masks that the client drew. It relaxes them to numbers
    between dropped and kept and searches for them along with the inputs, from masks that change nothing. (Scheliga,
    Mäder and Seeland, Dropout Is NOT All You Need to Prevent Gradient Leakage, AAAI 2023, who clip masks instead.)

    Args:
        shape: the shape of one victim's candidate without masks.
        steps: for each round and local step, the shape of each mask by its name.
        largest: the value of a mask that keeps, by its name.

    Example:
        >>> search = MaskSearch((2, 3), [[{"drop.mask0": (2, 4)}]], {"drop.mask0": 2.0})
        >>> candidate, [[masks]] = search.split(search.extended(torch.zeros(1, 2, 3))[0])
        >>> candidate.shape, masks["drop.mask0"].shape, float(masks["drop.mask0"].mean())
        (torch.Size([2, 3]), torch.Size([2, 4]), 1.0)
    """

    shape: tuple[int, ...]
    steps: Sequence[Sequence[dict[str, tuple[int, ...]]]]
    largest: dict[str, float]

    @classmethod
    def of(cls, problem: Problem, start: Tensor) -> "MaskSearch | None":
        """The search for the masks of a problem; None if no dropout is active."""
        if not problem.task.has_dropout:
            return None
        sizes = sizes_of(problem.threat.local, problem.examples)
        steps = [[task.mask_shapes(size) for size in sizes] for task, _ in problem.rounds]
        return cls(tuple(start.shape[1:]), steps, problem.task.largest_masks())

    def extended(self, candidates: Tensor) -> Tensor:
        """Candidates ``[victims, ...]`` with masks that change nothing, as rows."""
        starts = [
            candidates.new_full((math.prod(shape),), -math.log(self.largest[name] - 1) if self.largest[name] > 1 else 0)
            for masks in self._masks()
            for name, shape in masks.items()
        ]
        return torch.cat([candidates.flatten(1), torch.cat(starts).expand(len(candidates), -1)], 1)

    def split(self, extended: Tensor) -> tuple[Tensor, list[StepMasks]]:
        """One victim's candidate, and the masks of every round and step; a pure function."""
        shapes = [shape for masks in self._masks() for shape in masks.values()]
        parts = iter(torch.split(extended, [math.prod(self.shape), *map(math.prod, shapes)]))
        candidate = next(parts).view(self.shape)
        rounds: list[StepMasks] = [
            [
                {name: self.largest[name] * next(parts).view(shape).sigmoid() for name, shape in masks.items()}
                for masks in steps
            ]
            for steps in self.steps
        ]
        return candidate, rounds

    def candidates(self, extended: Tensor) -> Tensor:
        """The candidates ``[victims, ...]`` of extended ones."""
        return extended[:, : math.prod(self.shape)].reshape(-1, *self.shape)

    def with_candidates(self, extended: Tensor, candidates: Tensor) -> Tensor:
        """The extended candidates with others in their place and the same masks."""
        return torch.cat([candidates.flatten(1), extended[:, math.prod(self.shape) :]], 1)

    def _masks(self) -> list[dict[str, tuple[int, ...]]]:
        return [masks for steps in self.steps for masks in steps]
