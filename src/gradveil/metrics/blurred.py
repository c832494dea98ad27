"""PSNR and SSIM of blurred images: what is left when they are seen from farther away."""

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.metrics.images import check_pair
from gradveil.metrics.record import metric
from gradveil.metrics.signal_to_noise import psnr
from gradveil.metrics.structural_similarity import ssim

SIGMA = 1.0  # pixels
RADIUS = 3


def blurred(images: Tensor) -> Tensor:
    """Images ``[N, C, H, W]`` in [0, 1] under a normal blur of one pixel; the border is repeated outwards.

    >>> blurred(torch.full((1, 1, 8, 8), 0.5)).unique()
    tensor([0.5000])
    """
    offsets = torch.arange(-RADIUS, RADIUS + 1, dtype=images.dtype, device=images.device)
    weights = (-(offsets**2) / (2 * SIGMA**2)).exp()
    kernel = (weights / weights.sum()).repeat(images.shape[1], 1, 1, 1)
    padded = F.pad(images, (RADIUS,) * 4, mode="replicate")
    rows = F.conv2d(padded, kernel, groups=images.shape[1])
    # Rounding may leave the range by a hair.
    return F.conv2d(rows, kernel.transpose(2, 3), groups=images.shape[1]).clamp(0, 1)


@metric(
    "psnr_blurred",
    "Blurred PSNR",
    better="higher",
    modalities=("image",),
    unit="dB",
    digits=1,
    low=0,
    high=100,
    column=False,
)
def psnr_blurred(originals: Tensor, reconstructions: Tensor) -> Tensor:
    """PSNR of each image after a normal blur of one pixel.

    In words: PSNR after both images were blurred by one pixel. The eye averages over noise in the same way, so this
    stays high for a noisy copy and low for a picture of something else.

    Args:
        originals: float images [N, C, H, W] in [0, 1].
        reconstructions: images of the same shape and range.

    Returns:
        One float64 number per image, [N]; higher is closer, at most 100.

    >>> noise = 0.1 * torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    >>> grey = torch.full((1, 1, 32, 32), 0.5)
    >>> round(float(psnr(grey, grey + noise))), round(float(psnr_blurred(grey, grey + noise)))
    (20, 31)
    """
    check_pair("psnr_blurred", originals, reconstructions)
    return psnr(blurred(originals), blurred(reconstructions))


@metric("ssim_blurred", "Blurred SSIM", better="higher", modalities=("image",), low=-1, high=1, column=False)
def ssim_blurred(originals: Tensor, reconstructions: Tensor) -> Tensor:
    """SSIM of each image after a normal blur of one pixel.

    In words: SSIM after both images were blurred by one pixel.

    Args:
        originals: float images [N, C, H, W] in [0, 1], at least 11 x 11.
        reconstructions: images of the same shape and range.

    Returns:
        One float64 number per image, [N]; 1 means equal.

    >>> images = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    >>> ssim_blurred(images, images)
    tensor([1., 1.], dtype=torch.float64)
    """
    check_pair("ssim_blurred", originals, reconstructions)
    return ssim(blurred(originals), blurred(reconstructions))
