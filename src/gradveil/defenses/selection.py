"""Choosing values by the rank of their magnitude, with exact counts."""

from collections.abc import Callable

import torch
from torch import Tensor


def share_of(share: float, count: int, rounding: Callable[[float], int]) -> int:
    """`share` of `count`, rounded; 0.05 * 20 is 1 although it is a little more in floating point."""
    return rounding(round(share * count, 9))


def keep_ranks(rows: Tensor, first: int, last: int) -> Tensor:
    """Zero all but the values whose rank by falling magnitude, in their row, lies in [first, last).

    Equal magnitudes are ranked by position, so exactly ``last - first`` values stay in every row.
    """
    order = rows.abs().argsort(dim=1, descending=True, stable=True)[:, first:last]
    return torch.zeros_like(rows).scatter(1, order, rows.gather(1, order))
