"""Rows on disk: each is appended when it is finished, never lost, never written twice."""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradveil.audit.rows import SETTINGS
from gradveil.audit.schema import REMEDY, Json, parse
from gradveil.core.errors import DataError
from gradveil.core.folders import writing

CONFIG, RESULTS, UTILITY, MATCHES = "config.json", "results.jsonl", "utility.jsonl", "match.jsonl"
IDENTIFICATIONS = "identification.jsonl"
BLIND_GUESS = "blind-guess"
"""The name in rows of the attack that uses no update."""

LONGEST_NAME = 80  # two of them and a word fit into the 255 bytes that file systems allow


def slug(text: str) -> str:
    """A spec as the name of a file or folder: readable, different for every spec, never too long.

    The separators ``: , +`` become hyphens. If anything else has to be replaced, or the name would be longer than
    `LONGEST_NAME`, it is cut and ends with eight digits of the SHA-256 of the spec.

    >>> slug("top-k:keep=0.1+error-feedback")
    'top-k-keep=0.1-error-feedback'
    >>> slug("ats:policy=flip|invert"), slug("ats:policy=flip>invert")
    ('ats-policy=flip-invert-7f100a28', 'ats-policy=flip-invert-50c1fe53')
    >>> len(slug("ats:policy=" + 100 * "flip|"))
    80
    """
    name = re.sub("[:,+]", "-", text)
    safe = re.sub(r"[^a-zA-Z0-9.=_-]+", "-", name)
    if safe == name and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{safe[: LONGEST_NAME - len(digest) - 1]}-{digest}"


def resume_command(folder: Path, model: str | None = None, command: str = "audit", plugins: Sequence[str] = ()) -> str:
    """The command that resumes the audit, or training, in a folder; files whose code runs have to be named again.

    >>> resume_command(Path("my audit"))
    "gradveil audit --resume --out 'my audit'"
    >>> resume_command(Path("mine"), "mine.py@build")
    'gradveil audit --resume --out mine --model mine.py@build'
    """
    model_option = [] if model is None else ["--model", model]
    options = [*model_option, *_plugin_options(plugins)]
    return shlex.join(["gradveil", command, "--resume", "--out", str(folder), *options])


def _plugin_options(files: Iterable[str]) -> list[str]:
    return [word for path in files for word in ("--plugin", path)]


def command_line(settings: Mapping[str, Any]) -> str:
    """The command that runs an audit with these settings (`AuditConfig.to_json`) and ``plugin_files``, if any."""
    words = ["gradveil", "audit", "--dataset", settings["dataset"], "--model", settings["model"]]
    for key, option in (("defenses", "--defense"), ("attacks", "--attack")):
        for spec in settings[key]:
            words += [option, spec]
    if settings["adaptive"] is not None:
        words.append("--adaptive" if settings["adaptive"] else "--plain")
    for key in SETTINGS:
        if key not in ("dataset", "model", "defenses", "attacks", "adaptive") and settings[key] is not None:
            value = settings[key]
            words += [
                f"--{key.replace('_', '-')}",
                ",".join(map(str, value)) if isinstance(value, list) else str(value),
            ]
    return shlex.join([*words, *_plugin_options(settings.get("plugin_files", ()))])


def read_file(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes; anything else raises `DataError`."""
    try:
        if not path.is_file():
            raise DataError(f"{path.name}: expected a file, got something else; remove it or choose another folder")
        if (size := path.stat().st_size) > most:
            raise DataError(f"{path.name}: expected at most {most:,} bytes, got {size:,}; this is not an audit file")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path.name}: expected a file that can be read, got {error.strerror}") from error


def read_json(path: Path, remedy: str = REMEDY) -> Json:
    """Read a file that holds one JSON object; anything else raises `DataError`."""
    return parse(path.name, read_file(path, 64 * 2**20), remedy)


class Lines(NamedTuple):
    """The objects of a file, each with a description of its position, and how the file ends.

    `torn`: the last line was cut short, after `size` good bytes; `ended`: the last row has a line end.
    """

    rows: list[tuple[str, Json]]
    size: int
    torn: bool
    ended: bool


def read_lines(path: Path, *, finite: bool = True) -> Lines:
    """Read the JSON objects of a file, one per line; none if the file does not exist.

    If the writer is killed, only the last line can be cut short, and then it has no line end: it is left out. Any other
    line that is not an object raises `DataError` with its number.
    """
    content = read_file(path, 512 * 2**20) if path.exists() else b""
    lines = content.split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        where = f"{path.name} line {number}"
        if line.strip():
            try:
                rows.append((where, parse(where, line, finite=finite)))
            except DataError:
                if number < len(lines):
                    raise
                return Lines(rows, len(content) - len(line), torn=True, ended=True)
    return Lines(rows, len(content), torn=False, ended=not lines[-1])


class JsonLines:
    """A file of one JSON object per line that only ever grows.

    A line cut short by a crash is dropped when the file is opened: its row was not finished.

    Args:
        path: the file; it need not exist yet.
        finite: whether a file that holds NaN or infinities is refused; these are never written.

    Example:
        >>> import tempfile
        >>> lines = JsonLines(Path(tempfile.mkdtemp()) / "rows.jsonl")
        >>> lines.append([{"victim": 0}, {"victim": 1}])
        >>> JsonLines(lines.path).rows
        [{'victim': 0}, {'victim': 1}]
    """

    def __init__(self, path: Path, *, finite: bool = True) -> None:
        self.path = path
        found = read_lines(path, finite=finite)
        self.rows = [row for _, row in found.rows]
        self._separator = "" if found.ended else "\n"
        if found.torn:
            with writing(path):
                os.truncate(path, found.size)

    def append(self, rows: Iterable[Json]) -> None:
        """Add rows and wait until they are on disk: all of them or, if that fails (`OutputError`), none."""
        rows = list(rows)
        if not rows:
            return
        text = self._separator + "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        with writing(self.path):
            size = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("ab") as file:
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                if self.path.exists():
                    os.truncate(self.path, size)
                raise
        self.rows += rows
        self._separator = ""
