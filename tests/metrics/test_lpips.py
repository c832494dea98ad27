"""LPIPS against a slow NumPy version of the official formula with the real weights; broken weights files."""

import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from gradveil import metrics
from gradveil.core.errors import DataError, InputError
from gradveil.metrics.perceptual_distance import ARRAY_SHAPES

# The distances of the two pairs of photographs below by the formula, computed once.
PHOTOGRAPH_DISTANCES = [0.490912, 0.466134]


@pytest.fixture(scope="module")
def arrays(data_arrays):
    return dict(zip(ARRAY_SHAPES, data_arrays("lpips_alex.npz", *ARRAY_SHAPES), strict=True))


@pytest.fixture(scope="module")
def real(arrays):
    return metrics.Lpips(arrays)


@pytest.fixture(scope="module")
def made_up():
    """Random weights of the right shapes, for properties that hold for any weights."""
    generator = np.random.default_rng(0)
    arrays = {name: generator.normal(0, 0.05, shape).astype(np.float32) for name, shape in ARRAY_SHAPES.items()}
    arrays["scale"] = np.full(3, 0.5, np.float32)
    return {name: np.abs(array) if name.startswith("lin") else array for name, array in arrays.items()}


def formula(arrays, x, y):
    """The official formula in float64 NumPy for two images of 64 x 64 x 3 in [0, 1], with loops for clarity."""

    def convolve(image, weight, bias, stride, padding):
        image = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        windows = np.lib.stride_tricks.sliding_window_view(image, weight.shape[2:], axis=(1, 2))
        windows = windows[:, ::stride, ::stride]
        return np.einsum("chwij,ocij->ohw", windows, weight, optimize=True) + bias[:, None, None]

    def pool(image):
        return np.lib.stride_tricks.sliding_window_view(image, (3, 3), axis=(1, 2))[:, ::2, ::2].max(axis=(3, 4))

    def features(image):
        shift, scale = (arrays[name].astype(np.float64)[:, None, None] for name in ("shift", "scale"))
        image = (image.astype(np.float64) * 2 - 1 - shift) / scale
        found = []
        for number, stride, padding in ((0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1)):
            weight, bias = (arrays[f"features.{number}.{kind}"].astype(np.float64) for kind in ("weight", "bias"))
            image = np.maximum(convolve(image, weight, bias, stride, padding), 0)
            found.append(image / (np.linalg.norm(image, axis=0, keepdims=True) + 1e-10))
            if number in (0, 3):
                image = pool(image)
        return found

    return sum(
        float(np.mean(np.einsum("chw,c->hw", (a - b) ** 2, arrays[f"lin{layer}.weight"].reshape(-1))))
        for layer, (a, b) in enumerate(zip(features(x), features(y), strict=True))
    )


def photographs_from(data_arrays, indices):
    (images,) = data_arrays("cifar10.npz", "x_test")
    return torch.from_numpy(images[list(indices)]).permute(0, 3, 1, 2) / 255


