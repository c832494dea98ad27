"""The experiment on faces, with digits in place of people and pixels in place of the embedding."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kinds
import pinned
from gradveil.core.errors import ParameterError
from gradveil.models.generator import Generator

FILE = Path(__file__).parents[2] / "experiments" / "faces" / "extension.py"
CASE = {"name": "x", "seed": 0, "dataset": "mnist", "model": "lenet:init=uniform", "victims": 8, "labels": "known"}


@pytest.fixture(scope="module")
def extension():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GRADVEIL_DATA", raising=False)
        pinned.load.cache_clear()
        extension = runpy.run_path(str(FILE), run_name="faces")
        pixels = SimpleNamespace(embed=lambda images: images.flatten(1))
        patch.setitem(extension["recognised"].__globals__, "embedding", lambda: pixels)
        yield extension
    pinned.load.cache_clear()


def guess(extension, **settings):
    return extension["face_guess"]({**CASE, **settings}, kinds.Session(Path()))


def test_originals_are_recognised_and_what_shows_nobody_is_not(extension):
    original = guess(extension, guess="original")
    assert original["rate"] == sum(original["recognised"]) / 8 >= 6 / 8
    assert original["psnr"] == [100.0] * 8
    everybody = guess(extension, guess="mean of everybody")
    assert everybody["rate"] < original["rate"]
    assert original["chance"] == 0.1
    with pytest.raises(ParameterError, match="faces: expected a guess that it knows, got 'none'"):
        guess(extension, guess="none")


def test_who_a_victim_is_does_not_depend_on_the_classes_of_the_task(extension):
    by_person, by_parity = (guess(extension, guess="class mean", **loss) for loss in ({}, {"loss": "logistic"}))
    assert by_parity["chance"] == by_person["chance"] == 0.1
    assert by_parity["rate"] < by_person["rate"]
    assert (
        guess(extension, guess="original", loss="logistic")["recognised"]
        == guess(extension, guess="original")["recognised"]
    )


def test_the_nearest_image_of_a_generator_is_found_again(extension, monkeypatch):
    torch.manual_seed(0)
    generator = Generator(latent=3, side=3, widths=(8,), channels=3).requires_grad_(False)
    found_in = extension["nearest_of_generator"].__globals__
    loaded = SimpleNamespace(FACES="", find=lambda _name: None, load=lambda _path: generator)
    monkeypatch.setitem(found_in, "generators", loaded)
    originals = generator(torch.randn(4, 3)).mean(1, keepdim=True)
    found = extension["nearest_of_generator"](originals, seed=0)
    assert found.shape == originals.shape
    assert (found - originals).abs().max() < 0.02


def test_the_control_attacks_noise(extension):
    case = {**CASE, "victims": 2, "attack": "idlg:iterations=20", "defense": "none"}
    real, control = (
        extension["face_attack"]({**case, **more}, kinds.Session(Path())) for more in ({}, {"update": "noise"})
    )
    assert min(real["psnr"]) > max(control["psnr"]) + 3
    assert len(real["recognised"]) == len(real["distance"]) == 2
