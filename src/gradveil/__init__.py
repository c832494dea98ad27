"""gradveil shows what federated-learning updates leak, stops the leak, and says what stopping it costs."""

from gradveil.defenses import DEFENSES, Chain, Defense, ErrorFeedback, Perturbation
from gradveil.defenses import create as defense
from gradveil.task import Task
from gradveil.update import LocalSteps, Update

__version__ = "0.1.0"


def defenses() -> list[str]:
    """The names of all defenses."""
    return DEFENSES.names()
