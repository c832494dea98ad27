"""Optimisers: how the minimum of a cost is looked for. One file each; an attack holds the one it uses."""

from gradveil.attacks.matching.optimisers.adam import Adam
from gradveil.attacks.matching.optimisers.base import Clock, Optimiser, Solution
from gradveil.attacks.matching.optimisers.lbfgs import LBFGS

__all__ = ["LBFGS", "Adam", "Clock", "Optimiser", "Solution"]
