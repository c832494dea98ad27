import pytest

import gradveil
from gradveil.attacks.presets import BUDGETS
from gradveil.core.errors import ParameterError, UnknownNameError
from gradveil.data.catalog import DATASETS


@pytest.mark.parametrize("name", gradveil.list_attacks())
@pytest.mark.parametrize(("dataset", "model"), [("mnist", "lenet"), ("cifar10", "lenet"), ("my-data", "my-model")])
def test_every_attack_has_presets_that_grow_with_the_budget(name, dataset, model):
    presets = [gradveil.preset(name, budget, dataset=dataset, model=model) for budget in BUDGETS]
    if "iterations" not in presets[0].parameters:  # a closed form
        assert presets == [gradveil.attack(name)] * len(BUDGETS)
        return
    iterations = [preset.iterations for preset in presets]
    assert iterations == sorted(set(iterations))


@pytest.mark.parametrize("entry", DATASETS, ids=lambda entry: entry.name)
def test_grey_or_colour_is_what_the_catalogue_says(entry):
    assert entry.grey == ("grey" in entry.summary)
    steps = gradveil.preset("idlg", dataset=entry.name, model="lenet").iterations
    assert steps == (300 if entry.grey else 1000)


def test_unknown_presets_are_refused():
    with pytest.raises(ParameterError, match="budget must be one of quick, standard, thorough, got 'endless'"):
        gradveil.preset("idlg", "endless", dataset="mnist", model="lenet")
    with pytest.raises(UnknownNameError, match="unknown attack 'idgl'"):
        gradveil.preset("idgl", dataset="mnist", model="lenet")
