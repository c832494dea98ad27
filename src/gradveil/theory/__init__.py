"""Bounds and predictions, each with a test that measures what it predicts."""

from gradveil.theory.dropout import (
    dropout_cosine,
    dropout_cosine_limit,
    dropout_distance,
    dropout_drift,
    dropout_drift_limit,
    dropout_variance,
    sufficient_keep,
)
from gradveil.theory.pruning import pruned_share, pruning_cosine, pruning_distance, residual_bound
from gradveil.theory.rank import LayerRank, recursion_ranks
from gradveil.theory.reconstruction import Bound, Usefulness, cramer_rao, reconstruction_bound, usefulness

__all__ = [
    "Bound",
    "LayerRank",
    "Usefulness",
    "cramer_rao",
    "dropout_cosine",
    "dropout_cosine_limit",
    "dropout_distance",
    "dropout_drift",
    "dropout_drift_limit",
    "dropout_variance",
    "pruned_share",
    "pruning_cosine",
    "pruning_distance",
    "reconstruction_bound",
    "recursion_ranks",
    "residual_bound",
    "sufficient_keep",
    "usefulness",
]
