"""Where noise comes from: which draws of a stream lie behind which coordinates of an update, and the noise again."""

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
    invert_box_muller,
    invert_laplace,
    join,
    sure_bits,
)
from gradveil.attacks.noise_recovery._polar import ACCEPTED, align, invert_polar, polar_normals
from gradveil.core.errors import ParameterError
from gradveil.core.randomness.generators import with_words

Layers = Mapping[str, Tensor]
Draw = Callable[[State], dict[str, Tensor]]
"""Makes the noise of all layers, from the state right before the first output that was read."""

_ROUNDINGS = 2.0  # products between a draw and the update, each half a last place off at most
_BLOCK = 16  # torch's vectorised normal noise


@dataclass(frozen=True)
class Layer:
    """One call of a generator: what one layer's noise is drawn with.

    Args:
        name: of the parameter.
        size: how many coordinates it has.
        dtype: in which the noise is drawn.
        start: the first output of the stream that it takes.
    """

    name: str
    size: int
    dtype: torch.dtype
    start: int


@dataclass(frozen=True)
class NoiseSource(ABC):
    """A way of drawing noise, layer by layer in the order of the update, all from one Mersenne Twister.

    Args:
        scale: what draws are multiplied with before the server sees them: the standard deviation, divided by the batch
            size if the server sees a mean, times the learning rate if it sees a change of weights.
    """

    scale: float

    def __post_init__(self) -> None:
        if not self.scale > 0 or not np.isfinite(self.scale):
            raise ParameterError(f"noise-recovery: scale must be a number above 0, got {self.scale}")

    @abstractmethod
    def read(self, update: Layers, known: Layers, errors: Layers | None = None) -> tuple[KnownBits, Draw]:
        """Sure bits, and what makes the noise of the state right before the first output of them.

        Args:
            update: what the server saw.
            known: True where the update without noise is 0.
            errors: how far a coordinate may be off by more than its own rounding, such as that of the weights.
        """

    def _standard(
        self, name: str, update: Layers, known: Layers, errors: Layers | None
    ) -> tuple[Floats, NDArray[np.bool_], Floats]:
        """A layer's values in units of `scale`, which of them are known, and how far off they may be."""
        values = update[name].detach().flatten().double().cpu().numpy() / self.scale
        off = np.abs(values) * _ROUNDINGS * _format(update[name].dtype).epsilon
        if errors is not None:
            off = off + errors[name].flatten().double().cpu().numpy() / self.scale
        return values, known[name].flatten().cpu().numpy(), off


class _LayerSource(NoiseSource):
    """Noise of which it is known in advance how many outputs of the generator a layer takes."""

    @abstractmethod
    def outputs(self, size: int, dtype: torch.dtype, drawn: int) -> int:
        """How many outputs a layer of `size` takes, after `drawn` values that came one by one."""

    @abstractmethod
    def observe(self, layer: Layer, values: Floats, known: NDArray[np.bool_], errors: Floats) -> KnownBits:
        """Sure bits, from the coordinates of a layer (in units of `scale`, flat) that show nothing but noise."""

    @abstractmethod
    def drawer(self, state: State) -> Callable[[Tensor], Tensor]:
        """What fills one layer after the other with noise, from the state right before the first."""

    def layers(self, update: Layers) -> Iterator[Layer]:
        """The calls that drew the noise of an update."""
        start = singles = 0
        for name, value in update.items():
            yield Layer(name, value.numel(), value.dtype, start)
            start += self.outputs(value.numel(), value.dtype, singles)
            singles += value.numel() if value.numel() < _BLOCK else 0

    def read(self, update: Layers, known: Layers, errors: Layers | None = None) -> tuple[KnownBits, Draw]:
        """Layer by layer, see `known_bits`."""

        def noise(state: State) -> dict[str, Tensor]:
            draw = self.drawer(state)
            return {name: draw(torch.empty(value.shape, dtype=value.dtype)) for name, value in update.items()}

        return self.known_bits(update, known, errors), noise

    def known_bits(self, update: Layers, known: Layers, errors: Layers | None = None) -> KnownBits:
        """Sure bits from all coordinates that are known to show nothing but noise; arguments as in `read`."""
        layers = [layer for layer in self.layers(update) if known[layer.name].any()]
        return join([self.observe(layer, *self._standard(layer.name, update, known, errors)) for layer in layers])


