"""Noise recovery: strip the noise of a predictable generator from an update.

This is a library for now: no attack is registered. `recover` takes an update, the coordinates whose gradient is known
to be 0 (`known_zeros`) and how the noise was drawn. It returns the update without noise, or the reason why it failed.
"""

from gradveil.attacks.noise_recovery._recovery import RecoveredNoise, recover
from gradveil.attacks.noise_recovery._sources import (
    NoiseSource,
    NumpyLaplace,
    NumpyNormal,
    TorchLaplace,
    TorchNormal,
    TorchUniform,
)
from gradveil.attacks.noise_recovery._zeros import disconnect, known_zeros, silence

__all__ = [
    "NoiseSource",
    "NumpyLaplace",
    "NumpyNormal",
    "RecoveredNoise",
    "TorchLaplace",
    "TorchNormal",
    "TorchUniform",
    "disconnect",
    "known_zeros",
    "recover",
    "silence",
]
