"""Rows of a table: numeric columns scaled to [0, 1] and one-hot blocks for categories, judged cell by cell."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from gradveil.core.errors import DataError
from gradveil.core.parameters import state
from gradveil.core.randomness import Source
from gradveil.modality.base import MODALITIES, Written
from gradveil.modality.written import Fragment

TOLERANCE = 0.05
"""The share of a numeric column's range by which a recovered cell may be wrong."""
FIRST_CODE = 2.0
"""The number that stands for the first category in compared rows; numeric cells lie below, from 0 to 1."""
LEAST_CELLS = 50.0  # %
DRAWS = 16  # `scripts/table_leak_rule.py` measures what the rule takes for a leak by mistake
_NAN = 0.5  # never wrong by more than half the range
_LEAST_SPREAD = 0.01
_LEAST_SHARE = 1e-4  # a category that only the test rows have

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        name: its heading.
        low: the smallest value of a numeric column in the training data; it becomes 0.
        high: the largest one; it becomes 1.
        whole: whether all values are whole numbers, so that they are shown without decimals.
        categories: the values of a categorical column; empty if it is numeric.
        middle: the median of a numeric column in the training data, scaled.
        spread: how far its values are from that on average, scaled.
        shares: how frequent each category is in the training data; empty if that is not known.

    Example:
        >>> Column("age", 17, 90).width, Column("sex", categories=("female", "male")).width
        (1, 2)
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    whole: bool = False
    categories: tuple[str, ...] = ()
    middle: float = 0.5
    spread: float = 0.25
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.categories) == 1 or (not self.categories and not self.low < self.high):
            raise DataError(f"column {self.name!r}: expected at least two different values, got one")

    @property
    def width(self) -> int:
        """How many values of an input it takes."""
        return len(self.categories) or 1

    def surprise(self, values: Tensor, rounding: float) -> Tensor:
        r"""Minus the logarithm of how likely the values are, up to a constant.

        Numbers are taken for Laplace variables, :math:`|x - middle| / spread`, and a soft block p for a category drawn
        from it, :math:`-\sum_i |p_i| \log share_i`, bounded below for blocks that a search has not projected yet.

        Args:
            values: ``[..., width]``.
            rounding: smooths the absolute value, ``sqrt(d^2 + rounding^2)``.
        """

        def size(distances: Tensor) -> Tensor:
            return (distances.square() + rounding**2).sqrt() if rounding else distances.abs()

        if not self.categories:
            return size(values[..., 0] - self.middle) / max(self.spread, _LEAST_SPREAD)
        shares = values.new_tensor(self.shares or [1 / self.width] * self.width)
        return -(size(values) * shares.clamp_min(_LEAST_SHARE).log()).sum(-1)

    def median_between(self, low: Tensor, high: Tensor) -> Tensor:
        """The median of the Laplace variable of `surprise`, if it is known to lie between two numbers.

        >>> numbers = torch.tensor([0.2, 0.4, 0.9]), torch.tensor([0.3, 0.6, 1.0])
        >>> [round(value, 3) for value in Column("age", middle=0.5, spread=0.05).median_between(*numbers).tolist()]
        [0.272, 0.5, 0.928]
        """
        spread = max(self.spread, _LEAST_SPREAD)
        start, end = ((edge.double() - self.middle) / spread for edge in (low, high))
        # By symmetry, the interval may lie left of the middle, where the mass of tails does not vanish in rounding.
        mirrored = start + end > 0
        start, end = torch.where(mirrored, -end, start), torch.where(mirrored, -start, end)
        mass = start.exp() + torch.where(end <= 0, end.clamp(max=0).exp(), 2 - (-end).clamp(max=0).exp())
        found = (mass / 2).log()
        return (self.middle + spread * torch.where(mirrored, -found, found)).to(low.dtype)


