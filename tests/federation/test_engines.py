"""Engines by name: gradveil's two, and one from outside."""

import dataclasses
import json
import types

import pytest

import gradveil
from gradveil import models
from gradveil.core.errors import InputError, ParameterError, UnknownNameError
from gradveil.federation import ENGINES, Engine, Training, train

QUICK = Training(rounds=3, clients=3, batch_size=8, lr=0.05)


@pytest.fixture
def half(monkeypatch):
    """Somebody else's engine, which runs half of the rounds and declares no capabilities."""
    monkeypatch.setattr(ENGINES, "_factories", dict(ENGINES._factories))

    @ENGINES.register("half")
    class Half(Engine):
        title = "the engine of half the rounds"

        def run(self, task, dataset, defense, training, *, progress=None, watch=None):
            rounds = training.rounds // 2
            return train(
                task, dataset, defense, dataclasses.replace(training, rounds=rounds), progress=progress, watch=watch
            )

    return Half


def task_for(dataset):
    shape = dataset.train.input_shape
    return gradveil.Task(models.create("mlp", input_shape=shape, classes=2), input_shape=shape, classes=2)


def test_the_local_engine_is_train(two_blobs):
    job = task_for(two_blobs), two_blobs, gradveil.defense("none"), QUICK
    seen = []
    result = ENGINES.create("local").train(*job, execution="loop", progress=lambda *done: seen.append(done))
    assert result.execution == "loop"
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert result.loss == train(*job, execution="loop").loss


def test_an_engine_from_outside_trains_on_the_command_line(half, capsys, monkeypatch):
    from gradveil import cli

    monkeypatch.setattr("sys.argv", "gradveil train --engine half --model mlp --rounds 4 --clients 3 --json".split())
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert len(json.loads(capsys.readouterr().out)["rounds"]) == 2
    for words in ("--execution loop", "--resume --out nowhere"):
        monkeypatch.setattr("sys.argv", ["gradveil", "train", "--engine", "half", *words.split()])
        with pytest.raises(SystemExit, match="2"):
            cli.main()
        assert f"{half.title} " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["checkpoint", "resume", "execution", "transport"])
def test_what_an_engine_does_not_declare_is_refused(half, two_blobs, option):
    job = task_for(two_blobs), two_blobs, gradveil.defense("none"), QUICK
    for engine in (half(), ENGINES.create("flower")):
        with pytest.raises(
            ParameterError, match=f"train: .* takes no {option}; leave it out or use the engine 'local'"
        ):
            engine.train(*job, **{option: None})


def test_a_device_that_an_engine_does_not_train_on_is_refused(half, two_blobs):
    task = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"))
    with pytest.raises(InputError, match="the engine of half the rounds trains on cpu, got a task on"):
        half().train(task, two_blobs, gradveil.defense("none"), QUICK)


def test_an_unknown_engine_is_named():
    with pytest.raises(UnknownNameError, match="unknown engine 'flour'; did you mean flower"):
        ENGINES.create("flour")
