import json

import pytest

from gradveil.audit.store import JsonLines, slug
from gradveil.errors import DataError


def test_a_torn_line_is_dropped_and_the_rest_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": 3')
    lines = JsonLines(path)
    assert lines.rows == [{"a": 1}, {"a": 2}]
    lines.append([{"a": 3}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(DataError, match="rows.jsonl line 2: expected JSON, got b'nonsense'"):
        JsonLines(path)


def test_numbers_that_json_does_not_know_are_refused(tmp_path):
    lines = JsonLines(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        lines.append([{"a": float("nan")}])
    assert not lines.path.exists()


def test_names_of_short_specs_are_readable():
    assert slug("none") == "none"
    assert slug("dual-pruning:k1=0.05,k2=0.75+error-feedback") == "dual-pruning-k1=0.05-k2=0.75-error-feedback"
    assert slug("dp-sgd:clip=1.0,noise_multiplier=2.0") == "dp-sgd-clip=1.0-noise_multiplier=2.0"


def test_every_spec_has_a_name_of_its_own_that_a_file_can_have(tmp_path):
    long = "ats:policy=" + "|".join(f"rotate@{angle}>flip>shift@{angle}" for angle in range(-90, 90))
    specs = ["ats:policy=flip|invert", "ats:policy=flip>invert", "ats:policy=rotate@-15", "ats:policy=rotate@15"]
    specs += [long, long[:-1], "../up", "up", "a b", "a-b", "faces.npz", "gesichter/é.npz"]
    for spec in specs:
        (tmp_path / slug(spec)).touch(exist_ok=False)
    assert len(list(tmp_path.iterdir())) == len(specs)
