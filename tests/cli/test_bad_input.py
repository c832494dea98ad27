"""What new users get wrong: one line each, that says what was expected, what was got and what to do."""

import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

QUICK = (
    "audit",
    "--attack",
    "idlg:iterations=2",
    "--victims",
    "1",
    "--games",
    "0",
    "--rounds",
    "1",
    "--defense",
    "none",
)


def write_images(folder, count, sizes=(12,)):
    random = np.random.default_rng(0)
    for number in range(count):
        place = folder / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        size = sizes[number % len(sizes)]
        Image.fromarray(random.integers(0, 256, (size, size), dtype=np.uint8)).save(place / f"{number}.png")
    return folder


MODELS = {
    "nan": "return nn.Sequential(nn.Flatten(), nn.Linear(144, classes), Log())",
    "kink": "return nn.Sequential(nn.Flatten(), nn.Linear(144, 4, bias=False), Length(), nn.Linear(1, classes))",
    "gru": "return Recurrent(classes)",
    "softmax": "return nn.Sequential(nn.Flatten(), nn.Linear(144, classes), nn.Softmax(1))",
    "raises": "return nn.Linear(width, classes)",
    "forward": "return Broken()",
    "functional": "return Functional(classes)",
}
HEADER = """import torch
from torch import nn

class Log(nn.Module):
    def forward(self, x):
        return (x - 100).log()

class Length(nn.Module):
    def forward(self, x):
        return (x * 0).norm(dim=1, keepdim=True)

class Recurrent(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.recurrent, self.last = nn.GRU(12, 8, batch_first=True), nn.Linear(8, classes)

    def forward(self, x):
        return self.last(self.recurrent(x[:, 0])[0][:, -1])

class Broken(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x):
        return x.colour

class Functional(nn.Linear):
    def __init__(self, classes):
        super().__init__(144, classes)

    def forward(self, x):
        return nn.functional.dropout(super().forward(x.flatten(1)), 0.5, self.training)

def build(input_shape, classes):
    """


def write_model(folder, kind):
    path = folder / "mine.py"
    path.write_text(HEADER + MODELS[kind])
    return f"{path}@build"


def fails(gradveil_command, *words):
    code, _, err = gradveil_command(*words)
    assert code == 2
    assert "Traceback" not in err
    return err.partition("error: ")[2]


def test_forty_images(gradveil_command, tmp_path):
    images = write_images(tmp_path / "images", 40)
    message = "expected more than 100 training examples, .* got 32; add examples, or use another data set"
    assert_matches(fails(gradveil_command, *QUICK, "--dataset", images, "--out", tmp_path / "out"), message)


def test_a_hundred_and_thirty_images_and_eight_clients(gradveil_command, tmp_path):
    images = write_images(tmp_path / "images", 130)
    message = "at least one training example for each of 8 clients .* got 4; lower --clients to at most 4"
    words = ("--dataset", images, "--model", "mlp", "--clients", "8", "--out", tmp_path / "out")
    assert_matches(fails(gradveil_command, *QUICK, *words), message)


def test_a_stray_file_in_a_class_folder_is_named(gradveil_command, tmp_path):
    images = write_images(tmp_path / "images", 20)
    (images / "cat" / "notes.txt").write_text("to do")
    (images / "dog" / ".DS_Store").write_text("")
    message = "cat/notes.txt: expected an 8-bit image, .* convert it or move it out"
    assert_matches(fails(gradveil_command, *QUICK, "--dataset", images, "--out", tmp_path / "out"), message)


