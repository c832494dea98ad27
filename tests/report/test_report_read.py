"""Audit folders from disk: labels, gaps, torn and broken files."""

import json
from collections import Counter
from pathlib import Path

import pytest

from gradveil import report
from gradveil.audit.rows import VERSION, MethodId
from gradveil.core.errors import DataError, GradveilError
from gradveil.report.read import read


def test_a_whole_audit_is_read_as_it_was_asked_for(make_audit):
    draft = make_audit()
    audit = read(draft.write())
    assert list(audit.defenses) == draft.config["defenses"]
    assert [attack.title for attack in audit.attacks] == draft.config["attacks"]
    assert len(audit.attempts) == 6 * 2 * 4
    assert len(audit.blind) == 4
    assert set(audit.utility) == set(audit.defenses)
    assert audit.missing_attempts() == []
    assert audit.missing_utility() == []
    assert audit.torn == ()


def test_adaptive_rows_are_an_attack_of_their_own_with_the_plain_baseline(make_audit):
    draft = make_audit(attacks=[("idlg", {"iterations": 100}, 0.02)])
    adaptive = [{**row, "adaptive": True} for row in draft.rows(defense="top-k")]
    draft.results += adaptive
    audit = read(draft.write())
    assert [attack.title for attack in audit.attacks] == ["idlg:iterations=100", "idlg:iterations=100 (adaptive)"]
    assert audit.short_name(audit.attacks[1]) == "idlg (adaptive)"
    assert len(audit.without_defense(audit.attacks[1])) == 4
    assert audit.missing_attempts() == []


def test_short_names_keep_the_parameters_that_tell_two_attacks_apart(make_audit):
    draft = make_audit(attacks=[("idlg", {"iterations": 1}, 0.9), ("idlg", {"iterations": 100}, 0.0)])
    audit = read(draft.write())
    assert [audit.short_name(attack) for attack in audit.attacks] == ["idlg:iterations=1", "idlg:iterations=100"]


def test_missing_rows_are_named(make_audit):
    draft = make_audit()
    draft.results.remove(draft.rows("top-k", "idlg")[2])
    draft.utility = [row for row in draft.utility if row["defense"] != "top-k"]
    audit = read(draft.write())
    assert audit.missing_attempts() == [("top-k:keep=0.2", MethodId("idlg:iterations=100"), 2)]
    assert audit.missing_utility() == ["top-k:keep=0.2"]


def test_an_audit_that_only_began_has_no_rows(make_audit):
    folder = make_audit().write()
    (folder / "results.jsonl").unlink()
    (folder / "utility.jsonl").unlink()
    audit = read(folder)
    assert audit.attempts == audit.blind == ()
    assert len(audit.missing_attempts()) == 6 * 2 * 4


@pytest.mark.parametrize("kept", [1, 17, -1])
def test_a_torn_last_line_is_left_out_and_named(make_audit, kept):
    folder = make_audit().write()
    path = folder / "results.jsonl"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, last[:kept]]))
    audit = read(folder)
    assert audit.torn == ("results.jsonl",)
    assert len(audit.attempts) == 6 * 2 * 4 - 1


def test_a_whole_last_line_without_line_end_counts(make_audit):
    folder = make_audit().write()
    path = folder / "results.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    audit = read(folder)
    assert audit.torn == ()
    assert len(audit.attempts) == 6 * 2 * 4


