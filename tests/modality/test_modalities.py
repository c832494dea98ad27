"""Checks for every modality, including a toy one from outside the package: rows of four numbers, each in its range."""

import io
import json
import math
from dataclasses import dataclass

import PIL.Image
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradveil
from gradveil.core.errors import DataError, ThreatModelError, UnknownNameError
from gradveil.data import Dataset, Split
from gradveil.federation import Training, train
from gradveil.federation.job import evaluate, performance_maintenance
from gradveil.modality import IMAGE, MODALITIES, Column, Drawn, Table, Text, Words
from gradveil.modality.written import from_file

LOW, HIGH = torch.tensor([-3.0, 0.0, 10.0, -1.0]), torch.tensor([5.0, 1.0, 20.0, 1.0])


@dataclass(frozen=True)
class Vector(Drawn):
    """Four numbers, stored unchanged, each with its own range."""

    name, unit, primary, rule = "vector", "row", "mse", "mean squared error of at most .1"

    def check_stored(self, where, stored):
        if stored.dtype != torch.float32 or stored.shape[1:] != LOW.shape:
            raise DataError(f"{where} rows must be float32 [N, 4], got {stored.dtype} {list(stored.shape)}")

    def inputs_of(self, stored):
        return stored.clone()

    def start(self, shape, generator, *, dtype, device):
        drawn = torch.rand(tuple(shape), generator=generator, dtype=dtype, device=device)
        return LOW.to(drawn) + (HIGH - LOW).to(drawn) * drawn

    def project(self, inputs):
        return inputs.clamp(LOW.to(inputs), HIGH.to(inputs))

    def leak_rule(self, scores, blind):
        return "error" if scores["mse"] <= 0.1 and (blind is None or scores["mse"] < blind["mse"] / 2) else None

    def render(self, examples):
        content, grey = io.BytesIO(), (self.repaired(examples) - LOW) / (HIGH - LOW) * 255
        PIL.Image.fromarray(grey.byte().numpy()).save(content, format="PNG")
        return content.getvalue()

    def rendered_size(self, input_shape, count):
        return input_shape[0], count


def stored_rows(count):
    return Vector().start((count, 4), torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu")


def stored_images(count):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, 5, 4), generator=generator, dtype=torch.uint8)


TABLE = Table(
    columns=(Column("age", -3, 5), Column("job", categories=("a", "b", "c")), Column("pay", 0, 0.5, shares=()))
)


def stored_cells(count):
    numbers = Table(columns=TABLE.columns[::2]).start(
        (count, 2), torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu"
    )
    return torch.stack([8 * numbers[:, 0] - 3, torch.arange(count) % 3, numbers[:, 1] / 2], 1)


TEXT = Text(Words(tuple("abcdefgh")), torch.randn(10, 4, generator=torch.Generator().manual_seed(2)))
SENTENCES = torch.tensor(
    [[2, 3, 0], [4, 4, 5], [6, 0, 0], [7, 2, 8], [9, 1, 0], [3, 3, 3], [5, 9, 2], [8, 0, 0], [1, 4, 6]]
)


