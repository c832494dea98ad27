"""Removing noise of known variance from an aggregate by its spectrum."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import InputError
from gradveil.update import Update

ASPECT = 8.0


def compensate(gradients: Mapping[str, Tensor], variance: float, *, aspect: float = ASPECT) -> Update:
    r"""Remove independent noise of known variance from gradients whose coordinates are correlated.

    The values of all layers, in order, fill a matrix C of v rows and w columns with v / w about `aspect`; the last row
    is padded with zeros. If C were pure noise, the eigenvalues of :math:`C^T C / v` would lie in the Marchenko-Pastur
    band

    .. math:: [(1 - \sqrt{w / v})^2, (1 + \sqrt{w / v})^2] \cdot variance

    so the eigenvectors whose eigenvalues lie there are dropped and C is projected onto the others. Correlated signal
    is concentrated in a few eigenvectors with large eigenvalues and is kept, and so is the noise in these directions.

    It helps only as far as the signal is correlated, and it throws away signal that looks like noise. A small distance
    to the clean gradients is therefore not enough (dropping everything may achieve that): look at the cosine as well.

    Args:
        gradients: the noisy gradients or aggregate, by parameter name; not changed.
        variance: variance of the noise on one value. For a weighted mean of m updates, each with independent noise of
            variance s2 on a share q of its values, that is ``q * sum(weight_i^2) * s2``.
        aspect: number of rows per column, at least 1; the paper finds 6 to 12 enough.

    References:
        Risk-sliced perturbation with global compensation, section V. **Corrections**: the paper prints the variance
        of a sum of updates, m^2 times that of their mean with equal weights, whose band misses the noise; and here the
        band is computed from the actual shape of the matrix, not from the requested aspect.

    Example:
        >>> noise = torch.randn(20_000, generator=torch.manual_seed(0))
        >>> remaining = compensate({"w": noise}, variance=1.0)["w"]
        >>> bool(remaining.square().sum() < 0.05 * noise.square().sum())
        True
    """
    checks.number("compensate", "variance", variance, low=0)
    checks.number("compensate", "aspect", aspect, low=1)
    if not gradients:
        raise InputError("compensate: expected gradients by parameter name, got none")
    meta = gradients.meta if isinstance(gradients, Update) else None
    flat = torch.cat([value.reshape(-1) for value in gradients.values()])
    if not torch.isfinite(flat).all():
        raise InputError("compensate: gradients must be finite, got NaN or Inf")
    if variance == 0 or flat.numel() == 0:
        return Update({name: value.clone() for name, value in gradients.items()}, meta)
    columns = max(1, round(math.sqrt(flat.numel() / aspect)))
    rows = math.ceil(flat.numel() / columns)
    matrix = torch.zeros(rows, columns, dtype=flat.dtype, device=flat.device)
    matrix.view(-1)[: flat.numel()] = flat
    # In double precision; otherwise weak directions would drown in the rounding errors of strong ones.
    wide = matrix.double()
    eigenvalues, eigenvectors = torch.linalg.eigh(wide.T @ wide / rows)
    low, high = noise_band(rows, columns, variance)
    noise = eigenvectors[:, (low <= eigenvalues) & (eigenvalues <= high)]
    kept = eigenvectors[:, (eigenvalues < low) | (eigenvalues > high)]
    # Project onto what is kept or subtract the noise, whichever takes fewer vectors.
    wide = (wide @ kept) @ kept.T if kept.shape[1] < noise.shape[1] else wide - (wide @ noise) @ noise.T
    cleaned = wide.view(-1)[: flat.numel()].to(flat.dtype)
    parts = torch.split(cleaned, [value.numel() for value in gradients.values()])
    return Update(
        {name: part.view(value.shape).clone() for (name, value), part in zip(gradients.items(), parts, strict=True)},
        meta,
    )


def noise_band(rows: int, columns: int, variance: float) -> tuple[float, float]:
    """Where the eigenvalues of R^T R / rows lie if R holds independent values of this variance (Marchenko-Pastur).

    >>> noise_band(400, 100, 1.0)
    (0.25, 2.25)
    """
    root = math.sqrt(columns / rows)
    return (1 - root) ** 2 * variance, (1 + root) ** 2 * variance
