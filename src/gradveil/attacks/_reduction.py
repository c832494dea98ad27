"""From updates of any size to a few hundred features: choose the values that say most, then project on the directions
in which updates of public inputs differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks._learned import Learning
from gradveil.attacks._simulation import SimulatedClients, Steps, draw_seeds
from gradveil.core.large_arrays import empty
from gradveil.task import Gradients, Task

EXACT_SIZE = 1 << 16
"""Of updates with more values than this, only so many are used."""
_PLACES = "places"
_LIMITS = "limits"
_PAIRS = 32
"""Pairs of clients whose updates tell which values those are."""
_TOGETHER = 64
"""Rows of several draws are projected together if the clients that are simulated at once are fewer."""
KEPT_VALUES = 1 << 28
"""How many values of what simulated clients sent are kept, at most, so that they need not be simulated again: 1 GiB."""
_LEAST_VARIANCE = 1e-10
"""Directions with less variance than this, relative to the first, are rounding errors."""


@dataclass(frozen=True, eq=False)
class Coordinates:
    """An update as one row: its values or, if there are too many, some of them.

    Args:
        task: the model whose updates are meant.
        places: the places of the values in the flattened update, in ascending order; None: all of them.
        limits: how far each value counts, see `softly_limited`; rows then have the values as they are, and behind them
            the limited ones. None: only as they are.

    Example:
        >>> task = Task(torch.nn.Linear(2, 2), input_shape=(2,), classes=2)
        >>> updates = {"weight": torch.arange(12.0).view(3, 2, 2), "bias": torch.zeros(3, 2)}
        >>> Coordinates(task, None).rows(updates)[0].tolist()
        [0.0, 1.0, 2.0, 3.0, 0.0, 0.0]
        >>> Coordinates(task, torch.tensor([1, 3, 4])).rows(updates)[0].tolist()
        [1.0, 3.0, 0.0]
    """

    task: Task
    places: Tensor | None
    limits: Tensor | None = None
    _places_of: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.places is None:
            return
        first = 0
        for name, value in self.task.parameters.items():
            here = (self.places >= first) & (self.places < first + value.numel())
            self._places_of[name] = (self.places[here] - first).to(value.device)
            first += value.numel()

    @classmethod
    def most_telling(
        cls, clients: SimulatedClients, groups: Tensor, kinds: Tensor, generator: torch.Generator
    ) -> "Coordinates":
        r"""All values or, if there are more than `EXACT_SIZE`, those that differ most between clients of one class.

        Noise of a defense is the same on every value that is kept, so these have the most signal in it. Sums of many
        values (a hash, or a random projection) would add up their noise too: on a resnet18, a hash to half as many sums
        has 340 times the noise on each of them, and the values kept here have a third of all signal.

        Args:
            clients: the clients to simulate, undefended.
            groups: ``[clients, batch size]``, their examples.
            kinds: the class of each public input.
            generator: the attacker's randomness.
        """
        task = clients.task
        if task.size <= EXACT_SIZE:
            return cls(task, None)
        order = torch.randperm(len(groups), generator=generator, device=generator.device).to(groups.device)
        chosen = groups[order[: 2 * _PAIRS]]
        # Neighbours in the order of their classes mostly have the same one, whose mean then drops out.
        chosen = chosen[kinds[chosen[:, 0]].argsort(stable=True)]
        squares = torch.zeros(task.size, device=task.device)
        for pair in torch.split(chosen[: len(chosen) // 2 * 2], 2):
            updates = clients.undefended(pair, draw_seeds(1, 2, generator))
            squares += torch.cat([(value[0] - value[1]).flatten().float().square() for value in updates.values()])
        return cls(task, squares.topk(EXACT_SIZE).indices.sort().values)

    @property
    def learned(self) -> dict[str, Tensor]:
        """What to keep of them, for `of_learned`."""
        kept = {_PLACES: self.places, _LIMITS: self.limits}
        return {name: value for name, value in kept.items() if value is not None}

    @classmethod
    def of_learned(cls, task: Task, learned: Mapping[str, Tensor]) -> "Coordinates":
        """Those that were kept among what an attack has learned."""
        return cls(task, learned.get(_PLACES), learned.get(_LIMITS))

    def limited(self, limits: Tensor) -> "Coordinates":
        """The same values with these limits."""
        return Coordinates(self.task, self.places, limits)

    @property
    def count(self) -> int:
        """How many values of an update are used."""
        return self.task.size if self.places is None else len(self.places)

    @property
    def forms(self) -> list[slice]:
        """Where in a row the values stand as they are and, if they have limits, limited."""
        return [slice(0, self.count), *([] if self.limits is None else [slice(self.count, 2 * self.count)])]

    @property
    def width(self) -> int:
        """The length of a row."""
        return int(self.forms[-1].stop)

    def rows(self, updates: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """Updates ``[clients, *parameter shape]`` by name as rows ``[clients, width]``; differentiable, vmap-able."""
        return self.in_all_forms(self.values(updates, dtype))

    def values(self, updates: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of updates as they are, ``[clients, count]``."""
        flat = {name: updates[name].flatten(1) for name in self.task.parameters}
        if self.places is not None:
            flat = {name: values[:, self._places_of[name]] for name, values in flat.items()}
        return torch.cat([values.to(dtype) for values in flat.values()], 1)

    def in_all_forms(self, values: Tensor) -> Tensor:
        """The rows of updates with these values, ``[clients, width]``."""
        return values if self.limits is None else torch.cat([values, softly_limited(values, self.limits)], 1)

    def updates(self, rows: Tensor) -> Gradients:
        """The updates ``[clients, *parameter shape]`` by name that have these rows, which must have all values."""
        assert self.places is None
        assert self.limits is None
        sizes = [value.numel() for value in self.task.parameters.values()]
        parts = zip(self.task.parameters.items(), torch.split(rows, sizes, 1), strict=True)
        return {name: part.reshape(len(rows), *value.shape).to(value) for (name, value), part in parts}


