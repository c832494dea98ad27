import gzip
import io
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gradveil import data
from gradveil.core.errors import DataError, ParameterError, UnknownNameError
from gradveil.data import loader
from gradveil.data.formats import read_npz
from gradveil.data.loader import EMBEDDED

RNG = np.random.default_rng(1)


def write_npz(path, count=20, shape=(8, 8, 3), labels=2, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        "x_train": RNG.integers(0, 256, (count, *shape), dtype=np.uint8),
        "y_train": np.arange(count) % labels,
        **more,
    }
    np.savez(path, **arrays)
    return arrays


class TestByName:
    def test_search_order_is_user_folder_then_cache_then_embedded(self, user_folder, cache):
        assert data.load("mnist").source == "embedded digits"
        write_npz(cache / "mnist.npz", count=30, shape=(28, 28))
        assert len(data.load("mnist").train) == 24
        write_npz(user_folder / "mnist.npz", count=20, shape=(28, 28))
        assert len(data.load("mnist").train) == 16

    def test_source_is_the_file_and_not_its_path(self, user_folder):
        write_npz(user_folder / "cifar10.npz")
        dataset = data.load("cifar10")
        assert (dataset.name, dataset.source) == ("cifar10", "cifar10.npz")

    def test_known_class_names_fill_in_for_numbers(self, user_folder):
        write_npz(user_folder / "cifar10.npz")
        assert data.load("cifar10").classes[:2] == ("airplane", "automobile")

    def test_folders_count_too(self, user_folder):
        for label in ("s1", "s2"):
            for number in range(5):
                path = user_folder / "orl_faces" / label / f"{number}.pgm"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (9, 11), number).save(path)
        dataset = data.load("faces-orl", size=4)
        assert (dataset.source, dataset.classes) == ("orl_faces", ("s1", "s2"))
        assert (len(dataset.train), len(dataset.test), dataset.test.input_shape) == (8, 2, (1, 4, 4))

    def test_zipped_idx_files(self, user_folder):
        """Read-only bytes become tensors without a warning from numpy or torch."""
        folder = user_folder / "mnist"
        folder.mkdir()
        for prefix, count in (("train", 3), ("t10k", 2)):
            head = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (count, 2, 2))
            (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + bytes(range(count * 4))))
            head = b"\0\0\x08\x01" + count.to_bytes(4, "big")
            (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(head + bytes(range(count))))
        dataset = data.load("mnist")
        assert dataset.train.inputs.flatten().tolist() == list(range(12))
        assert dataset.test.targets.tolist() == [0, 1]
        assert dataset.classes == tuple("0123456789")

    def test_a_broken_file_is_an_error_and_not_skipped(self, user_folder):
        (user_folder / "mnist.npz").write_bytes(b"half")
        with pytest.raises(DataError, match=r"mnist\.npz: expected an \.npz archive"):
            data.load("mnist")

    def test_found_nowhere_names_places_and_command(self, user_folder, cache):
        with pytest.raises(DataError) as caught:
            data.load("cifar10")
        message = str(caught.value)
        for part in (
            str(user_folder),
            str(cache),
            "cifar10.npz",
            "cifar-10-batches-py",
            "gradveil data get cifar10",
        ):
            assert part in message

    def test_found_nowhere_without_a_command_names_the_files(self, cache):
        with pytest.raises(DataError) as caught:
            data.load("svhn")
        message = str(caught.value)
        for part in (str(cache), "train_32x32.mat", "GRADVEIL_DATA is not set"):
            assert part in message
        assert "gradveil data get" not in message

    @pytest.mark.parametrize(("typed", "meant"), [("minst", "mnist"), ("cifar-10", "cifar10"), ("SVHN", "known: ")])
    def test_unknown_names_get_suggestions(self, typed, meant):
        with pytest.raises(UnknownNameError, match=f"unknown dataset '{typed}'; .*{meant}"):
            data.load(typed)

    def test_weights_are_not_a_dataset(self):
        with pytest.raises(UnknownNameError, match="it is the name of weights"):
            data.load("lpips-alex")


