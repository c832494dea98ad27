"""Audit folders from disk: labels, gaps, torn and broken files."""

import json

import pytest

from gradveil.errors import DataError
from gradveil.report.read import read


def test_a_whole_audit_is_read_as_it_was_asked_for(make_audit):
    made = make_audit()
    audit = read(made.write())
    assert list(audit.defenses) == made.config["defenses"]
    assert list(audit.attacks) == made.config["attacks"]
    assert len(audit.attempts) == 6 * 2 * 4
    assert len(audit.blind) == 4
    assert set(audit.utility) == set(audit.defenses)
    assert audit.missing_attempts() == []
    assert audit.missing_utility() == []
    assert audit.torn == ()


def test_adaptive_rows_are_an_attack_of_their_own_with_the_plain_baseline(make_audit):
    made = make_audit(attacks=[("idlg", {"iterations": 100}, 0.02)])
    adaptive = [{**row, "adaptive": True} for row in made.rows(defense="top-k")]
    made.results += adaptive
    audit = read(made.write())
    assert audit.attacks == ("idlg:iterations=100", "idlg:iterations=100 (adaptive)")
    assert audit.short(audit.attacks[1]) == "idlg (adaptive)"
    assert len(audit.without_defense(audit.attacks[1])) == 4
    assert audit.missing_attempts() == []


def test_short_names_keep_the_parameters_that_tell_two_attacks_apart(make_audit):
    made = make_audit(attacks=[("idlg", {"iterations": 1}, 0.9), ("idlg", {"iterations": 100}, 0.0)])
    audit = read(made.write())
    assert [audit.short(attack) for attack in audit.attacks] == ["idlg:iterations=1", "idlg:iterations=100"]


def test_missing_rows_are_named(make_audit):
    made = make_audit()
    made.results.remove(made.rows("top-k", "idlg")[2])
    made.utility = [row for row in made.utility if row["defense"] != "top-k"]
    audit = read(made.write())
    assert audit.missing_attempts() == [("top-k:keep=0.2", "idlg:iterations=100", 2)]
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
        ("psnr", "loud", "'psnr' must be a finite number, got 'loud'"),
        ("psnr", None, "'psnr' must be a number, got None"),
        ("ssim", float("nan"), "'ssim' must be a finite number, got nan"),
        ("leaked", 1, "'leaked' must be true or false, got 1"),
        ("victim", -1, "'victim' must be a whole number of at least 0, got -1"),
        ("victim", True, "'victim' must be a whole number of at least 0, got True"),
        ("defense_spec", None, "'defense_spec' must be a text, got None"),
        ("attack_spec", 3, "'attack_spec' must be a text, got 3"),
        ("image", 3, "'image' must be a text, got 3"),
    ],
)
def test_a_wrong_value_is_refused_by_name(make_audit, key, value, message):
    made = make_audit()
    made.rows()[0][key] = value
    with pytest.raises(DataError, match=message):
        read(made.write())


def test_a_missing_value_is_refused_by_name(make_audit):
    made = make_audit()
    del made.utility[1]["accuracy"]
    with pytest.raises(DataError, match=r"utility.jsonl line 2: 'accuracy' must be a number, got nothing"):
        read(made.write())


def test_a_line_that_is_no_object_is_refused(make_audit):
    folder = make_audit().write()
    (folder / "utility.jsonl").write_text("[1, 2]\n")
    with pytest.raises(DataError, match=r"utility.jsonl line 1: expected a JSON object, got \[1, 2\]"):
        read(folder)


def test_a_row_that_is_there_twice_is_refused(make_audit):
    made = make_audit()
    made.results.append(made.rows("top-k", "idlg")[1])
    with pytest.raises(DataError, match=r"two rows for \(top-k:keep=0.2, idlg:iterations=100, 1\)"):
        read(made.write())


def test_a_folder_without_config_is_no_audit(tmp_path):
    with pytest.raises(DataError, match="not an audit folder"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("defenses", "none", "'defenses' must be a list of texts"),
        ("attacks", [["idlg"]], "'attacks' must be a list of texts"),
        ("victims", "4", "'victims' must be a whole number"),
    ],
)
def test_a_wrong_config_is_refused(make_audit, key, value, message):
    made = make_audit()
    made.config[key] = value
    with pytest.raises(DataError, match=message):
        read(made.write())


def test_a_config_that_is_no_json_is_refused(make_audit):
    folder = make_audit().write()
    (folder / "config.json").write_text(json.dumps({"victims": 4})[:-1])
    with pytest.raises(DataError, match=r"config.json: expected JSON"):
        read(folder)
