"""Which reconstruction belongs to which original."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.metrics.images import check_pair


def match(originals: Tensor, reconstructions: Tensor) -> Tensor:
    """The order of `reconstructions` that brings their total squared error to `originals` to its minimum.

    A gradient says nothing about the order of the images in its batch, so an attack returns them in any. The
    assignment is optimal (Hungarian method), and the same one serves every metric.

    Args:
        originals: float images [N, C, H, W] in [0, 1].
        reconstructions: likewise.

    Returns:
        A permutation p, int64 [N]: ``reconstructions[p[i]]`` belongs to ``originals[i]``.

    >>> originals = torch.tensor([0.0, 0.5, 1.0]).reshape(3, 1, 1, 1)
    >>> match(originals, originals[[2, 0, 1]])
    tensor([1, 2, 0])
    """
    check_pair("match", originals, reconstructions)
    x, y = (images.detach().double().flatten(1) for images in (originals, reconstructions))
    # The faster way of cdist, by matrix products, loses the small distances that decide here.
    cost = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()
    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(columns, dtype=torch.int64, device=originals.device)
