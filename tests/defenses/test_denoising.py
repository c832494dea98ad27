"""Removing noise from images."""

import numpy as np
import pytest
import torch
from skimage.restoration import denoise_tv_chambolle

from gradveil.defenses import _denoising as denoising


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_it_finds_the_same_total_variation_minimum_as_scikit_image(picture):
    # A grey image, because scikit-image smooths the channels of a colour image separately.
    noisy = (picture[:, :1] + 0.2 * torch.randn(1, 1, 32, 32, generator=seeded())).double()
    expected = denoise_tv_chambolle(noisy[0, 0].numpy(), weight=0.1, eps=1e-9, max_num_iter=3000)
    moved = np.sqrt(np.mean((expected - noisy[0, 0].numpy()) ** 2))
    found = denoising.denoise(noisy, torch.tensor([moved]))[0, 0].numpy()
    assert np.abs(found - expected).max() < 0.01


@pytest.mark.parametrize("deviation", [0.02, 0.1, 0.3])
def test_it_moves_by_the_given_deviation(deviation, picture):
    noisy = picture.repeat(2, 1, 1, 1) + 0.3 * torch.randn(2, 3, 32, 32, generator=seeded())
    moved = (denoising.denoise(noisy, torch.full((2,), deviation)) - noisy).square().mean(dim=(1, 2, 3)).sqrt()
    torch.testing.assert_close(moved, torch.full((2,), deviation), rtol=1e-2, atol=0)


def test_divergence_is_minus_the_transpose_of_the_derivatives():
    image = torch.randn(2, 3, 5, 7, generator=seeded(), dtype=torch.float64)
    field = torch.randn(2, 2, 3, 5, 7, generator=seeded(1), dtype=torch.float64)
    left = (denoising._derivatives(image) * field).sum()
    torch.testing.assert_close(left, -(image * denoising._divergence(field)).sum())


def test_images_are_denoised_independently():
    noisy = torch.rand(3, 1, 12, 12, generator=seeded())
    deviations = torch.tensor([0.05, 0.1, 0.2])
    together = denoising.denoise(noisy, deviations)
    alone = torch.cat([denoising.denoise(noisy[i : i + 1], deviations[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("deviation", [0.05, 0.2])
def test_the_noise_level_is_estimated(deviation, picture):
    noisy = picture.repeat(4, 1, 1, 1) + deviation * torch.randn(4, 3, 32, 32, generator=seeded())
    estimate = denoising.noise_deviation(noisy)
    assert estimate.shape == (4,)
    assert estimate.mean().item() == pytest.approx(deviation, rel=0.25)
