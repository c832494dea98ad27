import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.core.errors import DataError, InputError, NotFiniteError, ParameterError
from gradveil.update import Grid, LocalSteps, Meta, Update, wire

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sparse(shape, density, *, seed=0, dtype=torch.float32):
    """Random values at a share of the places, zeros elsewhere."""
    generator = seeded(seed)
    values = torch.randn(shape, generator=generator).to(dtype)
    return values.where(torch.rand(shape, generator=generator) < density, torch.zeros((), dtype=dtype))


def length(values: dict[str, torch.Tensor], *, locations=None, grids=None) -> int:
    return len(wire.encode(Update(values, Meta(grids=grids or {})), locations))


def entropy(q: float) -> float:
    return -q * math.log2(q) - (1 - q) * math.log2(1 - q)


# -- round trips ------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9), max_size=3),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_decoding_gives_back_the_same_bits(dtype, shape, density, seed):
    generator = seeded(seed)
    value = sparse(shape, density, seed=seed, dtype=dtype)
    value[torch.rand(shape, generator=generator) > 0.9] = -0.0
    value[torch.rand(shape, generator=generator) > 0.9] = torch.finfo(dtype).smallest_normal / 4
    meta = Meta(round=3, samples=8, local=LocalSteps(2, 4, 0.1), buffers={"mean": torch.ones(3)})
    update = Update({"b": value, "a": torch.ones(2)}, meta)
    before = value.clone()
    message = wire.encode(update)
    back = wire.decode(message)
    assert bits(value) == bits(before)
    assert list(back) == ["b", "a"]
    assert back["b"].dtype == dtype
    assert back["b"].shape == value.shape
    assert bits(back["b"]) == bits(value)
    assert back.meta.buffers["mean"].tolist() == [1, 1, 1]
    assert back.meta.bytes == update.meta.bytes == len(message)
    assert (back.meta.round, back.meta.samples, back.meta.local) == (3, 8, LocalSteps(2, 4, 0.1))


@pytest.mark.parametrize("density", [0.0, 0.0001, 0.01, 0.2, 0.6, 0.97, 1.0])
@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 200_000])
def test_layers_of_several_blocks(size, density):
    value = sparse([size], density)
    assert bits(wire.decode(wire.encode(Update({"w": value})))["w"]) == bits(value)


def test_every_block_uses_the_code_that_suits_it():
    """A layer that is half dense and half empty costs no more than its dense half."""
    value = torch.cat([torch.randn(2**17, generator=seeded()), torch.zeros(2**17)])
    assert length({"w": value}) < 4 * 2**17 + 200


def test_tensors_with_other_strides_are_sent_in_row_major_order():
    value = torch.randn(3, 4, 5, 6, generator=seeded()).to(memory_format=torch.channels_last)
    back = wire.decode(wire.encode(Update({"w": value, "t": value[0, 0].T})))
    assert torch.equal(back["w"], value)
    assert torch.equal(back["t"], value[0, 0].T)
    assert back["w"].is_contiguous()


def test_decoded_tensors_can_be_changed():
    message = wire.encode(Update({"w": torch.ones(3), "z": torch.zeros(3)}, Meta(buffers={"n": torch.ones(2)})))
    back = wire.decode(message)
    for value in (back["w"], back["z"], back.meta.buffers["n"]):
        value += 1
    assert wire.decode(message)["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_buffers_of_all_types_and_shapes_are_sent(dtype):
    buffers = {
        "0-d": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 3).to(dtype),
        "matrix": torch.tensor([[0, 1, 7], [1, 0, 100]]).to(dtype),
    }
    back = wire.decode(wire.encode(Update({"w": torch.ones(1)}, Meta(buffers=buffers)))).meta.buffers
    assert list(back) == list(buffers)
    for name, value in buffers.items():
        assert (back[name].dtype, back[name].shape, bits(back[name])) == (dtype, value.shape, bits(value))


def test_counters_and_statistics_that_are_not_finite_are_sent_unchanged():
    buffers = {"count": torch.tensor(2**62 + 1), "var": torch.tensor([torch.inf, -0.0])}
    back = wire.decode(wire.encode(Update({}, Meta(buffers=buffers)))).meta.buffers
    assert int(back["count"]) == 2**62 + 1
    assert bits(back["var"]) == bits(buffers["var"])


@pytest.mark.parametrize(
    "meta",
    [
        Meta(),
        Meta(round=-1, samples=2**63),
        Meta(round=0, local=LocalSteps()),
        Meta(local=LocalSteps(3, 1, 1e-300)),
        Meta(local=LocalSteps(momentum=0.9)),
    ],
)
def test_the_metadata_of_an_update_is_sent(meta):
    back = wire.decode(wire.encode(Update({"w": torch.ones(1)}, meta))).meta
    assert (back.round, back.samples, back.local) == (meta.round, meta.samples, meta.local)


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_a_sparse_update_is_shorter():
    dense = torch.randn(10_000, generator=seeded())
    sparse = dense.where(torch.arange(10_000) % 5 == 0, torch.tensor(0.0))
    assert len(wire.encode(Update({"w": dense}))) >= 40_000
    assert len(wire.encode(Update({"w": sparse}))) < 8_000 + 1_250 + 500


