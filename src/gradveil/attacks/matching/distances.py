"""Distances between gradients, each with the weight that a squared error has in it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.task import Gradients


@dataclass(frozen=True)
class Distance:
    """How far one victim's simulated update is from the shared one.

    Args:
        between: ``(simulated, shared)``: the distance, over the layers of the shared update.
        unit: ``(length, signal)``: what a squared error of 1 adds to the distance, for an update of squared length
            `length`, of which `signal` is not noise. A cost can thus add squared errors on the scale of the distance.

    Example:
        >>> one, other = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}
        >>> SQUARED.between(one, other), RELATIVE.between(one, other), COSINE.between(one, other)
        (tensor(5.), tensor(1.2500), tensor(1.))
    """

    between: Callable[[Gradients, Gradients], Tensor]
    unit: Callable[[Tensor, Tensor], Tensor]


def squared_length(gradients: Gradients) -> Tensor:
    """The squared Euclidean length of a gradient, over all layers together."""
    return torch.stack([value.square().sum() for value in gradients.values()]).sum()


def squared_distance(gradients: Gradients, target: Gradients) -> Tensor:
    """The squared Euclidean distance between two gradients."""
    return torch.stack([(gradients[name] - target[name]).square().sum() for name in target]).sum()


def cosine_distance(gradients: Gradients, target: Gradients) -> Tensor:
    """One minus the cosine between two gradients, over all layers together."""
    tiny = torch.finfo(next(iter(gradients.values())).dtype).tiny

    def dot(a: Gradients, b: Gradients) -> Tensor:
        return torch.stack([(a[name] * b[name]).sum() for name in target]).sum()

    lengths = dot(gradients, gradients).clamp_min(tiny) * dot(target, target).clamp_min(tiny)
    return 1 - dot(gradients, target) / lengths.sqrt()


def relative_distance(gradients: Gradients, target: Gradients) -> Tensor:
    """The squared distance in units of the target's squared length."""
    length = squared_length(target)
    return squared_distance(gradients, target) / length.clamp_min(torch.finfo(length.dtype).tiny)


SQUARED = Distance(squared_distance, lambda length, _signal: torch.ones_like(length))
RELATIVE = Distance(relative_distance, lambda length, _signal: length.reciprocal())
# Near a target u with signal g, an error adds 1 / (2 |u| |g|) times its square to the cosine distance.
COSINE = Distance(cosine_distance, lambda length, signal: 0.5 * (length * signal).rsqrt())
