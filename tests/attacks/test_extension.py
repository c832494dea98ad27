"""Attacks from outside the package: one with its own optimiser, and one that learns from public data."""

from dataclasses import dataclass, replace

import pytest
import torch

import gradveil
from gradveil.attacks import ATTACKS, Attack, Reconstruction
from gradveil.attacks.findings import LossHistory
from gradveil.attacks.matching import COSINE, Matching, Optimiser, Solution, match
from gradveil.core.errors import InputError, ParameterError, ThreatModelError
from gradveil.core.parameters import integer, number, state
from gradveil.core.tensors import Tensors


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Whatever a test registers is forgotten afterwards."""
    monkeypatch.setattr(ATTACKS, "_factories", dict(ATTACKS._factories))
    ATTACKS.register("sign-descent")(SignDescentAttack)
    ATTACKS.register("nearest-public")(NearestPublic)


# -- an attack with its own optimiser ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SignDescent(Optimiser):
    """Steps along the signs of the gradient; if a victim's loss does not fall, it goes back and halves its step."""

    step: float

    def minimise(self, objective, start, *, iterations, project=None, progress=None):
        everyone = torch.arange(len(start))
        best, sizes = start, torch.full((len(start),), self.step, dtype=start.dtype)
        losses, gradients = objective(best, everyone)
        first = losses
        for step in range(iterations):
            moved = best - sizes.view(-1, *[1] * (start.ndim - 1)) * gradients.sign()
            moved = moved if project is None else project(moved)
            tried, slopes = objective(moved, everyone)
            better = tried < losses
            improved = better.view(-1, *[1] * (start.ndim - 1))
            best, gradients = torch.where(improved, moved, best), torch.where(improved, slopes, gradients)
            losses, sizes = torch.where(better, tried, losses), torch.where(better, sizes, sizes / 2)
            if progress:
                progress(step + 1, iterations, 0.0)
        history = LossHistory(first, losses, losses[:, None])
        return Solution(best, losses, torch.full((len(start),), iterations), history)


@dataclass(frozen=True, repr=False)
class SignDescentAttack(Attack):
    """Matches the direction of the gradient by sign descent.

    Args:
        step: first step size.
        iterations: steps.
        restarts: starting points.
    """

    adapts = True

    step: float = number(0.2, above=0)
    iterations: int = integer(60, low=1)
    restarts: int = integer(1, low=1)

    def run(self, problem):
        matching = Matching(list(problem.updates), COSINE, least_prior=0.001)
        return match(problem, problem.start(), SignDescent(self.step), matching, iterations=self.iterations)


def updates_of(task, batch, defense="none"):
    defended = gradveil.defense(defense)
    return [
        defended.share(task, batch[0][i : i + 1], batch[1][i : i + 1], generator=torch.Generator().manual_seed(i))
        for i in range(len(batch[0]))
    ]


def attacked(attack, task, updates, **threat):
    generator = torch.Generator().manual_seed(1)
    return attack.reconstruct(task, updates, gradveil.ThreatModel(**threat), generator=generator, execution="loop")


def test_an_optimiser_from_outside_is_used(tiny_task, tiny_batch):
    attack = gradveil.attack("sign-descent:step=0.1,iterations=80")
    assert isinstance(attack, SignDescentAttack)
    ticks = []
    found = attack.reconstruct(
        tiny_task,
        updates_of(tiny_task, tiny_batch),
        gradveil.ThreatModel(),
        generator=torch.Generator().manual_seed(1),
        progress=lambda done, total, _left: ticks.append((done, total)),
    )
    assert (found.history.start > 2 * found.loss).all()
    assert found.labels[:, 0].tolist() == tiny_batch[1].tolist()
    assert found.iterations.tolist() == [80] * 3
    assert ticks[-1] == (80, 80)
    assert torch.equal(found.inputs, found.inputs.clamp(0, 1))  # because it is given the range of the inputs


def test_it_gets_restarts_local_steps_and_knowledge_of_defenses_like_any_other(tiny_task, tiny_batch):
    attack, several = gradveil.attack("sign-descent"), gradveil.attack("sign-descent", restarts=3)
    updates = updates_of(tiny_task, tiny_batch)
    once, best = attacked(attack, tiny_task, updates), attacked(several, tiny_task, updates)
    assert best.history.restarts.shape == (3, 3)
    assert torch.equal(best.loss, best.history.restarts.amin(1))
    assert (best.loss <= once.loss.max()).all()

    local = gradveil.LocalSteps(epochs=2, batch_size=1, lr=0.1)
    stepped = gradveil.defense("none").share(tiny_task, *tiny_batch, local=local)
    assert attacked(several, tiny_task, stepped, batch_size=3, local=local).loss.isfinite().all()

    pruning = gradveil.defense("top-k", keep=0.3)
    pruned = updates_of(tiny_task, tiny_batch, "top-k:keep=0.3")
    plain, adaptive = (
        attacked(attack, tiny_task, pruned, adaptive=adaptive, defense=pruning) for adaptive in (False, True)
    )
    assert (adaptive.inputs != plain.inputs).any()


