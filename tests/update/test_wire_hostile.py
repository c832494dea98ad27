"""Untrusted bytes: whatever they are, `decode` returns an update or raises a `DataError`, and needs little memory.

    GRADVEIL_FUZZ=100000 python -m pytest tests/update/test_wire_hostile.py -k mutated -s

runs the fuzzing test at length; the default run uses a few thousand messages.
"""

import dataclasses
import os
import random
import re
import struct
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from gradveil.core.errors import DataError
from gradveil.update import Grid, LocalSteps, Meta, Update, wire
from gradveil.update.wire._blocks import KINDS, Malformed
from gradveil.update.wire._container import LOCATIONS, UPDATE, Entry, Header, read, write

BOOL, HALF, BRAIN, SINGLE, DOUBLE, BYTE, *_, LONG = KINDS
FRAME, LENGTHS, FIELDS = 14, 12, 62  # bytes of the parts before the entries


def sealed(message: bytes) -> bytes:
    """The message with length and checksum corrected, so that the decoder reads on past them."""
    rest = struct.pack("<Q", len(message)) + message[FRAME + 8 :]
    return message[:10] + struct.pack("<I", zlib.crc32(rest)) + rest


def with_bytes(message: bytes, at: int, new: bytes) -> bytes:
    return sealed(message[:at] + new + message[at + len(new) :])


def layer(data: bytes, *, size=8, kind=SINGLE, grid=None, length=None, shape=None, name="w", digest=None) -> bytes:
    """A message with one layer whose bytes are `data`."""
    entry = Entry(name, kind, (size,) if shape is None else shape, grid, len(data) if length is None else length)
    return write(Header(UPDATE, [entry], [], digest=digest), [data])


ONES = struct.pack("<4f", 1, 1, 1, 1)
GOOD = layer(b"\2\xf0" + ONES)
EMPTY = write(Header(UPDATE, [], [], 1, 2, LocalSteps(1, 2, 0.5)), [])
MOMENTUM = write(Header(UPDATE, [], [], 1, 2, LocalSteps(1, 2, 0.5, momentum=0.9)), [])


