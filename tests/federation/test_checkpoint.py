"""A killed and resumed training ends identically. Run as a script, this file is the training that gets killed."""

import dataclasses
import errno
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradveil
from gradveil import models
from gradveil.core.errors import DataError, OutputError, ParameterError
from gradveil.core.storage import load, save_atomically
from gradveil.data import Dataset, Split
from gradveil.defenses.base import StepDefense
from gradveil.federation import Training, train
from gradveil.federation.checkpoint import FILE
from gradveil.federation.training import choose_clients

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
RAM = 20_000  # bytes: enough for the residuals of two of the six clients


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


def test_a_task_without_classes_is_resumed_from_its_checkpoint(tmp_path):
    """It has no accuracy, whatever the training says about evaluations."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 1))
    task = gradveil.Task(
        model, lambda out, y: (out[:, 0] - y.to(out)).square().mean(), input_shape=(1, 8, 8), classes=None
    )
    job = task, blobs(), gradveil.defense("none"), dataclasses.replace(TRAINING, lr=0.01)

    def stop(record):
        if record.round == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(*job, checkpoint=tmp_path, watch=stop)
    resumed, uninterrupted = train(*job, checkpoint=tmp_path, resume=True), train(*job)
    assert {record.accuracy for record in resumed.rounds} == {None}
    assert [number for number, _ in resumed.history] == [10]
    assert math.isnan(resumed.accuracy)
    assert resumed.loss == uninterrupted.loss < uninterrupted.rounds[0].loss


@pytest.mark.slow
def test_kill_and_resume_give_the_identical_weights(tmp_path):
    """The process dies by SIGKILL after round 8; round 6 was saved, and memories of later rounds are on disk."""
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
    """The n-th file is written but never renamed to its final name; then the training is resumed."""
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
    assert_identical(run(None), run(tmp_path, resume=(tmp_path / FILE).exists()))


@pytest.mark.parametrize("fatal", [1, 4, 7, 13, 20])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path, monkeypatch, call, fatal):
    """At the n-th write of a memory or checkpoint: no partial file is left, and the training can be resumed."""
    real, count = getattr(os, call), 0

    def full(*arguments):
        nonlocal count
        count += 1
        if count >= fatal:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OutputError, match="got: No space left on device; what was saved earlier is unchanged"):
            run(tmp_path)
    assert not list(tmp_path.rglob("*.part"))
    assert_identical(run(None), run(tmp_path, resume=(tmp_path / FILE).exists()))


def test_a_finished_training_is_not_run_again(tmp_path):
    first = run(tmp_path)
    again = run(tmp_path, resume=True, watch=lambda record: pytest.fail(f"ran {record}"))
    assert_identical(first, again)
    assert again.rounds == first.rounds
    assert again.faults == first.faults


def test_only_the_files_of_the_checkpoint_are_left(tmp_path):
    run(tmp_path)
    files = sorted(path.name.split("-")[1] for path in (tmp_path / "memories").iterdir())
    assert files == sorted(set(files))  # one per client
    assert 1 <= len(files) <= TRAINING.clients


def test_another_training_is_refused(tmp_path):
    run(tmp_path, training=dataclasses.replace(TRAINING, rounds=2))
    with pytest.raises(OutputError, match="holds a training run already; continue it with resume"):
        run(tmp_path)
    with pytest.raises(OutputError, match="holds another training run: rounds was 2, is 10"):
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
    other.train.inputs[-1, 0, 0, 0] ^= 1
    monkeypatch.setitem(globals(), "blobs", lambda: other)
    with pytest.raises(OutputError, match=r"holds another training run: data was \w{16}, is \w{16}; choose another"):
        run(tmp_path, resume=True, training=short)


def test_another_model_normalisation_or_loss_at_the_same_weights_is_refused(tmp_path):
    short = dataclasses.replace(TRAINING, rounds=1)

    def begin_or_resume(activation=torch.nn.ReLU, loss="cross-entropy", **normalisation):
        torch.manual_seed(0)
        linear = torch.nn.Linear(64, 4), torch.nn.Linear(4, 2)
        model = torch.nn.Sequential(torch.nn.Flatten(), linear[0], activation(), linear[1])
        task = gradveil.Task(model, loss, input_shape=(1, 8, 8), classes=2, **normalisation)
        begun = (tmp_path / FILE).exists()
        return train(task, blobs(), gradveil.defense("none"), short, checkpoint=tmp_path, resume=begun)

    def squared(outputs, labels):
        return (outputs.gather(1, labels[:, None]) - 1).square().mean()

    begin_or_resume()
    begin_or_resume()
    for other in ({"activation": torch.nn.Tanh}, {"mean": [0.5], "std": [0.5]}, {"loss": squared}):
        with pytest.raises(
            OutputError, match=r"holds another training run: model was \w{16}, is \w{16}; choose another"
        ):
            begin_or_resume(**other)


def test_resume_never_begins_a_training(tmp_path):
    with pytest.raises(OutputError, match=r"expected a folder with a checkpoint .* which does not exist; begin"):
        run(tmp_path / "new", resume=True)
    assert not (tmp_path / "new").exists()
    with pytest.raises(OutputError, match="which holds none; begin without resume"):
        run(tmp_path, resume=True)
    with pytest.raises(ParameterError, match="resume needs checkpoint"):
        run(None, resume=True)


def test_two_trainings_do_not_write_into_one_folder(tmp_path):
    short = dataclasses.replace(TRAINING, rounds=1)

    def second(_record):
        for resume in (False, True):
            (tmp_path / FILE).touch()
            with pytest.raises(OutputError, match="another training run is writing into"):
                run(tmp_path, training=short, resume=resume)
        (tmp_path / FILE).unlink()

    first = run(tmp_path, training=short, watch=second)
    assert_identical(first, run(tmp_path, training=short, resume=True))  # the lock is released with the first training


def test_memories_left_by_a_training_without_a_checkpoint_are_not_taken_over(tmp_path):
    class Stopped(Exception):
        pass

    def stop(record):
        if record.round == 1:  # memories are on disk, the first checkpoint would come after round 2
            raise Stopped

    with pytest.raises(Stopped):
        run(tmp_path, watch=stop)
    assert list((tmp_path / "memories").iterdir())
    assert not (tmp_path / FILE).exists()
    assert_identical(run(None), run(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"{}"])
def test_a_broken_checkpoint_is_refused(tmp_path, content):
    run(tmp_path, training=dataclasses.replace(TRAINING, rounds=2))
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(DataError, match="expected a file that gradveil wrote"):
        run(tmp_path, resume=True)


def test_a_flipped_bit_in_any_byte_of_a_file_is_noticed(tmp_path):
    path = tmp_path / "file"
    digest = save_atomically(path, {"w": torch.ones(2), "none": torch.zeros(0, 3)}, {"text": "sha256"})
    content = path.read_bytes()
    tensors, about = load(path, digest)
    assert torch.equal(tensors["w"], torch.ones(2))
    assert (about, tensors["none"].shape) == ({"text": "sha256"}, (0, 3))
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="expected a file"):
            load(path)
    save_atomically(path, {"w": torch.ones(2)}, {"text": "another"})
    load(path)
    with pytest.raises(DataError, match="expected the file that the checkpoint was saved with, got another one"):
        load(path, digest)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ([1, 2], "expected checkpoint version 2, got None"),
        ({"version": 1}, "expected checkpoint version 2, got 1"),
        ({"version": 2}, "got a damaged one .KeyError.'identity'"),
        ({"version": 2, "identity": [1]}, "got a damaged one"),
    ],
)
def test_another_gradveil_file_is_refused(tmp_path, about, words):
    save_atomically(tmp_path / FILE, {"w": torch.ones(1)}, about)
    with pytest.raises(DataError, match=words):
        run(tmp_path, resume=True)


def put(*path_and_value):
    """An edit of the JSON: put(key, ..., key, value)."""

    def edit(about, _tensors):
        *path, last, value = path_and_value
        container = about
        for key in path:
            container = container[key]
        container[last] = value(container[last]) if callable(value) else value

    return edit


def tensor(name, change):
    def edit(_about, tensors):
        tensors[name] = change(tensors[name])

    return edit


def fill(value):
    return lambda tensor: torch.full_like(tensor, value)


def one_round_less_for_every_client(about, _tensors):
    """A lower epsilon, with faults that explain it; but the records contradict them."""
    about["faults"] += [[5, client, "not finite", "made up"] for client in sorted(choose_clients(TRAINING, 5))]
    for entry in about["rounds_of"]:
        entry[1] -= entry[0] in choose_clients(TRAINING, 5)


def absent(client):
    return lambda about, _tensors: about["faults"].append([5, client, "missing", "made up"])


LAYER = "parameters/features.1.weight"
WRONG = {
    "rounds_of lower": (put("rounds_of", 0, 1, lambda count: count - 1), "clients took part in .*, but the seed"),
    "rounds_of empty": (put("rounds_of", []), "but the seed says"),
    "rounds_of no list": (put("rounds_of", {"0": 3}), "but the seed says"),
    "rounds_of explained": (one_round_less_for_every_client, "round 5 has 3 clients, but its faults leave 0"),
    "one missing": (absent(choose_clients(TRAINING, 5)[0]), "round 5 has 3 clients, but its faults leave 2"),
    "stranger missing": (absent(({*range(6)} - {*choose_clients(TRAINING, 5)}).pop()), "clients with faults do not"),
    "number": (put("number", 7), "the number of records is 6"),
    "number beyond": (put("number", 11), "the next round is 11, expected a whole number from 0 to 10"),
    "number true": (put("number", True), "the next round is True"),
    "number text": (put("number", "6"), "the next round is '6'"),
    "steps": (put("steps", 5), "the server took 5 steps, but the records say 6"),
    "diverged": (put("diverged", 2), "the round of divergence is 2"),
    "diverged now": (put("diverged", 6), "the server took 6 steps, but the records say 7"),
    "records": (put("records", lambda records: records[:-1]), "the number of records is 5"),
    "clients": (put("records", 2, 1, 2), "round 2 has 2 clients, but its faults leave 3"),
    "loss": (put("records", 2, 2, "low"), "the loss of round 2 is 'low'"),
    "accuracy": (put("records", 1, 3, 1.5), "the accuracy of round 1 is 1.5"),
    "accuracy missing": (put("records", 1, 3, None), "the accuracy of round 1 is None"),
    "accuracy too many": (put("records", 2, 3, 0.5), "the accuracy of round 2 is 0.5"),
    "seconds": (put("records", 2, 4, -1.0), "the times of round 2"),
    "bytes": (put("records", 2, 7, float("nan")), "round 2 sent nan bytes among 3 clients"),
    "record short": (put("records", 2, [1, 2]), "record 2: expected a list of 9"),
    "history": (put("history", 0, 1, 0.123), "the history is"),
    "fault": (put("faults", [[0, 1, "late", "it was"]]), "a fault is 'late'"),
    "fault of a round to come": (put("faults", [[6, 1, "stale", "it was"]]), "round of a fault is 6"),
    "fault of nobody": (put("faults", [[0, 6, "stale", "it was"]]), "client of a fault is 6"),
    "memory of nobody": (put("memories", 0, 0, 6), "client of a memory is 6"),
    "memory twice": (put("memories", lambda entries: entries + entries[:1]), "the memory of client"),
    "memory without digest": (put("memories", 0, 2, "x"), "the memory of client"),
    "memory of another digest": (put("memories", 0, 2, 64 * "a"), "expected the file that the checkpoint was saved"),
    "memory outside": (put("memories", 0, 1, "../../x"), "version of a memory is"),
    "names": (put("names", "first", lambda names: names[:-1]), "its tensors are not those that its text names"),
    "order": (put("names", "parameters", lambda names: names[::-1]), "parameters are .*, those of this training"),
    "groups": (put("names", "third", []), "its tensors are not those that its text names"),
    "extra tensor": (lambda _, tensors: tensors.update(x=torch.ones(1)), "its tensors are not those"),
    "shape": (tensor(LAYER, lambda value: value.t()), "parameters: 'features.1.weight' is"),
    "type": (tensor(LAYER, lambda value: value.double()), "parameters: 'features.1.weight' is .*float64"),
    "weights": (tensor(LAYER, fill(float("nan"))), "parameters: 'features.1.weight' holds NaN or infinity"),
    "moment": (tensor("first/features.1.bias", fill(float("inf"))), "first: 'features.1.bias' holds NaN or infinity"),
    "square": (tensor("second/features.1.bias", fill(-1.0)), "second: .* holds values that no square can have"),
}


@pytest.fixture(scope="module")
def stopped_training(tmp_path_factory):
    """A training run that was stopped in round 8, with a checkpoint of round 6."""
    folder = tmp_path_factory.mktemp("stopped")

    def stop(record):
        if record.round == 7:
            raise Crash

    with pytest.raises(Crash):
        run(folder, watch=stop)
    return folder


@pytest.mark.parametrize("wrong", WRONG)
def test_an_undamaged_file_that_does_not_fit_the_training_is_refused(stopped_training, tmp_path, wrong):
    """The digest is right, but the content cannot be."""
    shutil.copytree(stopped_training, tmp_path / "copy")
    path, (edit, words) = tmp_path / "copy" / FILE, WRONG[wrong]
    tensors, about = load(path)
    edit(about, tensors)
    save_atomically(path, tensors, about)
    before = sorted((path.parent / "memories").iterdir())
    with pytest.raises(DataError, match=words) as refused:
        run(path.parent, resume=True)
    assert "\n" not in str(refused.value)
    assert sorted((path.parent / "memories").iterdir()) == before  # a refused resume removes no files


def test_what_is_rewritten_unchanged_is_resumed(stopped_training, tmp_path):
    """This shows that the test above refuses the edits and not the rewriting."""
    shutil.copytree(stopped_training, tmp_path / "copy")
    save_atomically(tmp_path / "copy" / FILE, *load(tmp_path / "copy" / FILE))
    assert_identical(run(None), run(tmp_path / "copy", resume=True))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path, _: path.unlink(), "got no such file"),
        (lambda path, other: shutil.copy(other, path), "got another one"),
        (lambda path, _: os.truncate(path, 100), "expected a file"),
        (lambda path, _: save_atomically(path, {}, {"order": [], "sparse": {}}), "got another one"),
        (lambda path, _: (path.unlink(), path.mkdir()), "expected a file that can be read"),
    ],
)
def test_a_lost_or_exchanged_memory_is_noticed_at_once(stopped_training, tmp_path, damage, words):
    shutil.copytree(stopped_training, tmp_path / "copy")
    folder = tmp_path / "copy"
    _, about = load(folder / FILE)
    one, other, *_ = (folder / "memories" / f"client-{c}-{v}.safetensors" for c, v, _ in about["memories"])
    damage(one, other)
    with pytest.raises(DataError, match=words):
        run(folder, resume=True, watch=lambda record: pytest.fail(f"ran {record}"))


@dataclasses.dataclass(frozen=True, repr=False)
class SomeNaN(StepDefense):
    """Some clients have nothing finite to send."""

    name = "some-nan"

    def step_gradients(self, client):
        factor = float("nan") if client.source.uniform(torch.empty(())) < 0.3 else 1.0
        gradients = client.task.gradients(client.inputs, client.targets)
        return {name: factor * value for name, value in gradients.items()}


def resumed_and_uninterrupted(folder, task, defense, training, stop_after):
    def stop(record):
        if record.round == stop_after:
            raise Crash

    options = {"execution": "loop"}
    with pytest.raises(Crash):
        train(task, blobs(), defense, training, checkpoint=folder, watch=stop, **options)
    uninterrupted = train(task, blobs(), defense, training, **options)
    return train(task, blobs(), defense, training, checkpoint=folder, resume=True, **options), uninterrupted


def test_clients_with_nothing_to_send_do_not_stop_a_resume(tmp_path):
    """They took no part in these rounds, so the rounds do not count for their epsilon."""
    task = gradveil.Task(models.create("mlp", input_shape=(1, 8, 8), classes=2), input_shape=(1, 8, 8), classes=2)
    resumed, uninterrupted = resumed_and_uninterrupted(tmp_path, task, SomeNaN(), TRAINING, 7)
    assert uninterrupted.fault_counts["not finite"] > 3
    assert resumed.faults == uninterrupted.faults
    assert_identical(resumed, uninterrupted)


def test_batch_norm_statistics_are_resumed(tmp_path):
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    task = gradveil.Task(torch.nn.Sequential(torch.nn.Flatten(), *layers), input_shape=(1, 8, 8), classes=2)
    short = dataclasses.replace(TRAINING, rounds=4, checkpoint_every=2)
    resumed, uninterrupted = resumed_and_uninterrupted(tmp_path, task, gradveil.defense("none"), short, 2)
    assert task.buffers
    assert all(torch.equal(value, resumed.task.buffers[name]) for name, value in uninterrupted.task.buffers.items())
    assert_identical(resumed, uninterrupted)
    tensors, about = load(tmp_path / FILE)
    name = next(name for name in tensors if name.endswith("running_mean"))
    save_atomically(tmp_path / FILE, {**tensors, name: torch.full_like(tensors[name], float("nan"))}, about)
    with pytest.raises(DataError, match="buffers: .* holds NaN or infinity"):
        train(task, blobs(), gradveil.defense("none"), short, checkpoint=tmp_path, resume=True, execution="loop")


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_a_training_that_diverged_is_not_run_again(tmp_path, optimiser):
    """Its last step was infinite, so the moments may be infinite although the weights, those before it, are finite."""
    training = dataclasses.replace(TRAINING, lr=3e38, optimiser=optimiser, schedule="constant")
    first = run(tmp_path, training=training, defense="none")
    assert first.diverged is not None
    again = run(
        tmp_path, training=training, defense="none", resume=True, watch=lambda record: pytest.fail(f"ran {record}")
    )
    assert again.diverged == first.diverged
    assert all(torch.equal(value, again.task.parameters[name]) for name, value in first.task.parameters.items())


def die(record) -> None:
    if record.round == 8:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), watch=die)
