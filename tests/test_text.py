"""Text all the way: an audit to its report, training, workers, and what new users get wrong."""

import json
import os
import random
import tempfile
import warnings

import pytest
import torch

import gradveil
from gradveil import data, report
from gradveil.audit import AuditConfig, cases, run
from gradveil.audit._worker import dataset_from
from gradveil.audit.run import Subject
from gradveil.audit.workers import share
from gradveil.cli import main
from gradveil.core.errors import InputError
from gradveil.federation import Training, train

WORDS = ["film", "plot", "actor", "<script>alert(1)</script>", "&amp;", "scene", "joke", "ending"]
MODEL = "text-transformer:width=8,depth=1,heads=2"


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """400 short reviews, whose label follows from one of their words."""
    draw, lines = random.Random(0), []
    for _ in range(400):
        label = draw.choice(["bad", "good"])
        words = [*draw.sample(WORDS, draw.randint(1, 4)), {"bad": "dull", "good": "great"}[label]]
        draw.shuffle(words)
        lines.append(json.dumps({"text": " ".join(words), "label": label}))
    path = tmp_path_factory.mktemp("texts") / "films.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def config_of(films, **changes):
    settings = {
        "dataset": f"{films}:length=6",
        "model": MODEL,
        "defenses": ("top-k:keep=0.1",),
        "attacks": ("idlg:iterations=30", "tag:iterations=3"),
        "victims": 2,
        "rounds": 2,
        "clients": 2,
        "games": 2,
        "candidates": 4,
        "adaptive": False,
    }
    return AuditConfig(**{**settings, **changes})


def test_texts_are_audited_to_a_report(films, tmp_path):
    run(config_of(films), tmp_path / "audit")
    page = report.write(tmp_path / "audit").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    for words in ("ROUGE-1", "Token recall", "the most frequent public words of the class", "<mark>", "was withheld"):
        assert words in page
    rows = [json.loads(line) for line in (tmp_path / "audit" / "results.jsonl").read_text().splitlines()]
    found = [row for row in rows if row["attack"] == "idlg" and row["defense"] == "none"]
    assert all(row["token_recall"] > 0.5 for row in found)
    assert "sentence" in {row["leak_rule"] for row in found}


def test_the_audit_says_that_a_shared_embedding_gives_the_words_away(films):
    withheld, shared = (Subject.of(config_of(films, shared=shared)) for shared in (None, "*"))
    assert withheld.describe()["disclosed"] == []
    (sentence,) = shared.describe()["disclosed"]
    assert "the embedding `model.embedding.weight`" in sentence
    assert "bag of words" in sentence
    assert "model.embedding.weight" not in withheld.task.parameters
    some = Subject.of(config_of(films, shared="blocks*,classifier*"))
    assert some.describe()["disclosed"] == []


def test_workers_get_the_same_words(films):
    loaded = data.load(films, length=6)
    with tempfile.TemporaryFile() as file:
        shared = json.loads(json.dumps(share(loaded, file)))
        shared["file"] = os.dup(shared["file"])
        again = dataset_from(shared)
    assert again.train.modality == loaded.train.modality
    assert torch.equal(again.test.inputs, loaded.test.inputs)


def test_a_model_learns_and_what_it_learns_is_what_plain_training_learns(films):
    loaded = data.load(films, length=6)
    task = cases.build_task(loaded, "text-embedding:width=16,hidden=16")
    training = Training(rounds=60, clients=4, batch_size=30, lr=0.5, momentum=0.9)
    result = train(task, loaded, gradveil.defense("none"), training)
    assert result.accuracy > 0.9


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main sets its own
    monkeypatch.setattr("sys.argv", ["gradveil", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return ended.value.code, captured.out, " ".join(captured.err.split())


def test_train_takes_a_model_for_text(films, capsys, monkeypatch):
    words = ("--rounds", "2", "--clients", "2", "--json")
    code, out, _ = command(monkeypatch, capsys, "train", "--dataset", f"{films}:length=6", *words)
    assert code == 0
    assert json.loads(out)["model"] == "text-transformer"


def test_audit_takes_attacks_for_text(films, capsys, monkeypatch, tmp_path):
    words = ("--dataset", f"{films}:length=6", "--victims", "1", "--dry-run", "--out", tmp_path / "audit", "--json")
    code, out, _ = command(monkeypatch, capsys, "audit", *words, "--rounds", "2", "--games", "0")
    assert code == 0
    attacks = {piece["what"].split()[0] for piece in json.loads(out)["pieces"] if "against" in piece["what"]}
    assert attacks == {"auto"}


def test_a_model_of_ones_own(films, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\n"
        "def model(input_shape, classes, vocabulary, padding):\n"
        "    return nn.Sequential(nn.Embedding(vocabulary, 4), nn.Flatten(), nn.Linear(4 * input_shape[0], classes))\n"
        "def small(input_shape, classes, vocabulary, padding):\n"
        "    return model(input_shape, classes, 5, padding)\n"
        "def deaf(input_shape, classes, **others):\n"
        "    return nn.Sequential(nn.Linear(input_shape[0], classes))\n"
    )
    loaded = data.load(films, length=6)
    assert list(cases.build_task(loaded, f"{path}@model").parameters) == ["model.2.weight", "model.2.bias"]
    with pytest.raises(InputError, match="a row for each of the 12 tokens of the data, got '0' with 5; enlarge it"):
        cases.build_task(loaded, f"{path}@small")
    with pytest.raises(InputError, match="nn.Embedding that is applied to the token ids, got none"):
        cases.build_task(loaded, f"{path}@deaf")
    with pytest.raises(InputError, match="lenet: expected images, got token ids; use one of .*text-embedding"):
        cases.build_task(loaded, "lenet")
