"""Learned perceptual image patch similarity (LPIPS) on AlexNet features."""

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil import data
from gradveil.core.errors import DataError, InputError
from gradveil.data.npz import read_arrays
from gradveil.metrics.images import check_pair
from gradveil.metrics.record import metric

LPIPS_RESOLUTION = 64
"""Every image is resized to this many pixels, because the LPIPS of the same pair depends on its size."""

# Name in AlexNet, shape, stride, padding; a 3x3 max-pool of stride 2 comes before the second and the third.
_CONVOLUTIONS = (
    ("features.0", (64, 3, 11, 11), 4, 2),
    ("features.3", (192, 64, 5, 5), 1, 2),
    ("features.6", (384, 192, 3, 3), 1, 1),
    ("features.8", (256, 384, 3, 3), 1, 1),
    ("features.10", (256, 256, 3, 3), 1, 1),
)
_POOLED = ("features.3", "features.6")
_NORM_EPSILON = 1e-10
_WEIGHTS = "lpips-alex"
_GET = f"gradveil data get {_WEIGHTS}"

ARRAY_SHAPES: dict[str, tuple[int, ...]] = {
    **{f"{name}.weight": shape for name, shape, _, _ in _CONVOLUTIONS},
    **{f"{name}.bias": shape[:1] for name, shape, _, _ in _CONVOLUTIONS},
    **{f"lin{layer}.weight": (1, shape[0], 1, 1) for layer, (_, shape, _, _) in enumerate(_CONVOLUTIONS)},
    "shift": (3,),
    "scale": (3,),
}
"""The arrays of a weights file and their shapes."""


class Lpips:
    """LPIPS, version 0.1 on AlexNet: how different two images look to a network trained to judge like people.

    With the unit-normalised features f_l of the five rectified convolutions and learned weights w_l >= 0::

        LPIPS(x, y) = sum_l mean over positions of sum over channels of w_l (f_l(x) - f_l(y))^2

    Every image, larger or smaller, is first resized bilinearly (antialiased if it shrinks) to 64 x 64 pixels:
    unrelated CIFAR-10 images score about .22 at 32 pixels and .51 at 64, so figures are comparable only at one
    resolution. A single channel is repeated three times.

    References:
        Zhang, Isola, Efros, Shechtman & Wang, The Unreasonable Effectiveness of Deep Features as a Perceptual
        Metric, CVPR 2018. https://arxiv.org/abs/1801.03924

    Args:
        arrays: the weights, with the names and shapes of `ARRAY_SHAPES`; `Lpips.load` reads them from a file.

    Example:
        Weights of all ones show the call, though not a meaningful distance:

        >>> distance = Lpips({name: np.ones(shape, np.float32) for name, shape in ARRAY_SHAPES.items()})
        >>> images = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        >>> distance(images, images)
        tensor([0., 0.], dtype=torch.float64)
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        for name, shape in ARRAY_SHAPES.items():
            if name not in arrays:
                raise DataError(f"LPIPS weights: array {name!r} is missing; get them with `{_GET}`")
            array = arrays[name]
            if array.shape != shape or array.dtype.kind != "f" or not np.isfinite(array).all():
                raise DataError(
                    f"LPIPS weights: array {name!r} must hold finite floats of shape {shape}, "
                    f"got {array.dtype} of shape {array.shape}; get the right ones with `{_GET}`"
                )
        self._arrays = {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in ARRAY_SHAPES}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Lpips":
        """Read the weights from an npz file."""
        try:
            arrays = read_arrays(Path(path), ARRAY_SHAPES)
        except DataError as error:
            raise DataError(f"LPIPS weights: cannot read {os.fspath(path)}: {error}; get them with `{_GET}`") from error
        return cls(arrays)

    def __call__(self, originals: Tensor, reconstructions: Tensor) -> Tensor:
        """The distance of each pair of images [N, C, H, W] in [0, 1]: float64 [N], 0 means equal."""
        check_pair("lpips", originals, reconstructions)
        if originals.shape[1] not in (1, 3):
            raise InputError(f"lpips: images must have 1 or 3 channels, got {originals.shape[1]}")
        pairs = zip(self._features(originals), self._features(reconstructions), strict=True)
        layers = [
            ((x - y).square() * self._arrays[f"lin{layer}.weight"]).sum(dim=1).mean(dim=(1, 2))
            for layer, (x, y) in enumerate(pairs)
        ]
        return torch.stack(layers).sum(dim=0).double()

    def _features(self, images: Tensor) -> Iterator[Tensor]:
        """The unit-normalised features of each convolution."""
        x = images.to(self._arrays["shift"]).expand(-1, 3, -1, -1)
        x = F.interpolate(x, size=(LPIPS_RESOLUTION, LPIPS_RESOLUTION), mode="bilinear", antialias=True)
        shift, scale = (self._arrays[name].reshape(1, 3, 1, 1) for name in ("shift", "scale"))
        x = (2 * x - 1 - shift) / scale
        for name, _, stride, padding in _CONVOLUTIONS:
            if name in _POOLED:
                x = F.max_pool2d(x, kernel_size=3, stride=2)
            weight, bias = self._arrays[f"{name}.weight"], self._arrays[f"{name}.bias"]
            x = F.relu(F.conv2d(x, weight, bias, stride=stride, padding=padding))
            yield x / (x.square().sum(dim=1, keepdim=True).sqrt() + _NORM_EPSILON)


@metric("lpips", "LPIPS", better="lower", modalities=("image",), digits=3, low=0, high=1000, optional=True, remedy=_GET)
def lpips(
    originals: Tensor, reconstructions: Tensor, *, weights: Lpips | str | os.PathLike[str] | None = None
) -> Tensor | None:
    """LPIPS of each pair of images; see `Lpips`.

    In words: Distance between the two images as a vision network sees them. 0 is identical.

    Second opinion: Pixels forgive blur and punish a shift; a vision network does the opposite.

    Args:
        originals: float images [N, C, H, W] in [0, 1] with 1 or 3 channels.
        reconstructions: images of the same shape and range.
        weights: loaded weights, or the npz file that holds them; default: what ``gradveil data get lpips-alex``
            fetched.

    Returns:
        One float64 number per image, [N]; 0 means equal, higher looks more different. None if there are no weights.
    """
    found = weights or data.find(_WEIGHTS)
    if found is None:
        return None
    return (found if isinstance(found, Lpips) else _load(os.fspath(found)))(originals, reconstructions)


_load = lru_cache(maxsize=1)(Lpips.load)