def test_the_messages_that_the_hostile_ones_are_made_from_are_valid():
    assert wire.decode(GOOD)["w"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert sealed(GOOD) == GOOD
    assert wire.decode(EMPTY).meta.local == LocalSteps(1, 2, 0.5)
    assert wire.decode(MOMENTUM).meta.local == LocalSteps(1, 2, 0.5, momentum=0.9)


HEADERS = {
    "another magic": (b"G" + GOOD[1:], "it begins with b'Gradveil'"),
    "another version": (GOOD[:8] + b"\2\0" + GOOD[10:], "it has version 2, but version 1 is read here"),
    "only a frame": (GOOD[:FRAME], "14 bytes is not the one it declares"),
    "one byte less": (GOOD[:-1], "bytes is not the one it declares"),
    "one byte more": (GOOD + b"\0", "bytes is not the one it declares"),
    "one bit flipped": (GOOD[:-1] + b"\1", "checksum does not match"),
    "no header": (sealed(GOOD[: FRAME + LENGTHS]), "bytes should follow, but 0 are left"),
    "a header longer than all": (with_bytes(GOOD, 22, b"\xff" * 4), "4294967295 bytes should follow"),
    "a header too short": (with_bytes(GOOD, 22, b"\x41\0\0\0"), "1 tensors are more than its header can hold"),
    "a header too long": (
        with_bytes(write(Header(UPDATE, [], []), [b"\0"]), 22, bytes([FIELDS + 1, 0, 0, 0])),
        "its header has 1 bytes too many",
    ),
    "other contents": (with_bytes(GOOD, 26, b"\2"), "no message has contents 2"),
    "an unknown flag": (with_bytes(GOOD, 27, b"\x20"), "no message has contents 0 and flags 32"),
    "momentum of no steps": (with_bytes(GOOD, 27, b"\x10"), "no message has contents 0 and flags 16"),
    "momentum of 1": (with_bytes(MOMENTUM, 88, struct.pack("<d", 1.0)), "LocalSteps: momentum must be"),
    "more layers": (with_bytes(GOOD, 84, b"\2\0"), "2 tensors are more than its header can hold"),
    "65,535 layers": (with_bytes(GOOD, 84, b"\xff\xff"), "65535 tensors are more than its header can hold"),
    "a layer less": (with_bytes(GOOD, 84, b"\0\0"), "its header has .* bytes too many"),
    "no steps": (with_bytes(EMPTY, 44, bytes(8)), "LocalSteps: epochs must be"),
    "no batch": (with_bytes(EMPTY, 52, bytes(8)), "LocalSteps: batch_size must be"),
    "a learning rate of NaN": (with_bytes(EMPTY, 60, struct.pack("<d", float("nan"))), "LocalSteps: lr must be"),
    "a long name": (with_bytes(GOOD, 88, b"\1\4"), "a name has 1025 bytes"),
    "a name that is not UTF-8": (with_bytes(GOOD, 90, b"\xff"), "can't decode byte"),
    "an unknown type": (with_bytes(GOOD, 91, b"\x0a"), "1 dimensions of type 10"),
    "33 dimensions": (with_bytes(GOOD, 92, b"\x21"), "33 dimensions of type 3"),
    "two grids": (with_bytes(GOOD, 101, b"\2"), "'w' has 2 grids"),
    "a name twice": (
        write(Header(UPDATE, [Entry("w", SINGLE, (1,), None, 1)] * 2, []), [b"\0\0"]),
        "a name occurs twice",
    ),
    "too many values to count": (layer(b"\0", shape=(2**32, 2**31)), "'w' has the impossible shape"),
    "too many values, and none": (layer(b"", shape=(2**63, 2**63, 0)), "'w' has the impossible shape"),
    "a layer longer than the message": (
        layer(b"\0", length=2),
        "do not take exactly the 1 bytes after the header",
    ),
    "a layer shorter than the message": (layer(b"\0", length=0), "tensors do not take exactly the 1 bytes"),
    "whole numbers": (layer(b"\1" + bytes(64), kind=LONG), "layer 'w' holds torch.int64"),
    "booleans": (layer(b"\1", kind=BOOL), "layer 'w' holds torch.bool"),
    "buffers in locations": (with_bytes(EMPTY, 26, b"\1"), "it mixes locations with parts of an update"),
}

UNCHECKED_GRID = object.__new__(Grid)
for _name, _value in {"low": 0.0, "step": 1.0, "bits": 29}.items():
    object.__setattr__(UNCHECKED_GRID, _name, _value)

BLOCKS = {
    "no bytes": (layer(b""), "0 bytes cannot hold the 8 values of 'w'"),
    "fewer blocks than values": (layer(b"\0", size=65_537), "1 bytes cannot hold the 65537 values"),
    "a byte too many": (layer(b"\0\0"), "'w' has 1 bytes too many"),
    "bytes of an empty layer": (layer(b"\0", size=0), "'w' has 1 bytes too many"),
    "unknown positions": (layer(b"\5" + ONES), "no block begins with the byte 5"),
    "an unknown flag": (layer(b"\x21" + ONES * 2), "no block begins with the byte 33"),
    "codes without a grid": (layer(b"\x09" + bytes(8)), "no block begins with the byte 9"),
    "codes of zeros": (layer(b"\x08", grid=Grid(0.0, 1.0, 1)), "no block begins with the byte 8"),
    "a grid out of range": (
        layer(b"\0", grid=UNCHECKED_GRID),
        "Grid: bits must be a whole number from 1 to 28, got 29",
    ),
    "codes cut short": (layer(b"\x09\0", grid=Grid(0.0, 1.0, 2)), "2 bytes should follow, but 1 are left"),
    "a known set without a digest": (layer(b"\x10"), "a block counts places of a known set"),
    "too few values": (layer(b"\1" + ONES), "32 bytes should follow, but 16 are left"),
    "a bitmap without values": (layer(b"\2\xff" + ONES), "32 bytes should follow, but 16 are left"),
    "a bitmap cut short": (layer(b"\2", size=80), "10 bytes should follow, but 0 are left"),
    "an empty list": (layer(b"\3\0\0"), "0 positions of 8 are not stored as a list"),
    "a list of most places": (layer(b"\3\5\0" + bytes(9) + ONES), "5 positions of 8 are not stored as a list"),
    "a list of no places": (layer(b"\3\1\0\0\0" + ONES[:4], size=1), "1 positions of 1 are not stored as a list"),
    # 2 of 8 places: 2 low bits each in one byte, then 2 + 1 bits
    "a list with too few": (layer(b"\3\2\0\4\x80" + ONES[:8]), "a list of 2 positions holds 1"),
    "a list with too many": (layer(b"\3\2\0\4\xe0" + ONES[:8]), "a list of 2 positions holds 3"),
    "a place twice": (layer(b"\3\2\0\5\xc0" + ONES[:8]), "positions do not increase"),
    "places out of order": (layer(b"\3\2\0\1\xc0" + ONES[:8]), "positions do not increase"),
    "a place beyond the last": (layer(b"\3\2\0\x0b\x90" + ONES[:8], size=9), "positions do not increase from 0 to 8"),
    "a bad list of holes": (layer(b"\4\2\0\5\xc0" + ONES + ONES[:8]), "positions do not increase"),
}


def buffer(kind, shape, data: bytes, *, grid=None, contents=UPDATE) -> bytes:
    return write(Header(contents, [], [Entry("b", kind, shape, grid, len(data))]), [data])


BUFFERS = {
    "too few bytes": (buffer(SINGLE, (2,), ONES[:4]), "the buffer 'b' has 2 values and 4 bytes"),
    "too many bytes": (buffer(SINGLE, (2,), ONES), "the buffer 'b' has 2 values and 16 bytes"),
    "a huge shape": (buffer(BYTE, (2**62,), b""), "values and 0 bytes"),
    "a grid": (buffer(SINGLE, (1,), ONES[:4], grid=Grid(0.0, 1.0, 1)), "the buffer 'b' has a grid"),
    "neither true nor false": (buffer(BOOL, (1,), b"\2"), "has booleans other than 0 and 1"),
}


@pytest.mark.parametrize(
    ("message", "error"),
    [
        pytest.param(*case, id=f"{kind}: {name}")
        for kind, cases in (("header", HEADERS), ("block", BLOCKS), ("buffer", BUFFERS))
        for name, case in cases.items()
    ],
)
def test_hostile_messages_are_refused(message, error):
    with pytest.raises(
        DataError, match=f"wire: expected the bytes of an encoded update, got something else: .*{error}"
    ):
        wire.decode(message)


def test_valid_lists_are_decoded():
    """This shows that the refusals above come from what was changed."""
    assert wire.decode(layer(b"\3\2\0\4\xc0" + ONES[:8]))["w"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert wire.decode(layer(b"\3\2\0\x09\xa0" + ONES[:8]))["w"].tolist() == [0, 1, 0, 0, 0, 0, 1, 0]
    assert wire.decode(layer(b"\4\2\0\x09\xa0" + ONES + ONES[:8]))["w"].tolist() == [1, 0, 1, 1, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        (HALF, "007c"), (HALF, "00fc"), (HALF, "017c"),
        (BRAIN, "807f"), (BRAIN, "80ff"), (BRAIN, "817f"),
        (SINGLE, "0000807f"), (SINGLE, "000080ff"), (SINGLE, "010080ff"),
        (DOUBLE, "000000000000f07f"), (DOUBLE, "000000000000f0ff"), (DOUBLE, "010000000000f07f"),
    ],
)  # fmt: skip
def test_nan_and_infinity_are_refused(kind, bits):
    for data in (b"\1" + bytes.fromhex(bits), b"\2\x80" + bytes.fromhex(bits)):
        with pytest.raises(DataError, match="wire: values must be finite, got NaN or Inf in 'w'"):
            wire.decode(layer(data, kind=kind, size=1))


@pytest.mark.parametrize(("kind", "low", "step"), [(HALF, 1e5, 1.0), (SINGLE, 0.0, 1e39), (DOUBLE, 1e308, 1e308)])
def test_grids_that_overflow_are_refused(kind, low, step):
    message = layer(b"\x09\1", kind=kind, grid=Grid(low, step, 1), size=1)
    with pytest.raises(DataError, match="wire: values must be finite"):
        wire.decode(message)


def test_a_message_that_does_not_fit_the_known_set_is_refused():
    where = {"w": torch.tensor([True, False, True, False])}
    digest = wire.digest(where)
    assert wire.decode(layer(b"\x11" + ONES[:8], size=4, digest=digest), where)["w"].tolist() == [1, 0, 1, 0]
    for message, error in (
        (layer(b"\x11" + ONES[:4], size=4, digest=digest), "8 bytes should follow, but 4 are left"),
        (layer(b"\x11" + ONES[:8], size=5, digest=digest), "'w' has 5 places, but the locations have 4"),
        (layer(b"\x11" + ONES[:8], size=4, digest=digest, name="v"), "but its layer has none"),
    ):
        with pytest.raises(DataError, match=error):
            wire.decode(message, where)


@pytest.mark.parametrize("first", [0x11, 0x12])
def test_an_empty_known_set_holds_nothing(first):
    where = {"w": torch.zeros(4, dtype=torch.bool)}
    assert wire.decode(layer(bytes([first]), size=4, digest=wire.digest(where)), where)["w"].tolist() == [0] * 4


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_short_message_that_declares_gigabytes_allocates_nothing():
    """Every block in it is a valid block of zeros, so only the limit stops it."""
    message = layer(bytes(2**15), shape=(2**31,), kind=DOUBLE)

    def refused() -> None:
        with pytest.raises(DataError, match="expected at most 100,000,000 values, got a message that declares 2,147,4"):
            wire.decode(message)
        with pytest.raises(DataError, match=r"expected float64 \[2\] as layer 'w'"):
            wire.decode(message, like={"w": torch.zeros(2, dtype=torch.float64)})

    assert peak(refused) < 2**16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 0.5, 0.95, 1.0])
