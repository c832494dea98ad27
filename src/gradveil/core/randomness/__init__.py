"""Random draws: a cryptographic stream for real clients, torch generators for simulations and attacks."""

from gradveil.core.randomness.generators import derived_generator, fresh_generator
from gradveil.core.randomness.source import Draws, Randomness, SecureSource, SeededSource, Source, source_of

__all__ = [
    "Draws",
    "Randomness",
    "SecureSource",
    "SeededSource",
    "Source",
    "derived_generator",
    "fresh_generator",
    "source_of",
]
