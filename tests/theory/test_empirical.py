"""Lower bounds from games: close to known Gaussians, and wrong no more often than they promise."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, norm

from gradveil.core.errors import InputError, ParameterError
from gradveil.theory import Errors, empirical_privacy, epsilon_at_least, mu_at_least
from gradveil.theory.empirical import clopper_pearson

COUNTS = st.integers(1, 5000).flatmap(lambda games: st.tuples(st.integers(0, games), st.just(games)))


def gaussian_delta(mu, epsilon):
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


@given(counts=COUNTS, level=st.floats(0.5, 0.9999))
def test_the_bound_is_that_of_clopper_and_pearson(counts, level):
    found, games = counts
    bound = clopper_pearson(found, games, level)
    two_sided = binomtest(found, games).proportion_ci(1 - 2 * (1 - level), "exact").high if level > 0.5 else bound
    assert bound == pytest.approx(two_sided, rel=1e-6)
    if found < games:  # at the bound, so few cases have exactly the probability that the level leaves
        assert binom.cdf(found, games, bound) == pytest.approx(1 - level, rel=1e-6)


@given(
    first=COUNTS,
    second=COUNTS,
    delta=st.floats(0, 0.5),
    confidence=st.floats(0.5, 0.9999),
    rules=st.integers(1, 5),
)
def test_properties_of_the_bounds(first, second, delta, confidence, rules):
    (false_positives, without), (false_negatives, with_member) = first, second
    errors = Errors(false_positives, without, false_negatives, with_member)
    swapped = Errors(false_negatives, with_member, false_positives, without)
    settings = {"confidence": confidence, "rules": rules}
    epsilon, mu = epsilon_at_least(errors, delta=delta, **settings), mu_at_least(errors, **settings)
    assert epsilon >= 0
    assert mu >= 0
    assert math.isfinite(epsilon + mu)
    assert epsilon == epsilon_at_least(swapped, delta=delta, **settings)
    assert mu == pytest.approx(mu_at_least(swapped, **settings))
    assert epsilon >= epsilon_at_least(errors, delta=delta + 0.1, **settings)
    assert epsilon >= epsilon_at_least(errors, delta=delta, confidence=confidence, rules=rules + 1)
    if false_positives:
        fewer = Errors(false_positives - 1, without, false_negatives, with_member)
        assert epsilon_at_least(fewer, delta=delta, **settings) >= epsilon
        assert mu_at_least(fewer, **settings) >= mu
    # The rates that hold at this confidence must not be possible under any smaller epsilon or mu.
    alpha, beta = errors.upper(**settings)
    assert beta >= 1 - delta - math.exp(epsilon) * alpha - 1e-9
    if mu > 0:
        assert beta == pytest.approx(norm.cdf(norm.ppf(1 - alpha) - mu), rel=1e-6)


def test_always_wrong_or_always_guessing_refutes_nothing():
    for errors in (
        Errors(10, 10, 10, 10),
        Errors(0, 10, 10, 10),
        Errors(10, 10, 0, 10),
        Errors(5000, 10**4, 5000, 10**4),
    ):
        assert epsilon_at_least(errors, delta=0) == mu_at_least(errors) == 0


def test_no_error_at_all_gives_what_the_number_of_games_allows():
    games, level = 1000, 1 - 0.001 / 2
    upper = 1 - (1 - level) ** (1 / games)
    assert epsilon_at_least(Errors(0, games, 0, games), delta=0.0) == pytest.approx(math.log((1 - upper) / upper))


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_many_games_come_close_to_known_gaussians_and_stay_below(mu):
    draw = np.random.default_rng(0)
    found = empirical_privacy(draw.normal(mu, size=10**6), draw.normal(size=10**6), deltas=(1e-5, 0.1))
    assert mu - 0.03 < found.mu < mu
    for delta, epsilon in found.epsilons.items():
        # At the measured epsilon, the true delta is still above the given one: so the true epsilon is larger.
        assert gaussian_delta(mu, epsilon) > delta
    # Delta 0.1 is decided by ordinary errors, which many games measure well.
    assert gaussian_delta(mu, 1.15 * found.epsilons[0.1] + 0.01) < 0.1


def test_the_bounds_are_wrong_no_more_often_than_promised():
    draw, games, mu, delta, confidence = np.random.default_rng(1), 500, 1.0, 0.05, 0.9
    wrong_mu = wrong_epsilon = 0
    repetitions = 300
    for _ in range(repetitions):
        found = empirical_privacy(
            draw.normal(mu, size=games), draw.normal(size=games), deltas=(delta,), confidence=confidence
        )
        wrong_mu += found.mu > mu
        wrong_epsilon += gaussian_delta(mu, max(found.epsilons[delta], 1e-9)) < delta
    allowed = binom.ppf(0.999, repetitions, 1 - confidence)
    assert wrong_mu <= allowed
    assert wrong_epsilon <= allowed


def test_games_that_choose_thresholds_are_not_counted():
    draw = np.random.default_rng(3)
    inside, outside = draw.normal(2, size=1000), draw.normal(size=1000)
    first = empirical_privacy(inside, outside, tuning=0.3)
    assert {(errors.with_member, errors.without) for errors in first.errors.values()} == {(700, 700)}
    others = empirical_privacy(
        np.concatenate([inside[:300], draw.normal(9, size=700)]),
        np.concatenate([outside[:300], draw.normal(9, size=700)]),
        tuning=0.3,
    )
    assert list(first.errors) == list(others.errors)


def test_thresholds_fixed_beforehand_are_all_counted_and_share_the_confidence():
    draw = np.random.default_rng(4)
    inside, outside = draw.normal(2, size=1000), draw.normal(size=1000)
    one = empirical_privacy(inside, outside, thresholds=[1.0])
    two = empirical_privacy(inside, outside, thresholds=[1.0, 50.0])
    assert one.errors[1.0] == Errors.at(1.0, with_member=inside, without=outside) == two.errors[1.0]
    assert one.mu == mu_at_least(one.errors[1.0])
    assert two.mu == mu_at_least(one.errors[1.0], rules=2) < one.mu
    assert one.refutes(1e-5, epsilon=0.5)
    assert not one.refutes(1e-5, epsilon=10.0)


def test_bad_values_are_refused():
    with pytest.raises(ParameterError, match="false_positives must be a whole number from 0 to 10, got 11"):
        Errors(11, 10, 0, 10)
    with pytest.raises(ParameterError, match="without must be a whole number of at least 1, got 0"):
        Errors(0, 0, 0, 10)
    with pytest.raises(InputError, match="one finite score for each of one or more games"):
        empirical_privacy([float("nan"), 1.0], [0.0, 1.0])
    with pytest.raises(InputError, match="at least one game of each kind to choose thresholds and one to count"):
        empirical_privacy([1.0], [0.0, 1.0])
    with pytest.raises(InputError, match="expected at least one threshold, got none"):
        empirical_privacy([1.0, 2.0], [0.0, 1.0], thresholds=[])
    with pytest.raises(ParameterError, match="every delta must be a number of at least 0 and below 1"):
        empirical_privacy([1.0, 2.0], [0.0, 1.0], deltas=[1.5])