def test_decoding_takes_twice_the_values_and_a_little_working_memory(dtype, density):
    generator = torch.Generator().manual_seed(0)
    where = {"w": torch.rand(2**21, generator=generator) < 0.9}
    value = torch.rand(2**21, generator=generator).to(dtype) + 1
    value *= (torch.rand(2**21, generator=generator) < density) & where["w"]
    for locations in (None, where):
        message = wire.encode(Update({"w": value}), locations)
        declared = value.numel() * value.element_size()
        assert peak(lambda m=message, known=locations: wire.decode(m, known)) < 2 * declared + 2**22


# -- mutations --------------------------------------------------------------------------------------------------------


def corpus() -> list[tuple[bytes, dict[str, torch.Tensor] | None]]:
    """Messages of every kind, with the locations they need."""
    generator = torch.Generator().manual_seed(0)
    messages: list[tuple[bytes, dict[str, torch.Tensor] | None]] = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for size, density in ((0, 1), (1, 1), (40, 0.1), (300, 0.02), (300, 0.5), (300, 0.93), (70_000, 0.001)):
            value = torch.rand(size, generator=generator) * (torch.rand(size, generator=generator) < density)
            known = {"w": (value != 0) | (torch.rand(size, generator=generator) < 0.4)}
            grid = Grid(0.25, 0.25, 3)
            codes = grid.values(torch.randint(0, 8, [size], generator=generator), dtype) * (value != 0)
            buffers = {"mean": torch.rand(2, generator=generator), "count": torch.tensor(3)}
            meta = Meta(1, 2, LocalSteps(1, 2, 0.5), buffers=buffers, grids={"q": grid})
            update = Update({"w": value.to(dtype), "q": codes, "scalar": torch.tensor(1.0)}, meta)
            messages += [(wire.encode(update), None), (wire.encode(update, known), known)]
            messages.append((wire.encode_locations(known), None))
    return messages


