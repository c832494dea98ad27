"""The command line as a user meets it: results, errors in words, exit codes."""

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from filelock import FileLock

import gradveil
from gradveil import data, models
from gradveil.audit.pieces import Piece
from gradveil.audit.plan import Plan
from gradveil.audit.store import resume_command
from gradveil.cli._console import ProgressLines
from gradveil.federation.job import PUBLIC_SAMPLES

QUICK_AUDIT = (
    "audit --model mlp --defense top-k --attack idlg:iterations=2 --victims 2 --rounds 2 --clients 2 --client-batch 4 "
    "--games 0"
).split()


@pytest.mark.filterwarnings("ignore:LPIPS is left out")
def test_audit_ends_with_the_path_of_the_report(gradveil_command, tmp_path):
    code, out, _ = gradveil_command(*QUICK_AUDIT, "--games", 4, "--out", tmp_path / "out")
    assert code == 0
    assert out.strip().endswith(str(tmp_path / "out" / "report.html"))
    assert (tmp_path / "out" / "report.html").exists()
    # The audit goes on by its folder alone, and says the same as JSON.
    code, out, _ = gradveil_command("audit", "--resume", "--out", tmp_path / "out", "--json")
    assert code == 0
    assert json.loads(out)["report"] == str(tmp_path / "out" / "report.html")
    # The report is written again from the rows alone, with the same figures.
    (tmp_path / "out" / "report.html").unlink()
    code, again, _ = gradveil_command("report", tmp_path / "out", "--json")
    assert (code, json.loads(again)) == (0, json.loads(out))
    assert (tmp_path / "out" / "report.html").exists()
    # Two iterations recover nothing, which shows nothing, so the gate stays closed.
    code, _, err = gradveil_command("report", tmp_path / "out", "--fail-if", "leaked")
    assert code == 4
    assert "refused (--fail-if leaked): leaked: protection is not shown for top-k:" in err
    code, _, err = gradveil_command("audit", "--resume", "--out", tmp_path / "out", "--fail-if", "labels")
    assert code in (3, 4)
    assert "refused (--fail-if labels): " in err


@pytest.mark.filterwarnings("ignore:LPIPS is left out")
def test_several_stages_are_an_audit_each(gradveil_command, tmp_path):
    words = ("audit", "--dataset", "mnist:size=12", "--model", "mlp", "--attack", "idlg:iterations=2", "--victims", "1")
    words += ("--defense", "none", "--games", "0", "--rounds", "2", "--clients", "2", "--public", "50")
    code, out, _ = gradveil_command(*words, "--stage", "0,0.5", "--out", tmp_path)
    assert code == 0
    for stage in ("0", "0.5"):
        assert json.loads((tmp_path / f"stage-{stage}" / "config.json").read_text())["stage"] == float(stage)
        assert str(tmp_path / f"stage-{stage}" / "report.html") in out
    code, _, err = gradveil_command(*words, "--stage", "0,late", "--out", tmp_path / "new")
    assert code == 2
    assert "--stage must be numbers with commas between them, got '0,late'" in err


def test_audit_says_which_attackers_and_which_flags(gradveil_command, tmp_path):
    words = [*QUICK_AUDIT, "--plain", "--match", "power", "--aggregated", 2, "--json", "--out", tmp_path / "out"]
    code, out, err = gradveil_command(*words)
    assert code == 0
    assert "few-victims" in json.loads(out)["flags"]
    assert "Flag few-victims: Only 2 victims" in err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["adaptive"], config["match"], config["aggregated"]) == (False, "power=0.5", 2)
    assert "--plain" in config["command"]


@pytest.fixture
def asked(monkeypatch):
    """The configs of the audits that were asked for; none of them runs."""
    configs = []

    def note(config, _folder, **_options):
        configs.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr("gradveil.cli._audit.run_audit", note)
    return configs


