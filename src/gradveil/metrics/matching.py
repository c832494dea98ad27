"""Which reconstruction belongs to which original."""

import torch
from torch import Tensor

from gradveil.core.errors import InputError
from gradveil.core.extras import OptionalModule
from gradveil.modality import IMAGE, Modality

optimize = OptionalModule("scipy.optimize", "matching reconstructions to originals")


def match(originals: Tensor, reconstructions: Tensor, modality: Modality = IMAGE) -> Tensor:
    """The order of `reconstructions` that minimises their total distance to `originals`: of images, the squared error.

    A gradient says nothing about the order of the examples in its batch, so an attack returns them in any order. The
    assignment is optimal (Hungarian method), and the same one is used for every metric.

    Args:
        originals: numbers ``[N, *input_shape]``.
        reconstructions: finite numbers of the same shape.
        modality: what the examples are; it has the distance.

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
    cost = modality.distances(originals, reconstructions)
    _, columns = optimize.linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(columns, dtype=torch.int64, device=originals.device)
