"""One runner for all experiments: rows that were kept before it count, trials do not, and what stopped goes on."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gradveil
import kinds
import pinned
import run
import tables
from gradveil import data
from gradveil.attacks import ATTACKS
from gradveil.core.errors import DataError, ParameterError
from gradveil.defenses import DEFENSES
from gradveil.federation.job import as_batch

ROOT = Path(__file__).parents[2]
DATA = os.environ.get("GRADVEIL_DATA")
NAMES = sorted(path.parent.name for path in (ROOT / "experiments").glob("*/config.json"))
COMPLETE = ("baselines", "empirical_epsilon", "federation", "noise_recovery", "pruning_and_dropout")


@pytest.fixture(scope="module", autouse=True)
def apart():
    """Extensions bring methods of their own, which other tests must not meet; and the data is the embedded digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GRADVEIL_DATA", raising=False)
        for registry in (ATTACKS, DEFENSES):
            patch.setattr(registry, "_factories", dict(registry._factories))
        yield
    run._extension.cache_clear()
    forget_data()


def forget_data():
    pinned.load.cache_clear()
    pinned.check.cache_clear()


@pytest.fixture(scope="module", params=NAMES)
def experiment(request):
    return run.Experiment(ROOT / "experiments" / request.param)


def test_all_experiments_are_here():
    assert len(NAMES) == 22


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
    "learned_attackers": ("experiments/learned_attackers/README.md", None),
    "protocol": ("experiments/protocol/README.md", None),
    "trained_networks": ("experiments/trained_networks/README.md", None),
    "empirical_epsilon": ("experiments/empirical_epsilon/README.md", None),
    "faces": ("experiments/faces/README.md", None),
    "membership": ("experiments/membership/README.md", None),
    "exact_attacks": ("experiments/exact_attacks/README.md", None),
    "dager": ("experiments/dager/README.md", None),
    "text_refiner": ("experiments/text_refiner/README.md", None),
    "identification": ("experiments/identification/README.md", None),
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


def test_kept_rows_are_refused_other_data_than_the_pinned(tmp_path, capsys):
    kept = run.Experiment(write(tmp_path / "kept", SMALL))
    assert kept.run(only="guess") == 1
    said = capsys.readouterr().out
    assert (
        "refused: kept rows come from mnist with 20,000 train and 4,000 test examples, the first of each class in the "
        "original order (digest 1b594c855c2b61e7), got Dataset('mnist' from embedded digits: 4000 train" in said
    )
    assert "set GRADVEIL_DATA to a folder with that subset or with the whole data set (gradveil data get mnist)" in said
    assert not (tmp_path / "kept" / "results.jsonl").exists()


def random_split(count: int, seed: int) -> data.Split:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 1, 4, 4), generator=draw, dtype=torch.uint8)
    return data.Split(images, torch.randint(10, (count,), generator=draw))


@pytest.fixture
def whole_set(monkeypatch):
    """Random examples of ten classes in random order, and their subset as a data folder would hold it."""
    whole = data.Dataset("whole", tuple("0123456789"), "whole.npz", random_split(3000, 1), random_split(800, 2))
    subset = []
    for split, count in ((whole.train, 100), (whole.test, 30)):
        taken, chosen = [0] * 10, []
        for place, label in enumerate(split.targets.tolist()):
            if taken[label] < count:
                taken[label] += 1
                chosen.append(place)
        subset.append(replace(split, inputs=split.inputs[chosen], targets=split.targets[chosen]))
    cut = replace(whole, train=subset[0], test=subset[1])
    pin = {"train": 1000, "test": 300, "first_of_each_class": True, "digest": pinned.digest_of(cut)}
    monkeypatch.setitem(pinned.PINS, "whole", pin)
    yield whole, cut
    forget_data()


@pytest.mark.parametrize("has", ["the whole", "the subset"])
def test_who_has_the_whole_data_set_gets_the_subset_that_is_pinned(whole_set, has, monkeypatch):
    whole, cut = whole_set
    monkeypatch.setattr(data, "load", lambda _name: whole if has == "the whole" else cut)
    pinned.check("whole")
    loaded = pinned.load("whole")
    for split, expected in ((loaded.train, cut.train), (loaded.test, cut.test)):
        assert torch.equal(split.inputs, expected.inputs)
        assert torch.equal(split.targets, expected.targets)


