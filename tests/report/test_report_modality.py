"""Reports on inputs that are not images: meter readings, drawn or written, of whose distance less is closer."""

import html
import io
import json
import re
from dataclasses import dataclass

import PIL.Image
import pytest
import torch

from gradveil import report
from gradveil.audit import AuditConfig
from gradveil.audit.folder import SealedLines, check_config
from gradveil.audit.rows import VERSION, MethodId, ResultRow, UtilityRow
from gradveil.audit.schema import sealed
from gradveil.audit.store import command_line
from gradveil.core.digests import bytes_digest
from gradveil.core.errors import DataError
from gradveil.core.folders import write_json
from gradveil.metrics import METRICS, Metric
from gradveil.modality import MODALITIES, Drawn, Fragment, Written
from gradveil.report._evidence import evidence
from gradveil.report._scores import strongest
from gradveil.report._tables import ranking
from gradveil.report.judgement import Outcome, outcome

DISTANCES = {("none", "idlg"): 0.02, ("none", "dlg"): 0.05, ("top-k", "idlg"): 0.6, ("top-k", "dlg"): 0.7}
SETTINGS = {
    **AuditConfig().to_json(),
    "dataset": "meters",
    "model": "mlp",
    "defenses": ["none", "top-k"],
    "attacks": ["idlg", "dlg"],
    "adaptive": False,
}


@pytest.fixture
def meters(monkeypatch):
    """A modality and its metric, registered for the duration of a test."""
    monkeypatch.setattr(MODALITIES, "_factories", dict(MODALITIES._factories))
    monkeypatch.setattr(METRICS, "_metrics", dict(METRICS._metrics))

    class Readings:
        unit = "reading"
        primary = "distance"
        guess = "the usual reading"
        rule = "distance of at most 0.1, half of the blind guess's"
        threshold = 0.1

        def check_stored(self, where, stored):
            pass

        def inputs_of(self, stored):
            return stored

        def start(self, shape, generator, *, dtype, device):
            return torch.rand(shape, generator=generator, dtype=dtype, device=device)

        def project(self, inputs):
            return inputs.clamp(-4, 4)

        def leak_rule(self, scores, blind):
            distance = scores["distance"]
            return "distance" if distance <= 0.1 and (blind is None or distance <= blind["distance"] / 2) else None

    @MODALITIES.register("meter")
    @dataclass(frozen=True)
    class Meter(Readings, Drawn):
        def render(self, examples):
            content = io.BytesIO()
            PIL.Image.new("L", (30, 7)).save(content, format="PNG")
            return content.getvalue()

        def rendered_size(self, input_shape, count):
            return 30, 7 * count

    @MODALITIES.register("note")
    @dataclass(frozen=True)
    class Note(Readings, Written):
        def write(self, examples, originals):
            marks = (None, None) if originals is None else (True, False)
            return [[Fragment("<b>7</b> kW", marks[0], "use"), Fragment("&night", marks[1], "time")] for _ in examples]

    METRICS.add(
        Metric(
            "distance",
            "Distance",
            lambda originals, found: (originals - found).abs().mean(1),
            better="lower",
            summary="How far the readings are apart.",
            modalities=("meter", "note"),
            unit="kW",
            low=0,
            noticeable=0.05,
        )
    )
    return MODALITIES.create("meter")


@pytest.fixture
def folder(meters, tmp_path):
    return make_folder(meters, tmp_path)


