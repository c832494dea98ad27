"""What every defense says of its strength is true: both ends exist, and the strong one changes more."""

import pytest
import torch

import gradveil
from gradveil.core.errors import ParameterError
from gradveil.metrics import relative_power

WITHOUT = {name for name in gradveil.list_defenses() if gradveil.defense(name).strength is None}


def test_who_has_no_strength_has_nothing_to_turn():
    assert {"none", "secure-aggregation", "ats", "precode"} <= WITHOUT
    assert not WITHOUT & {"gaussian-noise", "dual-pruning", "gradient-dropout", "refiner", "dp-sgd", "optimal-noise"}


@pytest.mark.parametrize("name", sorted(set(gradveil.list_defenses()) - WITHOUT))
def test_the_strong_end_changes_more_than_the_weak_one(name, tiny_task, tiny_batch):
    defense = gradveil.defense(name)
    gradients, powers = tiny_task.gradients(*tiny_batch), []
    for position in (0.0, 1.0):
        turned = defense.with_strength(defense.strength.at(position))
        assert turned.parameters.keys() == defense.parameters.keys()
        generator = torch.Generator().manual_seed(0)
        turned, task = turned.prepare(tiny_task, public=tiny_batch, generator=generator)
        shared = turned.share(task, *tiny_batch, generator=generator, memory={})
        powers.append(relative_power(gradients, shared))
    assert powers[1] > powers[0] + 1e-4


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_what_has_no_strength_says_so(name):
    with pytest.raises(ParameterError, match=f"{name}: has no parameter that makes it stronger"):
        gradveil.defense(name).with_strength(1.0)


def test_positions_run_from_weak_to_strong_and_whole_numbers_stay_whole():
    strength = gradveil.defense("quantization").strength
    values = [strength.at(step / 10) for step in range(11)]
    assert values == sorted(values, reverse=True)
    assert {type(value) for value in values} == {int}
    assert (values[0], values[-1]) == (16, 1)


def test_dual_pruning_leaves_something_whatever_k2_is():
    for k2 in (0.0, 0.5, 0.9):
        defense = gradveil.defense("dual-pruning", k2=k2)
        assert defense.with_strength(defense.strength.at(1)).k1 < 1 - k2
