import contextlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from gradveil import wire
from gradveil.errors import DataError
from gradveil.update import LocalSteps, Meta, Update


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_decoding_gives_back_the_same_bits(dtype, shape, density, seed):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator).to(dtype)
    value[torch.rand(shape, generator=generator) > density] = 0.0
    value[torch.rand(shape, generator=generator) > 0.9] = -0.0
    meta = Meta(round=3, samples=8, local=LocalSteps(2, 4, 0.1), buffers={"mean": torch.ones(3)})
    update = Update({"b": value, "a": torch.ones(2)}, meta)
    message = wire.encode(update)
    back = wire.decode(message)
    assert list(back) == ["b", "a"]
    assert back["b"].dtype == dtype
    assert back["b"].shape == value.shape
    assert bits(back["b"]) == bits(value)
    assert back.meta.buffers["mean"].tolist() == [1, 1, 1]
    assert back.meta.bytes == update.meta.bytes == len(message)
    assert (back.meta.round, back.meta.samples, back.meta.local) == (3, 8, LocalSteps(2, 4, 0.1))


def test_a_sparse_update_is_shorter():
    dense = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    sparse = dense.where(torch.arange(10_000) % 5 == 0, torch.tensor(0.0))
    assert len(wire.encode(Update({"w": dense}))) >= 40_000
    assert len(wire.encode(Update({"w": sparse}))) < 8_000 + 1_250 + 500


@pytest.mark.parametrize("message", [b"", b"abc", b"\xff" * 100, bytes(8) + b"{}"])
def test_other_bytes_are_refused(message):
    with pytest.raises(DataError, match="wire: expected the bytes of an encoded update"):
        wire.decode(message)


@given(st.data())
def test_no_truncation_or_flipped_header_escapes_as_another_error(data):
    message = bytearray(wire.encode(Update({"w": torch.tensor([0.0] * 40 + [1.0])})))
    cut = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(DataError):
        wire.decode(bytes(message[:cut]))
    place = data.draw(st.integers(0, len(message) - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(DataError):  # a flipped value is still an update; anything else must be this error
        assert isinstance(wire.decode(bytes(message)), Update)


GOOD = {"version": 1, "order": ["w"], "sparse": {"w": [8]}, "meta": {"round": None, "samples": 1, "local": None}}
BITMAP = torch.tensor([0b11110000], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("header", "tensors"),
    [
        ({}, {"bitmap/w": BITMAP, "values/w": torch.ones(1)}),  # one value for four places
        ({}, {"bitmap/w": BITMAP[None], "values/w": torch.ones(4)}),
        ({}, {"bitmap/w": BITMAP, "values/w": torch.ones(4, dtype=torch.int32)}),
        ({}, {"bitmap/w": BITMAP, "values/w": torch.ones(4), "dense/more": torch.ones(1)}),
        ({"order": ["w", "w"]}, {"bitmap/w": BITMAP, "values/w": torch.ones(4)}),
        ({"order": "w"}, {"bitmap/w": BITMAP, "values/v": torch.ones(4)}),
        ({"sparse": {"w": [2**70]}}, {"bitmap/w": BITMAP, "values/w": torch.ones(4)}),
        ({"sparse": {"w": [-8]}}, {"bitmap/w": BITMAP, "values/w": torch.ones(4)}),
        ({"sparse": {"w": [-2, -4]}}, {"bitmap/w": BITMAP, "values/w": torch.ones(4)}),
        ({"sparse": []}, {"bitmap/w": BITMAP, "values/w": torch.ones(4)}),
        ({"version": 2}, {"bitmap/w": BITMAP, "values/w": torch.ones(4)}),
        ({"meta": {"round": None, "samples": -1, "local": None}}, {"bitmap/w": BITMAP, "values/w": torch.ones(4)}),
        ({"meta": {"round": None, "samples": 1, "local": {"lr": -1}}}, {"bitmap/w": BITMAP, "values/w": torch.ones(4)}),
    ],
)
def test_hostile_messages_are_refused(header, tensors):
    whole = save({"bitmap/w": BITMAP, "values/w": torch.ones(4)}, metadata={"gradveil": json.dumps(GOOD)})
    assert wire.decode(whole)["w"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    with pytest.raises(DataError, match="wire: expected the bytes of an encoded update"):
        wire.decode(save(tensors, metadata={"gradveil": json.dumps(GOOD | header)}))
