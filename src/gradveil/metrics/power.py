"""How much of an update a defense replaced."""

import math
from collections.abc import Mapping

from torch import Tensor


def relative_power(gradients: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> float:
    r"""The squared length of what was changed, in units of that of the gradient.

    .. math:: power = |u - g|^2 / |g|^2

    0: nothing was changed; 1: as much as if nothing had been sent. A gradient of zeros has 0 or infinity.

    Args:
        gradients: what the client computed.
        shared: what can be seen of it, the same layers.

    >>> import torch
    >>> relative_power({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 0.0])})
    0.64
    """
    changed = math.fsum(float((shared[name].double() - g.double()).square().sum()) for name, g in gradients.items())
    whole = math.fsum(float(value.double().square().sum()) for value in gradients.values())
    return changed / whole if whole else (math.inf if changed else 0.0)
