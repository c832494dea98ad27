"""Intervals against scipy, ranks against their definition, and how often an interval holds the true median."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gradveil.audit.statistics import (
    FEWEST,
    Interval,
    median_interval,
    paired_difference,
    possible_share,
    rank,
    sign_test,
)


def by_victim(values):
    return dict(enumerate(values))


def scipy_interval(samples, statistic, level, **options):
    options = {"n_resamples": 20_000, "method": "percentile", "rng": np.random.default_rng(1), **options}
    return stats.bootstrap(samples, statistic, confidence_level=level, **options).confidence_interval


@pytest.mark.parametrize("victims", [6, 8, 16, 31])
@pytest.mark.parametrize("level", [0.95, 0.8])
def test_intervals_are_those_of_scipy(victims, level):
    """A bootstrapped median takes few values, so ends are compared by their level, to within 1 %."""
    values = np.random.default_rng(victims).normal(20, 6, victims)
    ours = median_interval(values, level=level)
    wide, narrow = (scipy_interval((values,), np.median, level + shift) for shift in (0.02, -0.02))
    assert ours.estimate == np.median(values)
    assert wide.low <= ours.low <= narrow.low
    assert narrow.high <= ours.high <= wide.high


@pytest.mark.parametrize("victims", [8, 16])
def test_paired_differences_are_those_of_scipy(victims):
    generator = np.random.default_rng(victims)
    easiness = generator.normal(0, 10, victims)  # shared by both sides, and far larger than the difference
    ones, others = (20 + easiness + generator.normal(shift, 1, victims) for shift in (1.5, 0))
    ours = paired_difference(by_victim(ones), by_victim(others))
    wide, narrow = (
        scipy_interval((ones, others), lambda a, b, axis: np.median(a - b, axis=axis), level, paired=True)
        for level in (0.97, 0.93)
    )
    assert wide.low <= ours.low <= narrow.low
    assert narrow.high <= ours.high <= wide.high
    assert ours.separated
    # If the victims were treated as different ones, nothing could be concluded.
    assert not median_interval(ones).low > median_interval(others).high


@pytest.mark.parametrize("draw", ["normal", "skewed", "heavy"])
def test_intervals_hold_the_true_median_as_often_as_promised(draw):
    generator = np.random.default_rng(0)
    samples = generator.standard_t(3, (300, 8)) if draw == "heavy" else generator.normal(size=(300, 8))
    if draw == "skewed":
        samples = np.exp(samples) - 1
    held = sum(found.low <= 0 <= found.high for found in map(median_interval, samples))
    assert held >= 0.88 * 300  # at least 92 % in the long run; with 300 samples, 88 % is three standard errors below


def test_equal_rows_give_equal_intervals():
    values = list(np.random.default_rng(3).normal(size=9))
    assert median_interval(values) == median_interval(values)


@given(st.lists(st.floats(-1e3, 1e3), min_size=FEWEST, max_size=12), st.floats(-100, 100))
def test_intervals_move_with_the_values_and_turn_with_the_sides(values, shift):
    ones, zeros = by_victim(values), by_victim([0.0] * len(values))
    found = paired_difference(ones, zeros)
    assert min(values) <= found.low <= found.high <= max(values)
    turned = paired_difference(zeros, ones)
    assert turned.low == pytest.approx(-found.high, abs=1e-6 + 0.3 * (found.high - found.low))
    moved = median_interval([value + shift for value in values])
    assert moved.low == pytest.approx(found.low + shift, abs=1e-9)


@pytest.mark.parametrize("victims", range(1, FEWEST))
def test_too_few_victims_have_no_interval(victims):
    found = median_interval([float(victim) + 5 for victim in range(victims)])
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert not found.known
    assert not found.separated


def test_only_shared_victims_are_compared():
    ones = by_victim([10.0] * 8)
    assert paired_difference(ones, {0: 4.0, 7: 4.0, 99: 100.0}) == Interval(6.0, -math.inf, math.inf)
    assert paired_difference(ones, {99: 100.0}) is None


def test_ranks_follow_their_definition():
    generator = np.random.default_rng(5)
    values = {
        name: by_victim(generator.normal(level, 2, 8)) for name, level in (("a", 8), ("b", 9), ("c", 20), ("d", 21))
    }
    places = rank(values)
    for name, place in places.items():
        others = [paired_difference(values[name], values[other]) for other in values if other != name]
        assert place.best == 1 + sum(found.low > 0 for found in others)
        assert place.worst == len(values) - sum(found.high < 0 for found in others)
    assert places["a"].worst < places["c"].best


def test_without_enough_victims_there_is_no_ranking():
    places = rank({"a": by_victim([1.0] * 5), "b": by_victim([50.0] * 5)})
    assert {str(place) for place in places.values()} == {"1–2"}


@pytest.mark.parametrize(("found", "victims"), [(0, 1), (0, 8), (3, 8), (7, 8)])
def test_at_the_possible_share_so_few_become_unlikely(found, victims):
    assert stats.binom.cdf(found, victims, possible_share(found, victims)) == pytest.approx(0.05)


def test_all_leaking_leaves_everything_possible():
    assert possible_share(8, 8) == 1


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (5, 0), (7, 1), (3, 3), (0, 4), (40, 20)])
def test_the_sign_test_is_the_binomial_test(wins, losses):
    expected = stats.binomtest(wins, wins + losses, alternative="greater").pvalue if wins + losses else 1.0
    assert sign_test(wins, losses) == pytest.approx(expected)
