"""How far each value of an update counts: a few large ones must not hide what all others say."""

import torch
from torch import Tensor

from gradveil.attacks._learned import Learning
from gradveil.attacks._reduction import Coordinates, softly_limited
from gradveil.attacks._simulation import SimulatedClients, Steps

CLIENTS = 500
"""Simulated clients on which the limits are chosen."""
LIMITS = (3.0, 1.0, 0.3)
"""Limits that are tried, in units of a value's standard deviation."""
_RIDGES = tuple(10.0**power for power in range(-9, 2))
"""Regularisations that are tried, in units of the mean eigenvalue."""
_STANDARD_ERRORS = 2.0
"""By how many of them a limit must lower the error to be used."""


def with_chosen_limits(
    clients: SimulatedClients,
    coordinates: Coordinates,
    groups: Tensor,
    shares: Tensor,
    targets: Tensor,
    learning: Learning,
    steps: Steps,
) -> Coordinates:
    r"""The coordinates, also with soft limits on their values, if inputs can be predicted better with them.

    .. math:: u_j \to c_j \tanh(u_j / c_j), \qquad c_j = c \, \sigma_j

    with the standard deviation :math:`\sigma_j` of a value among simulated clients. Gradients of networks of ReLUs have
    heavy tails: a few values of a few clients carry most of the variance, and so most principal directions. A network
    that learns from many clients finds more in the values as they are, so rows have both (`Coordinates.forms`). The
    limit c is one of `LIMITS`, or there is none, by which ridge regression leaves the least error if every client is
    predicted from all others. There is none unless one is better by two standard errors.

    Args:
        clients: the clients to simulate.
        coordinates: the values of an update that are used.
        groups: ``[clients, batch size]``, their examples.
        shares: ``[clients, classes]``, the share of each class among the examples of a client.
        targets: ``[clients, values]``, what is to be predicted of each client.
        learning: where the limits are kept.
        steps: counts clients.
    """

    def choose() -> dict[str, Tensor]:
        rows = torch.empty(len(groups), coordinates.width, device=clients.task.device)
        for places in torch.split(torch.arange(len(groups)), clients.chunk(groups.shape[1])):
            # Seeds of their own: where no limit is chosen, what is learned must not depend on the choice.
            rows[places] = coordinates.rows(next(clients.draws(groups[places], places[None])))
            steps.add(len(places))
        deviations = rows.std(0)
        chosen = rows.new_empty(0)
        unlimited = left_out_errors(rows, shares, targets)
        least = float(unlimited.mean())
        for limit in LIMITS:
            limits = limit * deviations
            errors = left_out_errors(softly_limited(rows, limits), shares, targets)
            gains = unlimited - errors
            certain = gains.mean() > _STANDARD_ERRORS * gains.std() / len(gains) ** 0.5
            if certain and float(errors.mean()) < least:
                chosen, least = limits, float(errors.mean())
        return {"limits": chosen}

    limits = learning.once("limits", choose)["limits"]
    return coordinates.limited(limits) if len(limits) else coordinates


def left_out_errors(rows: Tensor, shares: Tensor, targets: Tensor) -> Tensor:
    r"""The mean squared error of each client's targets if ridge regression on all others predicts them: ``[clients]``.

    .. math:: e_i = \frac{[B Y]_i}{B_{ii}}, \qquad B = M (M R R^T M + \lambda I)^{-1} M, \quad M = I - S S^+

    S are the shares of the classes, whose weights are fitted too, without a penalty. Of a few :math:`\lambda` that is
    used which is best on average.

    Args:
        rows: ``[clients, width]``, R.
        shares: ``[clients, classes]``.
        targets: ``[clients, values]``, Y.
    """
    classes = shares.double()
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for part in torch.split(rows, 1024, dim=1):
        gram.addmm_(part.double(), part.double().T)

    def without_classes(columns: Tensor) -> Tensor:
        left: Tensor = columns - classes @ (torch.linalg.pinv(classes) @ columns)
        return left

    values, vectors = torch.linalg.eigh(without_classes(without_classes(gram).T))
    values, vectors = values.clamp_min(0), without_classes(vectors)
    rotated = vectors.T @ targets.double()
    unit = values.mean().clamp_min(torch.finfo(values.dtype).tiny)
    best: Tensor | None = None
    for ridge in _RIDGES:
        inverse = 1 / (values + ridge * unit)
        residuals = vectors @ (inverse[:, None] * rotated) / (vectors.square() @ inverse).clamp_min(1e-300)[:, None]
        errors = residuals.square().mean(1)
        best = errors if best is None or errors.mean() < best.mean() else best
    assert best is not None
    return best
