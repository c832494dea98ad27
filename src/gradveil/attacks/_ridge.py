"""Ridge regression of updates on the gradients of candidates, in the dual: everything follows from inner products."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float64).tiny
_LEAST_VARIANCE = 1e-200
"""Keeps the ratios finite if an update is zero."""
_BLOCK = 1 << 10
"""Values of the rows that are multiplied at a time: few enough to stay in the processor's caches."""
_ROWS = 128
"""Rows of a Gram matrix that are computed at a time."""
_RATIOS = torch.logspace(-12, 3, 61, dtype=torch.float64)
"""Ratios of noise to signal that are tried, in units of the largest eigenvalue of the Gram matrix."""
COARSE, FINE, FINAL = (1.0, -1.0), (1.0, -1.0, 0.5, -0.5, 0.25, -0.25), (0.5, -0.5, 0.25, -0.25)
"""The steps of a search for a penalty, as powers of ten. `FINAL` is for one that begins at a good guess."""


def weighted_gram(rows: Tensor, weights: Tensor | None = None, *, exact: bool = True) -> Tensor:
    """The inner products ``[rows, rows]`` of all rows, each value counted by its weight, in double precision.

    Only one half is computed, for some rows at a time; the other half is its mirror image.

    Args:
        rows: ``[rows, values]``.
        weights: ``[values]``; None: all are 1.
        exact: whether the values, too, are multiplied and summed in double precision. Otherwise blocks of them are in
            that of the rows, which for single precision takes half the time and leaves an error of 1e-7 relative to the
            largest product.

    >>> weighted_gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([1.0, 3.0]))
    tensor([[13.,  6.],
            [ 6.,  3.]], dtype=torch.float64)
    """
    count = len(rows)
    gram = torch.zeros(count, count, dtype=torch.float64, device=rows.device)
    precision = gram.dtype if exact else rows.dtype
    for place in range(0, rows.shape[1], _BLOCK):
        part = rows[:, place : place + _BLOCK].to(precision)
        weighted = part if weights is None else part * weights[place : place + _BLOCK].to(precision)
        for first in range(0, count, _ROWS):
            last = min(first + _ROWS, count)
            gram[first:last, :last] += weighted[first:last] @ part[:last].T
    return gram.tril() + gram.tril(-1).T


class WeightedGrams:
    r"""The Gram matrices of one table under one set of weights after another.

    Each is computed from the nearest one that is known: the last one, the one with all weights 1, or zero.

    .. math:: K_w = K_v + \sum_{j: w_j \ne v_j} (w_j - v_j) \, g_{\cdot j} g_{\cdot j}^T

    Updates of different clients hold back much the same values, and reading an update again moves few of them.

    Args:
        rows: ``[rows, values]``.
        whole: their Gram matrix with all weights 1; None: it is computed.

    Example:
        >>> rows, weights = torch.rand(3, 8), torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0])
        >>> torch.allclose(WeightedGrams(rows).under(weights), weighted_gram(rows, weights))
        True
    """

    def __init__(self, rows: Tensor, whole: Tensor | None = None) -> None:
        self.rows, self.whole = rows, weighted_gram(rows) if whole is None else whole
        ones = torch.ones_like(rows[0])
        self._fixed = [(torch.zeros_like(ones), torch.zeros_like(self.whole)), (ones, self.whole)]
        self._last = self._fixed[1]

    def under(self, weights: Tensor) -> Tensor:
        """The inner products of all rows, each value counted by its weight."""
        known, gram = min([*self._fixed, self._last], key=lambda each: int((each[0] != weights).sum()))
        changed = known != weights
        if changed.any():
            gram = gram + weighted_gram(self.rows[:, changed], weights[changed].double() - known[changed].double())
        self._last = weights, gram
        return gram


