"""Gradient matching: build a cost from a distance and a prior, and minimise it for many victims at once."""

from gradveil.attacks.matching._search import match
from gradveil.attacks.matching.cost import NOTHING, Matching, matched_layers
from gradveil.attacks.matching.distances import COSINE, RELATIVE, SQUARED, Distance
from gradveil.attacks.matching.masks import MaskSearch
from gradveil.attacks.matching.objective import Objective, choose_execution
from gradveil.attacks.matching.optimisers import LBFGS, Adam, Optimiser, Solution
from gradveil.attacks.matching.priors import LEAST_PRIOR, ROUNDING, check_prior
from gradveil.attacks.matching.space import Space

__all__ = ["COSINE", "LBFGS", "LEAST_PRIOR", "NOTHING", "RELATIVE", "ROUNDING", "SQUARED", "Adam", "Distance"]
__all__ += [
    "MaskSearch",
    "Matching",
    "Objective",
    "Optimiser",
    "Solution",
    "Space",
    "check_prior",
    "choose_execution",
    "match",
    "matched_layers",
]
