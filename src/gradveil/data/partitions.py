"""Dividing the samples of a dataset among clients: evenly, by Dirichlet draws, or with a few classes each."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import InputError, ParameterError

Indices = npt.NDArray[np.int64]
SCHEMES = ("iid", "dirichlet", "classes")
LARGEST_ALPHA = 1e6  # all shares are equal long before that; near the largest float the draw would overflow


def partition(
    labels: Tensor | Sequence[float],
    clients: int = 10,
    scheme: str = "iid",
    alpha: float = 0.5,
    classes_per_client: int = 2,
    seed: int = 0,
) -> list[Tensor]:
    """Divide the samples among clients; no sample goes to two clients, and every client gets at least one.

    - ``iid``: a random equal share each; sizes differ by at most one.
    - ``dirichlet``: the shares of each class among the clients are one draw of Dirichlet(alpha, ..., alpha)
      (Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019). A small
      alpha makes clients differ more. A client that gets no sample takes one from the client that has the most.
    - ``classes``: each client holds exactly `classes_per_client` classes, after the pathological split of
      McMahan et al. ("Communication-Efficient Learning of Deep Networks", AISTATS 2017). The numbers
      of clients per class differ by at most one, and the clients of a class share it evenly. With fewer places
      (clients x classes_per_client) than classes, some classes stay unused.

    Args:
        labels: the label of each sample, a class number unless the scheme is ``iid``.
        clients: number of clients.
        scheme: ``"iid"``, ``"dirichlet"`` or ``"classes"``.
        alpha: concentration of the Dirichlet draw, above 0 and at most a million; used by ``dirichlet`` only.
        classes_per_client: number of classes per client; used by ``classes`` only.
        seed: the same seed gives the same partition.

    Returns:
        One int64 tensor of sample indices per client, in random order.

    Example:
        >>> shares = partition([0, 0, 1, 1, 2, 2], clients=3, scheme="classes", classes_per_client=1)
        >>> [len(share) for share in shares]
        [2, 2, 2]
        >>> partition([0, 1], clients=3)
        Traceback (most recent call last):
            ...
        gradveil.core.errors.ParameterError: partition: clients must be at most 2, the number of samples, got 3
    """
    clients = checks.integer("partition", "clients", clients, low=1)
    scheme = checks.choice("partition", "scheme", scheme, SCHEMES)
    targets = _checked_labels(torch.as_tensor(labels), scheme)
    alpha = checks.number("partition", "alpha", alpha, above=0, high=LARGEST_ALPHA)
    classes_per_client = checks.integer("partition", "classes_per_client", classes_per_client, low=1)
    rng = np.random.default_rng(checks.integer("partition", "seed", seed, low=0))
    if clients > len(targets):
        raise ParameterError(f"partition: clients must be at most {len(targets)}, the number of samples, got {clients}")
    if scheme == "iid":
        shares = np.array_split(rng.permutation(len(targets)), clients)
    elif scheme == "dirichlet":
        shares = _dirichlet(targets, clients, alpha, rng)
    else:
        shares = _few_classes(targets, clients, classes_per_client, rng)
    return [torch.from_numpy(rng.permutation(share)) for share in shares]


def _checked_labels(targets: Tensor, scheme: str) -> Indices:
    if scheme == "iid" and targets.ndim and targets.numel():
        return np.zeros(len(targets), np.int64)  # the labels do not matter
    if targets.ndim != 1 or targets.numel() == 0 or targets.is_floating_point() or targets.is_complex():
        raise InputError(
            f"partition: labels must be a list of whole numbers with at least one entry, got {targets.dtype} of shape "
            f"{tuple(targets.shape)}; samples without one class each can only be divided by the scheme iid"
        )
    array: Indices = targets.cpu().numpy().astype(np.int64)
    return array


def _members(targets: Indices, label: np.int64, rng: np.random.Generator) -> Indices:
    return rng.permutation(np.flatnonzero(targets == label))


def _dirichlet(targets: Indices, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in np.unique(targets):
        members = _members(targets, label, rng)
        shares = rng.dirichlet(np.full(clients, alpha))
        # Cutting at rounded cumulative shares assigns every sample exactly once.
        cuts = np.rint(np.cumsum(shares[:-1]) * len(members)).astype(np.int64)
        for part, chunk in zip(parts, np.split(members, cuts), strict=True):
            part.append(chunk)
    assigned = [np.concatenate(part) for part in parts]
    for client, share in enumerate(assigned):
        if len(share) == 0:
            largest = max(range(clients), key=lambda other: len(assigned[other]))
            assigned[client], assigned[largest] = assigned[largest][:1], assigned[largest][1:]
    return assigned


def _few_classes(targets: Indices, clients: int, classes_per_client: int, rng: np.random.Generator) -> list[Indices]:
    present = np.unique(targets)
    if classes_per_client > len(present):
        raise ParameterError(
            f"partition: classes_per_client must be at most {len(present)}, the number of classes, "
            f"got {classes_per_client}"
        )
    holders: list[list[int]] = [[] for _ in present]
    for client in range(clients):
        # Classes with the fewest holders first, ties at random: their numbers of holders never differ by more than one.
        order = np.lexsort(np.stack([rng.random(len(present)), [len(held) for held in holders]]))
        for position in order[:classes_per_client]:
            holders[position].append(client)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label, held in zip(present, holders, strict=True):
        if not held:
            continue
        members = _members(targets, label, rng)
        if len(members) < len(held):
            raise ParameterError(
                f"partition: class {label} has {len(members)} samples for {len(held)} clients; "
                "lower clients or classes_per_client"
            )
        for client, chunk in zip(held, np.array_split(members, len(held)), strict=True):
            parts[client].append(chunk)
    return [np.concatenate(part) for part in parts]
