"""Datasets by name or by path."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradveil.core import checks
from gradveil.core.errors import DataError, UnknownNameError
from gradveil.core.large_arrays import empty
from gradveil.core.registry import Registry
from gradveil.data import catalog, places
from gradveil.data._arrays import Array, Arrays, Labelled, hold_out, images_at_once, reading, resize
from gradveil.data.dataset import Dataset, Split
from gradveil.data.formats import read
from gradveil.data.npz import read_arrays
from gradveil.data.tables import load_csv, load_csv_splits
from gradveil.data.text import ENDINGS, load_texts

EMBEDDED = Path(__file__).with_name("digits.npz")
"""5,000 real MNIST digits, 500 of each class, that come with the package; `scripts/pack_digits.py` makes the file."""
EMBEDDED_SOURCE = "embedded digits"

MAX_UNNAMED_CLASSES = 65_536

SOURCES: Registry[Dataset] = Registry("dataset")
"""User-defined data sets by name: functions that return a `Dataset` of any modality."""


def load(
    name: str | os.PathLike[str], size: int | None = None, target: str | None = None, **parameters: Any
) -> Dataset:
    """Load a dataset.

    A name is looked up in the folder that ``GRADVEIL_DATA`` names, then in the cache folder, then in the
    installation (`mnist` only: 4,000 + 1,000 digits). Anything else is taken as a path; write ``./mnist`` for a
    folder that has the name of a dataset. If the files hold only one split, a fifth of each class becomes the test
    split, and both splits are shuffled in an order that is the same on every machine.

    Args:
        name: one of `names()`, one registered in `SOURCES`, or the path of an ``.npz`` or of a folder (see
            `gradveil.data.formats`), of a ``.csv`` (see `gradveil.data.tables`), or of labelled texts (``.jsonl``,
            ``.txt`` or ``.tsv``, see `gradveil.data.text`).
        size: resize the images to size x size, antialiased and without cropping.
        target: the column of a table that a model is to predict.
        parameters: parameters of a data set from `SOURCES`, or those of texts, see `gradveil.data.text.load_texts`; the
            others take none.

    Example:
        >>> digits = load("mnist")
        >>> digits.train.input_shape, len(digits.classes)
        ((1, 28, 28), 10)
        >>> load("mnist", size=32).test.input_shape
        (1, 32, 32)
    """
    if isinstance(name, str) and name in SOURCES.names():
        return SOURCES.create(name, **({} if size is None else {"size": size}), **parameters)
    if is_text(name):
        return _load_texts(name, {"size": size, "target": target, **parameters})
    table = is_table(name)
    takes = {"target": target, **parameters} if target is not None and not table else parameters
    takes = {"size": size, **takes} if size is not None and table else takes
    if takes:
        own = "target" if table else "size"
        raise UnknownNameError(f"{name}: unknown parameter {next(iter(takes))!r}; it takes: {own}")
    if size is not None:
        size = checks.integer("load", "size", size, low=1)
    if isinstance(name, str) and name in catalog.names():
        return _load_named(name, size, target)
    path = Path(name)
    if not path.exists():
        if isinstance(name, str) and not path.suffix and name == path.name:
            catalog.entry(name)  # a mistyped name gets suggestions
            raise UnknownNameError(f"unknown dataset {name!r}; it is the name of weights: use gradveil.data.find")
        raise DataError(
            f"{name}: expected an existing file or folder of data, got none of that name; check the path, or use a "
            "name that `gradveil data list` prints"
        )
    if table:
        return load_csv(path, None if target is None else str(target))  # specs turn "2020" into a number
    return _dataset(str(name), path.name, read(path, size), (), size)


def is_text(name: str | os.PathLike[str]) -> bool:
    """Whether a name or path that `load` takes is that of labelled texts.

    >>> is_text("sst2"), is_text("reviews.jsonl"), is_text("mnist")
    (True, True, False)
    """
    if isinstance(name, str) and name in catalog.names():
        return catalog.entry(name).files[0].endswith(ENDINGS)
    return Path(name).suffix in ENDINGS


def is_table(name: str | os.PathLike[str]) -> bool:
    """Whether a name or path that `load` takes is that of a table.

    >>> is_table("adult"), is_table("people.csv"), is_table("mnist")
    (True, True, False)
    """
    if isinstance(name, str) and name in catalog.names():
        return catalog.entry(name).target is not None
    return Path(name).suffix.lower() == ".csv"


def _load_texts(name: str | os.PathLike[str], parameters: dict[str, Any]) -> Dataset:
    given = {key: value for key, value in parameters.items() if value is not None}
    if not isinstance(name, str) or name not in catalog.names():
        return load_texts(str(name), Path(name), (), **given)
    path = places.find(name)
    if path is None:
        raise places.missing(name)
    return load_texts(name, path, catalog.entry(name).classes, **given)


def _load_named(name: str, size: int | None, target: str | None) -> Dataset:
    entry = catalog.entry(name)
    path = places.find(name)
    if path is not None and entry.target is not None:
        parts = read_arrays(path, ("csv_train", "csv_test"))
        with reading(path, "a table in two arrays of bytes, csv_train and csv_test"):
            train, test = (
                parts[f"csv_{split}"].astype(np.uint8, casting="equiv").tobytes() for split in ("train", "test")
            )
        return load_csv_splits(name, path.name, train, test, entry.target if target is None else str(target))
    if path is not None:
        source = next(file for file in entry.files if path.match(file))
        return _dataset(name, source, read(path, size), entry.classes, size)
    if entry.embedded:
        return _dataset(name, EMBEDDED_SOURCE, read(EMBEDDED), entry.classes, size)
    raise places.missing(name)


def _dataset(name: str, source: str, arrays: Arrays, known_classes: tuple[str, ...], size: int | None) -> Dataset:
    if arrays.test:
        splits = [_split(part, np.arange(len(part[1])), size) for part in (arrays.train, arrays.test)]
    else:
        splits = [_split(arrays.train, chosen, size) for chosen in hold_out(source, arrays.train[1])]
    return Dataset(
        name=name,
        classes=arrays.classes or known_classes or _numbered_classes(source, arrays.train[1]),
        source=source,
        train=splits[0],
        test=splits[1],
    )


def _numbered_classes(source: str, labels: Array) -> tuple[str, ...]:
    count = int(labels.max(initial=-1)) + 1
    if count > MAX_UNNAMED_CLASSES:
        raise DataError(
            f"{source}: labels of unnamed classes must lie below {MAX_UNNAMED_CLASSES}, got {count - 1}; "
            "number the classes from 0, or name them in an array classes"
        )
    return tuple(str(label) for label in range(count))


def _split(labelled: Labelled, chosen: Array, size: int | None) -> Split:
    """The chosen images, channels first, copied in chunks: full copies would cost three times the result."""
    images, labels = labelled
    height, width, channels = images.shape[1:]
    resized = size is not None and (height, width) != (size, size)
    sides = (size, size) if size is not None else (height, width)
    channels_first = empty((len(chosen), channels, *sides), np.uint8)
    step = images_at_once(images.shape[1:])
    for start in range(0, len(chosen), step):
        part = images[chosen[start : start + step]]
        channels_first[start : start + step] = (resize(part, sides[0]) if resized else part).transpose(0, 3, 1, 2)
    return Split(torch.from_numpy(channels_first), torch.from_numpy(labels[chosen]))