@pytest.mark.parametrize(
    ("modality", "stored"),
    [(IMAGE, stored_images(9)), (Vector(), stored_rows(9)), (TABLE, stored_cells(9)), (TEXT, SENTENCES)],
    ids=lambda value: getattr(value, "name", ""),
)
class TestEveryModality:
    def test_describes_itself(self, modality, stored):
        assert modality == type(modality)().with_settings(json.loads(json.dumps(dict(modality.settings))))
        assert all(isinstance(word, str) and word for word in (modality.name, modality.unit, modality.primary))

    def test_stored_examples_are_inputs_in_range(self, modality, stored):
        modality.check_stored("here:", stored)
        inputs = modality.inputs_of(stored)
        assert inputs.is_floating_point()
        assert inputs.shape == (len(stored), *modality.input_shape(stored.shape[1:]))
        assert torch.equal(modality.project(inputs), inputs)
        assert torch.equal(modality.decode(inputs), inputs)
        with pytest.raises(DataError, match="^here: "):
            modality.check_stored("here:", stored.to(torch.int16))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_searches_begin_and_stay_in_range(self, modality, stored, dtype):
        shape = (2, 3, *modality.input_shape(stored.shape[1:]))
        first, again = (
            modality.start(shape, torch.Generator().manual_seed(5), dtype=dtype, device=torch.device("cpu"))
            for _ in range(2)
        )
        assert (first.shape, first.dtype) == (shape, dtype)
        assert torch.equal(first, again)
        assert torch.equal(modality.project(first), first)
        far = modality.project(first * 1000 - 500)
        assert torch.equal(modality.project(far), far)
        assert torch.isnan(modality.project(torch.full_like(first, torch.nan))).all()

    def test_any_output_of_an_attack_can_be_scored_and_shown(self, modality, stored):
        found = modality.inputs_of(stored)
        found[0], found[1], found[2] = torch.nan, torch.inf, -torch.inf
        repaired = modality.repaired(found)
        assert torch.isfinite(repaired).all()
        assert torch.equal(modality.project(repaired), repaired)
        assert torch.equal(repaired[3:], found[3:])
        content = modality.show(found, modality.inputs_of(stored))
        if isinstance(modality, Drawn):
            with PIL.Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
                assert picture.size == modality.rendered_size(stored.shape[1:], len(stored))
        else:
            shown = from_file(content)
            assert len(shown) == len(stored)
            assert all(fragment.recovered for example in shown[3:] for fragment in example)

    def test_what_is_matched_and_compared_is_the_same_example(self, modality, stored):
        inputs = modality.inputs_of(stored)
        distances = modality.distances(inputs, inputs.flip(0))
        assert distances.shape == (len(stored), len(stored))
        assert torch.equal(distances.argmin(1), torch.arange(len(stored)).flip(0))
        assert len(modality.compared(inputs)) == len(stored)

    def test_probes_are_always_the_same_inputs(self, modality, stored):
        shape = modality.input_shape(stored.shape[1:])
        probe = modality.probe(2, shape, dtype=torch.float64, device=torch.device("cpu"))
        assert (probe.shape, probe.dtype) == ((2, *shape), torch.float64)
        assert torch.equal(probe, modality.probe(2, shape, dtype=torch.float64, device=torch.device("cpu")))
        assert torch.equal(probe.float(), modality.probe(2, shape, dtype=torch.float32, device=torch.device("cpu")))

    def test_a_prior_is_a_differentiable_number_or_nothing(self, modality, stored):
        inputs = modality.inputs_of(stored).requires_grad_()
        for rounding in (0.0, 0.01):
            prior = modality.prior(inputs, rounding=rounding)
            assert prior is None or (prior.ndim == 0 and torch.autograd.grad(prior, inputs)[0].isfinite().all())

    def test_the_blind_guess_is_an_input_for_each_victim(self, modality, stored):
        targets, wanted = torch.arange(9) % 3, torch.tensor([2, 0, 2])
        guess = modality.blind(stored, targets, wanted, 3)
        expected = torch.stack([modality.typical(stored[targets == label]) for label in wanted.tolist()])
        torch.testing.assert_close(guess, expected)
        assert torch.equal(modality.project(guess), guess)
        everything = modality.blind(stored, torch.rand(9, 2), torch.rand(4, 2), None)
        torch.testing.assert_close(everything, modality.typical(stored).expand(4, *guess.shape[1:]))
        if isinstance(modality, Drawn):
            torch.testing.assert_close(modality.typical(stored), modality.inputs_of(stored).mean(0))


def test_other_modalities_can_be_registered(monkeypatch):
    monkeypatch.setattr(MODALITIES, "_factories", dict(MODALITIES._factories))
    MODALITIES.register("vector")(Vector)
    assert MODALITIES.create("vector") == Vector()
    with pytest.raises(UnknownNameError, match="unknown modality 'imgae'; did you mean image"):
        MODALITIES.get("imgae")


# -- a data set of rows, and tasks on it ------------------------------------------------------------------------


def rows_dataset(targets_of, classes=()):
    rows = stored_rows(400)
    train_rows, test_rows = rows[:300], rows[300:]
    return Dataset(
        "rows",
        classes,
        "made by the test",
        Split(train_rows, targets_of(train_rows), Vector()),
        Split(test_rows, targets_of(test_rows), Vector()),
    )


NORMALISATION = {"mean": ((LOW + HIGH) / 2).tolist(), "std": ((HIGH - LOW) / 2).tolist()}
QUICK = Training(rounds=60, clients=4, batch_size=30, lr=0.5, evaluate_every=30, seed=3)


def test_a_task_is_tried_on_inputs_in_the_modalitys_range():
    seen = []

    class Watching(nn.Linear):
        def forward(self, x):
            seen.append(x.detach())
            return super().forward(x)

    task = gradveil.Task(Watching(4, 2), input_shape=(4,), classes=2, modality=Vector())
    assert task.modality == Vector()
    assert seen
    assert all(torch.equal(Vector().project(probe), probe) for probe in seen)
    assert task.with_model(task.copy_model()).modality == Vector()


