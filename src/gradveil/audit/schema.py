"""The kinds of values in the files of an audit folder, and the checks of JSON objects against them.

A folder may come from somebody else, or may have been damaged or mixed up with another. So every key has a type and a
range, unknown and missing keys are refused, and every object carries a digest of its own content. `gradveil.audit.rows`
declares the kinds of every file's keys.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from gradveil.core.digests import DIGITS
from gradveil.core.errors import DataError
from gradveil.federation.digests import json_digest

Json = dict[str, Any]

DIGEST = "digest"
REMEDY = "fix or remove it, or run the audit again into another folder"
ROUNDING = 1e-6  # a mean of values at the end of a range may lie this far outside it

MAX_TEXT = 10_000
MAX_COMMAND = 1_000_000
MAX_METHODS = 200  # defenses, and attacks, of one audit
MAX_CLASSES = 65_536
MAX_ITEMS = 1_000_000
MAX_COUNT = 1_000_000_000


@dataclass(frozen=True)
class Kind:
    """What a value must be, in words and as a check.

    Args:
        description: what is expected, in the words of an error message.
        accepts: whether a value is of this kind.

    Example:
        >>> share = Kind("a number from 0 to 1", lambda value: isinstance(value, float) and 0 <= value <= 1)
        >>> share.accepts(0.5), share.accepts("much")
        (True, False)
    """

    description: str
    accepts: Callable[[Any], bool]


Schema = Mapping[str, Kind]


def _plain(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _range(low: float, high: float) -> str:
    if math.isfinite(low) and math.isfinite(high):
        return f" from {_plain(low)} to {_plain(high)}"
    if math.isfinite(low):
        return f" of at least {_plain(low)}"
    return f" of at most {_plain(high)}" if math.isfinite(high) else ""


def number(low: float = -math.inf, high: float = math.inf) -> Kind:
    """A finite number in a range; true and false are not numbers."""

    def accepts(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        # An int may be too large for a float, but can be compared all the same.
        return low - ROUNDING <= value <= high + ROUNDING and (isinstance(value, int) or math.isfinite(value))

    return Kind(f"a finite number{_range(low, high)}", accepts)


def integer(low: int, high: int = MAX_COUNT) -> Kind:
    """A whole number in a range."""
    return Kind(
        f"a whole number{_range(low, high)}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
    )


def text(longest: int = MAX_TEXT) -> Kind:
    """A text of printable characters: a control character could rewrite what a terminal shows."""
    return Kind(
        f"a text of at most {longest:,} printable characters",
        lambda value: isinstance(value, str) and len(value) <= longest and value.isprintable(),
    )


def digest() -> Kind:
    """A digest as `digest_of` returns it."""
    return Kind(
        f"{DIGITS} hexadecimal digits",
        lambda value: isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{DIGITS}}}", value) is not None,
    )


def choice(*known: str) -> Kind:
    """One of a few words."""
    return Kind(f"one of {', '.join(known)}", lambda value: isinstance(value, str) and value in known)


def optional(kind: Kind) -> Kind:
    """A value of a kind, or null."""
    return Kind(f"{kind.description}, or null", lambda value: value is None or kind.accepts(value))


def list_of(kind: Kind, most: int = MAX_ITEMS) -> Kind:
    """A list of values of one kind."""
    return Kind(
        f"a list of at most {most:,}, each {kind.description}",
        lambda value: isinstance(value, list) and len(value) <= most and all(map(kind.accepts, value)),
    )


def object_of(kind: Kind, most: int) -> Kind:
    """An object whose keys are texts and whose values are of one kind."""
    return Kind(
        f"an object of at most {most:,} entries, each {kind.description}",
        lambda value: (
            isinstance(value, dict)
            and len(value) <= most
            and all(map(text().accepts, value))
            and all(map(kind.accepts, value.values()))
        ),
    )


def record(schema: Schema) -> Kind:
    """An object with exactly these keys."""
    return Kind(
        f"an object with {', '.join(schema)}",
        lambda value: (
            isinstance(value, dict)
            and value.keys() == schema.keys()
            and all(kind.accepts(value[key]) for key, kind in schema.items())
        ),
    )


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
WORDS = Kind("a text", lambda value: isinstance(value, str) and len(value) <= MAX_TEXT)  # shown on the page only
SHARE = number(0, 1)
AMOUNT = number(0)
ANY_NUMBER = number()
TARGET = Kind(
    "a number or a list of at most 10,000 numbers",
    lambda value: ANY_NUMBER.accepts(value) or list_of(ANY_NUMBER, 10_000).accepts(value),
)
PARAMETERS = Kind("an object", lambda value: isinstance(value, dict))  # nothing reads them: the spec holds the same


def digest_of(values: Mapping[str, Any]) -> str:
    """Digest of everything except the digest itself; the order of the keys does not matter.

    >>> digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1, "digest": "-"})
    True
    >>> digest_of({"a": 1}) == digest_of({"a": 1.0})
    False
    """
    return json_digest({key: value for key, value in values.items() if key != DIGEST})


def sealed(values: Mapping[str, Any]) -> Json:
    """The values with their digest.

    It reveals damage, hand edits and mix-ups; somebody who recomputes it can write what they like.
    """
    return {**values, DIGEST: digest_of(values)}


def check_seal(where: str, values: Mapping[str, Any]) -> None:
    """Raise if the values are no longer those that were written."""
    if values[DIGEST] != digest_of(values):
        raise DataError(
            f"{where}: expected values with the digest {values[DIGEST]}, got others ({digest_of(values)}), so it was "
            f"damaged or edited since it was written; {REMEDY}"
        )


def check(where: str, values: Mapping[str, Any], schema: Schema, remedy: str = REMEDY) -> None:
    """Raise unless the values have exactly the keys and kinds of a schema."""
    for key, kind in schema.items():
        if key not in values or not kind.accepts(values[key]):
            refuse(where, key, kind.description, short(values[key]) if key in values else "nothing", remedy)
    if unknown := sorted(values.keys() - schema.keys()):
        raise DataError(f"{where}: expected only the keys that gradveil writes, got also {short(unknown[0])}; {remedy}")


def refuse(where: str, key: str, expected: str, got: str, remedy: str = REMEDY) -> NoReturn:
    """Raise the error for one key."""
    raise DataError(f"{where}: {key!r} must be {expected}, got {got}; {remedy}")


def parse(where: str, content: bytes, remedy: str = REMEDY, *, finite: bool = True) -> Json:
    """Parse one JSON object; repeated keys are refused, and with `finite` also NaN and infinities."""
    try:
        values = json.loads(content, parse_constant=_no_number if finite else float, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # covers bad JSON, bad UTF-8 and numbers of thousands of digits
        raise DataError(f"{where}: expected JSON, got {short(content)} ({error}); {remedy}") from error
    if not isinstance(values, dict):
        raise DataError(f"{where}: expected a JSON object, got {short(values)}; {remedy}")
    return values


def short(value: object) -> str:
    """A value for an error message, in one line and not too long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "a number of more than 18 digits"  # Python refuses to print very long numbers
    try:
        words = repr(value[:200] if isinstance(value, str | bytes | list) else value)
    except ValueError:  # such a number somewhere inside
        words = f"a {type(value).__name__}"
    return words if len(words) <= 60 else f"{words[:57]}..."


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: Json = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {short(key)} is there twice")
        values[key] = value
    return values