def weighted_products(rows: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The inner products ``[targets, rows]`` of targets and rows, each value counted by its weight."""
    products = torch.zeros(len(targets), len(rows), dtype=torch.float64, device=rows.device)
    for place in range(0, rows.shape[1], _BLOCK):
        part = targets[:, place : place + _BLOCK].double()
        part = part if weights is None else part * weights[place : place + _BLOCK].double()
        products.addmm_(part, rows[:, place : place + _BLOCK].double().T)
    return products


@dataclass(frozen=True, eq=False)
class Fit:
    """Updates as weighted sums of candidates' gradients.

    Args:
        coefficients: ``[updates, rows]``, beyond what the mean of all rows explains.
        of_mean: ``[updates]``, the coefficient of that mean.
        penalty: ``[updates]``, the ratio of noise to signal at which they were fitted.
        ratios: ``[updates, rows]``, the logarithm of how much more likely the update is if the row is part of it.
        cost: ``[updates]``, minus twice the logarithm of the marginal likelihood, up to a constant.
    """

    coefficients: Tensor
    of_mean: Tensor
    penalty: Tensor
    ratios: Tensor
    cost: Tensor

    def of(self, places: list[int]) -> "Fit":
        """The fits of some of the updates."""
        return Fit(*(getattr(self, field.name)[places] for field in fields(self)))

    def with_those(self, places: list[int], others: "Fit") -> "Fit":
        """These fits with others in these places."""
        parts = {field.name: getattr(self, field.name).clone() for field in fields(self)}
        for name, part in parts.items():
            part[places] = getattr(others, name)
        return Fit(**parts)


@dataclass(frozen=True, eq=False)
class _Point:
    """A fit of one update at one penalty, and the Cholesky factor it comes from."""

    penalty: float
    cost: float
    signal: Tensor
    coefficients: Tensor
    factor: Tensor


class DualRidge:
    r"""The model that an update is a share of the mean of all rows, some of their deviations from it, and noise.

    .. math:: u \sim N(\beta \bar g, \ \Sigma), \qquad \Sigma = \tau^2 (G^T G + \lambda I)

    G holds the rows without their components along the mean :math:`\bar g`, whose coefficient :math:`\beta` is free.
    :math:`\tau^2 G^T G` stands for the members and for the rest of the batch, which looks like the candidates without
    being among them; :math:`\tau^2 \lambda` is the noise. Both are chosen for each update by its marginal likelihood,
    with the noise at least as large as it is known to be. A row is then judged by the likelihood ratio of "this row is
    part of the update with weight `share`" against "it is not", in which it does not count for the covariance itself:

    .. math:: \ell_i = share \cdot g_i^T \Sigma_{-i}^{-1} u - \tfrac12 share^2 \, g_i^T \Sigma_{-i}^{-1} g_i, \qquad
        g_i^T \Sigma_{-i}^{-1} v = \frac{g_i^T \Sigma^{-1} v}{1 - h_i}, \quad h_i = [K (K + \lambda I)^{-1}]_{ii}

    with the Gram matrix :math:`K = G G^T`, so that :math:`\tau^2 g_i^T \Sigma^{-1} u` are the coefficients of ridge
    regression, :math:`(K + \lambda I)^{-1} G u`. Nothing depends on the number of values but through inner products.

    Args:
        gram: ``[rows, rows]``, the inner products of the rows, in double precision.
        values: how many values a row has (those of weight 0 left out).

    Example:
        >>> rows = torch.eye(4, 8)
        >>> update = (rows[:1] + rows[1:2]) / 2
        >>> ridge = DualRidge(weighted_gram(rows), values=8)
        >>> fit = ridge.fit(weighted_products(rows, update), update.square().sum(1), share=0.5)
        >>> (fit.ratios[0] > 0).tolist()
        [True, True, False, False]
    """

    def __init__(self, gram: Tensor, values: int) -> None:
        self.values = values
        self.along_mean = gram.mean(1)
        self.mean_square = self.along_mean.mean().clamp_min(_TINY)
        self.centred = gram - torch.outer(self.along_mean, self.along_mean) / self.mean_square

    @cached_property
    def decomposition(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues, in ascending order, and the eigenvectors of the centred Gram matrix."""
        eigenvalues, vectors = torch.linalg.eigh(self.centred)
        return eigenvalues.clamp_min(0), vectors

    def near(
        self,
        products: Tensor,
        squares: Tensor,
        penalty: Tensor,
        *,
        share: float,
        least_noise: Tensor,
        steps: Sequence[float] = FINE,
        final: bool = True,
    ) -> Fit:
        """Fit one update with a penalty that is searched for downhill from a guess.

        It takes a few Cholesky factors where `fit` takes all eigenvectors, which cost as much as twenty of them.

        Args:
            products: ``[1, rows]``, as for `fit`.
            squares: ``[1]``, as for `fit`.
            penalty: ``[1]``, where the search begins: the penalty of a similar fit.
            share: as for `fit`.
            least_noise: ``[1]``, as for `fit`.
            steps: powers of ten, each taken as long as it helps; none: the guess is the penalty.
            final: whether to compute the ratios; otherwise they are zero.
        """
        along_mean, scale = products.mean(1), float(self.centred.diagonal().sum().clamp_min(_TINY))
        deviations = products - torch.outer(along_mean, self.along_mean) / self.mean_square
        length = (squares - along_mean.square() / self.mean_square).clamp_min(0)
        lowest, highest = scale * float(_RATIOS[0]), scale * float(_RATIOS[-1])

        def at(penalty: float) -> _Point | None:
            ridged = self.centred.clone()
            ridged.diagonal().add_(penalty)
            factor, failed = torch.linalg.cholesky_ex(ridged)
            if failed:
                return None
            coefficients = torch.cholesky_solve(deviations.T, factor).T
            unexplained = (length - (coefficients * deviations).sum(1)).clamp_min(0) / penalty
            determinant = 2 * factor.diagonal().log().sum() + (self.values - len(factor)) * math.log(penalty)
            cost, signal = self._cost(penalty, unexplained, determinant, least_noise)
            return _Point(penalty, float(cost), signal, coefficients, factor)

        best = at(min(max(float(penalty), lowest), highest))
        while best is None:  # too small for the rounding of this matrix
            penalty = penalty.clamp_min(lowest) * 10
            best = at(float(penalty))
        for exponent in steps:
            step = 10.0**exponent
            while lowest <= best.penalty * step <= highest and (tried := at(best.penalty * step)):
                if tried.cost >= best.cost:
                    break
                best = tried
        coefficients, ratios = best.coefficients, torch.zeros_like(best.coefficients)
        if final:
            leverages = 1 - best.penalty * torch.cholesky_inverse(best.factor).diagonal()
            ratios = self._ratios(coefficients, leverages, best.signal, share)
        of_mean = (along_mean - coefficients @ self.along_mean) / self.mean_square
        return Fit(coefficients, of_mean, penalty.new_tensor([best.penalty]), ratios, squares.new_tensor([best.cost]))

    def _cost(self, penalty: float, length: Tensor, determinant: Tensor, least_noise: Tensor) -> tuple[Tensor, Tensor]:
        """Minus twice the logarithm of the marginal likelihood, and the most likely variance of the signal."""
        variance = (length / self.values).maximum(least_noise / penalty).clamp_min(_LEAST_VARIANCE)
        return self.values * variance.log() + length / variance + determinant, variance

    @staticmethod
    def _ratios(coefficients: Tensor, leverages: Tensor, signal: Tensor, share: float) -> Tensor:
        others = (1 - leverages).clamp_min(1e-12) * signal[:, None]
        return (share * coefficients - share**2 / 2 * leverages) / others

    def fit(self, products: Tensor, squares: Tensor, *, share: float, least_noise: Tensor | None = None) -> Fit:
        """Fit updates.

        Args:
            products: ``[updates, rows]``, the inner products of updates and rows.
            squares: ``[updates]``, the updates' squared lengths.
            share: the weight with which a member is part of the update.
            least_noise: ``[updates]``, the known variance of noise on a value of weight 1; None: it is not known.
        """
        least_noise = torch.zeros_like(squares) if least_noise is None else least_noise
        eigenvalues, vectors = self.decomposition
        largest = eigenvalues[-1].clamp_min(_TINY)
        along_mean = products.mean(1)
        rotated = (products - torch.outer(along_mean, self.along_mean) / self.mean_square) @ vectors
        # What rounding leaves of directions in which the rows do not differ must not pass for signal.
        known = eigenvalues > 1e-12 * largest
        explained = torch.where(known, rotated.square() / eigenvalues.clamp_min(1e-300), 0)
        outside = (squares - along_mean.square() / self.mean_square - explained.sum(1)).clamp_min(0)

        best = torch.full_like(squares, torch.inf)
        signal, ridge = torch.ones_like(squares), torch.ones_like(squares)
        for penalty in (largest * _RATIOS.to(eigenvalues)).tolist():
            # u^T (G^T G + penalty I)^-1 u: what the rows explain, and what lies outside all of them.
            length = (explained / (eigenvalues + penalty)).sum(1) + outside / penalty
            determinant = (eigenvalues + penalty).log().sum() + (self.values - len(eigenvalues)) * math.log(penalty)
            cost, variance = self._cost(penalty, length, determinant, least_noise)
            better = cost < best
            best, signal = torch.where(better, cost, best), torch.where(better, variance, signal)
            ridge = torch.where(better, penalty, ridge)

        coefficients = (rotated / (eigenvalues + ridge[:, None])) @ vectors.T
        leverages = (eigenvalues / (eigenvalues + ridge[:, None])) @ vectors.square().T
        ratios = self._ratios(coefficients, leverages, signal, share)
        of_mean = (along_mean - coefficients @ self.along_mean) / self.mean_square
        return Fit(coefficients, of_mean, ridge, ratios, best)

    def matched(self, products: Tensor, squares: Tensor) -> Tensor:
        """The matched filter: inner products with the rows' deviations from their mean, relative to their lengths.

        Args:
            products: ``[updates, rows]``, the inner products of updates and rows.
            squares: ``[rows]``, the rows' squared lengths.
        """
        along_mean = products.mean(1)
        lengths = (squares - self.along_mean.square() / self.mean_square).clamp_min(_LEAST_VARIANCE).sqrt()
        return (products - torch.outer(along_mean, self.along_mean) / self.mean_square) / lengths
