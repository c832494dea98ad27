"""Per-example gradients, each clipped to a norm."""

import torch
from torch import Tensor

from gradveil.core.errors import NotFiniteError, ParameterError
from gradveil.task import Gradients, Task

MEMORY_BUDGET = 1 << 29
"""Bytes that the per-example gradients held at once may take."""

_MARGIN = 1 - 2.0**-20  # covers more than double precision loses when the squares of 2^30 values are summed


def clipped_sum(task: Task, inputs: Tensor, labels: Tensor, clip: float, *, grid: float | None = None) -> Gradients:
    """The sum of the examples' gradients, each scaled down to norm `clip` if it is longer.

    The norm is taken over all layers of one example together.

    Args:
        task: the model.
        inputs: the examples.
        labels: their labels.
        clip: largest norm of one example's gradient.
        grid: a power of two. Every value of a clipped gradient is truncated towards zero to a multiple of it, so that
            no example exceeds `clip` despite earlier rounding, and the sum, in double precision, is exact. None: work
            in the model's precision and refuse a gradient that is not finite.
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
    chunk_size = max(1, MEMORY_BUDGET // (task.size * bytes_each))
    for chunk in torch.split(torch.arange(len(inputs), device=inputs.device), chunk_size):
        gradients = task.for_examples(chunk).per_example_gradients(inputs[chunk], labels[chunk])
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
            # An example whose gradient overflows counts as zero: refusing would tell the server that there is one.
            scale = torch.where(finite, (clip * _MARGIN / norms).clamp_max(1) / grid, 0)
            for name, value in gradients.items():
                shape = (-1, *[1] * (value.ndim - 1))
                grid_steps = (torch.where(finite.view(shape), value, 0) * scale.view(shape)).trunc()
                total[name] += grid_steps.sum(0) * grid
    return total
