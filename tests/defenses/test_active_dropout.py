"""Every defense on a client whose model has active dropout."""

import pytest
import torch
from torch import nn

import gradveil
from gradveil.core.errors import ParameterError
from gradveil.core.randomness import source_of
from gradveil.defenses import DEFENSES
from gradveil.federation import Training
from gradveil.federation._clients import Clients
from gradveil.federation.digests import task_digest
from gradveil.update import LocalSteps, compute_update

LAYERS = (nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(0)
    return gradveil.Task(nn.Sequential(*LAYERS), input_shape=(1, 8, 8), classes=3)


@pytest.fixture(scope="module")
def public():
    return torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def shared(defense, task, batch, seed, local):
    generator = torch.Generator().manual_seed
    announced = defense.announce(task, *batch, generator=generator(9), memory={}, local=local)
    return defense.share(task, *batch, generator=generator(seed), memory={}, announced=announced, local=local)


@pytest.mark.parametrize("local", [None, LocalSteps(1, 2, 0.1)], ids=["gradient", "steps"])
@pytest.mark.parametrize("name", DEFENSES.names())
def test_masks_come_from_the_clients_randomness(name, local, task, public):
    randomness = torch.Generator().manual_seed(0)
    defense, task = DEFENSES.create(name).prepare(task, public=public, generator=randomness)
    batch = public[0][:3], public[1][:3]
    one, again, other = (shared(defense, task, batch, seed, local) for seed in (1, 1, 2))
    assert all(torch.equal(value, again[name]) for name, value in one.items())
    assert any(not torch.equal(value, other[name]) for name, value in one.items())


def test_an_undefended_client_sends_the_gradient_of_its_masks(task, public):
    batch = public[0][:3], public[1][:3]
    sent = compute_update(task, *batch, generator=torch.Generator().manual_seed(4))
    masked = task.with_masks(3, source_of(torch.Generator().manual_seed(4)))
    assert all(torch.equal(value, sent[name]) for name, value in masked.gradients(*batch).items())


def test_clients_with_masks_are_not_batched(task):
    defense, training = gradveil.defense("none"), Training(clients=4)
    assert Clients(task, defense, training).execution == "loop"
    with pytest.raises(ParameterError, match="cannot be batched, because dropout is active; use execution='loop'"):
        Clients(task, defense, training, "batch")


def test_a_training_with_dropout_is_another_training(task):
    assert task_digest(task) != task_digest(task.without_dropout())
