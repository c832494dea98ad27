"""Shares of the cells of a table that were recovered."""

from torch import Tensor

from gradveil.metrics.record import metric
from gradveil.modality.table import FIRST_CODE, recovered

_SHARE = {"better": "higher", "modalities": ("table",), "unit": "%", "digits": 0, "low": 0, "high": 100}


@metric("cells", "Cells", noticeable=5, **_SHARE)
def cells(originals: Tensor, found: Tensor) -> Tensor:
    """The share of the cells of each row that were recovered, in percent; rows as `Table.compared` has them.

    In words: The share of a row's cells that were recovered: numbers to within 5 % of the range of their column,
    categories exactly.

    >>> import torch
    >>> cells(torch.tensor([[0.50, 2.0, 3.0]]), torch.tensor([[0.54, 2.0, 2.0]]))
    tensor([66.6667])
    """
    return 100 * recovered(originals, found).float().mean(1)


@metric("numeric_cells", "Numbers", optional=True, **_SHARE)
def numeric_cells(originals: Tensor, found: Tensor) -> Tensor | None:
    """The same for numeric columns; None if there are none.

    In words: The share of the numeric cells that were recovered, to within 5 % of the range of their column.

    >>> import torch
    >>> numeric_cells(torch.tensor([[0.50, 2.0, 3.0]]), torch.tensor([[0.54, 2.0, 2.0]]))
    tensor([100.])
    """
    chosen = originals[0] < FIRST_CODE
    return cells(originals[:, chosen], found[:, chosen]) if chosen.any() else None


@metric("categorical_cells", "Categories", optional=True, **_SHARE)
def categorical_cells(originals: Tensor, found: Tensor) -> Tensor | None:
    """The same for categorical columns; None if there are none.

    In words: The share of the categorical cells that were recovered exactly.

    >>> import torch
    >>> categorical_cells(torch.tensor([[0.50, 2.0, 3.0]]), torch.tensor([[0.54, 2.0, 2.0]]))
    tensor([50.])
    """
    chosen = originals[0] >= FIRST_CODE
    return cells(originals[:, chosen], found[:, chosen]) if chosen.any() else None
