"""A face embedding: a network that turns pictures of the same person into vectors close to each other."""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import DataError, InputError
from gradveil.core.tensors import first_mismatch
from gradveil.data import catalog
from gradveil.data.npz import read_arrays
from gradveil.data.places import find, missing

NAME = "face-embedding"
"""The name of its weights in the catalogue."""
SIDE = 150
"""Height and width of the pictures that the network sees; all are resized to it."""
LENGTH = 128
"""Length of a vector."""

# Channels, and how many residual blocks have them; all but the first begin with a block that halves the sides.
_STAGES = ((32, 3), (64, 3), (128, 2), (256, 2))
# The mean colours of the pictures it was trained on, and the unit of its inputs: part of the network, in no file.
_MEAN, _UNIT = (122.782, 117.001, 104.298), 256.0
_AT_ONCE = 64


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions whose result is added to the input, or to the input's 2x2 means if the block halves.

    Where a summand is smaller, in channels or in height and width, zeros complete it: a halving block's first
    convolution has no padding, so that its result may lack a row and a column at the end.

    Args:
        before: channels of the input.
        after: channels of the result, no fewer.
        halves: whether the height and width are halved.

    Example:
        >>> ResidualBlock(4, 6, halves=True)(torch.zeros(1, 4, 8, 8)).shape
        torch.Size([1, 6, 4, 4])
    """

    def __init__(self, before: int, after: int, *, halves: bool) -> None:
        super().__init__()
        self.halves, self.added = halves, after - before
        self.conv1 = nn.Conv2d(before, after, 3, stride=2 if halves else 1, padding=0 if halves else 1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)

    def forward(self, planes: Tensor) -> Tensor:
        """The rectified sum."""
        change: Tensor = self.conv2(self.conv1(planes).relu())
        if not self.halves:
            return (planes + change).relu()
        halved = F.avg_pool2d(planes, 2)
        down, across = (halved.shape[side] - change.shape[side] for side in (2, 3))
        return (F.pad(halved, (0, 0, 0, 0, 0, self.added)) + F.pad(change, (0, across, 0, down))).relu()


class FaceEmbedding(nn.Module):
    """Turns pictures of faces into vectors of length 128; those of the same person are close to each other.

    It is the residual network of dlib with 29 convolutions, as face-api distributes it: a 7x7 convolution of stride 2
    and a 3x3 maximum of stride 2, both without padding; residual blocks of 32, 64, 128 and 256 channels, and another
    one of 256 that halves; the mean over the picture; a linear layer without bias. The scale that follows each
    convolution is multiplied into it.

    dlib calls two aligned colour photographs with a Euclidean distance below 0.6 the same person. Without detection and
    alignment, and on grey pictures, distances between strangers are smaller, so compare distances with each other
    and not with 0.6.

    References:
        King, Dlib-ml: A Machine Learning Toolkit, JMLR 10, 2009, and the example dnn_face_recognition of dlib.
        He, Zhang, Ren & Sun, Deep Residual Learning for Image Recognition, CVPR 2016.

    Example:
        Random weights show the call, though not meaningful vectors; `load` reads the trained ones:

        >>> FaceEmbedding().embed(torch.rand(2, 1, 112, 92)).shape
        torch.Size([2, 128])
    """

    def __init__(self) -> None:
        super().__init__()
        width = _STAGES[0][0]
        layers: dict[str, nn.Module] = {f"conv{width}_down": nn.Conv2d(3, width, 7, stride=2)}
        layers |= {"relu": nn.ReLU(), "pool": nn.MaxPool2d(3, stride=2)}
        for after, blocks in _STAGES:
            if after != width:
                layers[f"conv{after}_down"] = ResidualBlock(width, after, halves=True)
            for block in range(1, blocks + 1):
                layers[f"conv{after}_{block}"] = ResidualBlock(after, after, halves=False)
            width = after
        layers[f"conv{width}_down_out"] = ResidualBlock(width, width, halves=True)
        layers |= {"mean": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(width, LENGTH, bias=False)}
        self.layers = nn.Sequential(OrderedDict(layers))

    def forward(self, images: Tensor) -> Tensor:
        """Vectors [N, 128] of images [N, C, H, W] in [0, 1], grey or in colour, which are resized to 150 x 150."""
        if images.ndim != 4 or images.shape[1] not in (1, 3):
            raise InputError(f"face embedding: images must be [N, 1 or 3, H, W], got {list(images.shape)}")
        resized = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", antialias=True).expand(-1, 3, -1, -1)
        inputs = (255 * resized - resized.new_tensor(_MEAN).view(3, 1, 1)) / _UNIT
        vectors: Tensor = self.layers(inputs)
        return vectors

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        """The same for any number of images, a few at a time and without derivatives."""
        return torch.cat([self(part) for part in torch.split(images.to(next(self.parameters())), _AT_ONCE)])


def load(path: Path | None = None) -> FaceEmbedding:
    """Read the trained network; anything but its tensors, all finite, is refused.

    Args:
        path: the npz file; None: what ``gradveil data get face-embedding`` fetched.
    """
    path = path or find(NAME)
    if path is None:
        raise missing(NAME)
    with torch.device("meta"):
        network = FaceEmbedding()
    expected, remedy = network.layers.state_dict(), f"get the right file: {catalog.entry(NAME).how}"
    arrays = read_arrays(path, expected)
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and is refused
        plain = {name: array.astype(np.float32) for name, array in arrays.items() if array.dtype.kind == "f"}
    tensors = {name: torch.from_numpy(array) for name, array in plain.items()}
    if mismatch := first_mismatch(expected, tensors):
        name, wanted, got = mismatch
        raise DataError(f"{path}: expected {wanted} in {name!r}, got {got}; {remedy}")
    for name, value in tensors.items():
        if not value.isfinite().all():
            raise DataError(f"{path}: expected finite numbers, got others in {name!r}; {remedy}")
    network.layers.load_state_dict(tensors, assign=True)
    return network.requires_grad_(False).eval()
