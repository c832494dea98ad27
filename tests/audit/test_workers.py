"""Worker processes: the same rows whatever their number, nothing lost, nothing twice, nobody left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gradveil.audit import AuditConfig, run
from gradveil.audit.folder import read_audit, read_rows
from gradveil.audit.pieces import Piece
from gradveil.audit.plan import Plan, estimated
from gradveil.audit.run import Tracker
from gradveil.audit.workers import Processes
from gradveil.core import plugins
from gradveil.core.errors import MissingPackageError, ParameterError, WorkerError
from gradveil.data import load
from gradveil.defenses import DEFENSES

FILES = ("results.jsonl", "identification.jsonl", "utility.jsonl")
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
pytestmark = pytest.mark.filterwarnings("ignore:LPIPS is left out")


@pytest.fixture
def data_file(tmp_path, two_blobs) -> Path:
    path = tmp_path / "blobs.npz"
    arrays = {}
    for name, split in (("train", two_blobs.train), ("test", two_blobs.test)):
        arrays[f"x_{name}"] = split.inputs.permute(0, 2, 3, 1).numpy()
        arrays[f"y_{name}"] = split.targets.numpy().astype(np.uint8)
    np.savez(path, **arrays)
    return path


def config_for(path: Path, **changes) -> AuditConfig:
    fields = {
        "dataset": str(path),
        "model": "mlp",
        "defenses": ("none", "top-k:keep=0.1"),
        "attacks": ("idlg:iterations=3", "lti:directions=8,draws=1,hidden=8,epochs=1"),
        "victims": 3,
        "chunk": 2,
        "rounds": 2,
        "clients": 3,
        "games": 3,
        "candidates": 5,
        "public": 60,
    }
    return AuditConfig(**{**fields, **changes})


def written(folder: Path) -> list[str]:
    """All rows without what measures time, in the order of their texts."""
    rows = [json.loads(line) for name in FILES for line in (folder / name).read_text().splitlines()]
    timeless = [
        {key: value for key, value in row.items() if key not in ("seconds", "round_seconds", "digest")} for row in rows
    ]
    return sorted(map(json.dumps, timeless))


def state_of(process: int) -> list[str]:
    """The state of a process and the number of the one that started it; nothing if it has ended."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if words[0] == "Z" else words[:2]  # Z: it has ended, but nobody has asked for its exit code


def workers_of(parent: int) -> list[int]:
    """The worker processes that a process has started."""
    processes = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [process for process in processes if state_of(process)[1:] == [str(parent)]]


@contextmanager
def started(words):
    """The command line in a process of its own, which is over at the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "gradveil", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition, seconds: float = 240.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
    return value


def test_progress_ends_at_one_in_whatever_order_pieces_end():
    pieces = [Piece("training", name) for name in ("none", "top-k", "ats")]
    steps = []
    tracker = Tracker(Plan(pieces, [0.1, 0.2, 0.3], 2, 0), steps.append)  # 0.1 + 0.2 + 0.3 > 0.3 + 0.2 + 0.1
    for piece in reversed(pieces):
        tracker.finished(piece)
    assert [step.overall for step in steps] == [pytest.approx(1 / 2), pytest.approx(5 / 6), 1]


@pytest.mark.slow
def test_rows_do_not_depend_on_the_number_of_workers(data_file, tmp_path, monkeypatch):
    """A model and a defense of the user's own among them: workers load the files again."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build(input_shape, classes):\n"
        "    print('not an answer')\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.Sigmoid(), nn.Linear(4, classes))\n"
    )
    (tmp_path / "halving.py").write_text(
        "from dataclasses import dataclass\n"
        "from gradveil.defenses import DEFENSES, Perturbation\n"
        "@DEFENSES.register('halving')\n"
        "@dataclass(frozen=True, repr=False)\n"
        "class Halving(Perturbation):\n"
        "    'Halve.'\n"
        "    paper = '-'\n"
        "    def perturb_rows(self, rows, draws):\n"
        "        return rows / 2\n"
    )
    monkeypatch.setattr(plugins, "_files", {})
    monkeypatch.setattr(DEFENSES, "_factories", dict(DEFENSES._factories))
    plugins.load_files([str(tmp_path / "halving.py")])
    config = config_for(data_file, model=f"{tmp_path / 'mine.py'}@build", defenses=("none", "halving"))
    steps = []
    run(config, tmp_path / "one")
    run(config, tmp_path / "two", workers=2, progress=steps.append)
    assert written(tmp_path / "two") == written(tmp_path / "one")
    assert steps[-1].overall == 1
    assert [step.overall for step in steps] == sorted(step.overall for step in steps)
    assert steps[-1].done == steps[-1].total == sum(step.ended for step in steps)
    one, two = (read_rows(folder, read_audit(folder)) for folder in (tmp_path / "one", tmp_path / "two"))
    assert [row.key for row in two.results] == [row.key for row in one.results]
    for picture in (tmp_path / "one" / "images").iterdir():
        assert (tmp_path / "two" / "images" / picture.name).read_bytes() == picture.read_bytes()


