"""Tables as data sets: CSV files with a target column, in which the type of every other column is inferred."""

import csv
import io
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from gradveil.core.errors import DataError
from gradveil.core.registry import suggest
from gradveil.data._arrays import Array, hold_out, open_regular, reading
from gradveil.data._limits import largest
from gradveil.data.dataset import Dataset, Split
from gradveil.modality import Column, Table

LEAST_ROWS = 10
MAX_CATEGORIES = 1000
MAX_CLASSES = 1000
_DELIMITERS = ",;\t"
_MISSING = re.compile(r"|nan", re.IGNORECASE)


@dataclass
class Values:
    """The cells of one column: the different texts, and for each row the number of its text.

    Example:
        >>> ages = Values("age")
        >>> for text in ("39", "50", "39"):
        ...     ages.add(text)
        >>> ages.texts, list(ages.codes), ages.numbers()
        (['39', '50'], [0, 1, 0], [39.0, 50.0])
    """

    name: str
    texts: list[str] = field(default_factory=list)
    codes: "array[int]" = field(default_factory=lambda: array("i"))
    _numbers: dict[str, int] = field(default_factory=dict)

    def add(self, text: str) -> None:
        """Add the cell of the next row."""
        code = self._numbers.setdefault(text, len(self.texts))
        if code == len(self.texts):
            self.texts.append(text)
        self.codes.append(code)

    def numbers(self) -> list[float] | None:
        """The texts as numbers; None if one of them is none."""
        try:
            return [float(text) for text in self.texts]
        except ValueError:
            return None


def load_csv(path: Path, target: str | None, name: str | None = None) -> Dataset:
    """Load a CSV file, whose first line names the columns; a fifth of the rows of each class becomes the test split.

    A column is numeric if every cell is a number and there are more than two different ones, else categorical. The
    `source` of the data set says which is which.

    Args:
        path: the file: UTF-8, with commas, semicolons or tabs between cells.
        target: the column that a model is to predict.
        name: the name of the data set; default: the path.
    """
    where = path.name
    columns = read_columns(where, _content(path))
    label = _target(where, columns, target)
    labels = np.asarray(label.codes, np.int64)
    train, test = hold_out(where, labels, "row")
    return table(name or str(path), where, columns, label, train, test)


def load_csv_splits(name: str, where: str, train: bytes, test: bytes, target: str) -> Dataset:
    """Load two CSV files with the same columns as the two splits of a data set."""
    columns, others = read_columns(where, train), read_columns(where, test)
    if [one.name for one in columns] != [one.name for one in others]:
        raise DataError(f"{where}: expected the same columns in train and test, got others; get it again")
    rows = len(columns[0].codes)
    for column, other in zip(columns, others, strict=True):
        for code in other.codes:
            column.add(other.texts[code])
    places = np.arange(len(columns[0].codes))
    return table(name, where, columns, _target(where, columns, target), places[:rows], places[rows:])


def table(name: str, where: str, columns: Sequence[Values], label: Values, train: Array, test: Array) -> Dataset:
    """The data set of a table.

    Args:
        name: the name of the data set.
        where: its file, for messages.
        columns: all columns.
        label: the one to predict.
        train: the places of the training rows.
        test: those of the test rows.
    """
    inputs, described = [], []
    for values in columns:
        if values is not label:
            column, cells = _column(where, values, train)
            described.append(column)
            inputs.append(cells)
    modality, stored = Table(columns=tuple(described)), torch.from_numpy(np.stack(inputs, 1))
    order = sorted(range(len(label.texts)), key=lambda code: label.texts[code])
    targets = torch.from_numpy(np.argsort(order)[np.asarray(label.codes)])
    splits = [Split(stored[places], targets[places], modality) for places in map(torch.from_numpy, (train, test))]
    kinds = {
        kind: [one.name for one in described if bool(one.categories) == categorical]
        for kind, categorical in (("numeric", False), ("categorical", True))
    }
    words = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)
    classes = tuple(label.texts[code] for code in order)
    return Dataset(name, classes, f"{where} ({words}; target: {label.name})", *splits)