def test_agrees_with_the_formula_on_noise(real, arrays):
    a, b = torch.rand(2, 3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    expected = [formula(arrays, x.numpy(), y.numpy()) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(real(a, b), expected, atol=1e-5)


def test_agrees_with_the_formula_on_photographs(real, arrays, data_arrays):
    photographs = photographs_from(data_arrays, [0, 700, 1400, 2100])
    a, b = photographs[:2], photographs[2:]
    large = [F.interpolate(x, size=(64, 64), mode="bilinear") for x in (a, b)]
    expected = [formula(arrays, x.numpy(), y.numpy()) for x, y in zip(*large, strict=True)]
    np.testing.assert_allclose(real(a, b), expected, atol=1e-5)
    np.testing.assert_allclose(expected, PHOTOGRAPH_DISTANCES, atol=1e-6)


def test_a_blurred_photograph_is_nearer_than_another_one(real, data_arrays):
    photographs = photographs_from(data_arrays, range(0, 400, 50))
    blurred = F.avg_pool2d(photographs, 3, stride=1, padding=1, count_include_pad=False)
    assert real(photographs, blurred).max() < real(photographs, photographs.roll(1, 0)).min()


@settings(deadline=None, max_examples=10)
@given(side=st.integers(1, 80), channels=st.sampled_from([1, 3]), seed=st.integers(0, 2**31))
def test_zero_for_equal_images_and_symmetric(made_up, side, channels, seed):
    distance = metrics.Lpips(made_up)
    a, b = torch.rand(2, 2, channels, side, side, generator=torch.Generator().manual_seed(seed))
    assert distance(a, a).eq(0).all()
    torch.testing.assert_close(distance(a, b), distance(b, a))
    assert distance(a, b).gt(0).all()
    assert distance(a, b).shape == (2,)
    assert distance(a, b).dtype == torch.float64


def test_one_channel_counts_as_three_equal_ones(made_up):
    distance = metrics.Lpips(made_up)
    a, b = torch.rand(2, 2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(distance(a, b), distance(a.repeat(1, 3, 1, 1), b.repeat(1, 3, 1, 1)))


@pytest.mark.parametrize("side", [32, 128])
def test_every_size_is_brought_to_the_one_resolution(made_up, side):
    distance = metrics.Lpips(made_up)
    a, b = torch.rand(2, 1, 3, side, side, generator=torch.Generator().manual_seed(0))
    size = (metrics.LPIPS_RESOLUTION, metrics.LPIPS_RESOLUTION)
    resized = [F.interpolate(x, size=size, mode="bilinear", antialias=side > 64).clamp(0, 1) for x in (a, b)]
    torch.testing.assert_close(distance(a, b), distance(*resized), rtol=1e-4, atol=1e-7)


def test_function_takes_loaded_weights_or_their_file(tmp_path, made_up):
    path = tmp_path / "weights.npz"
    np.savez(path, **made_up)
    a, b = torch.rand(2, 1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    expected = metrics.Lpips(made_up)(a, b)
    assert torch.equal(metrics.lpips(a, b, weights=path), expected)
    assert torch.equal(metrics.lpips(a, b, weights=metrics.Lpips.load(path)), expected)


def test_two_channels_are_refused(made_up):
    a = torch.zeros(1, 2, 64, 64)
    with pytest.raises(InputError, match="lpips: images must have 1 or 3 channels, got 2"):
        metrics.Lpips(made_up)(a, a)


@pytest.mark.parametrize("name", ["features.0.weight", "features.10.bias", "lin4.weight", "shift"])
def test_missing_array_is_named(tmp_path, made_up, name):
    path = tmp_path / "weights.npz"
    np.savez(path, **{key: array for key, array in made_up.items() if key != name})
    with pytest.raises(DataError, match=f"array '{name}' is missing; get them with `gradveil data get lpips-alex`"):
        metrics.Lpips.load(path)


@pytest.mark.parametrize(
    "wrong",
    [np.ones((1, 64, 1, 2), np.float32), np.ones((1, 64, 1, 1), np.int64), np.full((1, 64, 1, 1), np.nan)],
)
def test_wrong_array_is_named_with_what_it_should_be(made_up, wrong):
    with pytest.raises(DataError, match=r"'lin0.weight' must hold finite floats of shape \(1, 64, 1, 1\), got"):
        metrics.Lpips(made_up | {"lin0.weight": wrong})


def test_unreadable_files_are_refused(tmp_path, made_up):
    whole = tmp_path / "whole.npz"
    np.savez(whole, **made_up)
    contents = {
        "text.npz": b"not an archive",
        "empty.npz": b"",
        "truncated.npz": whole.read_bytes()[:100_000],
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "single.npy", made_up["shift"])
    np.savez(tmp_path / "pickled.npz", **made_up | {"shift": np.array([{}, {}, {}], dtype=object)})
    for name in [*contents, "single.npy", "pickled.npz", "absent.npz"]:
        with pytest.raises(DataError, match=f"cannot read .*{name}.*gradveil data get lpips-alex"):
            metrics.Lpips.load(tmp_path / name)


def test_damaged_member_of_the_archive_is_refused(tmp_path, made_up):
    path = tmp_path / "weights.npz"
    np.savez_compressed(path, **made_up)
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("features.6.weight.npy").header_offset
    content = bytearray(path.read_bytes())
    content[start + 5_000 : start + 5_100] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot read"):
        metrics.Lpips.load(path)
