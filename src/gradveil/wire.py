"""Updates as bytes: self-describing, without pickle, so that bytes sent are counted and not estimated.

A message is a safetensors file. A layer is stored dense, or, where that is shorter, as a bitmap of the values that
are not zero followed by those values. Decoding gives back the very same bits.
"""

import dataclasses
import json
import math

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gradveil import checks
from gradveil.errors import DataError
from gradveil.update import LocalSteps, Meta, Update

VERSION = 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode(update: Update) -> bytes:
    """The bytes of an update (batch-norm statistics included); also noted in ``update.meta.bytes``.

    >>> update = Update({"weight": torch.tensor([0.0, 0.0, 1.5, 0.0])})
    >>> decode(encode(update))["weight"].tolist()
    [0.0, 0.0, 1.5, 0.0]
    """
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, value in update.items():
        value = value.detach().cpu().contiguous()
        # Compare bits, not values: -0.0 must survive.
        present = value.view(-1).view(_BITS[value.element_size()]) != 0
        bitmap_bytes = (value.numel() + 7) // 8
        if bitmap_bytes + int(present.sum()) * value.element_size() < value.numel() * value.element_size():
            shapes[name] = list(value.shape)
            tensors[f"bitmap/{name}"] = torch.from_numpy(np.packbits(present.numpy()))
            tensors[f"values/{name}"] = value.view(-1)[present]
        else:
            tensors[f"dense/{name}"] = value
    for name, value in update.meta.buffers.items():
        tensors[f"buffer/{name}"] = value.detach().cpu().contiguous()
    meta = {
        "round": update.meta.round,
        "samples": update.meta.samples,
        "local": None if update.meta.local is None else dataclasses.asdict(update.meta.local),
    }
    header = {"version": VERSION, "order": list(update), "sparse": shapes, "meta": meta}
    message: bytes = save(tensors, metadata={"gradveil": json.dumps(header)})
    update.meta.bytes = len(message)
    return message


def decode(message: bytes) -> Update:
    """The update that `encode` turned into `message`; anything else raises `DataError`."""
    try:
        tensors = load(message)
        length = int.from_bytes(message[:8], "little")
        header = json.loads(json.loads(message[8 : 8 + length])["__metadata__"]["gradveil"])
        if header["version"] != VERSION:
            raise ValueError(f"it has version {header['version']}, this is version {VERSION}; update gradveil")
        values = {name: _layer(tensors, name, header["sparse"].get(name)) for name in header["order"]}
        buffers = {
            name.removeprefix("buffer/"): tensors.pop(name) for name in list(tensors) if name.startswith("buffer/")
        }
        if tensors or len(values) != len(header["order"]):
            raise ValueError(f"its layers and its list of layers differ ({', '.join(tensors) or 'a name twice'})")
        local = header["meta"]["local"]
        meta = Meta(
            round=header["meta"]["round"],
            samples=checks.integer("wire", "samples", header["meta"]["samples"], low=0),
            local=None if local is None else LocalSteps(**local),
            bytes=len(message),
            buffers=buffers,
        )
    except (SafetensorError, LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise DataError(f"wire: expected the bytes of an encoded update, got something else: {error}") from error
    return Update(values, meta)


def _layer(tensors: dict[str, Tensor], name: str, shape: list[int] | None) -> Tensor:
    """Take one layer out of the message."""
    if shape is None:
        value = tensors.pop(f"dense/{name}")
    else:
        value = _from_bitmap(tensors.pop(f"bitmap/{name}"), tensors.pop(f"values/{name}"), shape)
    if not value.is_floating_point():
        raise ValueError(f"layer {name!r} holds {value.dtype}, not floating-point numbers")
    return value


def _from_bitmap(bitmap: Tensor, values: Tensor, shape: list[int]) -> Tensor:
    # What the message holds bounds what is allocated: at most eight values a byte of bitmap.
    size = math.prod(shape)
    if bitmap.dtype != torch.uint8 or bitmap.shape != ((size + 7) // 8,) or min(shape, default=1) < 0:
        raise ValueError(f"a bitmap for shape {shape} must be {(size + 7) // 8} bytes, got {list(bitmap.shape)}")
    present = torch.from_numpy(np.unpackbits(bitmap.numpy(), count=size)).bool()
    if values.shape != (int(present.sum()),):
        raise ValueError(f"a bitmap with {int(present.sum())} values comes with {list(values.shape)}")
    dense = torch.zeros(size, dtype=values.dtype)
    dense[present] = values
    return dense.view(shape)