def read_columns(where: str, content: bytes) -> list[Values]:
    """The columns of a CSV file; anything that is not a complete table is refused."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: expected a CSV file in UTF-8, got the byte 0x{content[error.start]:02x} at position "
            f"{error.start:,}; save it as UTF-8"
        ) from None
    lines = _lines(where, text)
    header = next(lines, (1, []))[1]
    columns = [Values(name) for name in header]
    names = [column.name for column in columns]
    if len(names) < 2 or not all(names) or len({*names}) < len(names):
        raise DataError(
            f"{where}: expected a first line with the names of at least two columns, each once, got "
            f"{', '.join(map(repr, names[:5])) or 'nothing'}; add it"
        )
    for number, cells in lines:
        if len(cells) != len(columns):
            raise DataError(f"{where} line {number}: expected {len(columns)} cells, got {len(cells)}; fix the line")
        for column, cell in zip(columns, cells, strict=True):
            if _MISSING.fullmatch(cell):
                got = f"{cell!r}" if cell else "an empty cell"
                raise DataError(
                    f"{where} line {number}: expected a value in column {column.name!r}, got {got}; fill it in or "
                    "remove the row"
                )
            column.add(cell)
    if (rows := len(columns[0].codes)) < LEAST_ROWS:
        raise DataError(f"{where}: expected at least {LEAST_ROWS} rows, got {rows}; add some")
    return columns


def _content(path: Path) -> bytes:
    with reading(path, "a CSV file"), open_regular(path) as file:
        if (size := path.stat().st_size) > (most := largest() // 8):
            raise DataError(f"{path}: expected a CSV file of at most {most:,} bytes on this machine, got {size:,}")
        return file.read()


def _lines(where: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """The number and the cells of each line that is not empty."""
    first = text.partition("\n")[0]
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=max(_DELIMITERS, key=first.count), skipinitialspace=True, strict=True
    )
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise DataError(f"{where} line {reader.line_num}: expected a line of a CSV file, got {error}; fix it") from None


def _target(where: str, columns: Iterable[Values], target: str | None) -> Values:
    known = {column.name: column for column in columns}
    if target is None:
        raise DataError(
            f"{where}: expected the name of the column to predict, got none; use --target with one of "
            f"{', '.join(known)}"
        )
    if target not in known:
        raise DataError(f"{where}: expected a column called {target!r}, got none; {suggest(target, known)}")
    classes = len(known[target].texts)
    if not 2 <= classes <= MAX_CLASSES:
        raise DataError(
            f"{where}: expected from 2 to {MAX_CLASSES:,} different values in the target column {target!r}, "
            f"got {classes:,}; choose another column or group its values"
        )
    return known[target]


def _column(where: str, values: Values, train: Array) -> tuple[Column, Array]:
    """What a column is, and its stored cells."""
    codes, numbers = np.asarray(values.codes), values.numbers()
    if len(values.texts) < 2:
        raise DataError(
            f"{where}: expected different values in column {values.name!r}, got {values.texts[0]!r} in every row; "
            "remove the column"
        )
    if numbers is None or len(values.texts) == 2:
        if len(values.texts) > MAX_CATEGORIES:
            raise DataError(
                f"{where}: expected numbers or at most {MAX_CATEGORIES:,} categories in column {values.name!r}, got "
                f"{len(values.texts):,} different texts; group them or remove the column"
            )
        order = sorted(range(len(values.texts)), key=lambda code: values.texts[code])
        places = np.argsort(order)[codes]
        counts = np.bincount(places[train], minlength=len(order))
        categories = tuple(values.texts[code] for code in order)
        shares = tuple((counts / len(train)).tolist())
        return Column(values.name, categories=categories, shares=shares), places.astype(np.float32)
    if not all(map(math.isfinite, numbers)):
        raise DataError(f"{where}: expected finite numbers in column {values.name!r}, got infinity; remove those rows")
    cells = np.asarray(numbers)[codes].astype(np.float32)
    low, high = float(cells[train].min()), float(cells[train].max())
    if not (math.isfinite(high - low) and low < high):
        raise DataError(
            f"{where}: expected different values, that float32 can hold, in the training rows of column "
            f"{values.name!r}, got {low:g} to {high:g}; remove or rescale the column"
        )
    scaled = (cells[train].astype(np.float64) - low) / (high - low)
    middle = float(np.median(scaled))
    spread = float(np.abs(scaled - middle).mean())
    whole = all(number.is_integer() for number in numbers)
    return Column(values.name, low, high, whole, middle=middle, spread=spread), cells
