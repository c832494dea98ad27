"""The share of noise in a reconstruction."""

import torch
from torch import Tensor

from gradveil.metrics.images import check_images
from gradveil.metrics.record import metric
from gradveil.models.evaluation import evaluation_network


@torch.no_grad()
def noise_ratio(images: Tensor) -> Tensor:
    """The share of uniform noise that the evaluation network sees in each image; the original is not used.

    The authors consider a reconstruction above .4 private. The ratio says how noisy an image looks, not how similar it
    is to the original: a smooth image of something else scores low as well.

    References:
        Fan, Chen, Wang, Li & Zhou, Refiner: Data Refining against Gradient Leakage Attacks in Federated Learning.

    Args:
        images: float images [N, C, H, W] in [0, 1] with 1 or 3 channels; the network was trained on 28 to 64 pixels.

    Returns:
        One float64 number per image, [N], in [0, 1].

    >>> noise = torch.rand(1, 3, 32, 32, generator=torch.manual_seed(0))
    >>> [bool(noise_ratio(torch.lerp(torch.full_like(noise, 0.4), noise, r)) > 0.4) for r in (0.2, 0.8)]
    [False, True]
    """
    check_images("noise_ratio", "images", images)
    shares: Tensor = evaluation_network(torch.float32, images.device)(images.float())
    return shares.double()


@metric("noise_ratio", "Noise", better="lower", modalities=("image",), low=0, high=1, optional=True, compares=False)
def _noise_found(_: Tensor, found: Tensor) -> Tensor:
    """In words: Share of noise that an evaluation network sees in the reconstruction, whatever the original is."""
    return noise_ratio(found)
