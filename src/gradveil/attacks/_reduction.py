"""From updates of any size to a few hundred features: flatten or hash the values, then project on the directions in
which updates of public inputs differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.core.randomness import derived_generator
from gradveil.task import Gradients, Task

EXACT_SIZE = 1 << 16
"""Updates with more values than this are hashed first."""
SKETCH_SIZE = 1 << 15
"""The number of sums that a large update is hashed to."""
_LEAST_VARIANCE = 1e-10
"""Directions with less variance than this, relative to the first, are rounding errors."""


@dataclass(frozen=True, eq=False)
class Coordinates:
    r"""An update as one row: its values themselves or, if there are too many, :math:`m` signed sums of them.

    .. math:: s_j = \sum_{i: h(i) = j} \sigma_i u_i, \qquad h(i) \in \{1, ..., m\}, \ \sigma_i = \pm 1 \text{ at random}

    Inner products of updates stay the same in expectation (Charikar, Chen and Farach-Colton, 2002), but independent
    noise is summed too: against noise on each of d values, every feature has d / m times its variance.

    Args:
        task: the model whose updates are meant.
        seed: seed of the hash; the same seed gives the same sums.

    Example:
        >>> task = Task(torch.nn.Linear(2, 2), input_shape=(2,), classes=2)
        >>> Coordinates(task, seed=0).rows({"weight": torch.ones(3, 2, 2), "bias": torch.zeros(3, 2)})[0].tolist()
        [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    """

    task: Task
    seed: int
    _buckets: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    _signs: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.hashed:
            return
        for name, value in self.task.parameters.items():
            generator = derived_generator(self.seed, "sketch", name)
            buckets = torch.randint(SKETCH_SIZE, (value.numel(),), generator=generator, dtype=torch.int32)
            signs = torch.randint(2, (value.numel(),), generator=generator, dtype=torch.int8) * 2 - 1
            self._buckets[name], self._signs[name] = buckets.to(value.device), signs.to(value.device)

    @property
    def hashed(self) -> bool:
        """Whether the values are hashed."""
        return self.task.size > EXACT_SIZE

    @property
    def width(self) -> int:
        """The length of a row."""
        return SKETCH_SIZE if self.hashed else self.task.size

    def rows(self, updates: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """Updates ``[clients, *parameter shape]`` by name as rows ``[clients, width]``; differentiable, vmap-able."""
        flat = {name: updates[name].flatten(1).to(dtype) for name in self.task.parameters}
        if not self.hashed:
            return torch.cat(list(flat.values()), 1)
        clients = len(next(iter(flat.values())))
        result = torch.zeros(clients, SKETCH_SIZE, dtype=dtype, device=self.task.device)
        for name, values in flat.items():
            result = result.index_add(1, self._buckets[name], values * self._signs[name])
        return result

    def updates(self, rows: Tensor) -> Gradients:
        """The updates ``[clients, *parameter shape]`` by name that have these rows; hashed ones cannot be told."""
        assert not self.hashed
        sizes = [value.numel() for value in self.task.parameters.values()]
        parts = zip(self.task.parameters.items(), torch.split(rows, sizes, 1), strict=True)
        return {name: part.reshape(len(rows), *value.shape).to(value) for (name, value), part in parts}


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
        means: ``[clients, width]``, the mean of the draws; changed in place.
        undefended: the undefended updates; changed in place.
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
