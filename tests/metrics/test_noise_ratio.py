"""The noise ratio of an image."""

import pytest
import torch

from gradveil import metrics
from gradveil.core.errors import InputError


def pictures(channels: int, size: int) -> torch.Tensor:
    """Eight smooth pictures."""
    coarse = torch.rand(8, channels, 3, 3, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [28, 32, 64])
def test_it_grows_with_the_noise_and_says_how_much_there_is(channels, size):
    images = pictures(channels, size)
    noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(1))
    shares = torch.arange(0, 1.01, 0.2)
    seen = torch.stack([metrics.noise_ratio(torch.lerp(images, noise, float(share))).mean() for share in shares])
    assert (seen.diff() > 0.05).all()
    torch.testing.assert_close(seen, shares.double(), atol=0.12, rtol=0)


def test_it_is_one_float64_per_image_and_does_not_depend_on_the_others():
    images = pictures(3, 32)
    together = metrics.noise_ratio(images)
    assert (together.dtype, together.shape) == (torch.float64, (8,))
    alone = torch.cat([metrics.noise_ratio(image[None]) for image in images])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_one_channel_is_three_equal_ones():
    images = pictures(1, 28)
    torch.testing.assert_close(metrics.noise_ratio(images), metrics.noise_ratio(images.expand(-1, 3, -1, -1)))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(1, 2, 32, 32), r"1 or 3 channels, got float32 \[1, 2, 32, 32\]"),
        (torch.zeros(3, 32, 32), r"noise_ratio: images must be a float tensor \[N, C, H, W\]"),
        (torch.full((1, 3, 32, 32), 2.0), r"noise_ratio: images must lie in \[0, 1\], got values from 2 to 2"),
    ],
)
def test_anything_but_images_is_refused(images, message):
    with pytest.raises(InputError, match=message):
        metrics.noise_ratio(images)
