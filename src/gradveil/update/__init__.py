"""What leaves a client, how it is computed, and its encoding as bytes (`gradveil.update.wire`)."""

from gradveil.update.local_steps import (
    LocalSteps,
    sizes_of,
    step_weights,
    steps_of,
    total_weight,
    variance_factor,
    with_momentum,
)
from gradveil.update.round import Announced, ClientRound, ClientState, Memory, ServerRound
from gradveil.update.update import MAX_BITS, Grid, Meta, Rounds, Update, compute_update, weighted_mean

__all__ = [
    "MAX_BITS",
    "Announced",
    "ClientRound",
    "ClientState",
    "Grid",
    "LocalSteps",
    "Memory",
    "Meta",
    "Rounds",
    "ServerRound",
    "Update",
    "compute_update",
    "sizes_of",
    "step_weights",
    "steps_of",
    "total_weight",
    "variance_factor",
    "weighted_mean",
    "with_momentum",
]
