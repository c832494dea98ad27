"""Where noise comes from: which draws of a stream lie behind which coordinates of an update, and the noise again."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.attacks.noise_recovery.mersenne import KnownBits, State, rewind
from gradveil.attacks.noise_recovery.observations import (
    NUMPY_DOUBLE,
    TORCH_DOUBLE,
    TORCH_FLOAT,
    Floats,
    Positions,
    UniformFormat,
    invert_box_muller,
    invert_laplace,
    join,
    sure_bits,
)
from gradveil.attacks.noise_recovery.polar import ACCEPTED, align, invert_polar, polar_normals
from gradveil.errors import ParameterError

_ROUNDINGS = 2.0  # products between a draw and the update, each half a last place off at most
_BLOCK = 16  # torch's vectorised normal noise
_STATE_WORDS = slice(24, 24 + 8 * 624)  # where torch's state keeps the words, 64 bits each


@dataclass(frozen=True)
class Layer:
    """One call of a generator: what one layer's noise is drawn with.

    Args:
        name: of the parameter.
        shape: of the parameter.
        dtype: in which the noise is drawn.
        start: the first output of the stream that it takes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def size(self) -> int:
        """How many coordinates it has."""
        return prod(self.shape)


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
    def outputs(self, size: int, dtype: torch.dtype, drawn: int) -> int:
        """How many outputs a layer of `size` takes, after `drawn` values that came one by one."""

    @abstractmethod
    def observe(self, layer: Layer, values: Floats, known: NDArray[np.bool_], errors: Floats) -> KnownBits:
        """Sure bits, from the coordinates of a layer (in units of `scale`, flat) that show nothing but noise."""

    @abstractmethod
    def draw(self, state: State, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The noise of all layers, from the state right before the first draw."""

    def layers(self, update: Mapping[str, Tensor]) -> Iterator[Layer]:
        """The calls that drew the noise of an update."""
        start = singles = 0
        for name, value in update.items():
            yield Layer(name, tuple(value.shape), value.dtype, start)
            start += self.outputs(value.numel(), value.dtype, singles)
            singles += value.numel() if value.numel() < _BLOCK else 0

    def read(
        self, update: Mapping[str, Tensor], known: Mapping[str, Tensor], errors: Mapping[str, Tensor] | None = None
    ) -> tuple[KnownBits, Callable[[State], dict[str, Tensor]]]:
        """Sure bits (see `known_bits`), and what makes the noise of the state right before the first output of them."""
        return self.known_bits(update, known, errors), lambda state: self.draw(state, update)

    def known_bits(
        self, update: Mapping[str, Tensor], known: Mapping[str, Tensor], errors: Mapping[str, Tensor] | None = None
    ) -> KnownBits:
        """Sure bits from all coordinates that are known to show nothing but noise.

        Args:
            update: what the server saw.
            known: True where the update without noise is 0.
            errors: how far a coordinate may be off by more than its own rounding, such as that of the weights.
        """
        parts = []
        for layer in self.layers(update):
            mask = known[layer.name].flatten().cpu().numpy()
            if mask.any():
                parts.append(self.observe(layer, *self._standard(layer, update, mask, errors)))
        return join(parts)

    def _standard(
        self,
        layer: Layer,
        update: Mapping[str, Tensor],
        mask: NDArray[np.bool_],
        errors: Mapping[str, Tensor] | None,
    ) -> tuple[Floats, NDArray[np.bool_], Floats]:
        """Values in units of `scale`, which of them are known, and how far off they may be."""
        values = update[layer.name].detach().flatten().double().cpu().numpy() / self.scale
        off = np.abs(values) * _ROUNDINGS * _format(layer.dtype).epsilon
        if errors is not None:
            off = off + errors[layer.name].flatten().double().cpu().numpy() / self.scale
        return values, mask, off


@dataclass(frozen=True)
class TorchNormal(NoiseSource):
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

    def draw(self, state: State, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By torch itself."""
        generator = _torch_generator(state)
        return {
            name: (torch.empty(value.shape, dtype=value.dtype).normal_(generator=generator).double() * self.scale)
            for name, value in update.items()
        }


@dataclass(frozen=True)
class TorchLaplace(NoiseSource):
    """Laplace noise made of torch's uniform numbers, as `laplace-noise` makes it; `scale` is std / sqrt(2).

    Example:
        >>> [layer.start for layer in TorchLaplace(0.1).layers({"w": torch.zeros(3, 10), "b": torch.zeros(3)})]
        [0, 30]
    """

    def outputs(self, size: int, dtype: torch.dtype, drawn: int) -> int:
        """One uniform number for each value."""
        return size * _format(dtype).outputs

    def observe(self, layer: Layer, values: Floats, known: NDArray[np.bool_], errors: Floats) -> KnownBits:
        """Each value by itself."""
        form = _format(layer.dtype)
        u, error = invert_laplace(values[known], errors[known], form.epsilon)
        return sure_bits(_starts(layer, known, form), u, error, form)

    def draw(self, state: State, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From torch's uniform numbers."""
        generator = _torch_generator(state)
        noise = {}
        for name, value in update.items():
            uniform = torch.empty(value.shape, dtype=value.dtype).uniform_(generator=generator).double()
            centred = uniform - 0.5
            tail = (1 - 2 * centred.abs()).clamp_min(torch.finfo(value.dtype).eps / 4)
            noise[name] = -self.scale * centred.sign() * tail.log()
        return noise


@dataclass(frozen=True)
class TorchUniform(NoiseSource):
    """Uniform noise of torch's CPU generator: `scale` times a number in [0, 1), less half of `scale` if centred.

    Args:
        centred: whether the noise lies around 0.

    Example:
        >>> TorchUniform(1.0).outputs(10, torch.float64, 0)
        20
    """

    centred: bool = True

    def outputs(self, size: int, dtype: torch.dtype, drawn: int) -> int:
        """One uniform number for each value."""
        return size * _format(dtype).outputs

    def observe(self, layer: Layer, values: Floats, known: NDArray[np.bool_], errors: Floats) -> KnownBits:
        """Each value by itself."""
        form = _format(layer.dtype)
        u = values[known] + (0.5 if self.centred else 0.0)
        return sure_bits(_starts(layer, known, form), u, errors[known] + form.epsilon / 2, form)

    def draw(self, state: State, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By torch itself."""
        generator = _torch_generator(state)
        shift = 0.5 if self.centred else 0.0
        return {
            name: (torch.empty(value.shape, dtype=value.dtype).uniform_(generator=generator).double() - shift)
            * self.scale
            for name, value in update.items()
        }


@dataclass(frozen=True)
class NumpyLaplace(NoiseSource):
    """`numpy.random.laplace(0, scale, shape)` of the legacy generator: one uniform number of 53 bits for each value.

    The update holds it in its own precision.

    Example:
        >>> NumpyLaplace(1.0).outputs(10, torch.float32, 0)
        20
    """

    def outputs(self, size: int, dtype: torch.dtype, drawn: int) -> int:
        """Two outputs for each value; numpy draws once more only after a number that is exactly 0."""
        return 2 * size

    def observe(self, layer: Layer, values: Floats, known: NDArray[np.bool_], errors: Floats) -> KnownBits:
        """Each value by itself."""
        u, error = invert_laplace(values[known], errors[known], _format(layer.dtype).epsilon)
        return sure_bits(_starts(layer, known, NUMPY_DOUBLE), u, error, NUMPY_DOUBLE)

    def draw(self, state: State, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By numpy itself."""
        generator = numpy_generator(state)
        return {
            name: torch.from_numpy(np.asarray(generator.laplace(0, self.scale, tuple(value.shape))))
            for name, value in update.items()
        }


@dataclass(frozen=True)
class NumpyNormal(NoiseSource):
    """`numpy.random.normal(0, scale, shape)` of the legacy generator, as Flower's `LocalDpMod` draws it.

    Pairs of values come from points of a square, and those outside the disc are thrown away without a trace; `polar`
    finds out which. It needs long runs of known coordinates, such as the rows of silenced units next to each other.

    Example:
        >>> NumpyNormal(1.0).scale
        1.0
    """

    def outputs(self, size: int, dtype: torch.dtype, drawn: int) -> int:
        """Nobody knows before the draws are known."""
        return 0

    def observe(self, layer: Layer, values: Floats, known: NDArray[np.bool_], errors: Floats) -> KnownBits:
        """A run of pairs, from whichever value of the stream on."""
        return self._align(values, known, errors)[0]

    def draw(self, state: State, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By numpy itself, if the state is the one before the update's first value."""
        generator = numpy_generator(state)
        return {
            name: torch.from_numpy(np.asarray(generator.normal(0, self.scale, tuple(value.shape))))
            for name, value in update.items()
        }

    def read(
        self, update: Mapping[str, Tensor], known: Mapping[str, Tensor], errors: Mapping[str, Tensor] | None = None
    ) -> tuple[KnownBits, Callable[[State], dict[str, Tensor]]]:
        """All layers as one stream: a value that is left over goes to the next layer."""
        columns = [
            self._standard(layer, update, known[layer.name].flatten().cpu().numpy(), errors)
            for layer in self.layers(update)
        ]
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
    raw = generator.get_state()
    raw[_STATE_WORDS] = torch.from_numpy(state.astype("<u8").view(np.uint8))
    return generator.set_state(raw)


def _format(dtype: torch.dtype) -> UniformFormat:
    if dtype not in (torch.float32, torch.float64):
        raise ParameterError(f"noise-recovery: layers must be float32 or float64, got {dtype}; convert the update")
    return TORCH_FLOAT if dtype == torch.float32 else TORCH_DOUBLE


def _starts(layer: Layer, known: NDArray[np.bool_], form: UniformFormat) -> Positions:
    return layer.start + np.flatnonzero(known) * form.outputs
