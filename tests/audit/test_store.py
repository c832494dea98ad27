import json
import resource

import pytest

from gradveil.audit.folder import SealedLines
from gradveil.audit.rows import MatchRow, MethodId
from gradveil.audit.store import JsonLines, slug
from gradveil.core.errors import DataError, OutputError
from gradveil.core.folders import replace_file


def test_a_torn_line_is_dropped_and_the_rest_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": 3')
    lines = JsonLines(path)
    assert lines.rows == [{"a": 1}, {"a": 2}]
    lines.append([{"a": 3}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_a_complete_last_line_without_a_line_end_is_kept_and_ended(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}')
    lines = JsonLines(path)
    assert lines.rows == [{"a": 1}, {"a": 2}]
    lines.append([{"a": 3}])
    lines.append([{"a": 4}])
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n{"a": 4}\n'


@pytest.fixture
def full_disk():
    """No file can grow beyond 1,000 bytes: a write stops in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("size", [600, 20_000])
def test_a_full_disk_is_reported_and_leaves_no_partial_row(tmp_path, size):
    lines = JsonLines(tmp_path / "rows.jsonl")
    lines.append([{"a": "x" * 500}])
    before = lines.path.read_bytes()
    with pytest.raises(OutputError, match=r"rows.jsonl: expected a place that can be written to, got: File too large"):
        lines.append([{"a": "y" * size}])
    assert lines.path.read_bytes() == before
    assert len(lines.rows) == 1
    lines.append([{"a": "z" * 100}])
    assert len(JsonLines(lines.path).rows) == 2


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_the_old_file(tmp_path):
    replace_file(tmp_path / "page.html", [b"old"])
    with pytest.raises(OutputError, match=r"page.html: expected a place that can be written to"):
        replace_file(tmp_path / "page.html", [b"x" * 2000])
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("page.html", b"old")]


def match_row(**changes):
    fields = {"asked": "top-k", "found": "top-k:keep=0.1", "kind": "power", "target": 0.5, "tolerance": 0.05}
    return MatchRow(**{**fields, "cost": 0.48, "tries": 4, "reason": None, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "speed"}, "'kind' must be one of accuracy, power, bytes, named, got 'speed'"),
        ({"tries": 1.5}, "'tries' must be a whole number from 0 to 10,000, got 1.5"),
        ({"cost": float("nan")}, "'cost' must be a finite number, or null, got nan"),
        ({"asked": "\x1b[2J"}, "'asked' must be a text of at most 10,000 printable characters"),
    ],
)
def test_the_writer_checks_what_it_writes(tmp_path, changes, message):
    lines = SealedLines(tmp_path / "match.jsonl", MatchRow, {"digest": "a" * 16, "metrics": {}})
    with pytest.raises(DataError, match=f"a row for match.jsonl: {message}"):
        lines.append([match_row(), match_row(**changes)])
    assert not (tmp_path / "match.jsonl").exists()
    lines.append([match_row()])
    assert SealedLines(tmp_path / "match.jsonl", MatchRow, {"digest": "a" * 16, "metrics": {}}).rows == [match_row()]


def test_a_method_is_identified_by_its_spec_and_by_what_its_attacker_knows():
    plain, adaptive = MethodId("idlg:iterations=3"), MethodId("idlg:iterations=3", adaptive=True)
    assert (plain.name, plain.title, adaptive.title) == ("idlg", "idlg:iterations=3", "idlg:iterations=3 (adaptive)")
    assert len({plain, adaptive, MethodId("idlg:iterations=3")}) == 2
    assert sorted([MethodId("r-gap"), adaptive, plain]) == [plain, adaptive, MethodId("r-gap")]


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(DataError, match="rows.jsonl line 2: expected JSON, got b'nonsense'"):
        JsonLines(path)


def test_numbers_that_json_cannot_hold_are_refused(tmp_path):
    lines = JsonLines(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        lines.append([{"a": float("nan")}])
    assert not lines.path.exists()


def test_rows_that_may_hold_such_numbers_are_read_if_asked(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"loss": Infinity}\n{"loss"')
    lines = JsonLines(path, finite=False)
    assert lines.rows == [{"loss": float("inf")}]
    lines.append([{"loss": 1.0}])
    assert path.read_text() == '{"loss": Infinity}\n{"loss": 1.0}\n'
    with pytest.raises(ValueError):
        lines.append([{"loss": float("nan")}])


def test_names_of_short_specs_are_readable():
    assert slug("none") == "none"
    assert slug("dual-pruning:k1=0.05,k2=0.75+error-feedback") == "dual-pruning-k1=0.05-k2=0.75-error-feedback"
    assert slug("dp-sgd:clip=1.0,noise_multiplier=2.0") == "dp-sgd-clip=1.0-noise_multiplier=2.0"


def test_every_spec_has_its_own_valid_file_name(tmp_path):
    long = "ats:policy=" + "|".join(f"rotate@{angle}>flip>shift@{angle}" for angle in range(-90, 90))
    specs = ["ats:policy=flip|invert", "ats:policy=flip>invert", "ats:policy=rotate@-15", "ats:policy=rotate@15"]
    specs += [long, long[:-1], "../up", "up", "a b", "a-b", "faces.npz", "gesichter/é.npz"]
    for spec in specs:
        (tmp_path / slug(spec)).touch(exist_ok=False)
    assert len(list(tmp_path.iterdir())) == len(specs)
