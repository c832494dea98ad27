"""Random numbers from explicit generators."""

import hashlib
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def fresh_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded from the operating system: a predictable seed would let a server strip the noise.

    The Mersenne Twister behind torch's CPU generator is not a cryptographic one: this keeps the seed from being
    guessed, not the stream from being continued by someone who sees many unperturbed draws.
    """
    return _generator_from(os.urandom(_SEED_BYTES), device)


def derived_generator(seed: int, *path: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose, such as ``derived_generator(seed, "round", 3, "client", 7)``.

    Different paths give unrelated streams, and no stream depends on what else was drawn before.
    """
    return _generator_from(hashlib.shake_256(repr((seed, *path)).encode()).digest(_SEED_BYTES), device)


_STATE_WORDS = 624  # of the Mersenne Twister, 32 bits each
_STATE_OFFSET = 24  # where torch's state keeps them, as 64-bit words, behind seed, counters and flags
_SEED_BYTES = 4 * _STATE_WORDS


def _generator_from(entropy: bytes, device: torch.device | str) -> torch.Generator:
    """A generator whose whole state comes from `entropy`: `manual_seed` uses only 32 bits of a seed on the CPU."""
    generator = torch.Generator(device).manual_seed(int.from_bytes(entropy[:8], "little") >> 1)
    if generator.device.type == "cpu":
        state = generator.get_state()
        words = np.frombuffer(entropy, "<u4").astype("<u8")
        state[_STATE_OFFSET : _STATE_OFFSET + 8 * _STATE_WORDS] = torch.from_numpy(words.view(np.uint8))
        generator.set_state(state)
    return generator


class Draws:
    """Random tensors for several clients at once, each client's row from that client's own generator.

    Row i is what client i would have drawn alone, so working on many clients together changes nothing.

    Args:
        generators: one generator a client.

    Example:
        >>> together = Draws([derived_generator(1), derived_generator(2)]).normal(torch.empty(2, 3))
        >>> alone = Draws([derived_generator(2)]).normal(torch.empty(1, 3))
        >>> torch.equal(together[1:], alone)
        True
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = list(generators)

    def normal(self, rows: Tensor) -> Tensor:
        """Standard normal values shaped like `rows`."""
        result = self._empty(rows)
        for row, generator in zip(result, self.generators, strict=True):
            row.normal_(generator=generator)
        return result

    def uniform(self, rows: Tensor) -> Tensor:
        """Uniform values in [0, 1) shaped like `rows`."""
        result = self._empty(rows)
        for row, generator in zip(result, self.generators, strict=True):
            row.uniform_(generator=generator)
        return result

    @staticmethod
    def _empty(rows: Tensor) -> Tensor:
        # Not `empty_like`, which keeps strides: how values lie in memory must not decide which one gets which draw.
        return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