def test_a_budget_is_that_of_auto(gradveil_command, tmp_path, asked):
    gradveil_command(*"audit --budget quick --out".split(), tmp_path)
    gradveil_command(*"audit --attack dlg:iterations=2 --attack auto --budget thorough --out".split(), tmp_path)
    assert [config.attacks for config in asked] == [
        ("auto:seconds=1.0",),
        ("dlg:iterations=2,restarts=1,mute=none", "auto:seconds=30.0"),
    ]
    code, _, err = gradveil_command(*"audit --attack dlg --budget quick --out".split(), tmp_path)
    assert code == 2
    assert "--budget is the budget of auto, got attacks dlg; add --attack auto" in err


def test_minutes_choose_the_largest_budget_that_fits(gradveil_command, tmp_path, asked, monkeypatch):
    def plan(config, _folder, **_options):
        """An audit that takes a minute, and two for each nominal second per victim."""
        seconds = float(config.attacks[0].removeprefix("auto:seconds="))
        return Plan([Piece("training", "none")], [60 + 120 * seconds], 1, 0)

    monkeypatch.setattr("gradveil.cli._audit.make_plan", plan)
    code, _, _ = gradveil_command(*"audit --minutes 20 --out".split(), tmp_path)
    assert asked[0].attacks == ("auto:seconds=7.5",)  # 80 % of 20 minutes
    code, _, err = gradveil_command(*"audit --minutes 2 --out".split(), tmp_path)
    assert code == 2
    assert "expected at least 3 minutes for this audit on this machine, got 2" in err


@pytest.mark.filterwarnings("ignore:LPIPS is left out")
def test_resuming_runs_no_model_file_that_was_not_named(gradveil_command, tmp_path):
    """A folder from somebody else: its config may name any file, even with the right digest."""
    file, folder = tmp_path / "theirs.py", tmp_path / "out"
    file.write_text(
        "from pathlib import Path\n"
        "from torch import nn\n"
        "Path(__file__).with_name('ran').touch()\n"
        "def build(input_shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))\n"
    )
    words = [*QUICK_AUDIT, "--model", f"{file}@build", "--out", folder]
    assert gradveil_command(*words)[0] == 0
    (tmp_path / "ran").unlink()
    code, _, err = gradveil_command("audit", "--resume", "--out", folder)
    assert code == 2
    assert f"--resume runs no code that was not named; if you trust that file: {resume_command(folder)}" in err
    assert not (tmp_path / "ran").exists()
    assert gradveil_command("audit", "--resume", "--out", folder, "--model", f"{file}@build")[0] == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", [None, 3, "none", [None]])
def test_a_config_with_wrong_defenses_is_an_error_in_words(gradveil_command, tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps({"gradveil": "0.1.0", "command": "", "defenses": value}))
    code, _, err = gradveil_command("audit", "--resume", "--out", tmp_path)
    assert code == 2
    assert "error: config.json: " in err


def test_help_says_that_a_model_file_is_code(gradveil_command):
    assert "which runs FILE.py" in gradveil_command("audit", "--help")[1].replace("│", " ").replace("  ", " ")


