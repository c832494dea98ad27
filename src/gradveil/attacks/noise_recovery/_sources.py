"""Sources of noise: which draws of a stream belong to which coordinates of an update, and how to redraw the noise."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.attacks.noise_recovery._mersenne import KnownBits, State, rewind
from gradveil.attacks.noise_recovery._observations import (
    NUMPY_DOUBLE,
    TORCH_DOUBLE,
    TORCH_FLOAT,
    Floats,
    UniformFormat,
    certain_bits,
    invert_box_muller,
    invert_laplace,
    join,
)
from gradveil.attacks.noise_recovery._polar import ACCEPTED, align, invert_polar, polar_normals
from gradveil.core.errors import ParameterError
from gradveil.core.randomness.generators import with_words

Layers = Mapping[str, Tensor]
Draw = Callable[[State], dict[str, Tensor]]
"""Redraws the noise of all layers, from the state right before the first output of the known bits."""

_ROUNDINGS = 2.0  # roundings between a draw and the update, each at most half a unit in the last place
_BLOCK = 16  # block size of torch's vectorised normal noise


@dataclass(frozen=True)
class Layer:
    """The call of a generator that draws one layer's noise.

    Args:
        name: name of the parameter.
        size: number of its coordinates.
        dtype: the dtype in which the noise is drawn.
        start: the first output of the stream that the call takes.
    """

    name: str
    size: int
    dtype: torch.dtype
    start: int


@dataclass(frozen=True)
class NoiseSource(ABC):
    """A way of drawing noise, layer by layer in the order of the update, all from one Mersenne Twister.

    Args:
        scale: what draws are multiplied by before the server sees them: the standard deviation, divided by the batch
            size if the server sees a mean, times the learning rate if it sees a change of weights.
    """

    scale: float

    def __post_init__(self) -> None:
        if not self.scale > 0 or not np.isfinite(self.scale):
            raise ParameterError(f"noise-recovery: scale must be a number above 0, got {self.scale}")

    @abstractmethod
    def read(self, update: Layers, known: Layers, errors: Layers | None = None) -> tuple[KnownBits, Draw]:
        """The known bits of the stream, and a function that redraws the noise.

        Args:
            update: what the server saw.
            known: True where the update without noise is 0.
            errors: how far each coordinate may be off beyond its own rounding, for example by that of the weights.
        """

    def _standard(
        self, name: str, update: Layers, known: Layers, errors: Layers | None
    ) -> tuple[Floats, NDArray[np.bool_], Floats]:
        """A layer's values in units of `scale`, which of them are known to be noise, and how far off they may be."""
        values = update[name].detach().flatten().double().cpu().numpy() / self.scale
        value_errors = np.abs(values) * _ROUNDINGS * _format(update[name].dtype).epsilon
        if errors is not None:
            value_errors = value_errors + errors[name].flatten().double().cpu().numpy() / self.scale
        return values, known[name].flatten().cpu().numpy(), value_errors


class _LayerSource(NoiseSource):
    """Noise for which the number of outputs that a layer takes is known in advance."""

    @abstractmethod
    def outputs(self, size: int, dtype: torch.dtype, drawn: int) -> int:
        """How many outputs a layer of `size` takes; `drawn` values of earlier layers were drawn one by one."""

    @abstractmethod
    def observe(self, layer: Layer, values: Floats, known: NDArray[np.bool_], errors: Floats) -> KnownBits:
        """Known bits from the coordinates of a layer (flat, in units of `scale`) that are nothing but noise."""

    @abstractmethod
    def drawer(self, state: State) -> Callable[[Tensor], Tensor]:
        """A function that fills one layer after the other with noise, from the state right before the first."""

    def layers(self, update: Layers) -> Iterator[Layer]:
        """The calls that drew the noise of an update."""
        start = singles = 0
        for name, value in update.items():
            yield Layer(name, value.numel(), value.dtype, start)
            start += self.outputs(value.numel(), value.dtype, singles)
            singles += value.numel() if value.numel() < _BLOCK else 0

    def read(self, update: Layers, known: Layers, errors: Layers | None = None) -> tuple[KnownBits, Draw]:
        """Read layer by layer, see `known_bits`."""

        def draw_noise(state: State) -> dict[str, Tensor]:
            draw = self.drawer(state)
            return {name: draw(torch.empty(value.shape, dtype=value.dtype)) for name, value in update.items()}

        return self.known_bits(update, known, errors), draw_noise

    def known_bits(self, update: Layers, known: Layers, errors: Layers | None = None) -> KnownBits:
        """Known bits from all coordinates that are nothing but noise; arguments as in `read`."""
        layers = [layer for layer in self.layers(update) if known[layer.name].any()]
        return join([self.observe(layer, *self._standard(layer.name, update, known, errors)) for layer in layers])


