"""The evaluation network that comes with gradveil: its size, and its scores on data sets it was not trained on."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from gradveil.models.evaluation import WEIGHTS, EvaluationNetwork, evaluation_network

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_evaluation_network.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_evaluation_network", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_weights_are_small_half_precision_and_record_their_training(script):
    assert WEIGHTS.stat().st_size <= 6 << 20
    with safe_open(WEIGHTS, "pt") as file:
        training = json.loads(file.metadata()["training"])
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
    assert training == {
        "seed": script.SEED,
        "steps": script.STEPS,
        "batch": script.BATCH,
        "peak_lr": script.PEAK_LR,
        "data": list(script.TRAIN_SETS),
    }
    assert "tiny-imagenet" not in training["data"]


def test_the_weights_have_a_model_card():
    card = WEIGHTS.with_suffix(".md").read_text()
    for word in ("Data", "Seed", "scripts/train_evaluation_network.py", "Scores"):
        assert word in card


def test_it_is_the_network_of_the_paper():
    shapes = {name: tuple(value.shape) for name, value in EvaluationNetwork().named_parameters()}
    assert [shape for name, shape in shapes.items() if name.endswith("weight")] == [
        (128, 3, 3, 3),
        (256, 128, 3, 3),
        (512, 256, 3, 3),
        (1, 512),
    ]


def test_it_is_read_once_frozen_and_in_any_precision():
    assert evaluation_network() is evaluation_network()
    images = torch.rand(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    double = evaluation_network(torch.float64)(images.double())
    torch.testing.assert_close(double.float(), evaluation_network()(images), atol=1e-5, rtol=1e-4)
    assert not any(parameter.requires_grad for parameter in evaluation_network().parameters())


@pytest.mark.parametrize(("name", "size"), [("cifar10", 32), ("pneumonia", 28), ("faces-orl", 64)])
def test_scores_on_data_sets_left_out_of_training(script, real_data, name, size, monkeypatch):
    if not any(real_data.glob(f"{name.replace('-', '_')}*")):
        pytest.skip(f"{name} is not in GRADVEIL_DATA")
    assert (name, size) in script.LEFT_OUT
    assert name not in script.TRAIN_SETS
    monkeypatch.setattr(script, "SCORED_IMAGES", 60)
    scores = script.scores(evaluation_network(), name, size)
    assert scores["error"] <= 0.06
    assert scores["spearman"] >= 0.98
    assert all(low < high for low, high in zip(scores["means"], scores["means"][1:], strict=False))


def test_an_interrupted_training_gives_the_same_weights(script, tmp_path, monkeypatch):
    """Uses two small artificial sets in place of the real ones."""
    monkeypatch.setattr(script, "BATCH", 4)
    monkeypatch.setattr(script, "SIZES", (8,))
    monkeypatch.setattr(script, "CHECKPOINT_EVERY", 1)
    generator = torch.Generator().manual_seed(0)
    sets = {
        name: torch.randint(0, 256, (6, channels, 8, 8), generator=generator, dtype=torch.uint8)
        for name, channels in (("grey", 1), ("colour", 3))
    }

    class Loaded:
        def __init__(self, name):
            self.train = self
            self.inputs = sets[name]

    monkeypatch.setattr(script, "TRAIN_SETS", tuple(sets))
    monkeypatch.setattr(script.data, "load", Loaded)

    def weights_after(steps, checkpoint):
        monkeypatch.setattr(script, "STEPS", steps)
        return script.train(checkpoint).state_dict()

    monkeypatch.setattr(script.math, "cos", lambda _angle: 1.0)  # the schedule depends on the number of steps
    uninterrupted = weights_after(4, tmp_path / "uninterrupted.safetensors")
    weights_after(2, tmp_path / "resumed.safetensors")
    resumed = weights_after(4, tmp_path / "resumed.safetensors")
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
