"""Generators: their images, their files (also hostile ones), where they are found, and how they are trained."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from gradveil.core.errors import DataError
from gradveil.models.generator import FACES, Generator, find, load

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_generator.py"
LAYOUT = {"latent": 5, "side": 3, "widths": (6, 4), "channels": 1, "classes": 3}


@pytest.fixture
def tensors():
    return Generator(**LAYOUT).state_dict()


@pytest.fixture
def write(tmp_path):
    def save(tensors):
        save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "generator.safetensors")
        return tmp_path / "generator.safetensors"

    return save


def test_a_generator_is_what_its_layers_say():
    generator = Generator(**LAYOUT).double()
    latents, labels = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 2, 2, 1])
    images = []
    for latent, label in zip(latents, labels, strict=True):
        planes = generator.first.weight @ latent + generator.first.bias + generator.biases[label]
        first = nn.functional.conv_transpose2d(
            planes.view(1, 6, 3, 3).relu(), generator.upsample[0].weight, generator.upsample[0].bias, 2, 1
        )
        second = nn.functional.conv_transpose2d(
            first.relu(), generator.upsample[1].weight, generator.upsample[1].bias, 2, 1
        )
        images.append(second.sigmoid())
    torch.testing.assert_close(generator(latents, labels), torch.cat(images))
    assert generator.image_shape == (1, 12, 12)


@pytest.mark.parametrize("layout", [LAYOUT, {**LAYOUT, "classes": 0, "channels": 3, "widths": (2,)}])
def test_a_file_gives_the_same_generator(layout, write):
    generator = Generator(**layout)
    loaded = load(write(generator.state_dict()))
    latents, labels = torch.randn(2, 5), torch.tensor([0, 2])
    assert torch.equal(loaded(latents, labels), generator(latents, labels))
    assert loaded.classes == layout["classes"]
    assert not any(value.requires_grad for value in loaded.parameters())
    half = load(write({name: value.half() for name, value in generator.state_dict().items()}))
    assert half.first.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first.weight": None}, "there is no 'first.weight'"),
        ({"first.bias": None}, "no such tensor where .* is expected in 'first.bias'"),
        ({"upsample.0.weight": None}, "there is no 'upsample.0.weight'"),
        ({"upsample.0.weight": None, "upsample.0.bias": None}, "there is no 'upsample.0.weight'"),
        ({"more": torch.ones(2)}, r"\(2,\) where no such tensor is expected in 'more'"),
        ({"first.weight": torch.ones(5)}, "1 dimensions where 2 are expected in 'first.weight'"),
        ({"first.weight": torch.ones(53, 5)}, "got .* where .* is expected in"),
        ({"first.weight": torch.ones(0, 5)}, "side must be a whole number of at least 1, got 0"),
        ({"upsample.1.weight": torch.ones(4, 1, 3, 3)}, r"\(4, 1, 3, 3\) where \(4, 1, 4, 4\) is expected"),
        ({"biases": torch.ones(3, 9)}, r"\(3, 9\) where \(3, 54\) is expected in 'biases'"),
        ({"upsample.0.weight": torch.ones(0, 4, 4, 4)}, "there is no 'upsample.0.weight'"),
        ({"first.bias": torch.full((54,), torch.nan)}, "expected finite numbers, got others in 'first.bias'"),
        ({"first.bias": torch.full((54,), torch.inf)}, "expected finite numbers, got others in 'first.bias'"),
        ({"first.bias": torch.ones(54, dtype=torch.long)}, "expected finite numbers, got others in 'first.bias'"),
    ],
)
def test_hostile_tensors_are_refused(tensors, write, change, message):
    path = write({name: value for name, value in {**tensors, **change}.items() if value is not None})
    with pytest.raises(DataError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert "python scripts/train_generator.py" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_small_file_cannot_ask_for_huge_images(write):
    layers = {f"upsample.{n}.weight": torch.ones(1, 1, 4, 4) for n in range(9)}
    layers |= {f"upsample.{n}.bias": torch.ones(1) for n in range(9)}
    path = write({"first.weight": torch.ones(16, 1), "first.bias": torch.ones(16), **layers})
    with pytest.raises(DataError, match="height of the images must be a whole number at most 1024, got 2048"):
        load(path)
    layers = {f"upsample.{n}.{part}": torch.ones(1, 1, 4, 4) for n in range(60) for part in ("weight", "bias")}
    with pytest.raises(DataError, match="number of widths must be a whole number from 1 to 10, got 60"):
        load(write({"first.weight": torch.ones(1, 1), "first.bias": torch.ones(1), **layers}))


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 64])
def test_files_of_another_kind_are_refused(tmp_path, content):
    for name in ("x.safetensors", "x.npz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: expected "):
            load(tmp_path / name)
    with pytest.raises(DataError, match="none.safetensors: expected the tensors .*there is no such file"):
        load(tmp_path / "none.safetensors")
    with pytest.raises(DataError, match="expected the tensors of a generator, .*there is no such file"):
        load(tmp_path)


class TestFaces:
    """The layers of the face generator with few channels: the shapes are monkeypatched, all else is as it is."""

    WIDTHS = (6, 100, 8, 6, 5, 4)

    @pytest.fixture
    def network(self, monkeypatch):
        _, latent, *widths = self.WIDTHS
        monkeypatch.setattr("gradveil.models.generator._FACE_LATENT", latent)
        monkeypatch.setattr("gradveil.models.generator._FACE_WIDTHS", tuple(widths))
        layers = []
        for layer, (before, after) in enumerate(zip((latent, *widths), (*widths, 3), strict=True)):
            stride, padding = (1, 0) if layer == 0 else (2, 1)
            layers.append(nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False))
            if layer < len(widths):
                norm = nn.BatchNorm2d(after)
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
                layers += [norm, nn.ReLU()]
        return nn.Sequential(*layers, nn.Tanh()).eval()

    def arrays(self, network):
        return {name: value.numpy() for name, value in network.state_dict().items()}

    def test_batch_norm_and_tanh_are_folded(self, network, tmp_path):
        np.savez(tmp_path / "faces.npz", **self.arrays(network))
        generator = load(tmp_path / "faces.npz")
        assert (generator.image_shape, generator.latent, generator.classes) == ((3, 64, 64), 100, 0)
        latents = torch.randn(3, 100)
        expected = (network(latents[:, :, None, None]) + 1) / 2
        torch.testing.assert_close(generator(latents), expected.detach(), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"0.weight": np.ones((2, 3))}, r"got float64 of shape \(2, 3\) where floats of shape .* in '0.weight'"),
            ({"1.bias": np.array([print], dtype=object)}, "1.bias holds Python objects"),
            ({"1.bias": np.full(8, np.nan, np.float32)}, "expected finite numbers, got others in 'first.bias'"),
            ({"1.running_var": np.full(8, -1, np.float32)}, "expected finite numbers, got others"),
            ({"1.bias": None}, "got none where floats of shape .* are expected in '1.bias'"),
        ],
    )
    def test_hostile_arrays_are_refused(self, network, tmp_path, change, message):
        changed = {name: value for name, value in {**self.arrays(network), **change}.items() if value is not None}
        np.savez(tmp_path / "faces.npz", **changed)
        with pytest.raises(DataError, match=message) as caught:
            load(tmp_path / "faces.npz")
        assert "gradveil data get face-generator" in str(caught.value)

    def test_the_real_one(self, real_data):
        if not (real_data / "gan_face_dcgan64_fp16.npz").exists():
            pytest.skip("the face generator is not in GRADVEIL_DATA")
        images = load(find(FACES))(torch.randn(16, 100, generator=torch.Generator().manual_seed(0)))
        assert images.shape == (16, 3, 64, 64)
        assert images.std(0).mean() > 0.1  # different faces
        neighbours = (images[..., 1:] - images[..., :-1]).abs().mean()
        assert neighbours < 0.05  # no noise


def test_generators_are_found_by_name(tmp_path, monkeypatch, tensors):
    folders = {name: tmp_path / name for name in ("here", "data", "cache")}
    for folder in folders.values():
        (folder / "generators").mkdir(parents=True)
    monkeypatch.chdir(folders["here"])
    monkeypatch.setenv("GRADVEIL_DATA", str(folders["data"]))
    monkeypatch.setenv("GRADVEIL_CACHE", str(folders["cache"]))
    with pytest.raises(DataError, match=r"generator 'mnist': .*train it: python scripts/train_generator.py mnist"):
        find("mnist")
    with pytest.raises(DataError, match=r"generator 'my': .*give the file itself"):
        find("my")
    with pytest.raises(DataError, match="face-generator: .*run: gradveil data get face-generator"):
        find(FACES)
    for place in ("cache", "data", "here"):
        save_file(tensors, folders[place] / "generators" / "mnist.safetensors")
        assert find("mnist").absolute() == folders[place] / "generators" / "mnist.safetensors"
    (folders["cache"] / "gan_face_dcgan64_fp16.npz").touch()
    assert find(FACES) == folders["cache"] / "gan_face_dcgan64_fp16.npz"
    assert find("some/file.npz") == Path("some/file.npz")


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("train_generator", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_interrupted_training_gives_the_same_weights(script, two_blobs, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "CHECKPOINT_EVERY", 1)
    monkeypatch.setattr(script.math, "cos", lambda _angle: 1.0)  # the schedule depends on the number of steps
    uninterrupted = script.train(two_blobs, tmp_path / "uninterrupted", 4).state_dict()
    script.train(two_blobs, tmp_path / "resumed", 2)
    resumed = script.train(two_blobs, tmp_path / "resumed", 4).state_dict()
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


def test_a_trained_generator_draws_images_of_the_class(script, two_blobs, tmp_path, monkeypatch):
    """It sees the train split only, and its file says what it was made from."""
    without_test = SimpleNamespace(train=two_blobs.train, classes=two_blobs.classes)
    monkeypatch.setattr(script.data, "load", lambda _name: without_test)
    monkeypatch.setattr("sys.argv", ["x", "mnist", "--steps", "150", "--out", str(tmp_path / "a" / "b.safetensors")])
    script.main()
    generator = load(tmp_path / "a" / "b.safetensors")
    labels = torch.arange(20) % 2
    images = generator(torch.randn(20, generator.latent, generator=torch.Generator().manual_seed(0)), labels)
    brighter_above = images[:, :, :6].mean((1, 2, 3)) > images[:, :, 6:].mean((1, 2, 3))
    assert torch.equal(brighter_above, labels == 0)
    with safe_open(tmp_path / "a" / "b.safetensors", "pt") as file:
        training = json.loads(file.metadata()["training"])
    assert (training["data"], training["split"], training["images"], training["steps"]) == ("mnist", "train", 300, 150)
