"""How long work takes, on any device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


def clock(device: torch.device) -> float:
    """Seconds by a clock that is read when `device` has done all it was given: accelerators work behind our back."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@dataclass
class Timing:
    """What `timed` measures.

    Args:
        seconds: how long the block took, once it is left.
    """

    seconds: float = 0.0


@contextmanager
def timed(device: torch.device) -> Iterator[Timing]:
    """How long a block of work on `device` takes.

    >>> with timed(torch.device("cpu")) as took:
    ...     _ = torch.rand(3)
    >>> took.seconds > 0
    True
    """
    took, started = Timing(), clock(device)
    yield took
    took.seconds = clock(device) - started
