"""Epsilon, compared with another library and with closed forms."""

import math
import warnings

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from gradveil.core.errors import ParameterError
from gradveil.defenses.accounting import privacy_spent

pytest.importorskip("dp_accounting")
RUNS = [
    {"noise_multiplier": 1.1, "rounds": 1000, "batch_size": 256, "examples": 60_000, "delta": 1e-5},
    {"noise_multiplier": 0.8, "rounds": 200, "batch_size": 32, "examples": 1200, "delta": 1e-4},
    {"noise_multiplier": 2.0, "rounds": 500, "batch_size": 64, "examples": 5000, "delta": 1e-5},
    {"noise_multiplier": 4.0, "rounds": 50, "batch_size": 100, "examples": 1000, "delta": 1e-4},
]


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The exact epsilon of one Gaussian mechanism (Balle and Wang, ICML 2018)."""

    def excess(epsilon: float) -> float:
        shift = 1 / (2 * noise_multiplier)
        spread = epsilon * noise_multiplier
        return norm.cdf(shift - spread) - math.exp(epsilon) * norm.cdf(-shift - spread) - delta

    return brentq(excess, 0, 200)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"z={run['noise_multiplier']}")
def test_epsilon_is_that_of_another_library(run):
    """Compare with opacus' accountant based on privacy random variables, at a tenth of its default error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.accountants import PRVAccountant

        accountant = PRVAccountant()
        accountant.history = [(run["noise_multiplier"], run["batch_size"] / run["examples"], run["rounds"])]
        expected = float(accountant.get_epsilon(run["delta"], eps_error=1e-3))
    assert privacy_spent(**run, sampling="poisson").epsilon == pytest.approx(expected, rel=0.01)


def test_without_sampling_it_is_the_gaussian_mechanism():
    full_batch = {"noise_multiplier": 2.0, "rounds": 1, "batch_size": 50, "examples": 50, "delta": 1e-5}
    poisson = privacy_spent(**full_batch, sampling="poisson")
    assert poisson.epsilon == pytest.approx(gaussian_epsilon(2.0, 1e-5), rel=1e-3)
    # Replacing an example moves the sum twice as far; Rényi accounting gives an upper bound that is not far above.
    exact = gaussian_epsilon(1.0, 1e-5)
    assert exact <= privacy_spent(**full_batch).epsilon <= 1.15 * exact


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_several_passes_are_composed_without_counting_sampling_as_protection(sampling):
    run = {"rounds": 10, "batch_size": 5, "examples": 50, "delta": 1e-5, "noise_multiplier": 8.0, "sampling": sampling}
    several = privacy_spent(**run, passes=4).epsilon
    # All examples in every batch and half the noise: the same as composing four Gaussian mechanisms.
    full_batch = privacy_spent(**run | {"batch_size": 50, "noise_multiplier": 4.0}).epsilon
    assert several == pytest.approx(full_batch, rel=0.02)
    assert several > privacy_spent(**run | {"noise_multiplier": 4.0}).epsilon


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_more_rounds_and_less_noise_cost_more(sampling):
    run = RUNS[3] | {"sampling": sampling}
    epsilon = privacy_spent(**run).epsilon
    assert privacy_spent(**run | {"rounds": 100}).epsilon > epsilon
    assert privacy_spent(**run | {"noise_multiplier": 2.0}).epsilon > epsilon
    assert privacy_spent(**run | {"rounds": 0}).epsilon == 0
    assert privacy_spent(**run | {"noise_multiplier": 0.0}).epsilon == math.inf


def test_invalid_arguments_are_refused():
    with pytest.raises(ParameterError, match="batch_size must be a whole number from 1 to 10, got 20"):
        privacy_spent(noise_multiplier=1.0, rounds=1, batch_size=20, examples=10, delta=1e-5)
    with pytest.raises(ParameterError, match="sampling must be one of fixed, poisson, got 'shuffled'"):
        privacy_spent(**RUNS[0], sampling="shuffled")
