"""Updates as bytes: self-describing, versioned and without pickle, so that the bytes sent are counted, not estimated.

`encode` and `decode` preserve every bit (including -0.0 and subnormal numbers). Zeros cost next to nothing, values on a
known grid (`gradveil.update.Grid`) are sent as codes, and if both sides know a set of locations (`encode_locations`),
positions are counted within it.

**Untrusted bytes.** Decoding runs no code from the message, takes time in proportion to the message and the values it
declares, and allocates nothing before its size is checked: at most twice the declared values, 4 MiB of working memory,
and 2 KiB for each tensor. Anything that `encode` would not produce raises `DataError`. So does a layer with NaN or
infinite values, which a server must not average (buffers are passed on unchanged). The checksum detects accidents, not
forgeries: the transport must prove who sent a message.

The format, version 1. Numbers are little-endian: u8 is an unsigned number of 8 bits, i64 a signed one of 64, f64 an
IEEE double. "First in the highest bit" means that a sequence of bits fills bytes from the most significant bit down.

A message::

    8 bytes    "gradveil"
    u16        version, 1
    u32        CRC-32 (as in zlib) of everything that follows
    u64        length of the entire message in bytes
    u32        length of the header in bytes
    header
    tensors    the bytes of the layers, then of the buffers, in the header's order and without gaps

The header; fields that the flags mark as absent are sent as 0::

    u8         0: an update; 1: locations (which have no buffers, no grids and no flags)
    u8         flags: 1 there is a round, 2 there are local steps, 4 they have a batch size, 8 there is a digest,
               16 the local steps have momentum
    i64        round
    u64        samples
    u64        local steps: epochs
    u64        local steps: batch size
    f64        local steps: learning rate
    16 bytes   digest of the known locations, see `digest`
    u16        number of layers
    u16        number of buffers; at most 16,384 tensors together
    f64        local steps: momentum; present only if its flag is set
    entries    one for each layer, then for each buffer

An entry::

    u16        length of the name in bytes, at most 1,024
    name       in UTF-8; no two layers and no two buffers have the same name
    u8         type: 0 bool, 1 float16, 2 bfloat16, 3 float32, 4 float64, 5 uint8, 6 int8, 7 int16, 8 int32, 9 int64
    u8         number of dimensions, at most 32
    u64 ...    the dimensions
    u8         1: a grid follows; 0: no grid follows
    f64 f64 u8 the grid: low, step, bits
    u64        length of the tensor's bytes

A buffer's bytes are its values. The layers of an update are floating-point numbers, those of locations booleans; a
layer's bytes are its blocks of 65,536 values in row-major order, of which the last may be shorter. A block::

    u8         how positions are stored, 0 to 4; + 8: values are codes on the grid; + 16: the n places are only those
               places of the block that are in the known set (otherwise: all of them)
    positions  0: every value is zero, and nothing follows
               1: every place has a value, and no positions follow
               2: a bit for each of the n places: whether it has a value; first in the highest bit
               3: a list of the places that have values
               4: a list of the places that have none
    values     in order, for each place that has one: unchanged, or as packed codes; nothing for booleans

A list of k places (Elias and Fano's code), where w = floor(log2(floor(n / k)))::

    u16        k, with 0 < k <= n / 2
    low bits   the lowest w bits of each place, as packed codes
    high bits  k + floor((n - 1) / 2^w) bits, first in the highest bit: number floor(place / 2^w) + i is set for place i

Packed codes of w bits are stored as planes, starting with the codes' lowest bits: floor(w / 8) planes of 8 bits, then
one each of 4, 2 and 1 bits if w has that bit. A plane of b bits takes m = ceil(count b / 8) bytes; byte i holds the
bits of codes i, i + m, i + 2 m and so on from its lowest bit on. Code c stands for low + step c, rounded as described
in `gradveil.update.Grid`.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import DataError, InputError, NotFiniteError
from gradveil.update import Grid, Meta, Update
from gradveil.update.wire._blocks import (
    BLOCK,
    Array,
    Kind,
    Malformed,
    NotFinite,
    Piece,
    Reader,
    decode_block,
    encode_block,
)
from gradveil.update.wire._container import LOCATIONS, MAX_DIMENSIONS, UPDATE, Entry, Header, read, write

__all__ = ["MAX_VALUES", "decode", "decode_locations", "digest", "encode", "encode_locations"]

MAX_VALUES = 100_000_000
"""How many values a message may declare if `like` is not given."""

Layers = Mapping[str, Tensor]
Locations = Layers


def encode(update: Update, locations: Locations | None = None) -> bytes:
    """Encode an update, including batch-norm statistics; the length is stored in ``update.meta.bytes``.

    Args:
        update: what to send; its values must be finite.
        locations: booleans by layer, known to the receiver too, that mark where values may be. If all values of a block
            lie inside the set, positions are counted within it; if they fill all of it, positions cost nothing.

    >>> update = Update({"weight": torch.tensor([0.0, 0.0, 1.5, 0.0])})
    >>> decode(encode(update))["weight"].tolist()
    [0.0, 0.0, 1.5, 0.0]
    """
    known = _flat_sets(locations or {})
    for name, value in (locations or {}).items():
        if name not in update or update[name].shape != value.shape:
            layer = list(update[name].shape) if name in update else "no layer"
            raise InputError(
                f"wire: expected locations shaped like the layers, got {list(value.shape)} for {name!r} ({layer})"
            )
    for name, value in update.items():
        if not value.is_floating_point():
            raise InputError(f"wire: layers must be floating-point numbers, got {value.dtype} for {name!r}")
    for name in update.meta.grids:
        if name not in update:
            raise InputError(f"wire: got a grid for {name!r}, but the layers are {list(update)}")
    body: list[Piece] = []
    layers = [
        _encode_layer(name, value, body, grid=update.meta.grids.get(name), known=known.get(name))
        for name, value in update.items()
    ]
    buffers = []
    for name, value in update.meta.buffers.items():
        kind, bits = _bits_of(name, value)
        body.append(bits.astype(kind.stored, copy=False).data)
        buffers.append(Entry(name, kind, tuple(value.shape), None, bits.nbytes))
    meta = update.meta
    header = Header(
        UPDATE, layers, buffers, meta.round, meta.samples, meta.local, None if locations is None else digest(locations)
    )
    message = write(header, body)
    meta.bytes = len(message)
    return message


def decode(
    message: bytes, locations: Locations | None = None, *, like: Layers | None = None, max_values: int = MAX_VALUES
) -> Update:
    """Decode an update that `encode` produced; anything else raises `DataError`.

    Args:
        message: the bytes.
        locations: the set that was given to `encode`, if one was.
        like: tensors with the expected names, shapes and types, such as ``task.parameters``; servers should pass it.
        max_values: without `like`, how many values the layers may have in total.
    """
    with _data_errors("update"):
        header, reader = read(memoryview(message))
        _check_layers(header, UPDATE, like, max_values)
        known = {} if header.digest is None else _flat_sets(_matching(header.digest, locations))
        values = {entry.name: _decode_layer(entry, reader, known.get(entry.name)) for entry in header.layers}
        buffers = {entry.name: _decode_buffer(entry, reader) for entry in header.buffers}
    meta = Meta(
        round=header.round,
        samples=header.samples,
        local=header.local,
        bytes=len(message),
        buffers=buffers,
        grids={entry.name: entry.grid for entry in header.layers if entry.grid is not None},
    )
    return Update(values, meta)


def encode_locations(locations: Locations) -> bytes:
    """Encode sets of positions, given as boolean tensors by layer.

    >>> message = encode_locations({"weight": torch.tensor([False, True])})
    >>> decode_locations(message)["weight"].tolist()
    [False, True]
    """
    body: list[Piece] = []
    layers = [_encode_layer(name, value, body) for name, value in _checked(locations).items()]
    return write(Header(LOCATIONS, layers, []), body)


def decode_locations(message: bytes, *, like: Layers | None = None, max_values: int = MAX_VALUES) -> dict[str, Tensor]:
    """Decode sets of positions that `encode_locations` produced; anything else raises `DataError`.

    Args:
        message: the bytes.
        like: tensors with the expected names and shapes, such as ``task.parameters``.
        max_values: without `like`, how many places the layers may have in total.
    """
    with _data_errors("set of locations"):
        header, reader = read(memoryview(message))
        _check_layers(header, LOCATIONS, like, max_values)
        return {entry.name: _decode_layer(entry, reader, None) for entry in header.layers}


def digest(locations: Locations) -> bytes:
    """Sixteen bytes that identify a set of locations.

    They are the first half of the SHA-256 of the following, for each layer in the order of the names in UTF-8: the
    length of the name (u64), the name, the number of dimensions (u64), the dimensions (u64), and a bit for each place,
    the first in the highest bit.

    >>> digest({"weight": torch.tensor([False, True])}).hex()
    '0eed9b63e18cc393ad1f139569de25ff'
    """
    state = hashlib.sha256()
    for name, value in sorted((name.encode(), value) for name, value in _checked(locations).items()):
        shape = struct.pack(f"<{1 + value.ndim}Q", value.ndim, *value.shape)
        state.update(struct.pack("<Q", len(name)) + name + shape)
        state.update(np.packbits(_flat(value).numpy()).data)
    return state.digest()[:16]


# -- layers ----------------------------------------------------------------------------------------------------------


def _encode_layer(
    name: str, value: Tensor, body: list[Piece], *, grid: Grid | None = None, known: Array | None = None
) -> Entry:
    kind, bits = _bits_of(name, value)
    pieces: list[Piece] = []
    for start in range(0, len(bits), BLOCK):
        block = slice(start, start + BLOCK)
        try:
            pieces += encode_block(bits[block], kind, grid, None if known is None else known[block])
        except NotFinite:
            raise NotFiniteError(
                f"wire: values must be finite, got NaN or Inf in {name!r}; do not send this update"
            ) from None
    body += pieces
    return Entry(name, kind, tuple(value.shape), grid, sum(memoryview(piece).nbytes for piece in pieces))


def _decode_layer(entry: Entry, reader: Reader, known: Array | None) -> Tensor:
    if known is not None and len(known) != entry.size:
        raise Malformed(f"{entry.name!r} has {entry.size} places, but the locations have {len(known)}")
    blocks = Reader(reader.take(entry.length))
    if entry.size > BLOCK * blocks.left:  # a block takes at least one byte
        raise Malformed(f"{blocks.left} bytes cannot hold the {entry.size} values of {entry.name!r}")
    out = np.empty(entry.size, entry.kind.stored.newbyteorder("="))
    for start in range(0, entry.size, BLOCK):
        block = slice(start, start + BLOCK)
        try:
            decode_block(blocks, out[block], entry.kind, entry.grid, None if known is None else known[block])
        except NotFinite:
            raise DataError(
                f"wire: values must be finite, got NaN or Inf in {entry.name!r}; leave this update out"
            ) from None
    if blocks.left:
        raise Malformed(f"{entry.name!r} has {blocks.left} bytes too many")
    return torch.from_numpy(out).view(entry.kind.dtype).reshape(entry.shape)


def _decode_buffer(entry: Entry, reader: Reader) -> Tensor:
    # A buffer is never larger than the bytes that were sent for it.
    if entry.length != entry.size * entry.kind.stored.itemsize:
        raise Malformed(f"the buffer {entry.name!r} has {entry.size} values and {entry.length} bytes")
    if entry.grid is not None:
        raise Malformed(f"the buffer {entry.name!r} has a grid")
    bits = reader.array(entry.kind.stored, entry.size).astype(entry.kind.stored.newbyteorder("="))
    if entry.kind.dtype == torch.bool and bits.size and bits.max() > 1:
        raise Malformed(f"the buffer {entry.name!r} has booleans other than 0 and 1")
    return torch.from_numpy(bits).view(entry.kind.dtype).reshape(entry.shape)


def _bits_of(name: str, value: Tensor) -> tuple[Kind, Array]:
    """A tensor's type, and its values in order, reinterpreted as integers."""
    kind = Kind.of(value.dtype)
    if kind is None or value.ndim > MAX_DIMENSIONS:
        raise InputError(
            f"wire: expected real numbers in at most {MAX_DIMENSIONS} dimensions, got {value.dtype} in {value.ndim} "
            f"dimensions for {name!r}"
        )
    integers = getattr(torch, kind.stored.name)
    return kind, _flat(value).view(integers).numpy()