def make_folder(modality, tmp_path):
    config = sealed(
        {
            "gradveil": "0.1.0",
            "version": VERSION,
            "command": command_line(SETTINGS),
            **SETTINGS,
            "adapted": [],
            "generic": [],
            "learned": [],
            "simulating": [],
            "largest_class": None,
            "modes": {},
            "public_examples": 0,
            "public_overlap": 0,
            "caveats": {},
            "dataset_source": "meters.csv",
            "data_digest": "d" * 16,
            "modality": modality.name,
            "metrics": {"distance": True},
            "input_shape": [5],
            "classes": [],
            "parameters": 30,
            "dropout_rates": {},
            "disclosed": [],
            "weights_accuracy": 0.1,
            "weights_digest": "e" * 16,
            "model_file_digest": None,
            "plugin_files": {},
            "plugin_packages": {},
            "victim_labels": [[[0.5, 1.5]]] * 8,
            "torch": "2.13.0",
            "threads": 1,
            "platform": "Linux",
        }
    )
    check_config(config)
    write_json(tmp_path / "config.json", config)
    (tmp_path / "images").mkdir()
    inputs = torch.zeros(1, 5)
    picture, original = modality.show(inputs, inputs), modality.show(inputs, None)
    ending = modality.shown_as
    (tmp_path / f"images/found.{ending}").write_bytes(picture)
    for victim in range(8):
        (tmp_path / f"images/original-v{victim}.{ending}").write_bytes(original)
    results = SealedLines(tmp_path / "results.jsonl", ResultRow, config)
    cases = [(None, "blind-guess", 0.4), *((*pair, distance) for pair, distance in DISTANCES.items())]
    results.append(
        ResultRow(
            defense=defense,
            defense_params={},
            defense_spec=defense,
            attack=attack,
            attack_params={},
            attack_spec=attack,
            adaptive=False,
            server="passive",
            **{key: SETTINGS[key] for key in ("dataset", "model", "seed", "batch_size", "aggregated")},
            victim=victim,
            scores={"distance": distance + victim / 1000},
            label_correct=None,
            leaked=defense is not None and distance < 0.1,
            leak_rule="distance" if defense is not None and distance < 0.1 else None,
            power=None,
            bound_mse=None,
            trained_on=None,
            loss=None,
            loss_start=None,
            loss_late=None,
            loss_restarts=None,
            iterations=3,
            seconds=1.0,
            found_by=None,
            image=f"images/found.{ending}",
            image_digest=bytes_digest(picture),
            original_digest=bytes_digest(original) if defense is None else None,
        )
        for defense, attack, distance in cases
        for victim in range(8)
    )
    SealedLines(tmp_path / "utility.jsonl", UtilityRow, config).append(
        UtilityRow(
            defense=spec,
            defense_params={},
            defense_spec=spec,
            accuracy=accuracy,
            baseline_accuracy=0.9,
            pmm=accuracy / 0.9,
            loss=0.1,
            round_seconds=0.1,
            upload_bytes=100.0,
            download_bytes=100.0,
            history=(),
            diverged=None,
            privacy=None,
            epsilon=None,
        )
        for spec, accuracy in (("none", 0.9), ("top-k", 0.8))
    )
    return tmp_path


def test_less_is_closer_where_the_metric_says_so(folder):
    audit = report.read(folder)
    assert strongest(audit, "none")[0] == MethodId("idlg")
    assert strongest(audit, "top-k")[0] == MethodId("idlg")
    assert outcome(audit, "top-k") is Outcome.NOT_SHOWN  # nobody adapted to it
    shown = [each.shown for each in evidence(audit, "top-k")]
    assert shown == [True, True]
    first = report.verdict(audit)[0]
    assert first.startswith("Without a defense, idlg recovers 8 of 8 readings (median 0.02 kW)")
    assert not [flag.flag.name for flag in report.raised_flags(audit) if flag.flag.name == "stronger-does-worse"]
    ((_, attack, place, distance, *_),) = ranking(audit).rows
    assert (attack.text, place.text, distance.text) == ("idlg", "1", "0.60")
    heading, *lines = report.summary(audit).csv().splitlines()
    assert heading == "Defense,Attack,Leaked,Distance kW,vs. undefended,Label,Time"
    assert lines[3].startswith("top-k,idlg,0.0,0.60")


def test_an_attack_that_does_better_under_a_defense_is_flagged(folder):
    path = folder / "results.jsonl"
    text = path.read_text()
    assert "stronger-does-worse" not in {found.flag.name for found in report.raised_flags(folder)}
    path.unlink()
    config = report.read(folder).config
    lines = SealedLines(path, ResultRow, {**config, "digest": sealed(config)["digest"]})
    rows = [ResultRow.from_json(row) for row in map(json.loads, text.splitlines())]
    better = [
        ResultRow(**{**vars(row), "scores": {"distance": 0.001}}) if row.defense == "top-k" else row for row in rows
    ]
    lines.append(better)
    assert "stronger-does-worse" in {found.flag.name for found in report.raised_flags(folder)}


