"""Areas, rates, shares and bits against closed forms and slow, obvious references."""

import math

import pytest
import torch
from scipy import stats

from gradveil.core.errors import InputError, ParameterError
from gradveil.metrics import identification as figures
from gradveil.metrics.identification import Estimate


def game(seed, count=60, members=7, rounded=True):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, generator=generator, dtype=torch.float64)
    scores = scores.mul(2).round() if rounded else scores
    return scores, torch.randperm(count, generator=generator) < members


@pytest.mark.parametrize("seed", range(4))
def test_auc_counts_pairs_and_half_of_the_ties(seed):
    scores, members = game(seed)
    pairs = [(a > b) + (a == b) / 2 for a in scores[members].tolist() for b in scores[~members].tolist()]
    assert figures.auc(scores, members) == pytest.approx(sum(pairs) / len(pairs))
    assert figures.auc(-scores, members) == pytest.approx(1 - figures.auc(scores, members))


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 0.3])
def test_the_rate_is_the_best_over_all_thresholds(rate, rounded):
    scores, members = game(1, count=200, members=20, rounded=rounded)
    best = 0.0
    for threshold in [-math.inf, *scores.tolist()]:
        if float((scores[~members] > threshold).double().mean()) <= rate:
            best = max(best, float((scores[members] > threshold).double().mean()))
    assert figures.true_positive_rate(scores, members, false_positives=rate) == pytest.approx(best)


def test_the_share_named_is_the_mean_over_ways_to_break_ties():
    scores, members = game(2, count=12, members=4)
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(4000):
        order = torch.randperm(12, generator=generator)
        best = order[scores[order].argsort(descending=True, stable=True)[:4]]
        found.append(float(members[best].double().mean()))
    assert figures.share_named(scores, members) == pytest.approx(sum(found) / len(found), abs=0.02)


def test_clopper_pearson_is_exact():
    """At its ends, what was seen or something more extreme has a probability of 2.5 %."""
    found = figures.proportion(7, 20)
    assert stats.binom.sf(6, 20, found.low) == pytest.approx(0.025)
    assert stats.binom.cdf(7, 20, found.high) == pytest.approx(0.025)
    assert figures.proportion(0, 5).low == 0
    assert figures.proportion(5, 5).high == 1


def test_the_bootstrap_covers_the_mean():
    covered = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(30, 12, generator=generator)
        members = torch.zeros(30, 12, dtype=torch.bool)
        members[:, :3] = True
        interval = figures.over_games(figures.auc, scores, members)
        covered += interval.low <= 0.5 <= interval.high
    assert covered >= 50
    assert figures.over_games(figures.auc, scores[:3], members[:3]).high == math.inf


@pytest.mark.parametrize("candidates", [2, 10, 1000])
def test_fano_is_tight_for_a_symmetric_channel(candidates):
    """If the wrong guesses are equally likely, the bound is the mutual information itself."""
    right = 0.6
    wrong = (1 - right) / (candidates - 1)
    information = math.log2(candidates) + right * math.log2(right) + (candidates - 1) * wrong * math.log2(wrong)
    assert figures.information_bits(Estimate(right, right, right), candidates).value == pytest.approx(information)
    guess = 1 / candidates
    assert figures.information_bits(Estimate(guess, 0.0, 1.0), candidates) == Estimate(0, 0, math.log2(candidates))


def test_summary_of_single_members():
    members = torch.eye(8, 20, dtype=torch.bool)
    found = figures.summary(members.double(), members)
    assert {name: round(estimate.value, 3) for name, estimate in found.items()} == {
        "auc": 1,
        "tpr_at_1_percent": 1,
        "share_named": 1,
        "rank_one": 1,
        "bits": 4.322,
    }
    assert found["bits"].low < found["bits"].value
    assert figures.rank_one_accuracy(torch.zeros(8, 20), members).value == 0  # all tied


def test_bad_games_are_refused():
    scores, members = game(0)
    for bad, message in (
        ((scores[:-1], members), "two vectors of the same length, got shapes"),
        ((scores, members.long()), "a mask of members"),
        ((scores, members | True), "expected members and other candidates, got 60 members of 60"),
        ((scores, members & False), "got 0 members of 60"),
        ((scores * math.nan, members), "got NaN"),
    ):
        with pytest.raises(InputError, match=message):
            figures.auc(*bad)
    with pytest.raises(InputError, match="expected one member in every game, got .*; use share_named"):
        figures.rank_one_accuracy(scores[None], members[None])
    with pytest.raises(ParameterError, match="successes must be a whole number from 0 to 5, got 6"):
        figures.proportion(6, 5)
