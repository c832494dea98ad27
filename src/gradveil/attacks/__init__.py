"""Attacks by name: one file per attack. Every file in this folder is imported, so a new file adds an attack."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from gradveil.attacks._learned import Learning
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Attributes, Findings, Identification, Membership, Reconstruction, RecoveredUpdate
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ParameterError
from gradveil.core.registry import parse_spec

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "ATTACKS",
    "Attack",
    "Attributes",
    "Findings",
    "Identification",
    "Learning",
    "Membership",
    "Problem",
    "Reconstruction",
    "RecoveredUpdate",
    "ThreatModel",
    "create",
]


def create(spec: str, /, **parameters: Any) -> Attack:
    """Build an attack from its name and parameters, or from a spec string as used on the command line.

    >>> create("idlg:iterations=100")
    gradveil.attack('idlg', iterations=100, restarts=1, mute='none')
    """
    name, given = parse_spec(spec)
    if given and parameters:
        raise ParameterError(f"{spec}: give parameters in the text or as keywords, not both")
    return ATTACKS.create(name, **given, **parameters)
