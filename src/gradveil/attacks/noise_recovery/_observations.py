"""From observed noise to the bits of the generator's outputs that are certain."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradveil.attacks.noise_recovery._mersenne import KnownBits

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class UniformFormat:
    """How a library makes a uniform number from one or two outputs of 32 bits.

    Args:
        digits: the number is an integer of this many bits, divided by 2**digits.
        outputs: how many outputs the number takes.
        split: bits of the integer from this one up come from the first output, those below from the second.
        shifts: the position in the first and in the second output of the lowest bit taken from it.
        epsilon: half the distance between 1 and the next floating-point number, in the library's precision.
    """

    digits: int
    outputs: int
    split: int
    shifts: tuple[int, int]
    epsilon: float


TORCH_FLOAT = UniformFormat(24, 1, 0, (0, 0), 2.0**-24)
TORCH_DOUBLE = UniformFormat(53, 2, 32, (0, 0), 2.0**-53)
NUMPY_DOUBLE = UniformFormat(53, 2, 26, (5, 6), 2.0**-53)

# Error of torch's float32 Box-Muller, in halves of the last place: over 6.4 million draws on AVX-512 at most 2.8 for
# the radius and 1.3 steps of 2**-24 for the angle (as a fraction of a turn). The margins allow for other processors.
_RADIUS_ERROR = 4.0
_ANGLE_ERROR = 2.0


def certain_bits(positions: Positions, values: Floats, errors: Floats, form: UniformFormat) -> KnownBits:
    """The leading bits that all numbers within `errors` of `values` share.

    Args:
        positions: the first output of each uniform number.
        values: the approximate numbers, in [0, 1).
        errors: how far off each may be.
        form: how the library makes them.
    """
    size = 2.0**form.digits
    # An interval around 0 may just as well lie around 1.
    inside = (values - errors >= 0) & (values + errors < 1)
    positions, values, errors = positions[inside], values[inside], errors[inside]
    low = np.floor((values - errors) * size).astype(np.int64)
    high = np.minimum(np.ceil((values + errors) * size), size - 1).astype(np.int64)
    differing = low ^ high
    found: list[KnownBits] = []
    for bit in range(form.digits - 1, -1, -1):
        certain = differing >> bit == 0
        if not certain.any():
            break
        second = bit < form.split
        output_bit = bit + form.shifts[1] if second else bit - form.split + form.shifts[0]
        outputs = positions[certain] + second
        found.append(KnownBits(outputs, np.full(len(outputs), output_bit), low[certain] >> bit & 1))
    return join(found)


def join(parts: list[KnownBits]) -> KnownBits:
    """All known bits of several parts."""
    nothing = (np.zeros(0, np.int64),) * 3
    columns = zip(nothing, *((part.positions, part.bits, part.values) for part in parts), strict=True)
    return KnownBits(*map(np.concatenate, columns))


def invert_box_muller(
    cosine: Floats, sine: Floats, errors: tuple[Floats, Floats], epsilon: float
) -> tuple[Floats, Floats, Floats, Floats]:
    """The uniform numbers u, v behind normal values r cos(2 pi v) and r sin(2 pi v), where r^2 = -2 log(1 - u).

    Returns:
        u, v and how far off each may be.
    """
    square = cosine**2 + sine**2
    u = -np.expm1(-square / 2)
    v = np.arctan2(sine, cosine) / (2 * np.pi) % 1
    first, second = errors
    u_error = np.exp(-square / 2) * (np.abs(cosine) * first + np.abs(sine) * second + _RADIUS_ERROR * epsilon * square)
    with np.errstate(divide="ignore", invalid="ignore"):
        turn = (np.abs(sine) * first + np.abs(cosine) * second) / square / (2 * np.pi)
    # If the radius is close to 0, the angle is lost.
    v_error = np.where(square > 1e-9, turn + _ANGLE_ERROR * epsilon, 1.0)
    return u, v, u_error + epsilon, v_error


def invert_laplace(values: Floats, errors: Floats, epsilon: float) -> tuple[Floats, Floats]:
    """The uniform number behind -sign(u - 1/2) log(1 - 2 |u - 1/2|), and how far off it may be."""
    tail = np.exp(-np.abs(values)) / 2
    return np.where(values < 0, tail, 1 - tail), tail * (errors + 2 * epsilon * np.abs(values)) + epsilon / 2
