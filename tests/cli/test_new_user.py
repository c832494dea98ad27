"""A new user's first audit: an own network with batch norm and dropout, an own folder of images, trained weights."""

import json
import runpy
import sys

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

BLOCKS = """
from torch import nn

def block(inside, outside):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride=2), nn.BatchNorm2d(outside), nn.ReLU(), nn.Dropout2d(0.1))
"""
MODEL = """
from torch import nn

def build(input_shape, classes):
    from blocks import block

    return nn.Sequential(block(3, 4), nn.Flatten(), nn.Linear(100, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, classes))
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The user's files; the current folder is another one."""
    random = np.random.default_rng(0)
    for number in range(160):
        place = tmp_path / "images" / ("healthy", "ill")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(place / f"{number}.png")
    (tmp_path / "blocks.py").write_text(BLOCKS)
    (tmp_path / "mine.py").write_text(MODEL)
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        trained = runpy.run_path(str(tmp_path / "mine.py"))["build"]((3, 12, 12), 2)
    sys.modules.pop("blocks")  # other tests have modules of this name
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def test_an_own_model_folder_and_weights_end_in_a_report(gradveil_command, project):
    subject = ("--model", "../mine.py@build", "--dataset", "../images", "--weights", "../weights.safetensors")
    short = ("--attack", "inverting-gradients:iterations=3", "--defense", "gaussian-noise", "--victims", "1")
    short += ("--games", "2", "--candidates", "10", "--rounds", "2", "--clients", "2", "--client-batch", "4")
    code, _, err = gradveil_command("audit", *subject, *short, "--out", "../audit")
    assert code == 0, err
    assert (project / "audit" / "report.html").is_file()
    config = json.loads((project / "audit" / "config.json").read_text())
    assert config["dropout"] == "train"
    assert config["dropout_rates"] == {"0.3": 0.1, "4": 0.5}
    assert 0 <= config["weights_accuracy"] <= 1
    assert config["classes"] == ["healthy", "ill"]
    attacked = [json.loads(line) for line in (project / "audit" / "results.jsonl").read_text().splitlines()]
    assert {(row["defense"], row["adaptive"]) for row in attacked} == {
        (None, False),
        ("none", False),
        ("gaussian-noise", False),
        ("gaussian-noise", True),
    }
    assert len((project / "audit" / "utility.jsonl").read_text().splitlines()) == 2
