"""gradveil shows what federated-learning updates leak, stops the leak, and says what stopping it costs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradveil import theory
from gradveil._version import __version__ as __version__
from gradveil.attacks import ATTACKS, Attack, Reconstruction, ThreatModel
from gradveil.attacks import create as attack
from gradveil.attacks.presets import preset
from gradveil.defenses import DEFENSES, Chain, Defense, ErrorFeedback, Perturbation, StepDefense
from gradveil.defenses import create as defense
from gradveil.defenses.compensation import compensate
from gradveil.models.inspection import inspect
from gradveil.task import Task
from gradveil.update import LocalSteps, Rounds, Update

if TYPE_CHECKING:
    from gradveil import flower as flower

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
    "inspect",
    "list_attacks",
    "list_defenses",
    "preset",
    "theory",
]


def list_defenses() -> list[str]:
    """The names of all defenses."""
    return DEFENSES.names()


def list_attacks() -> list[str]:
    """The names of all attacks."""
    return ATTACKS.names()


def __getattr__(name: str) -> Any:
    # Flower is optional and takes a second to import; the other packages are there without an import of their own.
    if name in ("audit", "data", "federation", "flower", "metrics", "models", "report"):
        return import_module(f"gradveil.{name}")
    raise AttributeError(f"module 'gradveil' has no attribute {name!r}")
