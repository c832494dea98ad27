"""Weights of tensorflow.js: what they hold, and manifests and files that are damaged or lie."""

import json

import numpy as np
import pytest

from gradveil.core.errors import DataError
from gradveil.data import _tfjs
from gradveil.data._tfjs import read_weights

FLOATS = np.arange(6, dtype="<f4").reshape(2, 3) / 7
BYTES = np.array([0, 1, 255], np.uint8)
CONTENT = FLOATS.tobytes() + BYTES.tobytes()
QUANTISED = {"dtype": "uint8", "scale": 0.5, "min": -3.0}


def entries():
    return [
        {"name": "a/filters", "shape": [2, 3], "dtype": "float32"},
        {"name": "b", "shape": [3], "dtype": "float32", "quantization": QUANTISED},
    ]


@pytest.fixture
def write(tmp_path):
    def put(weights, *, paths=("w.bin",), content=CONTENT):
        (tmp_path / "w.bin").write_bytes(content)
        manifest = tmp_path / "manifest.json"
        manifest.write_text(json.dumps([{"weights": weights, "paths": list(paths)}]))
        return manifest

    return put


def test_floats_and_bytes(write):
    arrays = read_weights(write(entries()))
    assert list(arrays) == ["a/filters", "b"]
    np.testing.assert_array_equal(arrays["a/filters"], FLOATS)
    np.testing.assert_array_equal(arrays["b"], [-3.0, -2.5, 124.5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [4]}, "declares 28 bytes, and it has 27"),
        ({"shape": [10**6, 10**6, 10**6]}, "declares 1,000,000,000,000,000,024 bytes"),
        ({"shape": [-3]}, r"'b' has the shape \[-3\]"),
        ({"shape": [True, 3]}, "'b' has the shape"),
        ({"shape": [1] * 9}, "'b' has the shape"),
        ({"name": "a/filters"}, "none twice, got 2"),
        ({"dtype": "int32"}, "'b' is int32, stored as uint8"),
        ({"quantization": {**QUANTISED, "dtype": "uint16"}}, "stored as uint16"),
        ({"quantization": {**QUANTISED, "scale": 1e400}}, "'b' holds numbers that are not finite"),
        ({"quantization": {"dtype": "uint8", "scale": 1.0}}, "KeyError: 'min'"),
        ({"quantization": None, "shape": []}, "declares 28 bytes"),
    ],
)
def test_what_the_file_does_not_hold_is_refused(write, change, message):
    first, second = entries()
    with pytest.raises(DataError, match=message):
        read_weights(write([first, {**second, **change}]))


@pytest.mark.parametrize("paths", [["../w.bin"], ["/w.bin"], ["w.bin", "w.bin"], []])
def test_only_one_file_next_to_the_manifest_is_read(write, paths):
    with pytest.raises(DataError, match=r"manifest\.json: expected a weights manifest"):
        read_weights(write(entries(), paths=paths))


@pytest.mark.parametrize("content", [b"", FLOATS.tobytes(), CONTENT + b"x"])
def test_truncated_or_longer_files_are_refused(write, content):
    with pytest.raises(DataError, match=r"w\.bin: expected the tensors .*declares 27 bytes"):
        read_weights(write(entries(), content=content))


def test_sizes_are_limited(write, monkeypatch):
    manifest = write(entries())
    monkeypatch.setattr(_tfjs, "MAX_TENSORS", 1)
    with pytest.raises(DataError, match="expected at most 1 tensors"):
        read_weights(manifest)
    monkeypatch.setattr(_tfjs, "MAX_MANIFEST", 10)
    with pytest.raises(DataError, match="bytes, more than 10"):
        read_weights(manifest)


@pytest.mark.parametrize("content", ["", "nonsense", "[]", "[{}, {}]", "{}", '[{"paths": ["w.bin"], "weights": [1]}]'])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json: expected a weights manifest of tensorflow\.js"):
        read_weights(tmp_path / "manifest.json")
    with pytest.raises(DataError, match=r"none\.json: expected a weights manifest"):
        read_weights(tmp_path / "none.json")
