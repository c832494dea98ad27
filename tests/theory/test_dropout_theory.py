"""Measurements of what the theory of Gradient Dropout predicts."""

import pytest
import torch

import gradveil
from gradveil import theory
from gradveil.core.errors import ParameterError

SIZE = 200_000


def gradient(seed: int = 5, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dropped_out(value: torch.Tensor, keep: float, std: float, seed: int = 0) -> torch.Tensor:
    defense = gradveil.defense("gradient-dropout", keep=keep, std=std)
    return defense.perturb({"w": value}, generator=torch.Generator().manual_seed(seed))["w"]


@pytest.mark.parametrize(("keep", "std"), [(0.8, 5e-3), (0.7, 0.4), (0.3, 2.0), (0.95, 0.0)])
def test_mean_and_squared_distance_lie_within_three_standard_errors(keep, std):
    value = gradient()
    error = dropped_out(value, keep, std) - value
    assert abs(float(error.mean())) < 3 * float(error.std()) / SIZE**0.5
    squared = error.square()
    measured = float(squared.mean())
    assert abs(measured - theory.dropout_distance(value, keep, std)) < 3 * float(squared.std()) / SIZE**0.5
    if std == 2.0:  # the formula with the slip in the paper's appendix would fail
        assert abs(measured - ((1 - keep) / keep * float(value.square().mean()) + (1 - keep) ** 2 * std**2)) > 0.1


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_a_sufficient_keep_exceeds_the_gap_for_any_gradient(scale):
    gap, std = 0.002, 0.1
    keep = theory.sufficient_keep(gap, std) - 0.02
    value = gradient(scale=scale)
    assert float((dropped_out(value, keep, std) - value).square().mean()) > gap
    if scale == 0:  # for a zero gradient the limit is tight
        keep = theory.sufficient_keep(gap, std) + 0.02
        assert float((dropped_out(value, keep, std) - value).square().mean()) < gap


def test_a_gap_above_the_variance_of_the_decoys_is_refused():
    with pytest.raises(ParameterError, match="a gap of 0.04 needs decoys of a variance above it, got 0.01; raise std"):
        theory.sufficient_keep(0.04, 0.1)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("std", [0.0, 5e-3, 1.0])
def test_the_cosine_of_a_gaussian_gradient_stays_below_its_limit(keep, std):
    value = gradient()
    cosine = float(torch.cosine_similarity(value, dropped_out(value, keep, std), dim=0))
    assert cosine <= theory.dropout_cosine_limit(keep) + 0.02
    if std == 0:
        assert cosine == pytest.approx(theory.dropout_cosine_limit(keep), abs=0.01)


def test_the_cosine_limit_does_not_hold_for_a_gradient_that_one_value_dominates():
    value = gradient(scale=1e-3)
    value[0] = 100.0
    cosines = [float(torch.cosine_similarity(value, dropped_out(value, 0.5, 0.0, seed), dim=0)) for seed in range(8)]
    assert max(cosines) > theory.dropout_cosine_limit(0.5) + 0.2
