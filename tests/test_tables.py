"""Tables all the way: every defense and attack, an audit to its report, training, and what new users get wrong."""

import dataclasses
import json
import os
import random
import re
import tempfile
import warnings

import pytest
import torch

import gradveil
from gradveil import data, metrics, report
from gradveil.attacks import ATTACKS, Reconstruction
from gradveil.attacks._restarts import ensembled
from gradveil.audit import AuditConfig, cases, run
from gradveil.audit._worker import dataset_from
from gradveil.audit.workers import share
from gradveil.cli import main
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.defenses import DEFENSES
from gradveil.models.fitted_evaluation import TableEvaluationNetwork, write_network

JOBS = ["baker", "clerk", "pilot", "<script>alert(1)</script>"]


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """A table of 400 people, whose income depends on their age and job."""
    draw, lines = random.Random(0), ["age,hours,job,city,income"]
    for _ in range(400):
        age, job = draw.randint(18, 80), draw.choice(JOBS)
        rich = age / 80 + (job == "pilot") + draw.gauss(0, 0.2) > 1
        cells = [age, f"{draw.gauss(40, 9):.1f}", job, draw.choice(["Bonn", "Ulm"]), ("low", "high")[rich]]
        lines.append(",".join(map(str, cells)))
    path = tmp_path_factory.mktemp("tables") / "people.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def loaded(people):
    return data.load(people, target="income")


@pytest.fixture(scope="module")
def task(loaded):
    return cases.build_task(loaded, "mlp")


@pytest.fixture(scope="module")
def network(loaded, tmp_path_factory):
    """An evaluation network for the table, as it is before its training."""
    path = tmp_path_factory.mktemp("network") / "rows.safetensors"
    torch.manual_seed(0)
    write_network(TableEvaluationNetwork(loaded.train.modality), path, {})
    return path


IMAGES_ONLY = {"ats": "ats: transforms work on images"}


@pytest.mark.parametrize("name", DEFENSES.names())
def test_every_defense_runs_on_rows_or_says_that_it_cannot(name, loaded, task, network):
    spec = f"refiner:network={network}" if name == "refiner" else name
    rows, labels = loaded.train.batch(range(3))
    public = loaded.train.batch(range(100, 200))

    def shared():
        prepared = cases.prepare(task, gradveil.defense(spec), gradveil.attack("idlg"), public=public, seed=0)
        defense, generator = prepared.defense, torch.Generator().manual_seed(0)
        announced = None
        if defense.announces:
            announced = defense.announce(prepared.task, *loaded.train.batch(range(50, 53)), generator=generator)
        return defense.share(prepared.task, rows, labels, generator=generator, memory={}, announced=announced)

    if name in IMAGES_ONLY:
        with pytest.raises(InputError, match=IMAGES_ONLY[name]) as refused:
            shared()
        assert "\n" not in str(refused.value)
    else:
        assert all(value.isfinite().all() for value in shared().values())


NO_ROWS = {
    "april": "needs images, got table inputs",
    "dager": "needs a model of text",
    "ci-net": "needs images",
    "ggl": "needs a generator of images",
    "gias": "needs a generator of images",
    "loki": "sorts images by their brightness, got a task on table inputs",
    "robbing-the-fed": "sorts images by their brightness, got a task on table inputs",
}
QUICK = {
    "lti": {"directions": 20, "draws": 1, "hidden": 16, "epochs": 2},
    "mjolnir": {"iterations": 2, "directions": 20, "draws": 1, "epochs": 2},
}
REBUILDING = [name for name in ATTACKS.names() if gradveil.attack(name).finds is Reconstruction]


