"""FedAvg's local steps, and how an update sums them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradveil.core import checks
from gradveil.task import Gradients


@dataclass(frozen=True)
class LocalSteps:
    """FedAvg: the SGD steps that a client takes before it shares its update.

    Args:
        epochs: passes over the client's data.
        batch_size: examples per step; None means all of them.
        lr: learning rate of each step.
        momentum: momentum of the steps; the velocity starts at zero in every round.

    Example:
        >>> LocalSteps(epochs=2, batch_size=16, lr=0.1)
        LocalSteps(epochs=2, batch_size=16, lr=0.1, momentum=0.0)
    """

    epochs: int = 1
    batch_size: int | None = None
    lr: float = 0.01
    momentum: float = 0.0

    def __post_init__(self) -> None:
        checks.integer("LocalSteps", "epochs", self.epochs, low=1)
        if self.batch_size is not None:
            checks.integer("LocalSteps", "batch_size", self.batch_size, low=1)
        checks.number("LocalSteps", "lr", self.lr, above=0)
        checks.number("LocalSteps", "momentum", self.momentum, low=0, below=1)


def sizes_of(local: LocalSteps | None, examples: int) -> list[int]:
    """The number of examples behind each gradient of an update, step by step.

    >>> sizes_of(LocalSteps(epochs=2, batch_size=2), examples=3)
    [2, 1, 2, 1]
    """
    if local is None:
        return [examples]
    size = local.batch_size or examples
    return local.epochs * [min(size, examples - first) for first in range(0, examples, size)]


def steps_of(local: LocalSteps | None, examples: int) -> int:
    """How many gradients an update sums."""
    return len(sizes_of(local, examples))


def step_weights(local: LocalSteps | None, examples: int) -> list[float]:
    """The weight of each gradient in an update: with momentum, a gradient counts again in every later step.

    >>> step_weights(LocalSteps(epochs=3, momentum=0.5), examples=8)
    [1.75, 1.5, 1.0]
    """
    momentum = 0.0 if local is None else local.momentum
    return [(1 - momentum**remaining) / (1 - momentum) for remaining in range(steps_of(local, examples), 0, -1)]


def total_weight(local: LocalSteps | None, examples: int) -> float:
    """The total weight of the gradients in an update.

    >>> total_weight(LocalSteps(epochs=3, momentum=0.5), examples=8)
    4.25
    """
    return sum(step_weights(local, examples))


def variance_factor(local: LocalSteps | None, examples: int) -> float:
    """The variance of an update relative to that of one of its gradients, if these are independent.

    >>> variance_factor(LocalSteps(epochs=3), examples=8), variance_factor(LocalSteps(epochs=2, momentum=0.5), 8)
    (3.0, 3.25)
    """
    return sum(weight**2 for weight in step_weights(local, examples))


def with_momentum(velocity: Mapping[str, Tensor], step: Gradients, momentum: float) -> Gradients:
    """The velocity of a step: its gradient plus, after the first step, the previous velocity times the momentum."""
    if not velocity or not momentum:
        return step
    return {name: momentum * velocity[name] + value for name, value in step.items()}