def test_its_parameters_are_checked_like_those_of_any_other():
    with pytest.raises(ParameterError, match="sign-descent: step must be a number above 0, got 0"):
        gradveil.attack("sign-descent:step=0")
    assert str(gradveil.attack("sign-descent")) == "sign-descent:step=0.2,iterations=60,restarts=1"


# -- an attacker who learns --------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class NearestPublic(Attack):
    """Returns the public example whose gradient is nearest to the update.

    Args:
        limit: how many public examples it uses.
    """

    finds_labels = True
    needs_public = True

    limit: int = integer(100, low=1)
    learned: Tensors | None = state()

    def learn(self, task, threat, learning):
        inputs, labels = (value[: self.limit] for value in threat.public)
        gradients = task.per_example_gradients(inputs, labels)
        rows = torch.cat([value.flatten(1) for value in gradients.values()], 1)
        return replace(self, learned=Tensors({"gradients": rows, "inputs": inputs, "labels": labels}))

    def run(self, problem):
        updates = torch.cat([value.flatten(1) for value in problem.updates.values()], 1)
        distances = torch.cdist(updates, self.learned["gradients"])
        losses, nearest = distances.min(1)
        inputs, labels = self.learned["inputs"][nearest][:, None], self.learned["labels"][nearest][:, None]
        return Reconstruction(inputs, labels, losses, torch.zeros(problem.victims, dtype=torch.long))


@pytest.fixture
def public(tiny_batch, generator):
    """Examples that look like the victims' and others that do not, in random order."""
    near = tiny_batch[0] + 0.01 * torch.randn(tiny_batch[0].shape, generator=generator, dtype=torch.float64)
    others = torch.rand(7, 1, 6, 6, generator=generator, dtype=torch.float64)
    order = torch.randperm(10, generator=generator)
    return torch.cat([others, near])[order], torch.cat([torch.arange(7) % 4, tiny_batch[1]])[order]


def test_a_learned_attacker_works_if_public_data_is_granted(tiny_task, tiny_batch, public):
    threat = gradveil.ThreatModel(public=public)
    attack = gradveil.attack("nearest-public").fit(tiny_task, threat)
    found = attack.reconstruct(tiny_task, updates_of(tiny_task, tiny_batch), threat)
    assert (found.inputs[:, 0] - tiny_batch[0]).abs().max() < 0.1
    assert found.labels[:, 0].tolist() == tiny_batch[1].tolist()


def test_it_is_refused_if_public_data_is_not_granted(tiny_task, tiny_batch, public):
    attack, updates = gradveil.attack("nearest-public"), updates_of(tiny_task, tiny_batch)
    refusal = r"nearest-public: needs public data, which this threat model does not grant; use ThreatModel\(public="
    with pytest.raises(ThreatModelError, match=refusal):
        attack.fit(tiny_task, gradveil.ThreatModel())
    fitted = attack.fit(tiny_task, gradveil.ThreatModel(public=public))
    with pytest.raises(ThreatModelError, match=refusal):
        fitted.reconstruct(tiny_task, updates, gradveil.ThreatModel())
    with pytest.raises(InputError, match=r"inputs must have shape \[N, 1, 6, 6\]"):
        attack.fit(tiny_task, gradveil.ThreatModel(public=(torch.rand(2, 1, 5, 5), torch.tensor([0, 1]))))


def test_it_must_learn_before_it_attacks(tiny_task, tiny_batch, public):
    attack, threat = gradveil.attack("nearest-public"), gradveil.ThreatModel(public=public)
    with pytest.raises(ThreatModelError, match=r"nearest-public: must be fitted first; .* attack.fit\("):
        attack.reconstruct(tiny_task, updates_of(tiny_task, tiny_batch), threat)


def test_what_was_learned_counts_in_equality_and_not_in_the_spec(tiny_task, public):
    attack, threat = gradveil.attack("nearest-public:limit=8"), gradveil.ThreatModel(public=public)
    fitted, again = (attack.fit(tiny_task, threat) for _ in range(2))
    other = attack.fit(tiny_task, gradveil.ThreatModel(public=(public[0].flip(0), public[1].flip(0))))
    assert attack.learned is None  # the original is unchanged
    assert fitted == again
    assert hash(fitted) == hash(again)
    assert fitted not in (attack, other)
    assert str(fitted) == str(attack) == "nearest-public:limit=8"
    assert gradveil.attack(str(fitted)) == attack == eval(repr(fitted), {"gradveil": gradveil})


def test_attacks_that_learn_nothing_are_fitted_already(tiny_task):
    attack = gradveil.attack("idlg")
    assert attack.fit(tiny_task, gradveil.ThreatModel()) is attack
