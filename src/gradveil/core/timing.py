"""Measuring how long work takes, on any device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


def clock(device: torch.device) -> float:
    """The time in seconds, read once `device` has finished all its work: accelerators run asynchronously."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@dataclass
class Timing:
    """The result of `timed`.

    Args:
        seconds: how long the block took; set when the block ends.
    """

    seconds: float = 0.0


@contextmanager
def timed(device: torch.device) -> Iterator[Timing]:
    """Measure how long a block of work on `device` takes.

    >>> with timed(torch.device("cpu")) as timing:
    ...     _ = torch.rand(3)
    >>> timing.seconds > 0
    True
    """
    timing, started = Timing(), clock(device)
    yield timing
    timing.seconds = clock(device) - started