@MODALITIES.register("table")
@dataclass(frozen=True)
class Table(Written):
    """Rows of a table, stored as float32 ``[columns]``: numbers as they are, categories by their index.

    As an input, a numeric cell is scaled to [0, 1] by the range of its column in the training data (numbers outside
    are clamped) and a categorical cell is a block of zeros with a one. Attacks search soft blocks, which are not
    negative and sum to one; the largest value of a block decides which category was found.

    Args:
        columns: what is known about each column; empty if only the words for reports are needed.

    Example:
        >>> table = Table(columns=(Column("age", 17, 90, whole=True), Column("sex", categories=("female", "male"))))
        >>> inputs = table.inputs_of(torch.tensor([[17.0, 1.0], [90.0, 0.0]]))
        >>> inputs
        tensor([[0., 0., 1.],
                [1., 1., 0.]])
        >>> [fragment.text for fragment in table.write(inputs, None)[0]]
        ['17', 'male']
        >>> table.project(torch.tensor([[1.5, 0.3, 0.3]]))
        tensor([[1.0000, 0.5000, 0.5000]])
        >>> table.leak_rule({"cells": 90.0}, {"cells": 60.0}), table.leak_rule({"cells": 70.0}, {"cells": 60.0})
        ('cells', None)
    """

    unit = "row"
    primary = "cells"
    dimensions = 1
    bounds = (0.0, 1.0)
    guess = "the column medians and most frequent categories of the class"
    rule = (
        f"share of recovered cells of at least {LEAST_CELLS:g} %, and at least halfway from the blind guess's share to "
        f"100 % (a number counts as recovered within {100 * TOLERANCE:g} % of its column's range, a category if it is "
        f"exact; in a batch, {DRAWS} random draws of public rows are blind guesses too)"
    )
    threshold = LEAST_CELLS
    draws = DRAWS
    ensembles = True
    margin = "at least halfway to all cells from"

    columns: tuple[Column, ...] = state(())

    @property
    def settings(self) -> Mapping[str, Any]:
        """The columns."""
        return {"columns": [asdict(column) for column in self.columns]}

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """The table with these columns."""
        lists = ("categories", "shares")
        columns = ({**column, **{key: tuple(column[key]) for key in lists}} for column in settings["columns"])
        return type(self)(columns=tuple(Column(**column) for column in columns))

    def check_stored(self, where: str, stored: Tensor) -> None:
        """Refuse anything but finite ``float32 [N, columns]`` with the indices of known categories."""
        if stored.dtype != torch.float32 or stored.ndim != 2 or stored.shape[1] != len(self.columns):
            raise DataError(
                f"{where} rows must be float32 [N, {len(self.columns)}], "
                f"got {str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}"
            )
        if not bool(stored.isfinite().all()):
            raise DataError(f"{where} rows must be finite, got NaN or infinity")
        for column, values in zip(self.columns, stored.T, strict=True):
            known = torch.isin(values, torch.arange(len(column.categories), dtype=stored.dtype, device=stored.device))
            if column.categories and not bool(known.all()):
                raise DataError(
                    f"{where} rows must have an index below {len(column.categories)} in the categorical column "
                    f"{column.name!r}, got {values[~known][0].item():g}"
                )

    def input_shape(self, stored_shape: Sequence[int]) -> tuple[int, ...]:
        """One value for each numeric column and one for each category."""
        return (sum(column.width for column in self.columns),)

    def inputs_of(self, stored: Tensor) -> Tensor:
        """Scale numbers and expand categories."""
        parts = []
        for column, values in zip(self.columns, stored.T, strict=True):
            if column.categories:
                parts.append(torch.nn.functional.one_hot(values.long(), column.width).to(stored.dtype))
            else:
                parts.append(((values - column.low) / (column.high - column.low)).clamp(0, 1)[:, None])
        return torch.cat(parts, 1)

    def start(
        self, shape: Sequence[int], generator: torch.Generator, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Uniform numbers, and blocks that are uniform among all that sum to one."""
        drawn = torch.rand(tuple(shape), generator=generator, dtype=dtype, device=device)

        def spread(block: Tensor) -> Tensor:
            exponential = -torch.log1p(-block)
            return exponential / exponential.sum(-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)

        return self.project(self._by_column(drawn, lambda numbers: numbers, spread))

    def noise(self, inputs: Tensor, source: Source) -> Tensor:
        """Random rows: uniform numbers, and categories of which each is equally likely."""
        return self.decode(super().noise(inputs, source))

    def project(self, inputs: Tensor) -> Tensor:
        """Clamp numbers to [0, 1], and move blocks to the nearest point of the simplex."""
        return self._by_column(inputs, lambda numbers: numbers.clamp(0, 1), nearest_on_simplex)

    def decode(self, found: Tensor) -> Tensor:
        """The category with the largest value of each block."""

        def largest(block: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(block.argmax(-1), block.shape[-1]).to(block.dtype)

        return self._by_column(found, lambda numbers: numbers, largest)

    def repaired(self, found: Tensor) -> Tensor:
        """Finite and in range, with NaN as the middle of the range."""
        return self.project(found.nan_to_num(nan=_NAN))

    def prior(self, inputs: Tensor, *, rounding: float = 0.0) -> Tensor | None:
        """How unusual the cells are, by the frequencies of the training data, which anybody may know.

        It is half the sum of `Column.surprise` over all cells, divided by the number of values: with the weight that
        adaptive attackers give it, the result of their search under normal noise is the most likely one.
        """
        cells = [
            column.surprise(inputs[..., place], rounding).sum()
            for column, place in zip(self.columns, self._places, strict=True)
        ]
        return torch.stack(cells).sum() / (2 * inputs.numel())

    def unblended(self, blends: Tensor, most: float, deviation: float) -> Tensor:
        r"""The likeliest rows x behind blends ``(1 - r) x + r v`` with random rows v, as `noise` draws them.

        A row's r is the mean of what its blocks have outside their largest values, in units of what a random category
        puts there; it is at most `most` (and at most 1/2, where x and v are confused). Rows without categories do not
        tell r and are left as they are. Given r, a number x that became y lies between ``(y - r) / (1 - r)`` and
        ``y / (1 - r)``, and `Column.median_between` these is taken. A block p holds category i with weight

        .. math:: share_i \sum_j \exp\Big(-\frac{|p - (1 - r) e_i - r e_j|^2}{2 \, deviation^2}\Big)

        Args:
            blends: rows ``[N, values]``, soft ones allowed.
            most: the largest r.
            deviation: of the errors in the values of a block.
        """
        parts = list(zip(self.columns, self._places, strict=True))
        widths = [column.width for column in self.columns if column.categories]
        outside = [1 - blends[..., place].amax(-1) for column, place in parts if column.categories]
        if not outside:
            return blends
        unit = sum(1 - 1 / width for width in widths)
        share = (torch.stack(outside).sum(0) / unit).clamp(0, min(most, 0.5))[..., None]
        rows = [
            _likeliest_category(column, blends[..., place], share, deviation)
            if column.categories
            else column.median_between(
                ((blends[..., place] - share) / (1 - share)).clamp(0, 1), (blends[..., place] / (1 - share)).clamp(0, 1)
            )
            for column, place in parts
        ]
        return self.project(torch.cat(rows, -1))

    def compared(self, inputs: Tensor) -> Tensor:
        """One number for each cell ``[N, columns]``: scaled numbers, and `FIRST_CODE` or more for categories."""
        parts = [inputs[..., place] for place in self._places]
        cells = [part[..., 0] if part.shape[-1] == 1 else FIRST_CODE + part.argmax(-1) for part in parts]
        return torch.stack(cells, -1)

    def distances(self, originals: Tensor, found: Tensor) -> Tensor:
        """The number of cells that are not recovered; the squared distance decides between equals."""
        wrong = ~recovered(self.compared(originals)[:, None], self.compared(found)[None])
        return wrong.sum(-1) + 1e-6 * super().distances(originals, found)

    def typical(self, stored: Tensor) -> Tensor:
        """The median of each numeric column and the most frequent category of each other one."""
        cells = [
            values.mode().values if column.categories else values.median()
            for column, values in zip(self.columns, stored.T, strict=True)
        ]
        return self.inputs_of(torch.stack(cells)[None])[0]

    def leak_rule(self, scores: Mapping[str, float | None], blind: Mapping[str, float | None] | None) -> str | None:
        """Whether an attack has recovered at least half of what the blind guess misses.

        Since columns have typical values, the blind guess gets many cells right. Half of the other cells is more than
        another row of the class has in common with this one by chance, which `scripts/table_leak_rule.py` measures.
        """
        cells, guess = scores["cells"], None if blind is None else blind["cells"]
        if cells is None or cells < max(LEAST_CELLS, (100 + (guess or 0.0)) / 2):
            return None
        return None if guess is not None and cells <= guess else "cells"

    def write(self, examples: Tensor, originals: Tensor | None) -> list[list[Fragment]]:
        """The cells of each row, of which those that were recovered are marked."""
        cells = self.compared(examples)
        marks = None if originals is None else recovered(self.compared(originals), cells).tolist()
        return [
            [
                Fragment(self._text(column, cell), None if marks is None else marks[number][place], column.name)
                for place, (column, cell) in enumerate(zip(self.columns, row, strict=True))
            ]
            for number, row in enumerate(cells.tolist())
        ]

    def _text(self, column: Column, cell: float) -> str:
        if column.categories:
            return column.categories[round(cell - FIRST_CODE)]
        value = column.low + cell * (column.high - column.low)
        return f"{value:.0f}" if column.whole else f"{value:.4g}"

    @cached_property
    def _places(self) -> list[slice]:
        """Where the values of each column are in an input."""
        ends = torch.tensor([0, *(column.width for column in self.columns)]).cumsum(0).tolist()
        return [slice(start, stop) for start, stop in pairwise(ends)]

    def _by_column(self, inputs: Tensor, numbers: Change, blocks: Change) -> Tensor:
        """Change the numeric columns and the blocks of inputs."""
        parts = [inputs[..., place] for place in self._places]
        return torch.cat([blocks(part) if part.shape[-1] > 1 else numbers(part) for part in parts], -1)


def recovered(originals: Tensor, found: Tensor) -> Tensor:
    """Whether each cell of rows, as `Table.compared` has them, was recovered; different categories are 1 apart."""
    return (originals - found).abs() <= TOLERANCE


def _likeliest_category(column: Column, block: Tensor, share: Tensor, deviation: float) -> Tensor:
    """The category behind blocks ``[N, width]`` that are blends with a random one, see `Table.unblended`."""
    own, random = (1 - share)[..., None] * block[..., :, None], share[..., None] * block[..., None, :]
    same = torch.eye(column.width, dtype=block.dtype, device=block.device)
    # The terms of the square that depend on neither i nor j are left out.
    fits = (own + random - (share * (1 - share))[..., None] * same) / deviation**2
    frequencies = block.new_tensor(column.shares or [1 / column.width] * column.width).clamp_min(_LEAST_SHARE)
    found = (fits.logsumexp(-1) + frequencies.log()).argmax(-1)
    return torch.nn.functional.one_hot(found, column.width).to(block.dtype)


def nearest_on_simplex(block: Tensor) -> Tensor:
    """The nearest points with values of at least 0 that sum to one, along the last axis; NaN stays NaN.

    A block that already is one is not changed. The others are moved by the same amount in each value and cut off at
    0 (max(v - t, 0)), where t follows from the sorted values (Duchi et al., ICML 2008).

    >>> nearest_on_simplex(torch.tensor([0.75, 0.75, -1.0]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    width = block.shape[-1]
    rounding = 4 * width * torch.finfo(block.dtype).eps
    valid = (block >= 0).all(-1, keepdim=True) & ((block.sum(-1, keepdim=True) - 1).abs() <= rounding)
    # The same shift for all values changes nothing, nor does it matter how far one is from the largest beyond 1.
    shifted = (block - block.amax(-1, keepdim=True)).clamp_min(-1)
    ordered = shifted.sort(-1, descending=True).values
    counts = torch.arange(1, width + 1, dtype=block.dtype, device=block.device)
    shifts = (ordered.cumsum(-1) - 1) / counts
    kept = (ordered > shifts).sum(-1, keepdim=True).clamp_min(1)
    return torch.where(valid, block, (shifted - shifts.gather(-1, kept - 1)).clamp_min(0))