INTERESTING = [
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    16,
    255,
    256,
    65_535,
    65_536,
    2**20,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
]


def mutated(message: bytes, other: bytes, rng: random.Random) -> bytes:
    """The message after one to three random changes; half of the time they hit the header."""
    data = bytearray(message)
    for _ in range(rng.choice([1, 1, 2, 3])):
        (header_length,) = struct.unpack_from("<I", message, 22)
        end = min(26 + header_length, len(data)) if rng.random() < 0.5 else len(data)
        low = min(22, end - 1)
        at = rng.randrange(low, end)
        change = rng.randrange(8)
        if change == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            data[at] = rng.randrange(256)
        elif change == 2:  # a wrong number
            width = rng.choice([1, 2, 4, 8])
            data[at : at + width] = (rng.choice(INTERESTING) % 256**width).to_bytes(width, "little")
        elif change == 3:
            del data[max(at, 27) :]
        elif change == 4:
            data += rng.randbytes(rng.randrange(1, 40))
        elif change == 5:  # sections swapped
            a, b, c = sorted(rng.randrange(low, len(data) + 1) for _ in range(3))
            data[a:c] = data[b:c] + data[a:b]
        elif change == 6:  # a section removed or duplicated
            a, b = sorted(rng.randrange(low, len(data) + 1) for _ in range(2))
            data[a:b] = data[a:b] * rng.choice([0, 2])
        else:  # a section of another message
            a, b = sorted(rng.randrange(low, len(other) + 1) for _ in range(2))
            data[a:b] = other[a:b]
        data += bytes(max(0, 27 - len(data)))
    return bytes(data)


