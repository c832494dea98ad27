"""A slow decoder in plain Python, written from the description of the format, reads what `encode` writes."""

import itertools
import math
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.update import Grid, LocalSteps, Meta, Update, wire
from gradveil.update.wire._blocks import pack, packed_size, unpack

WIDTH = {0: 1, 1: 2, 2: 2, 3: 4, 4: 8, 5: 1, 6: 1, 7: 2, 8: 4, 9: 8}
TYPE = [torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Bytes:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, size: int) -> bytes:
        assert size <= len(self.data)
        taken, self.data = self.data[:size], self.data[size:]
        return taken

    def numbers(self, layout: str) -> tuple:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))

    def bits(self, count: int) -> list[int]:
        data = self.take(math.ceil(count / 8))
        return [data[i // 8] >> (7 - i % 8) & 1 for i in range(count)]

    def codes(self, count: int, width: int) -> list[int]:
        codes, first = [0] * count, 0
        for b in [8] * (width // 8) + [b for b in (4, 2, 1) if width & b]:
            m = math.ceil(count * b / 8)
            plane = self.take(m)
            for i in range(count):
                codes[i] |= (plane[i % m] >> (i // m * b) & (2**b - 1)) << first
            first += b
        return codes

    def places(self, n: int) -> list[int]:
        (k,) = self.numbers("H")
        w = math.floor(math.log2(n // k))
        low = self.codes(k, w)
        high = [i for i, bit in enumerate(self.bits(k + (n - 1) // 2**w)) if bit]
        return [(high[i] - i) * 2**w + low[i] for i in range(k)]


def reference_value(low: float, step: float, code: int, number: int) -> bytes:
    value = low + step * code
    if number == 4:
        return struct.pack("<d", value)
    single = struct.pack("<f", value)
    if number == 3:
        return single
    if number == 1:
        return struct.pack("<e", *struct.unpack("<f", single))
    bits = int.from_bytes(single, "little")  # to bfloat16: round to nearest, ties to even
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).to_bytes(2, "little")


def reference_decode(message: bytes, locations: dict[str, list[bool]]) -> tuple[dict, dict, dict]:
    """Layers and buffers, as names to (type, shape, bytes of the values), and the rest of the header."""
    data = Bytes(message)
    assert data.take(8) == b"gradveil"
    version, checksum = data.numbers("HI")
    assert (version, checksum) == (1, zlib.crc32(data.data))
    length, header_length = data.numbers("QI")
    assert length == len(message)
    header = Bytes(data.take(header_length))
    contents, flags, number, samples, epochs, batch_size, lr = header.numbers("BBqQQQd")
    fields = {"contents": contents, "round": number if flags & 1 else None, "samples": samples}
    digest = header.take(16)
    fields["digest"] = digest if flags & 8 else None
    layers, buffers = header.numbers("HH")
    (momentum,) = header.numbers("d") if flags & 16 else (0.0,)
    fields["local"] = LocalSteps(epochs, batch_size if flags & 4 else None, lr, momentum) if flags & 2 else None
    result: tuple[dict, dict] = ({}, {})
    for index in range(layers + buffers):
        name = header.take(*header.numbers("H")).decode()
        number, dimensions = header.numbers("BB")
        shape = header.numbers(f"{dimensions}Q")
        grid = header.numbers("ddB") if header.numbers("B")[0] else None
        values = Bytes(data.take(*header.numbers("Q")))
        if index < layers:
            content = b""
            for start in range(0, math.prod(shape), 65536):
                stop = min(start + 65536, math.prod(shape))
                known = locations[name][start:stop] if name in locations else None
                content += reference_block(values, stop - start, number, grid, known)
            result[0][name] = (TYPE[number], shape, content)
        else:
            result[1][name] = (number, shape, values.take(math.prod(shape) * WIDTH[number]))
        assert not values.data
    assert not header.data
    assert not data.data
    return *result, fields


def reference_block(data: Bytes, size: int, number: int, grid: tuple | None, known: list[bool] | None) -> bytes:
    (first,) = data.numbers("B")
    positions, coded, places = first & 7, first & 8, list(range(size))
    if first & 16:
        places = [place for place in places if known[place]]
    n = len(places)
    if positions == 0:
        filled = []
    elif positions == 1:
        filled = list(range(n))
    elif positions == 2:
        filled = [i for i, bit in enumerate(data.bits(n)) if bit]
    elif positions == 3:
        filled = data.places(n)
    else:
        filled = sorted(set(range(n)) - set(data.places(n)))
    width = WIDTH[number]
    if number == 0:
        values = [b"\1"] * len(filled)
    elif coded:
        values = [reference_value(grid[0], grid[1], code, number) for code in data.codes(len(filled), grid[2])]
    else:
        values = [data.take(width) for _ in filled]
    block = [bytes(width)] * size
    for i, value in zip(filled, values, strict=True):
        block[places[i]] = value
    return b"".join(block)


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


@given(
    st.sampled_from(TYPE[1:]),
    st.lists(st.integers(0, 12), max_size=3),
    st.sampled_from([0, 0.01, 0.1, 0.3, 0.9, 0.99, 1]),
    st.sampled_from([None, 0.1, 0.5, 1.0]),
    st.none() | st.integers(1, 28),
    st.integers(0, 2**31),
)
def test_the_reference_reads_what_is_written(dtype, shape, density, inside, width, seed):
    generator = torch.Generator().manual_seed(seed)
    grid = None if width is None else Grid(-1.0, 2.0**-width, width)
    value = torch.randn(shape, generator=generator).to(dtype)
    if grid is not None:
        value = grid.values(torch.randint(0, 2**width, shape, generator=generator), dtype)
    keep = torch.rand(shape, generator=generator) < density
    locations = None if inside is None else {"w": torch.rand(shape, generator=generator) < inside}
    if locations is not None:
        keep &= locations["w"]
    value = value.where(keep, torch.zeros((), dtype=dtype))
    buffers = {"count": torch.tensor([7, -1]), "mean": torch.randn(3, generator=generator)}
    local = LocalSteps(2, 3, 0.1, momentum=0.0 if locations is None else 0.9)
    meta = Meta(5, 8, local, buffers=buffers, grids={} if grid is None else {"w": grid})
    message = wire.encode(Update({"w": value, "ü": torch.ones(2)}, meta), locations)
    plain = {} if locations is None else {"w": locations["w"].reshape(-1).tolist()}
    layers, others, fields = reference_decode(message, plain)
    assert layers["w"] == (dtype, tuple(shape), raw(value))
    assert layers["ü"] == (torch.float32, (2,), raw(torch.ones(2)))
    assert others == {"count": (9, (2,), raw(buffers["count"])), "mean": (3, (3,), raw(buffers["mean"]))}
    digest = None if locations is None else wire.digest(locations)
    assert fields == {"contents": 0, "round": 5, "samples": 8, "local": local, "digest": digest}


@pytest.mark.parametrize("density", [0.0005, 0.1, 0.999])
def test_the_reference_reads_layers_of_several_blocks_and_locations(density):
    where = torch.rand(70_000, generator=torch.Generator().manual_seed(0)) < density
    layers, _, _ = reference_decode(wire.encode(Update({"w": where.half()})), {})
    assert layers["w"] == (torch.float16, (70_000,), raw(where.half()))
    layers, _, fields = reference_decode(wire.encode_locations({"w": where}), {})
    assert fields["contents"] == 1
    assert layers["w"][2].count(b"\1") == int(where.sum())


def test_every_way_to_encode_a_block_occurs():
    """Otherwise the tests above would not cover it."""
    grid, dense = Grid(0.25, 0.25, 3), torch.linspace(1, 2, 1000).half()
    where = torch.arange(1000) % 2 == 0
    first_bytes = set()
    for density, coded, known in itertools.product([0, 0.01, 0.5, 0.93, 1], [False, True], [False, True]):
        value = grid.values(torch.arange(1000) % 7, torch.float16) if coded else dense
        value = value * (torch.rand(1000, generator=torch.Generator().manual_seed(0)) < density)
        update = Update({"w": value * where if known else value}, Meta(grids={"w": grid} if coded else {}))
        message = wire.encode(update, {"w": where} if known else None)
        (header_length,) = struct.unpack_from("<I", message, 22)
        first_bytes.add(message[26 + header_length])
    encodings = {positions + coded for positions in (1, 2, 3, 4) for coded in (0, 8)} | {0}
    assert first_bytes == {encoding + known for encoding in encodings for known in (0, 16)}


def test_version_1_stays_readable():
    """A message from when the format was defined: whoever changes the format must raise the version."""
    message = bytes.fromhex(
        "677261647665696c0100596d2914e700000000000000b4000000000b07000000000000001000000000000000020000000000"
        "00000000000000000000000000000000e03f60ab00e2444383e9efa116bfeb6c215703000100060073706172736503016400"
        "000000000000000a0000000000000009007175616e74697365640301040000000000000001000000000000f0bf0000000000"
        "00e03f02020000000000000005006b6e6f776e020103000000000000000005000000000000000500636f756e740900000800"
        "0000000000000301000802800000c03f09e411004040c00300000000000000"
    )
    update = wire.decode(message, {"known": torch.tensor([True, True, False])})
    assert update["sparse"].tolist() == [0.0] * 40 + [1.5] + [0.0] * 59
    assert update["quantised"].tolist() == [-1.0, -0.5, 0.0, 0.5]
    assert update["known"].tolist() == [2.0, -3.0, 0.0]
    assert update.meta.grids == {"quantised": Grid(-1.0, 0.5, 2)}
    assert update.meta.buffers["count"].tolist() == 3
    assert (update.meta.round, update.meta.samples, update.meta.local) == (7, 16, LocalSteps(2, None, 0.5))


@given(st.integers(0, 28), st.lists(st.integers(0, 2**28 - 1), max_size=70))
def test_packed_codes_are_restored_and_take_the_stated_bytes(width, codes):
    values = np.array(codes, np.int64) % 2**width
    packed = pack(values, width)
    assert len(packed) == packed_size(len(codes), width)
    assert unpack(memoryview(packed), len(codes), width).tolist() == values.tolist()
