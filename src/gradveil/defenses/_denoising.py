"""Removing noise from images: estimating its level, and finding the smoothest image at that distance."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

DENOISING_STEPS = 500


def noise_deviation(images: Tensor) -> Tensor:
    """Standard deviation [N] of white noise in images [N, C, H, W]; linear slopes in the images do not affect it.

    References:
        Immerkær, Fast Noise Variance Estimation, Computer Vision and Image Understanding 1996.

    >>> noise = 0.1 * torch.randn(1, 1, 64, 64, generator=torch.manual_seed(0))
    >>> round(noise_deviation(torch.linspace(0, 1, 64).expand(1, 1, 64, 64) + noise).item(), 2)
    0.1
    """
    second_difference = torch.tensor([1.0, -2.0, 1.0], dtype=images.dtype, device=images.device)
    kernel = torch.outer(second_difference, second_difference)[None, None]
    response = F.conv2d(images.flatten(0, 1)[:, None], kernel).view(len(images), -1)
    deviation: Tensor = math.sqrt(math.pi / 2) / 6 * response.abs().mean(dim=1)
    return deviation


def denoise(images: Tensor, deviation: Tensor) -> Tensor:
    r"""The image of least total variation at distance `deviation` [N] (root mean square) from each image [N, C, H, W].

    .. math:: \min_u TV(u) + |u - z|^2 / (2 \lambda)

    by Chambolle's projections, with lambda adjusted after every step until the distance is the requested one. The
    channels' derivatives at a pixel count as one vector, so edges stay aligned across channels.

    References:
        Chambolle, An Algorithm for Total Variation Minimization and Applications, Journal of Mathematical Imaging and
        Vision 2004.
    """
    target = deviation.view(-1, 1, 1, 1)
    strength = target.clamp_min(1e-6)
    dual = torch.zeros(2, *images.shape, dtype=images.dtype, device=images.device)
    for _ in range(DENOISING_STEPS):
        slope = _derivatives(_divergence(dual) - images / strength)
        length = slope.square().sum(dim=(0, 2), keepdim=True).sqrt()
        dual = (dual + 0.125 * slope) / (1 + 0.125 * length)
        distance = (strength * _divergence(dual)).square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
        strength = (strength * target / distance.clamp_min(1e-12)).clamp(1e-6, 1e3)
    return images - strength * _divergence(dual)


def _derivatives(images: Tensor) -> Tensor:
    """Forward differences down and across, zero at the far edges."""
    down = F.pad(images[..., 1:, :] - images[..., :-1, :], (0, 0, 0, 1))
    across = F.pad(images[..., :, 1:] - images[..., :, :-1], (0, 1, 0, 0))
    return torch.stack([down, across])


def _divergence(field: Tensor) -> Tensor:
    """Minus the transpose of `_derivatives`."""
    down, across = field[0][..., :-1, :], field[1][..., :, :-1]
    vertical = F.pad(down, (0, 0, 0, 1)) - F.pad(down, (0, 0, 1, 0))
    horizontal = F.pad(across, (0, 1, 0, 0)) - F.pad(across, (1, 0, 0, 0))
    return vertical + horizontal
