"""Coordinates of an update that are 0 whatever the client's data: there the server sees nothing but noise."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradveil.core.errors import InputError
from gradveil.task import Task

SILENT = -1000.0  # a bias at which no image in [0, 1] switches a ReLU on

Groups = dict[str, Tensor]
"""For every coordinate of every layer the number of the reason why it should be 0; -1: it need not be."""


def known_zeros(task: Task, inputs: Tensor, *, batch_size: int = 256) -> Groups:
    """Coordinates whose gradient is exactly 0 on all of `inputs`, for whichever labels.

    This finds pixels that are always black in front of a linear layer, ReLU units that nothing switches on, units whose
    outgoing weights are all 0 and embedding rows that no input uses, without looking for any of them. It is a guess as
    good as the inputs are like the client's; `recover` notices wrong ones and leaves their group out. Coordinates are
    grouped by the reason, since they are wrong together: those of one unit, or those of one input feature.

    Args:
        task: the model as the client is sent it.
        inputs: public data, none of it the client's.
        batch_size: how many of them are worked on together.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> task = Task(model, input_shape=(1, 2, 2), classes=3)
        >>> images = torch.tensor([0.0, 1.0, 1.0, 1.0]).view(1, 1, 2, 2)
        >>> known_zeros(task, images)["1.weight"][0]
        tensor([ 0, -1, -1, -1])
    """
    zero = {name: torch.ones_like(value, dtype=torch.bool) for name, value in task.parameters.items()}
    classes = task.single_classes("known_zeros")
    for number, batch in enumerate(torch.split(inputs, batch_size)):
        # Labels that change from image to image and batch to batch: no gradient is 0 for want of a label.
        labels = (torch.arange(len(batch), device=batch.device) + number) % classes
        for name, value in task.gradients(batch, labels).items():
            zero[name] &= value == 0
    return _group(zero)


def _group(zero: Mapping[str, Tensor]) -> Groups:
    """Numbers for rows that are 0 as a whole (units), then for the columns of the rest (features)."""
    groups: Groups = {}
    used = 0
    for name, mask in zero.items():
        rows = mask.view(len(mask), -1) if mask.dim() else mask.view(1, 1)
        units = torch.arange(rows.shape[0], device=mask.device)[:, None].expand(rows.shape)
        features = torch.arange(rows.shape[1], device=mask.device)[None, :].expand(rows.shape)
        whole = rows.all(1, keepdim=True)
        number = torch.where(whole, features.shape[1] + units, features) + used
        groups[name] = number.where(rows, torch.full_like(number, -1)).view(mask.shape)
        used += sum(rows.shape)
    return groups


def silence(task: Task, bias: str, units: Sequence[int]) -> Task:
    """What an active server sends: the ReLU units behind `bias` never switch on, so their gradients are 0.

    Args:
        task: the model as it should be.
        bias: name of the bias in front of a ReLU.
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
    """What another active server sends: nothing leaves these units, so all that leads into them has gradient 0.

    Args:
        task: the model as it should be.
        weight: name of the weight behind the units, ``[out, in]``.
        units: which inputs of it to cut off.

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
