"""What all readers share: the arrays they return, the checks on these, and the error for a broken file."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from gradveil.core.errors import DataError, GradveilError

Array = npt.NDArray[Any]
Labelled = tuple[Array, Array]

TEST_SHARE = 0.2
SPLIT_SEED = 0


@dataclass(frozen=True, eq=False)
class Arrays:
    """The result of a reader: uint8 images [N, H, W, C], int64 labels [N], class names if the files have them.

    Args:
        train: training images and labels.
        test: test images and labels, or None if the files hold only one split.
        classes: the class names, or empty if the files hold only numbers.

    Example:
        >>> Arrays((np.zeros((2, 4, 4, 1), np.uint8), np.array([0, 1]))).classes
        ()
    """

    train: Labelled
    test: Labelled | None = None
    classes: tuple[str, ...] = ()


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; a pipe or device, which might never answer, raises `ValueError`."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    return path.open("rb")


@contextmanager
def reading(path: Path, expected: str, remedy: str = "get it again") -> Iterator[None]:
    """Turn whatever a parser raises on a broken file into a `DataError` that names the file."""
    try:
        yield
    except GradveilError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise DataError(
            f"{path}: expected {expected}, but reading it failed ({reason}); "
            f"the file is missing, truncated, damaged or of another kind: {remedy}"
        ) from error


def listing(folder: Path) -> list[Path]:
    """The contents of a folder, sorted; names that begin with a dot are left out."""
    with reading(folder, "a readable folder"):
        return sorted(child for child in folder.iterdir() if not child.name.startswith("."))


def labelled(path: Path, split: str, images: Array, labels: Array) -> Labelled:
    """Images as [N, H, W, C] and labels as int64 [N], or an error that says what they should have been."""
    if images.ndim == 3:
        images = images[..., None]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise DataError(
            f"{path}: {split} images must be uint8 [N, H, W] or [N, H, W, C] with C 1 or 3, "
            f"got {images.dtype} {list(images.shape)}"
        )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(f"{path}: {split} labels must be whole numbers [N], got {labels.dtype} {list(labels.shape)}")
    if len(images) != len(labels):
        raise DataError(
            f"{path}: {split} must have one label per image, got {len(images)} images and {len(labels)} labels"
        )
    return images, labels.astype(np.int64, copy=False)


def images_at_once(shape: tuple[int, ...]) -> int:
    """How many images to process together: 2 MiB of pixels, so that copies of them as floats stay small."""
    return max(1, 2**21 // max(1, math.prod(shape)))


def resize(images: Array, size: int) -> Array:
    """Resize uint8 images [N, H, W, C] to size x size with an antialiased bilinear filter and without cropping."""
    resized = np.empty((len(images), size, size, images.shape[-1]), np.uint8)
    chunk = images_at_once(images.shape[1:])
    for start in range(0, len(images), chunk):
        planes = torch.from_numpy(np.array(images[start : start + chunk])).permute(0, 3, 1, 2)
        scaled = torch.nn.functional.interpolate(
            planes.float(), size=(size, size), mode="bilinear", antialias=True, align_corners=False
        )
        resized[start : start + chunk] = scaled.round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return resized


def hold_out(source: str, labels: Array, unit: str = "image") -> tuple[Array, Array]:
    """The indices of the training examples and of the test examples, a fifth of each class, both in random order."""
    # RandomState and not a Generator: its stream is frozen, so the split is the same with every version of numpy.
    rng = np.random.RandomState(SPLIT_SEED)
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        if len(members) < 2:
            raise DataError(
                f"{source}: class {label} has one {unit}, but train and test need one each; "
                f"add {unit}s or provide train and test separately"
            )
        held_out[members[: max(1, round(TEST_SHARE * len(members)))]] = True
    order = rng.permutation(len(labels))
    return order[~held_out[order]], order[held_out[order]]
