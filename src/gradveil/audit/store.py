"""Rows on disk: appended when they are finished, never lost, never written twice."""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gradveil.audit.schema import DIGITS
from gradveil.errors import DataError

Row = dict[str, Any]

CONFIG, RESULTS, UTILITY, MATCHES = "config.json", "results.jsonl", "utility.jsonl", "match.jsonl"
BLIND_GUESS = "blind-guess"
"""What a row calls the attack that has no update to attack."""

LONGEST_NAME = 80  # two of them and a word fit in the 255 that file systems take


def slug(text: str) -> str:
    """A spec as the name of a file or folder: readable, one of its own for every spec, never too long.

    The separators ``: , +`` become hyphens. Where anything else has to be replaced, or the name would be longer than
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


def resume_command(folder: Path, model: str | None = None) -> str:
    """The command that goes on with the audit in a folder; a model that is a file has to be named again.

    >>> resume_command(Path("my audit"))
    "gradveil audit --resume --out 'my audit'"
    >>> resume_command(Path("mine"), "mine.py@build")
    'gradveil audit --resume --out mine --model mine.py@build'
    """
    named = [] if model is None else ["--model", model]
    return shlex.join(["gradveil", "audit", "--resume", "--out", str(folder), *named])


def command_line(settings: Mapping[str, Any]) -> str:
    """The command that runs an audit of these settings again; of an `AuditConfig`, its `to_json`."""
    words = ["gradveil", "audit", "--dataset", settings["dataset"], "--model", settings["model"]]
    for key, option in (("defenses", "--defense"), ("attacks", "--attack")):
        for spec in settings[key]:
            words += [option, spec]
    if settings["adaptive"] is not None:
        words.append("--adaptive" if settings["adaptive"] else "--plain")
    for key in _REST:
        if settings[key] is not None:
            words += [f"--{key.replace('_', '-')}", str(settings[key])]
    return shlex.join(words)


_REST = (
    "victims",
    "batch_size",
    "labels",
    "aggregated",
    "match",
    "chunk",
    "rounds",
    "clients",
    "client_batch",
    "lr",
    "seed",
)


def file_digest(path: Path) -> str:
    """Of a file's bytes, by which the report knows an image that is no longer the one that was written."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]


class JsonLines:
    """A file of one JSON object a line that only ever grows.

    A line cut short by a crash is dropped when the file is opened: its row was not finished.

    Args:
        path: the file; it need not exist yet.

    Example:
        >>> import tempfile
        >>> lines = JsonLines(Path(tempfile.mkdtemp()) / "rows.jsonl")
        >>> lines.append([{"victim": 0}, {"victim": 1}])
        >>> JsonLines(lines.path).rows
        [{'victim': 0}, {'victim': 1}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path.exists():
            self._read()

    def _read(self) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{self.path}: line {number} is not JSON ({error}); mend or remove the line, or start a new audit"
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"{self.path}: line {number} is not a JSON object; mend or remove it, or start anew")
            self.rows.append(row)

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows and wait until they are on disk."""
        rows = list(rows)
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        with self.path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        self.rows += rows