@linux
@pytest.mark.deployment
def test_killed_at_any_moment_an_audit_with_workers_ends_with_the_same_rows(data_file, tmp_path):
    """`benchmarks/kill_and_resume.py` kills thirty times. Workers end with the process that they work for."""
    config = config_for(data_file)
    run(config, tmp_path / "whole")
    folder = tmp_path / "killed"
    command = [*config.command.split()[1:], "--workers", "2", "--out", str(folder)]
    results = folder / "results.jsonl"
    for wanted in (1, 6):
        resume = ["--resume"] if (folder / "config.json").exists() else []
        with started([*command, *resume]) as process:
            until(lambda: results.exists() and results.read_bytes().count(b"\n") >= wanted)  # noqa: B023
            workers = until(lambda: workers_of(process.pid))
            os.kill(process.pid, signal.SIGKILL)
        until(lambda: not any(map(state_of, workers)))  # noqa: B023
    before = results.read_text()
    run(config, folder, resume=True, workers=2)
    assert results.read_text().startswith(before.rpartition("\n")[0])
    assert written(folder) == written(tmp_path / "whole")


@linux
@pytest.mark.slow
def test_a_worker_that_is_killed_is_an_error_in_one_line(data_file, tmp_path):
    folder = tmp_path / "out"
    config = config_for(data_file, attacks=("idlg:iterations=3",), rounds=100_000, games=0)
    words = [*config.command.split()[1:], "--workers", "2", "--out", str(folder)]
    with started(words) as process:
        until(lambda: len(workers_of(process.pid)) == 2)
        workers = workers_of(process.pid)
        os.kill(workers[0], signal.SIGKILL)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "Traceback" not in err
    error = next(line for line in err.splitlines() if line.startswith("error:"))
    assert "a worker process has ended (signal 9) during training under" in error
    assert f"Resume with: gradveil audit --resume --out {folder}" in error
    assert not any(map(state_of, workers))


@pytest.mark.slow
def test_what_goes_wrong_in_a_worker_is_said_as_if_it_had_gone_wrong_here(data_file, tmp_path):
    """The error comes from the worker: the model's file has changed since the audit described it."""
    config = config_for(data_file, attacks=("idlg:iterations=1",))
    run(config, tmp_path / "out")
    described = read_audit(tmp_path / "out")
    with Processes(1, {**described, "weights_digest": "0" * 16}, load(data_file)) as crew:
        crew.begin(0, Piece("training", "none"), "none")
        with pytest.raises(WorkerError, match="another weights_digest than the audit has: expected '0000"):
            crew.next()


def test_a_wrong_number_of_workers_is_refused(data_file, tmp_path):
    with pytest.raises(ParameterError, match="audit: workers must be a whole number of at least 1, got 0"):
        run(config_for(data_file), tmp_path / "out", workers=0)


