"""Metrics as records: those of the package, and one from outside, all the way to the report."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gradveil import metrics, report
from gradveil.audit import AuditConfig, run
from gradveil.audit.rows import ResultRow
from gradveil.core.errors import DataError, OutputError, ParameterError, UnknownNameError
from gradveil.metrics import METRICS, Metric
from gradveil.modality import IMAGE


@pytest.mark.parametrize("metric", metrics.of(IMAGE), ids=lambda metric: metric.name)
def test_records_say_what_their_metric_does(metric):
    """Equal images score best, values stay in the declared range, and everything has words."""
    generator = torch.Generator().manual_seed(0)
    originals, others = torch.rand(2, 3, 1, 16, 16, generator=generator)
    equal, apart = metric.compute(originals, originals), metric.compute(originals, others)
    assert metric.summary.endswith(".")
    assert metric.title
    if equal is None:
        assert metric.optional
        assert metric.remedy
        return
    for values in (equal, apart):
        assert values.shape == (3,)
        assert all(metric.low <= value <= metric.high for value in values.tolist())
    if metric.compares:
        assert min(map(metric.closeness, equal.tolist())) > max(map(metric.closeness, apart.tolist()))


def test_the_order_does_not_depend_on_registration():
    assert [metric.name for metric in metrics.of(IMAGE)] == [
        *("mse", "psnr", "psnr_blurred", "ssim", "ssim_blurred", "lpips", "noise_ratio")
    ]


def test_a_name_is_taken_once_and_unknown_names_are_refused():
    with pytest.raises(UnknownNameError, match="metric 'psnr' is registered already; choose another name"):
        METRICS.add(METRICS.get("psnr"))
    with pytest.raises(UnknownNameError, match="unknown metric 'psnt'; did you mean psnr"):
        METRICS.get("psnt")


def test_words():
    assert METRICS.get("psnr").with_unit(31.26) == "31.3 dB"
    assert METRICS.get("ssim").with_unit(-0.001) == "0.00"
    assert METRICS.get("psnr").heading == "PSNR dB"


# -- one from outside --------------------------------------------------------------------------------------------------


def largest_error(name: str = "largest_error", **changes) -> Metric:
    fields = {"better": "lower", "summary": "The largest difference of any two pixels.", "low": 0, "high": 1}
    return Metric(
        name,
        "Worst pixel",
        lambda originals, found: (originals - found).abs().flatten(1).amax(1),
        modalities=("image",),
        **{**fields, **changes},
    )


@pytest.fixture
def own_metrics(monkeypatch):
    """A registry that a test may change."""
    monkeypatch.setattr(METRICS, "_metrics", dict(METRICS._metrics))
    return METRICS


@pytest.fixture
def config(tmp_path) -> AuditConfig:
    images = np.random.default_rng(0).integers(0, 256, (120, 12, 12), dtype=np.uint8)
    labels = np.arange(120) % 2
    np.savez(tmp_path / "noise.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    return AuditConfig(
        dataset=str(tmp_path / "noise.npz"),
        model="mlp",
        defenses=("ats:policy=invert",),
        attacks=("idlg:iterations=3",),
        victims=2,
        rounds=2,
        clients=2,
        client_batch=4,
        games=0,
    )


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


pytestmark = pytest.mark.filterwarnings("ignore:LPIPS is left out")


def test_a_metric_from_outside_is_in_rows_page_and_csv(own_metrics, monkeypatch, config, tmp_path):
    own_metrics.add(largest_error())
    run(config, tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert all(0 < row["largest_error"] <= 1 for row in rows)
    assert {*rows[-1]["trained_on"]} == {
        *("mse", "psnr", "psnr_blurred", "ssim", "ssim_blurred", "lpips", "largest_error")
    }
    audit = report.read(tmp_path / "out")
    page = report.write(audit).read_text()
    assert ">Worst pixel<" in page
    assert "The largest difference of any two pixels." in page
    heading, blind, *_ = report.summary(audit).csv().splitlines()
    column = heading.split(",").index("Worst pixel")
    expected = np.median([row["largest_error"] for row in rows if row["attack"] == "blind-guess"])
    assert float(blind.split(",")[column]) == pytest.approx(expected)
    # Without the metric the folder is intact, but can be neither read nor resumed.
    monkeypatch.undo()
    with pytest.raises(DataError, match="unknown metric 'largest_error'; .* if a package of your own adds it, import"):
        report.read(tmp_path / "out")
    with pytest.raises(DataError, match="unknown metric 'largest_error'"):
        run(config, tmp_path / "out", resume=True)


def test_a_metric_added_later_is_not_mixed_in(own_metrics, config, tmp_path):
    run(config, tmp_path / "out")
    own_metrics.add(largest_error())
    assert "Worst pixel" not in report.write(tmp_path / "out").read_text()  # the rows do not have it
    with pytest.raises(OutputError, match="metrics was .* and rows of both would be mixed"):
        run(config, tmp_path / "out", resume=True)


def test_a_metric_that_cannot_be_computed_is_null_with_the_command(own_metrics, config, tmp_path):
    unknown = {"optional": True, "remedy": "pip install worst-pixel"}
    own_metrics.add(replace(largest_error(**unknown), compute=lambda *_: None))
    with pytest.warns(UserWarning, match=r"Worst pixel is left out \(null\): .*: pip install worst-pixel"):
        run(config, tmp_path / "out")
    assert {row["largest_error"] for row in rows_of(tmp_path / "out")} == {None}
    assert "Worst pixel is missing in 6 of 6 rows" in " ".join(report.verdict(tmp_path / "out"))


def test_a_value_outside_the_declared_range_is_not_written(own_metrics, config, tmp_path):
    own_metrics.add(largest_error(high=1e-9))
    with pytest.raises(DataError, match=r"a row for results.jsonl: 'largest_error' must be a finite number from 0 to"):
        run(config, tmp_path / "out")
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_a_metric_does_not_take_the_name_of_another_key():
    for name in ("seed", "trained_on", "digest"):
        with pytest.raises(ParameterError, match=f"metric '{name}': expected a name that is not a key of a row"):
            ResultRow.schema([largest_error(name)])
    assert (
        ResultRow.schema([largest_error(high=math.inf)])["largest_error"].description == "a finite number of at least 0"
    )
