"""The transforms, compared with their definitions written in numpy."""

import numpy as np
import pytest
import torch

from gradveil.core.errors import InputError, ParameterError
from gradveil.defenses import _transforms as transforms


@pytest.fixture
def images() -> torch.Tensor:
    """Rather dark images with enough pixels for equalisation to have an effect."""
    uniform = torch.rand(4, 3, 20, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (uniform.square() * 255).round() / 255


def pixels(images: torch.Tensor) -> np.ndarray:
    return (images * 255).round().numpy().astype(int)


def shifted(values: np.ndarray, by: int) -> np.ndarray:
    result = np.full_like(values, 128)
    if by > 0:
        result[..., :-by] = values[..., by:]
    else:
        result[..., -by:] = values[..., :by]
    return result


REFERENCES = {
    "invert": lambda v: 255 - v,
    "flip": lambda v: v[..., ::-1],
    "solarize@128": lambda v: np.where(v < 128, v, 255 - v),
    "posterize@2": lambda v: v // 64 * 64,
    "brightness@0.6": lambda v: 0.6 * v,
    "brightness@1.9": lambda v: np.minimum(1.9 * v, 255),
    "translate-x@0.4": lambda v: shifted(v, 10),
    "translate-x@-0.2": lambda v: shifted(v, -5),
    "translate-y@0.2": lambda v: np.swapaxes(shifted(np.swapaxes(v, 2, 3), 4), 2, 3),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_transforms_agree_with_their_definitions(name, images):
    expected = REFERENCES[name](pixels(images))
    assert np.abs(pixels(transforms.apply_policy(name, images)) - expected).max() <= 1  # Pillow truncates, we round


def test_autocontrast_stretches_to_the_full_range(images):
    stretched = transforms.apply_policy("autocontrast", 0.25 + images / 2)
    assert stretched.amin((2, 3)).max() <= 1 / 255
    assert stretched.amax((2, 3)).min() >= 254 / 255


@pytest.mark.parametrize("name", transforms.names())
@pytest.mark.parametrize("channels", [1, 3])
def test_every_transform_keeps_shape_type_and_range(name, channels, images):
    before = images[:, :channels].float()
    copy = before.clone()
    after = transforms.apply_policy(name, before)
    assert (after.shape, after.dtype) == (before.shape, before.dtype)
    assert 0 <= after.min() <= after.max() <= 1
    assert torch.equal(before, copy)
    assert torch.equal(after, before) == (name.startswith("saturation") and channels == 1)


def test_a_policy_is_applied_from_left_to_right(images):
    step = transforms.apply_policy("invert", transforms.apply_policy("translate-x@0.4", images))
    assert torch.equal(transforms.apply_policy("translate-x@0.4>invert", images), step)
    assert not torch.equal(transforms.apply_policy("invert>translate-x@0.4", images), step)


def test_wrong_policies_and_inputs_are_refused(images):
    with pytest.raises(ParameterError, match="unknown transform 'rotate@16'; did you mean rotate@15"):
        transforms.apply_policy("rotate@16", images)
    with pytest.raises(InputError, match=r"images \[N, 1 or 3, height, width\], got shape \[4, 2, 20, 24\]"):
        transforms.apply_policy("invert", images[:, :2])
