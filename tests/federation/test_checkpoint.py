"""Kill and resume: the identical end. Run as a script, this file is the training that gets killed."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradveil
from gradveil import models
from gradveil.data import Dataset, Split
from gradveil.errors import DataError, OutputError
from gradveil.federation import Training, train
from gradveil.federation.checkpoint import FILE
from gradveil.federation.storage import save_atomically

TRAINING = Training(
    rounds=10,
    clients=6,
    clients_per_round=3,
    batch_size=8,
    lr=0.05,
    optimiser="adam",
    schedule="cosine",
    evaluate_every=2,
    checkpoint_every=3,
    seed=4,
)
RAM = 20_000  # bytes: of the residuals of six clients, two fit


def blobs() -> Dataset:
    generator = torch.Generator().manual_seed(1)

    def split(count: int) -> Split:
        images = torch.randint(0, 256, (count, 1, 8, 8), generator=generator).to(torch.uint8)
        return Split(images, images.float().mean((1, 2, 3)).gt(127).long())

    return Dataset("blobs", ("dark", "bright"), "made by the test", split(220), split(40))


def run(folder: Path | None, *, resume=False, defense="top-k:keep=0.1+error-feedback", training=TRAINING, **options):
    model = models.create("mlp", input_shape=(1, 8, 8), classes=2)
    task = gradveil.Task(model, input_shape=(1, 8, 8), classes=2)
    chosen = gradveil.defense(defense)
    return train(task, blobs(), chosen, training, checkpoint=folder, resume=resume, ram_bytes=RAM, **options)


def assert_identical(one, other):
    for name, value in one.task.parameters.items():
        assert torch.equal(value, other.task.parameters[name])
    assert (one.accuracy, one.loss, one.history) == (other.accuracy, other.loss, other.history)
    assert [r.loss for r in one.rounds] == [r.loss for r in other.rounds]
    assert [r.upload_bytes for r in one.rounds] == [r.upload_bytes for r in other.rounds]


@pytest.mark.slow
def test_kill_and_resume_give_the_identical_weights(tmp_path):
    """The process dies by SIGKILL after round 8; round 6 was saved, and memories of later rounds lie on disk."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / FILE).exists()
    seen = []
    resumed = run(tmp_path, resume=True, watch=lambda record: seen.append(record.round))
    assert seen == [6, 7, 8, 9]
    assert_identical(run(None), resumed)


class Crash(Exception):
    pass


@pytest.mark.parametrize("fatal", range(1, 30, 4))
def test_a_crash_in_the_middle_of_any_write_loses_nothing(tmp_path, monkeypatch, fatal):
    """The n-th file is written but never gets its name; then the training goes on."""
    replace, count = os.replace, 0

    def crash(*arguments):
        nonlocal count
        count += 1
        if count == fatal:
            raise Crash
        replace(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", crash)
        with pytest.raises(Crash):
            run(tmp_path)
    assert_identical(run(None), run(tmp_path, resume=True))


def test_a_finished_training_is_not_run_again(tmp_path):
    first = run(tmp_path)
    again = run(tmp_path, resume=True, watch=lambda record: pytest.fail(f"ran {record}"))
    assert_identical(first, again)
    assert again.rounds == first.rounds
    assert again.faults == first.faults


def test_only_the_files_of_the_checkpoint_are_left(tmp_path):
    run(tmp_path)
    files = sorted(path.name.split("-")[1] for path in (tmp_path / "memories").iterdir())
    assert files == sorted(set(files))  # one a client
    assert 1 <= len(files) <= TRAINING.clients


def test_another_training_is_refused(tmp_path):
    run(tmp_path, training=dataclasses.replace(TRAINING, rounds=2))
    with pytest.raises(OutputError, match="holds a training already; go on with resume"):
        run(tmp_path)
    with pytest.raises(OutputError, match="holds another training: rounds was 2, is 10"):
        run(tmp_path, resume=True)
    with pytest.raises(OutputError, match="defense was top-k:keep=0.1.error-feedback, is none"):
        run(tmp_path, resume=True, defense="none", training=dataclasses.replace(TRAINING, rounds=2))


def test_other_images_or_another_version_are_refused(tmp_path, monkeypatch):
    short = dataclasses.replace(TRAINING, rounds=2)
    run(tmp_path, training=short)
    with monkeypatch.context() as patched:
        patched.setattr(gradveil, "__version__", "99")
        with pytest.raises(OutputError, match=r"gradveil was .*, is 99; choose another"):
            run(tmp_path, resume=True, training=short)
    other = blobs()
    other.train.images[-1, 0, 0, 0] ^= 1
    monkeypatch.setitem(globals(), "blobs", lambda: other)
    with pytest.raises(OutputError, match=r"holds another training: data was \w{16}, is \w{16}; choose another"):
        run(tmp_path, resume=True, training=short)


def test_another_model_normalisation_or_loss_at_the_same_weights_is_refused(tmp_path):
    short = dataclasses.replace(TRAINING, rounds=1)

    def go_on(activation=torch.nn.ReLU, loss="cross-entropy", **normalisation):
        torch.manual_seed(0)
        linear = torch.nn.Linear(64, 4), torch.nn.Linear(4, 2)
        model = torch.nn.Sequential(torch.nn.Flatten(), linear[0], activation(), linear[1])
        task = gradveil.Task(model, loss, input_shape=(1, 8, 8), classes=2, **normalisation)
        return train(task, blobs(), gradveil.defense("none"), short, checkpoint=tmp_path, resume=True)

    def squared(outputs, labels):
        return (outputs.gather(1, labels[:, None]) - 1).square().mean()

    go_on()
    go_on()
    for other in ({"activation": torch.nn.Tanh}, {"mean": [0.5], "std": [0.5]}, {"loss": squared}):
        with pytest.raises(OutputError, match=r"holds another training: model was \w{16}, is \w{16}; choose another"):
            go_on(**other)


def test_resume_without_a_checkpoint_starts_at_the_beginning(tmp_path):
    assert len(run(tmp_path / "new", resume=True).rounds) == TRAINING.rounds


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"{}"])
def test_a_broken_checkpoint_is_refused(tmp_path, content):
    run(tmp_path, training=dataclasses.replace(TRAINING, rounds=2))
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(DataError, match="expected a file that gradveil wrote"):
        run(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("about", "words"),
    [([1, 2], "expected checkpoint version 1, got None"), ({"version": 1}, "got a damaged one .KeyError.'identity'")],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, about, words):
    save_atomically(tmp_path / FILE, {"w": torch.ones(1)}, about)
    with pytest.raises(DataError, match=words):
        run(tmp_path, resume=True)


def test_a_lost_memory_is_noticed(tmp_path):
    run(tmp_path, training=dataclasses.replace(TRAINING, rounds=4))
    next((tmp_path / "memories").iterdir()).unlink()
    with pytest.raises(DataError, match="beside the checkpoint, got no such file"):
        run(tmp_path, resume=True, training=dataclasses.replace(TRAINING, rounds=4))


def die(record) -> None:
    if record.round == 8:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), watch=die)