class _UniformSource(_LayerSource):
    """Noise made from one uniform number per value."""

    @abstractmethod
    def invert(self, values: Floats, errors: Floats, epsilon: float) -> tuple[Floats, Floats]:
        """The uniform numbers behind values in units of `scale`, and how far off they may be."""

    def form(self, dtype: torch.dtype) -> UniformFormat:
        """How the uniform numbers of a layer are made: by torch, in the layer's precision."""
        return _format(dtype)

    def outputs(self, size: int, dtype: torch.dtype, drawn: int) -> int:
        """The outputs of one uniform number per value."""
        return size * self.form(dtype).outputs

    def observe(self, layer: Layer, values: Floats, known: NDArray[np.bool_], errors: Floats) -> KnownBits:
        """Invert each value by itself."""
        u, error = self.invert(values[known], errors[known], _format(layer.dtype).epsilon)
        form = self.form(layer.dtype)
        return certain_bits(layer.start + np.flatnonzero(known) * form.outputs, u, error, form)


@dataclass(frozen=True)
class TorchNormal(_LayerSource):
    """Normal noise of torch's CPU generator, with a contiguous `normal_` for each layer.

    Layers of 16 or more values are made from uniform numbers of 24 bits (float64: 53), in blocks of 16 whose values j
    and j + 8 are a Box-Muller pair; if the size is not a multiple of 16, the last 16 values are drawn again. Smaller
    layers are drawn one value at a time, from pairs of float64 values; the spare value is kept for the next call.

    Example:
        >>> [layer.start for layer in TorchNormal(0.1).layers({"w": torch.zeros(3, 10), "b": torch.zeros(3)})]
        [0, 46]
    """

    def outputs(self, size: int, dtype: torch.dtype, drawn: int) -> int:
        """The outputs of all blocks and of values drawn again, or of pairs of two doubles."""
        if size < _BLOCK:
            return 4 * ((drawn + size + 1) // 2 - (drawn + 1) // 2)
        return (size + (_BLOCK if size % _BLOCK else 0)) * _format(dtype).outputs

    def observe(self, layer: Layer, values: Floats, known: NDArray[np.bool_], errors: Floats) -> KnownBits:
        """Invert the pairs of which both values are known."""
        if layer.size < _BLOCK:
            return join([])  # a handful of bits, not worth the bookkeeping of pairs across layers
        form = _format(layer.dtype)
        has_tail = layer.size % _BLOCK != 0  # the last 16 values are drawn again, after all others
        kept = layer.size - _BLOCK if has_tail else layer.size
        index = np.arange(max(kept - _BLOCK // 2, 0))
        draws = index = index[index % _BLOCK < _BLOCK // 2]
        if has_tail:
            tail = np.arange(_BLOCK // 2)
            index, draws = np.concatenate([index, kept + tail]), np.concatenate([index, layer.size + tail])
        partner = index + _BLOCK // 2
        both = known[index] & known[partner]
        index, partner, draws = index[both], partner[both], draws[both]
        u, v, u_error, v_error = invert_box_muller(
            values[index], values[partner], (errors[index], errors[partner]), form.epsilon
        )
        first = layer.start + draws * form.outputs
        second = first + _BLOCK // 2 * form.outputs
        return join([certain_bits(first, u, u_error, form), certain_bits(second, v, v_error, form)])

    def drawer(self, state: State) -> Callable[[Tensor], Tensor]:
        """Let torch itself draw."""
        generator = _torch_generator(state)
        return lambda empty: empty.normal_(generator=generator).double() * self.scale


@dataclass(frozen=True)
class TorchLaplace(_UniformSource):
    """Laplace noise made from torch's uniform numbers, as `laplace-noise` makes it; `scale` is std / sqrt(2).

    Example:
        >>> [layer.start for layer in TorchLaplace(0.1).layers({"w": torch.zeros(3, 10), "b": torch.zeros(3)})]
        [0, 30]
    """

    def invert(self, values: Floats, errors: Floats, epsilon: float) -> tuple[Floats, Floats]:
        """Apply the distribution function."""
        return invert_laplace(values, errors, epsilon)

    def drawer(self, state: State) -> Callable[[Tensor], Tensor]:
        """Transform torch's uniform numbers."""
        generator = _torch_generator(state)

        def draw(empty: Tensor) -> Tensor:
            centred = empty.uniform_(generator=generator).double() - 0.5
            tail = (1 - 2 * centred.abs()).clamp_min(torch.finfo(empty.dtype).eps / 4)
            return -self.scale * centred.sign() * tail.log()

        return draw


@dataclass(frozen=True)
class TorchUniform(_UniformSource):
    """Uniform noise of torch's CPU generator: `scale` times a number in [0, 1), less half of `scale` if centred.

    Args:
        centred: whether the noise is centred at 0.

    Example:
        >>> TorchUniform(1.0).outputs(10, torch.float64, 0)
        20
    """

    centred: bool = True

    @property
    def _shift(self) -> float:
        return 0.5 if self.centred else 0.0

    def invert(self, values: Floats, errors: Floats, epsilon: float) -> tuple[Floats, Floats]:
        """Undo the shift."""
        return values + self._shift, errors + epsilon / 2

    def drawer(self, state: State) -> Callable[[Tensor], Tensor]:
        """Let torch itself draw."""
        generator = _torch_generator(state)
        return lambda empty: (empty.uniform_(generator=generator).double() - self._shift) * self.scale


@dataclass(frozen=True)
class NumpyLaplace(_UniformSource):
    """`numpy.random.laplace(0, scale, shape)` of the legacy generator: one uniform number of 53 bits per value.

    The update holds the noise in its own precision.

    Example:
        >>> NumpyLaplace(1.0).outputs(10, torch.float32, 0)
        20
    """

    def form(self, dtype: torch.dtype) -> UniformFormat:
        """The format with two outputs per value; numpy draws again only after a number that is exactly 0."""
        return NUMPY_DOUBLE

    def invert(self, values: Floats, errors: Floats, epsilon: float) -> tuple[Floats, Floats]:
        """Apply the distribution function."""
        return invert_laplace(values, errors, epsilon)

    def drawer(self, state: State) -> Callable[[Tensor], Tensor]:
        """Let numpy itself draw."""
        generator = numpy_generator(state)
        return lambda empty: torch.from_numpy(np.asarray(generator.laplace(0, self.scale, tuple(empty.shape))))


@dataclass(frozen=True)
class NumpyNormal(NoiseSource):
    """`numpy.random.normal(0, scale, shape)` of the legacy generator, as Flower's `LocalDpMod` draws it.

    Pairs of values come from points in a square, and points outside the disc are discarded without a trace; the module
    `_polar` finds out which. It needs long runs of known coordinates, such as the rows of neighbouring silenced units.

    Example:
        >>> NumpyNormal(1.0).scale
        1.0
    """

    def read(self, update: Layers, known: Layers, errors: Layers | None = None) -> tuple[KnownBits, Draw]:
        """Read all layers as one stream, because a spare value goes to the next layer."""
        columns = [self._standard(name, update, known, errors) for name in update]
        values, mask, value_errors = (np.concatenate(column) for column in zip(*columns, strict=True))
        bits, first_value = self._align(values, mask, value_errors)

        def draw_noise(state: State) -> dict[str, Tensor]:
            stream = torch.from_numpy(normals_around(state, first_value, len(values)) * self.scale)
            parts = torch.split(stream, [value.numel() for value in update.values()])
            return {name: part.view(value.shape) for (name, value), part in zip(update.items(), parts, strict=True)}

        return bits, draw_noise

    @staticmethod
    def _align(values: Floats, known: NDArray[np.bool_], errors: Floats) -> tuple[KnownBits, int]:
        """Known bits from the first aligned trial on, and the index of that trial's first value in the stream."""
        best: tuple[KnownBits, int] = (join([]), 0)
        for spare in (0, 1):  # number of values left over from an earlier pair
            index = np.arange(spare, len(values) - 1, 2)
            both = known[index] & known[index + 1]
            one, two, error = invert_polar(values[index], values[index + 1], (errors[index], errors[index + 1]))
            found = align(one, two, error, both)
            if not len(found.pairs):
                continue
            start = 4 * (found.trials - found.trials[0])
            bits = join(
                [
                    certain_bits(start, one[found.pairs], error[found.pairs], NUMPY_DOUBLE),
                    certain_bits(start + 2, two[found.pairs], error[found.pairs], NUMPY_DOUBLE),
                ]
            )
            if len(bits.values) > len(best[0].values):
                best = bits, int(index[found.pairs[0]])
        return best


def normals_around(state: State, index: int, count: int) -> Floats:
    """The `count` normal values of a stream whose value number `index` is the first that the state gives."""
    pairs_before = -(-index // 2)
    trials_before = int(pairs_before / ACCEPTED * 1.1) + 500
    trials_after = int((count - index) / 2 / ACCEPTED * 1.1) + 500
    generator = numpy_generator(rewind(state, 4 * trials_before))
    values, trials = polar_normals(generator.random_sample(2 * (trials_before + trials_after)))
    start = 2 * int(np.searchsorted(trials, trials_before)) - index
    return values.flatten()[start : start + count]


def numpy_generator(state: State) -> np.random.RandomState:
    """numpy's legacy generator, set to twist `state` before its first output."""
    generator = np.random.RandomState()
    generator.set_state(("MT19937", state, 624, 0, 0.0))
    return generator


def _torch_generator(state: State) -> torch.Generator:
    generator = torch.Generator().manual_seed(0)  # no spare value, and a twist before the first output
    return generator.set_state(with_words(generator.get_state(), state))


def _format(dtype: torch.dtype) -> UniformFormat:
    if dtype not in (torch.float32, torch.float64):
        raise ParameterError(f"noise-recovery: layers must be float32 or float64, got {dtype}; convert the update")
    return TORCH_FLOAT if dtype == torch.float32 else TORCH_DOUBLE
