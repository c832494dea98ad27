"""Rounds of clients and a server."""

from gradveil.federation.faults import Fault, Inbox, Transport
from gradveil.federation.local import train
from gradveil.federation.memory import ClientMemories
from gradveil.federation.training import RoundRecord, Training, TrainingResult

__all__ = ["ClientMemories", "Fault", "Inbox", "RoundRecord", "Training", "TrainingResult", "Transport", "train"]