def test_the_page_speaks_of_what_it_is_about(folder):
    page = report.write(folder).read_text()
    words = html.unescape(re.sub(r"<style>.*?</style>|<script>.*?</script>|<[^>]*>", " ", page, flags=re.DOTALL))
    assert not re.search(r"PSNR|SSIM|LPIPS|MSE|\bdB\b|\b[Ii]mages?\b|pixel", words)
    assert "has a distance of at most 0.1, half of the blind guess's" in words
    assert "Distance of the strongest attack, kW ←" in words
    assert "0.1 kW threshold" in words
    assert "as anyone could guess them (the usual reading)" in words
    assert re.search(r"None of the 13\s+trust flags\s+is raised", words)  # no second metric could disagree
    assert page.count('src="data:image/png;base64,') == 2 * 8 * 4


def test_pictures_have_no_columns(folder):
    assert "Which columns" not in report.write(folder).read_text()
    assert not (folder / "columns.csv").exists()


def test_pictures_of_another_size_than_the_modality_renders_are_refused(folder, meters, monkeypatch):
    monkeypatch.setattr(type(meters), "rendered_size", lambda *_: (30, 8))
    with pytest.raises(DataError, match="it must have 30 x 8 pixels but has 30 x 7"):
        report.write(folder)


@pytest.mark.usefixtures("meters")
class TestWritten:
    @pytest.fixture
    def folder(self, tmp_path):
        return make_folder(MODALITIES.create("note"), tmp_path)

    def test_what_was_recovered_is_marked_and_nothing_is_markup(self, folder):
        page = report.write(folder).read_text()
        assert "<b>7</b>" not in page
        # Two attacks, of each six examples: the blind guess and two defenses.
        assert page.count("<mark>&lt;b&gt;7&lt;/b&gt; kW</mark>") == 2 * 6 * 3
        assert page.count("<td>&lt;b&gt;7&lt;/b&gt; kW</td>") == 2 * 6  # the original is not marked
        assert page.count("<td>&amp;night</td>") == 2 * 6 * 4
        assert page.count('<th scope="col">time</th>') == 2 * 6
        assert "Only the first 6 of 8 readings are shown" in page
        assert "<img" not in page

    def test_each_column_has_its_share(self, folder):
        page = report.write(folder).read_text()
        assert "Which columns are recovered" in page
        heading, *lines = (folder / "columns.csv").read_text().splitlines()
        assert heading == "Defense,Attack,use,time"
        assert lines[0] == ",blind-guess,1.0,0.0"
        assert [line.partition(",")[0] for line in lines[1:]] == ["none", "top-k"]
        assert all(line.endswith(",1.0,0.0") for line in lines)

    def test_the_overview_is_a_sketch_of_what_was_recovered(self, folder):
        report.write(folder)
        with PIL.Image.open(folder / "overview.png") as overview:
            colours = {colour for _, colour in overview.convert("RGB").getcolors(2**24)}
        assert {(0xC2, 0x37, 0x1C), (0xE5, 0xE2, 0xDC), (0x8A, 0x92, 0x9C)} <= colours

    def test_a_text_that_is_missing_is_said_to_be(self, folder):
        (folder / "images/found.json").unlink()
        page = report.write(folder).read_text()
        assert page.count('<span class="absent">no reading</span>') == 2 * 6 * 3

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"\xff", "can't decode byte"),
            (b"[" * 100_000, "must not be nested deeply"),
            (b'{"examples": [3]}', "an example must be a list"),
            (b'{"examples": [[["a", 1, ""]]]}', "a fragment must be a list of a text"),
            (b'{"pages": []}', "it must be a JSON object"),
            (b" " * 4_000_001, "at most 4,000,000 bytes"),
        ],
    )
    def test_a_text_that_the_audit_did_not_write_is_refused(self, folder, monkeypatch, content, reason):
        path = folder / "images/found.json"
        expected = bytes_digest(path.read_bytes())
        path.write_bytes(content)
        with pytest.raises(DataError, match="found.json: expected the JSON that the audit wrote"):
            report.write(folder)
        # Even with the right digest.
        monkeypatch.setattr(
            "gradveil.report._images.bytes_digest", lambda given: expected if given == content else bytes_digest(given)
        )
        with pytest.raises(DataError, match=reason):
            report.write(folder)
