"""The face embedding: its layers, its file (also a damaged one), and whether it recognises real people."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gradveil import data
from gradveil.core.errors import DataError, InputError
from gradveil.metrics import Gallery, reidentification_rate
from gradveil.models.face_embedding import NAME, FaceEmbedding, ResidualBlock, load

# What face-api's own network says of `picture`, run once on the same weights. It divides its inputs by 255, where dlib
# and we divide by 256; its inputs were scaled so that both see the same.
REFERENCE = [-0.030682, 0.104161, 0.062921, 0.005241, -0.050202, -0.036865, -0.072212, -0.011301]


@pytest.fixture(scope="module")
def untrained():
    torch.manual_seed(0)
    return FaceEmbedding().requires_grad_(False)


@pytest.fixture(scope="module")
def arrays(untrained):
    return {name: value.numpy() for name, value in untrained.layers.state_dict().items()}


@pytest.fixture(scope="module")
def trained():
    try:
        return load()
    except DataError:
        pytest.skip(f"face_embedding.npz is missing: run gradveil data get {NAME}")


def picture():
    down, across = torch.meshgrid(torch.linspace(-1, 1, 150), torch.linspace(-1, 1, 150), indexing="ij")
    disc = 0.6 - 0.5 * (down**2 + across**2 - 0.5).clamp(-0.5, 0.5)
    return torch.stack([0.5 + 0.4 * (3 * down).sin() * across, 0.5 + 0.3 * down * across, disc])[None]


@pytest.mark.parametrize("side", [4, 7, 8, 35])
def test_a_halving_block_is_the_sum_of_means_and_convolutions(side):
    block = ResidualBlock(2, 3, halves=True).double()
    planes = torch.randn(1, 2, side, side, dtype=torch.float64)
    change = F.conv2d(planes, block.conv1.weight, block.conv1.bias, stride=2).relu()
    change = F.conv2d(change, block.conv2.weight, block.conv2.bias, padding=1)
    half = side // 2
    expected = torch.zeros(1, 3, half, half, dtype=torch.float64)
    expected[:, :2] += planes[:, :, : 2 * half, : 2 * half].unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5))
    expected[:, :, : change.shape[2], : change.shape[3]] += change
    torch.testing.assert_close(block(planes), expected.relu())


def test_other_blocks_keep_the_shape():
    block = ResidualBlock(2, 2, halves=False)
    planes = torch.randn(1, 2, 5, 6)
    torch.testing.assert_close(block(planes), (planes + block.conv2(block.conv1(planes).relu())).relu())


def test_its_layers_are_those_of_the_published_network(untrained):
    convolutions = [module for module in untrained.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == 29
    # All filters, biases and fc in face-api's manifest.
    assert sum(value.numel() for value in untrained.parameters()) == 5_607_488
    sides, planes = [], torch.zeros(1, 3, 150, 150)
    for name, layer in untrained.layers.named_children():
        planes = layer(planes)
        if "down" in name or name == "pool":
            sides.append(planes.shape[-1])
    assert sides == [72, 35, 17, 8, 4, 2]


def test_any_image_is_resized_and_grey_is_repeated(untrained):
    grey = torch.rand(3, 1, 40, 30)
    expected = untrained(F.interpolate(grey.expand(-1, 3, -1, -1), size=(150, 150), mode="bilinear"))
    torch.testing.assert_close(untrained(grey), expected)
    with pytest.raises(InputError, match=r"face embedding: images must be \[N, 1 or 3, H, W\], got \[2, 2, 8, 8\]"):
        untrained(torch.zeros(2, 2, 8, 8))


def test_many_images_are_embedded_as_one_by_one(untrained, monkeypatch):
    monkeypatch.setattr("gradveil.models.face_embedding._AT_ONCE", 2)
    images = torch.rand(5, 1, 12, 12, dtype=torch.float64)
    vectors = untrained.embed(images)
    assert vectors.shape == (5, 128)
    torch.testing.assert_close(vectors, torch.cat([untrained(image[None].float()) for image in images]))


def test_a_file_gives_the_same_network(untrained, arrays, tmp_path):
    np.savez(tmp_path / "x.npz", **arrays, more=np.ones(3))
    loaded = load(tmp_path / "x.npz")
    images = torch.rand(1, 3, 20, 20)
    assert torch.equal(loaded(images), untrained(images))
    assert not any(value.requires_grad for value in loaded.parameters())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fc.weight", None, r"expected \(128, 256\) in 'fc.weight', got no such tensor"),
        ("fc.weight", np.ones((128, 255), np.float32), r"expected \(128, 256\) in 'fc.weight', got \(128, 255\)"),
        ("conv32_down.bias", np.ones(32, np.int64), "in 'conv32_down.bias', got no such tensor"),
        ("conv32_down.bias", np.full(32, np.nan, np.float32), "expected finite numbers, got others in 'conv32_down.b"),
        ("conv32_down.bias", np.full(32, 1e300), "expected finite numbers, got others in 'conv32_down.bias'"),
        ("conv32_down.bias", np.array([print] * 32, object), "conv32_down.bias holds Python objects"),
    ],
)
def test_other_arrays_are_refused(arrays, tmp_path, name, value, message):
    changed = {key: array for key, array in {**arrays, name: value}.items() if array is not None}
    np.savez(tmp_path / "x.npz", **changed)
    with pytest.raises(DataError, match=message):
        load(tmp_path / "x.npz")


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(DataError, match="x.npz: expected an .npz archive"):
        load(tmp_path / "x.npz")


def test_missing_weights_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path))
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    with pytest.raises(DataError, match="run: gradveil data get face-embedding"):
        load()


def test_the_trained_one_agrees_with_face_api(trained):
    np.testing.assert_allclose(trained.embed(picture())[0, :8], REFERENCE, atol=1e-5)


def test_the_trained_one_recognises_people(trained, real_data):
    if not (real_data / "faces_orl.npz").exists():
        pytest.skip("faces_orl.npz is not in GRADVEIL_DATA")
    faces = data.load("faces-orl")
    train, test = (split.batch((split.targets < 10).nonzero().flatten()) for split in (faces.train, faces.test))
    result = reidentification_rate(test[0], test[0], test[1], Gallery(*train), trained.embed)
    assert sum(result.right) >= 19  # of 20; among all forty people, 79 of 80
    assert result.mean_distance < 0.35
    assert result.chance == 1 / 10
