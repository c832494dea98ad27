"""Strip pseudo-random noise from an update."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.attacks.noise_recovery._mersenne import STATE_BITS, KnownBits, State, find_states, rewind
from gradveil.attacks.noise_recovery._sources import Layers, NoiseSource
from gradveil.attacks.noise_recovery._zeros import Groups
from gradveil.core import checks
from gradveil.core.errors import InputError
from gradveil.core.randomness import fresh_generator

_CHECKS = 64  # equations beyond the rank that must hold, which happens by chance once in 2**64
_SPARE = 1.06  # equations taken per unknown if the outputs are scattered
_DENSE_SPARE = 2.0  # the same if they are close together, because many equations then follow from others
_DENSE = 6_000  # the span, in outputs, up to which they count as close together
_MAX_EQUATIONS = 48_000  # they take about 120 MB
_FARTHEST = 100_000  # the span, in outputs, that equations may cover; they take some seconds to write down


@dataclass(frozen=True)
class RecoveredNoise:
    """The result of an attempt to strip the noise.

    Args:
        update: the update without its noise; None unless `verified`.
        noise: the noise; None unless `verified`.
        verified: True if the state that was found explains more than it was made from: at least 64 further equations,
            and every coordinate that was taken to be 0.
        reason: in one sentence, how the result was verified or why it was not.
        equations: number of certain bits that were used.
        rank: how many of them are independent; 19,937 determine the generator, and up to four missing ones are guessed.
        wrong_zeros: number of coordinates that were taken to be 0 and turned out not to be.
        seconds: wall time.

    Example:
        >>> RecoveredNoise(None, None, False, "too few", 12, 12, 0, 0.1).verified
        False
    """

    update: dict[str, Tensor] | None
    noise: dict[str, Tensor] | None
    verified: bool
    reason: str
    equations: int
    rank: int
    wrong_zeros: int
    seconds: float


def recover(
    update: Layers,
    zeros: Groups,
    source: NoiseSource,
    *,
    errors: Layers | None = None,
    attempts: int = 6,
    generator: torch.Generator | None = None,
) -> RecoveredNoise:
    """Find the state of the generator behind an update's noise, and subtract the noise.

    Coordinates whose gradient is 0 show draws; draws give certain bits of the generator's outputs; those are linear in
    its state. A result is returned only if it explains more than it was made from.

    Args:
        update: what the server saw, in the order in which noise was drawn.
        zeros: where it would be 0 without noise, see `known_zeros`.
        source: how the noise was drawn, and its scale.
        errors: how far each coordinate may be off beyond its own rounding; default: not at all.
        attempts: maximum number of attempts; if the equations of all groups of zeros contradict each other, random
            halves of the groups are tried, then quarters, and so on.
        generator: chooses these groups; default: fresh entropy.
    """
    started = time.perf_counter()
    attempts = checks.integer("noise-recovery", "attempts", attempts, low=1)
    if list(update) != list(zeros):
        raise InputError(
            f"noise-recovery: zeros must have the update's layers in their order ({', '.join(update)}), "
            f"got {', '.join(zeros)}"
        )
    first_outcome = None
    for known in _subsets(zeros, attempts, generator):
        bits, draw = source.read(update, known, errors)
        outcome = _find(bits)
        misfits = 0
        for state in outcome.states:
            noise = draw(state)
            fits = _fits(update, noise, source.scale, errors)
            misfits = sum(int((known[name] & ~fits[name]).sum()) for name in update)
            if not misfits:
                return RecoveredNoise(
                    update={name: (v.double().cpu() - noise[name]).to(v.dtype) for name, v in update.items()},
                    noise={name: noise[name].to(value.dtype) for name, value in update.items()},
                    verified=True,
                    reason=f"{outcome.reason}, and every coordinate taken to be zero is",
                    equations=outcome.equations,
                    rank=outcome.rank,
                    wrong_zeros=sum(int(((zeros[name] >= 0) & ~fits[name]).sum()) for name in update),
                    seconds=time.perf_counter() - started,
                )
        if misfits:
            outcome = _Outcome(
                f"the state that was found leaves {misfits:,} coordinates taken to be zero unexplained: they are not "
                "zero, or noise is drawn in another order",
                outcome.equations,
                outcome.rank,
                contradicted=True,
            )
        first_outcome = first_outcome or outcome
        if not first_outcome.contradicted:
            break  # some of the equations would not say more than all of them
    assert first_outcome is not None  # there is at least one attempt
    return RecoveredNoise(
        update=None,
        noise=None,
        verified=False,
        reason=first_outcome.reason,
        equations=first_outcome.equations,
        rank=first_outcome.rank,
        wrong_zeros=0,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class _Outcome:
    """The result of solving one choice of equations."""

    reason: str
    equations: int
    rank: int
    states: tuple[State, ...] = ()
    contradicted: bool = False


def _find(bits: KnownBits) -> _Outcome:
    """Find the states right before the stream's first output that are consistent with its known bits."""
    too_few = "too few coordinates are known to be zero:"
    equations = len(bits.values)
    outcome = _Outcome(f"{too_few} they give {equations:,} equations for {STATE_BITS:,} unknown bits", equations, 0)
    if equations < STATE_BITS:
        return outcome
    for window in _choices(bits):
        taken = len(window)
        part = bits.select(window)
        start = max(int(part.positions.min()) - 1, 0)
        solution, states = find_states(part, start)
        if solution.contradictions:
            return _Outcome(
                f"{solution.contradictions} of {solution.checks + solution.contradictions} further equations are "
                "contradicted: the stream is no Mersenne Twister drawn in this way, or a coordinate is not zero",
                taken,
                solution.rank,
                contradicted=True,
            )
        if states and solution.checks >= _CHECKS:
            reason = f"{solution.checks:,} equations beyond the rank hold"
            return _Outcome(reason, taken, solution.rank, tuple(rewind(state, start + 624) for state in states))
        outcome = _Outcome(
            f"{too_few} {taken:,} equations have rank {solution.rank:,} of {STATE_BITS:,} and {solution.checks} to "
            "check it with",
            taken,
            solution.rank,
        )
    return outcome


