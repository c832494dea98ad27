"""Everything that others may add, added from outside the package: audited, trained and reported like its own."""

import io
import json
from dataclasses import dataclass

import PIL.Image
import pytest
import torch
from torch import nn

from gradveil import report
from gradveil.attacks import ATTACKS, Attack
from gradveil.attacks.findings import LossHistory
from gradveil.attacks.matching import SQUARED, Matching, match
from gradveil.attacks.matching.optimisers import Optimiser, Solution
from gradveil.audit import AuditConfig, run
from gradveil.core.errors import DataError, UnknownNameError
from gradveil.core.parameters import integer, number
from gradveil.data import Dataset, Split
from gradveil.data.loader import SOURCES
from gradveil.defenses import DEFENSES, Perturbation
from gradveil.metrics import METRICS, Metric
from gradveil.modality import MODALITIES, Drawn
from gradveil.models.base import REGISTRY

LOW, HIGH, COLUMNS = -3.0, 5.0, 6


@pytest.fixture
def added(monkeypatch):
    """A defense, an attack with an optimiser, a metric, a modality, a data set and a model of one's own."""
    for registry in (DEFENSES, ATTACKS, MODALITIES, SOURCES, REGISTRY):
        monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    monkeypatch.setattr(METRICS, "_metrics", dict(METRICS._metrics))

    @MODALITIES.register("readings")
    @dataclass(frozen=True)
    class Readings(Drawn):
        """Six numbers from -3 to 5."""

        unit, primary, rule = "reading", "worst_error", "worst error below .1"

        def check_stored(self, where, stored):
            if stored.dtype != torch.float32 or stored.ndim != 2:
                raise DataError(f"{where} readings must be float32 [N, {COLUMNS}], got {stored.dtype}")

        def inputs_of(self, stored):
            return stored.clone()

        def start(self, shape, generator, *, dtype, device):
            return LOW + (HIGH - LOW) * torch.rand(tuple(shape), generator=generator, dtype=dtype, device=device)

        def project(self, inputs):
            return inputs.clamp(LOW, HIGH)

        def leak_rule(self, scores, blind):
            error = scores["worst_error"]
            return "error" if error < 0.1 and (blind is None or error < blind["worst_error"]) else None

        def render(self, examples):
            content, grey = io.BytesIO(), (self.repaired(examples) - LOW) / (HIGH - LOW) * 255
            PIL.Image.fromarray(grey.byte().cpu().numpy()).save(content, format="PNG")
            return content.getvalue()

        def rendered_size(self, input_shape, count):
            return input_shape[0], count

    METRICS.add(
        Metric(
            "worst_error",
            "Worst error",
            lambda originals, found: (originals - found).abs().amax(1).double(),
            better="lower",
            summary="The largest difference of any two numbers.",
            modalities=("readings",),
            low=0.0,
        )
    )

    @SOURCES.register("sensor")
    def sensor(sigma: float = 0.5) -> Dataset:
        generator = torch.Generator().manual_seed(0)
        targets = torch.arange(400) % 2
        centres = torch.tensor([[-1.0], [3.0]])
        inputs = (centres[targets] + sigma * torch.randn(400, COLUMNS, generator=generator)).clamp(LOW, HIGH)
        train, test = (Split(inputs[part], targets[part], Readings()) for part in (slice(300), slice(300, 400)))
        return Dataset("sensor", ("cold", "hot"), "a sensor", train, test)

    @REGISTRY.register("two-layers")
    class TwoLayers(nn.Sequential):
        """Two linear layers."""

        paper = "-"

        def __init__(self, *, input_shape, classes, width=12):
            super().__init__(nn.Linear(*input_shape, width), nn.Sigmoid(), nn.Linear(width, classes))

    @DEFENSES.register("halving")
    @dataclass(frozen=True, repr=False)
    class Halving(Perturbation):
        """Send a share of every value.

        Args:
            share: of every value.
        """

        paper, adds_noise = "-", False
        share_of_it: float = number(0.5, above=0, high=1)

        def perturb_rows(self, rows, draws):
            return self.share_of_it * rows

    class Descent(Optimiser):
        """Plain gradient descent with backtracking."""

        precision = torch.float64

        def minimise(self, objective, start, iterations, project, progress):
            everybody = torch.arange(len(start))
            candidates, sizes = start, torch.full((len(start),), 4.0, dtype=start.dtype)
            losses, slopes = objective(candidates, everybody)
            first = late = losses
            for _ in range(iterations):
                moved = project(candidates - sizes.view(-1, 1, 1) * slopes)
                new_losses, new_slopes = objective(moved, everybody)
                better = new_losses < losses
                candidates = torch.where(better.view(-1, 1, 1), moved, candidates)
                slopes = torch.where(better.view(-1, 1, 1), new_slopes, slopes)
                losses, sizes = torch.where(better, new_losses, losses), torch.where(better, 1.5 * sizes, sizes / 3)
            steps = torch.full((len(start),), iterations)
            return Solution(candidates, losses, steps, LossHistory(first, late, losses[:, None]))

    @ATTACKS.register("descent")
    @dataclass(frozen=True, repr=False)
    class ByDescent(Attack):
        """Match the gradient by an optimiser of one's own.

        Args:
            iterations: steps.
        """

        paper, adapts = "-", True
        iterations: int = integer(400, low=1)

        def run(self, problem):
            task = problem.task
            shape = (problem.victims, problem.examples, *task.input_shape)
            start = task.modality.start(shape, problem.generator, dtype=torch.float64, device=task.device)
            matching = Matching(list(problem.updates), SQUARED)
            return match(problem, start, Descent(), matching, iterations=self.iterations)


CONFIG = {
    "dataset": "sensor:sigma=0.4",
    "model": "two-layers:width=16",
    "defenses": ("none", "halving", "gaussian-noise:std=1"),
    "attacks": ("descent", "idlg:iterations=150"),
    "victims": 6,
    "rounds": 30,
    "clients": 2,
    "games": 10,
    "candidates": 20,
}


@pytest.mark.usefixtures("added")
def test_what_comes_from_outside_is_audited_to_a_report(tmp_path):
    config = AuditConfig(**CONFIG)
    folder = tmp_path / "out"
    run(config, folder)
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    attacked = [row for row in rows if row["attack"] == "descent" and not row["adaptive"]]
    assert {row["defense"] for row in attacked} == {"none", "halving", "gaussian-noise"}
    assert "psnr" not in rows[0]
    undefended = [row["worst_error"] for row in attacked if row["defense"] == "none"]
    noisy = [row["worst_error"] for row in attacked if row["defense"] == "gaussian-noise"]
    assert sorted(undefended)[3] < 0.1 < sorted(noisy)[3]
    assert sum(row["leaked"] for row in attacked if row["defense"] == "none") >= 4
    described = json.loads((folder / "config.json").read_text())
    assert (described["modality"], described["input_shape"]) == ("readings", [COLUMNS])
    # Resuming finds everything done.
    before = (folder / "results.jsonl").read_bytes()
    run(config, folder, resume=True)
    assert (folder / "results.jsonl").read_bytes() == before
    page = report.write(folder).read_text()
    for words in ("Worst error", "halving", "descent", "reading"):
        assert words in page
    assert "PSNR" not in page


@pytest.mark.usefixtures("added")
def test_without_what_was_added_the_folder_says_what_it_lacks(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    run(AuditConfig(**{**CONFIG, "attacks": ("idlg:iterations=1",), "defenses": ("none",), "rounds": 1}), folder)
    monkeypatch.undo()
    with pytest.raises((UnknownNameError, DataError), match="readings"):
        report.write(folder)
