"""Bounds and predictions, each with a test that measures what it predicts."""

from gradveil.theory.certificate import (
    Certificate,
    certificate,
    certificate_of,
    curve_epsilon,
    gaussian_success,
    in_words,
    sampled_curve,
    success_from_curve,
)
from gradveil.theory.dropout import (
    dropout_cosine,
    dropout_cosine_limit,
    dropout_distance,
    dropout_drift,
    dropout_drift_limit,
    dropout_variance,
    sufficient_keep,
)
from gradveil.theory.empirical import EmpiricalPrivacy, Errors, empirical_privacy, epsilon_at_least, mu_at_least
from gradveil.theory.membership_game import GameScores, play
from gradveil.theory.pruning import pruned_share, pruning_cosine, pruning_distance, residual_bound
from gradveil.theory.rank import LayerRank, recursion_ranks
from gradveil.theory.reconstruction import Bound, Usefulness, cramer_rao, reconstruction_bound, usefulness

__all__ = [
    "Bound",
    "Certificate",
    "EmpiricalPrivacy",
    "Errors",
    "GameScores",
    "LayerRank",
    "Usefulness",
    "certificate",
    "certificate_of",
    "cramer_rao",
    "curve_epsilon",
    "dropout_cosine",
    "dropout_cosine_limit",
    "dropout_distance",
    "dropout_drift",
    "dropout_drift_limit",
    "dropout_variance",
    "empirical_privacy",
    "epsilon_at_least",
    "gaussian_success",
    "in_words",
    "mu_at_least",
    "play",
    "pruned_share",
    "pruning_cosine",
    "pruning_distance",
    "reconstruction_bound",
    "recursion_ranks",
    "residual_bound",
    "sampled_curve",
    "success_from_curve",
    "sufficient_keep",
    "usefulness",
]
