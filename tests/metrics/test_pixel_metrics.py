"""MSE, PSNR and SSIM against scikit-image, and their misuse."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import mean_squared_error, peak_signal_noise_ratio, structural_similarity

from gradveil import metrics
from gradveil.core.errors import InputError

METRICS = [metrics.mse, metrics.psnr, metrics.ssim]
SHAPES = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3]), st.integers(11, 40), st.integers(11, 40))


def pair(shape, seed=0, closeness=0.5, dtype=torch.float32):
    """Two batches of images that share `closeness` of their pixels' values."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.rand(2, *shape, generator=generator, dtype=dtype)
    return a, closeness * a + (1 - closeness) * b


def skimage_ssim(a, b):
    return [
        structural_similarity(
            x.double().numpy(),
            y.double().numpy(),
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=1,
            channel_axis=0,
        )
        for x, y in zip(a, b, strict=True)
    ]


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 2**31), closeness=st.floats(0, 0.99))
def test_agree_with_scikit_image(shape, seed, closeness):
    a, b = pair(shape, seed, closeness)
    numpy_pairs = [(x.double().numpy(), y.double().numpy()) for x, y in zip(a, b, strict=True)]
    expected_mse = [mean_squared_error(x, y) for x, y in numpy_pairs]
    expected_psnr = [peak_signal_noise_ratio(x, y, data_range=1) for x, y in numpy_pairs]
    np.testing.assert_allclose(metrics.mse(a, b), expected_mse, rtol=1e-12)
    np.testing.assert_allclose(metrics.psnr(a, b), expected_psnr, atol=1e-9)
    np.testing.assert_allclose(metrics.ssim(a, b), skimage_ssim(a, b), atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 1, 28, 28), (2, 3, 32, 32), (1, 3, 64, 64), (1, 1, 112, 92), (1, 1, 11, 11)])
def test_ssim_agrees_on_smooth_inverted_and_flat_images(shape):
    ramp = torch.linspace(0, 1, shape[-1]).expand(shape)
    for other in (1 - ramp, torch.zeros(shape), torch.full(shape, 0.5)):
        np.testing.assert_allclose(metrics.ssim(ramp, other), skimage_ssim(ramp, other), atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(shape=SHAPES, seed=st.integers(0, 2**31))
def test_symmetric_and_best_for_equal_images(shape, seed):
    a, b = pair(shape, seed, closeness=0)
    for metric in METRICS:
        torch.testing.assert_close(metric(a, b), metric(b, a), rtol=1e-12, atol=1e-12)
    assert metrics.mse(a, a).eq(0).all()
    assert metrics.psnr(a, a).eq(100).all()
    torch.testing.assert_close(metrics.ssim(a, a), torch.ones(shape[0], dtype=torch.float64))
    assert metrics.ssim(a, b).lt(1).all()


def test_psnr_floors_the_squared_error_at_1e_10():
    a = torch.full((1, 1, 4, 4), 0.5, dtype=torch.float64)
    assert metrics.psnr(a, a + 1e-6).item() == pytest.approx(100, abs=1e-9)
    assert metrics.psnr(a, a + 1e-4).item() == pytest.approx(80, abs=1e-6)


@pytest.mark.parametrize("metric", METRICS)
def test_each_image_is_scored_alone(metric):
    a, b = pair((3, 3, 16, 16))
    alone = torch.cat([metric(a[i : i + 1], b[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(metric(a, b), alone)
    assert metric(a, b).shape == (3,)
    assert metric(a, b).dtype == torch.float64
    assert metric(a, b).unique().numel() == 3


@pytest.mark.parametrize("shape", [(1, 1, 10, 28), (1, 3, 28, 10), (2, 1, 8, 8)])
def test_ssim_refuses_images_smaller_than_its_window(shape):
    a, b = pair(shape)
    with pytest.raises(InputError, match=f"ssim: images must be at least 11 x 11.*got {shape[2]} x {shape[3]}"):
        metrics.ssim(a, b)


GOOD = torch.full((2, 1, 16, 16), 0.5)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (GOOD[0], r"must be a float tensor \[N, C, H, W\], got float32 \[1, 16, 16\]"),
        (GOOD.to(torch.uint8), r"must be a float tensor \[N, C, H, W\], got uint8"),
        (GOOD + 1, r"must lie in \[0, 1\], got values from 1.5 to 1.5; clamp"),
        (GOOD - 1, r"must lie in \[0, 1\]"),
        (GOOD * torch.nan, r"must lie in \[0, 1\], got values from nan to nan; clamp"),
        (GOOD * torch.inf, r"must lie in \[0, 1\]"),
        (GOOD[:1], r"must have the same shape, got "),
    ],
)
def test_bad_images_are_refused(metric, bad, message):
    with pytest.raises(InputError, match=f"{metric.__name__}: .*{message}"):
        metric(bad, GOOD)
    with pytest.raises(InputError, match=f"{metric.__name__}: .*{message}"):
        metric(GOOD, bad)
