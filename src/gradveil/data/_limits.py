"""How much a data file may become in memory, decided from what it announces and before any of it is read.

Reading costs at most twice the result and 64 MiB. A file is refused whose result would be larger than `largest`, and
one that would become more than a hundred times its own size: photographs, digits and scans compress by ten or less,
and what compresses further was made to fill the memory. Results of up to 32 MiB are never suspicious.
"""

import os
from io import BufferedIOBase
from typing import Protocol

import numpy as np

from gradveil.data._arrays import Array

LARGEST = 8 * 2**30
MOST_GROWTH = 100
UNSUSPICIOUS = 32 * 2**20
MOST_PIXELS = 2**24
"""Of one image of a folder: 4096 x 4096. Decoders need more than twice the result for a moment, which 64 MiB cover."""

_PART = 2**20


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def largest() -> int:
    """The most bytes that a data set may have here: a third of the machine's memory, and never more than 8 GiB."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        return LARGEST
    return min(LARGEST, memory // 3)


def check_size(announced: int, stored: int) -> None:
    """Refuse what would become too large.

    Args:
        announced: bytes that the result would have.
        stored: bytes that it has on disk.

    >>> check_size(announced=3 * 2**30, stored=3 * 2**20)
    Traceback (most recent call last):
        ...
    ValueError: 3,145,728 bytes announce 3,221,225,472, more than 100 times as much, which no real images do
    """
    if announced > (most := largest()):
        raise ValueError(f"it announces {announced:,} bytes, more than the {most:,} that are read on this machine")
    if announced > UNSUSPICIOUS and announced > MOST_GROWTH * stored:
        raise ValueError(
            f"{stored:,} bytes announce {announced:,}, more than {MOST_GROWTH} times as much, which no real images do"
        )


def fill(array: Array, source: _Readable | BufferedIOBase) -> int:
    """Read into a contiguous array, little by little; returns the bytes that were there, at most as many as it has."""
    room = array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
    done = 0
    while done < len(room):
        part = source.read(min(_PART, len(room) - done))
        if not part:
            break
        room[done : done + len(part)] = part
        done += len(part)
    return done