class _UniformSource(_LayerSource):
    """Noise made of one uniform number for each value."""

    @abstractmethod
    def invert(self, values: Floats, errors: Floats, epsilon: float) -> tuple[Floats, Floats]:
        """The uniform numbers behind values in units of `scale`, and how far off they may be."""

    def form(self, dtype: torch.dtype) -> UniformFormat:
        """How the uniform numbers behind a layer are made: by torch, in the layer's precision."""
        return _format(dtype)

    def outputs(self, size: int, dtype: torch.dtype, drawn: int) -> int:
        """One uniform number for each value."""
        return size * self.form(dtype).outputs

    def observe(self, layer: Layer, values: Floats, known: NDArray[np.bool_], errors: Floats) -> KnownBits:
        """Each value by itself."""
        u, error = self.invert(values[known], errors[known], _format(layer.dtype).epsilon)
        form = self.form(layer.dtype)
        return sure_bits(layer.start + np.flatnonzero(known) * form.outputs, u, error, form)


@dataclass(frozen=True)
class TorchNormal(_LayerSource):
    """Normal noise of torch's CPU generator, a contiguous `normal_` for each layer.

    Layers of 16 and more values: uniform numbers of 24 bits (float64: 53), in blocks of 16 whose value j and j + 8 are
    a Box-Muller pair; if the size is no multiple of 16, the last 16 values are drawn anew. Smaller ones: pairs of
    float64 values one after the other, the second kept for the next call.

    Example:
        >>> [layer.start for layer in TorchNormal(0.1).layers({"w": torch.zeros(3, 10), "b": torch.zeros(3)})]
        [0, 46]
    """

    def outputs(self, size: int, dtype: torch.dtype, drawn: int) -> int:
        """Blocks and what is drawn anew; or pairs of two doubles."""
        if size < _BLOCK:
            return 4 * ((drawn + size + 1) // 2 - (drawn + 1) // 2)
        return (size + (_BLOCK if size % _BLOCK else 0)) * _format(dtype).outputs

    def observe(self, layer: Layer, values: Floats, known: NDArray[np.bool_], errors: Floats) -> KnownBits:
        """Pairs of which both values are known."""
        if layer.size < _BLOCK:
            return join([])  # a handful of bits, not worth the bookkeeping of pairs across layers
        form = _format(layer.dtype)
        again = layer.size % _BLOCK != 0
        kept = layer.size - _BLOCK if again else layer.size
        index = np.arange(max(kept - _BLOCK // 2, 0))
        draws = index = index[index % _BLOCK < _BLOCK // 2]
        if again:  # the last 16, drawn anew behind all others
            tail = np.arange(_BLOCK // 2)
            index, draws = np.concatenate([index, kept + tail]), np.concatenate([index, layer.size + tail])
        partner = index + _BLOCK // 2
        seen = known[index] & known[partner]
        index, partner, draws = index[seen], partner[seen], draws[seen]
        u, v, u_error, v_error = invert_box_muller(
            values[index], values[partner], (errors[index], errors[partner]), form.epsilon
        )
        first = layer.start + draws * form.outputs
        second = first + _BLOCK // 2 * form.outputs
        return join([sure_bits(first, u, u_error, form), sure_bits(second, v, v_error, form)])

    def drawer(self, state: State) -> Callable[[Tensor], Tensor]:
        """By torch itself."""
        generator = _torch_generator(state)
        return lambda empty: empty.normal_(generator=generator).double() * self.scale


@dataclass(frozen=True)
class TorchLaplace(_UniformSource):
    """Laplace noise made of torch's uniform numbers, as `laplace-noise` makes it; `scale` is std / sqrt(2).

    Example:
        >>> [layer.start for layer in TorchLaplace(0.1).layers({"w": torch.zeros(3, 10), "b": torch.zeros(3)})]
        [0, 30]
    """

    def invert(self, values: Floats, errors: Floats, epsilon: float) -> tuple[Floats, Floats]:
        """By the distribution function."""
        return invert_laplace(values, errors, epsilon)

    def drawer(self, state: State) -> Callable[[Tensor], Tensor]:
        """From torch's uniform numbers."""
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
        centred: whether the noise lies around 0.

    Example:
        >>> TorchUniform(1.0).outputs(10, torch.float64, 0)
        20
    """

    centred: bool = True

    @property
    def _shift(self) -> float:
        return 0.5 if self.centred else 0.0

    def invert(self, values: Floats, errors: Floats, epsilon: float) -> tuple[Floats, Floats]:
        """They are the values, but for the shift."""
        return values + self._shift, errors + epsilon / 2

    def drawer(self, state: State) -> Callable[[Tensor], Tensor]:
        """By torch itself."""
        generator = _torch_generator(state)
        return lambda empty: (empty.uniform_(generator=generator).double() - self._shift) * self.scale


@dataclass(frozen=True)
class NumpyLaplace(_UniformSource):
    """`numpy.random.laplace(0, scale, shape)` of the legacy generator: one uniform number of 53 bits for each value.

    The update holds it in its own precision.

    Example:
        >>> NumpyLaplace(1.0).outputs(10, torch.float32, 0)
        20
    """

    def form(self, dtype: torch.dtype) -> UniformFormat:
        """Two outputs for each value; numpy draws once more only after a number that is exactly 0."""
        return NUMPY_DOUBLE

    def invert(self, values: Floats, errors: Floats, epsilon: float) -> tuple[Floats, Floats]:
        """By the distribution function."""
        return invert_laplace(values, errors, epsilon)

    def drawer(self, state: State) -> Callable[[Tensor], Tensor]:
        """By numpy itself."""
        generator = numpy_generator(state)
        return lambda empty: torch.from_numpy(np.asarray(generator.laplace(0, self.scale, tuple(empty.shape))))


@dataclass(frozen=True)
class NumpyNormal(NoiseSource):
    """`numpy.random.normal(0, scale, shape)` of the legacy generator, as Flower's `LocalDpMod` draws it.

    Pairs of values come from points of a square, and those outside the disc are thrown away without a trace; `polar`
    finds out which. It needs long runs of known coordinates, such as the rows of silenced units next to each other.

    Example:
        >>> NumpyNormal(1.0).scale
        1.0
    """

    def read(self, update: Layers, known: Layers, errors: Layers | None = None) -> tuple[KnownBits, Draw]:
        """All layers as one stream: a value that is left over goes to the next layer."""
        columns = [self._standard(name, update, known, errors) for name in update]
        values, mask, off = (np.concatenate(column) for column in zip(*columns, strict=True))
        bits, first_value = self._align(values, mask, off)

        def noise(state: State) -> dict[str, Tensor]:
            stream = torch.from_numpy(normals_around(state, first_value, len(values)) * self.scale)
            parts = torch.split(stream, [value.numel() for value in update.values()])
            return {name: part.view(value.shape) for (name, value), part in zip(update.items(), parts, strict=True)}

        return bits, noise

    @staticmethod
    def _align(values: Floats, known: NDArray[np.bool_], errors: Floats) -> tuple[KnownBits, int]:
        """Known bits from the first aligned trial on, and the place of that trial's first value in the stream."""
        best: tuple[KnownBits, int] = (join([]), 0)
        for spare in (0, 1):  # values that are left over from an earlier pair
            places = np.arange(spare, len(values) - 1, 2)
            seen = known[places] & known[places + 1]
            one, two, error = invert_polar(values[places], values[places + 1], (errors[places], errors[places + 1]))
            found = align(one, two, error, seen)
            if not len(found.pairs):
                continue
            start = 4 * (found.trials - found.trials[0])
            bits = join(
                [
                    sure_bits(start, one[found.pairs], error[found.pairs], NUMPY_DOUBLE),
                    sure_bits(start + 2, two[found.pairs], error[found.pairs], NUMPY_DOUBLE),
                ]
            )
            if len(bits.values) > len(best[0].values):
                best = bits, int(places[found.pairs[0]])
        return best


def normals_around(state: State, place: int, count: int) -> Floats:
    """`count` normal values of which number `place` is the first that the state gives."""
    pairs_before = -(-place // 2)
    back = int(pairs_before / ACCEPTED * 1.1) + 500
    ahead = int((count - place) / 2 / ACCEPTED * 1.1) + 500
    generator = numpy_generator(rewind(state, 4 * back))
    values, trials = polar_normals(generator.random_sample(2 * (back + ahead)))
    start = 2 * int(np.searchsorted(trials, back)) - place
    return values.flatten()[start : start + count]


def numpy_generator(state: State) -> np.random.RandomState:
    """numpy's legacy generator that twists `state` before its first output."""
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