@pytest.mark.parametrize("name", REBUILDING)
def test_every_attack_rebuilds_rows_or_says_that_it_cannot(name, loaded, task):
    modality, public = loaded.train.modality, loaded.train.batch(range(100, 200))
    rows, labels = loaded.train.batch([0])
    attack = gradveil.attack(name)
    short = {"iterations": 2} if "iterations" in attack.parameters else {}
    attack = dataclasses.replace(attack, **{**short, **QUICK.get(name, {})})
    needs = attack.needs_public or attack.server == "active"
    threat = gradveil.ThreatModel(public=public if needs else None, server=attack.server)
    generator = torch.Generator().manual_seed(0)

    def found():
        fitted = attack.fit(task, threat, generator=generator)
        sent = fitted.modify(task) if attack.server == "active" else task
        update = gradveil.defense("none").share(sent, rows, labels)
        return fitted.reconstruct(sent, update, threat, generator=generator)

    if name in NO_ROWS:
        with pytest.raises((InputError, ThreatModelError), match=NO_ROWS[name]) as refused:
            found()
        assert "\n" not in str(refused.value)
        return
    inputs = found().inputs[0]
    assert inputs.shape == rows.shape
    assert torch.equal(modality.decode(inputs), inputs)  # categories are decided


def test_a_table_is_audited_to_a_report(people, tmp_path):
    config = AuditConfig(
        dataset=f"{people}:target=income",
        model="mlp",
        defenses=("none", "gaussian-noise:std=0.3"),
        attacks=("idlg:iterations=60",),
        victims=4,
        adaptive=False,
        rounds=2,
        clients=2,
        games=8,
        candidates=20,
    )
    run(config, tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    by_defense = {
        defense: [row["cells"] for row in rows if row["defense"] == defense and not row["adaptive"]]
        for defense in (None, "none", "gaussian-noise")
    }
    assert by_defense["none"] == [100] * 4
    assert sum(by_defense["gaussian-noise"]) < 400
    assert all(row["leaked"] and row["leak_rule"] == "cells" for row in rows if row["defense"] == "none")
    assert not any(row["leaked"] for row in rows if row["defense"] is None)
    named = [json.loads(line) for line in (tmp_path / "out/identification.jsonl").read_text().splitlines()]
    assert next(row["named"] for row in named if row["defense_spec"] == "none") == 8
    page = report.write(tmp_path / "out").read_text()
    assert "Without a defense, idlg recovers 4 of 4 rows (median 100 %)." in report.verdict(tmp_path / "out")
    assert "<script>alert(1)" not in page
    assert '<th scope="col">hours</th>' in page
    assert "numeric: age, hours; categorical: job, city; target: income" in page
    columns = (tmp_path / "out/attacks.csv").read_text().splitlines()[0]
    assert "Cells %" in columns
    assert (tmp_path / "out/overview.png").is_file()


def test_refiner_is_audited_on_rows_plain_and_adaptive(people, network, tmp_path):
    config = AuditConfig(
        dataset=f"{people}:target=income",
        model="mlp",
        defenses=("none", f"refiner:epsilon=100,network={network}"),
        attacks=("idlg:iterations=30",),
        victims=3,
        rounds=2,
        clients=2,
        games=0,
    )
    run(config, tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    refined = [row for row in rows if row["defense"] == "refiner"]
    assert sorted(row["adaptive"] for row in refined) == [False] * 3 + [True] * 3
    # The client trains on blends with random rows, and these are what the plain attack finds.
    plain = [row for row in refined if not row["adaptive"]]
    cells = sum(row["cells"] for row in plain)
    assert cells < 100 * len(plain)
    assert cells < sum(row["trained_on"]["cells"] for row in plain)


def test_worker_processes_get_the_columns_too(loaded):
    with tempfile.TemporaryFile() as file:
        described = json.loads(json.dumps(share(loaded, file)))
        described["file"] = os.dup(described["file"])
        received = dataset_from(described)
    assert received.train.modality == loaded.train.modality
    assert torch.equal(received.train.inputs, loaded.train.inputs)


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["gradveil", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return ended.value.code, captured.out, " ".join(captured.err.split())


class TestCommands:
    @pytest.fixture(autouse=True)
    def warnings_as_before(self, monkeypatch):
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main sets its own

    def test_train_takes_a_target_and_a_model_for_rows(self, monkeypatch, capsys, people):
        words = ("--rounds", "20", "--clients", "3", "--lr", "0.2", "--json")
        code, out, _ = command(monkeypatch, capsys, "train", "--dataset", people, "--target", "income", *words)
        assert code == 0
        trained = json.loads(out)
        assert (trained["model"], trained["dataset"]) == ("mlp", f"{people}:target=income")
        assert trained["accuracy"] > 0.75

    def test_audit_takes_a_model_for_rows(self, monkeypatch, capsys, people, tmp_path):
        words = ("--dataset", people, "--target", "income", "--victims", "100", "--out", tmp_path / "out")
        code, _, err = command(monkeypatch, capsys, "audit", *words)
        assert code == 2
        assert "audit: 100 victims of 1 rows need 100 of them, the test split has 80" in err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ((), "expected the name of the column to predict, got none; use --target with one of age, hours, job"),
            (("--target", "pay"), "expected a column called 'pay', got none; known: age, city, hours, income, job"),
            (("--target", "a,b"), "--target must be the name of a column, without commas, got 'a,b'"),
            (("--target", "income", "--model", "lenet"), r"lenet: input_shape must be \(channels, height, width\)"),
        ],
    )
    @pytest.mark.parametrize("kind", ["audit", "train"])
    def test_one_line_for_what_is_wrong(self, monkeypatch, capsys, people, kind, words, message):
        code, _, err = command(monkeypatch, capsys, kind, "--dataset", people, *words)
        assert code == 2
        assert "Traceback" not in err
        assert re.search(message, err), err


def test_in_a_batch_random_rows_are_guesses_too(loaded):
    """With the seed's draws, nothing beats what is typical or drawn; a single row is compared with what is typical."""
    modality, train = loaded.train.modality, loaded.train
    scorer = metrics.Scorer(modality)
    for batch_size in (1, 6):
        victims = cases.choose_victims(loaded.test, 5, batch_size, clients=1, seed=0)
        guess = modality.blind(train.inputs, train.targets, victims.targets.flatten(), 2).view_as(victims.inputs)
        typical = scorer.blind_scores(victims.inputs.flatten(0, 1), guess.flatten(0, 1))["cells"].view(5, -1)
        best = cases.blind_scores(scorer, train, victims, guess)["cells"]
        assert torch.equal(best, typical) if batch_size == 1 else (best >= typical).all()
    assert best.mean() > typical.mean() + 10
    exact = [
        scorer.score(x, x.flip(0), y, y.flip(0), {"cells": b})
        for x, y, b in zip(victims.inputs, victims.targets, best, strict=True)
    ]
    assert all(score["leaked"] for score in exact)


def test_images_are_compared_with_their_class_mean_alone():
    digits = data.load("mnist")
    victims = cases.choose_victims(digits.test, 2, 3, clients=1, seed=0)
    train, scorer = digits.train, metrics.Scorer()
    guess = train.modality.blind(train.inputs, train.targets, victims.targets.flatten(), 10).view_as(victims.inputs)
    alone = scorer.blind_scores(victims.inputs.flatten(0, 1), guess.flatten(0, 1))
    found = cases.blind_scores(scorer, train, victims, guess)
    assert all(torch.equal(found[name].flatten(), scores) for name, scores in alone.items())


def test_restarts_that_are_as_good_are_averaged(loaded):
    modality = loaded.train.modality
    truth, _ = loaded.train.batch([0, 1])
    soft = modality.project(truth + torch.randn(3, *truth.shape, generator=torch.Generator().manual_seed(0)) / 4)
    tensors = torch.stack([soft[0], soft[1].flip(0), soft[2]])  # in one restart the rows are in another order
    labels, steps = torch.zeros(3, 2, dtype=torch.long), torch.ones(3, dtype=torch.long)
    for losses, kept in (([1.0, 1.001, 1.002], [0, 1, 2]), ([1.0, 1.5, 1.009], [0, 2]), ([3.0, 3.2, 3.4], [0])):
        found = Reconstruction(tensors, labels, torch.tensor(losses), steps)
        (result,) = ensembled(found, torch.tensor([0]), 3, modality)
        torch.testing.assert_close(result, soft[kept].mean(0))
        assert torch.allclose(modality.project(result), result, atol=1e-6)