def softly_limited(rows: Tensor, limits: Tensor) -> Tensor:
    """Small values as they are, large ones near their limit: ``limit * tanh(value / limit)``.

    >>> softly_limited(torch.tensor([[0.01, -30.0, 5.0]]), torch.tensor([1.0, 2.0, 0.0]))
    tensor([[ 0.0100, -2.0000,  0.0000]])
    """
    return limits * (rows / limits.clamp_min(torch.finfo(rows.dtype).tiny)).tanh()


def centres_of(rows: Tensor, shares: Tensor) -> Tensor:
    """What each class contributes to a row, ``[classes, width]``: rows are near ``shares @ centres`` (least squares).

    For single examples these are the class means. A class of which there is no example gets the mean over all rows.

    Args:
        rows: ``[clients, width]``.
        shares: ``[clients, classes]``, the share of each class among the examples of a client.

    >>> centres_of(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    tensor([[2.],
            [5.]])
    """
    shares = shares.double()
    products = torch.cat([shares.T @ part.double() for part in torch.split(rows, 1024, dim=1)], 1)
    centres: Tensor = torch.linalg.pinv(shares.T @ shares, hermitian=True) @ products
    centres[shares.sum(0) == 0] = rows.mean(0, dtype=torch.float64)
    return centres.to(rows)


