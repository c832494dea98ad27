"""Defenses in Flower (flwr): ``from gradveil.flower import defense_mod``; see `gradveil.federation.flower`."""

from gradveil.federation.flower import *  # noqa: F403
from gradveil.federation.flower import __all__ as __all__
