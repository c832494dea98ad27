"""Reading integer arrays, and nothing else, from MATLAB files of version 5, the format of SVHN."""

import math
import struct
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import IO

import numpy as np

from gradveil.data._arrays import Array, open_regular
from gradveil.data._limits import check_size, fill

_HEADER = 128
_VERSION_AND_ORDER = b"\x00\x01IM"  # version 1, little-endian
_COMPRESSED, _MATRIX, _DIMENSIONS, _NAME, _FLAGS = 15, 14, 5, 1, 6
_COMPLEX = 0x0800
_CLASSES = {8: "i1", 9: "u1", 10: "<i2", 11: "<u2", 12: "<i4", 13: "<u4", 14: "<i8", 15: "<u8"}
_STORED = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 12: "<i8", 13: "<u8"}
_LONGEST_NAME, _MAX_DIMENSIONS = 64, 32
_CHUNK = 2**16


def read_matrices(path: Path, names: Collection[str]) -> dict[str, Array]:
    """Read the arrays with these names; the size of each is checked before it is read."""
    found: dict[str, Array] = {}
    with open_regular(path) as file:
        size = path.stat().st_size
        if file.read(_HEADER)[-4:] != _VERSION_AND_ORDER:
            raise ValueError("it is not a little-endian MATLAB file of version 5")
        while (start := file.tell()) + 8 <= size:
            kind, length = struct.unpack("<II", file.read(8))
            end = start + 8 + length
            if kind not in (_COMPRESSED, _MATRIX) or end > size:
                raise ValueError(f"at byte {start} an element of kind {kind} and {length:,} bytes is impossible")
            content = _Inflated(file, length) if kind == _COMPRESSED else _Bounded(file, length)
            if kind == _COMPRESSED and content.unpacked("<II")[0] != _MATRIX:
                raise ValueError(f"at byte {start} there is no array")
            name, array = _matrix(content, names, length)
            if array is not None:
                if name in found:
                    raise ValueError(f"it holds {name} twice")
                found[name] = array
            file.seek(end)
    return found


class _Bounded:
    """The next `length` bytes of a file."""

    def __init__(self, file: IO[bytes], length: int) -> None:
        self._file, self._left = file, length

    def read(self, size: int) -> bytes:
        part = self._file.read(min(size, self._left))
        self._left -= len(part)
        return part

    def exactly(self, size: int) -> bytes:
        content = self.read(size)
        if len(content) != size:
            raise EOFError("it ends in the middle of an array")
        return content

    def unpacked(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self.exactly(struct.calcsize(form)))


class _Inflated(_Bounded):
    """The next `length` bytes of a file, decompressed only as far as they are read."""

    def __init__(self, file: IO[bytes], length: int) -> None:
        super().__init__(file, length)
        self._inflater = zlib.decompressobj()

    def read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            packed = self._inflater.unconsumed_tail or super().read(_CHUNK)
            part = self._inflater.decompress(packed, size - len(content))
            if not part and not packed:
                break
            content += part
        return bytes(content)


def _matrix(content: _Bounded, names: Collection[str], stored: int) -> tuple[str, Array | None]:
    """The name of the array that comes next, and the array if it is one of `names`."""
    kind, flags = _short_element(content, 8)
    bits, _ = struct.unpack("<II", flags)
    if kind != _FLAGS:
        raise ValueError("an array does not begin with its flags")
    kind, dimensions = _short_element(content, 4 * _MAX_DIMENSIONS)
    if kind != _DIMENSIONS or len(dimensions) % 4:
        raise ValueError("an array has no dimensions")
    shape = struct.unpack(f"<{len(dimensions) // 4}i", dimensions)
    kind, letters = _short_element(content, _LONGEST_NAME)
    name = letters.decode("ascii")
    if kind != _NAME or name not in names:
        return name, None
    if bits & 0xFF not in _CLASSES or bits & _COMPLEX:
        raise ValueError(f"{name} is not an array of whole numbers")
    kind, length, inline = _tag(content)
    if kind not in _STORED:
        raise ValueError(f"{name} is not stored as whole numbers")
    dtype = np.dtype(_STORED[kind])
    if any(side < 0 for side in shape) or math.prod(shape) * dtype.itemsize != length:
        raise ValueError(f"{name} declares {list(shape)} of {dtype} and has {length:,} bytes")
    check_size(length, stored)
    array = np.empty(shape[::-1], dtype)  # the file stores the last dimension first
    if inline:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(inline, np.uint8)[:length]
    elif fill(array, content) != length:
        raise EOFError(f"{name} is truncated")
    return name, array.T.astype(_CLASSES[bits & 0xFF], copy=False)


def _short_element(content: _Bounded, most: int) -> tuple[int, bytes]:
    """The kind and the bytes of an element of at most `most` bytes."""
    kind, length, inline = _tag(content)
    if length > most:
        raise ValueError(f"an element of {length:,} bytes is longer than the {most} allowed")
    if inline:
        return kind, inline[:length]
    data = content.exactly(length)
    content.exactly(-length % 8)  # padding to a multiple of eight
    return kind, data


def _tag(content: _Bounded) -> tuple[int, int, bytes]:
    """The kind and length of an element, and its bytes if it has up to four, which the tag itself holds."""
    kind, length = content.unpacked("<II")
    if kind >> 16:
        if kind >> 16 > 4:
            raise ValueError("an inline element cannot have more than four bytes")
        return kind & 0xFFFF, kind >> 16, struct.pack("<I", length)
    return kind, length, b""