@pytest.mark.filterwarnings("ignore:LPIPS is left out")
def test_paths_are_printed_as_they_are(gradveil_command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    folder = tmp_path / "x[red]y [/] a long name that no narrow terminal can hold"
    code, out, _ = gradveil_command(*QUICK_AUDIT, "--out", folder)
    assert code == 0
    assert out == f"report: {folder / 'report.html'}\n"


@pytest.mark.filterwarnings("ignore:LPIPS is left out")
def test_without_out_equal_audits_share_a_folder(gradveil_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert gradveil_command(*QUICK_AUDIT, "--resume")[0] == 0
    assert gradveil_command(*QUICK_AUDIT, "--resume")[0] == 0
    assert gradveil_command(*QUICK_AUDIT, "--resume", "--seed", 1)[0] == 0
    assert len(list((tmp_path / "audits").iterdir())) == 2


def test_audit_resumes_only_where_there_is_an_audit(gradveil_command, tmp_path):
    code, _, err = gradveil_command(*QUICK_AUDIT, "--resume", "--out", tmp_path / "none")
    assert code == 2
    assert f"--resume continues the audit in {tmp_path / 'none'}, which holds none; leave --resume out" in err
    assert not (tmp_path / "none").exists()


@pytest.mark.filterwarnings("ignore:LPIPS is left out")
def test_a_dry_run_lists_what_is_missing_and_writes_nothing(gradveil_command, tmp_path):
    folder = tmp_path / "out"
    code, out, _ = gradveil_command(*QUICK_AUDIT, "--dry-run", "--out", folder)
    assert code == 0
    assert "training under none" in out
    assert "in one process, about" in out
    assert not folder.exists()
    code, out, _ = gradveil_command(*QUICK_AUDIT, "--dry-run", "--workers", 2, "--json", "--out", folder)
    planned = json.loads(out)
    assert planned["workers"] == 2
    assert planned["seconds"] > 0
    assert {"idlg against none", "training under none"} <= {piece["what"] for piece in planned["pieces"]}
    assert gradveil_command(*QUICK_AUDIT, "--out", folder)[0] == 0
    code, out, _ = gradveil_command("audit", "--resume", "--dry-run", "--json", "--out", folder)
    assert json.loads(out)["pieces"] == []


@pytest.mark.filterwarnings("ignore:LPIPS is left out")
def test_an_audit_of_hours_begins_with_a_note(gradveil_command, tmp_path, monkeypatch):
    monkeypatch.setattr("gradveil.cli._audit.LONG", 0.0)
    code, _, err = gradveil_command(*QUICK_AUDIT, "--out", tmp_path / "out")
    assert code == 0
    assert "estimated on this machine as it is now note: hours lie ahead." in err


def test_log_files_get_a_line_at_the_end_of_pieces_and_every_half_minute():
    said: list[str] = []
    moments = iter([0.0, 1.0, 6.0, 7.0, 35.0, 37.0])
    lines = ProgressLines(said.append, clock=lambda: next(moments))
    lines.show("first", 0.1, None, ended=True)  # too soon
    lines.show("second", 0.2, 7200.0, ended=True)
    lines.show("third", 0.3, 60.0, ended=True)  # too soon
    lines.show("fourth", 0.4, 60.0)  # too soon, as nothing ended
    lines.show("fifth", 0.5, 60.0)
    assert said == [" 20 %, about 2 h 0 min left: second", " 50 %, about 60 s left: fifth"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["audit", "--defense", "dual-prunning"], "unknown defense 'dual-prunning'; did you mean dual-pruning"),
        (["audit", "--attack", "dgl"], "unknown attack 'dgl'; did you mean ggl or dlg or idlg"),
        (["audit", "--model", "lenett", "--out", "OUT"], "unknown model 'lenett'; did you mean lenet"),
        (["audit", "--dataset", "minst", "--out", "OUT"], "did you mean mnist"),
        (["train", "--model", "OUT/none.py@build", "--out", "OUT/new"], "but there is no file"),
        (["train", "--model", "mine.py"], "expected FILE.py@FUNCTION, got no function; write mine.py@NAME"),
        (["train", "--model", "lenet:act=relu"], "unknown parameter 'act'; it takes: convolutions, activation, init"),
        (
            ["train", "--defense", "top-k+errorfeedback"],
            "unknown defense 'errorfeedback'; did you mean error-feedback?",
        ),
        (["audit", "--defense", "top-k:keep=2"], "top-k: keep must be a number above 0 and at most 1, got 2"),
        (["audit", "--defense", "top-k:keep=much"], "got 'much' (str)"),
        (["audit", "--defense", "dual-pruning:k1=0.4,k2=0.75"], "k1 + k2 must be below 1, got 0.4 + 0.75 = 1.15"),
        (["audit", "--victims", "0"], "audit: victims must be a whole number of at least 1, got 0"),
        (["audit", "--victims", "100000", "--out", "OUT"], "ask for fewer victims"),
        (["audit", "--dataset", "OUT/broken.npz", "--out", "OUT"], "broken.npz"),
        (["audit", "--model", "vgg11", "--dataset", "OUT/small.npz", "--out", "OUT"], "images must be at least"),
        (["audit", "--out", "OUT/broken.npz/inside"], "audit: expected a folder that can be written to"),
        (["train", "--out", "OUT/broken.npz/inside"], "train: expected a folder that can be written to"),
        (["train", "--resume", "--out", "OUT/damaged"], "config.json: expected JSON, got b'{'"),
        (["train", "--defense", "nothing"], "unknown defense 'nothing'"),
        (["train", "--rounds", "0"], "train: rounds must be a whole number of at least 1, got 0"),
        (["train", "--partition", "dirichlet:beta=1"], "takes alpha, got dirichlet:beta=1"),
        (["train", "--partition", "sorted"], "sorted"),
        (["train", "--evaluate-every", "0"], "evaluate_every must be a whole number of at least 1, got 0"),
        (
            ["train", "--local-lr", "0.1", "--local-batch", "4"],
            "expected --local-epochs with --local-lr, --local-batch",
        ),
        (["train", "--local-momentum", "0", "--out", "OUT/new"], "expected --local-epochs with --local-momentum"),
        (["train", "--partition", "bogus", "--out", "OUT/new"], "scheme must be one of"),
        (["audit", "--clients", "100000", "--out", "OUT/new"], "100000"),
        (["train", "--clients", "100000", "--out", "OUT/new"], "100000"),
        (["train", "--execution", "bogus", "--out", "OUT/new"], "execution must be one of"),
        (
            ["train", "--execution", "batch", "--compare", "soteria", "--out", "OUT/new"],
            "clients under soteria cannot be batched",
        ),
        (
            ["train", "--model", "convnet", "--defense", "dp-sgd", "--out", "OUT/new"],
            "per-example gradients do not exist with batch statistics",
        ),
        (["train", "--engine", "flower", "--execution", "auto"], "leave --execution out or use --engine local"),
        (["train", "--engine", "flower", "--resume", "--out", "OUT/new"], "leave --resume out or use --engine local"),
        (["audit", "--budget", "qick", "--attack", "dlg:iterations=2"], "one of quick, standard, thorough, got 'qick'"),
        (["list", "colours"], "expected one of defenses, attacks, datasets, models, metrics, got 'colours'"),
        (["data", "get", "minst"], "did you mean mnist"),
        (["audit", "--victims", "many"], "Invalid value for '--victims'"),
        (["audit", "--colour"], "colour"),
    ],
)
def test_errors_are_said_in_words(gradveil_command, tmp_path, words, message):
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 cut short")
    small = np.zeros((120, 12, 12, 1), dtype=np.uint8)
    np.savez(tmp_path / "small.npz", x_train=small, y_train=np.arange(120) % 2, x_test=small, y_test=np.arange(120) % 2)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    code, _, err = gradveil_command(*(word.replace("OUT", str(tmp_path)) for word in words))
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert words[0] == "audit" or "audit" not in err.replace(str(tmp_path), "")
    assert not (tmp_path / "new" / "config.json").exists()


