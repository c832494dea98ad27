"""Mean squared error."""

from torch import Tensor

from gradveil.metrics.images import check_pair
from gradveil.metrics.record import metric


# No column of its own: PSNR says the same.
@metric("mse", "MSE", better="lower", modalities=("image",), digits=4, low=0, high=1, column=False)
def mse(originals: Tensor, reconstructions: Tensor) -> Tensor:
    """Mean squared error of each image, over its pixels and channels: ``mean((x - y)^2)``.

    In words: Mean squared error of pixels between 0 and 1. 0 is identical.

    Args:
        originals: float images [N, C, H, W] in [0, 1].
        reconstructions: images of the same shape and range.

    Returns:
        One float64 number per image, [N]; 0 means equal.

    >>> import torch
    >>> mse(torch.zeros(2, 1, 4, 4), torch.full((2, 1, 4, 4), 0.5))
    tensor([0.2500, 0.2500], dtype=torch.float64)
    """
    check_pair("mse", originals, reconstructions)
    return (originals.double() - reconstructions.double()).square().mean(dim=(1, 2, 3))
