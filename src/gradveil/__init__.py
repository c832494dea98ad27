"""gradveil shows what federated-learning updates leak, stops the leak, and says what stopping it costs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradveil._version import __version__ as __version__

if TYPE_CHECKING:
    from gradveil import attacks as attacks
    from gradveil import audit as audit
    from gradveil import data as data
    from gradveil import defenses as defenses
    from gradveil import federation as federation
    from gradveil import flower as flower
    from gradveil import metrics as metrics
    from gradveil import models as models
    from gradveil import report as report
    from gradveil import theory
    from gradveil.attacks import Attack, Reconstruction, ThreatModel
    from gradveil.attacks import create as attack
    from gradveil.core import errors
    from gradveil.defenses import Chain, Defense, ErrorFeedback, Perturbation, StepDefense
    from gradveil.defenses import create as defense
    from gradveil.defenses.compensation import compensate
    from gradveil.models.inspection import inspect
    from gradveil.task import Task
    from gradveil.update import LocalSteps, Rounds, Update, wire

# Where each name comes from. They are imported when they are first used: torch takes seconds to import, and neither
# the command line's help nor the version needs it; Flower is optional.
_ORIGINS = {
    **dict.fromkeys(("Attack", "Reconstruction", "ThreatModel"), "attacks"),
    **dict.fromkeys(("Chain", "Defense", "ErrorFeedback", "Perturbation", "StepDefense"), "defenses"),
    **dict.fromkeys(("LocalSteps", "Rounds", "Update"), "update"),
    "Task": "task",
    "attack": "attacks:create",
    "compensate": "defenses.compensation",
    "defense": "defenses:create",
    "inspect": "models.inspection",
}
_PACKAGES = {
    **{name: name for name in ("attacks", "audit", "data", "defenses", "federation", "flower", "metrics", "models")},
    **{name: name for name in ("report", "theory")},
    "errors": "core.errors",
    "wire": "update.wire",
}

__all__ = [
    "Attack",
    "Chain",
    "Defense",
    "ErrorFeedback",
    "LocalSteps",
    "Perturbation",
    "Reconstruction",
    "Rounds",
    "StepDefense",
    "Task",
    "ThreatModel",
    "Update",
    "attack",
    "compensate",
    "defense",
    "errors",
    "inspect",
    "list_attacks",
    "list_defenses",
    "theory",
    "wire",
]


def list_defenses() -> list[str]:
    """The names of all defenses."""
    from gradveil.defenses import DEFENSES

    return DEFENSES.names()


def list_attacks() -> list[str]:
    """The names of all attacks."""
    from gradveil.attacks import ATTACKS

    return ATTACKS.names()


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"gradveil.{_PACKAGES[name]}")
    if name not in _ORIGINS:
        raise AttributeError(f"module 'gradveil' has no attribute {name!r}")
    module, _, attribute = _ORIGINS[name].partition(":")
    value = globals()[name] = getattr(import_module(f"gradveil.{module}"), attribute or name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ORIGINS, *_PACKAGES})