@pytest.mark.parametrize("q", [0.5, 0.2, 0.17, 0.05, 0.01, 0.001])
def test_sparse_updates_come_near_the_entropy(q):
    n = 1_000_000
    value = sparse([n], q)
    k = int(value.count_nonzero())
    limit = n * entropy(k / n) / 8 + 4 * k
    assert limit < length({"w": value}) < 1.06 * limit


@pytest.mark.parametrize("q", [0.999, 0.95, 0.8, 0.5, 0.4, 0.2, 0.05, 0.01, 0.001])
def test_locations_come_near_the_entropy(q):
    n = 1_000_000
    where = torch.rand(n, generator=seeded()) < q
    message = wire.encode_locations({"w": where})
    assert torch.equal(wire.decode_locations(message)["w"], where)
    limit = n * entropy(float(where.double().mean())) / 8
    assert limit < len(message) < 1.2 * limit + 100


def test_an_empty_update_costs_its_header():
    assert length({"w": torch.zeros(1000, 1000)}) < 150


# -- quantised -------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 28),
    st.floats(-4, 4),
    st.floats(2**-30, 1),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_quantised_layers_and_their_grids_survive(dtype, width, low, step, density, seed):
    grid = Grid(low, step * 2.0**-width, width)
    generator = seeded(seed)
    codes = torch.randint(0, 2**width, [300], generator=generator)
    value = grid.values(codes, dtype) * (torch.rand(300, generator=generator) < density)
    back = wire.decode(wire.encode(Update({"w": value, "v": torch.ones(2)}, Meta(grids={"w": grid}))))
    assert bits(back["w"]) == bits(value)
    assert back.meta.grids == {"w": grid}


@pytest.mark.parametrize("width", [*range(1, 9), 12, 15, 16, 21, 24])
def test_codes_take_their_width(width):
    grid = Grid(-1.0, 2.0 / 2**width, width)
    value = grid.values(torch.randint(0, 2**width, [100_000], generator=seeded()))
    assert length({"w": value}, grids={"w": grid}) < 100_000 * width / 8 + 200


def test_zeros_of_a_quantised_layer_cost_little_whether_the_grid_has_a_zero_or_not():
    n, q = 100_000, 0.05
    for low in (-1.0, -1.1):
        grid = Grid(low, 2.0 / 256, 8)
        value = grid.values(torch.randint(0, 256, [n], generator=seeded()))
        value = value.where(torch.rand(n, generator=seeded(1)) < q, torch.tensor(0.0))
        assert length({"w": value}, grids={"w": grid}) < 1.1 * n * (entropy(q) / 8 + q) + 200


def test_values_off_their_grid_are_sent_unchanged():
    """A later defense may add noise to quantised values; the bits decide, not the declared grid."""
    grid = Grid(-1.0, 0.5, 2)
    value = grid.values(torch.randint(0, 4, [1000], generator=seeded())) + 1e-6
    back = wire.decode(wire.encode(Update({"w": value}, Meta(grids={"w": grid}))))
    assert bits(back["w"]) == bits(value)
    signed = torch.tensor([-1.0, -0.0, 0.0, 0.5])  # the grid has 0.0 but not -0.0
    assert bits(wire.decode(wire.encode(Update({"w": signed}, Meta(grids={"w": grid}))))["w"]) == bits(signed)


def test_a_constant_layer_has_a_step_of_zero():
    grid = Grid(0.3, 0.0, 1)
    value = grid.values(torch.zeros(80, dtype=torch.int64))
    assert bits(wire.decode(wire.encode(Update({"w": value}, Meta(grids={"w": grid}))))["w"]) == bits(value)
    assert length({"w": value}, grids={"w": grid}) < 140


@given(st.integers(1, 28), st.floats(-100, 100), st.floats(1e-6, 10), st.integers(0, 2**28 - 1))
def test_grid_values_are_two_rounded_operations_in_double_precision(width, low, step, code):
    code %= 2**width
    grid = Grid(low, step, width)
    assert float(grid.values(torch.tensor(code), torch.float64)) == low + step * code
    assert float(grid.values(torch.tensor(code))) == float(torch.tensor(low + step * code, dtype=torch.float32))
    assert int(grid.codes(grid.values(torch.tensor(code), torch.float64))) == code


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((math.nan, 1.0, 8), "Grid: low must be a number, got nan"),
        ((0.0, -1.0, 8), "Grid: step must be a number of at least 0, got -1.0"),
        ((0.0, 1.0, 29), "Grid: bits must be a whole number from 1 to 28, got 29"),
    ],
)
def test_bad_grids_are_refused(parameters, message):
    with pytest.raises(ParameterError, match=message):
        Grid(*parameters)


