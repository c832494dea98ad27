import pytest
import torch

from gradveil.core.errors import DataError, InputError
from gradveil.data import Dataset, Split


def make_split(count=4, channels=1, side=3, labels=None):
    images = torch.arange(count * channels * side * side, dtype=torch.uint8).view(count, channels, side, side)
    return Split(images, torch.zeros(count, dtype=torch.int64) if labels is None else torch.tensor(labels))


def make_dataset(train, test=None, classes=("a", "b")):
    return Dataset("toy", classes, "toy.npz", train, test or train)


class TestBatch:
    def test_scales_bytes_to_the_unit_interval_in_the_given_order(self):
        split = Split(torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1), torch.tensor([5, 6, 7]))
        images, labels = split.batch([2, 0, 1])
        assert images.dtype == torch.float32
        assert torch.equal(images.flatten(), torch.tensor([255, 0, 51]) / 255)
        assert labels.tolist() == [7, 5, 6]

    def test_takes_tensors_and_ranges(self):
        split = make_split()
        for indices in (torch.tensor([1, 3]), range(1, 4, 2)):
            images, labels = split.batch(indices)
            assert torch.equal(images, split.inputs[[1, 3]] / 255)
            assert labels.dtype == torch.int64

    def test_without_indices_is_empty(self):
        images, labels = make_split().batch([])
        assert images.shape == (0, 1, 3, 3)
        assert labels.shape == (0,)

    @pytest.mark.parametrize("index", [-1, 4])
    def test_refuses_indices_outside_the_split(self, index):
        with pytest.raises(InputError, match=rf"batch: indices must lie from 0 to 3, got {index};"):
            make_split().batch([0, index])

    @pytest.mark.parametrize("indices", [[0.5], [[0, 1]], torch.tensor([True, False, True, True]), 2])
    def test_refuses_anything_but_a_list_of_whole_numbers(self, indices):
        with pytest.raises(InputError, match="indices must be a list of whole numbers"):
            make_split().batch(indices)

    def test_leaves_the_split_untouched(self):
        split = make_split()
        split.batch([0])[0].fill_(1)
        split.batch([0])[1].fill_(9)
        assert split.inputs[0, 0, 0, 0] == 0
        assert split.targets[0] == 0


class TestDataset:
    def test_repr_describes_it(self):
        dataset = make_dataset(make_split(), make_split(2))
        assert repr(dataset) == "Dataset('toy' from toy.npz: 4 train, 2 test, 1x3x3, 2 classes)"
        assert (len(dataset.train), dataset.train.input_shape) == (4, (1, 3, 3))

    @pytest.mark.parametrize(
        ("train", "message"),
        [
            (make_split(labels=[0, 1, 2, 0]), r"train labels must lie from 0 to 1 \(2 classes\), got 2"),
            (make_split(labels=[0, -1, 0, 0]), r"train labels must lie from 0 to 1 \(2 classes\), got -1"),
            (make_split(labels=[0, 1]), "one label per image, got 4 images and 2 labels"),
            (make_split(channels=2), "1 or 3 channels"),
            (make_split(count=0, labels=[]), "labels must be int64"),
            (Split(torch.zeros(0, 1, 3, 3, dtype=torch.uint8), torch.zeros(0).long()), "at least one image"),
            (Split(torch.zeros(4, 1, 3, 3), torch.zeros(4).long()), "uint8"),
            (Split(torch.zeros(4, 3, 3, dtype=torch.uint8), torch.zeros(4).long()), r"\[N, C, H, W\]"),
        ],
    )
    def test_refuses_a_split_that_does_not_fit(self, train, message):
        with pytest.raises(DataError, match=message) as caught:
            make_dataset(train, make_split())
        assert str(caught.value).startswith("toy.npz: ")

    def test_refuses_splits_of_different_shapes(self):
        with pytest.raises(DataError, match="must have one shape, got 1x3x3 and 1x4x4"):
            make_dataset(make_split(), make_split(side=4))
