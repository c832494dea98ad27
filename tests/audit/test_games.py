"""Games of identification: what is drawn, what is refused, and that they can be won."""

import pytest
import torch
from torch import nn

import gradveil
from gradveil.audit import cases
from gradveil.audit.games import INCLUSIONS, Games, draw_games, play, send
from gradveil.core.errors import ParameterError
from gradveil.data import Split
from gradveil.metrics import identification as figures


@pytest.fixture
def split():
    return Split(torch.rand(120, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(120) % 4)


SIZES = {"games": 8, "candidates": 30, "batch_size": 16}


@pytest.mark.parametrize(("inclusion", "inside"), zip(INCLUSIONS, (16, 2, 1), strict=True))
def test_as_many_members_as_asked_for_and_the_rest_from_outside(inclusion, inside, split):
    games = draw_games(split, **SIZES, inclusion=inclusion)
    for batch, members in zip(games.batches, games.members, strict=True):
        assert len(set(batch.tolist())) == 16
        assert int(members.sum()) == inside
        assert set(games.pool[members].tolist()) == set(batch.tolist()) & set(games.pool.tolist())


def test_the_seed_decides_everything(split):
    first, again, other = (draw_games(split, **SIZES, inclusion="one", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.batches, again.batches)
    assert torch.equal(first.pool, again.pool)
    assert not torch.equal(first.batches, other.batches)
    assert torch.equal(draw_games(split, **SIZES).pool, first.pool)  # one pool for all ways to include members


def test_neighbours_are_of_the_same_class_and_nearest(split):
    games = draw_games(split, **SIZES, distractors="nearest")
    flat, targets = split.inputs.flatten(1), split.targets
    first, neighbour = games.pool[:2].tolist()
    same = [place for place in range(120) if targets[place] == targets[first] and place != first]
    distances = {place: float((flat[place] - flat[first]).square().sum()) for place in same}
    assert min(distances, key=distances.get) == neighbour
    assert len(set(games.pool.tolist())) == 30


def test_members_of_other_classes_than_the_candidates_are_noticed(split):
    games = draw_games(split, games=40, candidates=60, batch_size=1)
    assert games.class_mix > 0.001
    one_class = (split.targets[games.pool] == 0).nonzero().flatten()[torch.arange(40) % 10]
    members = torch.zeros(40, 60, dtype=torch.bool).scatter(1, one_class[:, None], True)
    assert Games(split, games.pool, games.pool[one_class][:, None], members).class_mix < 1e-6
    without = Split(split.inputs, split.inputs.flatten(1))
    assert Games(without, games.pool, games.batches, games.members).class_mix is None


def test_bad_games_are_refused(split):
    with pytest.raises(ParameterError, match="110 candidates and the rest of a batch of 16 need 125 images, got 120"):
        draw_games(split, games=1, candidates=110, batch_size=16, inclusion="one")
    one_class = Split(split.inputs, torch.zeros(120, dtype=torch.long))
    with pytest.raises(ParameterError, match="expected candidates of two classes or more, got only class 0"):
        draw_games(one_class, **SIZES)
    with pytest.raises(ParameterError, match="candidates must be a whole number of at least 17, got 16"):
        draw_games(split, games=1, candidates=16, batch_size=16)
    with pytest.raises(ParameterError, match="inclusion must be one of batch, eighth, one, got 'half'"):
        draw_games(split, **SIZES, inclusion="half")
    pool, nobody = torch.arange(10), torch.zeros(1, 10, dtype=torch.bool)
    with pytest.raises(ParameterError, match="expected the members to be exactly those candidates .*, got others"):
        Games(split, pool, torch.tensor([[3, 50]]), nobody)  # a member that passes for a distractor
    with pytest.raises(ParameterError, match="expected every candidate once"):
        Games(split, torch.cat([pool, pool[:1]]), torch.tensor([[40, 50]]), torch.zeros(1, 11, dtype=torch.bool))


@pytest.mark.parametrize("spec", ["none", "aligned-dual-pruning:k1=0.05,keep=0.3"])
def test_games_can_be_won(spec, split):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 4))
    task, attack = gradveil.Task(model, input_shape=(1, 6, 6), classes=4), gradveil.attack("identification")
    prepared = cases.prepare(task, gradveil.defense(spec), attack, public=None)
    games = draw_games(split, games=6, candidates=30, batch_size=4)
    found, again = (play(games, prepared, attack, adaptive=True) for _ in range(2))
    assert torch.equal(found.scores, again.scores)
    assert torch.equal(play(games, prepared, attack, adaptive=True, updates=send(games, prepared)).scores, found.scores)
    assert figures.over_games(figures.auc, found.scores, games.members).value > 0.9
