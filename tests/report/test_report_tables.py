"""The figures in the tables, checked against rows written by hand."""

import pytest

from gradveil import report
from gradveil.report._scores import score, strongest
from gradveil.report._tables import attack_table, ranking, utility_table
from gradveil.report.read import read


def column(table, title):
    index = [entry.title for entry in table.columns].index(title)
    return [row[index] for row in table.rows]


def test_the_attack_table_has_a_row_for_each_pair_and_the_blind_guess(make_audit):
    table = attack_table(read(make_audit().write()))
    assert len(table.rows) == 1 + 6 * 2
    assert column(table, "Attack")[0].text == "blind-guess"
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_medians_and_ranges(make_audit):
    draft = make_audit(defenses=[("none", {}, 0.0)], attacks=[("idlg", {}, 0.02)])
    for row, psnr, ssim, lpips in zip(
        draft.rows(), (10, 40, 20, 31), (0.1, 0.2, 0.3, 0.9), (None, 0.5, 0.1, 0.3), strict=True
    ):
        row.update(psnr=psnr, ssim=ssim, lpips=lpips, leaked=psnr > 15, label_correct=float(psnr > 10))
    table = attack_table(read(draft.write()))
    assert column(table, "Leaked")[1].text == "3 of 4"
    assert column(table, "Leaked")[1].leaked is True
    assert (column(table, "PSNR dB")[1].text, column(table, "PSNR dB")[1].note) == (
        "25.5",
        "",
    )  # too few for an interval
    assert column(table, "SSIM")[1].value == pytest.approx(0.25)
    assert column(table, "LPIPS")[1].value == pytest.approx(0.3)
    assert column(table, "Label")[1].text == "75.0 %"


def test_intervals_and_paired_differences(make_audit):
    """Every victim loses 5 dB to the defense, and the attacker who knows it wins back 3."""
    draft = make_audit(defenses=[("none", {}, 0.0), ("top-k", {}, 0.05)], attacks=[("idlg", {}, 0.02)], victims=8)
    draft.results += [{**row, "adaptive": True} for row in draft.rows("top-k")]
    for row in draft.rows():
        row["psnr"] = 20.0 + 4 * row["victim"] - 5 * (row["defense"] == "top-k") + 3 * row["adaptive"]
    table = attack_table(read(draft.write()))
    undefended, plain, adaptive = (
        [(cell.text, cell.note) for cell in cells]
        for cells in zip(
            *(column(table, title)[1:] for title in ("PSNR dB", "vs. undefended", "vs. plain")), strict=True
        )
    )
    assert undefended == [("34.0", "24.0 … 44.0"), ("–", ""), ("–", "")]
    assert plain == [("29.0", "19.0 … 39.0"), ("−5.0", "−5.0 … −5.0"), ("–", "")]
    assert adaptive == [("32.0", "22.0 … 42.0"), ("−2.0", "−2.0 … −2.0"), ("+3.0", "+3.0 … +3.0".replace("+", ""))]


def test_the_ranking_goes_no_further_than_the_victims_tell(make_audit):
    draft = make_audit(
        defenses=[("none", {}, 0.0), *((name, {}, 0.5) for name in ("top-k", "laplace-noise", "gaussian-noise"))],
        attacks=[("idlg", {}, 0.02)],
        victims=8,
    )
    levels = {"none": 40, "top-k": 30, "laplace-noise": 9, "gaussian-noise": 9}
    for row in draft.rows():
        offset = (-1) ** row["victim"] * (row["defense"] == "laplace-noise")
        row["psnr"] = levels[row["defense"]] + row["victim"] + offset
    table = ranking(read(draft.write()))
    assert {cell.text for cell in column(table, "Defense")[:2]} == {"laplace-noise", "gaussian-noise"}
    assert [cell.text for cell in column(table, "Rank")] == ["1–2", "1–2", "3"]


def test_what_is_null_is_shown_as_missing_and_sorts_last(make_audit):
    draft = make_audit()
    for row in draft.results:
        row["lpips"] = None
    cells = column(attack_table(read(draft.write())), "LPIPS")
    assert {(cell.text, cell.value) for cell in cells} == {("–", None)}


def test_the_noise_column_appears_with_its_values(make_audit):
    draft = make_audit()
    titles = [entry.title for entry in attack_table(read(draft.write())).columns]
    assert "Noise" not in titles
    for row in draft.rows():
        row["noise_ratio"] = 0.4
    assert column(attack_table(read(draft.write())), "Noise")[1].text == "0.40"