# -- known locations --------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3), st.floats(0, 1), st.floats(0, 1), st.booleans()
)
def test_known_locations_change_the_bytes_and_not_the_values(dtype, shape, inside, filled, outside):
    where = torch.rand(shape, generator=seeded(1)) < inside
    value = sparse(shape, filled, dtype=dtype)
    if not outside:
        value = value.where(where, torch.zeros((), dtype=dtype))
    update = Update({"w": value, "free": torch.ones(2)}, Meta(samples=1))
    back = wire.decode(wire.encode(update, {"w": where}), {"w": where})
    assert bits(back["w"]) == bits(value)
    assert back["free"].tolist() == [1, 1]


def test_a_filled_set_costs_no_positions_and_a_half_filled_one_a_bit_per_place():
    """Like aligned dual pruning: the published set has 40 % of the places; half is uploaded, all of it downloaded."""
    n = 300_000
    where = {"w": torch.rand(n, generator=seeded(1)) < 0.4}
    size = int(where["w"].sum())
    download = torch.randn(n, generator=seeded()) * where["w"] + 0.0
    assert length({"w": download}, locations=where) < 4 * size + 200
    upload = download.where(torch.rand(n, generator=seeded(2)) < 0.5, torch.tensor(0.0))
    sent = int(upload.count_nonzero())
    assert length({"w": upload}, locations=where) < 4 * sent + size / 8 + 200
    assert bits(wire.decode(wire.encode(Update({"w": upload}), where), where)["w"]) == bits(upload)


def test_quantised_values_in_known_locations():
    grid, where = Grid(-1.0, 2 / 16, 4), {"w": torch.rand(80_000, generator=seeded()) < 0.3}
    value = grid.values(torch.randint(9, 16, [80_000], generator=seeded(1))) * where["w"]
    update = Update({"w": value}, Meta(grids={"w": grid}))
    message = wire.encode(update, where)
    assert len(message) < int(where["w"].sum()) / 2 + 200
    assert bits(wire.decode(message, where)["w"]) == bits(value)


def test_other_locations_or_none_are_refused():
    where = {"w": torch.tensor([True, False, True])}
    message = wire.encode(Update({"w": torch.tensor([1.0, 0.0, 2.0])}), where)
    assert wire.decode(message, {"w": where["w"].clone()})["w"].tolist() == [1, 0, 2]
    with pytest.raises(DataError, match=r"expected the locations with digest \w{32}, .* got none; pass the same"):
        wire.decode(message)
    for other in ({"w": ~where["w"]}, {"v": where["w"]}, {"w": where["w"][None]}, {}):
        with pytest.raises(DataError, match=r"expected the locations with digest \w{32}, .* got \w{32}; pass the same"):
            wire.decode(message, other)


def test_a_message_without_known_locations_needs_none():
    update = Update({"w": torch.tensor([1.0, 0.0])})
    assert wire.decode(wire.encode(update), {"w": torch.tensor([True, True])})["w"].tolist() == [1, 0]


def test_the_digest_distinguishes_names_shapes_and_places_but_not_order():
    a, b = torch.tensor([True, False]), torch.tensor([False, False])
    digests = {
        wire.digest(locations)
        for locations in ({}, {"a": a}, {"b": a}, {"a": b}, {"a": a[None]}, {"a": a, "b": b}, {"a": b, "b": a})
    }
    assert len(digests) == 7
    assert wire.digest({"b": b, "a": a}) == wire.digest({"a": a, "b": b})


@given(st.dictionaries(st.text(max_size=5), st.lists(st.integers(0, 9), max_size=3), max_size=3), st.floats(0, 1))
def test_locations_survive(shapes, density):
    locations = {name: torch.rand(shape, generator=seeded()) < density for name, shape in shapes.items()}
    back = wire.decode_locations(wire.encode_locations(locations))
    assert list(back) == list(locations)
    for name, value in locations.items():
        assert back[name].dtype == torch.bool
        assert torch.equal(back[name], value)


# -- what the receiver expects ----------------------------------------------------------------------------------------


