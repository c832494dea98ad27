"""One runner for all experiments: rows that were kept before it count, trials do not, and what stopped goes on."""

import json
from pathlib import Path

import pytest

import gradveil
import kinds
import run
import tables
from gradveil.attacks import ATTACKS
from gradveil.core.errors import ParameterError
from gradveil.defenses import DEFENSES

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.parent.name for path in (ROOT / "experiments").glob("*/config.json"))
COMPLETE = ("baselines", "federation", "noise_recovery", "pruning_and_dropout")


@pytest.fixture(scope="module", autouse=True)
def apart():
    """Extensions bring methods of their own, which other tests must not meet; and the data is the embedded digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GRADVEIL_DATA", raising=False)
        for registry in (ATTACKS, DEFENSES):
            patch.setattr(registry, "_factories", dict(registry._factories))
        yield
    run._extension.cache_clear()
    kinds.load.cache_clear()


@pytest.fixture(scope="module", params=NAMES)
def experiment(request):
    return run.Experiment(ROOT / "experiments" / request.param)


def test_all_experiments_are_here():
    assert len(NAMES) == 10


def test_every_row_is_of_a_case_or_of_one_that_is_gone(experiment):
    files = {experiment.file_of(case) for case in experiment.cases.values()}
    assert set(experiment.folder.glob("*.jsonl")) == files
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    names = [experiment.name_of(row) for row in rows]
    assert len(set(names)) == len(rows)
    assert [name for name in names if name not in experiment.cases] == experiment.config.get("gone", [])


def test_what_was_finished_is_not_missing(experiment):
    missing = int(list(experiment.listing())[-1].split()[0])
    assert missing == len(experiment.cases) - len(experiment.rows) + len(experiment.config.get("gone", []))
    assert missing == 0 or experiment.folder.name not in COMPLETE


def test_every_case_names_what_there_is(experiment):
    known = {**kinds.KINDS, **experiment.extension.get("KINDS", {})}
    for case in experiment.cases.values():
        assert case["kind"] in known
        if "defense" in case and "blind" not in case["kind"]:
            gradveil.defense(case["defense"])
        if "trained_as" in case:
            gradveil.defense(case["trained_as"])
        if "attack" in case:
            kinds.attack_of(case)
        if "training" in case:
            assert case["training"]["rounds"] > 0


PAGES = {
    "adaptive": ("experiments/adaptive/README.md", None),
    "refiner": ("experiments/refiner/tables.md", None),
    "baselines": ("experiments/baselines/README.md", [0, 1]),
    "federation": ("docs/federation.md", [0, 1]),
    "pruning_and_dropout": ("docs/pruning-and-dropout.md", [0, 1, 2]),
    "optimal_defenses": ("docs/sensitivity.md", [0, 1]),
    "analytic_attacks": ("docs/active-servers.md", [1, 2, 4]),
}


def test_tables_are_those_of_the_docs(experiment, capsys):
    name = experiment.folder.name
    assert run.main([name, "--table"]) == 0
    printed = capsys.readouterr().out
    if name not in PAGES:
        assert printed.count("|---") > 3
        return
    page, which = PAGES[name]
    text = (ROOT / page).read_text()
    if which is None:
        assert text == printed
    for number in which or []:
        spec = {key: value for key, value in experiment.config["tables"][number].items() if key != "title"}
        assert "\n".join(tables.table(spec, experiment.views)) in text


def test_a_trial_does_not_go_into_the_kept_rows(capsys):
    with pytest.raises(SystemExit):
        run.main(["baselines", "--set", '{"victims": 1}'])
    assert "must not go into the kept rows; give --results FILE" in capsys.readouterr().err
    for place in ("baselines/results.jsonl", "trial.jsonl", "adaptive/trial.jsonl"):
        with pytest.raises(SystemExit):
            run.main(["baselines", "--results", str(ROOT / "experiments" / place)])
        assert "give --results a file somewhere else" in capsys.readouterr().err


def test_a_trial_changes_settings_that_cases_have(tmp_path):
    folder, rows = ROOT / "experiments" / "baselines", tmp_path / "rows.jsonl"
    trial = run.Experiment(folder, rows, {"victims": 2, "training": {"rounds": 3}})
    assert trial.cases["iDLG against none"]["victims"] == 2
    assert trial.cases["training under none"]["training"]["rounds"] == 3
    assert trial.cases["training under none"]["training"]["clients"] == 10
    assert list(trial.listing())[-1] == "59 of 59 missing"
    with pytest.raises(ParameterError, match="baselines: expected a setting that some case has, got 'victim'"):
        run.Experiment(folder, rows, {"victim": 2})


LOCAL = {"epochs": 1, "batch_size": 1, "lr": 0.01}
SMALL = {
    "settings": {"seed": 0, "dataset": "mnist", "model": "lenet:init=uniform", "victims": 2},
    "lists": {"defenses": ["none", {"defense": "gaussian-noise:std=0.1", "adaptive": True}]},
    "groups": [
        {"kind": "blind guess", "name": "guess"},
        {
            "kind": "attack",
            "name": "{attack} on {defense}",
            "attack": "idlg:iterations=3",
            "grid": {"defense": "@defenses"},
        },
        {
            "kind": "attack",
            "name": "{defense}, two rounds",
            "attack": "idlg:iterations=2",
            "labels": "known",
            "batch_size": 2,
            "rounds": 2,
            "each": True,
            "grid": {
                "defense": ["refiner:iterations=1", {"defense": "secure-aggregation", "local": LOCAL, "clients": 2}]
            },
        },
        {
            "kind": "training",
            "name": "training, seed {seed}",
            "defense": "top-k:keep=0.2+error-feedback",
            "averaged": 2,
            "training": {"rounds": 4, "clients": 2, "batch_size": 4, "lr": 0.1, "evaluate_every": 2},
            "train_examples": 300,
            "grid": {"seed": [0, 1]},
        },
    ],
    "tables": [],
}


def write(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("experiments") / "small", SMALL)
    experiment = run.Experiment(folder, folder / "trial.jsonl")
    assert experiment.run() == 0
    return experiment


def read(experiment):
    return [json.loads(line) for line in experiment.results.read_text().splitlines()]


def test_every_shared_kind_runs(finished):
    guess, plain, adaptive, refined, summed, first, second = read(finished)
    assert len(guess["psnr"]) == len(plain["psnr"]) == len(adaptive["psnr"]) == 2
    assert "form" not in plain
    assert adaptive["form"] == "prior"
    assert adaptive["power"][0] > plain["power"][0] == 0
    assert len(refined["psnr"]) == len(refined["against_trained_on"]["psnr"]) == 4
    assert max(refined["trained_on_itself"]["psnr"]) < 30
    assert len(summed["psnr"]) == 8
    assert [round_ for round_, _ in first["history"]] == [2, 4]
    assert first["accuracy"] == pytest.approx(sum(accuracy for _, accuracy in first["history"]) / 2, abs=1e-5)
    assert first["data"].startswith("Dataset('mnist' from ")
    assert first["losses"] != second["losses"]
    assert all(row["gradveil"] == gradveil.__version__ and row["seconds"] >= 0 for row in read(finished))
    assert not list(finished.folder.glob("checkpoints/*"))


def test_it_goes_on_after_a_torn_line_with_the_same_figures(finished, tmp_path):
    lines = finished.results.read_text().splitlines(keepends=True)
    torn = tmp_path / "torn.jsonl"
    torn.write_text("".join(lines[:2]) + lines[2][:40])
    again = run.Experiment(finished.folder, torn)
    assert again.run(only="gaussian") == 0
    same, before = ([{**row, "seconds": 0} for row in read(one)] for one in (again, finished))
    assert same == before[:3]
    again.run(only="gaussian")
    assert len(read(again)) == 3


def test_a_training_goes_on_from_its_checkpoint(finished, tmp_path):
    case = finished.cases["training, seed 0"]
    session = kinds.Session(tmp_path)
    short = {**case, "training": {**case["training"], "checkpoint_every": 1}}

    def stop(done, *_):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kinds.training(short, kinds.Session(tmp_path, stop))
    assert list(session.checkpoints(case).iterdir())
    seen = []
    row = kinds.training(short, kinds.Session(tmp_path, lambda done, *_: seen.append(done)))
    assert min(seen) > 1
    before = next(row for row in read(finished) if row["name"] == case["name"])
    assert run.json_ready(row)["losses"] == before["losses"]
    assert run.json_ready(row)["history"] == before["history"]


def test_the_embedded_digits_are_no_data_for_kept_rows(tmp_path, capsys):
    kept = run.Experiment(write(tmp_path / "kept", SMALL))
    assert kept.run(only="guess") == 1
    assert "refused: kept rows need more data than the embedded digits" in capsys.readouterr().out
    assert not (tmp_path / "kept" / "results.jsonl").exists()


def test_a_case_that_cannot_be_run_leaves_no_row(tmp_path, capsys):
    group = {"kind": "attack", "attack": "robbing-the-fed", "grid": {"defense": ["no-such-defense"]}}
    broken = run.Experiment(write(tmp_path / "broken", {**SMALL, "groups": [group]}), tmp_path / "rows.jsonl")
    assert list(broken.cases) == ["attack, defense no-such-defense"]
    assert broken.run() == 1
    assert "refused: unknown defense 'no-such-defense'" in capsys.readouterr().out
    assert not (tmp_path / "rows.jsonl").exists()


def test_two_cases_of_one_name_are_refused(tmp_path):
    groups = [{"kind": "attack", "name": "same", "grid": {"defense": ["none", "top-k"]}}]
    with pytest.raises(ParameterError, match="two: two cases are called 'same'; give each a name of its own"):
        run.Experiment(write(tmp_path / "two", {**SMALL, "groups": groups}))


def test_figures_are_finite_and_short():
    assert run.json_ready({"a": [1 / 3, float("nan"), (float("inf"), 2)], "b": {"c": 1e-20}}) == {
        "a": [0.333333, None, [None, 2]],
        "b": {"c": 1e-20},
    }


def test_cells_show_what_follows_from_rows():
    rows = {
        "plain": tables.View.of({"by": "ig", "psnr": [5.0, 7.0], "bytes": 100, "defense": "top-k:keep=0.1,form=x"}),
        "adaptive": tables.View.of({"by": "ig", "psnr": [15.0, 18.0], "bytes": 20, "inner": {"psnr": [1.0, 2.0]}}),
    }
    shows = (
        "{median_psnr:.1f}",
        "{base_mean_psnr:.1f}",
        "{gain_psnr}",
        "{ratio_bytes:.1f}",
        "{inner[max_psnr]}",
        "{no}",
    )
    spec = {"where": {"bytes": "2?"}, "base": "plain", "columns": [{"title": "t", "show": show} for show in shows]}
    assert tables.table(spec, rows)[2] == "| 16.5 | 6.0 | +10.0, +11.0 | 0.2 | 2.0 | – |"
    spec = {
        "lines": [{"metric": "psnr"}, {"metric": "bytes"}],
        "columns": [{"title": "max", "show": "{{max_{metric}}}, {{method}} {{strength}}", "from": "plain"}],
    }
    assert tables.table(spec, rows)[2:4] == ["| 7.0, top-k 0.1,form=x |", "| 100, top-k 0.1,form=x |"]


def test_a_gain_that_is_a_loss_for_certain_is_bold():
    assert tables.gain([1.0] * 8, [2.0] * 8) == "**-1.0 (-1.0 to -1.0)**"


def test_pictures_are_drawn_from_rows(experiment, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "experiments" / "refiner").mkdir(parents=True)
    for spec in experiment.config.get("plots", []):
        pytest.importorskip("matplotlib")
        assert tables.plot(spec, experiment.views, tmp_path).stat().st_size > 10_000
