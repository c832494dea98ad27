"""What an audit will do and how long that takes, measured before anything runs.

Each kind of piece is begun on this machine and broken off after a moment; the steps that it reported until then tell
how long all of them take.
"""

import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from gradveil.audit.match import TRIES
from gradveil.audit.pieces import Piece
from gradveil.core.work import nominal_seconds

LONG = 2 * 3600.0
"""Seconds from which on a user is warned."""
WORTH_WORKERS = 30.0
"""Seconds of work from which on it pays to start processes, which takes a few seconds."""
_FEW = 3  # steps that a rate is measured on
_PATIENCE = 10  # how many times longer a probe may take until it has them


@dataclass(frozen=True)
class Plan:
    """The pieces of an audit that are missing, and how long they are estimated to take.

    Args:
        pieces: the pieces, in the order of the rows.
        seconds: the time that each takes one process.
        workers: the processes that will share them.
        memory: the most bytes that this process has used so far, data and model included; each worker uses as much.
            0: not measured.

    Example:
        >>> plan = Plan([Piece("training", "none"), Piece("training", "top-k")], [60.0, 30.0], 2, 0)
        >>> plan.duration
        60.0
    """

    pieces: Sequence[Piece]
    seconds: Sequence[float]
    workers: int
    memory: int

    @property
    def duration(self) -> float:
        """Seconds that the audit takes: no less than its longest piece."""
        return max(sum(self.seconds) / self.workers, max(self.seconds, default=0.0))


def estimated(
    pieces: Sequence[Piece],
    perform: Callable[[Piece, str, Callable[..., None]], object],
    workers: int | None,
    *,
    device: str,
    seconds: float = 0.3,
    pace: Callable[[], float] = lambda: 1.0,
) -> Plan:
    """A plan with estimates: one piece of each kind is begun, and broken off after `seconds`.

    The parts of an attack that budgets its work differ in their speed, so what it has done until then says little. It
    is expected to spend its budget, or longer if that was measured.

    Args:
        pieces: the pieces.
        perform: performs a piece; it must keep nothing.
        workers: the processes that share the work; None: as many as are worth it.
        device: the device that they compute on; one process suffices for an accelerator.
        seconds: how long to measure each kind of piece.
        pace: measures how many seconds a nominal one takes here.
    """
    measured: dict[tuple[str, str | None, bool], _Probe] = {}
    measured_pace = cache(pace)
    costs: list[float] = []
    learned = set()
    for piece in pieces:
        # What a match tries is trainings, or single rounds, which take no time beside them.
        probed = Piece("training", piece.defense) if piece.kind == "match" else piece
        kind = probed.kind, probed.attack, probed.adaptive
        if kind not in measured:
            measured[kind] = _probe(partial(perform, probed, probed.defense), seconds, 1 - probed.attacking_share)
        probe = measured[kind]
        cost = probe.seconds * (TRIES if piece.kind == "match" else 1)
        if piece.budgeted is not None and not probe.finished:
            cost = max(cost, measured_pace() * sum(piece.budgeted))
        if piece.learns in learned:
            cost *= piece.attacking_share  # what another piece has learned is found on disk
        elif piece.learns is not None:
            learned.add(piece.learns)
        costs.append(cost)
    if workers is None:
        workers = available_workers(device) if sum(costs) > WORTH_WORKERS else 1
    return Plan(pieces, costs, max(1, min(workers, len(pieces))), peak_memory())


def available_workers(device: str) -> int:
    """Processes that this machine can run at once."""
    if device != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pace_of(compute: Callable[[], object], seconds: float = 0.2) -> float:
    """How many seconds a nominal second takes on this machine as it is now, by a computation like those to come.

    >>> import torch
    >>> 0 < pace_of(lambda: torch.ones(100, 100) @ torch.ones(100, 100), seconds=0.01)
    True
    """
    nominal, times, began = nominal_seconds(compute), list[float](), time.perf_counter()
    while not times or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        compute()
        times.append(time.perf_counter() - start)
    return median(times) / nominal  # the first runs after an installation are slow


class _Enough(Exception):
    """Breaks off a piece."""


@dataclass(frozen=True)
class _Probe:
    """How long a piece takes, and whether it was finished before it could be broken off."""

    seconds: float
    finished: bool


def _probe(perform: Callable[[Callable[..., None]], object], seconds: float, learning: float) -> _Probe:
    """Estimate how long a piece takes whose first part, learning, takes a share `learning` of that time, if any."""
    began = time.monotonic()
    parts: list[list[tuple[float, float, float]]] = [[]]  # (time, step, steps) of each part: learning, then attacking

    def note(step: float, steps: float, _left: float = 0.0) -> None:
        now = time.monotonic()
        if parts[-1] and step < parts[-1][-1][1]:
            parts.append([])
        parts[-1].append((now, step, steps))
        patient = now - began < _PATIENCE * seconds and len(parts[-1]) <= _FEW
        if now - began > seconds and not patient and step > 0:
            raise _Enough

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            perform(note)
    except _Enough:
        times = [(now, step) for now, step, _ in parts[-1]]
        # The first step of a part also prepares it, so it does not count if there are others.
        later = times[1:] if len(times) > _FEW else [(began, 0.0), *times] if len(parts) == 1 else times
        rates = [(now - before) / (step - last) for (before, last), (now, step) in pairwise(later) if step > last]
        now, step, steps = parts[-1][-1]
        rate = sorted(rates)[len(rates) // 2] if rates else (now - began) / step
        part = now - began + rate * (steps - step)
        return _Probe(part / learning if learning and len(parts) == 1 else part, finished=False)
    return _Probe(time.monotonic() - began, finished=True)


def peak_memory() -> int:
    """The most bytes that this process has used so far; 0 where the system does not tell.

    >>> peak_memory() >= 0
    True
    """
    try:
        # Not getrusage, which on Linux begins with what the process used that started this one.
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0
