"""How well the decoys of Gradient Dropout can be told from true values."""

import math

import torch
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import InputError

BINS = 64


def decoy_scores(sent: Tensor, keep: float, std: float) -> Tensor:
    """How likely each coordinate of a layer is a decoy, to an attacker who knows the defense but not the mask.

    The attacker counts how many coordinates fall into each of 64 equally full bins of magnitude, computes how many
    decoys should be among them, and takes the ratio: Bayes' rule with the histogram of what arrived as the evidence. A
    flat score means that the decoys are hidden.

    Args:
        sent: one layer after Gradient Dropout.
        keep: probability of sharing a coordinate.
        std: standard deviation of the layer's decoys.

    Example:
        >>> sent = torch.cat([torch.full((80,), 5.0), torch.full((20,), 0.1)])
        >>> scores = decoy_scores(sent, keep=0.8, std=0.1)
        >>> bool(scores[-1] > scores[0])
        True
    """
    keep = checks.number("decoy_scores", "keep", keep, above=0, high=1)
    std = checks.number("decoy_scores", "std", std, above=0)
    magnitudes = sent.detach().flatten().double().abs()
    edges = magnitudes.sort().values[torch.linspace(0, len(magnitudes) - 1, BINS + 1).long()]
    edges = torch.unique(edges)
    # Bin i reaches from edge i up to edge i + 1; the last one has no upper edge.
    bins = torch.searchsorted(edges, magnitudes, right=True) - 1
    arrived = bins.bincount(minlength=len(edges))
    decoys_below = torch.cat([torch.erf(edges / (std * math.sqrt(2))), edges.new_ones(1)])
    expected_decoys = (1 - keep) * len(magnitudes) * decoys_below.diff()
    return (expected_decoys / arrived.clamp(min=1))[bins].view(sent.shape)


def decoy_auc(gradient: Tensor, sent: Tensor, keep: float, std: float) -> float:
    """The area under the ROC curve of an attacker who tells decoys from values by `decoy_scores`.

    0.5 is chance, 1 is certainty. The scores are the attacker's; the true gradient is used only to judge them.

    Args:
        gradient: the layer before Gradient Dropout.
        sent: the layer after it.
        keep: probability of sharing a coordinate.
        std: standard deviation of the layer's decoys.

    Example:
        >>> import gradveil
        >>> gradient = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
        >>> dropout = gradveil.defense("gradient-dropout", keep=0.8, std=0.005)
        >>> sent = dropout.perturb({"w": gradient}, generator=torch.Generator().manual_seed(1))["w"]
        >>> decoy_auc(gradient, sent, keep=0.8, std=0.005) > 0.98
        True
    """
    dropped = (sent != gradient / keep).flatten()
    values, decoys = int((~dropped).sum()), int(dropped.sum())
    if not values or not decoys:
        raise InputError(f"decoy_auc: expected values and decoys, got {values} values and {decoys} decoys")
    scores = decoy_scores(sent, keep, std).flatten()
    # Mann-Whitney: from the ranks of the decoys, where equal scores share their mean rank.
    _, distinct, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2
    return float((ranks[distinct][dropped].sum() - decoys * (decoys + 1) / 2) / (decoys * values))