def test_a_broken_line_is_refused_with_its_number(make_audit):
    folder = make_audit().write()
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = lines[2][:40] + "\n"
    path.write_text("".join(lines))
    with pytest.raises(DataError, match=r"results.jsonl line 3: expected JSON"):
        read(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("psnr", "loud", "'psnr' must be a finite number from 0 to 100, got 'loud'"),
        ("psnr", None, "'psnr' must be a finite number from 0 to 100, got None"),
        ("psnr", 1e308, "'psnr' must be a finite number from 0 to 100, got 1e"),
        ("psnr", 10**400, "'psnr' must be a finite number from 0 to 100, got a number of more than 18 digits"),
        ("mse", -0.5, "'mse' must be a finite number from 0 to 1, got -0.5"),
        ("leaked", 1, "'leaked' must be true or false, got 1"),
        ("victim", -1, "'victim' must be a whole number from 0 to 1,000,000, got -1"),
        ("victim", True, "'victim' must be a whole number from 0 to 1,000,000, got True"),
        ("victim", 4, "'victim' must be a number below 4, the victims of the audit, got 4"),
        ("defense_spec", None, "'defense_spec' must be a defense of the audit, got None"),
        ("defense_spec", "top-k:keep=0.3", "'defense_spec' must be a defense of the audit, got 'top-k:keep=0.3'"),
        ("attack_spec", 3, "'attack_spec' must be a text of .*, got 3"),
        ("attack_spec", "dlg", "'attack_spec' must be an attack of the audit, got 'dlg'"),
        ("attack_spec", "idlg\x1b[2J", "'attack_spec' must be a text of at most 10,000 printable characters"),
        ("adaptive", True, "'adaptive' must be False, as config.json has it, got True"),
        ("image", 3, "'image' must be a path images/NAME.png or images/NAME.json, or null, got 3"),
        ("seed", 1, "'seed' must be 0, as config.json has it, got 1, a row of another audit"),
        ("model", "mlp", "'model' must be 'lenet:init=uniform', as config.json has it, got 'mlp', a row of another"),
        ("dataset", "cifar10", "'dataset' must be 'mnist', as config.json has it, got 'cifar10', a row of another"),
        ("audit", "a" * 16, "'audit' must be [0-9a-f]{16}, as config.json has it, got a{16}, a row of another audit"),
        ("note", "hello", "expected only the keys that gradveil writes, got also 'note'"),
    ],
)
def test_a_wrong_value_is_refused_by_name(make_audit, key, value, message):
    draft = make_audit()
    draft.rows()[0][key] = value
    draft.config["adapted"] = []
    with pytest.raises(DataError, match=message):
        read(draft.write())


def test_a_missing_value_is_refused_by_name(make_audit):
    draft = make_audit()
    del draft.utility[1]["accuracy"]
    with pytest.raises(
        DataError, match=r"utility.jsonl line 2: 'accuracy' must be a finite number from 0 to 1, got nothing"
    ):
        read(draft.write())


def test_a_line_that_is_no_object_is_refused(make_audit):
    folder = make_audit().write()
    (folder / "utility.jsonl").write_text("[1, 2]\n")
    with pytest.raises(DataError, match=r"utility.jsonl line 1: expected a JSON object, got \[1, 2\]"):
        read(folder)


def test_a_row_that_is_there_twice_is_refused(make_audit):
    draft = make_audit()
    draft.results.append(draft.rows("top-k", "idlg")[1])
    with pytest.raises(DataError, match=r"two rows for \(top-k:keep=0.2, idlg:iterations=100, False, 1\)"):
        read(draft.write())


def test_a_folder_without_config_is_no_audit(tmp_path):
    with pytest.raises(DataError, match="not an audit folder"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("defenses", "none", "'defenses' must be a list of at most 200, each a text"),
        ("defenses", None, "'defenses' must be a list of at most 200, each a text of .*, got None"),
        ("defenses", [], "'defenses' must be a list of at least one text, none of them twice, got none"),
        ("attacks", [["idlg"]], "'attacks' must be a list of at most 200, each a text"),
        ("attacks", ["idlg", "idlg"], "'attacks' must be .* none of them twice, got 'idlg' twice"),
        ("victims", "4", "'victims' must be a whole number"),
        ("victims", 10**12, "'victims' must be a whole number from 1 to 1,000,000"),
        ("victim_labels", [[1]], r"'victim_labels' must be 4 lists of 1 labels, got \[\[1\]\]"),
        ("victim_labels", [[1], [1], [1], [99]], "'victim_labels' must be labels below 10, the classes, got 99"),
        ("adapted", [["none", "dlg"]], "'adapted' must be a list of pairs of a defense and an attack of this audit"),
        ("input_shape", [28, 28], "'input_shape' must be 3 whole numbers"),
        ("lr", float("inf"), "expected JSON"),
        ("model", "mine.py@build", "'model_file_digest' must be the digest of the model's file"),
        ("command", "rm -rf .", "'command' must be the command of these settings .* got 'rm -rf .'"),
        ("favourite_colour", "teal", "expected only the keys that gradveil writes, got also 'favourite_colour'"),
    ],
)
def test_a_wrong_config_is_refused(make_audit, key, value, message):
    draft = make_audit()
    config = {**draft.complete_config(), key: value}
    draft.write()
    (draft.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=message):
        read(draft.folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "modality",
            "smell",
            "unknown modality 'smell'; .*; if a package of your own adds it, import that first",
        ),
        (
            "metrics",
            {"psnr": True, "smell": True},
            "unknown metric 'smell'; .*; if a package of your own adds it, import",
        ),
        ("metrics", {"ssim": True}, r"'metrics' must be metrics for image, psnr among them, got \['ssim'\]"),
        ("metrics", {"psnr": False}, "'metrics' must be metrics for image, psnr among them"),
        ("metrics", ["psnr"], "'metrics' must be an object of at most 1,000 entries, each true or false"),
        ("caveats", {"top-j": ["it is new."]}, "'caveats' must be an object of defenses and attacks of this audit"),
        ("caveats", {"none": ["\x1b[2J"]}, "'caveats' must be an object .* each a text of .* printable characters"),
        ("victim_labels", [[1.5], [1], [1], [1]], "'victim_labels' must be labels below 10, the classes, got 1.5"),
        ("victim_labels", [[[1]], [1], [1], [1]], "'victim_labels' must be labels below 10, the classes"),
    ],
)
def test_what_the_report_is_to_believe_of_methods_and_metrics_is_checked(make_audit, key, value, message):
    draft = make_audit()
    draft.config[key] = value
    with pytest.raises(DataError, match=message):
        read(draft.write())


