"""GGUF files: what they hold, and files that are damaged or lie."""

import struct

import numpy as np
import pytest

from gradveil.core.errors import DataError
from gradveil.data import _gguf
from gradveil.data._gguf import read_gguf

FLOATS = np.arange(6, dtype="<f4").reshape(2, 3) / 7
CODES = np.arange(32, dtype=np.uint8) % 16
BYTES = np.arange(-16, 16, dtype=np.int8)
Q4_1 = np.float16(0.5).tobytes() + np.float16(-3).tobytes() + (CODES[:16] | CODES[16:] << 4).tobytes()
Q8_0 = np.float16(0.25).tobytes() + BYTES.tobytes()


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def setting(name, kind, content):
    return text(name) + struct.pack("<I", kind) + content


SETTINGS = [
    setting("general.name", 8, text("tiny")),
    setting("width", 4, struct.pack("<I", 7)),
    setting("base", 6, struct.pack("<f", 0.5)),
    setting("tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("é")),
]


def tensor(name, shape, kind, offset):
    sides = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + sides + struct.pack("<IQ", kind, offset)


TENSORS = [tensor("plain", (2, 3), 0, 0), tensor("four", (1, 32), 3, 32), tensor("eight", (32,), 8, 64)]


def content(settings=SETTINGS, tensors=TENSORS, magic=b"GGUF", version=3, body=None):
    head = struct.pack("<4sIQQ", magic, version, len(tensors), len(settings)) + b"".join([*settings, *tensors])
    padded = head + bytes(-len(head) % 32)
    return padded + (FLOATS.tobytes() + bytes(8) + Q4_1 + bytes(12) + Q8_0 if body is None else body)


def write(folder, data):
    (folder / "x.gguf").write_bytes(data)
    return folder / "x.gguf"


def test_settings_and_tensors(tmp_path):
    settings, tensors = read_gguf(write(tmp_path, content()))
    assert settings == {"general.name": "tiny", "width": 7, "base": 0.5, "tokens": ["a", "é"]}
    np.testing.assert_array_equal(tensors["plain"], FLOATS)
    # The low halves of the bytes come first.
    np.testing.assert_array_equal(tensors["four"], 0.5 * CODES[None].astype(np.float32) - 3)
    np.testing.assert_array_equal(tensors["eight"], 0.25 * BYTES.astype(np.float32))
    assert {value.dtype for value in tensors.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": b"GGML"}, "it begins with b'GGML'"),
        ({"version": 2}, "version 2"),
        ({"tensors": [tensor("a", (3,), 0, 0), tensor("a", (3,), 0, 0)]}, "two tensors have the same name"),
        ({"tensors": [tensor("a", (3,), 2, 0)]}, r"shape \[3\] in format 2, which is not supported"),
        ({"tensors": [tensor("a", (33,), 3, 0)]}, r"shape \[33\] in format 3"),
        ({"tensors": [tensor("a", (), 0, 0)]}, "which is not supported"),
        ({"tensors": [tensor("a", (1,) * 5, 0, 0)]}, "a tensor of 5 dimensions"),
        ({"tensors": [tensor("a", (2**40, 2**20), 0, 0)]}, "it declares .* bytes, more than"),
        ({"tensors": [tensor("a", (64,), 0, 0)]}, "'a' declares 256 bytes and has"),
        ({"tensors": [tensor("a", (6,), 0, 10**6)]}, "'a' declares 24 bytes and has 0"),
        ({"settings": [setting("a", 13, b"")]}, "KeyError: 13"),
        ({"settings": [setting("a", 9, struct.pack("<IQ", 9, 1))]}, "KeyError: 9"),
        ({"settings": [setting("a", 8, struct.pack("<Q", 2**40))]}, "it declares a text of"),
        ({"settings": [setting("a", 9, struct.pack("<IQ", 4, 2**40))]}, "it declares a list of"),
        ({"settings": [setting("a", 8, struct.pack("<Q", 1) + b"\xff")]}, "UnicodeDecodeError"),
        ({"tensors": [tensor("a", (1,), 0, 0)], "body": np.float32(np.nan).tobytes()}, "'a' holds numbers that are"),
    ],
)
def test_other_content_is_refused(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        read_gguf(write(tmp_path, content(**change)))


@pytest.mark.parametrize("length", [0, 3, 23, 40, 100, len(content()) - 1])
def test_truncated_files_are_refused(tmp_path, length):
    with pytest.raises(DataError, match=r"x\.gguf: expected a GGUF file of version 3"):
        read_gguf(write(tmp_path, content()[:length]))


def test_counts_are_limited(tmp_path, monkeypatch):
    for name in ("MAX_TENSORS", "MAX_SETTINGS"):
        with monkeypatch.context() as patch:
            patch.setattr(_gguf, name, 2)
            with pytest.raises(DataError, match="it begins with"):
                read_gguf(write(tmp_path, content()))
