"""Reading GGUF, the format of llama.cpp: a model's settings, its tokenizer and its weights, plain or quantised."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gradveil.data._arrays import Array, open_regular, reading
from gradveil.data._limits import check_size, fill

MAX_SETTINGS = 1000
MAX_TENSORS = 1000
MAX_LIST = 2**20
MAX_TEXT = 2**20
_LONGEST_SHAPE = 4
_ALIGNMENT = 32  # of the tensors; a file may declare another one

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
# How a block of values is stored, by the number of its format: how many values, and the layout of its bytes. Q4_1 is
# scale, minimum and 32 codes of 4 bits; Q8_0 is a scale and 32 signed bytes.
_FLOAT, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCKS = {
    _FLOAT: (1, np.dtype("<f4")),
    _Q4_1: (32, np.dtype([("scale", "<f2"), ("low", "<f2"), ("codes", "u1", 16)])),
    _Q8_0: (32, np.dtype([("scale", "<f2"), ("codes", "i1", 32)])),
}


@dataclass(frozen=True)
class _Layout:
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def blocks(self) -> int:
        return math.prod(self.shape) // _BLOCKS[self.kind][0]


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read the settings of a GGUF file and its tensors, as float32 arrays.

    Tensors are float32, or quantised as Q4_1 or Q8_0. All sizes are checked before anything is allocated.

    Args:
        path: the file.
    """
    with reading(path, "a GGUF file of version 3"), open_regular(path) as file:
        magic, version, tensors, count = struct.unpack("<4sIQQ", _exactly(file, 24))
        if (magic, version) != (b"GGUF", 3) or tensors > MAX_TENSORS or count > MAX_SETTINGS:
            raise ValueError(f"it begins with {magic!r}, version {version}, {tensors} tensors, {count} settings")
        settings = {_text(file): _value(file, _number(file, "I")) for _ in range(count)}
        layouts = {_text(file): _layout(file) for _ in range(tensors)}
        if len(layouts) != tensors:
            raise ValueError("two tensors have the same name")
        alignment = settings.get("general.alignment", _ALIGNMENT)
        start = math.ceil(file.tell() / alignment) * alignment
        check_size(4 * sum(math.prod(layout.shape) for layout in layouts.values()), path.stat().st_size)
        return settings, {name: _tensor(file, name, start, layout) for name, layout in layouts.items()}


def _exactly(file: BinaryIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise ValueError(f"it ends where {size} bytes were expected")
    return content


def _number(file: BinaryIO, kind: str) -> Any:
    (number,) = struct.unpack(f"<{kind}", _exactly(file, struct.calcsize(f"<{kind}")))
    return number


def _text(file: BinaryIO) -> str:
    if (length := _number(file, "Q")) > MAX_TEXT:
        raise ValueError(f"it declares a text of {length:,} bytes, more than {MAX_TEXT:,}")
    return _exactly(file, length).decode()


def _value(file: BinaryIO, kind: int, *, in_list: bool = False) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind != _LIST or in_list:
        return _number(file, _NUMBERS[kind])
    kind, count = _number(file, "I"), _number(file, "Q")
    if count > MAX_LIST:
        raise ValueError(f"it declares a list of {count:,} values, more than {MAX_LIST:,}")
    return [_value(file, kind, in_list=True) for _ in range(count)]


def _layout(file: BinaryIO) -> _Layout:
    if (dimensions := _number(file, "I")) > _LONGEST_SHAPE:
        raise ValueError(f"it declares a tensor of {dimensions} dimensions")
    # The first dimension is the one whose values are neighbours.
    shape = tuple(_number(file, "Q") for _ in range(dimensions))[::-1]
    kind, offset = _number(file, "I"), _number(file, "Q")
    if kind not in _BLOCKS or not shape or shape[-1] % _BLOCKS[kind][0]:
        raise ValueError(f"it declares a tensor of shape {list(shape)} in format {kind}, which is not supported")
    return _Layout(shape, kind, offset)


def _tensor(file: BinaryIO, name: str, start: int, layout: _Layout) -> Array:
    blocks = np.empty(layout.blocks, _BLOCKS[layout.kind][1])
    file.seek(start + layout.offset)
    if (got := fill(blocks, file)) != blocks.nbytes:
        raise ValueError(f"{name!r} declares {blocks.nbytes:,} bytes and has {got:,}")
    values = _dequantised(blocks, layout.kind).reshape(layout.shape)
    if not np.isfinite(values).all():
        raise ValueError(f"{name!r} holds numbers that are not finite")
    return values


def _dequantised(blocks: Array, kind: int) -> Array:
    if kind == _FLOAT:
        return blocks
    scale: Array = blocks["scale"].astype(np.float32)[:, None]
    if kind == _Q8_0:
        signed: Array = scale * blocks["codes"]
        return signed
    # The low halves of the bytes are the first sixteen values.
    codes = np.concatenate([blocks["codes"] & 15, blocks["codes"] >> 4], axis=1)
    values: Array = scale * codes + blocks["low"].astype(np.float32)[:, None]
    return values
