"""Tensors by name, and how they are compared."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors by name.

    >>> shapes_of({"w": torch.ones(2, 3)})
    {'w': (2, 3)}
    """
    return {name: tuple(value.shape) for name, value in tensors.items()}


def first_mismatch(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> tuple[str, object, object] | None:
    """The first name whose shape differs or is missing in one of them, with both shapes; None if all shapes agree.

    >>> first_mismatch({"w": torch.ones(2)}, {"w": torch.ones(3)}), first_mismatch({}, {})
    (('w', (2,), (3,)), None)
    """
    expected_shapes, got_shapes = shapes_of(expected), shapes_of(got)
    for name in {**expected_shapes, **got_shapes}:
        if expected_shapes.get(name) != got_shapes.get(name):
            return name, expected_shapes.get(name, "no such tensor"), got_shapes.get(name, "no such tensor")
    return None


class Tensors(Mapping[str, Tensor]):
    """Immutable named tensors that compare by value, so that a frozen method can hold them.

    Args:
        values: the tensors by name.

    Example:
        >>> Tensors({"w": torch.ones(2)}) == Tensors({"w": torch.ones(2)})
        True
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Tensors)
            and list(self) == list(other)
            and all(torch.equal(value, other[name]) for name, value in self.items())
        )

    def __hash__(self) -> int:
        return hash(tuple((name, value.shape) for name, value in self.items()))