@pytest.mark.parametrize("change", ["a pixel", "a label", "the order", "too few"])
def test_any_change_of_the_data_is_noticed(whole_set, change, monkeypatch):
    _, cut = whole_set
    inputs, targets = cut.test.inputs.clone(), cut.test.targets.clone()
    if change == "a pixel":
        inputs[7, 0, 1, 1] ^= 1
    elif change == "a label":
        targets[:2] = targets[:2].flip(0)
        assert targets[0] != targets[1]
    elif change == "the order":
        inputs, targets = inputs.flip(0), targets.flip(0)
    else:
        inputs, targets = inputs[1:], targets[1:]
    changed = replace(cut, test=replace(cut.test, inputs=inputs, targets=targets))
    monkeypatch.setattr(data, "load", lambda _name: changed)
    monkeypatch.setattr(data.catalog, "entry", lambda _name: data.catalog.DATASETS[0])
    with pytest.raises(DataError, match=r"kept rows come from whole with 1,000 train and 300 test .* \(digest .*, got"):
        pinned.check("whole")


def test_data_without_a_pin_is_refused(monkeypatch):
    monkeypatch.delitem(pinned.PINS, "mnist")
    forget_data()
    with pytest.raises(DataError, match="data.json has no 'mnist'; add it, with the digest"):
        pinned.check("mnist")
    forget_data()


@pytest.mark.filterwarnings("ignore:sst2. .* are left out")
@pytest.mark.parametrize("name", pinned.PINS)
def test_the_data_folder_holds_the_pinned_data(name, monkeypatch):
    if DATA is None:
        pytest.skip("GRADVEIL_DATA names no folder")
    monkeypatch.setenv("GRADVEIL_DATA", DATA)
    if data.find(name) is None:
        pytest.skip(f"{DATA} has no {name}")
    forget_data()
    pinned.check(name)
    forget_data()


