"""Reading published pickles, such as CIFAR's batches, without trusting them.

A pickle is a program. Python's own unpickler would run it: call any function that it names, and allocate whatever it
declares, such as a gibibyte for one index in its memo. Here a small virtual machine runs it instead, which knows only
the instructions that build dicts, lists, numbers, text and plain numpy arrays. It calls nothing, reads the bytes of an
array only if their number agrees with its shape, reads no byte twice, and limits how many values it creates.
"""

import codecs
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from gradveil.data._arrays import Array, open_regular, reading
from gradveil.data._limits import check_size, fill

MAX_VALUES = 500_000
"""Limit on the numbers, strings and containers in one pickle; CIFAR-100 has 150,000."""

MAX_CONTAINERS = 50_000
LONGEST_INLINE = 4096
"""Longer strings and bytes stay in the file until an array needs them."""

_LONGEST_LINE = 200


def read_pickled_arrays(path: Path) -> dict[Any, Any]:
    """Read a pickled dict of containers, numbers, text and numpy arrays; Python 2 strings are returned as bytes."""
    with reading(path, "a pickle of plain numpy arrays"), open_regular(path) as file:
        content = _Machine(file, path.stat().st_size).run()
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not a dict")
        return content


@dataclass(frozen=True)
class _Span:
    """Bytes that are still in the file; if `text`, they are UTF-8 text whose Latin-1 encoding may be the data."""

    start: int
    length: int
    text: bool = False


@dataclass(frozen=True)
class _Name:
    """A function or class that a pickle refers to by name."""

    module: str
    name: str


@dataclass
class _Dtype:
    """A dtype as a pickle describes it: a code such as ``"u1"`` and, in its state, the byte order."""

    code: str
    order: str = "|"

    def build(self) -> np.dtype[Any]:
        if not (re.fullmatch(r"[biuf]\d{1,2}", self.code) and self.order in ("|", "<", ">", "=")):
            raise ValueError(f"an array of {self.order}{self.code} is not an array of plain numbers")
        return np.dtype(self.order + self.code)


@dataclass
class _Unfinished:
    """An array whose content has not been read yet."""

    array: Array | None = None


_NDARRAY, _DTYPE, _ENCODE = _Name("numpy", "ndarray"), _Name("numpy", "dtype"), _Name("_codecs", "encode")
_EMPTY_ARRAY = (_Name("numpy.core.multiarray", "_reconstruct"), _Name("numpy._core.multiarray", "_reconstruct"))
_KNOWN = {_NDARRAY, _DTYPE, _ENCODE, *_EMPTY_ARRAY}
_MARK = object()


