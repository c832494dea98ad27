"""Examples that are shown as text: fragments, each of which an attack may have recovered, and the files that hold them.

The files are read by reports, from folders that may come from anyone: nothing in them is taken for markup or code.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 4_000_000
"""The largest file that is read."""
_MAX_TEXT = 10_000


@dataclass(frozen=True)
class Fragment:
    """A part of a written example: a word of a text, or a cell of a table.

    Args:
        text: what it says. Fragments without a column are written one after another, so a word brings its space along.
        recovered: whether an attack has recovered it; None: there was nothing to recover.
        column: the name of its column, if it is a cell of a table.

    Example:
        >>> content = to_file([[Fragment("39", True, "age"), Fragment("Private", False, "workclass")]])
        >>> from_file(content)[0][1]
        Fragment(text='Private', recovered=False, column='workclass')
    """

    text: str
    recovered: bool | None = None
    column: str = ""


def to_file(examples: Sequence[Sequence[Fragment]]) -> bytes:
    """The content of a file that holds examples."""
    listed = [[[part.text[:_MAX_TEXT], part.recovered, part.column] for part in example] for example in examples]
    return json.dumps({"examples": listed}, ensure_ascii=False).encode()


def from_file(content: bytes) -> list[list[Fragment]]:
    """The examples in such a file; `ValueError` for any other content."""
    try:
        described = json.loads(content.decode())
    except RecursionError as error:
        raise ValueError("it must not be nested deeply") from error
    if not isinstance(described, dict) or [*described] != ["examples"] or not isinstance(described["examples"], list):
        raise ValueError('it must be a JSON object {"examples": [...]}')
    return [[_fragment(part) for part in _listed(example)] for example in described["examples"]]


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"an example must be a list, got {type(value).__name__}")
    return value


def _fragment(value: Any) -> Fragment:
    match value:
        case [str(text), bool() | None as recovered, str(column)] if (
            len(text) <= _MAX_TEXT and len(column) <= _MAX_TEXT
        ):
            return Fragment(text, recovered, column)
    raise ValueError(
        f"a fragment must be a list of a text of at most {_MAX_TEXT:,} letters, true, false or null, and a name"
    )