def test_a_folder_that_is_not_there(gradveil_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "nofolder/: expected an existing file or folder of data, got none of that name; check the path"
    assert_matches(fails(gradveil_command, *QUICK, "--dataset", "nofolder/", "--out", "out"), message)


def test_mixed_sizes(gradveil_command, tmp_path):
    images = write_images(tmp_path / "images", 20, sizes=(12, 14))
    message = rf"all images must have one size, got 2 sizes from 12x12 to 14x14; .* --dataset {images}:size=32"
    assert_matches(fails(gradveil_command, *QUICK, "--dataset", images, "--out", tmp_path / "out"), message)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nan", r"expected finite outputs .* got NaN or Inf; check the model's weights"),
        ("kink", r"expected gradients with finite derivatives, got NaN or Inf"),
        ("gru", r"can be differentiated again and batched, .* replace fused layers such as nn.LSTM and nn.GRU"),
        ("raises", r"mine.py, line 35 raises NameError: name 'width' is not defined; correct that file"),
        ("forward", r"does not take inputs of shape \[2, 1, 12, 12\] \(.*mine.py, line 25\): .* no attribute 'colour'"),
        ("functional", r"different outputs for the same inputs, .* nn.Dropout modules, or .* .--dropout inference"),
    ],
)
def test_models_that_cannot_be_audited(gradveil_command, tmp_path, kind, message):
    words = ("--dataset", "mnist:size=12", "--model", write_model(tmp_path, kind), "--out", tmp_path / "out")
    assert_matches(fails(gradveil_command, *QUICK, *words), message)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.filterwarnings("always:.*ends in softmax")
def test_functional_dropout_can_be_switched_off_and_softmax_is_noted(gradveil_command, tmp_path):
    words = ("train", "--rounds", "1", "--clients", "2", "--dataset", "mnist:size=12", "--model")
    model = write_model(tmp_path, "functional")
    assert gradveil_command(*words, model, "--dropout", "inference")[0] == 0
    code, _, err = gradveil_command(*words, write_model(tmp_path, "softmax"))
    assert code == 0
    assert "ends in softmax: its outputs sum to one, but the cross-entropy loss expects logits" in err


def test_model_files_import_their_neighbours(gradveil_command, tmp_path):
    """From a script's folder, also lazily, and another file's neighbours of the same name are others."""
    words = ("train", "--rounds", "1", "--clients", "2", "--dataset", "mnist:size=12", "--model")
    for name, width in (("one", 5), ("two", 7)):
        folder = tmp_path / name
        (folder / "blocks").mkdir(parents=True)
        (folder / "blocks" / "__init__.py").write_text("from .sizes import WIDTH\n")
        (folder / "blocks" / "sizes.py").write_text(f"WIDTH = {width}\n")
        (folder / "parts.py").write_text("from torch import nn\n\ndef head(i, o):\n    return nn.Linear(i, o)\n")
        code = "from torch import nn\nfrom parts import head\n\ndef build(input_shape, classes):\n"
        code += "    from blocks import WIDTH\n"
        code += f"    assert WIDTH == {width}\n"
        code += "    return nn.Sequential(nn.Flatten(), head(144, WIDTH), head(WIDTH, classes))\n"
        (folder / "mine.py").write_text(code)
        assert gradveil_command(*words, f"{folder}/mine.py@build", "--out", folder / "out")[0] == 0
    (tmp_path / "two" / "blocks" / "sizes.py").write_text("WIDTH = 8\n")
    err = fails(gradveil_command, "train", "--resume", "--out", folder / "out", "--model", f"{folder}/mine.py@build")
    assert "the file of the model" in err
    (tmp_path / "two" / "parts.py").write_text("import torch\n\nx = 1 / 0\n")
    err = fails(gradveil_command, *words, f"{folder}/mine.py@build")
    assert_matches(err, r"parts.py, line 3 raises ZeroDivisionError: division by zero; correct that file")


@pytest.mark.parametrize("place", ["rows", "pictures"])
def test_a_full_disk_loses_no_row(gradveil_command, tmp_path, monkeypatch, place):
    words = (*QUICK[:-2], "--defense", "top-k", "--dataset", "mnist:size=12", "--model", "mlp", "--public", "50")
    owner, name = (os, "fsync") if place == "rows" else (Path, "write_bytes")
    real, count = getattr(owner, name), 0

    def full(*arguments):
        nonlocal count
        count += 1
        if count > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full)
        err = fails(gradveil_command, *words, "--out", tmp_path / "out")
    assert "got: No space left on device; what was saved earlier is unchanged; free some space" in err
    kept = (tmp_path / "out" / "results.jsonl").read_text()
    assert kept
    assert gradveil_command("audit", "--resume", "--out", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "results.jsonl").read_text().startswith(kept)


def assert_matches(text, pattern):
    __tracebackhide__ = True
    assert re.search(pattern, text), text
