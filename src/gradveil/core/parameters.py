"""Parameters of a method, declared once: type, range and strength.

A method is a frozen dataclass; each of its fields is declared by one of the functions below. Checks, error messages,
``gradveil list``, the tests of bad values and ``--match`` all read these declarations. What a parameter means stands in
the method's docstring, under ``Args:``.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.core import checks

_KEY = "gradveil"  # of a field's metadata


@dataclass(frozen=True)
class Strength:
    """The parameter by which a method is made stronger, and between which values: more of it costs more.

    Fair comparisons turn it until all defenses cost the same.

    Args:
        parameter: its name.
        weak: the value at which the method does least.
        strong: the value at which it does most.
        log: the values between are spaced by their ratio, not by their difference.
        whole: only whole numbers.

    Example:
        >>> keep = Strength("keep", 1.0, 1e-4, log=True)
        >>> keep.at(0), keep.at(0.5), keep.at(1)
        (1.0, 0.01, 0.0001)
    """

    parameter: str
    weak: float
    strong: float
    log: bool = False
    whole: bool = False

    def at(self, position: float) -> float | int:
        """The value at a position from 0 (weak) to 1 (strong), to four digits."""
        if self.log:
            value = self.weak * (self.strong / self.weak) ** position
        else:
            value = self.weak + (self.strong - self.weak) * position
        return round(value) if self.whole else float(f"{value:.4g}")


@dataclass(frozen=True)
class Parameter:
    """What one field of a method may be.

    Args:
        check: ``(owner, name, value)``: the value as it is kept, or a `ParameterError`.
        refused: values just outside what is allowed, for tests.
        optional: None is allowed too.
        strength: weakest and strongest value, if this parameter is the method's strength.
        log: whether the values between these are spaced by their ratio.
        whole: whether only whole numbers are allowed.

    Example:
        >>> fields = {"keep": number(0.2, above=0, high=1)}
        >>> fields["keep"].metadata["gradveil"].refused
        (0, 2, 'x')
    """

    check: Callable[[str, str, object], Any]
    refused: tuple[Any, ...]
    optional: bool = False
    strength: tuple[float, float] | None = None
    log: bool = False
    whole: bool = False


def number(
    default: float | None,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    optional: bool = False,
    strength: tuple[float, float] | None = None,
    log: bool = False,
) -> Any:
    """A number in [low, high] and strictly inside (above, below); None too if it is `optional` or the default."""

    def check(owner: str, name: str, value: object) -> float:
        return checks.number(owner, name, value, low=low, high=high, above=above, below=below)

    outside = [low - 1, above, high + 1, below]
    refused = tuple(bound for bound in outside if math.isfinite(bound))
    return _field(default, Parameter(check, (*refused, "x"), optional or default is None, strength, log))


def integer(
    default: int | None,
    *,
    low: int | None = None,
    high: int | None = None,
    optional: bool = False,
    strength: tuple[float, float] | None = None,
) -> Any:
    """A whole number in [low, high]; None too if it is `optional` or the default."""

    def check(owner: str, name: str, value: object) -> int:
        return checks.integer(owner, name, value, low=low, high=high)

    refused = (*([] if low is None else [low - 1]), *([] if high is None else [high + 1]), 1.5, "x")
    return _field(default, Parameter(check, refused, optional or default is None, strength, whole=True))


def flag(default: bool) -> Any:
    """True or false."""
    return _field(default, Parameter(checks.flag, (1, "x")))


def choice(default: str, options: Sequence[str]) -> Any:
    """One of some words."""
    return _field(
        default, Parameter(lambda owner, name, value: checks.choice(owner, name, value, options), ("no such word", 1))
    )


def text(default: str) -> Any:
    """Any text; what it must say is for the method to check."""
    return _field(default, Parameter(checks.text, (1,)))


def state() -> Any:
    """Not a parameter but what `prepare` or `fit` put there; it is not in the method's name, but equality counts it."""
    return dataclasses.field(default=None, kw_only=True, metadata={_KEY: None})


def has_all_state(method: Any) -> bool:
    """Whether everything declared by `state` has been put there."""
    fields = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    return all(getattr(method, one.name) is not None for one in fields if one.metadata.get(_KEY, one) is None)


def component() -> Any:
    """Not a parameter but a method that this one is made of."""
    return dataclasses.field(metadata={_KEY: None})


def _field(default: Any, declared: Parameter) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: declared})


def declared(method: Any) -> dict[str, Parameter]:
    """The declared parameters of a method or its class, by name."""
    fields = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    for one in fields:
        if _KEY not in one.metadata:
            owner = method if isinstance(method, type) else type(method)
            raise TypeError(
                f"{owner.__name__}: the field {one.name} is not declared; write {one.name}: {_type_name(one.type)} = "
                "number(...), or another of gradveil.core.parameters"
            )
    return {one.name: one.metadata[_KEY] for one in fields if one.metadata.get(_KEY) is not None}


def _type_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def check_declared(method: Any) -> None:
    """Check every declared parameter of a frozen method, and keep it as its check returns it."""
    for name, parameter in declared(method).items():
        value = getattr(method, name)
        if value is None and parameter.optional:
            continue
        object.__setattr__(method, name, parameter.check(method.name, name, value))


def strength_of(method: Any) -> Strength | None:
    """The declared strength of a method."""
    for name, parameter in declared(method).items():
        if parameter.strength is not None:
            return Strength(name, *parameter.strength, log=parameter.log, whole=parameter.whole)
    return None


def meanings(method: type) -> dict[str, str]:
    """What each parameter means, from the docstring's ``Args:``.

    >>> class Shift:
    ...     '''Shift.
    ...
    ...     Args:
    ...         by: how far.
    ...     '''
    >>> meanings(Shift)
    {'by': 'how far.'}
    """
    doc = inspect.getdoc(method) or ""
    _, _, rest = doc.partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", rest)[0]
    entries = re.findall(r"^    ([\w, ]+): (.*(?:\n     +.*)*)", section, flags=re.MULTILINE)
    return {name.strip(): re.sub(r"\s+", " ", words).strip() for names, words in entries for name in names.split(",")}
