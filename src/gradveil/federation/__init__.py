"""Rounds of clients and a server."""

from gradveil.federation.local import Training, TrainingResult, train

__all__ = ["Training", "TrainingResult", "train"]
