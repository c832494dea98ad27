import pytest
import torch
from scipy import stats

import gradveil
from gradveil.core.errors import InputError
from gradveil.metrics import decoy_auc, decoy_scores


def sent_of(gradient: torch.Tensor, **parameters) -> torch.Tensor:
    defense = gradveil.defense("gradient-dropout", **parameters)
    return defense.perturb({"w": gradient}, generator=torch.Generator().manual_seed(1))["w"]


def normal(size: int = 20_000) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def test_the_area_is_that_of_the_rank_test():
    gradient = normal(3000)
    sent = sent_of(gradient, keep=0.6, std=0.3)
    dropped = (sent != gradient / 0.6).numpy()
    scores = decoy_scores(sent, 0.6, 0.3).numpy()
    expected = stats.mannwhitneyu(scores[dropped], scores[~dropped]).statistic / (dropped.sum() * (~dropped).sum())
    assert decoy_auc(gradient, sent, 0.6, 0.3) == pytest.approx(expected, abs=1e-12)


def test_published_decoys_stand_out_and_decoys_of_the_layers_scale_do_not():
    gradient = normal()
    assert decoy_auc(gradient, sent_of(gradient), 0.8, 5e-3) > 0.98
    disguised = sent_of(gradient, std=1.0, scale="layer")
    std = float((gradient / 0.8).square().mean().sqrt())
    # Decoys and values have the same distribution now: the area is 1/2 up to chance.
    assert decoy_auc(gradient, disguised, 0.8, std) == pytest.approx(0.5, abs=0.02)


def test_the_attacker_comes_close_to_the_likelihood_ratio():
    """Values N(0, 1.25^2) and decoys N(0, 0.5^2): the best score is minus the magnitude."""
    gradient = normal()
    sent = sent_of(gradient, keep=0.8, std=0.5)
    dropped = (sent != gradient / 0.8).numpy()
    best = stats.mannwhitneyu(-sent[dropped].abs(), -sent[~dropped].abs()).statistic
    best /= dropped.sum() * (~dropped).sum()
    assert decoy_auc(gradient, sent, 0.8, 0.5) == pytest.approx(best, abs=0.01)


def test_without_decoys_there_is_nothing_to_measure():
    gradient = normal(10)
    with pytest.raises(InputError, match="expected values and decoys, got 10 values and 0 decoys"):
        decoy_auc(gradient, gradient, 1.0, 0.1)