def test_ray_that_is_not_installed_is_an_error_in_words(data_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    config = config_for(data_file, defenses=("none",), attacks=("idlg:iterations=1",), games=0)
    with pytest.raises(MissingPackageError, match=r"Ray cluster needs ray: pip install 'gradveil\[flower\]'"):
        run(config, tmp_path / "out", ray="auto")


@pytest.mark.slow
@pytest.mark.deployment
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of Ray
def test_rows_on_a_ray_cluster_of_two_nodes_are_the_same(data_file, tmp_path):
    from ray.cluster_utils import Cluster

    config = config_for(data_file)
    run(config, tmp_path / "one")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        run(config, tmp_path / "ray", ray=cluster.address)
    finally:
        cluster.shutdown()
    assert written(tmp_path / "ray") == written(tmp_path / "one")


# -- the plan --------------------------------------------------------------------------------------------------------


def test_estimates_come_from_the_steps_of_pieces_that_are_broken_off():
    """Ten milliseconds a step; the first piece of each kind is begun, and none of them finished."""
    begun = []

    def perform(piece, _strength, report):
        begun.append(piece.what)
        for step in range(1, 1001):
            time.sleep(0.01)
            report(step, 1000)
        pytest.fail("it was to be broken off")

    pieces = [Piece("training", "none"), Piece("training", "top-k"), Piece("games", "none")]
    plan = estimated(pieces, perform, None, device="cuda", seconds=0.1)
    assert begun == ["training under none", "identification under none"]
    assert all(9 < seconds < 40 for seconds in plan.seconds)
    assert plan.workers == 1  # an accelerator is shared by one process
    assert estimated(pieces, perform, 2, device="cpu", seconds=0.1).workers == 2


def test_a_piece_that_ends_at_once_is_timed_whole():
    plan = estimated([Piece("training", "none")], lambda *_: time.sleep(0.05), None, device="cpu")
    assert 0.05 <= plan.seconds[0] < 5
    assert plan.workers == 1
    assert plan.memory > 10**7 or sys.platform != "linux"


def test_what_is_learned_once_is_counted_once():
    def perform(_piece, _strength, _report):
        time.sleep(0.02)

    pieces = [Piece("attack", spec, "lti", stop=2, missing=(0, 1)) for spec in ("none", "top-k")]
    first, second = estimated(pieces, perform, 1, device="cpu").seconds
    assert second < first / 10


@pytest.mark.parametrize(("attack", "victims_to_learn"), [("lti", 150), ("auto:seconds=0.001", 12)])
def test_a_piece_that_is_broken_off_while_it_learns_is_still_to_attack(attack, victims_to_learn):
    """Learning takes one second here, so attacking two victims takes 2 / `victims_to_learn` of that."""

    def perform(_piece, _strength, report):
        for step in range(1, 101):
            time.sleep(0.01)
            report(step, 100)

    pieces = [Piece("attack", spec, attack, stop=2, missing=(0, 1)) for spec in ("none", "top-k")]
    first, second = estimated(pieces, perform, 1, device="cpu", seconds=0.1).seconds
    assert first / second == pytest.approx(1 + victims_to_learn / 2)
    assert 1 < first - second < 4


def test_an_attack_that_budgets_its_work_is_expected_to_spend_it():
    def quick_at_first(_piece, _strength, report):
        for step in range(1, 101):
            time.sleep(0.01)
            report(step, 100)

    pieces = [Piece("attack", spec, "auto:seconds=5", stop=8, missing=(0, 1)) for spec in ("none", "top-k")]
    first, second = estimated(pieces, quick_at_first, 1, device="cpu", seconds=0.1, pace=lambda: 2.0).seconds
    assert first == pytest.approx(2 * (12 + 8) * 5)
    assert second == pytest.approx(2 * 8 * 5)  # what was learned serves again
    at_once = estimated(pieces, lambda *_: None, 1, device="cpu", pace=lambda: 2.0)
    assert max(at_once.seconds) < 1  # it found a closed form, so nothing is left to expect


def test_a_plan_lasts_as_long_as_its_longest_piece():
    pieces = [Piece("training", spec) for spec in ("none", "top-k", "quantization")]
    assert Plan(pieces, [1.0, 2.0, 9.0], 2, 0).duration == 9
    assert Plan(pieces, [2.0, 2.0, 2.0], 2, 0).duration == 3
