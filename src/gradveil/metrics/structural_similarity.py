"""Structural similarity."""

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.core.errors import InputError
from gradveil.metrics.images import check_pair
from gradveil.metrics.record import metric

WINDOW = 11
SIGMA = 1.5
C1 = 0.01**2  # keeps the luminance term defined in dark regions, for a data range of 1
C2 = 0.03**2  # keeps the contrast term defined in flat regions


@metric("ssim", "SSIM", better="higher", modalities=("image",), low=-1, high=1)
def ssim(originals: Tensor, reconstructions: Tensor) -> Tensor:
    """Structural similarity of each image, the mean over channels and window positions of::

        (2 mx my + C1) (2 cxy + C2) / ((mx^2 + my^2 + C1) (vx + vy + C2))

    with means m, variances v and covariance c under an 11x11 Gaussian window (sigma 1.5), for a data range
    of 1. Only windows that lie entirely inside the image count, so nothing is padded.

    In words: Structural similarity: agreement of brightness, contrast and pattern in small windows. 1 is identical,
    about 0 unrelated.

    References:
        Wang, Bovik, Sheikh & Simoncelli, Image Quality Assessment: From Error Visibility to Structural
        Similarity, IEEE Transactions on Image Processing 2004.

    Args:
        originals: float images [N, C, H, W] in [0, 1], at least 11 x 11.
        reconstructions: images of the same shape and range.

    Returns:
        One float64 number per image, [N]; 1 means equal, around 0 unrelated, below 0 inverted.

    >>> import torch
    >>> image = torch.linspace(0, 1, 256).reshape(1, 1, 16, 16)
    >>> ssim(image, image)
    tensor([1.], dtype=torch.float64)
    """
    check_pair("ssim", originals, reconstructions)
    height, width = originals.shape[-2:]
    if min(height, width) < WINDOW:
        raise InputError(
            f"ssim: images must be at least {WINDOW} x {WINDOW}, the size of its window, "
            f"got {height} x {width}; use larger images, or mse and psnr for images of this size"
        )
    x, y = originals.double(), reconstructions.double()
    mean_x, mean_y = _window_mean(x), _window_mean(y)
    variance_x = _window_mean(x * x) - mean_x * mean_x
    variance_y = _window_mean(y * y) - mean_y * mean_y
    covariance = _window_mean(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + C1) / (mean_x.square() + mean_y.square() + C1)
    contrast_and_structure = (2 * covariance + C2) / (variance_x + variance_y + C2)
    return (luminance * contrast_and_structure).mean(dim=(1, 2, 3))


def _window_mean(images: Tensor) -> Tensor:
    """Mean under the Gaussian window at every position inside the image, channel by channel."""
    offsets = torch.arange(WINDOW, dtype=images.dtype, device=images.device) - WINDOW // 2
    weights = torch.softmax(-(offsets**2) / (2 * SIGMA**2), dim=0)  # a Gaussian that sums to 1
    flat = images.flatten(0, 1).unsqueeze(1)  # every channel becomes an image of its own
    rows = F.conv2d(flat, weights.reshape(1, 1, WINDOW, 1))
    smooth = F.conv2d(rows, weights.reshape(1, 1, 1, WINDOW))
    return smooth.reshape(*images.shape[:2], *smooth.shape[-2:])