PAGES_ON_CIFAR = [
    page
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*/*.md"))
    if "CIFAR-10" in page.read_text()
]


@pytest.mark.parametrize("page", PAGES_ON_CIFAR, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_say_which_images_of_cifar10_their_figures_come_from(page):
    pin = pinned.PINS["cifar10"]
    said = f"the first {pin['train'] // 10:,} training and {pin['test'] // 10} test images of each class"
    assert said in " ".join(page.read_text().split())


def test_every_data_set_of_a_case_is_pinned(experiment):
    assert {case["dataset"] for case in experiment.cases.values() if "dataset" in case} <= pinned.PINS.keys()


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


def test_joined_rows_show_their_numbers_together():
    rows = {
        f"{defense} {seed}": tables.View(name=f"{defense} {seed}", defense=defense, seed=seed, accuracy=accuracy)
        for defense, seed, accuracy in [("none", 0, 0.9), ("top-k", 0, 0.5), ("none", 1, 0.8), ("none", 2, 0.7)]
    }
    shown = "{mean_accuracy:.2f}, {min_accuracy} to {max_accuracy}, {count_seed}"
    spec = {"where": {}, "joined": "{defense}", "columns": [{"title": "t", "show": "{defense}: " + shown}]}
    lines = tables.table(spec, rows)[2:-1]
    assert lines == ["| none: 0.80, 0.7 to 0.9, 3 |", "| top-k: 0.50, 0.5 to 0.5, 1 |"]


@pytest.mark.parametrize(("bias", "expected"), [(0.1, 4), (0.4, 16), (1.0, 40)])
def test_the_root_set_has_the_share_of_a_class_that_its_bias_says(bias, expected):
    extension = run._extension(ROOT / "experiments" / "sensitivity" / "extension.py")
    case = {"dataset": "mnist", "model": "lenet", "seed": 0, "root_examples": 40, "root_bias": bias}
    inputs, labels = extension["root_set"](case, kinds.build(case))
    assert inputs.shape == (40, 1, 28, 28)
    assert int((labels == 0).sum()) == expected
    assert len(labels.unique()) > 5 or bias == 1.0


def test_compensation_is_measured_at_the_aspect_of_the_defense():
    extension = run._extension(ROOT / "experiments" / "sensitivity" / "extension.py")
    case = {"dataset": "mnist", "model": "lenet:activation=relu", "seed": 0, "local": LOCAL}
    rows = [
        extension["compensation"]({**case, "defense": f"risk-slicing:ratio=0.2,std=1,aspect={aspect}"}, None)
        for aspect in (1, 20)
    ]
    assert rows[0]["clean_norm"] == rows[1]["clean_norm"]
    assert rows[0]["cosine"]["before"] == pytest.approx(rows[1]["cosine"]["before"])
    assert rows[0]["cosine"]["after"] != pytest.approx(rows[1]["cosine"]["after"], abs=0.01)


def test_games_refute_the_broken_forms_of_dp_sgd_and_not_dp_sgd():
    experiment = run.Experiment(ROOT / "experiments" / "empirical_epsilon")
    by_form = {}
    for row in experiment.views.values():
        by_form.setdefault(row["form"], {})[row["name"]] = row
    kept = by_form.pop("dp-sgd")
    assert len(kept) == 20
    assert len(experiment.cases) == experiment.config["settings"]["cases_together"]
    for row in kept.values():
        assert row["refuted_by"] == []
        assert all(
            row[f"epsilon{delta}"] <= row[f"curve{delta}"] <= row[f"accountant{delta}"] for delta in ("_5", "_2")
        )
    one_round = kept["dp-sgd, multiplier 4, batch of 1"]
    assert one_round["accountant_5"] <= 3 * one_round["epsilon_5"]
    assert len(by_form) == 2
    for rows in by_form.values():
        assert {row["multiplier"] for row in rows.values()} == {1, 4, 10}
        for row in rows.values():
            assert "mu" in row["refuted_by"]
            assert row["multiplier"] == 1 or "epsilon at delta 0.01" in row["refuted_by"]


def test_cases_with_the_same_candidates_are_attacked_together_as_alone(tmp_path):
    """The slow way attacks each case by itself."""
    extension = run.Experiment(ROOT / "experiments" / "identification").extension
    case = {"seed": 0, "dataset": "mnist", "model": "lenet:init=uniform", "attack": "identification"}
    case |= {"candidates": 60, "games": 6, "distractors": "class", "defense": "gaussian-noise:std=0.01"}
    fast, slow = (extension["Together"]({**case, "batch_size": 8}, tmp_path) for _ in range(2))
    assert fast.fits
    slow.fits = False
    for inclusion in ("batch", "eighth", "one"):
        members, scores, _ = fast.play(inclusion, True, None)
        same, alone, _ = slow.play(inclusion, True, None)
        assert torch.equal(members, same)
        torch.testing.assert_close(scores, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("local", [{}, {"local": {"epochs": 2, "lr": 0.05}}])
def test_cases_with_the_same_clients_are_questions_about_the_same_updates(tmp_path, local):
    """The slow way makes a call for each game and inclusion, with that question's candidates alone."""
    extension = run.Experiment(ROOT / "experiments" / "identification").extension
    case = {"seed": 0, "dataset": "mnist", "model": "lenet:init=uniform", "attack": "identification", **local}
    case |= {"candidates": 40, "games": 3, "distractors": "class", "defense": "none", "clients": "shared"}
    fast = extension["Together"]({**case, "batch_size": 8}, tmp_path)
    games, updates = fast._send("batch")
    asked = extension["questions"](games, 40)
    threat = gradveil.ThreatModel(batch_size=8, local=gradveil.LocalSteps(2, None, 0.05) if local else None)
    for question, (inclusion, inside) in enumerate({"batch": 8, "eighth": 1, "one": 1}.items()):
        members, scores, _ = fast.play(inclusion, False, None)
        assert members.shape == scores.shape == (3, 40)
        assert members.sum(1).tolist() == 3 * [inside]
        for game, update in enumerate(updates):
            pool = games.pool[asked[game, question]]
            assert torch.equal(torch.isin(pool, games.batches[game]), members[game])
            candidates = as_batch(fast.prepared.task, games.split.batch(pool))
            alone = gradveil.attack("identification").identify(fast.prepared.task, update, candidates, threat).scores[0]
            assert float(torch.corrcoef(torch.stack([alone, scores[game].to(alone)]))[0, 1]) > 0.99
