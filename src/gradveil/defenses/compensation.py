"""Taking known noise out of an aggregate by the spectrum that noise has."""

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

    The values of all layers, in order, fill a matrix C of v rows and w columns with v / w about `aspect`; the end of
    the last row is zero. If C were noise alone, the eigenvalues of :math:`C^T C / v` would lie in the Marchenko-Pastur
    band

    .. math:: [(1 - \sqrt{w / v})^2, (1 + \sqrt{w / v})^2] \cdot variance

    so the eigenvectors whose eigenvalue lies there are dropped and C is projected onto the others. Correlated signal
    sits in few eigenvectors with large eigenvalues and stays; so does its share of the noise.

    It helps by as much as the signal is correlated, and it throws away signal that looks like noise. A small distance
    to the clean gradients is therefore not enough (dropping everything has one too): look at the cosine as well.

    Args:
        gradients: the noisy gradients or aggregate, by parameter name; not touched.
        variance: of the noise of one value. For a weighted mean of m updates with independent noise of variance
            s2 on a share q of the values each, that is ``q * sum(weight_i^2) * s2``.
        aspect: rows by columns, at least 1; the paper finds 6 to 12 enough.

    References:
        Risk-sliced perturbation with global compensation, section V. **Corrections**: the paper prints the variance
        of a sum of updates, m^2 times that of their mean with equal weights, whose band misses the noise; and the
        band here is that of the matrix as it is, not of the wished-for aspect.

    Example:
        >>> noise = torch.randn(20_000, generator=torch.manual_seed(0))
        >>> left = compensate({"w": noise}, variance=1.0)["w"]
        >>> bool(left.square().sum() < 0.05 * noise.square().sum())
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
    # In double precision, or the noise of weak directions would drown in the rounding of strong ones.
    wide = matrix.double()
    eigenvalues, eigenvectors = torch.linalg.eigh(wide.T @ wide / rows)
    low, high = noise_band(rows, columns, variance)
    noise = eigenvectors[:, (low <= eigenvalues) & (eigenvalues <= high)]
    kept = eigenvectors[:, (eigenvalues < low) | (eigenvalues > high)]
    # Onto the rest, or off the noise: whichever has fewer vectors.
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
