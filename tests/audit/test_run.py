import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from gradveil import report
from gradveil.attacks import ATTACKS
from gradveil.audit import AuditConfig, games, run
from gradveil.core.errors import DataError, OutputError, ParameterError, ThreatModelError
from gradveil.core.parameters import state
from gradveil.defenses import DEFENSES, Perturbation, Prepared


@pytest.fixture
def data_file(tmp_path, two_blobs) -> Path:
    """The small data set as an npz file of the user's own."""
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
        "defenses": ("none", "gaussian-noise:std=0.1", "top-k:keep=0.1+error-feedback"),
        "attacks": ("idlg:iterations=8", "inverting-gradients:iterations=8"),
        "victims": 3,
        "chunk": 2,
        "rounds": 4,
        "clients": 3,
        "games": 0,
    }
    return AuditConfig(**{**fields, **changes})


def rows(folder: Path, name: str = "results.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def comparable(all_rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in ("seconds", "digest")} for row in all_rows]


pytestmark = pytest.mark.filterwarnings("ignore:LPIPS is left out")


def test_an_audit_writes_what_the_contract_says(data_file, tmp_path):
    folder = tmp_path / "out"
    steps = []
    run(config_for(data_file), folder, progress=steps.append)
    written = rows(folder)
    assert len(written) == 3 + (1 + 2 * 2) * 2 * 3  # blind guess, then none plain, the others plain and adaptive
    contract = (
        "defense defense_params attack attack_params adaptive dataset model seed victim batch_size mse psnr ssim lpips "
        "noise_ratio label_correct leaked loss iterations seconds"
    ).split()
    assert set(contract) <= written[-1].keys()
    assert all(0 <= row["noise_ratio"] <= 1 for row in written)
    utility = rows(folder, "utility.jsonl")
    assert [row["defense_spec"] for row in utility] == list(config_for(data_file).defenses)
    contract = "accuracy baseline_accuracy pmm loss round_seconds upload_bytes download_bytes".split()
    assert set(contract) <= utility[0].keys()
    assert all((folder / row["image"]).exists() for row in written)
    assert (folder / "images" / "original-v2.png").exists()
    shares = [step.overall for step in steps]
    assert shares == sorted(shares)
    described = json.loads((folder / "config.json").read_text())
    assert AuditConfig.from_json(described) == config_for(data_file)


def test_bounds_are_written_if_they_exist(data_file, tmp_path):
    config = config_for(
        data_file,
        defenses=(
            "gaussian-noise:std=0.5",
            "optimal-noise:form=global",
            "dp-sgd:clip=0.5",
            "optimal-noise",
            "optimal-pruning",
        ),
        attacks=("idlg:iterations=1",),
        model="mlp:activation=sigmoid",  # a ReLU that is off for all public images would get no noise at all
        rounds=1,
    )
    run(config, tmp_path / "out")
    bounds = {}
    for row in rows(tmp_path / "out"):
        bounds.setdefault(row["defense_spec"], set()).add(row["bound_mse"])
    none, uniform, by_public, clipping, local, pruning = (bounds.pop(spec) for spec in config.defenses)
    assert none == local == pruning == bounds.pop(None) == {None}
    assert len(uniform) == len(by_public) == 1  # one bound per defense, whatever chunk its victims are in
    assert 0 < uniform.pop() < 0.01
    assert 0 < by_public.pop() < 0.01
    assert 0 < clipping.pop() < 0.01


def test_batches_are_audited_with_one_assignment(data_file, tmp_path):
    config = config_for(data_file, batch_size=4, defenses=("none",), attacks=("idlg:iterations=3",))
    run(config, tmp_path / "out")
    written = rows(tmp_path / "out")
    assert {row["batch_size"] for row in written} == {4}
    blind = [row for row in written if row["attack"] == "blind-guess"]
    assert all(row["label_correct"] == 1 and not row["leaked"] for row in blind)


@pytest.mark.slow
def test_a_killed_audit_resumes_to_the_same_rows(data_file, tmp_path):
    """Killed at several moments, every resumed audit ends with the rows of an uninterrupted one, none twice."""
    config = config_for(data_file)
    run(config, tmp_path / "whole")
    expected = comparable(rows(tmp_path / "whole"))
    folder = tmp_path / "killed"
    # One process: with workers, rows are in the order in which they were finished.
    command = [sys.executable, "-m", "gradveil", *config.command.split()[1:], "--out", str(folder), "--workers", "1"]
    kills = 0
    for wanted_rows in (1, 6, 12, 17):
        resume = ["--resume"] if (folder / "config.json").exists() else []
        process = subprocess.Popen([*command, *resume], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            file = folder / "results.jsonl"
            if file.exists() and file.read_bytes().count(b"\n") >= wanted_rows:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        process.wait(timeout=60)
        kills += process.returncode == -signal.SIGKILL
    assert kills >= 2
    with (folder / "results.jsonl").open("ab") as file:
        file.write(b'{"defense": "no')  # what a kill in the middle of a write leaves
    finished = subprocess.run([*command, "--resume"], check=False, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert comparable(rows(folder)) == expected
    assert [row["defense_spec"] for row in rows(folder, "utility.jsonl")] == list(config.defenses)


def test_an_unfinished_chunk_runs_again_completely_and_adds_only_missing_rows(data_file, tmp_path):
    config = config_for(data_file)
    run(config, tmp_path / "out")
    path = tmp_path / "out" / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    expected = comparable(rows(tmp_path / "out"))
    path.write_text("".join(lines[:4] + lines[5:]))  # the second victim of a chunk of two is gone
    run(config, tmp_path / "out", resume=True)
    got = comparable(rows(tmp_path / "out"))
    assert sorted(got, key=json.dumps) == sorted(expected, key=json.dumps)


def test_results_are_never_overwritten(data_file, tmp_path):
    config = config_for(data_file, defenses=("none",), attacks=("idlg:iterations=1",))
    run(config, tmp_path / "out")
    with pytest.raises(OutputError, match="holds an audit already; continue it with --resume"):
        run(config, tmp_path / "out")
    with pytest.raises(OutputError, match="seed was 0, now 1.*rows of both would be mixed"):
        run(
            config_for(data_file, defenses=("none",), attacks=("idlg:iterations=1",), seed=1),
            tmp_path / "out",
            resume=True,
        )


def test_results_without_a_config_are_not_adopted(data_file, tmp_path):
    config = config_for(data_file, defenses=("none",), attacks=("idlg:iterations=1",))
    run(config, tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    with pytest.raises(OutputError, match="holds results.jsonl but no config.json"):
        run(config, tmp_path / "out")


def test_other_data_under_the_same_name_is_not_mixed_in(data_file, tmp_path):
    config = config_for(data_file, defenses=("none",), attacks=("idlg:iterations=1",))
    run(config, tmp_path / "out")
    arrays = dict(np.load(data_file))
    arrays["y_test"] = 1 - arrays["y_test"]
    np.savez(data_file, **arrays)
    with pytest.raises(OutputError, match="victim_labels was"):
        run(config, tmp_path / "out", resume=True)


OWN_MODEL = """
from torch import nn
def build(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.ReLU(), nn.Linear(4, classes))
"""


@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        ("nn.ReLU()", "nn.Sigmoid()", "model_file_digest was"),  # the weights do not show it
        ("return", "nn.Linear(1, 1); return", "model_file_digest was"),  # draws other weights
    ],
)
def test_another_model_under_the_same_name_is_not_mixed_in(data_file, tmp_path, old, new, differs):
    file = tmp_path / "mine.py"
    config = config_for(data_file, model=f"{file}@build", defenses=("none",), attacks=("idlg:iterations=1",), rounds=1)
    file.write_text(OWN_MODEL)
    run(config, tmp_path / "out")
    run(config, tmp_path / "out", resume=True)
    file.write_text(OWN_MODEL.replace(old, new))
    with pytest.raises(OutputError, match=f"{differs}.*or restore what it ran with"):
        run(config, tmp_path / "out", resume=True)


HOSTILE_MODEL = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
"""


def test_a_model_file_that_changed_is_not_run(data_file, tmp_path):
    file = tmp_path / "mine.py"
    config = config_for(data_file, model=f"{file}@build", defenses=("none",), attacks=("idlg:iterations=1",), rounds=1)
    file.write_text(OWN_MODEL)
    run(config, tmp_path / "out")
    file.write_text(HOSTILE_MODEL + OWN_MODEL)
    with pytest.raises(OutputError, match="model_file_digest was"):
        run(config, tmp_path / "out", resume=True)
    assert not (tmp_path / "ran").exists()
    run(config, tmp_path / "new")
    assert (tmp_path / "ran").exists(), "the file would have touched it; else this test shows nothing"


def test_a_row_with_another_seed_is_refused_before_anything_runs(data_file, tmp_path):
    config = config_for(data_file, defenses=("none",), attacks=("idlg:iterations=1",), rounds=1)
    run(config, tmp_path / "out")
    path = tmp_path / "out" / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], lines[-1].replace('"seed": 0', '"seed": 1')]))
    before = path.read_bytes()
    data_file.unlink()  # nothing is loaded
    with pytest.raises(DataError, match="results.jsonl line 6: 'seed' must be 0, as config.json has it, got 1"):
        run(config, tmp_path / "out", resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("split", ["x_train", "x_test"])
def test_other_images_with_the_same_labels_are_not_mixed_in(data_file, tmp_path, split):
    config = config_for(data_file, defenses=("none",), attacks=("idlg:iterations=1",), rounds=1)
    run(config, tmp_path / "out")
    arrays = dict(np.load(data_file))
    arrays[split][-1, 0, 0, 0] ^= 1
    np.savez(data_file, **arrays)
    with pytest.raises(OutputError, match="data_digest was"):
        run(config, tmp_path / "out", resume=True)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_is_named(data_file, tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(content)
    with pytest.raises(DataError, match="config.json: expected"):
        run(config_for(data_file), tmp_path / "out", resume=True)


def test_two_audits_do_not_write_into_one_folder(data_file, tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"), pytest.raises(OutputError, match="another audit is writing into"):
        run(config_for(data_file), tmp_path / "out")


def test_the_undefended_baseline_comes_first_wherever_it_is_listed(data_file, tmp_path):
    config = config_for(data_file, defenses=("top-k:keep=0.01", "none"), attacks=("idlg:iterations=1",), lr=0.1)
    run(config, tmp_path / "out")
    undefended, top_k = rows(tmp_path / "out", "utility.jsonl")
    assert undefended["defense"] == "none"
    assert top_k["baseline_accuracy"] == undefended["accuracy"]


def test_a_training_that_diverges_is_a_row_like_any_other(data_file, tmp_path):
    spec = "gaussian-noise:std=1e+37"
    run(config_for(data_file, defenses=("none", spec), attacks=("idlg:iterations=1",)), tmp_path / "out")
    row = rows(tmp_path / "out", "utility.jsonl")[1]
    assert row["diverged"] is not None
    assert 0 <= row["accuracy"] <= 1


def test_known_labels_are_given_to_the_attacker(data_file, tmp_path):
    """Under heavy noise inferred labels are wrong for some victims; known ones never are."""
    for labels in ("infer", "known"):
        config = config_for(
            data_file, labels=labels, victims=12, defenses=("gaussian-noise:std=10",), attacks=("idlg:iterations=1",)
        )
        run(config, tmp_path / labels)

    def right(labels):
        return [row["label_correct"] for row in rows(tmp_path / labels) if row["defense"] == "gaussian-noise"]

    assert set(right("known")) == {1.0}
    assert 0.0 in right("infer")


def test_a_model_in_double_precision_is_audited(data_file, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build(input_shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.Linear(4, classes)).double()\n"
    )
    run(config_for(data_file, model=f"{tmp_path / 'mine.py'}@build", defenses=("none",)), tmp_path / "out")
    assert len(rows(tmp_path / "out")) == 3 + 2 * 3


def test_a_defense_that_prepares_and_announces_is_served(data_file, tmp_path, monkeypatch):
    """From end to end: public images, an announcement, and updates that need both."""
    monkeypatch.setattr(DEFENSES, "_factories", dict(DEFENSES._factories))

    @DEFENSES.register("whole-way")
    @dataclass(frozen=True, repr=False)
    class WholeWay(Perturbation):
        paper = "-"
        announces = needs_preparing = True
        images: int | None = state()

        def prepare(self, task, *, public=None, generator=None):
            return Prepared(replace(self, images=len(public[0])), task)

        def make_announcement(self, client):
            return {"images": torch.tensor(self.images)}

        def make_update(self, client):
            assert int(client.announced["images"]) == 100
            return super().make_update(client)

        def perturb_rows(self, rows, draws):
            return rows.clone()

    run(config_for(data_file, defenses=("whole-way",), attacks=("idlg:iterations=1",)), tmp_path / "out")
    assert [row["defense"] for row in rows(tmp_path / "out", "utility.jsonl")] == ["none", "whole-way"]


@pytest.mark.parametrize(
    ("publisher", "words"),
    [("honest", "another, honest client"), ("lying", "a liar announced"), ("victim", "what it announced itself")],
)
def test_the_report_says_who_published(data_file, tmp_path, publisher, words):
    spec = "aligned-dual-pruning:k1=0.05,keep=0.2+error-feedback"
    options = {"defenses": (spec,), "attacks": ("idlg:iterations=1",), "rounds": 1, "victims": 1}
    run(config_for(data_file, publisher=publisher, **options), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["publisher"] == publisher
    assert f"--publisher {publisher}" in config["command"]
    assert list(config["caveats"]) == [spec]
    said = [sentence for sentence in report.verdict(report.read(tmp_path / "out")) if words in sentence]
    assert said
    assert said[0].startswith("Note: ")


def test_what_a_client_really_trained_on_is_scored_too(data_file, tmp_path):
    defenses = ("ats:policy=invert", "ats:policy=flip+top-k:keep=0.9", "dp-sgd:noise_multiplier=2")
    config = config_for(data_file, defenses=defenses, attacks=("idlg:iterations=60",), victims=1)
    run(config, tmp_path / "out")
    by_defense = {row["defense_spec"]: row for row in rows(tmp_path / "out") if not row["adaptive"]}
    assert by_defense["none"]["trained_on"] is None
    inverted = by_defense[next(spec for spec in by_defense if spec and "invert" in spec)]
    assert inverted["trained_on"]["psnr"] > inverted["psnr"] + 10  # the attack finds what was shared, not the original
    assert by_defense[next(spec for spec in by_defense if spec and "flip" in spec)]["trained_on"]["mse"] >= 0
    utility = {row["defense"]: row for row in rows(tmp_path / "out", "utility.jsonl")}
    assert utility["dp-sgd"]["epsilon"] > 0
    assert "fixed-size batches" in utility["dp-sgd"]["privacy"]
    assert utility["none"]["epsilon"] is None


def test_more_victims_than_images_are_refused(data_file, tmp_path):
    with pytest.raises(ParameterError, match="61 victims of 1 images need 61 of them, the test split has 60"):
        run(config_for(data_file, victims=61), tmp_path / "out")


def test_missing_lpips_weights_are_reported(data_file, tmp_path, monkeypatch):
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "nothing"))
    config = config_for(data_file, defenses=("none",), attacks=("idlg:iterations=1",))
    with pytest.warns(UserWarning, match="gradveil data get lpips-alex"):
        run(config, tmp_path / "out")
    assert {row["lpips"] for row in rows(tmp_path / "out")} == {None}


def test_an_active_server_is_audited_on_the_model_it_sent(data_file, tmp_path):
    """Both blocks recover undefended images, and the defense runs on the changed model as on any other."""
    config = config_for(
        data_file,
        model="lenet",
        batch_size=2,
        defenses=("none", "top-k:keep=0.05"),
        attacks=("robbing-the-fed:bins=32", "loki:clients=2,bins=32"),
    )
    run(config, tmp_path / "out")
    for attack in ("robbing-the-fed", "loki"):
        psnr = {
            defense: [r["psnr"] for r in rows(tmp_path / "out") if (r["attack"], r["defense"]) == (attack, defense)]
            for defense in ("none", "top-k")
        }
        assert max(psnr["none"]) > 60
        assert max(psnr["none"]) > max(psnr["top-k"]) + 20
    assert {r["attack"]: r["server"] for r in rows(tmp_path / "out")} == {
        "blind-guess": "passive",
        "robbing-the-fed": "active",
        "loki": "active",
    }


def attackers(folder):
    """The attackers that each defense met."""
    met = {}
    for row in rows(folder):
        met.setdefault(row["defense"], set()).add(row["adaptive"])
    return met


ADAPTIVE = {"defenses": ("refiner:epsilon=5",), "attacks": ("idlg:iterations=20",), "rounds": 1}


def test_a_defense_meets_attackers_that_know_it_and_that_do_not(data_file, tmp_path):
    config = config_for(data_file, **ADAPTIVE)
    run(config, tmp_path / "out")
    assert attackers(tmp_path / "out") == {None: {False}, "none": {False}, "refiner": {False, True}}
    both = [row for row in rows(tmp_path / "out") if row["defense"] == "refiner"]
    assert len(both) == 2 * 3
    assert len({row["image"] for row in both}) == 2 * 3
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["adapted"] == [[config.defenses[1], config.attacks[0]]]
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    run(config, tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before  # nothing is missing


@pytest.mark.parametrize("adaptive", [True, False])
def test_only_one_kind_of_attacker(data_file, tmp_path, adaptive):
    run(config_for(data_file, adaptive=adaptive, **ADAPTIVE), tmp_path / "out")
    assert attackers(tmp_path / "out") == {None: {False}, "none": {False}, "refiner": {adaptive}}


def test_an_attack_without_an_adaptive_form_stays_plain(data_file, tmp_path, monkeypatch):
    plain = ATTACKS.get("idlg").check_threat

    def check_threat(self, task, threat):
        if threat.adaptive:
            raise ThreatModelError("idlg: has no adaptive form")
        plain(self, task, threat)

    monkeypatch.setattr(ATTACKS.get("idlg"), "check_threat", check_threat)
    run(config_for(data_file, adaptive=True, **ADAPTIVE), tmp_path / "out")
    assert attackers(tmp_path / "out") == {None: {False}, "none": {False}, "refiner": {False}}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["adapted"] == []


def test_a_defense_is_prepared_once_for_all_attacks_and_chunks(data_file, tmp_path, monkeypatch):
    monkeypatch.setattr(DEFENSES, "_factories", dict(DEFENSES._factories))
    prepared = []

    @DEFENSES.register("counting")
    @dataclass(frozen=True, repr=False)
    class Counting(Perturbation):
        paper = "-"

        def prepare(self, task, *, public=None, generator=None):
            prepared.append(task)
            return Prepared(self, task)

        def perturb_rows(self, rows, draws):
            return rows.clone()

    run(config_for(data_file, defenses=("counting",)), tmp_path / "out")  # two attacks, two chunks
    assert len(prepared) == 2  # for the attacks and for the training
    prepared.clear()
    active = ("robbing-the-fed:bins=8", "idlg:iterations=1")
    run(config_for(data_file, model="lenet", defenses=("counting",), attacks=active), tmp_path / "active")
    assert len({id(task) for task in prepared}) == 2  # the active server sends another model
    assert len(prepared) == 3


def test_the_losses_of_the_search_are_written(data_file, tmp_path):
    attacks = ("idlg:iterations=20,restarts=3", "dlg:iterations=1", "r-gap")
    run(config_for(data_file, defenses=("none",), attacks=attacks, rounds=1), tmp_path / "out")
    by_attack = {row["attack"]: row for row in rows(tmp_path / "out")}
    searched = by_attack["idlg"]
    assert searched["loss_start"] > searched["loss_late"] >= searched["loss"] == min(searched["loss_restarts"])
    assert len(searched["loss_restarts"]) == 3
    assert by_attack["r-gap"]["loss_start"] is None  # a closed form does not search


def test_power_is_what_was_changed(data_file, tmp_path):
    defenses = ("secure-aggregation", "top-k:keep=0.5", "precode:width=8")
    run(config_for(data_file, defenses=defenses, attacks=("idlg:iterations=1",), rounds=1), tmp_path / "out")
    power = {row["defense"]: row["power"] for row in rows(tmp_path / "out")}
    assert power["none"] == power["secure-aggregation"] == 0  # a sum over one client hides nothing
    assert 0 < power["top-k"] < 0.5
    assert power["precode"] is power[None] is None  # another model, so no gradient to compare with


def test_aggregated_clients_are_seen_as_the_defense_allows(data_file, tmp_path):
    """If only the sum is seen, the attacker searches for all images at once; otherwise client by client."""
    config = config_for(
        data_file,
        defenses=("secure-aggregation",),
        attacks=("idlg:iterations=60",),
        aggregated=3,
        labels="known",
        victims=2,
        rounds=1,
    )
    run(config, tmp_path / "out")
    assert {row["aggregated"] for row in rows(tmp_path / "out")} == {3}
    psnr, power = (
        {
            defense: [row[figure] for row in rows(tmp_path / "out") if row["defense"] == defense]
            for defense in ("none", "secure-aggregation")
        }
        for figure in ("psnr", "power")
    )
    assert len(json.loads((tmp_path / "out" / "config.json").read_text())["victim_labels"][0]) == 3
    assert power["none"] == [0, 0]
    assert min(power["secure-aggregation"]) > 0.05
    assert min(psnr["none"]) > 40
    assert np.mean(psnr["none"]) > np.mean(psnr["secure-aggregation"]) + 5


def test_defenses_are_matched_by_how_often_the_server_names_the_right_candidate(data_file, tmp_path):
    config = config_for(
        data_file,
        defenses=("gaussian-noise",),
        attacks=("idlg:iterations=1",),
        match="named=0.3",
        games=40,
        candidates=20,
        rounds=1,
    )
    run(config, tmp_path / "out")
    (matched,) = rows(tmp_path / "out", "match.jsonl")
    assert abs(matched["cost"] - 0.3) <= matched["tolerance"] == pytest.approx(0.06)
    played = [row for row in rows(tmp_path / "out", "identification.jsonl") if row["defense_spec"] == matched["found"]]
    assert max(row["named"] for row in played) / 40 == pytest.approx(matched["cost"])
    with pytest.raises(ParameterError, match="match=named=0.3 takes identification games, got games=0"):
        replace(config, games=0)


def test_matched_defenses_are_audited_at_the_strength_that_was_found(data_file, tmp_path):
    config = config_for(
        data_file,
        match="power=0.3",
        defenses=("gaussian-noise", "top-k+error-feedback", "secure-aggregation"),
        attacks=("idlg:iterations=1",),
        rounds=1,
    )
    with pytest.warns(UserWarning, match="secure-aggregation has no parameter .*; it is left out"):
        run(config, tmp_path / "out")
    matches = {row["asked"].partition(":")[0]: row for row in rows(tmp_path / "out", "match.jsonl")}
    assert matches.pop("secure-aggregation")["found"] is None
    assert all(abs(row["cost"] - 0.3) <= row["tolerance"] for row in matches.values())
    found = {row["found"] for row in matches.values()}
    assert {row["defense_spec"] for row in rows(tmp_path / "out")} == {None, "none", *found}
    assert {row["defense_spec"] for row in rows(tmp_path / "out", "utility.jsonl")} == {"none", *found}
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    run(config, tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before
    assert len(rows(tmp_path / "out", "match.jsonl")) == 3


# -- identification ----------------------------------------------------------------------------------------------------


def identifications(folder: Path) -> list[dict]:
    unstable = {"seconds", "digest"}
    return [{k: v for k, v in row.items() if k not in unstable} for row in rows(folder, "identification.jsonl")]


def test_games_are_played_under_every_defense_and_not_again(data_file, tmp_path, monkeypatch):
    config = config_for(data_file, attacks=("idlg:iterations=1",), victims=1, rounds=1, candidates=12, games=6)
    run(config, tmp_path / "whole")
    found = identifications(tmp_path / "whole")
    assert [(row["defense"], row["adaptive"]) for row in found] == [
        ("none", False),
        ("gaussian-noise", False),
        ("gaussian-noise", True),
        ("top-k+error-feedback", False),
        ("top-k+error-feedback", True),
    ]
    assert all((row["candidates"], row["games"]) == (12, 6) for row in found)
    assert found[0]["named"] == 6  # a single example of a linear model, undefended

    play, played = games.play, []

    def interrupted(*arguments, **settings):
        played.append(settings["adaptive"])
        if len(played) == 3:
            raise KeyboardInterrupt
        return play(*arguments, **settings)

    monkeypatch.setattr(games, "play", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "parts")
    assert len(identifications(tmp_path / "parts")) == 2
    run(config, tmp_path / "parts", resume=True)
    assert len(played) == 6
    without_audit = [{k: v for k, v in row.items() if k != "audit"} for row in identifications(tmp_path / "parts")]
    assert without_audit == [{k: v for k, v in row.items() if k != "audit"} for row in found]
    assert "Shown 12 candidate images" in " ".join(report.verdict(tmp_path / "parts"))


@pytest.mark.parametrize("changes", [{"games": 0}, {"aggregated": 2}])
def test_without_games_or_for_groups_of_clients_none_are_played(data_file, tmp_path, changes):
    settings = {"attacks": ("idlg:iterations=1",), "victims": 1, "rounds": 1, "games": 6, "candidates": 12, **changes}
    run(config_for(data_file, defenses=("none",), **settings), tmp_path / "out")
    assert not (tmp_path / "out" / "identification.jsonl").exists()
    page = report.write(tmp_path / "out").read_text()
    assert "groups of 2" in page if "aggregated" in changes else "Not tried" in page


def test_candidates_are_at_most_those_that_there_are(data_file, tmp_path):
    settings = {"attacks": ("idlg:iterations=1",), "victims": 1, "rounds": 1, "games": 2, "candidates": 100_000}
    run(config_for(data_file, defenses=("none",), batch_size=2, **settings), tmp_path / "out")
    [row] = identifications(tmp_path / "out")
    assert row["candidates"] == len(np.load(data_file)["x_test"]) - 1
