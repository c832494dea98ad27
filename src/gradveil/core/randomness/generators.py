"""Torch generators whose entire state comes from a seed, for simulations and attacks."""

import hashlib
import os
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

_STATE_WORDS = 624  # in the state of the Mersenne Twister, 32 bits each
_STATE_OFFSET = 24  # of these words in torch's state, which stores them as 64 bits each after seed, counters and flags
_SEED_BYTES = 4 * _STATE_WORDS


def fresh_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that nobody can repeat, for draws that need not stay secret: an attacker's starts, a measurement.

    A client's draws come from `SecureSource` instead: whoever sees enough of a Mersenne Twister can predict the rest.
    """
    return _generator_from(os.urandom(_SEED_BYTES), device)


def derived_generator(seed: int, *path: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose, such as ``derived_generator(seed, "round", 3, "client", 7)``.

    Different paths give unrelated streams, and no stream depends on what else was drawn before.
    """
    return _generator_from(hashlib.shake_256(repr((seed, *path)).encode()).digest(_SEED_BYTES), device)


def _generator_from(entropy: bytes, device: torch.device | str) -> torch.Generator:
    """A generator whose entire state comes from `entropy`: on the CPU, `manual_seed` uses only 32 bits of a seed."""
    generator = torch.Generator(device).manual_seed(int.from_bytes(entropy[:8], "little") >> 1)
    if generator.device.type == "cpu":
        _check_layout()
        generator.set_state(with_words(generator.get_state(), np.frombuffer(entropy, "<u4")))
    return generator


def with_words(state: torch.Tensor, words: NDArray[np.uint32]) -> torch.Tensor:
    """The state of a CPU generator with the 624 words of its Mersenne Twister replaced."""
    state = state.clone()
    state[_STATE_OFFSET : _STATE_OFFSET + 8 * _STATE_WORDS] = torch.from_numpy(words.astype("<u8").view(np.uint8))
    return state


@cache
def _check_layout() -> None:
    """Refuse a version of torch with another layout of the generator's state: seeds would silently lose their meaning.

    A generator that is given the state of numpy's Mersenne Twister must continue as numpy does.
    """
    reference = np.random.RandomState(5489)
    words = np.asarray(reference.get_state(legacy=False)["state"]["key"], dtype="<u4")
    generator = torch.Generator().manual_seed(1)
    generator.set_state(with_words(generator.get_state(), words))
    drawn = torch.empty(1000, dtype=torch.int64).random_(0, 1 << 24, generator=generator).numpy()
    expected = reference.randint(0, 1 << 32, 1000, dtype=np.uint64) & np.uint64((1 << 24) - 1)
    if not np.array_equal(drawn.astype(np.uint64), expected):
        raise RuntimeError(
            f"torch {torch.__version__} stores the state of its generator in a layout that gradveil does not know, "
            "so seeds would lose their meaning; install torch 2.6 to 2.13"
        )
