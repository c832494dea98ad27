"""Evaluate a cost for many victims: one by one or as one batched program, whichever is faster."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from gradveil.core import checks, compilation
from gradveil.task import Task

EXECUTIONS = ("auto", "loop", "batch", "compile", "compile-loop")


class Objective:
    """Losses and gradients of one cost for many victims.

    Args:
        cost: ``cost(candidate, *victim)`` for one victim, a scalar; must be vmap-able.
        victims: tensors with a leading victim dimension, possibly nested; each call of `cost` gets one victim's slices.
        alone: the same cost in a form that need not be vmap-able, for ``"loop"``; default: `cost`.
        execution: ``"loop"``: victim by victim; ``"batch"``: one vmapped program; ``"compile-loop"`` and ``"compile"``:
            the same two, compiled; ``"auto"``: whichever is fastest when the first evaluations are timed.
        evaluations: how often all victims will be evaluated, so that ``"auto"`` can tell whether compiling pays off.
        victim_bytes: memory needed to evaluate one victim.
        memory_budget: bytes that the victims evaluated at once may take; if they need more, they are split into chunks.

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
        alone: Callable[..., Tensor] | None = None,
        execution: str = "auto",
        evaluations: int = 1,
        victim_bytes: int = 1,
        memory_budget: int = 2 << 30,
    ) -> None:
        self.execution = checks.choice("attack", "execution", execution, EXECUTIONS)
        self._victims = victims
        self._cost, self._alone = cost, alone or cost
        self._many = vmap(grad_and_value(cost))
        self._evaluations = evaluations
        self._chunk = max(1, memory_budget // victim_bytes)
        self._compiled = self._compile(execution)

    def __call__(self, candidates: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Losses ``[n]`` and gradients ``[n, ...]`` of `candidates` of the victims with these `indices`."""
        if self.execution == "auto":
            self.execution = self._find_fastest(candidates, indices)
        chunks = [slice(start, start + self._chunk) for start in range(0, len(indices), self._chunk)]
        parts = [self._evaluate(candidates[chunk], indices[chunk]) for chunk in chunks]
        return torch.cat([losses for losses, _ in parts]), torch.cat([gradients for _, gradients in parts])

    def _evaluate(self, candidates: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        if self.execution == "loop":
            return self._loop(candidates, indices)
        if self.execution == "batch":
            return self._batch(self._many, candidates, indices)
        if self.execution == "compile-loop":
            pairs = zip(candidates, indices, strict=True)
            parts = [self._batch(self._compiled, candidate, index) for candidate, index in pairs]
            return torch.stack([loss for loss, _ in parts]), torch.stack([gradient for _, gradient in parts])
        # Every new shape is compiled anew, so a batch that has shrunk is padded with its first victim.
        missing = min(self._chunk, self._count) - len(indices)
        filled = torch.cat([candidates, candidates[:1].expand(missing, *candidates.shape[1:])])
        losses, gradients = self._batch(self._compiled, filled, torch.cat([indices, indices[:1].expand(missing)]))
        return losses[: len(indices)], gradients[: len(indices)]

    def _compile(self, execution: str) -> Any:
        functions = {"compile": self._many, "compile-loop": grad_and_value(self._cost)}
        return compilation.compiled(functions[execution]) if execution in functions else None

    def _batch(self, function: Any, candidates: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        gradients, losses = function(candidates, *tree_map(lambda tensor: tensor[indices], self._victims))
        return losses.detach(), gradients.detach()

    def _loop(self, candidates: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        losses, gradients = [], []
        for candidate, index in zip(candidates, indices.tolist(), strict=True):
            leaf = candidate.detach().requires_grad_()
            loss = self._alone(leaf, *tree_map(lambda tensor, index=index: tensor[index], self._victims))
            losses.append(loss.detach())
            gradients.append(torch.autograd.grad(loss, leaf)[0])
        return torch.stack(losses), torch.stack(gradients)

    @property
    def _count(self) -> int:
        return len(tree_leaves(self._victims)[0])

    def _find_fastest(self, candidates: Tensor, indices: Tensor) -> str:
        """Time a victim alone and in a batch; compile if the run is long enough for that to pay off."""
        chunk = min(self._chunk, len(indices))
        alone = _seconds(lambda: self._loop(candidates[:1], indices[:1]))
        batched = math.inf
        if chunk > 1:
            batched = _seconds(lambda: self._batch(self._many, candidates[:chunk], indices[:chunk])) / chunk
        uncompiled = min(alone, batched) * self._count * self._evaluations
        if compilation.is_worth_it(uncompiled, len(tree_leaves(self._victims))):
            chosen = "compile" if batched < alone else "compile-loop"
            self._compiled = self._compile(chosen)
            return chosen
        return "batch" if batched < alone else "loop"


def _seconds(work: Callable[[], object]) -> float:
    """The time of one call: the better of two, after a warm-up call."""
    work()
    times = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def choose_execution(task: Task, batch_size: int) -> str:
    """Loop or batch, by size and not by timing: they round differently, and an audit must be repeatable to the bit.

    Measured on two cores: one vmapped program for all victims is three times faster on lenet (30,000 values) and
    slower on convnet and resnet18 (millions).
    """
    return "batch" if batch_size * task.activations + task.size < 300_000 else "loop"