def rebuilt(message: bytes, rng: random.Random) -> bytes:
    """A message with a valid frame and valid lengths, but changed tensors.

    Changes in the middle of a message are mostly caught by a length that no longer fits; these reach the blocks.
    """
    header, reader = read(memoryview(message))
    entries = [(entry, bytearray(reader.take(entry.length))) for entry in (*header.layers, *header.buffers)]
    for _ in range(rng.choice([1, 2])):
        index = rng.randrange(len(entries))
        entry, data = entries[index]
        change = rng.randrange(6)
        if change == 0:
            entry = dataclasses.replace(entry, kind=rng.choice(KINDS))
        elif change == 1:
            entry = dataclasses.replace(
                entry, shape=tuple(rng.choice([0, 1, 2, 39, 300]) for _ in range(rng.randrange(3)))
            )
        elif change == 2:
            entry = dataclasses.replace(entry, grid=rng.choice([None, Grid(1e38, 1e38, 28), Grid(-1.0, 0.1, 1)]))
        elif change == 3:
            data += rng.randbytes(rng.randrange(1, 9))
        elif data:
            at = rng.choice([0, 0, 1, 2, rng.randrange(len(data))]) % len(data)
            data[at] = rng.choice([rng.randrange(32), rng.randrange(256)])
            if change == 5:
                del data[at + 1 : at + 1 + rng.randrange(5)]
        entries[index] = (dataclasses.replace(entry, length=len(data)), data)
    changed = [entry for entry, _ in entries]
    layers = len(header.layers)
    header = dataclasses.replace(header, layers=changed[:layers], buffers=changed[layers:])
    return write(header, [bytes(data) for _, data in entries])


def same(a: Update, b: Update) -> bool:
    def content(update: Update) -> list[object]:
        tensors = [*update.items(), *update.meta.buffers.items()]
        values = [
            (
                name,
                value.dtype,
                value.shape,
                value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"",
            )
            for name, value in tensors
        ]
        return [values, update.meta.round, update.meta.samples, update.meta.local, update.meta.grids]

    return content(a) == content(b)


def allowed(message: bytes) -> int:
    """How much decoding may allocate: twice what the header declares within the limit, plus what the module states."""
    try:
        header, _ = read(memoryview(message))
    except Malformed:
        return 2**16
    tensors = [*header.layers, *header.buffers]
    size = sum(entry.size for entry in header.layers)
    largest = max((min(entry.size, 65_536) for entry in header.layers), default=0)
    if size > LIMIT:
        return 2**16
    declared = sum(entry.size * entry.kind.stored.itemsize for entry in header.layers) + len(message)
    return 2 * declared + min(2**22, 64 * largest) + 2048 * len(tensors) + 2**14


LIMIT = 2**18


@pytest.mark.slow
def test_mutated_messages_are_refused_or_updates_and_need_little_memory():
    rng, messages, outcomes = random.Random(0), corpus(), Counter()
    worst = 0.0
    for _ in range(int(os.environ.get("GRADVEIL_FUZZ", "4000"))):
        message, locations = rng.choice(messages)
        change = rng.choice(["unsealed", "sealed", "sealed", "sealed", "rebuilt", "rebuilt"])
        hostile = rebuilt(message, rng) if change == "rebuilt" else mutated(message, rng.choice(messages)[0], rng)
        if change == "sealed":
            hostile = sealed(hostile)
        bound = allowed(hostile)
        tracemalloc.start()
        try:
            if hostile[26] == LOCATIONS:
                result: object = wire.decode_locations(hostile, max_values=LIMIT)
            else:
                result = wire.decode(hostile, locations, max_values=LIMIT)
        except DataError as error:
            result = error
            outcomes[
                re.sub(r"'.*'|\d[\d,]*|digest \w+|\[.*\]|byte 0x..", "*", str(error).split("something else: ")[-1])[:45]
            ] += 1
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        worst = max(worst, used / bound)
        assert used <= bound, (hostile.hex(), used, bound)
        if not isinstance(result, DataError):
            outcomes["decoded"] += 1
            assert change != "unsealed" or hostile == message
        if isinstance(result, Update):
            assert all(torch.isfinite(value).all() for value in result.values())
            assert same(result, wire.decode(wire.encode(result)))
    total = sum(outcomes.values())
    print(f"\n{total} messages; worst allocation: {worst:.2f} of what is allowed")
    for outcome, count in outcomes.most_common():
        print(f"{count:7} {outcome}")
    assert 0.05 * total < outcomes["decoded"] < 0.95 * total  # otherwise nothing past the checks was reached
    assert len(outcomes) > 30
