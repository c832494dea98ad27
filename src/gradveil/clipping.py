"""Gradients of single examples, each scaled down to a norm."""

import torch
from torch import Tensor

from gradveil.task import Gradients, Task

MEMORY = 1 << 29
"""Bytes that the gradients of the examples worked on at once may take."""


def clipped_sum(task: Task, inputs: Tensor, labels: Tensor, clip: float) -> Gradients:
    """The sum over the examples of their gradients, each scaled down to norm `clip` if it is longer.

    The norm runs over all layers of one example together.

    Args:
        task: the model.
        inputs: the examples.
        labels: their labels.
        clip: largest norm of one example's gradient.
    """
    total = {name: torch.zeros_like(value) for name, value in task.parameters.items()}
    together = max(1, MEMORY // (task.size * task.dtype.itemsize))
    for part in torch.split(torch.arange(len(inputs), device=inputs.device), together):
        gradients = task.per_example_gradients(inputs[part], labels[part])
        squares = torch.stack([value.flatten(1).square().sum(1) for value in gradients.values()]).sum(0)
        scale = (clip / squares.sqrt().clamp_min(torch.finfo(squares.dtype).tiny)).clamp_max(1)
        for name, value in gradients.items():
            total[name] += torch.tensordot(scale, value, dims=1)
    return total
