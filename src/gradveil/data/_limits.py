"""How much memory a data file may take, decided from the size that it declares before any of it is read.

Reading needs at most twice the size of the result plus 64 MiB, and results above 256 MiB stay on disk until they are
used (`core.large_arrays`). A file is refused if its result would be larger than `largest`, or more than a hundred times
the size of the file:
photographs, digits and scans compress by ten or less, and whatever compresses further was made to fill the memory.
Results of up to 32 MiB are never suspicious.
"""

import os
from io import BufferedIOBase
from typing import Protocol

import numpy as np

from gradveil.data._arrays import Array

LARGEST = 8 * 2**30
MAX_GROWTH = 100
UNSUSPICIOUS = 32 * 2**20
MAX_PIXELS = 2**24
"""Limit for one image in a folder: 4096 x 4096. Decoders briefly need more than twice the result; 64 MiB cover that."""

_CHUNK = 2**20


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def largest() -> int:
    """The most bytes that a data set may have: a third of the machine's memory, and never more than 8 GiB."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system reports its memory
        return LARGEST
    return min(LARGEST, memory // 3)


def check_size(declared: int, stored: int) -> None:
    """Refuse a file whose result would be too large.

    Args:
        declared: size of the result in bytes.
        stored: size of the file in bytes.

    >>> check_size(declared=3 * 2**30, stored=3 * 2**20)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: its 3,145,728 bytes declare 3,221,225,472, more than 100 times as much, which real images ...
    """
    if declared > (most := largest()):
        raise ValueError(f"it declares {declared:,} bytes, more than the {most:,} allowed on this machine")
    if declared > UNSUSPICIOUS and declared > MAX_GROWTH * stored:
        raise ValueError(
            f"its {stored:,} bytes declare {declared:,}, more than {MAX_GROWTH} times as much, "
            "which real images never do; if these do, store them uncompressed (numpy.savez)"
        )


def fill(array: Array, source: _Readable | BufferedIOBase) -> int:
    """Fill a contiguous array from `source`, chunk by chunk; returns how many bytes were read."""
    target = array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
    done = 0
    while done < len(target):
        part = source.read(min(_CHUNK, len(target) - done))
        if not part:
            break
        target[done : done + len(part)] = part
        done += len(part)
    return done
