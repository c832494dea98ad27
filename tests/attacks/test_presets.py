import pytest

import gradveil
from gradveil.attacks.presets import BUDGETS
from gradveil.core.errors import ParameterError, ThreatModelError, UnknownNameError
from gradveil.data import is_text
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


@pytest.mark.parametrize(
    "entry", [entry for entry in DATASETS if not is_text(entry.name)], ids=lambda entry: entry.name
)
def test_grey_or_colour_is_what_the_catalogue_says(entry):
    assert entry.grey == ("grey" in entry.summary)
    steps = gradveil.preset("idlg", dataset=entry.name, model="lenet").iterations
    assert steps == (300 if entry.grey else 1000)


def test_presets_for_text_have_no_image_prior():
    assert gradveil.preset("tag", "quick", dataset="sst2", model="text-transformer").iterations == 300
    for name in ("inverting-gradients", "grad-inversion", "mjolnir"):
        assert gradveil.preset(name, dataset="films.jsonl", model="my-model").tv == 0
    with pytest.raises(ThreatModelError, match="ggl: is an attack on images, got the texts of sst2; use tag or dlg"):
        gradveil.preset("ggl", dataset="sst2", model="text-transformer")


def test_unknown_presets_are_refused():
    with pytest.raises(ParameterError, match="budget must be one of quick, standard, thorough, got 'endless'"):
        gradveil.preset("idlg", "endless", dataset="mnist", model="lenet")
    with pytest.raises(UnknownNameError, match="unknown attack 'idgl'"):
        gradveil.preset("idgl", dataset="mnist", model="lenet")
