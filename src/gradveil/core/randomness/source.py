"""Where a client's random draws come from: a cryptographic stream in real use, a seeded generator in simulations."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.core.randomness._stream import Keystream, SecretKey
from gradveil.core.randomness.discrete import LOG2_STEPS, discrete_gaussian, grid_step


class Source(ABC):
    """The source of all random draws that a client makes.

    The source itself adds noise to values, because how noise is added decides whether it can be removed again.
    """

    secure: bool
    """Whether nobody can predict the draws, and the last bits of a noisy value do not reveal the value itself."""

    @abstractmethod
    def normal(self, like: Tensor) -> Tensor:
        """Standard normal values with the shape, type and device of `like`."""

    @abstractmethod
    def uniform(self, like: Tensor) -> Tensor:
        """Uniform values in [0, 1) with the shape, type and device of `like`."""

    @abstractmethod
    def permutation(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """The numbers from 0 to `count` - 1 in random order."""

    @abstractmethod
    def integers(self, below: int, count: int) -> list[int]:
        """`count` whole numbers from 0 to `below` - 1."""

    @abstractmethod
    def add_normal(
        self, values: Tensor, std: float | Tensor, *, typical: float | None = None, where: Tensor | None = None
    ) -> Tensor:
        """Return `values` with independent normal noise.

        Args:
            values: what the noise hides; not changed.
            std: the standard deviation of the noise, one for all values or one for each; 0 changes nothing.
            typical: a deviation that does not depend on private data and decides the grid; needed if `std` is a tensor.
            where: True for the values that get noise; the others are only rounded to the same grid.
        """

    @abstractmethod
    def add_laplace(self, values: Tensor, std: float) -> Tensor:
        """Return `values` with independent Laplace noise of standard deviation `std`."""

    @abstractmethod
    def replace_normal(self, values: Tensor, std: float, where: Tensor) -> Tensor:
        """Return `values` with normal draws wherever `where` is True; the last bits do not reveal these places."""


class SeededSource(Source):
    """Draws of a torch generator, for simulations that must repeat themselves.

    Not for real clients: the Mersenne Twister behind torch's CPU generator is not cryptographic. Whoever sees some
    1,250 draws, in places where the gradient is known to be zero, can compute all others (docs/noise-recovery.md).

    Args:
        generator: the generator to draw from, in the order of the calls.

    Example:
        >>> draw = lambda: SeededSource(torch.Generator().manual_seed(1)).normal(torch.empty(3))
        >>> torch.equal(draw(), draw())
        True
    """

    secure = False

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    # Not `empty_like`, which keeps strides: the memory layout must not decide which value gets which draw.

    def normal(self, like: Tensor) -> Tensor:
        """As torch draws them."""
        return _dense_like(like).normal_(generator=self.generator)

    def uniform(self, like: Tensor) -> Tensor:
        """As torch draws them."""
        return _dense_like(like).uniform_(generator=self.generator)

    def permutation(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """As torch draws it."""
        return torch.randperm(count, generator=self.generator, device=self.generator.device).to(device)

    def integers(self, below: int, count: int) -> list[int]:
        """As torch draws them."""
        drawn: list[int] = torch.randint(
            below, (count,), generator=self.generator, device=self.generator.device
        ).tolist()
        return drawn

    def add_normal(
        self, values: Tensor, std: float | Tensor, *, typical: float | None = None, where: Tensor | None = None
    ) -> Tensor:
        """Add the noise in floating point."""
        # In place: on large updates, memory takes longer than arithmetic.
        noisy = self.normal(values).mul_(std).add_(values)
        return noisy if where is None else torch.where(where, noisy, values)

    def add_laplace(self, values: Tensor, std: float) -> Tensor:
        """Draw the noise by inverting the distribution function."""
        centred = self.uniform(values) - 0.5
        # A draw of exactly 0 would give log(0); it counts as half the smallest positive draw.
        tail = (1 - 2 * centred.abs()).clamp_min(torch.finfo(values.dtype).eps / 4)
        return values - std / 2**0.5 * centred.sign() * tail.log()

    def replace_normal(self, values: Tensor, std: float, where: Tensor) -> Tensor:
        """Draw only as many values as are replaced."""
        result = values.clone()
        places = where.nonzero(as_tuple=True)
        result[places] = std * self.normal(result[places])
        return result


class SecureSource(Source):
    """Draws of a cryptographic stream keyed by the operating system; noise lies on a grid (see `discrete`).

    Every draw has a key of its own. For devices other than the CPU, the draws are made on the CPU and moved.

    Example:
        >>> source = SecureSource()
        >>> noisy = source.add_normal(torch.zeros(10_000), 0.1)
        >>> abs(float(noisy.std()) - 0.1) < 0.01, bool((noisy * 2**28 == (noisy * 2**28).round()).all())
        (True, True)
    """

    secure = True

    def __init__(self) -> None:
        self._key = SecretKey()

    def normal(self, like: Tensor) -> Tensor:
        """Draw multiples of 2^-24."""
        result = torch.empty(like.shape, dtype=_working_type(like))
        target = _flat(result)
        scale = target.dtype.type(2.0**-LOG2_STEPS)
        for part, run in self._gaussian(2.0**LOG2_STEPS, result.numel()):
            np.multiply(run, scale, out=target[part], casting="unsafe", dtype=target.dtype)
        return result.to(like.device, like.dtype)

    def uniform(self, like: Tensor) -> Tensor:
        """Draw multiples of 2^-24, of 2^-53 in double precision, coarser in half precision; always below 1."""
        stream = self._key.stream()
        drawn: NDArray[Any]
        if like.dtype == torch.float64:
            drawn = stream.doubles(like.numel())
        else:
            digits = {torch.float16: 11, torch.bfloat16: 8}.get(like.dtype, 24)
            drawn = (stream.words(like.numel()) >> np.uint32(32 - digits)).astype(np.float32) * np.float32(2.0**-digits)
        return torch.from_numpy(drawn).reshape(like.shape).to(like.device, like.dtype)

    def permutation(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Sort random 64-bit numbers; the probability that two of them are equal is count^2 / 2^65."""
        keys = self._key.stream().words(2 * count).view("<u8")
        return torch.from_numpy(np.argsort(keys, kind="stable")).to(device)

    def integers(self, below: int, count: int) -> list[int]:
        """Take remainders of random 64-bit numbers; they are uniform up to a relative error of below / 2^64."""
        drawn: list[int] = (self._key.stream().words(2 * count).view("<u8") % np.uint64(below)).tolist()
        return drawn

    def add_normal(
        self, values: Tensor, std: float | Tensor, *, typical: float | None = None, where: Tensor | None = None
    ) -> Tensor:
        """Add a discrete Gaussian on the grid of the values; if deviations differ, a Gaussian rounded to the grid."""
        scale = typical if isinstance(std, Tensor) else std
        if scale is None:
            raise ValueError("add_normal: a tensor of deviations needs `typical`, which decides the grid")
        if scale == 0:
            return values.clone()
        step = grid_step(scale)
        deviations = _flat(std).astype(np.float64) * (2.0**-LOG2_STEPS / step) if isinstance(std, Tensor) else None
        offsets = self._key.stream()
        noisy = None if where is None else _flat(where)
        result = torch.empty(values.shape, dtype=_working_type(values))
        target, flat_values = _flat(result), _flat(values)
        for part, run in self._gaussian(scale / step if deviations is None else 2.0**LOG2_STEPS, result.numel()):
            noise = run.astype(np.float64) if deviations is None else _rescaled(run, deviations[part], offsets)
            if noisy is not None:
                noise *= noisy[part]
            target[part] = _on_grid(flat_values[part], step, noise)
        return result.to(values.device, values.dtype)

    def add_laplace(self, values: Tensor, std: float) -> Tensor:
        """Add a Laplace variable rounded to the grid of the values."""
        if std == 0:
            return values.clone()
        step, stream = grid_step(std), self._key.stream()
        result = torch.empty(values.shape, dtype=_working_type(values))
        target, flat_values = _flat(result), _flat(values)
        for first in range(0, len(flat_values), _CHUNK):
            part = slice(first, min(first + _CHUNK, len(flat_values)))
            tail = stream.doubles(part.stop - first)
            signs = np.where(stream.words(len(tail)) & np.uint32(1), 1.0, -1.0)
            noise = np.rint(std / 2**0.5 / step * signs * -np.log(tail + 2.0**-54))  # the middle of each step
            target[part] = _on_grid(flat_values[part], step, noise)
        return result.to(values.device, values.dtype)

    def replace_normal(self, values: Tensor, std: float, where: Tensor) -> Tensor:
        """Round the values that stay to the grid of the draws, which is so coarse that floats can represent all of it.

        A value that was divided lies on floats with gaps of up to two units in the last place. This grid has 2^18 steps
        per deviation, on which no draw (at most 16 deviations) is large enough for a gap to be as wide as a step.
        """
        if std == 0:
            return values.masked_fill(where, 0)
        fine, offsets = grid_step(std), self._key.stream()
        coarse = fine * 2.0**_COARSER
        result = torch.empty(values.shape, dtype=_working_type(values))
        target, flat_values, chosen = _flat(result), _flat(values), _flat(where)
        for part, run in self._gaussian(std / fine, result.numel()):
            replacements = np.where(chosen[part], _rescaled(run, 2.0**-_COARSER, offsets), 0.0)
            target[part] = _on_grid(np.where(chosen[part], 0.0, flat_values[part]), coarse, replacements)
        return result.to(values.device, values.dtype)

    def _gaussian(self, deviation: float, count: int) -> Iterator[tuple[slice, NDArray[np.int32]]]:
        """Yield `count` draws in runs, each with the slice of the values that it is for."""
        first = 0
        for run in discrete_gaussian(deviation).draw(count, self._key.stream()):
            yield slice(first, first + len(run)), run
            first += len(run)


