"""The examples in CONTRIBUTING.md are a working defense, attack and metric."""

import re
from pathlib import Path

import pytest
import torch

import gradveil
from gradveil.attacks import ATTACKS
from gradveil.defenses import DEFENSES
from gradveil.metrics import METRICS

PAGE = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
DEFENSE, ROW, ATTACK, METRIC = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(autouse=True)
def without_the_examples(monkeypatch):
    """Whoever tries the page out has the files in place; and nothing stays behind."""
    monkeypatch.setattr(DEFENSES, "_factories", {n: f for n, f in DEFENSES._factories.items() if n != "sign-flip"})
    monkeypatch.setattr(ATTACKS, "_factories", {n: f for n, f in ATTACKS._factories.items() if n != "plain-cosine"})
    monkeypatch.setattr(METRICS, "_metrics", {n: m for n, m in METRICS._metrics.items() if n != "largest_error"})


def run(code):
    names = {"__name__": "example"}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    return names


def test_the_example_defense_works_as_printed():
    run(DEFENSE)
    assert "sign-flip" in gradveil.list_defenses()
    flipped = gradveil.defense("sign-flip", rate=1.0).perturb({"w": torch.tensor([1.0, -2.0])})["w"]
    assert flipped.tolist() == [-1.0, 2.0]
    cases = eval(f"[{ROW}]", {"Case": lambda *arguments, **keywords: (arguments, keywords)})
    assert cases[0][0][0] == "sign-flip"


def test_the_example_attack_works_as_printed(tiny_task, tiny_batch):
    run(ATTACK)
    one = tiny_batch[0][:1], tiny_batch[1][:1]
    update = gradveil.defense("none").share(tiny_task, *one)
    attack = gradveil.attack("plain-cosine", iterations=300, restarts=2)
    found = attack.reconstruct(tiny_task, update, gradveil.ThreatModel(), generator=torch.manual_seed(7))
    start = torch.rand(one[0].shape, generator=torch.manual_seed(7), dtype=torch.float64)
    assert (found.inputs[0] - one[0]).abs().mean() < 0.5 * (start - one[0]).abs().mean()


def test_the_example_metric_works_as_printed():
    made = run(METRIC)["largest_error"]
    assert "largest_error" in METRICS._metrics
    found = made(torch.zeros(2, 1, 4, 4), torch.full((2, 1, 4, 4), 0.5))
    assert found.tolist() == [0.5, 0.5]
