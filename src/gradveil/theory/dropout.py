"""What Gradient Dropout does to an update, in expectation."""

import math

from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import ParameterError


def dropout_distance(gradient: Tensor, keep: float, std: float) -> float:
    r"""The expected squared distance per coordinate between a layer's gradient and its Gradient Dropout.

    .. math:: E|\tilde g - g|^2 / d = \frac{1 - keep}{keep} \overline{g^2} + (1 - keep) std^2

    **Correction**: the paper's appendix has (1 - keep)^2 in the second term. Its theorems 2 and 3 neglect the noise of
    the mask and are not included here.

    Args:
        gradient: a layer's gradient.
        keep: probability of sharing a coordinate.
        std: standard deviation of the decoys.

    References:
        Sotthiwat et al., Safeguarding Federated Learning from Data Reconstruction Attacks via Gradient Dropout.

    Example:
        >>> import torch
        >>> round(dropout_distance(torch.tensor([1.0, -3.0]), keep=0.8, std=0.1), 6)
        1.252
    """
    keep, std = _keep(keep), checks.number("dropout_distance", "std", std, low=0)
    return (1 - keep) / keep * float(gradient.double().square().mean()) + (1 - keep) * std**2


def sufficient_keep(gap: float, std: float) -> float:
    r"""The value of `keep` below which the expected squared distance per coordinate exceeds `gap` for any gradient.

    .. math:: keep < 1 - gap / std^2

    The condition is sufficient, not necessary, because it counts only the decoys' noise. For a gradient near zero, only
    the decoys' std matters.

    Example:
        >>> round(sufficient_keep(gap=0.005, std=0.1), 6)
        0.5
    """
    gap = checks.number("sufficient_keep", "gap", gap, low=0)
    std = checks.number("sufficient_keep", "std", std, above=0)
    if gap >= std**2:
        raise ParameterError(
            f"sufficient_keep: a gap of {gap:g} needs decoys of a variance above it, got {std**2:g}; "
            f"raise std above {math.sqrt(gap):g}"
        )
    return 1 - gap / std**2


def dropout_cosine_limit(keep: float) -> float:
    r"""The largest cosine between a gradient and its Gradient Dropout, for a spread-out gradient of many coordinates.

    .. math:: \cos(g, \tilde g) \to 1 / \sqrt{1 / keep + (1 - keep) d\, std^2 / |g|^2} \le \sqrt{keep}

    It holds in the limit for, say, Gaussian gradients, but **not** for a gradient dominated by a few coordinates: if
    one dominates, the cosine is near 1 with probability `keep`.

    Example:
        >>> round(dropout_cosine_limit(0.81), 12)
        0.9
    """
    return math.sqrt(_keep(keep))


def _keep(keep: float) -> float:
    return checks.number("theory", "keep", keep, above=0, high=1)