@pytest.mark.parametrize(("version", "got"), [(1, "1"), (99, "99"), ("2", "'2'"), (None, "'none'"), (True, "True")])
def test_another_version_is_refused_by_its_number(make_audit, version, got):
    draft = make_audit()
    draft.config["version"] = version
    if version is None:
        del draft.config["version"]  # as in folders older than the version key
    message = rf"config.json: expected an audit folder of version {VERSION}, got {got}; run the audit again"
    with pytest.raises(DataError, match=message):
        read(draft.write())


def test_everything_is_read_once(make_audit, monkeypatch):
    folder = make_audit().write()
    count: Counter[str] = Counter()
    plain = Path.read_bytes

    def counted(path):
        if path.is_relative_to(folder):
            count[path.name] += 1
        return plain(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    audit = report.read(folder)
    report.write(audit)
    report.verdict(audit)
    report.raised_flags(audit)
    report.summary(audit)
    assert set(count) >= {"config.json", "results.jsonl", "utility.jsonl", "match.jsonl", "original-v0.png"}
    assert set(count.values()) == {1}


@pytest.mark.parametrize("key", ["gradveil", "adapted", "seed", "digest"])
def test_a_config_without_a_key_is_refused(make_audit, key):
    draft = make_audit()
    config = draft.complete_config()
    del config[key]
    draft.write()
    (draft.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=f"config.json: '{key}' must be .* got nothing"):
        read(draft.folder)


def test_a_number_that_was_changed_to_another_plausible_one_is_found(make_audit):
    folder = make_audit().write()
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    row = json.loads(lines[6])
    lines[6] = json.dumps({**row, "psnr": row["psnr"] + 1}) + "\n"
    path.write_text("".join(lines))
    with pytest.raises(DataError, match=r"results.jsonl line 7: expected values with the digest .* damaged or edited"):
        read(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "platform": "elsewhere"}))
    with pytest.raises(DataError, match=r"config.json: expected values with the digest"):
        read(folder)


def test_rows_of_another_audit_are_refused(make_audit):
    """Two audits whose rows look alike."""
    folder = make_audit().write()
    ours = (folder / "results.jsonl").read_text()
    draft = make_audit()
    draft.config["data_digest"] = "f" * 16
    theirs = (draft.write() / "results.jsonl").read_text().splitlines(keepends=True)
    make_audit().write()
    (folder / "results.jsonl").write_text("".join([*ours.splitlines(keepends=True)[:-1], theirs[-1]]))
    with pytest.raises(DataError, match=r"results.jsonl line 52: 'audit' must be .* a row of another audit"):
        read(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a": ' * 50_000,
        b"\xff\xfe",
        b'{"victims": ' + b"9" * 5000 + b"}",
        b'{"a": 1, "a": 2}',
        b"NaN",
    ],
)
def test_hostile_json_is_a_data_error(make_audit, content):
    folder = make_audit().write()
    (folder / "config.json").write_bytes(content)
    with pytest.raises(DataError, match=r"config.json: expected JSON"):
        read(folder)


def test_a_link_out_of_the_folder_is_refused(make_audit, tmp_path):
    folder = make_audit().write()
    (tmp_path / "elsewhere.jsonl").write_bytes((folder / "utility.jsonl").read_bytes())
    (folder / "utility.jsonl").unlink()
    (folder / "utility.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    with pytest.raises(GradveilError, match=r"got 'utility.jsonl', a link to somewhere else"):
        read(folder)


def test_a_config_that_is_no_json_is_refused(make_audit):
    folder = make_audit().write()
    (folder / "config.json").write_text(json.dumps({"victims": 4})[:-1])
    with pytest.raises(DataError, match=r"config.json: expected JSON"):
        read(folder)
