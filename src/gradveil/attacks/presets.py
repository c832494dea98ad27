"""Hyper-parameters that are known to work, by data set, model and budget.

The figures behind them are in experiments/attack_strength/presets.jsonl, made by
``python experiments/run.py attack_strength``.
"""

from typing import Any

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.core import checks
from gradveil.core.errors import ThreatModelError
from gradveil.data.catalog import DATASETS
from gradveil.data.loader import is_text
from gradveil.models.generator import FACES

BUDGETS = ("quick", "standard", "thorough")

_Parameters = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]  # quick, standard, thorough


def _steps(quick: int, standard: int, thorough: int, **parameters: Any) -> _Parameters:
    first, second, third = ({"iterations": count, **parameters} for count in (quick, standard, thorough))
    return first, second, third


# Small networks: L-BFGS, with more steps for colour images. The weight of the total variation also suits defended
# updates: a smaller one sharpens undefended images but loses noisy ones.
_SMALL_GREY = {
    "dlg": _steps(150, 300, 1000),
    "idlg": _steps(150, 300, 1000),
    "inverting-gradients": _steps(100, 150, 400, optimiser="lbfgs", tv=0.01),
    "grad-inversion": _steps(200, 500, 1500, lr=0.05),
    "ggl": _steps(150, 300, 1000),
    "gias": _steps(150, 300, 1000),
    "ci-net": _steps(200, 500, 2000, lr=3e-3),
    "mjolnir": _steps(60, 150, 400),
    "peel": _steps(200, 400, 1000),
    "tag": _steps(200, 500, 1500),
}
_SMALL_COLOUR = {
    "dlg": _steps(500, 1000, 2000),
    "idlg": _steps(500, 1000, 2000),
    "inverting-gradients": _steps(150, 500, 1000, optimiser="lbfgs", tv=0.002),
    "grad-inversion": _steps(500, 1500, 4000),
    "ggl": _steps(300, 600, 2000),
    "gias": _steps(300, 600, 2000),
    "ci-net": _steps(300, 1000, 4000, lr=3e-3),
    "mjolnir": _steps(60, 150, 400),
    "peel": _steps(200, 400, 1000),
    "tag": _steps(300, 1000, 3000),
}
# Deep networks: every step costs a hundred times more, and the smooth form stalls, so signed Adam takes large steps.
_DEEP = {
    "dlg": _steps(50, 150, 300),
    "idlg": _steps(50, 150, 300),
    "inverting-gradients": _steps(200, 500, 2000, lr=0.1, tv=0.001),
    "grad-inversion": _steps(200, 500, 2000, lr=0.1, tv=0.001, seeds=2),
    "ggl": _steps(100, 300, 1000),
    "gias": _steps(100, 300, 1000),
    "ci-net": _steps(200, 500, 2000, lr=3e-3),
    "mjolnir": _steps(20, 50, 150),
    "peel": _steps(20, 50, 150),
    "tag": _steps(200, 500, 2000),
}
# Text: embedding vectors have no total variation. Tried on four sentences of sst2 with text-transformer, of which tag
# and idlg recover nearly all words in the standard budget; generators and image priors are not for text.
_TEXT = {
    "tag": _steps(300, 600, 2000),
    "dlg": _steps(150, 300, 1000),
    "idlg": _steps(150, 300, 1000),
    "inverting-gradients": _steps(100, 200, 500, optimiser="lbfgs", tv=0.0),
    "grad-inversion": _steps(300, 600, 2000, lr=0.1, tv=0.0),
    "mjolnir": _steps(60, 150, 400, tv=0.0),
}
# Closed forms have no steps to spend a budget on; a learned attack spends it before it sees an update.
_WITHOUT_BUDGET = ("r-gap", "robbing-the-fed", "loki", "lti", "identification", "membership", "attribute", "dager")
# The attacks that search a generator get that of the data set. Their steps, and those of ci-net, were tried on eight
# MNIST digits with lenet only; no rows of them are kept yet.
_GENERATORS = {"faces-orl": FACES}
_SEARCH_A_GENERATOR = ("ggl", "gias")
_SMALL_MODELS = ("lenet", "mlp", "cnn6", "mnist-cnn")


def preset(name: str, budget: str = "standard", *, dataset: str, model: str) -> Attack:
    """The attack called `name` with parameters that suit the data, the model and the budget.

    Attacks in closed form and those that learn have no budget and keep their default parameters.

    Args:
        name: name of the attack.
        budget: ``"quick"``, ``"standard"`` or ``"thorough"``.
        dataset: name of the data set; one that is not in the catalogue counts as colour.
        model: name of the model; any that is not known to be small counts as deep.

    >>> preset("inverting-gradients", "quick", dataset="cifar10", model="resnet18").iterations
    200
    """
    checks.choice("preset", "budget", budget, BUDGETS)
    grey = any(entry.grey for entry in DATASETS if entry.name == dataset)
    small = _SMALL_GREY if grey else _SMALL_COLOUR
    table = _TEXT if is_text(dataset) else small if model in _SMALL_MODELS else _DEEP
    ATTACKS.get(name)  # raises its own error if there is no such attack
    if name in _WITHOUT_BUDGET:
        return ATTACKS.create(name)
    if table is _TEXT and name not in table:
        raise ThreatModelError(f"{name}: is an attack on images, got the texts of {dataset}; use {' or '.join(_TEXT)}")
    checks.choice("preset", "name", name, table)
    parameters = table[name][BUDGETS.index(budget)]
    if name in _SEARCH_A_GENERATOR:
        parameters = {**parameters, "generator": _GENERATORS.get(dataset, dataset)}
    if name == "gias":
        parameters = {**parameters, "weight_iterations": parameters["iterations"]}
    return ATTACKS.create(name, **parameters)