def _choices(bits: KnownBits) -> Iterator[NDArray[np.int64]]:
    """Which equations to try, those that are quickest to solve first."""
    densest = _window(bits.positions, int(STATE_BITS * _DENSE_SPARE))
    if np.ptp(bits.positions[densest]) < _DENSE:
        yield densest
    else:
        yield _window(bits.positions, int(STATE_BITS * _SPARE) + _CHECKS)
    if len(bits.positions) <= len(densest):
        return
    # Equations of neighbouring outputs are often redundant; those of outputs from the whole stream are less so.
    words = np.unique(bits.positions)
    chosen = words[np.random.default_rng(0).random(len(words)) < _MAX_EQUATIONS / len(bits.positions)]
    chosen = chosen[chosen < chosen[0] + _FARTHEST]
    yield np.flatnonzero(np.isin(bits.positions, chosen))


def _window(positions: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
    """Indices of the `wanted` equations that span the fewest outputs."""
    order = np.argsort(positions, kind="stable")
    if len(order) <= wanted:
        return order
    spans = positions[order[wanted - 1 :]] - positions[order[: len(order) - wanted + 1]]
    first = int(spans.argmin())
    return order[first : first + wanted]


def _subsets(zeros: Groups, attempts: int, generator: torch.Generator | None) -> Iterator[dict[str, Tensor]]:
    """Which coordinates to take to be zero in each attempt: first all, then those of fewer and fewer groups."""
    generator = generator or fresh_generator()
    count = 1 + max(int(groups.max()) for groups in zeros.values() if groups.numel())
    yield {name: groups >= 0 for name, groups in zeros.items()}
    for attempt in range(1, attempts):
        share = 0.5 ** ((attempt + 1) // 2)
        chosen = torch.rand(count, generator=generator) < share
        yield {name: (groups >= 0) & chosen[groups.clamp_min(0).cpu()] for name, groups in zeros.items()}


def _fits(update: Layers, noise: Layers, scale: float, errors: Layers | None) -> dict[str, Tensor]:
    """Where the update is nothing but this noise, up to rounding."""
    result = {}
    for name, value in update.items():
        tolerance = 16 * torch.finfo(value.dtype).eps * (value.double().cpu().abs() + scale)
        if errors is not None:
            tolerance = tolerance + errors[name].double().cpu()
        result[name] = (value.double().cpu() - noise[name]).abs() <= tolerance
    return result
