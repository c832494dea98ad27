"""What pruning does to an update, and what error feedback holds back."""

import math
from collections.abc import Mapping

from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import InputError

Layers = Mapping[str, Tensor]


def pruned_share(gradients: Layers, sent: Layers) -> float:
    r"""The share of a gradient's energy that was held back, over all layers together.

    .. math:: \gamma_1 = |g - sent|^2 / |g|^2

    For a pruning defense it determines both the distance and the angle exactly: see `pruning_distance` and
    `pruning_cosine`. **Correction**: the paper's degradation terms, eps + sqrt(gamma_1) |g| and
    eps + (1 - eps) sqrt(gamma_1), bound the attacker's error from *above*. An upper bound on an attacker's error
    guarantees nothing, so they are not included here.

    Args:
        gradients: the gradients before pruning, by layer.
        sent: what was sent of them.

    References:
        Xue et al., Revisiting Gradient Pruning, AAAI 2024.

    Example:
        >>> import torch
        >>> pruned_share({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 0.0])})
        0.64
    """
    if gradients.keys() != sent.keys():
        differing = sorted(gradients.keys() ^ sent.keys())
        raise InputError(f"pruned_share: expected the same layers in both, but they differ in {differing}")
    total = _energy(gradients)
    if total == 0:
        raise InputError("pruned_share: expected a gradient that is not zero everywhere")
    return _energy({name: value - sent[name] for name, value in gradients.items()}) / total


def pruning_distance(share: float, norm: float) -> float:
    """``|g - sent| = sqrt(gamma_1) |g|``: how far an update with this `pruned_share` lies from the gradient.

    >>> pruning_distance(0.64, norm=5.0)
    4.0
    """
    return math.sqrt(_share(share)) * checks.number("pruning_distance", "norm", norm, low=0)


def pruning_cosine(share: float) -> float:
    """``cos(g, sent) = sqrt(1 - gamma_1)``: the cosine of the angle between a gradient and its pruned update.

    >>> round(pruning_cosine(0.64), 12)
    0.6
    """
    return math.sqrt(1 - _share(share))


def residual_bound(share: float, norm: float) -> float:
    r"""An upper bound on what error feedback holds back at any time.

    .. math:: |e_t|^2 \le \frac{3 \gamma (2 + \gamma)}{2 (1 - \gamma)^2} G^2

    It follows from unrolling ``|e_{t+1}|^2 <= gamma |g_t + e_t|^2`` and needs **one gamma < 1 for every
    P_t = g_t + e_t**, the values that are pruned. **Correction**: the paper takes the gamma of the gradient, which is
    wrong: with dual pruning on a constant gradient the largest coordinates are never sent, their residual grows without
    bound, and the gamma of P_t goes to 1 while that of g does not change.

    Args:
        share: the largest `pruned_share` of any P_t; below 1.
        norm: G, the largest norm of any gradient.

    References:
        Xue et al., AAAI 2024, appendix; Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019.

    Example:
        >>> residual_bound(0.5, norm=1.0)
        7.5
    """
    share = checks.number("residual_bound", "share", share, low=0, below=1)
    norm = checks.number("residual_bound", "norm", norm, low=0)
    return 3 * share * (2 + share) / (2 * (1 - share) ** 2) * norm**2


def _share(share: float) -> float:
    return checks.number("theory", "share", share, low=0, high=1)


def _energy(layers: Layers) -> float:
    return math.fsum(float(value.double().square().sum()) for value in layers.values())
