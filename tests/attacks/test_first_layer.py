import pytest
import torch
from torch import nn

import gradveil
from gradveil import models
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.defenses.base import Perturbation


class PlainRounding(Perturbation):
    name = "plain-rounding"

    def perturb_rows(self, rows, draws):
        return rows.round(decimals=3)


@pytest.fixture
def task():
    model = models.create("mlp", input_shape=(1, 6, 6), classes=5, hidden=40, activation="sigmoid").double()
    return gradveil.Task(model, input_shape=(1, 6, 6), classes=5, mean=(0.4,), std=(0.2,))


@pytest.fixture
def examples(generator):
    return torch.rand(3, 1, 6, 6, generator=generator, dtype=torch.float64), torch.tensor([4, 0, 2])


def shared(task, inputs, targets, defense):
    return [
        defense.share(task, inputs[i : i + 1], targets[i : i + 1], generator=torch.Generator().manual_seed(i))
        for i in range(len(inputs))
    ]


def attacked(task, inputs, targets, defense="none", adaptive=False, **given):
    defended = gradveil.defense(defense)
    updates = shared(task, inputs, targets, defended)
    threat = gradveil.ThreatModel(defense=defended, adaptive=adaptive, **given)
    return gradveil.attack("first-layer").reconstruct(task, updates, threat)


def error(inputs, found):
    return (inputs - found.inputs[:, 0]).square().flatten(1).mean(1).sqrt()


def test_single_examples_are_recovered_exactly(task, examples):
    found = attacked(task, *examples)
    assert error(examples[0], found).max() < 1e-12
    assert torch.equal(found.labels[:, 0], examples[1])
    assert found.loss.max() < 1e-12


def test_a_linear_model_with_one_logit_and_known_labels(generator):
    task = gradveil.Task(nn.Linear(7, 1).double(), "logistic", input_shape=(7,), classes=2)
    inputs, labels = torch.rand(2, 7, generator=generator, dtype=torch.float64), torch.tensor([1, 0])
    assert error(inputs, attacked(task, inputs, labels)).max() < 1e-12
    found = attacked(task, inputs, labels, labels="known", known_labels=labels[:, None])
    assert torch.equal(found.labels[:, 0], labels)


def test_the_product_averages_the_noise_of_all_units(task, examples):
    """Better than the quotient of any one unit, however it is chosen."""
    std = 1e-4
    found = attacked(task, *examples, defense=f"gaussian-noise:std={std}")
    defense = gradveil.defense("gaussian-noise", std=std)
    for number in range(3):
        batch = examples[0][number : number + 1], examples[1][number : number + 1]
        update = defense.share(task, *batch, generator=torch.Generator().manual_seed(number))
        weight, bias = update["features.1.weight"], update["features.1.bias"]
        quotients = task.denormalised((weight / bias[:, None]).view(-1, 1, 6, 6))
        single = (quotients - batch[0]).square().flatten(1).mean(1).sqrt()
        assert error(examples[0], found)[number] < single.min()
    assert found.loss.min() > 1e-4


@pytest.mark.parametrize("defense", ["top-k:keep=0.3", "dual-pruning:k1=0.1,k2=0.5", "gradient-dropout:keep=0.9"])
def test_an_adaptive_attacker_believes_only_what_arrived(defense, task, examples):
    """Pixels of which some coordinate arrived are exact; nothing is known about the others."""
    plain, adaptive = (attacked(task, *examples, defense=defense, adaptive=adaptive) for adaptive in (False, True))
    for number, update in enumerate(shared(task, *examples, gradveil.defense(defense))):
        arrived = (update["features.1.weight"] != 0).any(0).view(6, 6)
        assert arrived.sum() > 18
        far, near = ((found.inputs[number, 0, 0] - examples[0][number, 0])[arrived] for found in (plain, adaptive))
        assert far.abs().max() > 1e-2
        assert near.abs().max() < 1e-5


def test_batches_and_other_models_are_refused(task, tiny_task):
    attack = gradveil.attack("first-layer")
    with pytest.raises(ThreatModelError, match="reads single examples, got batch_size=2; spear separates batches"):
        attack.check_threat(task, gradveil.ThreatModel(batch_size=2))
    with pytest.raises(InputError, match="first layer is a linear layer on the flattened input, got Conv2d '0' first"):
        attack.check_threat(tiny_task, gradveil.ThreatModel())
    # A defense that does not say how it can be attacked is attacked by simulation, which a closed form does not do.
    with pytest.raises(ThreatModelError, match="has no adaptive form against plain-rounding"):
        attack.check_threat(task, gradveil.ThreatModel(adaptive=True, defense=PlainRounding()))


def test_an_update_without_a_gradient_is_not_called_a_match(task):
    zeros = {name: torch.zeros_like(value) for name, value in task.parameters.items()}
    found = gradveil.attack("first-layer").reconstruct(task, zeros, gradveil.ThreatModel())
    assert found.loss.isinf().all()
