"""Separating the examples of a batch at the classifier, by the zeros that a ReLU leaves in what it is fed."""

from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.core.errors import InputError

_SAMPLES_AT_ONCE = 4096
_PATIENCE = 10_000  # times 2^(b - 1), which suffices for an example that leaves half of the places at zero
_ZERO = 1e-4  # of the largest feature: updates have seven digits, and the smallest singular value takes some of them
_SPARE_ZEROS = 2  # an example is zero in at least this many places more than those that it was made to be zero in
_SAME = 0.999  # two directions are the same if the cosine of the angle between them exceeds this
_REFINEMENTS = 3
_FAINT = 1e-6  # a singular value below this share of the largest is rounding


class Examples(NamedTuple):
    """What the classifier was fed and the error signal at its outputs, for each example of a batch."""

    features: Tensor  # [examples, features]
    signals: Tensor  # [examples, logits]; those of the mean loss
    labels: Tensor  # [examples]


def separate(owner: str, weight: Tensor, bias: Tensor, examples: int, generator: torch.Generator) -> Examples:
    r"""Take the gradient of a classifier apart into those of single examples.

    The gradient of the weight is the sum of products of each example's error signal and features, and so known up to an
    invertible matrix Q:

    .. math:: \nabla W = \sum_i k_i a_i^T = U S V^T, \qquad a_i = V q_i

    Features that come out of a ReLU are zero in many places and negative in none. Of b - 1 random places an example
    leaves all at zero with a probability of about :math:`2^{1-b}`, and then :math:`q_i` is the one vector that these
    rows of V map to zero: as in SPEAR, but on the other side of the product. A vector of the wrong sort has hardly more
    than b - 1 zeros, and negative features. The length of each :math:`a_i` follows from the gradient of the bias,
    :math:`\sum_i k_i`. Everything is exact, and unlike SPEAR it needs no layer that is fed the input.

    Args:
        owner: the attack, for messages.
        weight: gradient of the classifier's weight, ``[logits, features]``, in double precision.
        bias: gradient of its bias, ``[logits]``.
        examples: the size of the batch.
        generator: draws the places.

    Example:
        >>> features = torch.tensor([[1.0, 0, 0, 2, 0, 3], [0, 2, 1, 0, 0, 1]]).repeat_interleave(8, 1).double()
        >>> features = features * torch.rand(features.shape, generator=torch.manual_seed(0)).double()
        >>> signals = torch.tensor([[-0.4, 0.3, 0.1], [0.2, 0.1, -0.3]], dtype=torch.float64)
        >>> found = separate("demo", signals.T @ features, signals.sum(0), 2, torch.manual_seed(0))
        >>> order = found.labels.argsort()
        >>> torch.allclose(found.features[order], features), torch.allclose(found.signals[order], signals)
        (True, True)
    """
    _, sizes, right = torch.linalg.svd(weight, full_matrices=False)
    rank = int((sizes > _FAINT * sizes[:1]).sum())
    if rank != examples:
        raise InputError(
            f"{owner}: needs a gradient of the classifier whose rank is the size of the batch, {examples}, got rank "
            f"{rank}; it has that rank if there are more classes than examples and no defense"
        )
    places = right[:rank].T  # [features, rank]
    heard = places[places.norm(dim=1) > _ZERO * float(places.norm(dim=1).max())]
    directions, drawn = places.new_zeros(0, rank), 0
    while len(directions) < rank and drawn < _PATIENCE * 2 ** (rank - 1) and len(heard) > rank:
        drawn += _SAMPLES_AT_ONCE
        directions = _independent(torch.cat([directions, _sampled(heard, generator)]), heard)
    if len(directions) < rank:
        raise InputError(
            f"{owner}: tells the examples of a batch apart by the zeros that a ReLU leaves in their features, got "
            f"{len(directions)} of {examples} after {drawn} trials; use a model with a ReLU before its classifier"
        )
    features = directions @ places.T
    products = weight @ torch.linalg.pinv(features)  # [logits, examples]: each signal, times its features' length
    scale = torch.linalg.lstsq(products, bias[:, None]).solution[:, 0]
    signals = (products * scale).T
    return Examples(features / scale[:, None], signals, signals.argmin(1))


def _sampled(places: Tensor, generator: torch.Generator) -> Tensor:
    """Directions in which the features are never negative and often zero, from sets of places where they are zero."""
    rank = places.shape[1]
    if rank == 1:
        return places.sum().sign().view(1, 1)
    sets = torch.rand(_SAMPLES_AT_ONCE, len(places), generator=generator, device=generator.device)
    chosen = places[sets.topk(rank - 1, 1).indices.to(places.device)]
    directions = torch.linalg.svd(chosen)[2][:, -1]
    directions = directions[_zeros(directions, places).sum(1) >= rank - 1 + _SPARE_ZEROS]
    for _ in range(_REFINEMENTS if len(directions) else 0):
        off = _zeros(directions, places).to(places)
        directions = torch.linalg.eigh(torch.einsum("dp,pa,pb->dab", off, places, places))[1][..., 0]
    directions = directions * (directions @ places.T).sum(1, keepdim=True).sign()
    features = directions @ places.T
    possible: Tensor = directions[features.amin(1) > -_ZERO * features.amax(1)]
    return possible


def _zeros(directions: Tensor, places: Tensor) -> Tensor:
    features = (directions @ places.T).abs()
    return features < _ZERO * features.amax(1, keepdim=True)


def _independent(directions: Tensor, places: Tensor) -> Tensor:
    """Those with most zeros, without repetitions: a sum of two examples has fewer zeros than either."""
    chosen = directions[:0]
    for number in _zeros(directions, places).sum(1).argsort(descending=True, stable=True).tolist():
        direction = directions[number, None]
        if bool(((chosen @ direction.T).abs() < _SAME).all()):
            together = torch.cat([chosen, direction])
            if len(together) <= places.shape[1] and int(torch.linalg.matrix_rank(together, rtol=1e-3)) == len(together):
                chosen = together
    return chosen