def _flat(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().reshape(-1)


# -- known locations and expected layers ----------------------------------------------------------------------------


def _checked(locations: Locations) -> Locations:
    for name, value in locations.items():
        if value.dtype != torch.bool:
            raise InputError(f"wire: locations must be boolean tensors, got {value.dtype} for {name!r}")
    return locations


def _flat_sets(locations: Locations) -> dict[str, Array]:
    return {name: _flat(value).numpy() for name, value in _checked(locations).items()}


def _matching(expected: bytes, locations: Locations | None) -> Locations:
    """Return the locations if they are the ones that the sender used."""
    got = "none" if locations is None else digest(locations).hex()
    if locations is None or got != expected.hex():
        raise DataError(
            f"wire: expected the locations with digest {expected.hex()}, which the sender used, got {got}; "
            "pass the same locations= to encode and decode"
        )
    return locations


def _check_layers(header: Header, contents: int, like: Layers | None, max_values: int) -> None:
    """Refuse unexpected layers, before anything is allocated for them."""
    if header.contents != contents:
        raise Malformed("it holds locations" if contents == UPDATE else "it holds an update")
    for entry in header.layers:
        if not (entry.kind.exponent if contents == UPDATE else entry.kind.dtype == torch.bool):
            raise Malformed(f"layer {entry.name!r} holds {entry.kind.dtype}")
    if like is None:
        total = sum(entry.size for entry in header.layers)
        if total > max_values:
            raise DataError(
                f"wire: expected at most {max_values:,} values, got a message that declares {total:,}; pass like= with "
                "the expected tensors, or a larger max_values="
            )
        return
    dtype = torch.bool if contents == LOCATIONS else None
    expected = {name: (list(value.shape), dtype or value.dtype) for name, value in like.items()}
    got = {entry.name: (list(entry.shape), entry.kind.dtype) for entry in header.layers}
    for name in [*expected, *got]:
        if expected.get(name) != got.get(name):
            raise DataError(
                f"wire: expected {_describe(expected.get(name))} as layer {name!r}, got {_describe(got.get(name))}; "
                "both sides must use the same model"
            )


def _describe(layer: tuple[list[int], torch.dtype] | None) -> str:
    return "nothing" if layer is None else f"{str(layer[1]).removeprefix('torch.')} {layer[0]}"


@contextmanager
def _data_errors(content: str) -> Iterator[None]:
    try:
        yield
    except Malformed as error:
        raise DataError(f"wire: expected the bytes of an encoded {content}, got something else: {error}") from error
