"""What a loaded dataset is: two splits of labelled 8-bit images and the names of the classes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.errors import DataError, InputError


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled images of one split, kept as bytes so that 60,000 of them fit in memory.

    Args:
        images: uint8 tensor [N, C, H, W].
        labels: int64 tensor [N].

    Example:
        >>> split = Split(torch.full((3, 1, 2, 2), 255, dtype=torch.uint8), torch.tensor([0, 1, 0]))
        >>> len(split), split.input_shape
        (3, (1, 2, 2))
        >>> images, labels = split.batch([1, 2])
        >>> images.dtype, images.max().item(), labels.tolist()
        (torch.float32, 1.0, [1, 0])
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """The chosen images as float32 in [0, 1] and their labels, in the order of `indices`."""
        chosen = torch.as_tensor(indices)
        if chosen.numel() == 0:
            chosen = chosen.long()
        if chosen.ndim != 1 or chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise InputError(
                f"batch: indices must be a list of whole numbers, got {chosen.dtype} of shape {tuple(chosen.shape)}"
            )
        outside = chosen[(chosen < 0) | (chosen >= len(self))]
        if len(outside):
            raise InputError(
                f"batch: indices must lie from 0 to {len(self) - 1}, got {outside[0].item()}; "
                f"the split has {len(self)} images"
            )
        return self.images[chosen].float() / 255, self.labels[chosen]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset ready for use; building one checks that images, labels and classes fit together.

    Args:
        name: the name or path it was loaded by.
        classes: the name of each class; label i means ``classes[i]``.
        source: the file, folder or package the images came from, for reports; never an absolute path.
        train: images for training, and for the attacker's public knowledge.
        test: images kept apart.

    Example:
        >>> split = Split(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
        >>> Dataset("dots", ("none", "one"), "dots.npz", split, split)
        Dataset('dots' from dots.npz: 2 train, 2 test, 1x4x4, 2 classes)
        >>> Dataset("dots", ("none",), "dots.npz", split, split)
        Traceback (most recent call last):
            ...
        gradveil.errors.DataError: dots.npz: train labels must lie from 0 to 0 (1 classes), got 1
    """

    name: str
    classes: tuple[str, ...]
    source: str
    train: Split
    test: Split

    def __post_init__(self) -> None:
        for which, split in (("train", self.train), ("test", self.test)):
            self._check_split(which, split)
        if self.train.input_shape != self.test.input_shape:
            raise DataError(
                f"{self.source}: train and test images must have one shape, "
                f"got {_shape_words(self.train.input_shape)} and {_shape_words(self.test.input_shape)}"
            )

    def _check_split(self, which: str, split: Split) -> None:
        images, labels = split.images, split.labels
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise DataError(
                f"{self.source}: {which} images must be uint8 [N, C, H, W] with 1 or 3 channels, "
                f"got {images.dtype} {list(images.shape)}"
            )
        if labels.dtype != torch.int64 or labels.ndim != 1:
            raise DataError(f"{self.source}: {which} labels must be int64 [N], got {labels.dtype} {list(labels.shape)}")
        if len(images) != len(labels):
            raise DataError(
                f"{self.source}: {which} must have one label an image, "
                f"got {len(images)} images and {len(labels)} labels"
            )
        if images.numel() == 0:
            raise DataError(f"{self.source}: {which} must hold at least one image with pixels, got none")
        outside = labels[(labels < 0) | (labels >= len(self.classes))]
        if len(outside):
            raise DataError(
                f"{self.source}: {which} labels must lie from 0 to {len(self.classes) - 1} "
                f"({len(self.classes)} classes), got {outside[0].item()}"
            )

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r} from {self.source}: {len(self.train)} train, {len(self.test)} test, "
            f"{_shape_words(self.train.input_shape)}, {len(self.classes)} classes)"
        )


def _shape_words(shape: tuple[int, int, int]) -> str:
    return "x".join(map(str, shape))
