"""Choosing values by the rank of their magnitude, with exact counts and in linear time."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

SHORT = 4096
"""Rows of at most this many values are sorted all together; longer ones are searched by histogram, one at a time."""

_DIGIT = 16  # bits of a magnitude that one histogram tells apart
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def share_of(share: float, count: int, rounding: Callable[[float], int]) -> int:
    """`share` of `count`, rounded; 0.05 * 20 is 1 although it is a little more in floating point."""
    return rounding(round(share * count, 9))


def keep_ranks(rows: Tensor, first: int, last: int) -> Tensor:
    """Zero all but the values whose rank by falling magnitude, in their row, lies in [first, last).

    Equal magnitudes are ranked by position, so exactly ``last - first`` values stay in every row.
    """
    if rows.shape[1] <= SHORT:
        return _keep_ranks_by_sorting(rows, first, last)
    return torch.stack([_keep_ranks_by_histogram(row, first, last) for row in rows])


def largest(rows: Tensor, count: int) -> Tensor:
    """Where the `count` values of largest magnitude lie in each row; ties go to the earlier position."""
    if rows.shape[1] <= SHORT:
        order = rows.abs().argsort(dim=1, descending=True, stable=True)[:, :count]
        return torch.zeros_like(rows, dtype=torch.bool).scatter(1, order, True)
    marks = []
    for row in rows:
        [(threshold, ties)] = _cuts(row, [count])
        marks.append((row.abs() > threshold).index_fill(0, ties, True))
    return torch.stack(marks)


def _keep_ranks_by_sorting(rows: Tensor, first: int, last: int) -> Tensor:
    order = rows.abs().argsort(dim=1, descending=True, stable=True)[:, first:last]
    return torch.zeros_like(rows).scatter(1, order, rows.gather(1, order))


def _keep_ranks_by_histogram(row: Tensor, first: int, last: int) -> Tensor:
    row = row.contiguous()
    (upper, removed_ties), (lower, kept_ties) = _cuts(row, [first, last])
    # Shrinking keeps what is larger than the threshold, in one pass; what is above the band then cancels exactly.
    kept = F.hardshrink(row, lower)
    kept[kept_ties] = row[kept_ties]
    if first:
        kept -= F.hardshrink(row, upper)
        kept[removed_ties] = 0
    return kept


def _cuts(row: Tensor, counts: list[int]) -> list[tuple[float, Tensor]]:
    """Split off the `count` largest values of a row, for each count: all above a threshold, and some equal to it.

    The bits of a magnitude, read as a whole number, order like the magnitude. A histogram of their leading digit
    tells in which bin the cut lies, one of the next digit inside that bin goes on, until all candidates are equal:
    a radix selection. Each pass is linear, and only the first looks at more than a bin.

    Returns:
        For each count the threshold and the positions of those equal to it that belong to the largest.
    """
    magnitudes = row.abs()
    keys = magnitudes.view(_INTEGERS[row.element_size()])
    bits = 8 * row.element_size() - 1  # the sign is gone
    shifts = [*range(bits - _DIGIT, 0, -_DIGIT), 0]
    digits = keys >> shifts[0]
    from_top = digits.bincount(minlength=1).flip(0).cumsum(0)
    cuts = []
    for count in counts:
        if count == 0:
            cuts.append((torch.inf, torch.empty(0, dtype=torch.long, device=row.device)))
            continue
        positions, left = _inside(digits, from_top, count)
        for before, shift in itertools.pairwise(shifts):
            candidates = (keys[positions] >> shift) & ((1 << (before - shift)) - 1)
            inside, left = _inside(candidates, candidates.bincount(minlength=1).flip(0).cumsum(0), left)
            positions = positions[inside]
        cuts.append((magnitudes[positions[0]].item(), positions[:left]))
    return cuts


def _inside(digits: Tensor, from_top: Tensor, count: int) -> tuple[Tensor, int]:
    """Positions whose digit is that of the `count`-th largest, and how many of them are among the `count` largest."""
    place = int(torch.searchsorted(from_top, count))
    above = int(from_top[place - 1]) if place else 0
    return (digits == len(from_top) - 1 - place).nonzero().flatten(), count - above