class Draws:
    """Random tensors for several clients at once, each client's row from that client's own source.

    Row i is what client i would have drawn alone, so processing clients together does not change the result.

    Args:
        sources: one per client.

    Example:
        >>> from gradveil.core.randomness import derived_generator
        >>> seeded = [SeededSource(derived_generator(client)) for client in (1, 2)]
        >>> together = Draws(seeded).normal(torch.empty(2, 3))
        >>> alone = Draws([SeededSource(derived_generator(2))]).normal(torch.empty(1, 3))
        >>> torch.equal(together[1:], alone)
        True
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)

    def normal(self, rows: Tensor) -> Tensor:
        """Standard normal values shaped like `rows`."""
        return torch.stack([source.normal(row) for source, row in zip(self.sources, rows, strict=True)])

    def uniform(self, rows: Tensor) -> Tensor:
        """Uniform values in [0, 1) shaped like `rows`."""
        return torch.stack([source.uniform(row) for source, row in zip(self.sources, rows, strict=True)])

    def add_normal(self, rows: Tensor, std: float) -> Tensor:
        """`rows` with independent normal noise of standard deviation `std`."""
        return torch.stack([source.add_normal(row, std) for source, row in zip(self.sources, rows, strict=True)])

    def add_laplace(self, rows: Tensor, std: float) -> Tensor:
        """`rows` with independent Laplace noise of standard deviation `std`."""
        return torch.stack([source.add_laplace(row, std) for source, row in zip(self.sources, rows, strict=True)])


Randomness = torch.Generator | Source
"""What callers may pass: a source, or a torch generator for simulations."""


def source_of(randomness: Randomness | None) -> Source:
    """The source to draw from: a new cryptographic one for None, a `SeededSource` for a torch generator.

    >>> source_of(None).secure, source_of(torch.Generator()).secure
    (True, False)
    """
    if randomness is None:
        return SecureSource()
    return SeededSource(randomness) if isinstance(randomness, torch.Generator) else randomness


_CHUNK = 1 << 15
_COARSER = 6  # bits by which the grid of `replace_normal` is coarser than that of added noise


def _dense_like(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _working_type(like: Tensor) -> torch.dtype:
    """The type that numpy computes with in place of `like`'s: it has no bfloat16."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def _flat(tensor: Tensor) -> NDArray[Any]:
    """All values in order; a contiguous CPU tensor shares its memory with the result, unless it is bfloat16."""
    exact = tensor.detach().cpu() if tensor.dtype != torch.bfloat16 else tensor.detach().cpu().float()
    flat: NDArray[Any] = exact.contiguous().view(-1).numpy()
    return flat


def _rescaled(run: NDArray[np.int32], factor: float | NDArray[np.float64], offsets: Keystream) -> NDArray[np.float64]:
    """Rescale draws, and round them to whole numbers again.

    Each draw is first moved to a random place within its own step: without that, the result would skip most numbers,
    and the gaps would reveal the values that the noise is added to.
    """
    rescaled: NDArray[np.float64] = np.rint((run + offsets.doubles(len(run)) - 0.5) * factor)
    return rescaled


def _on_grid(values: NDArray[Any], step: float, noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round the values to the grid and add noise that is a whole number of its steps.

    A step is a power of two, so the division is exact. A sum beyond 2^53 is rounded according to its own size, not
    the value's, so the result remains a function of the exact sum.
    """
    rounded = np.rint(values.astype(np.float64) * (1 / step)) + 0.0  # -0.0 becomes 0.0: its sign would be the value's
    return (rounded + noise) * step
