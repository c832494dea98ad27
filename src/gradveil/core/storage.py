"""Tensors on disk: safetensors files that are written completely or not at all, and in which any change is detected.

Each file carries the SHA-256 of all its other bytes: the tensors, their names, shapes and types, and the text about
them. It is checked before anything in the file is trusted. It detects damage, not forgery: whoever can write to the
folder can also compute a new digest.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as tensors_from
from safetensors.torch import save as bytes_of
from torch import Tensor

from gradveil.core.errors import DataError, OutputError
from gradveil.core.folders import replace_file

ABOUT = "gradveil"
"""The entry of a file's metadata that holds our JSON."""

DIGEST = "sha256"
"""The entry of a file's metadata that holds the digest, which is computed with zeros in its place."""

_ZEROS = 64 * b"0"
# Only the entry itself has unescaped quotes: inside names and our own text, JSON puts a backslash before each.
_DIGEST_ENTRY = re.compile(rb'"%s":"([0-9a-f]{64})"' % DIGEST.encode())
_PREFIX_BYTES = 8  # hold the length of the header


def save_atomically(path: Path, tensors: Mapping[str, Tensor], about: Any) -> str:
    """Write tensors, with `about` as JSON next to them; a reader finds either the old file or the new one.

    Returns:
        the file's digest, for `load`.
    """
    metadata = {ABOUT: json.dumps(about), DIGEST: _ZEROS.decode()}
    try:
        content = bytes_of({name: value.contiguous() for name, value in tensors.items()}, metadata)
    except SafetensorError as error:
        raise OutputError(f"{path}: expected tensors that can be saved, got others: {error}") from error
    position = _digest_position(content)
    assert position is not None
    digest = _digest(content, position)
    view = memoryview(content)
    replace_file(path, [view[: position.start], digest.encode(), view[position.stop :]])
    return digest


def load(path: Path, digest: str | None = None) -> tuple[dict[str, Tensor], Any]:
    """Read the tensors of a file that `save_atomically` wrote, and the `about` next to them.

    Args:
        path: the file.
        digest: what `save_atomically` returned for it; None: accept the digest that the file itself carries.
    """
    content = _checked_content(path, digest)
    try:
        header = json.loads(content[_PREFIX_BYTES : _PREFIX_BYTES + _header_length(content)])
        about = json.loads(header["__metadata__"][ABOUT])
        return tensors_from(content), about
    # Anybody can compute a digest, so a file with a valid one may still hold anything.
    except (SafetensorError, LookupError, ValueError, TypeError, RecursionError, AssertionError, RuntimeError) as error:
        raise DataError(f"{path}: expected a file that gradveil wrote, got something else: {_line(error)}") from error


def check(path: Path, digest: str) -> None:
    """Raise unless the file is, to the bit, the one for which `save_atomically` returned this digest."""
    _checked_content(path, digest)


def _checked_content(path: Path, digest: str | None) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: expected a file that gradveil wrote, got no such file; start over") from error
    except OSError as error:
        raise DataError(f"{path}: expected a file that can be read, got: {error.strerror}") from error
    position = _digest_position(content)
    if position is None:
        raise DataError(f"{path}: expected a file that gradveil wrote, got something else: it carries no digest")
    carried = content[position].decode()
    if _digest(content, position) != carried:
        raise DataError(
            f"{path}: expected a file as gradveil wrote it, got one that was damaged or changed since (its digest does "
            "not fit); restore a copy or start over"
        )
    if digest is not None and digest != carried:
        raise DataError(
            f"{path}: expected the file that the checkpoint was saved with, got another one (of another round, client "
            "or training); restore that one or start over"
        )
    return content


def _digest(content: bytes, position: slice) -> str:
    view = memoryview(content)
    state = hashlib.sha256(view[: position.start])
    state.update(_ZEROS)
    state.update(view[position.stop :])
    return state.hexdigest()


def _digest_position(content: bytes) -> slice | None:
    """Where the digest is; None if the header does not hold exactly one."""
    end = _PREFIX_BYTES + _header_length(content)
    positions = [match.span(1) for match in _DIGEST_ENTRY.finditer(content, _PREFIX_BYTES, end)]
    return slice(*positions[0]) if len(positions) == 1 else None


def _header_length(content: bytes) -> int:
    return min(int.from_bytes(content[:_PREFIX_BYTES], "little"), len(content))


def _line(error: Exception) -> str:
    """An error on one line: torch's have several."""
    return " ".join(str(error).split()) or type(error).__name__