def denoised(means: Tensor, undefended: Tensor, noise: Tensor) -> Tensor:
    r"""Estimate what clients send on average over all draws of a defense, from the mean of a few draws.

    .. math::
        a_i h_i + w \odot (\bar u_i - a_i h_i), \qquad
        w_j = \max(0, 1 - noise_j / mean_i (\bar u_i - a_i h_i)_j^2)

    with the undefended update :math:`h_i` of client i and the best factor :math:`a_i`. A value whose difference to the
    scaled undefended one is explained by the noise counts as that (w = 0); one without noise is left as it is (w = 1).

    Args:
        means: ``[clients, width]``, the mean of the draws; spoiled.
        undefended: the undefended updates; become the estimate, which is returned, too.
        noise: ``[width]``, the variance that the draws leave in the means.

    >>> denoised(torch.tensor([[2.0, 2.1]]), torch.tensor([[1.0, 1.0]]), torch.tensor([0.0, 9.0]))
    tensor([[2.0000, 2.0500]])
    """
    factors = (means * undefended).sum(1) / undefended.square().sum(1).clamp_min(torch.finfo(means.dtype).tiny)
    expected = undefended.mul_(factors[:, None])
    difference = means.sub_(expected)
    explained = noise / difference.square().mean(0, dtype=torch.float64).clamp_min(torch.finfo(torch.float64).tiny)
    return expected.add_(difference.mul_((1 - explained).clamp(0, 1).to(means)))


def principal_directions(rows: Tensor, count: int) -> Tensor:
    """The orthonormal directions ``[width, at most count]`` in which centred rows vary most.

    They come from the Gram matrix of the rows, which is small if there are fewer rows than values.

    >>> principal_directions(torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), 1).abs().T
    tensor([[1., 0., 0.]])
    """
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for part in torch.split(rows, 1024, dim=1):
        gram.addmm_(part.double(), part.double().T)
    variances, vectors = torch.linalg.eigh(gram)
    variances, vectors = variances.flip(0)[:count], vectors.flip(1)[:, :count]
    kept = variances > _LEAST_VARIANCE * variances[0].clamp_min(torch.finfo(torch.float64).tiny)
    weights: Tensor = (vectors[:, kept] / variances[kept].sqrt()).to(rows)
    return rows.T @ weights


