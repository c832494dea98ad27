"""Random numbers from explicit generators."""

import hashlib
import os
from collections.abc import Sequence

import torch
from torch import Tensor


def fresh_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded from the operating system: a predictable seed would let a server strip the noise."""
    return seeded_generator(int.from_bytes(os.urandom(8), "little") >> 1, device)


def seeded_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that repeats itself for the same seed."""
    return torch.Generator(device).manual_seed(seed)


def derived_generator(seed: int, *path: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose, such as ``derived_generator(seed, "round", 3, "client", 7)``.

    Different paths give unrelated streams, and no stream depends on what else was drawn before.
    """
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return seeded_generator(int.from_bytes(digest, "little") >> 1, device)


class Draws:
    """Random tensors for several clients at once, each client's row from that client's own generator.

    Row i is what client i would have drawn alone, so working on many clients together changes nothing.

    Args:
        generators: one generator a client.

    Example:
        >>> together = Draws([seeded_generator(1), seeded_generator(2)]).normal(torch.empty(2, 3))
        >>> alone = Draws([seeded_generator(2)]).normal(torch.empty(1, 3))
        >>> torch.equal(together[1:], alone)
        True
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = list(generators)

    def normal(self, rows: Tensor) -> Tensor:
        """Standard normal values shaped like `rows`."""
        result = torch.empty_like(rows)
        for row, generator in zip(result, self.generators, strict=True):
            row.normal_(generator=generator)
        return result

    def uniform(self, rows: Tensor) -> Tensor:
        """Uniform values in [0, 1) shaped like `rows`."""
        result = torch.empty_like(rows)
        for row, generator in zip(result, self.generators, strict=True):
            row.uniform_(generator=generator)
        return result
