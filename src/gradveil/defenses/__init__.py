"""Defenses by name, one file per method. Every file in this folder is imported, so a new file adds a new method."""

import re
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from gradveil.core.errors import ParameterError, UnknownNameError
from gradveil.core.parameters import Strength
from gradveil.core.registry import parse_spec
from gradveil.defenses.base import DEFENSES, Defense, Perturbation, Prepared, StepDefense
from gradveil.defenses.composition import Chain, ErrorFeedback
from gradveil.update import Memory

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "DEFENSES",
    "Chain",
    "Defense",
    "ErrorFeedback",
    "Memory",
    "Perturbation",
    "Prepared",
    "StepDefense",
    "Strength",
    "create",
]


def create(spec: str, /, **parameters: Any) -> Defense:
    """Build a defense from its name and parameters, or from a spec as written on the command line.

    In a spec, ``+`` chains defenses and ``+error-feedback`` wraps everything before it.

    >>> create("dual-pruning", k1=0.1)
    gradveil.defense('dual-pruning', k1=0.1, k2=0.75)
    >>> create("top-k:keep=0.1+error-feedback")
    gradveil.ErrorFeedback(gradveil.defense('top-k', keep=0.1, form='layer'))
    """
    links = re.split(r"\+(?=[a-zA-Z])", spec)
    if parameters and (len(links) > 1 or ":" in spec):
        raise ParameterError(f"{spec}: give parameters in the text or as keywords, not both")
    parts: list[Defense] = []
    for link in links:
        name, own_parameters = parse_spec(link)
        if name == "error-feedback":
            if not parts:
                raise ParameterError("error-feedback wraps a defense: write NAME+error-feedback")
            unknown = sorted(set(own_parameters) - {"decay", "clip"})
            if unknown:
                raise UnknownNameError(f"error-feedback: unknown parameter {unknown[0]!r}; it takes: decay, clip")
            parts = [ErrorFeedback(_join(parts), **own_parameters)]
        else:
            if parts:
                DEFENSES.get(name, "error-feedback")  # a misspelled name after + may be meant for the wrapper
            parts.append(DEFENSES.create(name, **own_parameters, **parameters))
    return _join(parts)


def _join(parts: list[Defense]) -> Defense:
    return parts[0] if len(parts) == 1 else Chain(*parts)
