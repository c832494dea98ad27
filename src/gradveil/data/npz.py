"""Reading ``.npz`` archives: only arrays that were asked for, only plain ones, each checked before it is read."""

import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from gradveil.data._arrays import Array, reading
from gradveil.data._limits import check_size, fill

MOST_MEMBERS = 1000
MOST_DIRECTORY = 2**20
_ENDING = ".npy"
_ENCRYPTED = 1


def read_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, Array]:
    """The arrays of an ``.npz`` that have one of `names`, or all; pickled objects in it are refused.

    Every member must be an ``.npy``. The sizes that the archive's directory and the arrays' headers announce must
    agree, and are checked against `gradveil.data._limits` before anything is allocated; nothing beyond them is
    decompressed. Arrays of other names are not read.
    """
    with reading(path, "an .npz archive of plain arrays"):
        if not path.is_file():
            raise ValueError("not a file")
        with path.open("rb") as file, zipfile.ZipFile(_SmallReads(file)) as archive:
            members = {_name(member): member for member in archive.infolist()}
            if len(members) != len(archive.infolist()) or len(members) > MOST_MEMBERS:
                raise ValueError(f"expected at most {MOST_MEMBERS} members, none twice, got {len(archive.infolist())}")
            wanted = {name: member for name, member in members.items() if names is None or name in names}
            # By the file and not by what the members claim: two of them may claim the same bytes.
            check_size(sum(member.file_size for member in wanted.values()), path.stat().st_size)
            return {name: _read(archive, name, member) for name, member in wanted.items()}


class _SmallReads:
    """A file that is read little by little: the directory of an archive, which is read at once, must be small."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell, self.close, self.seekable = file.seek, file.tell, file.close, file.seekable

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(MOST_DIRECTORY + 1 if size < 0 else min(size, MOST_DIRECTORY + 1))
        if len(content) > MOST_DIRECTORY:
            raise ValueError(f"its directory has more than {MOST_DIRECTORY:,} bytes")
        return content


def _name(member: zipfile.ZipInfo) -> str:
    if not member.filename.endswith(_ENDING) or member.flag_bits & _ENCRYPTED:
        raise ValueError(f"its member {member.filename[:80]!r} is not a plain {_ENDING} array")
    return member.filename.removesuffix(_ENDING)


def _read(archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo) -> Array:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed by a method that numpy does not use")
    with archive.open(member) as stream:
        shape, in_fortran_order, dtype = _header(stream)
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects, which only a pickle could bring back")
        announced, there = math.prod(shape) * dtype.itemsize, member.file_size - stream.tell()
        if announced != there or any(side < 0 for side in shape):
            raise ValueError(f"{name} announces {list(shape)} of {dtype}, {announced:,} bytes, and has {there:,}")
        array = np.empty(shape[::-1] if in_fortran_order else shape, dtype)
        # Beyond the end, where there is nothing, lies the check of the member's checksum.
        if (got := fill(array, stream)) != announced or stream.read(1):
            raise ValueError(f"{name} announces {announced:,} bytes and has {got:,}")
    return array.T if in_fortran_order else array


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(stream)
    if version == (1, 0):
        return npy.read_array_header_1_0(stream)
    if version == (2, 0):
        return npy.read_array_header_2_0(stream)
    raise ValueError(f"an array of the format {version} is not known here")