def test_splits_refuse_rows_of_the_wrong_type_or_shape():
    split = Split(torch.zeros(2, 3), torch.zeros(2), Vector())
    with pytest.raises(DataError, match=r"^rows.csv: train rows must be float32 \[N, 4\], got torch.float32 \[2, 3\]"):
        Dataset("rows", (), "rows.csv", split, split)
    rows = Split(torch.zeros(2, 4), torch.zeros(2).long(), Vector())
    with pytest.raises(DataError, match="train and test must be of one modality"):
        Dataset("rows", ("a",), "both", rows, Split(torch.zeros(2, 1, 2, 2).byte(), torch.zeros(2).long()))
    with pytest.raises(DataError, match="test must have one label per row, got 2 rows and 1 labels"):
        Dataset("rows", ("a",), "odd", rows, Split(rows.inputs, rows.targets[:1], Vector()))


@pytest.mark.parametrize("execution", ["loop", "batch"])
def test_a_classifier_of_rows_trains(execution):
    dataset = rows_dataset(lambda rows: (rows[:, 0] > 1).long(), ("low", "high"))
    task = gradveil.Task(nn.Linear(4, 2), input_shape=(4,), classes=2, modality=Vector(), **NORMALISATION)
    result = train(task, dataset, gradveil.defense("none"), QUICK, execution=execution)
    assert result.accuracy > 0.9


@pytest.mark.parametrize("execution", ["loop", "batch"])
def test_a_regression_trains_and_has_no_accuracy(execution, tmp_path):
    dataset = rows_dataset(lambda rows: torch.stack([rows[:, 0] / 8, rows[:, 3] + rows[:, 1]], 1))
    model = nn.Linear(4, 2)
    task = gradveil.Task(model, F.mse_loss, input_shape=(4,), classes=None, modality=Vector(), **NORMALISATION)
    before = evaluate(task, dataset.test)[1]
    options = {"execution": execution, "checkpoint": tmp_path / "run"}
    result = train(task, dataset, gradveil.defense("gaussian-noise", std=1e-4), QUICK, **options)
    assert result.loss < before / 100
    assert math.isnan(result.accuracy)
    assert all(record.accuracy is None for record in result.rounds)
    assert performance_maintenance(result.accuracy, result.accuracy, dataset.test) is None
    again = train(task, dataset, gradveil.defense("gaussian-noise", std=1e-4), QUICK, resume=True, **options)
    assert again.loss == result.loss


@pytest.mark.parametrize("execution", ["loop", "batch"])
def test_a_classifier_of_positions_trains_and_counts_positions(execution):
    dataset = rows_dataset(lambda rows: (rows > (LOW + HIGH) / 2).long(), ("low", "high"))
    model = nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)))
    task = gradveil.Task(model, input_shape=(4,), classes=2, modality=Vector(), **NORMALISATION)
    result = train(task, dataset, gradveil.defense("none"), QUICK, execution=execution)
    inputs, labels = dataset.test.batch(range(100))
    correct = result.task.predict(inputs).argmax(1) == labels
    assert result.accuracy == pytest.approx(float(correct.float().mean()))
    assert result.accuracy > 0.9
    chance = float(labels.flatten().bincount().max()) / 400
    assert performance_maintenance(0.9, chance + 0.2, dataset.test) == pytest.approx(0.9 / (chance + 0.2))


@pytest.mark.parametrize("targets_of", [lambda rows: rows.sum(1, keepdim=True) / 9, lambda rows: (rows > 1).long()])
def test_attacks_recover_inputs_from_known_targets_of_any_shape(targets_of):
    torch.manual_seed(0)
    rows = stored_rows(3)
    targets = targets_of(rows)
    classes = None if targets.is_floating_point() else 2
    head = nn.Linear(16, 1) if classes is None else nn.Sequential(nn.Linear(16, 8), nn.Unflatten(1, (2, 4)))
    task = gradveil.Task(
        nn.Sequential(nn.Linear(4, 16), nn.Sigmoid(), head),
        F.mse_loss if classes is None else "cross-entropy",
        input_shape=(4,),
        classes=classes,
        modality=Vector(),
        **NORMALISATION,
    )
    updates = [gradveil.defense("none").share(task, rows[i : i + 1], targets[i : i + 1]) for i in range(3)]
    threat = gradveil.ThreatModel(labels="known", known_labels=targets[:, None])
    attack = gradveil.attack("idlg", iterations=200, restarts=2)
    found = attack.reconstruct(task, updates, threat, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.inputs[:, 0], rows, rtol=0, atol=0.05)
    with pytest.raises(ThreatModelError, match=r"use ThreatModel\(labels='known'"):
        attack.reconstruct(task, updates, gradveil.ThreatModel())
