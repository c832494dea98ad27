"""Tensors by name that can be compared."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


class Tensors(Mapping[str, Tensor]):
    """Named tensors that stay as they are: equal if all of them are, so that a frozen method can hold them.

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
