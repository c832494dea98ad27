"""A model's arrays as Flower carries them, sorted by how they are treated; and updates made from them."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from gradveil.core.errors import InputError, NotFiniteError, ParameterError
from gradveil.update import Meta, Update

Statistics = torch.nn.Module | Iterable[str] | None


@dataclass(frozen=True)
class Arrays:
    """A model's arrays, sorted by how they are treated.

    Args:
        parameters: trained and defended.
        statistics: named by the client or server; sent as they are.
        constants: whole numbers and booleans that are not named as statistics: not trained, not sent.

    Example:
        >>> record = ArrayRecord({"weight": torch.ones(2), "mean": torch.zeros(2), "count": torch.tensor(3)})
        >>> [list(group) for group in vars(split_arrays(record, ["mean"])).values()]
        [['weight'], ['mean'], ['count']]
    """

    parameters: dict[str, Tensor]
    statistics: dict[str, Tensor]
    constants: dict[str, Tensor]


def split_arrays(record: ArrayRecord, statistics: Collection[str]) -> Arrays:
    """Sort the arrays of a record; `statistics` are the names of those that are sent as they are."""
    arrays = Arrays({}, {}, {})
    for name, value in record.to_torch_state_dict().items():
        if value.is_complex():
            raise InputError(f"flower: no defense knows complex numbers, got {value.dtype} for {name!r}")
        if name in statistics:
            arrays.statistics[name] = value
        else:
            (arrays.parameters if value.is_floating_point() else arrays.constants)[name] = value
    if missing := sorted(set(statistics) - set(arrays.statistics)):
        raise InputError(f"flower: expected the statistics {missing} among the model's arrays, got {list(record)}")
    return arrays


def statistic_names(owner: str, statistics: Statistics) -> frozenset[str]:
    """The names of the statistics: those of a model's buffers, or a list of names."""
    if statistics is None:
        return frozenset()
    if isinstance(statistics, torch.nn.Module):
        sent = statistics.state_dict()
        return frozenset(name for name, _ in statistics.named_buffers(remove_duplicate=False) if name in sent)
    return check_names(owner, "statistics", statistics, "a model (its buffers) or names of arrays")


def check_names(owner: str, parameter: str, given: Iterable[str], expected: str) -> frozenset[str]:
    """Return the names that a caller gave as `parameter`; raise unless they are a list of strings."""
    names = None if isinstance(given, str) else list(given)
    if names is None or not all(isinstance(name, str) for name in names):
        raise ParameterError(f"{owner}: {parameter} must be {expected}, got {given!r}; write a list")
    return frozenset(names)


def update_of(before: ArrayRecord, after: ArrayRecord, lr: float, statistics: Collection[str]) -> Update:
    """(before - after) / lr of the trained arrays, with the statistics; refuses changes that no defense acts on."""
    start, end = split_arrays(before, statistics), split_arrays(after, statistics)
    sent, returned = before.to_torch_state_dict(), after.to_torch_state_dict()
    trained = {
        name: value
        for name, value in end.parameters.items()
        # FedAvg turns whole numbers into floats: an app that returns the numbers themselves has not trained them.
        if name in start.parameters or name not in sent or not _equal(sent[name], value)
    }
    differing = [name for name in {**sent, **returned} if name not in sent or name not in returned]
    differing += [
        name
        for name, value in trained.items()
        if name in sent and (sent[name].shape, sent[name].dtype) != (value.shape, value.dtype)
    ]
    differing += [n for n, v in end.statistics.items() if n in sent and sent[n].shape != v.shape]
    if differing or list(before) != list(after):
        raise InputError(
            "flower: expected the client to return the arrays it got, trained, in the same order; "
            f"they differ in {differing or 'their order'}"
        )
    changed = [name for name, value in end.constants.items() if not _equal(sent[name], value)]
    if changed:
        raise InputError(
            f"flower: expected floating-point arrays, or whole numbers as they were sent, got others in {changed}; no "
            "defense acts on whole numbers. If they are statistics that may be sent as they are, write "
            "defense_mod(..., statistics=model)"
        )
    return Update(
        {name: (sent[name] - value) / lr for name, value in trained.items()}, Meta(buffers=dict(end.statistics))
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether the values are equal, whatever their types."""
    return one.shape == other.shape and bool((one == other).all())


def moved_arrays(before: ArrayRecord, update: Update, lr: float) -> ArrayRecord:
    """The arrays that a client with this update would have returned."""
    start = before.to_torch_state_dict()
    moved = {name: start[name] - lr * value for name, value in update.items()}
    for name, value in moved.items():
        if not torch.isfinite(value).all():
            raise NotFiniteError(f"flower: start - lr * update overflows in {name!r}; leave this one out")
    values = {**start, **update.meta.buffers, **moved}
    return ArrayRecord({name: values[name] for name in before})


def typed_like(before: ArrayRecord, after: ArrayRecord) -> ArrayRecord:
    """The arrays in their original types: FedAvg's means of whole numbers are floats, which would count as trained."""
    types = {name: value.dtype for name, value in before.to_torch_state_dict().items()}
    values = after.to_torch_state_dict()
    for name, value in values.items():
        dtype = types.get(name, value.dtype)
        if value.dtype != dtype:
            values[name] = (value if dtype.is_floating_point else value.round()).to(dtype)
    return ArrayRecord(values)
