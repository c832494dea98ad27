"""Coordinates of an update that are 0 whatever the client's data, so that the server sees nothing but noise there."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradveil.core.errors import InputError
from gradveil.task import Task

SILENT = -1000.0  # a bias at which no image in [0, 1] switches a ReLU on

Groups = dict[str, Tensor]
"""For every coordinate, the number of its group, whose gradients are 0 for the same reason; -1: not known to be 0."""


def known_zeros(task: Task, inputs: Tensor, *, batch_size: int = 256) -> Groups:
    """Coordinates whose gradient is exactly 0 on all of `inputs`, whatever the labels.

    This finds pixels that are always black in front of a linear layer, ReLU units that nothing switches on, units whose
    outgoing weights are all 0, and embedding rows that no input uses, without looking for any of them explicitly. It is
    a guess, which is better the more the inputs resemble the client's; `recover` notices wrong guesses and leaves their
    group out. Coordinates are grouped by reason, because they are wrong together: those of one unit, or those of one
    input feature.

    Args:
        task: the model as sent to the client.
        inputs: public data, none of it the client's.
        batch_size: number of inputs that are processed together.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> task = Task(model, input_shape=(1, 2, 2), classes=3)
        >>> images = torch.tensor([0.0, 1.0, 1.0, 1.0]).view(1, 1, 2, 2)
        >>> known_zeros(task, images)["1.weight"][0]
        tensor([ 0, -1, -1, -1])
    """
    zero = {name: torch.ones_like(value, dtype=torch.bool) for name, value in task.parameters.items()}
    classes, task = task.single_classes("known_zeros"), task.without_dropout()  # a mask only adds zeros
    for number, batch in enumerate(torch.split(inputs, batch_size)):
        # Labels change from image to image and batch to batch, so that no gradient is 0 because a label is missing.
        labels = (torch.arange(len(batch), device=batch.device) + number) % classes
        for name, value in task.gradients(batch, labels).items():
            zero[name] &= value == 0
    return _group(zero)


def _group(zero: Mapping[str, Tensor]) -> Groups:
    """Group rows that are entirely 0 (units), and the columns of the rest (features)."""
    groups: Groups = {}
    used_numbers = 0
    for name, mask in zero.items():
        rows = mask.view(len(mask), -1) if mask.dim() else mask.view(1, 1)
        units = torch.arange(rows.shape[0], device=mask.device)[:, None].expand(rows.shape)
        features = torch.arange(rows.shape[1], device=mask.device)[None, :].expand(rows.shape)
        zero_row = rows.all(1, keepdim=True)
        number = torch.where(zero_row, features.shape[1] + units, features) + used_numbers
        groups[name] = number.where(rows, torch.full_like(number, -1)).view(mask.shape)
        used_numbers += sum(rows.shape)
    return groups


def silence(task: Task, bias: str, units: Sequence[int]) -> Task:
    """Modify a model as an active server may: some ReLU units never switch on, so their gradients are 0.

    Args:
        task: the unmodified model.
        bias: name of the bias in front of the ReLU.
        units: which of its units to silence.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> task = Task(model, input_shape=(4,), classes=3)
        >>> known_zeros(silence(task, "0.bias", [2]), torch.rand(16, 4))["0.weight"][2].ge(0).all()
        tensor(True)
    """
    if bias not in task.parameters or task.parameters[bias].dim() != 1:
        names = ", ".join(name for name, value in task.parameters.items() if value.dim() == 1)
        raise InputError(f"noise-recovery: bias must be the name of a bias ({names}), got {bias!r}")
    values = task.parameters[bias].clone()
    values[list(units)] = SILENT
    return task.with_parameters({**task.parameters, bias: values})


def disconnect(task: Task, weight: str, units: Sequence[int]) -> Task:
    """Modify a model as an active server may: nothing leaves some units, so all that leads into them has gradient 0.

    Args:
        task: the unmodified model.
        weight: name of the weight that follows the units, ``[out, in]``.
        units: which of its inputs to cut off.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
        >>> task = Task(model, input_shape=(4,), classes=3)
        >>> known_zeros(disconnect(task, "2.weight", [2]), torch.rand(16, 4))["0.weight"][2].ge(0).all()
        tensor(True)
    """
    if weight not in task.parameters or task.parameters[weight].dim() < 2:
        names = ", ".join(name for name, value in task.parameters.items() if value.dim() >= 2)
        raise InputError(f"noise-recovery: weight must be the name of a weight ({names}), got {weight!r}")
    values = task.parameters[weight].clone()
    values[:, list(units)] = 0
    return task.with_parameters({**task.parameters, weight: values})
