"""Reading ``.npz`` archives: only the requested arrays, only plain ones, each checked before it is read."""

import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from gradveil.core.large_arrays import empty
from gradveil.data._arrays import Array, open_regular, reading
from gradveil.data._limits import check_size, fill

MAX_MEMBERS = 1000
MAX_DIRECTORY = 2**20
_SUFFIX = ".npy"
_ENCRYPTED = 1  # a bit of the flags of a member


def read_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, Array]:
    """Read the arrays called `names` from an ``.npz``, or all of them; pickled objects are refused.

    Every member must be an ``.npy``. The sizes that the archive's directory and the arrays' headers declare must
    agree, and are checked against `gradveil.data._limits` before anything is allocated; nothing beyond them is
    decompressed. Arrays with other names are not read.
    """
    what = "an .npz archive of plain arrays"
    with reading(path, what), open_regular(path) as file, zipfile.ZipFile(_BoundedReads(file)) as archive:
        members = {_name(member): member for member in archive.infolist()}
        if len(members) != len(archive.infolist()) or len(members) > MAX_MEMBERS:
            raise ValueError(f"expected at most {MAX_MEMBERS} members, none twice, got {len(archive.infolist())}")
        requested = {name: member for name, member in members.items() if names is None or name in names}
        # Compared with the size of the file, not of the members: two members may share the same bytes.
        check_size(sum(member.file_size for member in requested.values()), path.stat().st_size)
        return {name: _read(archive, name, member) for name, member in requested.items()}


class _BoundedReads:
    """A file with a limit on each read, because `zipfile` reads the directory of an archive at once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell, self.close, self.seekable = file.seek, file.tell, file.close, file.seekable

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(MAX_DIRECTORY + 1 if size < 0 else min(size, MAX_DIRECTORY + 1))
        if len(content) > MAX_DIRECTORY:
            raise ValueError(f"its directory has more than {MAX_DIRECTORY:,} bytes")
        return content


def _name(member: zipfile.ZipInfo) -> str:
    if not member.filename.endswith(_SUFFIX) or member.flag_bits & _ENCRYPTED:
        raise ValueError(f"its member {member.filename[:80]!r} is not a plain {_SUFFIX} array")
    return member.filename.removesuffix(_SUFFIX)


def _read(archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo) -> Array:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed by a method that numpy does not use")
    with archive.open(member) as stream:
        shape, in_fortran_order, dtype = _header(stream)
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects, which only a pickle could restore")
        declared, available = math.prod(shape) * dtype.itemsize, member.file_size - stream.tell()
        if declared != available or any(side < 0 for side in shape):
            raise ValueError(f"{name} declares {list(shape)} of {dtype}, {declared:,} bytes, and has {available:,}")
        array = empty(shape[::-1] if in_fortran_order else shape, dtype)
        # Reading past the end makes zipfile verify the checksum of the member.
        if (got := fill(array, stream)) != declared or stream.read(1):
            raise ValueError(f"{name} declares {declared:,} bytes and has {got:,}")
    return array.T if in_fortran_order else array


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(stream)
    if version == (1, 0):
        return npy.read_array_header_1_0(stream)
    if version == (2, 0):
        return npy.read_array_header_2_0(stream)
    raise ValueError(f"an array of the format {version} is not supported")