def test_bound_and_measured_error_stand_side_by_side(make_audit):
    draft = make_audit()
    titles = [entry.title for entry in attack_table(read(draft.write())).columns]
    assert "Bound" not in titles
    for row, mse in zip(draft.rows("gaussian-noise", "idlg"), (0.1, 0.2, 0.3, 0.6), strict=True):
        row.update(mse=mse, bound_mse=0.0051)
    table = attack_table(read(draft.write()))
    titles = [entry.title for entry in table.columns]
    assert titles.index("Bound") == titles.index("MSE") + 1
    pairs = [(row[0].text, row[1].text) for row in table.rows]
    place = pairs.index(("gaussian-noise:std=0.1", "idlg"))
    assert (column(table, "MSE")[place].text, column(table, "Bound")[place].text) == ("0.3000", "0.0051")
    assert column(table, "Bound")[pairs.index(("top-k:keep=0.2", "idlg"))].text == "no bound"
    assert column(table, "Bound")[0].text == "–"


def test_utility_against_the_undefended_run(make_audit):
    draft = make_audit()
    draft.utility[0].update(round_seconds=0.04, upload_bytes=1000, download_bytes=50_000, accuracy=0.9)
    draft.utility[1].update(round_seconds=0.1, upload_bytes=250, download_bytes=None, pmm=None, accuracy=0.45)
    table = utility_table(read(draft.write()))
    time, upload, download = (column(table, title)[1] for title in ("Round time", "Upload", "Download"))
    assert (time.text, time.note) == ("100 ms", "×2.50")
    assert (upload.text, upload.note) == ("250 B", "×0.25")
    assert (download.text, download.note, download.value) == ("–", "", None)
    assert column(table, "Accuracy")[1].text == "45.0 %"
    assert column(table, "PMM")[1].value is None


def test_without_an_undefended_run_there_is_no_ratio(make_audit):
    draft = make_audit(defenses=[("top-k", {"keep": 0.2}, 0.05)])
    assert column(utility_table(read(draft.write())), "Upload")[0].note == ""


def test_a_training_that_diverged_is_called_so(make_audit):
    draft = make_audit()
    draft.utility[1] |= {"loss": None, "diverged": 7}
    cell = column(utility_table(read(draft.write())), "Loss")[1]
    assert (cell.text, cell.value) == ("diverged", None)


def test_a_guarantee_is_shown_where_there_is_one(make_audit):
    draft = make_audit()
    assert "Guarantee" not in [entry.title for entry in utility_table(read(draft.write())).columns]
    draft.utility[1] |= {"privacy": "epsilon 2 at delta 1e-05", "epsilon": 2.0}
    cells = column(utility_table(read(draft.write())), "Guarantee")
    assert [(cell.text, cell.value) for cell in cells[:2]] == [("none", None), ("epsilon 2 at delta 1e-05", 2.0)]


def test_history_may_be_empty(make_audit):
    draft = make_audit()
    for row in draft.utility:
        row["history"] = []
    assert "Training" not in [entry.title for entry in utility_table(read(draft.write())).columns]
    draft.utility[0]["history"] = [0.1, 0.5]
    cells = column(utility_table(read(draft.write())), "Training")
    assert cells[0].history == (0.1, 0.5)
    assert cells[1].text == "–"


def test_the_summary_for_the_terminal_is_the_attack_table(make_audit):
    folder = make_audit().write()
    assert report.summary(folder) == attack_table(read(folder))
    assert report.summary(folder).texts()[1][:3] == ["none", "idlg", "4 of 4 (4 by pixels)"]


def test_each_defense_meets_its_own_strongest_attack(make_audit):
    draft = make_audit(attacks=[("weak", {}, 0.5), ("strong", {}, 0.0)])
    for row in draft.rows("top-k", "weak"):
        row["psnr"] = 99.0
    audit = read(draft.write())
    assert strongest(audit, "none")[0].spec == "strong"
    attack, best = strongest(audit, "top-k:keep=0.2")
    assert (attack.spec, best.median) == ("weak", 99.0)
    draft.results.clear()
    assert strongest(read(draft.write()), "none") is None


def test_no_rows_have_no_score(make_audit):
    audit = read(make_audit().write())
    with pytest.raises(ValueError, match="median"):
        _ = score(audit, []).median
