"""Bounds and predictions, each next to a test that measures what it predicts."""

from gradveil.theory.dropout import dropout_cosine_limit, dropout_distance, sufficient_keep
from gradveil.theory.pruning import pruned_share, pruning_cosine, pruning_distance, residual_bound

__all__ = [
    "dropout_cosine_limit",
    "dropout_distance",
    "pruned_share",
    "pruning_cosine",
    "pruning_distance",
    "residual_bound",
    "sufficient_keep",
]
