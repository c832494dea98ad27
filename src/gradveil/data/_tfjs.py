"""Reading weights as tensorflow.js stores them: a JSON manifest, and one file with the bytes of all tensors in turn."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from gradveil.data._arrays import Array, open_regular, reading
from gradveil.data._limits import check_size, fill

MAX_MANIFEST = 2**20
MAX_TENSORS = 1000
_LONGEST_SHAPE = 8


def read_weights(manifest: Path) -> dict[str, Array]:
    """Read the tensors that a manifest lists, as float64 arrays; quantised ones become ``scale * byte + min``.

    The manifest must name one file next to it, whose size must be that of the tensors to the byte; sizes are checked
    before anything is allocated. Tensors are float32, or quantised to bytes.

    Args:
        manifest: the file ``...weights_manifest.json``.
    """
    with reading(manifest, "a weights manifest of tensorflow.js"):
        if (size := manifest.stat().st_size) > MAX_MANIFEST:
            raise ValueError(f"it has {size:,} bytes, more than {MAX_MANIFEST:,}")
        with open_regular(manifest) as file:
            (group,) = json.load(file)
        (name,), tensors = group["paths"], group["weights"]
        if Path(name).name != name:
            raise ValueError(f"it names {name!r}, which is not a file next to it")
        if len(tensors) > MAX_TENSORS or len({tensor["name"] for tensor in tensors}) != len(tensors):
            raise ValueError(f"expected at most {MAX_TENSORS} tensors, none twice, got {len(tensors)}")
        layouts = [_layout(tensor) for tensor in tensors]
    weights = manifest.with_name(name)
    with reading(weights, "the tensors that the manifest next to it lists"):
        declared, stored = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layouts), weights.stat().st_size
        if declared != stored:
            raise ValueError(f"the manifest declares {declared:,} bytes, and it has {stored:,}")
        check_size(8 * sum(math.prod(shape) for shape, _dtype in layouts), stored)
        arrays = {}
        with open_regular(weights) as file:
            for tensor, (shape, dtype) in zip(tensors, layouts, strict=True):
                values = np.empty(shape, dtype)
                fill(values, file)
                array = _dequantised(values, tensor.get("quantization"))
                if not np.isfinite(array).all():
                    raise ValueError(f"{tensor['name']!r} holds numbers that are not finite")
                arrays[str(tensor["name"])] = array
    return arrays


def _layout(tensor: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape of a tensor, and how its numbers are stored."""
    shape, quantised = tensor["shape"], tensor.get("quantization")
    if len(shape) > _LONGEST_SHAPE or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"{tensor['name']!r} has the shape {shape}")
    stored_as = quantised["dtype"] if quantised else "float32"
    if tensor["dtype"] != "float32" or stored_as not in ("float32", "uint8"):
        raise ValueError(f"{tensor['name']!r} is {tensor['dtype']}, stored as {stored_as}, not float32 or bytes")
    return tuple(shape), np.dtype("<f4" if stored_as == "float32" else "u1")


def _dequantised(values: Array, quantised: Any) -> Array:
    array = values.astype(np.float64)
    with np.errstate(all="ignore"):  # what is not finite is refused
        return array * float(quantised["scale"]) + float(quantised["min"]) if quantised else array