class _Machine:
    """Runs a pickle on a stack, as `pickletools` describes the instructions."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._size = file, size
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._values = self._containers = 0
        self._unused = size  # bytes that arrays may still take: each byte of the file is used at most once

    def run(self) -> Any:
        while (code := self._read_exactly(1)) != b".":
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise ValueError(f"the instruction {code!r} is not part of a plain array")
            instruction(self)
        return self._final(self._pop())

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _read_exactly(self, size: int) -> bytes:
        content = self._file.read(size)
        if len(content) != size:
            raise EOFError("it ends in the middle of an instruction")
        return content

    def _number(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self._read_exactly(struct.calcsize(layout)))
        return int(value)

    def _line(self) -> str:
        line = self._file.readline(_LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise ValueError("a name has no end")
        return line[:-1].decode()

    def _push_text(self, layout: str, *, text: bool) -> None:
        length, start = self._number(layout), self._file.tell()
        if not 0 <= length <= self._size - start:
            raise ValueError(f"it declares {length:,} bytes, but only {self._size - start:,} are left")
        if length > LONGEST_INLINE:
            self._file.seek(length, 1)
            self._push(_Span(start, length, text))
            return
        content = self._read_exactly(length)
        self._push(content.decode("utf-8", "surrogatepass") if text else content)

    # -- values --------------------------------------------------------------------------------------------------------

    def _push(self, value: Any) -> None:
        self._values += 1
        self._containers += isinstance(value, list | dict | tuple)
        if self._values > MAX_VALUES or self._containers > MAX_CONTAINERS:
            raise ValueError(f"it creates more than {MAX_VALUES:,} values or {MAX_CONTAINERS:,} containers")
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("its instructions are out of order")
        return value

    def _since_mark(self) -> list[Any]:
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _put(self, index: int) -> None:
        if len(self._memo) > MAX_VALUES:
            raise ValueError("it memoizes too many values")
        if not self._stack or self._stack[-1] is _MARK:
            raise ValueError("there is nothing to memoize")
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        value = self._memo[index]
        if isinstance(value, list | dict):
            raise ValueError("a container that occurs in several places, or in itself, is not part of a plain array")
        self._push(value)

    def _final(self, value: Any) -> Any:
        """The final form of a value, as it is stored in a container."""
        if isinstance(value, _Unfinished):
            if value.array is None:
                raise ValueError("an array has no content")
            return value.array
        if isinstance(value, _Span):
            return self._bytes(value).decode("utf-8", "surrogatepass") if value.text else self._bytes(value)
        if isinstance(value, _Name | _Dtype) or value is _MARK:
            raise ValueError(f"a {type(value).__name__.strip('_').lower()} is not a value")
        return value

    def _bytes(self, span: _Span) -> bytes:
        self._claim(span.length)
        offset = self._file.tell()
        self._file.seek(span.start)
        content = self._read_exactly(span.length)
        self._file.seek(offset)
        return content

    def _claim(self, size: int) -> None:
        self._unused -= size
        if self._unused < 0:
            raise ValueError("several of its arrays use the same bytes")

    # -- containers ----------------------------------------------------------------------------------------------------

    def _append(self, values: list[Any]) -> None:
        if not self._stack or not isinstance(self._stack[-1], list):
            raise ValueError("it adds to something that is not a list")
        self._stack[-1].extend(map(self._final_with_items, values))

    def _set(self, values: list[Any]) -> None:
        if not self._stack or not isinstance(self._stack[-1], dict) or len(values) % 2:
            raise ValueError("it adds to something that is not a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | bytes | int):
                raise ValueError(f"a key must be a string or a number, got a {type(key).__name__}")
            self._stack[-1][key] = self._final_with_items(value)

    def _final_with_items(self, value: Any) -> Any:
        """Likewise, including the items of a tuple; nested tuples are refused."""
        if isinstance(value, tuple):
            if any(isinstance(item, tuple) for item in value):
                raise ValueError("a tuple in a tuple is not part of a plain array")
            return tuple(map(self._final, value))
        return self._final(value)

    # -- arrays --------------------------------------------------------------------------------------------------------

    def _name(self, module: Any, name: Any) -> None:
        named = _Name(str(module), str(name))
        if named not in _KNOWN:
            raise ValueError(f"{named.module}.{named.name} is not part of a plain array and was not run")
        self._push(named)

    def _call(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(arguments, tuple):
            raise ValueError("it calls something without arguments")
        if function in _EMPTY_ARRAY:
            self._push(_Unfinished())
        elif function == _DTYPE:
            self._push(_Dtype(_as_text(arguments[0])))
        elif function == _ENCODE:
            self._encode(*arguments)
        else:
            raise ValueError("it calls something that is not a function")

    def _encode(self, text: Any, encoding: Any) -> None:
        """Python 3 writes bytes in this form into pickles of old protocols."""
        if encoding != "latin1":
            raise ValueError(f"text in {encoding!r} is not part of a plain array")
        if isinstance(text, str):
            self._push(text.encode("latin1"))
        elif isinstance(text, _Span) and text.text:
            self._push(text)
        else:
            raise ValueError("it encodes something that is not text")

    def _build(self) -> None:
        state = self._pop()
        target = self._stack[-1] if self._stack else None
        if isinstance(target, _Dtype):
            target.order = _as_text(state[1])
        elif isinstance(target, _Unfinished) and target.array is None:
            target.array = self._array(*state)
        else:
            raise ValueError("it sets the state of something that has none")

    def _array(self, _version: Any, shape: Any, dtype: Any, in_fortran_order: Any, content: Any) -> Array:
        kind = dtype.build()
        if not all(isinstance(side, int) and side >= 0 for side in shape):
            raise ValueError(f"an array cannot have the shape {shape!r}"[:200])
        size = math.prod(shape) * kind.itemsize
        if isinstance(content, _Span):
            array = self._from_file(content, size)
        else:
            if not isinstance(content, bytes):
                raise ValueError(f"an array must be made of bytes, got a {type(content).__name__}")
            self._claim(len(content))
            array = np.frombuffer(bytearray(content), np.uint8)
        if len(array) != size:
            raise ValueError(f"an array declares {size:,} bytes and has {len(array):,}")
        shaped: Array = array.view(kind).reshape(shape, order="F" if in_fortran_order else "C")
        return shaped

    def _from_file(self, span: _Span, size: int) -> Array:
        if size > span.length or (not span.text and size != span.length):
            raise ValueError(f"an array declares {size:,} bytes and has {span.length:,}")
        check_size(size, self._size)
        self._claim(size)
        offset = self._file.tell()
        self._file.seek(span.start)
        array = np.empty(size, np.uint8)
        if fill(array, _Latin1(self._file, span.length) if span.text else self._file) != size:
            raise EOFError("an array is truncated")
        self._file.seek(offset)
        return array


class _Latin1:
    """Reads UTF-8 text from a file and returns it encoded as Latin-1."""

    def __init__(self, file: IO[bytes], length: int) -> None:
        self._file, self._left = file, length
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def read(self, size: int) -> bytes:
        text = ""
        while not text and self._left:  # a chunk may hold only half a character
            part = self._file.read(min(size, self._left))
            self._left -= len(part) or self._left
            text = self._decoder.decode(part)
        return text.encode("latin1")


_Instruction = Callable[[_Machine], object]


def _as_text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _skip(size: int) -> _Instruction:
    return lambda machine: machine._read_exactly(size)


def _push_constant(value: Any) -> _Instruction:
    return lambda machine: machine._push(value)


def _push_number(layout: str) -> _Instruction:
    return lambda machine: machine._push(machine._number(layout))


def _push_text(layout: str, *, text: bool) -> _Instruction:
    return lambda machine: machine._push_text(layout, text=text)


def _push_tuple(count: int) -> _Instruction:
    # The items are not brought into their final form: the arguments of a function may be anything.
    return lambda machine: machine._push(tuple([machine._pop() for _ in range(count)][::-1]))


def _stack_global(machine: _Machine) -> None:
    name, module = machine._pop(), machine._pop()
    machine._name(module, name)


_INSTRUCTIONS: dict[bytes, _Instruction] = {
    b"\x80": _skip(1),  # the protocol
    b"\x95": _skip(8),  # the length of a frame
    b"(": lambda machine: machine._stack.append(_MARK),
    b"N": _push_constant(None),
    b"\x88": _push_constant(True),
    b"\x89": _push_constant(False),
    b"K": _push_number("<B"),
    b"M": _push_number("<H"),
    b"J": _push_number("<i"),
    b"\x8a": lambda machine: machine._push(
        int.from_bytes(machine._read_exactly(machine._number("<B")), "little", signed=True)
    ),
    b"G": lambda machine: machine._push(struct.unpack(">d", machine._read_exactly(8))[0]),
    b"T": _push_text("<i", text=False),
    b"U": _push_text("<B", text=False),
    b"B": _push_text("<I", text=False),
    b"C": _push_text("<B", text=False),
    b"\x8e": _push_text("<Q", text=False),
    b"X": _push_text("<I", text=True),
    b"\x8c": _push_text("<B", text=True),
    b"\x8d": _push_text("<Q", text=True),
    b"]": lambda machine: machine._push([]),
    b"}": lambda machine: machine._push({}),
    b")": _push_tuple(0),
    b"\x85": _push_tuple(1),
    b"\x86": _push_tuple(2),
    b"\x87": _push_tuple(3),
    b"t": lambda machine: machine._push(tuple(machine._since_mark())),
    b"a": lambda machine: machine._append([machine._pop()]),
    b"e": lambda machine: machine._append(machine._since_mark()),
    b"s": lambda machine: machine._set([machine._pop(), machine._pop()][::-1]),
    b"u": lambda machine: machine._set(machine._since_mark()),
    b"q": lambda machine: machine._put(machine._number("<B")),
    b"r": lambda machine: machine._put(machine._number("<I")),
    b"\x94": lambda machine: machine._put(len(machine._memo)),
    b"h": lambda machine: machine._get(machine._number("<B")),
    b"j": lambda machine: machine._get(machine._number("<I")),
    b"c": lambda machine: machine._name(machine._line(), machine._line()),
    b"\x93": _stack_global,
    b"R": lambda machine: machine._call(),
    b"b": lambda machine: machine._build(),
}
