"""Parameters of a method, declared once: type, range and strength.

A method is a frozen dataclass; each of its fields is declared by one of the functions below. Checks, error messages,
``gradveil list``, the tests of bad values and ``--match`` all read these declarations. The meaning of a
parameter is described in the method's docstring, under ``Args:``.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.core import checks

_KEY = "gradveil"  # the key of a declaration in the metadata of its field


@dataclass(frozen=True)
class Strength:
    """The parameter that sets how strong a method is, and its range; a stronger method costs more.

    Fair comparisons adjust it until all defenses cost the same.

    Args:
        parameter: the name of the parameter.
        weak: the value at which the method has the least effect.
        strong: the value at which it has the most effect.
        log: whether the values in between are spaced geometrically rather than evenly.
        whole: whether only whole numbers are allowed.

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
    """The declaration of one parameter of a method.

    Args:
        check: called with ``(owner, name, value)``; returns the value to store, or raises a `ParameterError`.
        refused: values just outside the allowed range, for tests.
        optional: whether None is allowed too.
        strength: weakest and strongest value, if this parameter is the method's strength.
        log: whether the values between these are spaced geometrically.
        whole: whether only whole numbers are allowed.
        quiet: whether specs leave it out while it has its default. It is for parameters that a method got later: seeded
            random numbers are derived from specs, and must stay the same for what the method did before.

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
    quiet: bool = False


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
    quiet: bool = False,
) -> Any:
    """A number in [low, high] and strictly inside (above, below); None is allowed if `optional` or the default."""

    def check(owner: str, name: str, value: object) -> float:
        return checks.number(owner, name, value, low=low, high=high, above=above, below=below)

    outside = [low - 1, above, high + 1, below]
    refused = tuple(bound for bound in outside if math.isfinite(bound))
    return _field(default, Parameter(check, (*refused, "x"), optional or default is None, strength, log, quiet=quiet))


def integer(
    default: int | None,
    *,
    low: int | None = None,
    high: int | None = None,
    optional: bool = False,
    strength: tuple[float, float] | None = None,
) -> Any:
    """A whole number in [low, high]; None is allowed if `optional` or the default."""

    def check(owner: str, name: str, value: object) -> int:
        return checks.integer(owner, name, value, low=low, high=high)

    refused = (*([] if low is None else [low - 1]), *([] if high is None else [high + 1]), 1.5, "x")
    return _field(default, Parameter(check, refused, optional or default is None, strength, whole=True))


def flag(default: bool) -> Any:
    """True or false."""
    return _field(default, Parameter(checks.flag, (1, "x")))


def choice(default: str, options: Sequence[str], *, quiet: bool = False) -> Any:
    """One of the words in `options`."""

    def check(owner: str, name: str, value: object) -> str:
        return checks.choice(owner, name, value, options)

    return _field(default, Parameter(check, ("no such word", 1), quiet=quiet))


def text(default: str, *, quiet: bool = False) -> Any:
    """Any string; the method checks its content."""
    return _field(default, Parameter(checks.text, (1,), quiet=quiet))


def state(default: Any = None) -> Any:
    """Not a parameter but a result of `prepare`, `fit` or the data: it counts for equality, but not for the spec."""
    return dataclasses.field(default=default, kw_only=True, metadata={_KEY: None})


def state_fields(method: Any) -> list[str]:
    """The names of the fields declared by `state`."""
    fields = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    return [field.name for field in fields if field.kw_only and field.metadata.get(_KEY, field) is None]


def has_all_state(method: Any) -> bool:
    """Whether every field declared by `state` has been set."""
    return all(getattr(method, name) is not None for name in state_fields(method))


def component() -> Any:
    """Not a parameter but another method that this one contains."""
    return dataclasses.field(metadata={_KEY: None})


def _field(default: Any, parameter: Parameter) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: parameter})


def declared(method: Any) -> dict[str, Parameter]:
    """The declared parameters of a method or its class, by name."""
    fields = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    for field in fields:
        if _KEY not in field.metadata:
            owner = method if isinstance(method, type) else type(method)
            raise TypeError(
                f"{owner.__name__}: the field {field.name} is not declared; write "
                f"{field.name}: {_type_name(field.type)} = number(...), or another function of gradveil.core.parameters"
            )
    return {field.name: field.metadata[_KEY] for field in fields if field.metadata.get(_KEY) is not None}


def left_out(method: Any) -> set[str]:
    """The names of the parameters that a method's spec leaves out: the `quiet` ones that have their default."""
    quiet = {name for name, parameter in declared(method).items() if parameter.quiet}
    fields = dataclasses.fields(method) if quiet else ()
    return {field.name for field in fields if field.name in quiet and getattr(method, field.name) == field.default}


def _type_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def check_declared(method: Any) -> None:
    """Check every declared parameter of a frozen method, and store the value that its check returns."""
    for name, parameter in declared(method).items():
        value = getattr(method, name)
        if value is None and parameter.optional:
            continue
        object.__setattr__(method, name, parameter.check(method.name, name, value))


def strength_of(method: Any) -> Strength | None:
    """The declared strength of a method; None if it has none."""
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
    return {
        name.strip(): re.sub(r"\s+", " ", meaning).strip() for names, meaning in entries for name in names.split(",")
    }
