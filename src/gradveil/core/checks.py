"""Parameter checks with one message form: ``owner: name must be ..., got ...``."""

import math
from collections.abc import Collection
from numbers import Integral, Real

from gradveil.core.errors import ParameterError


def number(
    owner: str,
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> float:
    """Return `value` as a float if it is a finite number in [low, high] and strictly inside (above, below).

    >>> number("gaussian-noise", "std", 0.1, low=0)
    0.1
    >>> number("gaussian-noise", "std", -1, low=0)
    Traceback (most recent call last):
        ...
    gradveil.core.errors.ParameterError: gaussian-noise: std must be a number of at least 0, got -1
    """
    expected = "a number" + _describe_range(low, high, above, below)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ParameterError(f"{owner}: {name} must be {expected}, got {value!r} ({type(value).__name__})")
    result = float(value)
    if not (math.isfinite(result) and low <= result <= high and above < result < below):
        raise ParameterError(f"{owner}: {name} must be {expected}, got {value}")
    return result


def integer(owner: str, name: str, value: object, *, low: int | None = None, high: int | None = None) -> int:
    """Return `value` as an int if it is a whole number in [low, high].

    >>> integer("idlg", "iterations", 2.5, low=1)
    Traceback (most recent call last):
        ...
    gradveil.core.errors.ParameterError: idlg: iterations must be a whole number of at least 1, got 2.5 (float)
    """
    expected = "a whole number" + _describe_range(
        -math.inf if low is None else low, math.inf if high is None else high, -math.inf, math.inf
    )
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParameterError(f"{owner}: {name} must be {expected}, got {value!r} ({type(value).__name__})")
    result = int(value)
    if (low is not None and result < low) or (high is not None and result > high):
        raise ParameterError(f"{owner}: {name} must be {expected}, got {value}")
    return result


def flag(owner: str, name: str, value: object) -> bool:
    """Return `value` if it is true or false."""
    if not isinstance(value, bool):
        raise ParameterError(f"{owner}: {name} must be true or false, got {value!r} ({type(value).__name__})")
    return value


def text(owner: str, name: str, value: object) -> str:
    """Return `value` if it is a string."""
    if not isinstance(value, str):
        raise ParameterError(f"{owner}: {name} must be a string, got {value!r} ({type(value).__name__})")
    return value


def choice(owner: str, name: str, value: object, options: Collection[str]) -> str:
    """Return `value` if it is one of `options`.

    >>> choice("lenet", "activation", "tanh", ["relu", "sigmoid"])
    Traceback (most recent call last):
        ...
    gradveil.core.errors.ParameterError: lenet: activation must be one of relu, sigmoid, got 'tanh'
    """
    if not isinstance(value, str) or value not in options:
        raise ParameterError(f"{owner}: {name} must be one of {', '.join(options)}, got {value!r}")
    return value


def _describe_range(low: float, high: float, above: float, below: float) -> str:
    conditions = []
    if math.isfinite(low) and math.isfinite(high):
        return f" from {low:g} to {high:g}"
    if math.isfinite(low):
        conditions.append(f"of at least {low:g}")
    if math.isfinite(above):
        conditions.append(f"above {above:g}")
    if math.isfinite(high):
        conditions.append(f"at most {high:g}")
    if math.isfinite(below):
        conditions.append(f"below {below:g}")
    return " " + " and ".join(conditions) if conditions else ""
