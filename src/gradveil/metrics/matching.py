"""Which reconstruction belongs to which original."""

import torch
from torch import Tensor

from gradveil.core.errors import InputError
from gradveil.core.extras import OptionalModule

optimize = OptionalModule("scipy.optimize", "matching reconstructions to originals")


def match(originals: Tensor, reconstructions: Tensor) -> Tensor:
    """The order of `reconstructions` that minimises their total squared error to `originals`.

    A gradient says nothing about the order of the examples in its batch, so an attack returns them in any order. The
    assignment is optimal (Hungarian method), and the same one is used for every metric.

    Args:
        originals: numbers ``[N, *input_shape]``.
        reconstructions: finite numbers of the same shape.

    Returns:
        A permutation p, int64 [N]: ``reconstructions[p[i]]`` belongs to ``originals[i]``.

    >>> originals = torch.tensor([0.0, 0.5, 1.0]).reshape(3, 1, 1, 1)
    >>> match(originals, originals[[2, 0, 1]])
    tensor([1, 2, 0])
    """
    if originals.shape != reconstructions.shape or not bool(reconstructions.isfinite().all()):
        raise InputError(
            "match: originals and reconstructions must have the same shape and finite values, got "
            f"{list(originals.shape)} and {list(reconstructions.shape)}; `Modality.repaired` makes values finite"
        )
    x, y = (examples.detach().double().flatten(1) for examples in (originals, reconstructions))
    # The faster mode of cdist, by matrix products, loses the small distances that matter here.
    cost = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()
    _, columns = optimize.linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(columns, dtype=torch.int64, device=originals.device)
