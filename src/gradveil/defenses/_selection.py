"""Choosing values by the rank of their magnitude, with exact counts and in linear time."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

SHORT = 4096
"""Rows of at most this many values are sorted in one batch; longer ones are searched by histogram, one at a time."""

_DIGIT_BITS = 16  # bits of a magnitude that one histogram covers
_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def share_of(share: float, count: int, rounding: Callable[[float], int]) -> int:
    """`share` times `count`, rounded; 0.07 * 100 counts as 7 although it is a little more in floating point."""
    return rounding(round(share * count, 9))


def keep_ranks(rows: Tensor, first: int, last: int) -> Tensor:
    """Zero all values except those whose rank in their row, by falling magnitude, lies in [first, last).

    Equal magnitudes are ranked by position, so exactly ``last - first`` values remain in every row.
    """
    if rows.shape[1] <= SHORT:
        return _keep_ranks_by_sorting(rows, first, last)
    return torch.stack([_keep_ranks_by_histogram(row, first, last) for row in rows])


def largest(rows: Tensor, count: int) -> Tensor:
    """A mask of the `count` values of largest magnitude in each row; ties go to the earlier position."""
    if rows.shape[1] <= SHORT:
        order = rows.abs().argsort(dim=1, descending=True, stable=True)[:, :count]
        return torch.zeros_like(rows, dtype=torch.bool).scatter(1, order, True)
    masks = []
    for row in rows:
        [(threshold, ties)] = _cuts(row, [count])
        masks.append((row.abs() > threshold).index_fill(0, ties, True))
    return torch.stack(masks)


def _keep_ranks_by_sorting(rows: Tensor, first: int, last: int) -> Tensor:
    order = rows.abs().argsort(dim=1, descending=True, stable=True)[:, first:last]
    return torch.zeros_like(rows).scatter(1, order, rows.gather(1, order))


def _keep_ranks_by_histogram(row: Tensor, first: int, last: int) -> Tensor:
    row = row.contiguous()
    (upper, removed_ties), (lower, kept_ties) = _cuts(row, [first, last])
    # One pass of shrinking keeps the values above a threshold; those above the band then cancel exactly.
    kept = F.hardshrink(row, lower)
    kept[kept_ties] = row[kept_ties]
    if first:
        kept -= F.hardshrink(row, upper)
        kept[removed_ties] = 0
    return kept


def _cuts(row: Tensor, counts: list[int]) -> list[tuple[float, Tensor]]:
    """Where to cut off the `count` largest values of a row, for each count: all above a threshold, some equal to it.

    This is a radix selection. The bits of a magnitude, read as an integer, are ordered like the magnitude. A histogram
    of their leading digit finds the bin in which the cut lies, a histogram of the next digit inside that bin narrows it
    down, and so on until all candidates are equal. Each pass is linear, and only the first looks at more than one bin.

    Returns:
        For each count, the threshold and the positions of the values equal to it that belong to the largest.
    """
    magnitudes = row.abs()
    keys = magnitudes.view(_INTEGER_OF_SIZE[row.element_size()])
    bits = 8 * row.element_size() - 1  # without the sign
    shifts = [*range(bits - _DIGIT_BITS, 0, -_DIGIT_BITS), 0]
    digits = keys >> shifts[0]
    from_top = digits.bincount(minlength=1).flip(0).cumsum(0)
    cuts = []
    for count in counts:
        if count == 0:
            cuts.append((torch.inf, torch.empty(0, dtype=torch.long, device=row.device)))
            continue
        positions, needed = _cut_bin(digits, from_top, count)
        for previous_shift, shift in itertools.pairwise(shifts):
            candidates = (keys[positions] >> shift) & ((1 << (previous_shift - shift)) - 1)
            in_bin, needed = _cut_bin(candidates, candidates.bincount(minlength=1).flip(0).cumsum(0), needed)
            positions = positions[in_bin]
        cuts.append((magnitudes[positions[0]].item(), positions[:needed]))
    return cuts


def _cut_bin(digits: Tensor, from_top: Tensor, count: int) -> tuple[Tensor, int]:
    """Positions whose digit is that of the `count`-th largest, and how many of them are among the `count` largest."""
    bins_above = int(torch.searchsorted(from_top, count))
    values_above = int(from_top[bins_above - 1]) if bins_above else 0
    return (digits == len(from_top) - 1 - bins_above).nonzero().flatten(), count - values_above
