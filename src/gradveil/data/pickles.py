"""Reading the pickles that others publish, CIFAR's batches among them, without trusting them.

Two things are kept from happening. A pickle may name any function to be called: here every name that is not part
of a plain array is refused. And numpy's own unpickling crashes on a malformed array: here numpy is not asked;
stand-ins collect what the pickle says of an array, which is then built from its bytes with all checks.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from gradveil.data.arrays import Array, reading


def read_pickled_arrays(path: Path) -> dict[Any, Any]:
    """Read a pickled dict of containers, numbers, text and numpy arrays; text of Python 2 comes as bytes."""
    with reading(path, "a pickle of plain numpy arrays"), path.open("rb") as file:
        content = _ArrayUnpickler(file, encoding="bytes").load()
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not a dict")
        plain: dict[Any, Any] = _with_arrays(content)
        return plain


def _with_arrays(value: Any) -> Any:
    """The same containers with real arrays in the place of the stand-ins."""
    if isinstance(value, dict):
        return {key: _with_arrays(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_arrays(entry) for entry in value)
    return value.build() if isinstance(value, _PickledArray) else value


class _PickledDtype:
    """Stands in for `numpy.dtype`: takes its arguments, such as ``"u1"``, and its state, for the byte order."""

    def __init__(self, code: str | bytes, *_flags: object) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code
        self.order = "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        self.order = order.decode() if isinstance(order, bytes) else order

    def build(self) -> np.dtype[Any]:
        if not (re.fullmatch(r"[biuf]\d{1,2}", self.code) and self.order in ("|", "<", ">", "=")):
            raise pickle.UnpicklingError(f"an array of {self.order}{self.code} is not one of plain numbers")
        return np.dtype(self.order + self.code)


class _PickledArray:
    """Stands in for `numpy.ndarray` and for the function that numpy's pickles call to make an empty one."""

    def __init__(self, *_subtype_shape_and_code: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def build(self) -> Array:
        _version, shape, dtype, in_fortran_order, content = self.state
        return np.frombuffer(content, dtype.build()).reshape(shape, order="F" if in_fortran_order else "C")


def _latin1_encode(text: str, encoding: str) -> bytes:
    """Stands in for `_codecs.encode`, which Python 3 names to write bytes into an old pickle."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text in {encoding!r} is not part of a plain array")
    return text.encode("latin1")


_STAND_INS = {
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledDtype,
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
    ("_codecs", "encode"): _latin1_encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a plain array and was not run")
        return _STAND_INS[module, name]
