"""The figures for other programs, the tables as files, and the gate."""

import csv
import json

import pytest

from gradveil import report
from gradveil.core.errors import ParameterError
from gradveil.report._tables import Cell, Column, Table
from gradveil.report.read import read

NONE = ("none", {}, 0.0)
NOISE = ("gaussian-noise", {"std": 0.1}, 0.9)
TOP_K = ("top-k", {"keep": 0.2}, 0.05)
IDLG = ("idlg", {"iterations": 100}, 0.02)


@pytest.fixture
def protected(make_audit):
    """An audit in which noise is shown to stop the attack, to hide the client's image and its label."""
    draft = make_audit(defenses=[NONE, NOISE], attacks=[IDLG], victims=8)
    for row in draft.rows("gaussian-noise"):
        row["label_correct"] = 0.0
        draft.results.append({**row, "adaptive": True})
    draft.identify("none", 100, auc=1.0)
    draft.identify("gaussian-noise", 0)
    return draft


def refused(draft, *conditions):
    found = report.refusal(read(draft.write()), conditions)
    return found and (found.code, found.reason)


EVERYTHING = ("leaked", "identified", "labels")


def test_what_is_shown_to_protect_passes(protected):
    assert refused(protected, *EVERYTHING) is None


def test_any_leak_is_refused(protected):
    protected.rows("gaussian-noise")[0]["leaked"] = True
    assert refused(protected, "leaked") == (3, "data is recovered under gaussian-noise:std=0.1")
    assert refused(protected, "identified") is None
    assert refused(protected) is None


def test_an_example_that_is_named_is_refused(protected):
    protected.identifications.pop()
    protected.identify("gaussian-noise", 60, auc=0.9)
    assert refused(protected, "identified") == (3, "the client's example is named under gaussian-noise:std=0.1")


def test_labels_that_are_read_off_are_refused(protected):
    for row in protected.rows("gaussian-noise"):
        row["label_correct"] = 1.0
    assert refused(protected, *EVERYTHING) == (3, "labels are read off under gaussian-noise:std=0.1")


def test_what_is_not_shown_does_not_pass_as_safe(protected):
    protected.results = [row for row in protected.results if not row["adaptive"]]
    assert refused(protected, "leaked") == (4, "leaked: protection is not shown for gaussian-noise:std=0.1")


def test_labels_that_are_given_or_never_leak_do_not_pass_as_hidden(protected):
    protected.config["largest_class"] = 0.9
    assert refused(protected, "labels") == (4, "labels: protection is not shown for gaussian-noise:std=0.1")
    protected.config |= {"largest_class": 0.1, "labels": "known"}
    assert refused(protected, "labels")[0] == 4


@pytest.mark.parametrize("missing", ["results", "identifications", "utility"])
def test_what_has_not_finished_does_not_pass_as_safe(protected, missing):
    getattr(protected, missing).pop()
    code, reason = refused(protected, "leaked")
    assert code == 4
    assert "the audit is not complete" in reason


def test_an_audit_without_a_defense_has_nothing_that_could_pass(make_audit):
    assert refused(make_audit(defenses=[NONE], victims=8), "leaked") == (4, "no defense was audited")


def test_conditions_that_do_not_exist_are_refused(protected):
    with pytest.raises(ParameterError, match="'leak'"):
        refused(protected, "leak")


def test_figures_are_those_of_the_verdict(protected):
    audit = read(protected.write())
    figures = json.loads(json.dumps(report.figures(audit)))
    assert figures["complete"] is True
    assert figures["verdict"] == report.verdict(audit)
    undefended, noise = figures["defenses"].values()
    assert (undefended["outcome"], noise["outcome"]) == (None, "stops")
    assert (undefended["leaked"]["share"], undefended["leaked"]["rules"]) == (1.0, {"pixels": 8})
    assert noise["leaked"]["share"] == 0
    assert noise["leaked"]["high"] == pytest.approx(0.369, abs=0.001)
    assert noise["evidence"][0]["leak_p"] == pytest.approx(2**-8)
    assert noise["identification"]["named"] == 0
    assert (noise["labels"]["right"], noise["labels"]["labels"], noise["labels"]["outcome"]) == (0, 8, "not shown")
    assert noise["accuracy"] == audit.utility["gaussian-noise:std=0.1"].accuracy
    assert noise["upload_bytes"] == audit.utility["gaussian-noise:std=0.1"].upload_bytes
    assert noise["would_show"] == []


def test_figures_say_what_would_show_protection(make_audit):
    figures = report.figures(read(make_audit(defenses=[NONE, NOISE], victims=4).write()))
    noise = figures["defenses"]["gaussian-noise:std=0.1"]
    assert noise["outcome"] == "not shown"
    assert noise["would_show"][0] == "more victims: at least 5 (`--victims 5`)"
    assert noise["identification"] is None


def test_tables_are_written_as_csv_and_latex(protected):
    folder = protected.write()
    report.write(folder)
    with (folder / "evidence.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["Defense"], row["p leaks"], row["Shows"]) == ("gaussian-noise:std=0.1", str(2**-8), "protection")
    lines = (folder / "attacks.tex").read_text().splitlines()
    assert lines[0].startswith("\\begin{tabular}{llr")
    assert {"\\toprule", "\\midrule", "\\bottomrule", "\\end{tabular}"} <= set(lines)
    columns = lines[2].count("&")
    assert all(line.count("&") == columns for line in lines if line.endswith("\\\\"))


def test_latex_reads_no_name_as_a_command():
    table = Table((Column("A & B_1", ""),), ((Cell("50 % of {x}", 0.5, "1 … 2"),),))
    assert table.latex().splitlines()[2:5] == [
        "A \\& B\\_1 \\\\",
        "\\midrule",
        "50 \\% of \\{x\\} (1 \\dots{} 2) \\\\",
    ]
