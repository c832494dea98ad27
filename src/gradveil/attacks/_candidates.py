"""What clients that hold one candidate each would send, as rows: a table to compare updates with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from gradveil.defenses.base import Batch
from gradveil.defenses.knowledge import Draw, Expect
from gradveil.task import Gradients, Task
from gradveil.task.sensitivity import chunk_size

_CALIBRATION = 64
"""Batches of candidates that the running statistics of batch norms follow; at the usual momentum of 0.1, what they were
before counts for a thousandth after that."""
_CHUNK = 200
"""Candidates whose gradients are computed at a time, at most; more of them leave the processor's caches and are slower
(a LeNet by a quarter)."""


class ChosenValues:
    """An update as one row: its values or, if there are too many, a fixed random subset of them.

    Inner products of rows estimate those of updates up to a common factor, and noise stays as it is relative to the
    signal; only the number of values that speak against a wrong candidate is smaller.

    Args:
        task: the model whose updates are meant.
        most: how many values a row may have.
        generator: chooses the subset.

    Example:
        >>> task = Task(torch.nn.Linear(2, 2), input_shape=(2,), classes=2)
        >>> updates = {"weight": torch.ones(3, 2, 2), "bias": torch.zeros(3, 2)}
        >>> ChosenValues(task, 100, torch.Generator()).rows(updates)[0].tolist()
        [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
        >>> ChosenValues(task, 5, torch.Generator()).rows(updates).shape
        torch.Size([3, 5])
    """

    def __init__(self, task: Task, most: int, generator: torch.Generator) -> None:
        self.all = task.size <= most
        self.width = min(task.size, most)
        self.shapes = {name: value.shape for name, value in task.parameters.items()}
        self._places: dict[str, Tensor] = {}
        if self.all:
            return
        order = torch.randperm(task.size, generator=generator, device=generator.device)
        chosen, first = order[:most].sort().values.to(task.device), 0
        for name, shape in self.shapes.items():
            here = chosen - first
            self._places[name] = here[(here >= 0) & (here < shape.numel())]
            first += shape.numel()

    def rows(self, updates: Mapping[str, Tensor]) -> Tensor:
        """Updates ``[clients, *parameter shape]`` by name as rows ``[clients, width]``."""
        flat = {name: updates[name].flatten(1) for name in self.shapes}
        return torch.cat([flat[n] if self.all else flat[n][:, self._places[n]] for n in flat], 1)

    def update(self, row: Tensor) -> Gradients:
        """The update that has this row; it cannot be told from a subset."""
        assert self.all
        parts = torch.split(row, [shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


@dataclass(frozen=True, eq=False)
class CandidateClients:
    """Clients that hold one candidate each, as an attacker simulates them.

    Args:
        tasks: the model in each round, at the weights at which gradients are taken.
        candidates: inputs and labels.
        expect: what the defense turns the gradients of all rounds into, see `Knowledge.expect`; None: they stay.
        draw: simulated draws of the defense, see `Knowledge.draw`, whose mean is taken; None: there are none.
        updates: what the server saw of the victim in each round, for `expect`.
        weight: how often the gradient of a client's only example counts in its update; rows are in units of one.
    """

    tasks: Sequence[Task]
    candidates: Batch
    expect: Expect | None = None
    draw: Draw | None = None
    updates: Sequence[Gradients] = ()
    weight: float = 1.0

    def sent(self, places: Tensor) -> list[Gradients]:
        """What the clients with these candidates send in each round, ``[clients, *parameter shape]`` by name.

        What the defense would make of a gradient of zero is left out: it is the same for all (see `offset`).
        """
        inputs, labels = (part[places] for part in self.candidates)
        rounds = [self._gradients(task, inputs, labels) for task in self.tasks]
        if self.expect is None:
            return rounds
        offset = self.offset()
        assert offset is not None
        expect = self.expect
        expected: list[Gradients] = vmap(lambda *gradients: expect(gradients, self.updates))(*rounds)
        return [
            {name: value - zero[name] for name, value in values.items()}
            for values, zero in zip(expected, offset, strict=True)
        ]

    def offset(self) -> list[Gradients] | None:
        """What the defense sends in each round for a gradient of zero; error feedback sends what it held back."""
        if self.expect is None:
            return None
        zeros = [{name: torch.zeros_like(value) for name, value in task.parameters.items()} for task in self.tasks]
        return self.expect(zeros, self.updates)

    def _gradients(self, task: Task, inputs: Tensor, labels: Tensor) -> Gradients:
        parameters = task.parameters
        gradients: Gradients = vmap(lambda x, y: task.gradient(parameters, x[None], y[None]))(inputs, labels)
        if self.draw is None:
            return gradients
        means = []
        for place in range(len(inputs)):
            own = {name: self.weight * value[place] for name, value in gradients.items()}
            drawn = self.draw(task, own, inputs[place : place + 1], labels[place : place + 1])
            means.append({name: torch.stack([draw[name] for draw in drawn]).mean(0) / self.weight for name in own})
        return {name: torch.stack([mean[name] for mean in means]) for name in parameters}

    def weighted_sum(self, places: Tensor, weights: Tensor) -> list[Gradients]:
        """The sum of these candidates' undefended gradients, each times its weight, in every round.

        It takes one backward pass for all of them, in which no example's own gradient is formed.
        """
        inputs, labels = (part[places] for part in self.candidates)

        def total(parameters: Gradients, task: Task) -> Tensor:
            return weights @ vmap(lambda x, y: task.loss(parameters, x[None], y[None]))(inputs, labels)

        return [grad(total)(dict(task.parameters), task) for task in self.tasks]

    @torch.no_grad()
    def table(self, chosen: ChosenValues, done: Callable[[int], None]) -> Tensor:
        """The rows of all candidates, ``[candidates, rounds * width]``, computed in chunks that fit into memory.

        Args:
            chosen: the values of a row.
            done: called with the number of candidates that were finished.
        """
        count, task = len(self.candidates[0]), self.tasks[0]
        rows = torch.empty(count, len(self.tasks) * chosen.width, dtype=task.dtype, device=task.device)
        size = min(_CHUNK, chunk_size(task, len(self.tasks)))
        for places in torch.split(torch.arange(count, device=task.device), size):
            rows[places] = torch.cat([chosen.rows(gradients) for gradients in self.sent(places)], 1)
            done(len(places))
        return rows


def with_fixed_norms(task: Task, inputs: Tensor, batch_size: int, generator: torch.Generator) -> Task:
    """The task with batch norms that use fixed statistics: those of batches of `batch_size` of these inputs.

    Args:
        task: a model with batch statistics.
        inputs: examples like those of the clients.
        batch_size: examples of a client.
        generator: draws the batches.
    """
    buffers = task.buffers
    for _ in range(_CALIBRATION):
        order = torch.randperm(len(inputs), generator=generator, device=generator.device)[:batch_size]
        batch = inputs[order.to(inputs.device)]
        buffers = {**buffers, **task.with_parameters(task.parameters, buffers).updated_buffers(batch)}
    return task.with_fixed_norms(buffers)
