"""What leaves a client: an update, and how it is computed."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import InputError
from gradveil.core.randomness import Randomness, source_of
from gradveil.core.tensors import first_mismatch, shapes_of
from gradveil.task import Gradients, Task
from gradveil.update.local_steps import LocalSteps, with_momentum

MAX_BITS = 28
"""The most bits of a quantised value, more than the precision of a float32."""


@dataclass(frozen=True)
class Grid:
    r"""The equally spaced values of a quantised layer, which map integer codes to floating-point numbers.

    .. math:: value(c) = low + step \cdot c, \quad c = 0, ..., 2^{bits} - 1

    The product and the sum are each rounded to float64, the result to float32 and then to the layer's type (a float64
    layer keeps the float64), so that every machine gets the same bits.

    Args:
        low: the value of code 0.
        step: distance between neighbouring values; 0 if there is only one value.
        bits: width of a code, 1 to 28.

    Example:
        >>> Grid(low=-1.0, step=0.5, bits=2).values(torch.tensor([0, 1, 2, 3])).tolist()
        [-1.0, -0.5, 0.0, 0.5]
    """

    low: float
    step: float
    bits: int

    def __post_init__(self) -> None:
        checks.number("Grid", "low", self.low)
        checks.number("Grid", "step", self.step, low=0)
        checks.integer("Grid", "bits", self.bits, low=1, high=MAX_BITS)

    def values(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values that the codes represent."""
        values = codes.to(torch.float64) * self.step + self.low
        return values if dtype == torch.float64 else values.to(torch.float32).to(dtype)

    def codes(self, values: Tensor) -> Tensor:
        """The code nearest to each value, as int32.

        >>> Grid(low=-1.0, step=0.5, bits=2).codes(torch.tensor([-9.0, -0.6, 0.5])).tolist()
        [0, 1, 3]
        """
        steps = (values.to(torch.float64) - self.low) / (self.step or 1.0)
        return steps.round_().clamp_(0, 2**self.bits - 1).to(torch.int32)


@dataclass
class Meta:
    """What is known about an update besides its values.

    Args:
        round: number of the training round, if there is one.
        samples: how many examples the update was computed from.
        local: the client's local steps; None for a single gradient.
        bytes: length of the encoded update, set when it is encoded (see `gradveil.update.wire`).
        buffers: batch-norm statistics that travel with the update.
        grids: the values that quantised layers take, by parameter name; the encoder sends codes if all values
            of a block lie on the grid.
        clients: how many clients' updates this one is the sum of.

    Example:
        >>> Meta(samples=8).local is None
        True
    """

    round: int | None = None
    samples: int = 0
    local: LocalSteps | None = None
    bytes: int | None = None
    buffers: Gradients = field(default_factory=dict)
    grids: dict[str, Grid] = field(default_factory=dict)
    clients: int = 1


class Update(dict[str, Tensor]):
    """A client's update in gradient units: a dict from parameter name to tensor, with `meta`.

    Args:
        values: the tensors by parameter name.
        meta: how the update was computed.

    Example:
        >>> update = Update({"weight": torch.ones(2)}, Meta(samples=8))
        >>> update["weight"].tolist(), update.meta.samples
        ([1.0, 1.0], 8)
    """

    def __init__(self, values: Mapping[str, Tensor], meta: Meta | None = None) -> None:
        super().__init__(values)
        self.meta = meta or Meta()


class Rounds(tuple[tuple[Task, Update], ...]):
    """Several observed rounds of one victim on the same data, the first one first.

    Args:
        seen: the task of each round, with the weights that the victim was sent, and the update that it shared (a plain
            mapping of gradients is converted to one).

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> task = Task(model, input_shape=(1, 2, 2), classes=3)
        >>> update = compute_update(task, torch.rand(1, 1, 2, 2), torch.tensor([1]))
        >>> len(Rounds([(task, update), (task, update)]))
        2
    """

    def __new__(cls, seen: Iterable[tuple[Task, Mapping[str, Tensor]]]) -> "Rounds":
        """Refuse an empty sequence of rounds."""
        rounds = super().__new__(cls, [(task, u if isinstance(u, Update) else Update(u)) for task, u in seen])
        if not rounds:
            raise InputError("Rounds: expected at least one observed round, got none")
        return rounds