class TestByPath:
    def test_npz(self, tmp_path):
        arrays = write_npz(tmp_path / "own.npz", x_test=np.zeros((2, 8, 8, 3), np.uint8), y_test=np.array([0, 1]))
        dataset = data.load(tmp_path / "own.npz")
        assert (dataset.source, dataset.classes) == ("own.npz", ("0", "1"))
        expected = torch.from_numpy(arrays["x_train"]).permute(0, 3, 1, 2)
        assert torch.equal(dataset.train.inputs, expected)
        assert dataset.train.targets.tolist() == arrays["y_train"].tolist()
        assert len(dataset.test) == 2

    def test_string_path_to_a_folder_that_has_the_name_of_a_dataset(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for label in "ab":
            for number in range(2):
                path = tmp_path / "mnist" / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (5, 5)).save(path)
        assert data.load("./mnist").classes == ("a", "b")
        assert data.load("mnist").source == "embedded digits"

    def test_a_path_that_does_not_exist(self, tmp_path):
        for path in (tmp_path / "own.npz", str(tmp_path / "own"), "own.npz"):
            with pytest.raises(
                DataError, match=r"own.*: expected an existing file or folder of data, got none of that name"
            ):
                data.load(path)

    def test_size_resizes(self, tmp_path):
        write_npz(tmp_path / "own.npz")
        dataset = data.load(tmp_path / "own.npz", size=5)
        assert dataset.train.input_shape == dataset.test.input_shape == (3, 5, 5)

    def test_resizing_to_the_same_size_changes_nothing(self, tmp_path):
        write_npz(tmp_path / "own.npz")
        plain, sized = data.load(tmp_path / "own.npz"), data.load(tmp_path / "own.npz", size=8)
        assert torch.equal(plain.train.inputs, sized.train.inputs)

    @pytest.mark.parametrize("size", [0, -3, 2.5, "64", True])
    def test_refuses_an_invalid_size(self, size):
        with pytest.raises(ParameterError, match="load: size must be a whole number of at least 1, got"):
            data.load("mnist", size=size)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"y_train": np.arange(19)}, "got 20 images and 19 labels"),
            ({"classes": np.array(["only"])}, r"labels must lie from 0 to 0 \(1 classes\), got 1"),
            ({"y_train": np.array([-1, -1] + [0] * 18)}, "got -1"),
            ({"y_train": np.array([10**15] * 2 + [0] * 18)}, "must lie below 65536, got 1000000000000000; number"),
            (
                {"y_train": np.array([1] + [0] * 19)},
                "class 1 has one image, but train and test need one each",
            ),
            ({"x_test": np.zeros((2, 9, 9, 3), np.uint8), "y_test": np.array([0, 1])}, "must have one shape"),
            (
                {"x_test": np.zeros((2, 8, 8, 3), np.uint8), "y_test": np.array([0])},
                "got 2 images and 1 labels",
            ),
            (
                {"x_test": np.zeros((1, 8, 8, 3), np.uint8), "y_test": np.array([2])},
                "test labels must lie from 0 to 1",
            ),
            (
                {"x_train": np.zeros((0, 8, 8, 3), np.uint8), "y_train": np.zeros(0, int)},
                "at least one image",
            ),
        ],
    )
    def test_refuses_labels_that_do_not_fit(self, tmp_path, change, message):
        write_npz(tmp_path / "own.npz", **change)
        with pytest.raises(DataError, match=message):
            data.load(tmp_path / "own.npz")