def draws_kept(clients: SimulatedClients, coordinates: Coordinates, count: int, draws: int) -> int:
    """How many draws of the clients that directions are computed from are kept, for their features.

    None if clients are simulated together and all values of their updates are used: it is faster to do that again.

    Args:
        clients: the clients to simulate.
        coordinates: the values of an update that are used.
        count: how many clients directions are computed from.
        draws: how many draws of them are averaged.
    """
    if clients.together and coordinates.places is None:
        return 0
    return min(draws, KEPT_VALUES // (count * coordinates.count))


def simulated_directions(
    clients: SimulatedClients,
    coordinates: Coordinates,
    groups: Tensor,
    shares: Tensor,
    draws: int,
    count: int,
    learning: Learning,
    steps: Steps,
) -> tuple[Tensor, Tensor]:
    """The principal directions of what clients send on average over the draws of a defense: `count` of each form.

    With them comes what is kept of these clients, ``[draws, clients, values]``, for their features (`draws_kept`).

    Noise as large as the signal, on many more values than there are clients, would hide all but the first few of them;
    the attacker may remove it, because it simulates these clients.

    Args:
        clients: the clients to simulate.
        coordinates: the values of an update that are used.
        groups: ``[clients, batch size]``, their examples.
        shares: ``[clients, classes]``, the share of each class among a client's examples, by which rows are centred.
        draws: how many draws of the defense are averaged.
        count: how many directions.
        learning: the attacker's randomness, and where finished parts are kept.
        steps: counts draws.
    """
    rows = torch.zeros(len(groups), coordinates.width, device=clients.task.device)
    undefended = torch.zeros_like(rows) if draws > 1 else None
    squares = torch.zeros(coordinates.width, dtype=torch.float64, device=rows.device)
    shape = draws_kept(clients, coordinates, len(groups), draws), len(groups), coordinates.count
    kept = torch.from_numpy(empty(shape, np.float32))

    def simulate(part: Tensor) -> dict[str, Tensor]:
        mean, power = rows.new_zeros(len(part), coordinates.width), torch.zeros_like(squares)
        sent = rows.new_empty(len(kept), len(part), coordinates.count)
        for number, updates in enumerate(clients.draws(part, draw_seeds(draws, len(part), learning.generator))):
            values = coordinates.values(updates)
            drawn = coordinates.in_all_forms(values)
            mean += drawn / draws
            power += drawn.square().sum(0, dtype=torch.float64)
            if number < len(sent):
                sent[number] = values
        simulated = {"mean": mean, "power": power, "sent": sent}
        if undefended is None:
            return simulated
        honest = clients.undefended(part, draw_seeds(1, len(part), learning.generator))
        return {**simulated, "undefended": coordinates.rows(honest)}

    done = 0
    for part in torch.split(groups, clients.chunk(groups.shape[1])):
        here = slice(done, done + len(part))
        found = learning.once(f"directions-{done}", partial(simulate, part))
        rows[here] = found["mean"]
        squares += found["power"]
        kept[:, here] = found["sent"].to(kept)
        if undefended is not None:
            undefended[here] = found["undefended"]
        steps.add(draws * len(part))
        done += len(part)
    if undefended is not None:
        noise = (squares / (len(rows) * draws) - rows.square().mean(0, dtype=torch.float64)) / (draws - 1)
        for form in coordinates.forms:
            denoised(rows[:, form], undefended[:, form], noise[form])
        rows = undefended
    centres = centres_of(rows, shares)
    for place in range(0, len(rows), 256):  # in parts, so that there is no other table
        rows[place : place + 256] -= shares[place : place + 256] @ centres
    each = [principal_directions(rows[:, form], count) for form in coordinates.forms]
    directions = rows.new_zeros(rows.shape[1], sum(part.shape[1] for part in each))
    first = 0
    for form, part in zip(coordinates.forms, each, strict=True):
        directions[form, first : first + part.shape[1]] = part
        first += part.shape[1]
    return directions, kept


def simulated_features(
    clients: SimulatedClients,
    coordinates: Coordinates,
    directions: Tensor,
    groups: Tensor,
    draws: int,
    part_name: str,
    learning: Learning,
    steps: Steps,
    kept: Tensor | None = None,
) -> Tensor:
    """What clients send, projected on directions: ``[draws, clients, directions]``.

    Args:
        clients: the clients to simulate.
        coordinates: the values of an update that are used.
        directions: ``[width, directions]``.
        groups: ``[clients, batch size]``, their examples.
        draws: independent draws of the defense.
        part_name: a name for these clients, under which finished parts are kept.
        learning: the attacker's randomness, and where finished parts are kept.
        steps: counts draws.
        kept: ``[draws, clients, values]``, what the first of these clients have sent already (`simulated_directions`).
    """
    table = torch.empty(draws, len(groups), directions.shape[1], device=clients.task.device)
    kept = table.new_empty(0, 0, coordinates.count) if kept is None else kept[:draws]
    for number, sent in enumerate(kept):
        for places in torch.split(torch.arange(len(sent)), _TOGETHER):
            table[number, places] = coordinates.in_all_forms(sent[places].to(table)) @ directions

    def simulate(count: int, part: Tensor) -> dict[str, Tensor]:
        drawn = clients.draws(part, draw_seeds(count, len(part), learning.generator))
        projected, waiting = [], []
        for updates in drawn:
            waiting.append(coordinates.rows(updates))
            # Of large updates few are simulated at once: reading the directions would take longer than multiplying.
            if len(waiting) * len(part) >= _TOGETHER:
                projected.append(torch.cat(waiting) @ directions)
                waiting = []
        if waiting:
            projected.append(torch.cat(waiting) @ directions)
        return {"features": torch.cat(projected).view(count, len(part), -1)}

    done, known = 0, kept.shape[1] if len(kept) else 0
    for some, had in ((groups[:known], len(kept)), (groups[known:], 0)):
        for part in torch.split(some, clients.chunk(groups.shape[1])):
            if len(part) and had < draws:
                found = learning.once(f"{part_name}-{done}", partial(simulate, draws - had, part))
                table[had:, done : done + len(part)] = found["features"]
                steps.add((draws - had) * len(part))
            done += len(part)
    return table
