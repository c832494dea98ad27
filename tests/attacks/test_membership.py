"""Whether an example was in the data that a client trained on, over several rounds."""

import pytest
import torch
from torch import nn

import gradveil
from gradveil import metrics
from gradveil.attacks.membership import losses_by_round, normal_scores
from gradveil.attacks.problem import Problem
from gradveil.core.errors import InputError, ThreatModelError

COUNT, HELD, ROUNDS = 40, 12, 4


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def task():
    torch.manual_seed(0)
    return gradveil.Task(
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(36, 4)),
        input_shape=(3, 8, 8),
        classes=4,
    )


@pytest.fixture
def candidates():
    return torch.rand(COUNT, 3, 8, 8, generator=seeded(1)), torch.arange(COUNT) % 4


def trained(task, candidates, members, defense="none", lr=0.5, rounds=ROUNDS):
    """What the server sees of a client that draws half of its examples for every round."""
    defense, seen = gradveil.defense(defense), []
    for number in range(rounds):
        places = members[torch.randperm(len(members), generator=seeded(10 + number))[: len(members) // 2]]
        update = defense.share(task, *(part[places] for part in candidates), generator=seeded(number), memory={})
        seen.append((task, update))
        task = task.with_parameters({name: value - lr * update[name] for name, value in task.parameters.items()})
    return gradveil.Rounds(seen)


def is_member(members, count=COUNT):
    return torch.isin(torch.arange(count), members)


def find(task, seen, candidates, form="ratio", batch_size=HELD // 2, rounds=ROUNDS, **threat):
    threat = gradveil.ThreatModel(batch_size=batch_size, rounds=rounds, **threat)
    return gradveil.attack("membership", form=form).find_members(task, seen, candidates, threat, generator=seeded())


def test_members_are_found_although_every_round_has_only_half_of_them(task, candidates):
    members = torch.arange(0, 36, 3)
    seen = trained(task, candidates, members)
    area = {
        form: metrics.auc(find(task, seen, candidates, form).scores[0], is_member(members))
        for form in ("ratio", "cosine")
    }
    assert area["ratio"] > 0.97
    assert 0.5 < area["cosine"] < area["ratio"]
    one = find(task, gradveil.Rounds(seen[:1]), candidates, rounds=1).scores[0]
    assert metrics.auc(one, is_member(members)) < area["ratio"]


def test_scores_are_those_of_the_formulas(task, candidates):
    members = torch.arange(0, 36, 3)
    seen = trained(task, candidates, members, rounds=2)
    threat = gradveil.ThreatModel(batch_size=HELD // 2)
    by_round = [
        gradveil.attack("identification").identify(sent, update, candidates, threat).scores.double()
        for sent, update in seen
    ]
    expected = sum(torch.logaddexp(torch.zeros(()), scores) - torch.tensor(2.0).log() for scores in by_round)
    torch.testing.assert_close(find(task, seen, candidates, rounds=2).scores, expected)

    gradients = [sent.per_example_gradients(*candidates) for sent, _ in seen]
    cosines = torch.zeros(COUNT)
    for example, (_, update) in zip(gradients, seen, strict=True):
        rows = torch.cat([value.flatten(1) for value in example.values()], 1)
        mean, sent = rows.mean(0), torch.cat([value.flatten() for value in update.values()])
        rows = rows - (rows @ mean)[:, None] * mean / mean.square().sum()
        cosines += torch.nn.functional.normalize(rows, dim=1) @ sent / sent.norm() / 2
    found = find(task, seen, candidates, "cosine", rounds=2).scores[0]
    torch.testing.assert_close(found, cosines.double(), rtol=1e-3, atol=1e-4)


def test_the_loss_is_that_of_the_last_round(task, candidates):
    seen = trained(task, candidates, torch.arange(12))
    last = seen[-1][0]
    expected = -nn.functional.cross_entropy(last.predict(candidates[0]), candidates[1], reduction="none").double()
    torch.testing.assert_close(find(task, seen, candidates, "loss").scores[0], expected)
    problem = Problem([(sent, {}) for sent, _ in seen], torch.zeros(1, 1), gradveil.ThreatModel(), seeded())
    torch.testing.assert_close(losses_by_round(problem, candidates)[-1], -expected)


def test_overfitting_shows_in_the_loss(candidates):
    """Labels are random here, so only memory makes the loss of members lower."""
    task = gradveil.Task(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), input_shape=(3, 8, 8), classes=4)
    members = torch.arange(12)
    seen = trained(task, candidates, members, lr=0.05, rounds=40)
    found = find(task, seen, candidates, "loss", rounds=40)
    assert metrics.auc(found.scores[0], is_member(members)) > 0.8


@pytest.mark.parametrize("spec", ["dp-sgd:clip=0.05,noise_multiplier=0.0", "top-k:keep=0.03"])
def test_knowledge_of_the_defense_is_used(spec, task, candidates):
    members = torch.arange(0, 36, 3)
    seen = trained(task, candidates, members, spec)
    plain, adaptive = (
        find(task, seen, candidates, adaptive=adaptive, defense=gradveil.defense(spec)).scores[0]
        for adaptive in (False, True)
    )
    assert not torch.equal(plain, adaptive)
    assert metrics.auc(adaptive, is_member(members)) >= metrics.auc(plain, is_member(members))


def test_the_learned_score_learns_which_features_tell(task, candidates):
    """Two clients; what is known about both is learned together, and members need not be many."""
    known = torch.rand(30, 3, 8, 8, generator=seeded(7)), torch.arange(30) % 4
    everyone = tuple(torch.cat(pair) for pair in zip(candidates, known, strict=True))
    held = [torch.cat([torch.arange(start, 36, 6), COUNT + torch.arange(start, 30, 6)]) for start in (0, 1)]
    rounds = [trained(task, everyone, members, lr=0.0) for members in held]
    mask = torch.stack([is_member(members, COUNT + 30)[COUNT:] for members in held])
    sizes = {"batch_size": len(held[0]) // 2}
    assert len(held[0]) == len(held[1])
    found = find(task, rounds, candidates, "learned", known_members=(*known, mask), **sizes)
    assert found.scores.shape == (2, COUNT)
    assert found.seconds > 0
    for scores, members in zip(found.scores, held, strict=True):
        assert metrics.auc(scores, is_member(members)) > 0.9
    swapped = find(task, rounds, candidates, "learned", known_members=(*known, ~mask), **sizes)
    assert metrics.auc(swapped.scores[0], is_member(held[0])) < 0.1


def test_normal_scores_do_not_depend_on_the_order_of_equal_values():
    found = normal_scores(torch.tensor([3.0, 1.0, 1.0, 2.0]))
    assert float(found[1]) == float(found[2])
    assert float(found.sum()) == pytest.approx(
        float(
            torch.special.ndtri(torch.tensor(0.875))
            + torch.special.ndtri(torch.tensor(0.625))
            + 2 * torch.special.ndtri(torch.tensor(0.25))
        ),
        abs=1e-6,
    )
    assert bool(torch.isfinite(normal_scores(torch.zeros(5))).all())


def test_bad_input_is_refused(task, candidates):
    members = torch.arange(12)
    seen = trained(task, candidates, members)
    with pytest.raises(ThreatModelError, match=r"learns from examples whose membership is known.*known_members="):
        find(task, seen, candidates, "learned")
    known = candidates[0][:8], candidates[1][:8]
    with pytest.raises(InputError, match=r"mask of known members must have shape \[1, 8\] and be boolean, got \[8\]"):
        find(task, seen, candidates, "learned", known_members=(*known, torch.ones(8, dtype=torch.bool)))
    with pytest.raises(InputError, match="expected known members and known others, got 8 members of 8"):
        find(task, seen, candidates, "learned", known_members=(*known, torch.ones(1, 8, dtype=torch.bool)))
    with pytest.raises(InputError, match="membership: the known members do not fit the model"):
        find(
            task,
            seen,
            candidates,
            "learned",
            known_members=(known[0][:, :1], known[1], torch.ones(1, 8, dtype=torch.bool)),
        )
    with pytest.raises(InputError, match="at least 6 candidates for updates of 6 images, got 2"):
        find(task, seen, [part[:2] for part in candidates])
    with pytest.raises(
        ThreatModelError, match="membership: has no reconstruction to return, it finds membership; use fin"
    ):
        gradveil.attack("membership").reconstruct(task, seen, gradveil.ThreatModel())
    with pytest.raises(ThreatModelError, match="identification: has no membership to return, it finds identification"):
        gradveil.attack("identification").find_members(task, seen, candidates, gradveil.ThreatModel())
