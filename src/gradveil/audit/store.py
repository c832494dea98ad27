"""Rows on disk: appended when they are finished, never lost, never written twice."""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def resume_command(folder: Path) -> str:
    """The command that goes on with the audit in a folder.

    >>> resume_command(Path("my audit"))
    "gradveil audit --resume --out 'my audit'"
    """
    return shlex.join(["gradveil", "audit", "--resume", "--out", str(folder)])


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
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
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
