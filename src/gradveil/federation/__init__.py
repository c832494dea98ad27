"""Rounds of clients and a server."""

from gradveil.federation.engines import ENGINES, Engine
from gradveil.federation.faults import Fault
from gradveil.federation.local import train
from gradveil.federation.memory import ClientMemories
from gradveil.federation.training import RoundRecord, Training, TrainingResult

__all__ = ["ENGINES", "ClientMemories", "Engine", "Fault", "RoundRecord", "Training", "TrainingResult", "train"]
