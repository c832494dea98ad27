"""The parameters with which rows that name a `budget` were run, before there was `auto`."""

from typing import Any

import gradveil
from gradveil.attacks import Attack
from gradveil.data.catalog import DATASETS

_BUDGETS = ("quick", "standard", "thorough")
_SMALL_MODELS = ("lenet", "mlp", "cnn6", "mnist-cnn")
_LBFGS = {"optimiser": "lbfgs"}
_DEEP = {"lr": 0.1, "tv": 0.001}

# (iterations by budget, other parameters) for small networks on grey and on colour images, and for deep networks.
_PRESETS: dict[str, tuple[tuple[tuple[int, int, int], dict[str, Any]], ...]] = {
    "dlg": (((150, 300, 1000), {}), ((500, 1000, 2000), {}), ((50, 150, 300), {})),
    "idlg": (((150, 300, 1000), {}), ((500, 1000, 2000), {}), ((50, 150, 300), {})),
    "inverting-gradients": (
        ((100, 150, 400), {**_LBFGS, "tv": 0.01}),
        ((150, 500, 1000), {**_LBFGS, "tv": 0.002}),
        ((200, 500, 2000), _DEEP),
    ),
    "grad-inversion": (
        ((200, 500, 1500), {"lr": 0.05}),
        ((500, 1500, 4000), {}),
        ((200, 500, 2000), {**_DEEP, "seeds": 2}),
    ),
}


def preset(name: str, budget: str, *, dataset: str, model: str) -> Attack:
    """The attack called `name` as these rows were run with it."""
    grey = any(entry.grey for entry in DATASETS if entry.name == dataset)
    iterations, parameters = _PRESETS[name][2 if model not in _SMALL_MODELS else 0 if grey else 1]
    return gradveil.attack(name, iterations=iterations[_BUDGETS.index(budget)], **parameters)