def test_train_prints_a_table_or_json(gradveil_command):
    words = "train --model mlp --rounds 3 --clients 4 --batch-size 8 --defense top-k:keep=0.1+error-feedback".split()
    code, out, _ = gradveil_command(*words)
    assert code == 0
    assert "accuracy" in out
    code, out, _ = gradveil_command(
        *words, "--json", "--partition", "classes:classes_per_client=2", "--local-epochs", "1"
    )
    assert code == 0
    assert 0 <= json.loads(out)["accuracy"] <= 1
    code, out, _ = gradveil_command(*"train --model mlp --rounds 3 --clients 2 --lr 1e38 --json".split())
    assert json.loads(out)["diverged"] is not None
    code, out, _ = gradveil_command(*words, "--json", "--partition", "classes:classes_per_client=2")
    assert json.loads(out)["defense"] == "top-k:keep=0.1+error-feedback"


def test_train_says_what_privacy_was_spent_and_only_where_there_is_a_proof(gradveil_command):
    pytest.importorskip("dp_accounting")
    words = "train --model mlp --rounds 2 --clients 4 --batch-size 8 --defense".split()
    code, out, _ = gradveil_command(*words, "dp-sgd:clip=1,noise_multiplier=2")
    assert code == 0
    assert "differential privacy: epsilon " in out
    assert "one example replaced by another; fixed-size batches" in out
    code, out, _ = gradveil_command(*words, "dp-sgd:clip=1,noise_multiplier=2", "--json")
    assert json.loads(out)["epsilon"] > 0
    code, out, _ = gradveil_command(*words, "gaussian-noise:std=1")
    assert "epsilon" not in out
    code, out, _ = gradveil_command(*words, "gaussian-noise:std=1", "--json")
    assert json.loads(out)["epsilon"] is None


