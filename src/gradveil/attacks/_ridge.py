"""Ridge regression of updates on the gradients of candidates, in the dual: everything follows from inner products."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST_VARIANCE = 1e-200
"""Keeps the ratios finite if an update is zero."""
_BLOCK = 1 << 13
"""Values of the rows that are multiplied at a time, in double precision."""
_RATIOS = torch.logspace(-12, 3, 61, dtype=torch.float64)
"""Ratios of noise to signal that are tried, in units of the largest eigenvalue of the Gram matrix."""


def weighted_gram(rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """The inner products ``[rows, rows]`` of all rows, each value counted by its weight, in double precision.

    >>> weighted_gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([1.0, 3.0]))
    tensor([[13.,  6.],
            [ 6.,  3.]], dtype=torch.float64)
    """
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for place in range(0, rows.shape[1], _BLOCK):
        part = rows[:, place : place + _BLOCK].double()
        gram.addmm_(part if weights is None else part * weights[place : place + _BLOCK].double(), part.T)
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
        ratios: ``[updates, rows]``, the logarithm of how much more likely the update is if the row is part of it.
        cost: ``[updates]``, minus twice the logarithm of the marginal likelihood, up to a constant.
    """

    coefficients: Tensor
    of_mean: Tensor
    ratios: Tensor
    cost: Tensor


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
        >>> rows = torch.eye(3, 8)
        >>> update = (rows[:1] + rows[1:2]) / 2
        >>> ridge = DualRidge(weighted_gram(rows), values=8)
        >>> fit = ridge.fit(weighted_products(rows, update), update.square().sum(1), share=0.5)
        >>> (fit.ratios[0] > 0).tolist()
        [True, True, False]
    """

    def __init__(self, gram: Tensor, values: int) -> None:
        tiny = torch.finfo(torch.float64).tiny
        self.values = values
        self.along_mean = gram.mean(1)
        self.mean_square = self.along_mean.mean().clamp_min(tiny)
        centred = gram - torch.outer(self.along_mean, self.along_mean) / self.mean_square
        eigenvalues, self.vectors = torch.linalg.eigh(centred)
        self.eigenvalues = eigenvalues.clamp_min(0)
        self.largest = self.eigenvalues[-1].clamp_min(tiny)

    def fit(self, products: Tensor, squares: Tensor, *, share: float, least_noise: Tensor | None = None) -> Fit:
        """Fit updates.

        Args:
            products: ``[updates, rows]``, the inner products of updates and rows.
            squares: ``[updates]``, the updates' squared lengths.
            share: the weight with which a member is part of the update.
            least_noise: ``[updates]``, the known variance of noise on a value of weight 1; None: it is not known.
        """
        least_noise = torch.zeros_like(squares) if least_noise is None else least_noise
        values, eigenvalues = self.values, self.eigenvalues
        along_mean = products.mean(1)
        rotated = (products - torch.outer(along_mean, self.along_mean) / self.mean_square) @ self.vectors
        # What rounding leaves of directions in which the rows do not differ must not pass for signal.
        known = eigenvalues > 1e-12 * self.largest
        explained = torch.where(known, rotated.square() / eigenvalues.clamp_min(1e-300), 0)
        outside = (squares - along_mean.square() / self.mean_square - explained.sum(1)).clamp_min(0)

        best = torch.full_like(squares, torch.inf)
        signal, ridge = torch.ones_like(squares), torch.ones_like(squares)
        for penalty in (self.largest * _RATIOS.to(eigenvalues)).tolist():
            # u^T (G^T G + penalty I)^-1 u: what the rows explain, and what lies outside all of them.
            length = (explained / (eigenvalues + penalty)).sum(1) + outside / penalty
            variance = (length / values).maximum(least_noise / penalty).clamp_min(_LEAST_VARIANCE)
            determinant = (eigenvalues + penalty).log().sum() + (values - len(eigenvalues)) * math.log(penalty)
            cost = values * variance.log() + length / variance + determinant
            better = cost < best
            best, signal = torch.where(better, cost, best), torch.where(better, variance, signal)
            ridge = torch.where(better, penalty, ridge)

        coefficients = (rotated / (eigenvalues + ridge[:, None])) @ self.vectors.T
        leverages = (eigenvalues / (eigenvalues + ridge[:, None])) @ self.vectors.square().T
        others = (1 - leverages).clamp_min(1e-12) * signal[:, None]
        ratios = (share * coefficients - share**2 / 2 * leverages) / others
        of_mean = (along_mean - coefficients @ self.along_mean) / self.mean_square
        return Fit(coefficients, of_mean, ratios, best)

    def matched(self, products: Tensor, squares: Tensor) -> Tensor:
        """The matched filter: inner products with the rows' deviations from their mean, relative to their lengths.

        Args:
            products: ``[updates, rows]``, the inner products of updates and rows.
            squares: ``[rows]``, the rows' squared lengths.
        """
        along_mean = products.mean(1)
        lengths = (squares - self.along_mean.square() / self.mean_square).clamp_min(_LEAST_VARIANCE).sqrt()
        return (products - torch.outer(along_mean, self.along_mean) / self.mean_square) / lengths
