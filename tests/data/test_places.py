from pathlib import Path

import platformdirs
import pytest

from gradveil import data
from gradveil.core.errors import DataError, UnknownNameError
from gradveil.data import catalog, places

WEIGHTS = {"lpips-alex", "face-generator", "face-embedding", "smollm2"}
DATASET_NAMES = {
    "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "mednist", "pneumonia", "bccd", "faces-orl",
    "tiny-imagenet", "sst2", "adult",
}  # fmt: skip


def test_names_are_the_datasets_and_not_the_weights():
    assert set(data.names()) == DATASET_NAMES
    assert len(data.names()) == len(DATASET_NAMES)


def test_no_two_entries_look_for_the_same_file():
    files = [file for entry in (*catalog.DATASETS, *catalog.WEIGHTS) for file in entry.files]
    assert len(files) == len(set(files))


@pytest.mark.parametrize("entry", [*catalog.DATASETS, *catalog.WEIGHTS], ids=lambda entry: entry.name)
def test_entries_are_complete(entry):
    assert entry.summary
    assert entry.licence
    assert entry.citation
    assert entry.by_hand
    assert entry.files[0].endswith((".npz", ".jsonl"))
    assert all(len(package.sha256) == 64 and package.version for package in entry.packages)


class TestFind:
    @pytest.mark.usefixtures("user_folder")
    def test_nothing(self):
        assert data.find("lpips-alex") is None

    def test_user_folder_before_cache(self, user_folder, cache):
        cache.mkdir()
        (cache / "lpips_alex.npz").touch()
        assert data.find("lpips-alex") == cache / "lpips_alex.npz"
        (user_folder / "lpips_alex.npz").touch()
        assert data.find("lpips-alex") == user_folder / "lpips_alex.npz"

    def test_the_preferred_file_of_a_folder(self, user_folder):
        (user_folder / "cifar-10-batches-py").mkdir()
        assert data.find("cifar10").name == "cifar-10-batches-py"
        (user_folder / "cifar10.npz").touch()
        assert data.find("cifar10").name == "cifar10.npz"

    def test_layout_of_torchvision(self, user_folder):
        (user_folder / "MNIST" / "raw").mkdir(parents=True)
        assert data.find("mnist") == user_folder / "MNIST" / "raw"

    def test_unknown_name(self):
        with pytest.raises(UnknownNameError, match="did you mean lpips-alex"):
            data.find("lpips-alx")

    def test_user_folder_that_does_not_exist(self, monkeypatch, tmp_path):
        monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path / "typo"))
        with pytest.raises(DataError, match=r"GRADVEIL_DATA must name a folder, got '.*typo'; create it or unset"):
            data.find("mnist")


def test_cache_folder_is_the_users_unless_set(monkeypatch):
    monkeypatch.delenv("GRADVEIL_CACHE")
    assert places.cache_folder() == Path(platformdirs.user_cache_dir("gradveil"))
    monkeypatch.setenv("GRADVEIL_CACHE", "elsewhere")
    assert places.cache_folder() == Path("elsewhere")


class TestStatus:
    def test_one_row_per_name(self):
        assert {row.name for row in data.status()} == DATASET_NAMES | WEIGHTS

    def test_found_embedded_or_missing(self, user_folder):
        (user_folder / "svhn.npz").touch()
        found = {row.name: row.found for row in data.status()}
        assert found["svhn"] == user_folder / "svhn.npz"
        assert found["mnist"] == "embedded"
        assert found["cifar10"] is None

    def test_how_is_a_command_or_a_file(self):
        how = {row.name: row.how for row in data.status()}
        assert how["cifar10"] == "gradveil data get cifar10"
        assert how["cifar100"].startswith("put cifar100.npz")
        assert "GRADVEIL_DATA" in how["cifar100"]
