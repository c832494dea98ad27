"""Arrays too large to stay in memory: they lie in a file that the system reads as it is used."""

import math
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradveil.core.errors import DataError

ON_DISK = 256 * 2**20
"""From this size on, an array lies in a file, and the system may drop it from memory."""


def empty(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array to be filled; a large one lies in a nameless temporary file, so that it need not stay in memory.

    >>> empty((2, 3), np.uint8).shape
    (2, 3)
    """
    shape, kind = tuple(shape), np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size < ON_DISK:
        return np.empty(shape, kind)
    with tempfile.TemporaryFile() as file:
        try:
            # Without the reservation a disk that fills up later would kill the process instead of raising an error.
            reserve = getattr(os, "posix_fallocate", None)  # not on every system
            reserve(file.fileno(), 0, size) if reserve else file.truncate(size)
        except OSError as error:
            raise DataError(
                f"{tempfile.gettempdir()}: expected room for {size:,} bytes, got {error.strerror}; "
                "free some, or set TMPDIR to another folder"
            ) from error
        return np.memmap(file, kind, "r+", shape=shape)
