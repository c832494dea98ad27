"""Rounds of clients and a server."""

from gradveil.federation.engines import ENGINES, Engine
from gradveil.federation.faults import Fault
from gradveil.federation.local import Transport, train
from gradveil.federation.memory import ClientMemories
from gradveil.federation.protocol import OpenRound
from gradveil.federation.training import RoundRecord, Training, TrainingResult

__all__ = [
    "ENGINES",
    "ClientMemories",
    "Engine",
    "Fault",
    "OpenRound",
    "RoundRecord",
    "Training",
    "TrainingResult",
    "Transport",
    "train",
]