def compute_update(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    *,
    local: LocalSteps | None = None,
    generator: Randomness | None = None,
    gradients: Callable[[Task, Tensor, Tensor], Gradients] = Task.gradients,
) -> Update:
    """An honest client's update: one gradient, or (start - end) / lr after local SGD steps.

    Args:
        task: the model with the weights that the server sent.
        inputs: the client's batch.
        labels: its labels.
        local: local steps (FedAvg); None means a single gradient over the batch (FedSGD).
        generator: shuffles the examples before every epoch and draws the dropout masks of every step; default: a
            cryptographic stream.
        gradients: computes the gradient of one step; defenses that act in every step pass their own.
    """
    if local is None:
        task = task.with_masks(len(inputs), source_of(generator))
        meta = Meta(samples=len(inputs), buffers=task.updated_buffers(inputs))
        return Update(gradients(task, inputs, labels), meta)
    task.check(inputs, labels)
    source = source_of(generator)
    current, buffers = task.parameters, dict[str, Tensor]()
    # (start - end) / lr is the sum of the steps' velocities (without momentum, their gradients); summing these avoids
    # cancellation.
    total = {name: torch.zeros_like(value) for name, value in current.items()}
    velocity: Gradients = {}
    for _ in range(local.epochs):
        order = source.permutation(len(inputs), inputs.device)
        for batch in torch.split(order, local.batch_size or len(inputs)):
            step_task = task.with_parameters(current, buffers).with_masks(len(batch), source)
            step = gradients(step_task, inputs[batch], labels[batch])
            buffers = step_task.updated_buffers(inputs[batch])
            velocity = with_momentum(velocity, step, local.momentum)
            total = {name: value + velocity[name] for name, value in total.items()}
            current = {name: value - local.lr * velocity[name] for name, value in current.items()}
    return Update(total, Meta(samples=len(inputs), local=local, buffers=buffers))


def weighted_mean(updates: Sequence[Update], weights: Sequence[float] | None = None) -> Update:
    """Average updates, including the batch-norm statistics they carry.

    Args:
        updates: updates of one round, all of the same model.
        weights: non-negative, not all zero; scaled to sum to 1. Default: equal weights.
    """
    if not updates:
        raise InputError("aggregate: expected at least one update, got none")
    if weights is None:
        weights = [1.0] * len(updates)
    if len(weights) != len(updates) or not all(w >= 0 and math.isfinite(w) for w in weights) or sum(weights) <= 0:
        raise InputError(
            f"aggregate: expected {len(updates)} finite, non-negative weights with a positive sum, got {list(weights)}"
        )
    shares = [weight / sum(weights) for weight in weights]

    def mean(tensors: Sequence[Tensor]) -> Tensor:
        if not tensors[0].is_floating_point():  # a count of batches, which is the same for every client
            return tensors[0]
        total = torch.zeros_like(tensors[0])
        for share, tensor in zip(shares, tensors, strict=True):
            total.add_(tensor, alpha=share)
        return total

    shapes = shapes_of(updates[0])
    for update in updates:
        if (got := shapes_of(update)) != shapes:
            raise InputError(f"aggregate: expected updates of one model with layers {shapes}, got {got}")
        if wrong := first_mismatch(updates[0].meta.buffers, update.meta.buffers):
            name, expected, found = wrong
            raise InputError(f"aggregate: expected of every update for the statistic {name!r} {expected}, got {found}")
    buffers = {name: mean([u.meta.buffers[name] for u in updates]) for name in updates[0].meta.buffers}
    meta = Meta(round=updates[0].meta.round, samples=sum(u.meta.samples for u in updates), buffers=buffers)
    return Update({name: mean([update[name] for update in updates]) for name in shapes}, meta)
