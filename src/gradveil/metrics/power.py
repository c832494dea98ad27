"""How much of an update a defense changed."""

import math
from collections.abc import Mapping

from torch import Tensor


def relative_power(gradients: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> float:
    r"""The squared length of the change that a defense made, in units of that of the gradient.

    .. math:: power = |u - g|^2 / |g|^2

    0: nothing was changed; 1: as much as if nothing had been sent. For a gradient of zeros it is 0 or infinity.

    Args:
        gradients: what the client computed.
        shared: what can be seen of it, with the same layers.

    >>> import torch
    >>> relative_power({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 0.0])})
    0.64
    """
    change = math.fsum(float((shared[name].double() - g.double()).square().sum()) for name, g in gradients.items())
    length = math.fsum(float(value.double().square().sum()) for value in gradients.values())
    return change / length if length else (math.inf if change else 0.0)
