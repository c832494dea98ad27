"""Gradients of single examples, each scaled down to a norm."""

import torch
from torch import Tensor

from gradveil.core.errors import NotFiniteError, ParameterError
from gradveil.task import Gradients, Task

MEMORY = 1 << 29
"""Bytes that the gradients of the examples worked on at once may take."""

_BELOW = 1 - 2.0**-20  # more than double precision loses in the sum of the squares of 2^30 values


def clipped_sum(task: Task, inputs: Tensor, labels: Tensor, clip: float, *, grid: float | None = None) -> Gradients:
    """The sum over the examples of their gradients, each scaled down to norm `clip` if it is longer.

    The norm runs over all layers of one example together.

    Args:
        task: the model.
        inputs: the examples.
        labels: their labels.
        clip: largest norm of one example's gradient.
        grid: a power of two. Every value of a clipped gradient is cut towards zero to a multiple of it, so that no
            example is longer than `clip` whatever rounding did before, and the sum, in double precision, is exact.
            None: as the model's precision has it, and a gradient that is not finite is refused.
    """
    if grid is not None and clip / grid * len(inputs) >= 2**53:
        raise ParameterError(
            f"dp-sgd: noise_multiplier is too small for the sum of {len(inputs)} clipped gradients to be exact on the "
            "grid of its noise; use at least 1e-4, or 0 to clip only"
        )
    total = {
        name: torch.zeros_like(value, dtype=None if grid is None else torch.float64)
        for name, value in task.parameters.items()
    }
    bytes_each = task.dtype.itemsize if grid is None else 8
    together = max(1, MEMORY // (task.size * bytes_each))
    for part in torch.split(torch.arange(len(inputs), device=inputs.device), together):
        gradients = task.per_example_gradients(inputs[part], labels[part])
        if grid is not None:
            gradients = {name: value.double() for name, value in gradients.items()}
        squares = torch.stack([value.flatten(1).square().sum(1) for value in gradients.values()]).sum(0)
        finite = squares.isfinite()
        if grid is None and not bool(finite.all()):
            raise NotFiniteError(
                "clipping: an example's gradient is not finite; lower the learning rate or check the data"
            )
        norms = squares.sqrt().clamp_min(torch.finfo(squares.dtype).tiny)
        if grid is None:
            scale = (clip / norms).clamp_max(1)
            for name, value in gradients.items():
                total[name] += torch.tensordot(scale, value, dims=1)
        else:
            # An example whose gradient overflows counts as zero: to refuse would tell the server that there is one.
            scale = torch.where(finite, (clip * _BELOW / norms).clamp_max(1) / grid, 0)
            for name, value in gradients.items():
                shape = (-1, *[1] * (value.ndim - 1))
                whole = (torch.where(finite.view(shape), value, 0) * scale.view(shape)).trunc()
                total[name] += whole.sum(0) * grid
    return total
