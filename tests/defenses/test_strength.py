"""Every defense's declared strength is true: both ends exist, and the strong end changes the update more."""

import pytest
import torch

import gradveil
from gradveil.core.errors import ParameterError
from gradveil.metrics import relative_power

WITHOUT = {name for name in gradveil.list_defenses() if gradveil.defense(name).strength is None}


def test_which_defenses_have_no_strength():
    assert {"none", "secure-aggregation", "ats", "precode"} <= WITHOUT
    assert not WITHOUT & {"gaussian-noise", "dual-pruning", "gradient-dropout", "refiner", "dp-sgd", "optimal-noise"}


@pytest.mark.parametrize("name", sorted(set(gradveil.list_defenses()) - WITHOUT))
def test_the_strong_end_changes_more_than_the_weak_one(name, tiny_task, tiny_batch):
    defense = gradveil.defense(name)
    gradients, powers = tiny_task.gradients(*tiny_batch), []
    for position in (0.0, 1.0):
        adjusted = defense.with_strength(defense.strength.at(position))
        assert adjusted.parameters.keys() == defense.parameters.keys()
        generator = torch.Generator().manual_seed(0)
        adjusted, task = adjusted.prepare(tiny_task, public=tiny_batch, generator=generator)
        shared = adjusted.share(task, *tiny_batch, generator=generator, memory={})
        powers.append(relative_power(gradients, shared))
    # Refiner finds other inputs with nearly the same gradient for this tiny network, hence a small margin.
    assert powers[1] > powers[0] + 1e-5


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_a_defense_without_strength_says_so(name):
    with pytest.raises(ParameterError, match=f"{name}: has no parameter that makes it stronger"):
        gradveil.defense(name).with_strength(1.0)


def test_positions_run_from_weak_to_strong_and_integers_stay_integers():
    strength = gradveil.defense("quantization").strength
    values = [strength.at(step / 10) for step in range(11)]
    assert values == sorted(values, reverse=True)
    assert {type(value) for value in values} == {int}
    assert (values[0], values[-1]) == (16, 1)


def test_dual_pruning_sends_something_whatever_k2_is():
    for k2 in (0.0, 0.5, 0.9):
        defense = gradveil.defense("dual-pruning", k2=k2)
        assert defense.with_strength(defense.strength.at(1)).k1 < 1 - k2
