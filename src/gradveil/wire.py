"""Updates as bytes: self-describing, without pickle, so that bytes sent are counted and not estimated.

A message is a safetensors file. A layer is stored dense, or, where that is shorter, as a bitmap of the values that
are not zero followed by those values. Decoding gives back the very same bits.
"""

import json

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gradveil.errors import DataError
from gradveil.update import Meta, Update

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
    header = {"version": VERSION, "order": list(update), "sparse": shapes}
    message: bytes = save(tensors, metadata={"gradveil": json.dumps(header)})
    update.meta.bytes = len(message)
    return message


def decode(message: bytes) -> Update:
    """The update that `encode` turned into `message`; anything else raises `DataError`."""
    try:
        tensors = load(message)
        length = int.from_bytes(message[:8], "little")
        header = json.loads(json.loads(message[8 : 8 + length])["__metadata__"]["gradveil"])
        version, order, sparse = header["version"], header["order"], header["sparse"]
        if version != VERSION:
            raise DataError(f"wire: expected a message of version {VERSION}, got {version}; update gradveil")
        values = {
            name: _from_bitmap(tensors[f"bitmap/{name}"], tensors[f"values/{name}"], sparse[name])
            if name in sparse
            else tensors[f"dense/{name}"]
            for name in order
        }
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"wire: expected the bytes of an encoded update, got something else: {error}") from error
    buffers = {name.removeprefix("buffer/"): t for name, t in tensors.items() if name.startswith("buffer/")}
    return Update(values, Meta(bytes=len(message), buffers=buffers))


def _from_bitmap(bitmap: Tensor, values: Tensor, shape: list[int]) -> Tensor:
    size = int(np.prod(shape, dtype=np.int64))
    if bitmap.dtype != torch.uint8 or len(bitmap) != (size + 7) // 8:
        raise ValueError(f"a bitmap for {size} values must have {(size + 7) // 8} bytes, got {len(bitmap)}")
    present = torch.from_numpy(np.unpackbits(bitmap.numpy(), count=size)).bool()
    dense = torch.zeros(size, dtype=values.dtype)
    dense[present] = values
    return dense.view(shape)