def test_list_has_a_line_for_everything(gradveil_command):
    code, out, _ = gradveil_command("list", "--json")
    assert code == 0
    listed = json.loads(out)
    names = {kind: [row["name"] for row in rows] for kind, rows in listed.items()}
    assert names["defenses"] == [*gradveil.list_defenses(), "error-feedback"]
    assert names["attacks"] == gradveil.list_attacks()
    assert names["models"] == models.names()
    assert set(data.names()) <= set(names["datasets"])
    assert all(row["summary"] and row["source"] for rows in listed.values() for row in rows)
    noise = next(row for row in listed["defenses"] if row["name"] == "gaussian-noise")
    assert noise["meanings"] == {"std": "standard deviation of the noise; 0 is the identity."}
    code, out, _ = gradveil_command("list", "defenses")
    assert "k1=0.05, k2=0.75" in out


def test_data_list_says_what_is_here(gradveil_command):
    code, out, _ = gradveil_command("data", "list", "--json")
    assert code == 0
    mnist = next(row for row in json.loads(out) if row["name"] == "mnist")
    assert mnist["found"]


def test_no_words_at_all_show_the_help(gradveil_command):
    _, out, err = gradveil_command()
    assert "audit" in out + err


@pytest.mark.slow
def test_ctrl_c_keeps_finished_rows_and_says_how_to_go_on(tmp_path):
    folder = tmp_path / "the results"
    words = (
        "audit --model mlp --defense top-k --attack idlg:iterations=20 --victims 2 --rounds 100000 --games 0".split()
    )
    words += ["--workers", "1"]  # in the order of the rows; several would begin with the long trainings
    process = subprocess.Popen(
        [sys.executable, "-m", "gradveil", *words, "--out", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "40"},
        # A test run in the background of a shell ignores Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    results = folder / "results.jsonl"
    while not (results.exists() and results.read_bytes().count(b"\n") >= 6) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"gradveil audit --resume --out '{folder}'" in err
    assert "Traceback" not in err
    assert results.read_bytes().count(b"\n") == 6


COMPARED = "train --model mlp --rounds 4 --clients 4 --batch-size 8 --compare top-k:keep=0.1 --compare gaussian-noise"


def test_train_compares_defenses_under_the_same_seeds(gradveil_command, tmp_path):
    folder = tmp_path / "out"
    code, out, err = gradveil_command(*COMPARED.split(), "--out", folder, "--json")
    assert code == 0
    trainings = json.loads(out)["trainings"]
    assert [row["defense"] for row in trainings] == ["none", "top-k:keep=0.1", "gaussian-noise:std=0.01"]
    assert len({row["rounds"][0]["loss"] for row in trainings}) == 1  # the same images at the same weights
    none = trainings[0]["accuracy"]
    assert [row["pmm"] for row in trainings] in (
        [None] * 3,
        pytest.approx([row["accuracy"] / none for row in trainings]),
    )
    assert "top-k:keep=0.1 (2 of 3): round 4 of 4, loss " in err
    page = (folder / "training.html").read_text()
    assert "gaussian-noise:std=0.01" in page
    assert page.count("<path d=") >= 6  # two charts of three lines
    assert "http" not in page
    # It goes on by its folder alone; all is there already, so nothing runs.
    code, out, err = gradveil_command("train", "--resume", "--out", folder)
    assert code == 0
    assert "round 4 of 4" not in err
    assert "PMM" in out
    code, _, err = gradveil_command(*COMPARED.split(), "--out", folder)
    assert code == 2
    assert "already holds a training run; continue with --resume or choose another --out" in err
    code, _, err = gradveil_command("train", "--resume", "--out", folder, "--lr", 0.7)
    assert code == 2
    assert "lr was 0.05, is 0.7" in err
    code, out, _ = gradveil_command("train", "--resume", "--out", folder, "--compare", "quantization", "--json")
    assert code == 0  # nothing of what was refused has been kept, and another defense can be added
    assert [row["defense"].split(":")[0] for row in json.loads(out)["trainings"]] == [
        "none",
        "top-k",
        "gaussian-noise",
        "quantization",
    ]


def test_train_does_not_go_on_with_another_model_of_the_same_name(gradveil_command, tmp_path):
    file = tmp_path / "mine.py"
    words = (
        "from torch import nn\ndef build(input_shape, classes):\n    return nn.Sequential({}, nn.Linear(784, classes))"
    )
    file.write_text(words.format("nn.Flatten(), nn.Sigmoid()"))
    asked = f"train --model {file}@build --rounds 1 --clients 2 --batch-size 4 --out {tmp_path / 'out'}".split()
    assert gradveil_command(*asked)[0] == 0
    code, _, err = gradveil_command("train", "--resume", "--out", tmp_path / "out")
    assert code == 2  # a folder must not run code that nobody named
    assert "--resume runs no code that was not named; if you trust that file: gradveil train" in err
    named = ("train", "--resume", "--out", tmp_path / "out", "--model", f"{file}@build")
    assert gradveil_command(*named)[0] == 0
    file.write_text(words.format("nn.Flatten(), nn.ReLU()"))
    code, _, err = gradveil_command(*named)
    assert code == 2
    assert "has changed since; choose another --out, or restore the file" in err


@pytest.mark.deployment
def test_an_interrupted_simulation_ends_and_leaves_its_folder_free(tmp_path):
    pytest.importorskip("ray")
    words = "train --engine flower --model mlp --rounds 200 --clients 3 --batch-size 8".split()
    with subprocess.Popen(
        [sys.executable, "-m", "gradveil", *words, "--out", str(tmp_path / "out")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stderr is not None
        try:
            assert any("round 20 of 200" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
            err = process.stderr.read()
        finally:
            process.kill()
    assert process.returncode == 130
    assert "stopped; nothing was kept, because Flower's simulation keeps no checkpoints" in err
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.filterwarnings("always:batches of 99999")
def test_what_cannot_be_done_as_asked_is_noted(gradveil_command, tmp_path):
    words = "train --model mlp --rounds 2 --clients 3 --batch-size 99999".split()
    code, _, err = gradveil_command(*words, "--out", tmp_path / "out")
    assert code == 0
    most = math.ceil((len(data.load("mnist").train) - PUBLIC_SAMPLES) / 3)  # mnist may be whole or the embedded digits
    assert f"batches of 99999 examples were asked for, but no client holds more than {most}" in err
    assert re.search(r"round 2 of 2, loss [\d.]+, [\d.]+ rounds/s", err)  # no accuracy: it would be the one before


SHORT = "train --model mlp --rounds 2 --clients 3 --batch-size 8".split()


def test_train_resumes_only_where_there_is_a_training(gradveil_command, tmp_path):
    def refused(*words):
        code, _, err = gradveil_command("train", "--resume", *words)
        assert code == 2
        return err

    assert "train: --resume needs --out" in refused()
    typo = tmp_path / "typo"
    assert f"expected a folder that holds a training run, got {typo}, which does not exist" in refused("--out", typo)
    assert not typo.exists()
    assert "which holds none; leave --resume out to begin one" in refused("--out", tmp_path, "--model", "mlp")
    assert not list(tmp_path.iterdir())
    folder = tmp_path / "out"
    assert gradveil_command(*SHORT, "--out", folder)[0] == 0
    config = folder / "config.json"
    began_with = config.read_text()
    for changed in (began_with.replace('"rounds": 2', '"rounds": 3'), began_with.replace('"mlp"', "7")):
        config.write_text(changed)
        assert "expected the settings that the training began with, got others" in refused("--out", folder)
    config.write_text(100_000 * "[")
    assert "expected JSON" in refused("--out", folder)
    config.unlink()
    assert "which holds none" in refused("--out", folder)
    code, _, err = gradveil_command(*SHORT, "--out", folder)
    assert code == 2
    assert "holds checkpoints of a training run without its config.json; choose another --out" in err
    assert not config.exists()
    config.write_text(began_with)
    assert gradveil_command("train", "--resume", "--out", folder)[0] == 0


def test_a_training_stopped_before_its_first_checkpoint_goes_on_as_it_was_asked(
    gradveil_command, tmp_path, monkeypatch
):
    """The folder's own settings count, and no others are taken."""
    folder = tmp_path / "out"

    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("gradveil.federation.engines.train", interrupted)
        assert gradveil_command(*SHORT, "--seed", 7, "--out", folder)[0] == 130
    code, _, err = gradveil_command("train", "--resume", "--out", folder, "--seed", 8)
    assert code == 2
    assert "holds another training run: seed was 7, is 8" in err
    code, out, err = gradveil_command("train", "--resume", "--out", folder, "--json")
    assert code == 0
    assert "note: there is no checkpoint of the training under none; it begins with round 1" in err
    _, expected, _ = gradveil_command(*SHORT, "--seed", 7, "--json")
    assert json.loads(out)["loss"] == json.loads(expected)["loss"]


def test_a_training_locks_its_folder(gradveil_command, tmp_path):
    with FileLock(tmp_path / ".lock"):
        code, _, err = gradveil_command(*SHORT, "--out", tmp_path)
    assert code == 2
    assert f"train: another training run is writing into {tmp_path}; wait for it or choose another --out" in err
    assert not (tmp_path / "config.json").exists()
    assert gradveil_command(*SHORT, "--out", tmp_path)[0] == 0


@pytest.mark.parametrize("fatal", [1, 2, 3, 4])
def test_a_full_disk_leaves_a_folder_that_can_be_used(gradveil_command, tmp_path, monkeypatch, fatal):
    """At the settings, the checkpoint, the settings at the end, the result."""
    real, count = os.fsync, 0

    def full(file):
        nonlocal count
        count += 1
        if count >= fatal:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        code, _, err = gradveil_command(*SHORT, "--out", tmp_path)
    assert code == 2
    assert "got: No space left on device; what was saved earlier is unchanged; free some space" in err
    assert not list(tmp_path.rglob("*.part"))
    began = (tmp_path / "config.json").exists()
    assert began == (fatal > 2)
    again = ["train", "--resume"] if began else SHORT
    assert gradveil_command(*again, "--out", tmp_path)[0] == 0
    assert json.loads((tmp_path / "training.json").read_text())["accuracy"] > 0
