"""How much work a computation is, counted instead of timed, so that it does not depend on the machine or its load."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# What one core of an ordinary machine does: to start an operation, to multiply and add, and to write the result.
_START = 6e-6  # seconds per operation
_FLOPS = 3e10  # per second
_BYTES = 8e9  # per second


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the nominal seconds of every operation of torch that runs inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        counted = flop_registry.get(func._overloadpacket)
        flops = counted(*args, **(kwargs or {}), out_val=found) if counted else 0
        written = sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(found) if torch.is_tensor(leaf))
        self.seconds += _START + flops / _FLOPS + written / _BYTES
        return found


def nominal_seconds(compute: Callable[[], object]) -> float:
    """How long a computation takes one core of an ordinary machine that has nothing else to do, by what it computes.

    Every operation of torch counts 6 microseconds, plus 1 / 3e10 seconds for each floating-point operation of matrix
    products and convolutions, plus 1 / 8e9 seconds for each byte of its result. The same computation has the same
    nominal time everywhere.

    >>> small, large = torch.ones(10, 10), torch.ones(1000, 1000)
    >>> nominal_seconds(lambda: small @ small) < 1e-5 < 0.06 < nominal_seconds(lambda: large @ large)
    True
    """
    counter = _Counter()
    with counter:
        compute()
    return counter.seconds