class TestHoldOut:
    def test_holds_out_a_fifth_of_each_class(self, tmp_path):
        arrays = write_npz(tmp_path / "own.npz", count=100, labels=4)
        dataset = data.load(tmp_path / "own.npz")
        assert torch.bincount(dataset.test.targets).tolist() == [5, 5, 5, 5]
        together = torch.cat([dataset.train.inputs, dataset.test.inputs]).permute(0, 2, 3, 1).numpy()
        assert {image.tobytes() for image in together} == {image.tobytes() for image in arrays["x_train"]}

    def test_is_the_same_every_time(self, tmp_path):
        write_npz(tmp_path / "own.npz", count=100)
        first, again = (data.load(tmp_path / "own.npz") for _ in range(2))
        assert torch.equal(first.test.inputs, again.test.inputs)

    def test_mixes_the_classes(self, tmp_path):
        write_npz(tmp_path / "own.npz", count=100, y_train=np.arange(100) // 50)
        dataset = data.load(tmp_path / "own.npz")
        for split in (dataset.train, dataset.test):
            assert len(split.targets.diff().nonzero()) > len(split) / 4

    def test_keeps_images_and_labels_together(self, tmp_path):
        images = np.repeat(np.arange(100, dtype=np.uint8), 16).reshape(100, 4, 4)
        write_npz(tmp_path / "own.npz", x_train=images, y_train=np.arange(100) % 7)
        dataset = data.load(tmp_path / "own.npz")
        for split in (dataset.train, dataset.test):
            assert torch.equal(split.inputs[:, 0, 0, 0].long() % 7, split.targets)

    def test_small_classes_give_one_image(self, tmp_path):
        write_npz(tmp_path / "own.npz", count=4)
        assert data.load(tmp_path / "own.npz").test.targets.sort().values.tolist() == [0, 1]


class TestEmbedded:
    def test_is_balanced_and_real(self):
        dataset = data.load("mnist")
        assert dataset.classes == tuple("0123456789")
        assert torch.bincount(dataset.train.targets).tolist() == [400] * 10
        assert torch.bincount(dataset.test.targets).tolist() == [100] * 10
        assert dataset.train.input_shape == (1, 28, 28)
        # ink covers about a fifth of a digit, and a one has the least of it
        ink = [dataset.train.batch((dataset.train.targets == label).nonzero()[:, 0])[0].mean() for label in range(10)]
        assert 0.1 < sum(ink) / 10 < 0.16
        assert min(range(10), key=ink.__getitem__) == 1

    def test_split_never_changes(self):
        """A weighted sum of the test images pins the split, so that reports made with it stay comparable."""
        dataset = data.load("mnist")
        weights = torch.arange(1, 1001)
        assert (dataset.test.inputs.long().sum((1, 2, 3)) * weights).sum().item() == 13_199_051_563

    def test_they_are_the_first_of_every_class(self, real_file):
        original = np.load(real_file("mnist.npz"))  # the first 20,000 of the 60,000 training images
        labels = original["y_train"].ravel()
        chosen = np.concatenate([np.flatnonzero(labels == label)[:500] for label in range(10)])
        images, targets = read_npz(EMBEDDED).train
        assert np.array_equal(images, original["x_train"][chosen])
        assert np.array_equal(targets, labels[chosen])

    def test_the_script_packs_them(self, tmp_path):
        script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "pack_digits.py"))
        images, labels = read_npz(EMBEDDED).train
        mixed = np.r_[np.arange(5000), RNG.integers(0, 5000, 100)]  # more of each class, which are left out
        np.savez(tmp_path / "mnist.npz", x_train=images[mixed], y_train=labels[mixed])
        script["pack"](tmp_path / "mnist.npz", tmp_path / "digits.npz")
        packed = read_npz(tmp_path / "digits.npz").train
        assert np.array_equal(packed[0], images)
        assert np.array_equal(packed[1], labels)
        np.savez(tmp_path / "few.npz", x_train=images[:4900], y_train=labels[:4900])
        with pytest.raises(SystemExit, match="expected 500 images of each of 10 classes, got 4900 in all"):
            script["pack"](tmp_path / "few.npz", tmp_path / "digits.npz")

    def test_a_broken_file(self, tmp_path, monkeypatch):
        monkeypatch.setattr(loader, "EMBEDDED", tmp_path / "digits.npz")
        (tmp_path / "digits.npz").write_bytes(b"no digits")
        with pytest.raises(DataError, match=r"digits\.npz: expected an \.npz archive"):
            data.load("mnist")


@pytest.mark.parametrize(
    ("name", "file", "train", "test", "shape", "classes"),
    [
        ("mnist", "mnist.npz", 20_000, 4_000, (1, 28, 28), 10),
        ("fashion-mnist", "fashion_mnist.npz", 20_000, 4_000, (1, 28, 28), 10),
        ("cifar10", "cifar10.npz", 12_000, 3_000, (3, 32, 32), 10),
        ("cifar100", "cifar100.npz", 3_000, 500, (3, 32, 32), 100),
        ("mednist", "mednist.npz", 3_480, 600, (1, 64, 64), 6),
        ("pneumonia", "pneumoniamnist.npz", 4_708, 624, (1, 28, 28), 2),
        ("bccd", "bccd.npz", 1_542, 391, (3, 32, 32), 3),
        ("faces-orl", "faces_orl.npz", 320, 80, (1, 112, 92), 40),
        ("tiny-imagenet", "tinyimagenet10.npz", 4_000, 500, (3, 64, 64), 10),
    ],
)
def test_real_files(real_file, name, file, train, test, shape, classes):
    path = real_file(file)
    dataset = data.load(name)
    assert (dataset.source, len(dataset.classes)) == (file, classes)
    assert (len(dataset.train), len(dataset.test)) == (train, test)
    assert dataset.train.input_shape == shape
    assert set(dataset.train.targets.tolist()) == set(range(classes))
    with np.load(path) as raw:
        assert dataset.classes == tuple(raw["classes"])
        np.testing.assert_array_equal(dataset.test.targets, raw["y_test"])
        if "x_test" in raw:
            last = raw["x_test"][-1]
        else:
            start = raw["offsets_test"][-2]
            last = np.asarray(Image.open(io.BytesIO(raw["jpeg_test"][start:].tobytes())).convert("RGB"))
    np.testing.assert_array_equal(dataset.test.inputs[-1].permute(1, 2, 0), last)
