"""A loaded dataset: two splits of examples with their targets, and the names of the classes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.core.errors import DataError, InputError
from gradveil.modality import IMAGE, Modality


@dataclass(frozen=True, eq=False)
class Split:
    """Examples of one split and their targets.

    Args:
        inputs: the examples ``[N, ...]`` as the modality stores them: images as bytes, so that 60,000 fit in memory.
        targets: what a model should predict for them, ``[N, ...]``: class numbers as int64, or other numbers.
        modality: what an example is.

    Example:
        >>> split = Split(torch.full((3, 1, 2, 2), 255, dtype=torch.uint8), torch.tensor([0, 1, 0]))
        >>> len(split), split.input_shape
        (3, (1, 2, 2))
        >>> images, labels = split.batch([1, 2])
        >>> images.dtype, images.max().item(), labels.tolist()
        (torch.float32, 1.0, [1, 0])
    """

    inputs: Tensor
    targets: Tensor
    modality: Modality = IMAGE

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example as an input of a task."""
        return self.modality.input_shape(self.stored_shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one example as it is stored."""
        return tuple(self.inputs.shape[1:])

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """The chosen examples as inputs of a task (images as float32 in [0, 1]) and their targets, in this order."""
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
                f"the split has {len(self)} {self.modality.unit}s"
            )
        return self.modality.inputs_of(self.inputs[chosen]), self.targets[chosen]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset ready for use; building one checks that examples, targets and classes fit together.

    Args:
        name: the name or path it was loaded by.
        classes: the name of each class; target i means ``classes[i]``. Empty if the targets are not classes.
        source: the file, folder or package it came from, for reports; never an absolute path.
        train: examples for training, and for the attacker's public knowledge.
        test: examples for testing.

    Example:
        >>> split = Split(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
        >>> Dataset("dots", ("none", "one"), "dots.npz", split, split)
        Dataset('dots' from dots.npz: 2 train, 2 test, 1x4x4, 2 classes)
        >>> Dataset("dots", ("none",), "dots.npz", split, split)
        Traceback (most recent call last):
            ...
        gradveil.core.errors.DataError: dots.npz: train labels must lie from 0 to 0 (1 classes), got 1
    """

    name: str
    classes: tuple[str, ...]
    source: str
    train: Split
    test: Split

    def __post_init__(self) -> None:
        for split_name, split in (("train", self.train), ("test", self.test)):
            self._check_split(split_name, split)
        if self.train.modality != self.test.modality:
            raise DataError(
                f"{self.source}: train and test must be of one modality, "
                f"got {self.train.modality} and {self.test.modality}"
            )
        if self.train.input_shape != self.test.input_shape:
            raise DataError(
                f"{self.source}: train and test {self.train.modality.unit}s must have one shape, "
                f"got {_format_shape(self.train.input_shape)} and {_format_shape(self.test.input_shape)}"
            )

    def bound(self, modality: Modality) -> "Dataset":
        """The same data with the modality of a task, which knows the model: see `Modality.bind`."""
        if modality.name != self.train.modality.name:
            raise InputError(
                f"{self.source}: expected a task on {self.train.modality.name} inputs, got one on {modality.name} "
                "inputs; build the task with this data's modality"
            )
        return replace(self, train=replace(self.train, modality=modality), test=replace(self.test, modality=modality))

    def _check_split(self, name: str, split: Split) -> None:
        inputs, labels, unit = split.inputs, split.targets, split.modality.unit
        split.modality.check_stored(f"{self.source}: {name}", inputs)
        if labels.ndim == 0 or (self.classes and labels.dtype != torch.int64):
            expected = "int64 [N, ...]" if self.classes else "[N, ...]"
            raise DataError(f"{self.source}: {name} labels must be {expected}, got {labels.dtype} {list(labels.shape)}")
        if len(inputs) != len(labels):
            raise DataError(
                f"{self.source}: {name} must have one label per {unit}, "
                f"got {len(inputs)} {unit}s and {len(labels)} labels"
            )
        if inputs.numel() == 0:
            raise DataError(f"{self.source}: {name} must hold at least one {unit}, and none of size zero; got none")
        outside = labels[(labels < 0) | (labels >= len(self.classes))]
        if self.classes and len(outside):
            raise DataError(
                f"{self.source}: {name} labels must lie from 0 to {len(self.classes) - 1} "
                f"({len(self.classes)} classes), got {outside[0].item()}"
            )

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r} from {self.source}: {len(self.train)} train, {len(self.test)} test, "
            f"{_format_shape(self.train.input_shape)}, {len(self.classes)} classes)"
        )


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