def test_like_gives_the_expected_layers():
    update = Update({"w": torch.ones(2, 3), "b": torch.ones(3)})
    message = wire.encode(update)
    assert torch.equal(wire.decode(message, like={"b": torch.zeros(3), "w": torch.zeros(2, 3)})["w"], update["w"])
    for like, error in (
        ({"w": torch.ones(2, 3)}, r"expected nothing as layer 'b', got float32 \[3\]"),
        ({**update, "c": torch.ones(1)}, r"expected float32 \[1\] as layer 'c', got nothing"),
        ({**update, "w": torch.ones(3, 2)}, r"expected float32 \[3, 2\] as layer 'w', got float32 \[2, 3\]"),
        ({**update, "w": torch.ones(2, 3).half()}, r"expected float16 \[2, 3\] as layer 'w', got float32 \[2, 3\]"),
    ):
        with pytest.raises(DataError, match=error):
            wire.decode(message, like=like)


def test_like_holds_for_locations_too():
    message = wire.encode_locations({"w": torch.tensor([True, False])})
    assert wire.decode_locations(message, like={"w": torch.ones(2)})["w"].tolist() == [True, False]
    with pytest.raises(DataError, match=r"expected bool \[3\] as layer 'w', got bool \[2\]"):
        wire.decode_locations(message, like={"w": torch.ones(3)})


def test_a_short_message_cannot_declare_more_values_than_allowed():
    message = wire.encode(Update({"w": torch.zeros(3000), "v": torch.zeros(3000)}))
    assert len(message) < 200
    assert wire.decode(message, max_values=6000)["w"].shape == (3000,)
    with pytest.raises(DataError, match="expected at most 5,999 values, got a message that declares 6,000; pass like="):
        wire.decode(message, max_values=5999)
    like = {"w": torch.zeros(3000), "v": torch.zeros(3000)}
    assert wire.decode(message, like=like, max_values=1)["v"].shape == (3000,)
    locations = wire.encode_locations({"w": torch.zeros(3000, dtype=torch.bool)})
    with pytest.raises(DataError, match="expected at most 2,999 values"):
        wire.decode_locations(locations, max_values=2999)


def test_updates_and_locations_are_not_mistaken_for_each_other():
    with pytest.raises(DataError, match="expected the bytes of an encoded set of locations, .* it holds an update"):
        wire.decode_locations(wire.encode(Update({"w": torch.ones(1)})))
    with pytest.raises(DataError, match="expected the bytes of an encoded update, .* it holds locations"):
        wire.decode(wire.encode_locations({"w": torch.ones(1, dtype=torch.bool)}))


# -- refusals ---------------------------------------------------------------------------------------------------------


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
    with contextlib.suppress(DataError):  # a flipped bit may still give an update; otherwise it must be this error
        assert isinstance(wire.decode(bytes(message)), Update)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_not_encoded(dtype, value):
    with pytest.raises(NotFiniteError, match="wire: values must be finite, got NaN or Inf in 'w'"):
        wire.encode(Update({"w": torch.tensor([0.0, value, 1.0], dtype=dtype)}))


@pytest.mark.parametrize(
    ("update", "locations", "message"),
    [
        (
            Update({"w": torch.ones(2, dtype=torch.int64)}),
            None,
            "layers must be floating-point numbers, got torch.int64",
        ),
        (Update({"w": torch.ones(2, dtype=torch.bool)}), None, "layers must be floating-point numbers, got torch.bool"),
        (Update({}, Meta(buffers={"c": torch.ones(1) * 1j})), None, "expected real numbers .* got torch.complex64"),
        (Update({"w": torch.ones([1] * 33)}), None, "at most 32 dimensions, got torch.float32 in 33 dimensions"),
        (Update({"w" * 1025: torch.ones(1)}), None, "names must have at most 1024 bytes"),
        (Update({}, Meta(samples=-1)), None, "must fit 64 bits, got None, -1 and None"),
        (Update({}, Meta(round=2**63)), None, "must fit 64 bits"),
        (Update({}, Meta(grids={"w": Grid(0.0, 1.0, 1)})), None, "got a grid for 'w', but the layers are"),
        (Update({"w": torch.ones(2)}), {"w": torch.ones(2)}, "locations must be boolean tensors, got torch.fl"),
        (
            Update({"w": torch.ones(2)}),
            {"w": torch.ones(1) > 0},
            r"shaped like the layers, got \[1\] for 'w' \(\[2\]\)",
        ),
        (
            Update({"w": torch.ones(2)}),
            {"v": torch.ones(1) > 0},
            r"shaped like the layers, got \[1\] for 'v' \(no layer",
        ),
    ],
)
def test_updates_that_cannot_be_encoded_are_refused(update, locations, message):
    with pytest.raises(InputError, match=f"wire: .*{message}"):
        wire.encode(update, locations)


def test_a_message_holds_a_limited_number_of_tensors():
    value = torch.ones(1)
    most = {str(number): value for number in range(16_384)}
    assert len(wire.decode(wire.encode(Update(most)))) == 16_384
    with pytest.raises(InputError, match="at most 16384 tensors, got 16385"):
        wire.encode(Update({**most, "one more": value}))
