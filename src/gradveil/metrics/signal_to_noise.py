"""Peak signal-to-noise ratio."""

from torch import Tensor

from gradveil.metrics.images import check_pair
from gradveil.metrics.record import metric
from gradveil.metrics.squared_error import mse

MSE_FLOOR = 1e-10  # equal images score 100 dB instead of infinity


@metric("psnr", "PSNR", better="higher", modalities=("image",), unit="dB", digits=1, low=0, high=100, noticeable=0.5)
def psnr(originals: Tensor, reconstructions: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB: ``-10 log10(max(MSE, 1e-10))`` for a peak of 1.

    The score of a batch is the mean of these values, not the PSNR of the batch's mean squared error.

    In words: Peak signal-to-noise ratio in decibels: −10 log₁₀ of the mean squared error of pixels between 0 and 1.
    10 dB more means a tenth of the error; below about 10 dB little is left, above 25 dB the copy looks like the
    original.

    Args:
        originals: float images [N, C, H, W] in [0, 1].
        reconstructions: images of the same shape and range.

    Returns:
        One float64 number per image, [N]; higher is closer, at most 100.

    >>> import torch
    >>> psnr(torch.zeros(1, 1, 4, 4), torch.full((1, 1, 4, 4), 0.1))
    tensor([20.0000], dtype=torch.float64)
    """
    check_pair("psnr", originals, reconstructions)
    return -10 * mse(originals, reconstructions).clamp_min(MSE_FLOOR).log10()
