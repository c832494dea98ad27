"""Optimisers, which minimise the cost of a matching attack; one file each. An attack creates the one it uses."""

from gradveil.attacks.matching.optimisers.adam import Adam
from gradveil.attacks.matching.optimisers.base import Clock, Optimiser, Solution
from gradveil.attacks.matching.optimisers.lbfgs import LBFGS

__all__ = ["LBFGS", "Adam", "Clock", "Optimiser", "Solution"]
