"""Blurred PSNR and SSIM against scipy's filter."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from gradveil import metrics
from gradveil.core.errors import InputError
from gradveil.metrics.blurred import blurred


@pytest.mark.parametrize("channels", [1, 3])
def test_the_blur_is_a_normal_filter_of_one_pixel(channels):
    images = torch.rand(2, channels, 13, 17, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = gaussian_filter(images.numpy(), sigma=(0, 0, 1, 1), mode="nearest", truncate=3.0)
    np.testing.assert_allclose(blurred(images).numpy(), expected, atol=1e-12)


def test_a_noisy_copy_is_closer_than_another_image_only_once_both_are_blurred():
    generator = torch.Generator().manual_seed(0)
    smooth = blurred(blurred(blurred(torch.rand(2, 1, 32, 32, generator=generator))))
    original, other = smooth[:1], smooth[1:]
    noisy = (original + 0.15 * torch.randn(original.shape, generator=generator)).clamp(0, 1)
    assert metrics.psnr(original, noisy) < metrics.psnr(original, other)
    assert metrics.psnr_blurred(original, noisy) > metrics.psnr_blurred(original, other)
    assert metrics.ssim_blurred(original, noisy) > metrics.ssim_blurred(original, other)


@pytest.mark.parametrize("name", ["psnr_blurred", "ssim_blurred"])
def test_images_out_of_range_are_refused(name):
    with pytest.raises(InputError, match=rf"{name}: originals must lie in \[0, 1\]"):
        getattr(metrics, name)(torch.full((1, 1, 16, 16), 2.0), torch.zeros(1, 1, 16, 16))
