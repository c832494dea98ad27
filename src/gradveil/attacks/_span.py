"""The row space of a gradient, exact or under noise, and how far vectors lie outside it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.defenses.knowledge import Evidence
from gradveil.task import Gradients

Read = Callable[[Gradients, Gradients], Evidence]

_COMPLETIONS = 10


@dataclass(frozen=True)
class RowSpace:
    r"""A subspace, as estimated from a matrix, and how well each of its directions is known.

    Args:
        basis: orthonormal rows ``[rank, n]``.
        errors: ``[rank]``, the expected share of each direction's energy that noise has turned out of the space.
        scale: ``[n]``, the unit of each value of a vector.

    Example:
        >>> space = row_space(torch.tensor([[2.0, 0.0, 0.0], [0.0, 1e-9, 0.0]]).double(), tolerance=1e-6)
        >>> space.distances(torch.eye(3)).tolist()
        [0.0, 1.0, 1.0]
    """

    basis: Tensor
    errors: Tensor
    scale: Tensor

    @property
    def is_everything(self) -> bool:
        """Whether no vector lies outside, so that it says nothing."""
        return self.basis.shape[0] == self.basis.shape[1]

    def distances(self, vectors: Tensor) -> Tensor:
        """The distance of each vector ``[N, n]``, scaled to length 1, from the space."""
        return self._split(vectors)[0]

    def expected(self, vectors: Tensor) -> Tensor:
        """The distance at which noise is expected to leave vectors of the true space, if they are these."""
        return self._split(vectors)[1]

    def _split(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        vectors = vectors.to(self.basis) / self.scale
        shares = (vectors @ self.basis.T).square() / vectors.square().sum(1, keepdim=True)
        # What is left of a direction is 1 - error of it, so the estimate of its share is that much too small.
        return (1 - shares.sum(1)).clamp_min(0).sqrt(), (shares @ (self.errors / (1 - self.errors))).sqrt()


def row_space(matrix: Tensor, tolerance: float) -> RowSpace:
    """The directions whose singular values are above `tolerance` times the largest: for exact matrices."""
    _, values, directions = torch.linalg.svd(matrix, full_matrices=False)
    basis = directions[values > tolerance * values[:1].clamp_min(torch.finfo(matrix.dtype).tiny)]
    return RowSpace(basis, torch.zeros_like(basis[:, 0]), torch.ones_like(matrix[0]))


def noisy_row_space(matrices: Sequence[Tensor], variance: float) -> RowSpace:
    r"""The directions that stand out of noise: those with singular values above the edge of a random matrix.

    The singular values of an m x n matrix of independent noise end at :math:`\sigma (\sqrt m + \sqrt n)`. A direction
    of the true matrix with singular value s is seen with :math:`y^2 = (s^2 + m \sigma^2)(s^2 + n \sigma^2) / s^2`, and
    of its right singular vector the share

    .. math:: e = \frac{n \sigma^2 (s^2 + m \sigma^2)}{s^2 (s^2 + n \sigma^2)}

    is turned elsewhere. Rows that are mostly noise move the edge up, so the matrices are also tried one by one, and the
    choice with the most directions above its edge is taken.

    Args:
        matrices: matrices ``[m, n]`` that share a row space.
        variance: variance of the noise on every value.

    References:
        Benaych-Georges & Nadakuditi, The singular values and vectors of low rank perturbations of large rectangular
        random matrices, Journal of Multivariate Analysis 111, 2012.
    """
    spaces = [_above_the_edge(matrix, variance) for matrix in (torch.cat(list(matrices)), *matrices)]
    return max(spaces, key=lambda space: len(space.basis))


def _above_the_edge(matrix: Tensor, variance: float) -> RowSpace:
    (m, n), (_, values, directions) = matrix.shape, torch.linalg.svd(matrix, full_matrices=False)
    above = values > math.sqrt(variance) * (math.sqrt(m) + math.sqrt(n))
    seen, noise = values[above].square(), variance
    # y^2 s^2 = (s^2 + m v)(s^2 + n v) is quadratic in s^2; of its roots, the larger one lies above the edge.
    half = (seen - (m + n) * noise) / 2
    square = half + (half.square() - m * n * noise**2).clamp_min(0).sqrt()
    errors = n * noise * (square + m * noise) / (square * (square + n * noise))
    return RowSpace(directions[above], errors.clamp_max(0.99), torch.ones_like(matrix[0]))


def completed_row_space(update: Gradients, read: Read, scale: Tensor) -> RowSpace:
    r"""The row space of matrices of which an update tells only a part, by completing them to a low rank.

    The matrices are scaled to the same size and stacked, each column in its own unit. What is unknown is first 0, then
    what the directions that stand out of noise say about it, a few times over. The noise is estimated.

    Args:
        update: matrices ``[m, n]`` that share a row space, by name.
        read: what the update says about a candidate for them, see `defenses.knowledge`.
        scale: ``[n]``, the unit of each column.
    """
    sizes = {name: (value / scale).square().mean().sqrt().clamp_min(1e-30) for name, value in update.items()}
    known = _filled({name: torch.zeros_like(value) for name, value in update.items()}, update, read)
    for step in range(_COMPLETIONS + 1):
        stacked = torch.cat([known[name] / scale / size for name, size in sizes.items()])
        space = replace(_above_the_edge(stacked, estimated_variance(stacked)), scale=scale)
        if step < _COMPLETIONS:
            low_rank = torch.split(stacked @ space.basis.T @ space.basis, [len(value) for value in update.values()])
            parts = zip(sizes.items(), low_rank, strict=True)
            known = _filled({name: part * scale * size for (name, size), part in parts}, update, read)
    return space


def _filled(candidate: Gradients, update: Gradients, read: Read) -> Gradients:
    """What an update says where it says something, else what it allows a candidate to be."""
    evidence = read(candidate, update)
    weights, allowed = evidence.weights, evidence.allowed or candidate
    if weights is None:
        return evidence.values
    return {name: torch.where(weights[name] > 0, value, allowed[name]) for name, value in evidence.values.items()}


def estimated_variance(matrix: Tensor) -> float:
    r"""The variance of the noise on a matrix of low rank, from the median of its singular values.

    Noise alone has the median :math:`\sigma \sqrt{n \mu}`, where :math:`\mu` is that of the Marchenko-Pastur law.

    References:
        Gavish & Donoho, The Optimal Hard Threshold for Singular Values is 4/sqrt(3), IEEE Trans. Inf. Theory 60, 2014.
    """
    values = torch.linalg.svdvals(matrix)
    few, many = sorted(matrix.shape)
    return float(values.median() ** 2 / (many * _median_of_noise(few / many)))


def _median_of_noise(ratio: float, points: int = 20_000) -> float:
    """The median of the Marchenko-Pastur law of matrices with sides in this ratio, by the midpoint rule."""
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    # With x = middle - half cos(angle) the density's square root becomes smooth.
    angle = (torch.arange(points, dtype=torch.float64) + 0.5) * math.pi / points
    at = (high + low) / 2 - (high - low) / 2 * angle.cos()
    weight = angle.sin().square() / at
    return float(at[(weight.cumsum(0) >= weight.sum() / 2).nonzero()[0, 0]])
