"""How well any attacker can do against normal noise, and how useful an update remains under a defense."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import InputError
from gradveil.core.randomness import fresh_generator
from gradveil.defenses import Defense
from gradveil.defenses.base import Batch
from gradveil.task import Task

Batches = Batch | Sequence[Batch]
SMOOTHING = 0.1
"""Standard deviation of the noise that turns single images into a prior; see `reconstruction_bound`."""


@dataclass(frozen=True)
class Bound:
    """A lower limit on the mean squared error of every attacker.

    Args:
        total: limit for the whole batch, E|x^ - x|^2.
        values: number of input values in the batch.
        data_information: E tr J_F, the information in the update.
        prior_information: tr J_P, the information of the prior.

    Example:
        >>> Bound(total=2.0, values=4, data_information=6.0, prior_information=2.0).mse
        0.5
    """

    total: float
    values: int
    data_information: float
    prior_information: float

    @property
    def mse(self) -> float:
        """The limit on the mean squared error per value."""
        return self.total / self.values


def cramer_rao(values: int, data_information: float, prior_information: float) -> Bound:
    r"""The Bayesian Cramér-Rao bound from the traces of the information matrices.

    .. math:: E|\hat x - x|^2 \ge tr (J_D + J_P)^{-1} \ge \frac{n^2}{tr J_D + tr J_P}

    by the inequality between the harmonic and the arithmetic mean of the eigenvalues, with equality for isotropic
    matrices.

    Args:
        values: n, the number of unknowns.
        data_information: tr J_D, the trace of the Fisher information of the observation, averaged over x.
        prior_information: tr J_P of the prior.

    >>> cramer_rao(4, data_information=6.0, prior_information=2.0).total
    2.0
    """
    return Bound(values**2 / (data_information + prior_information), values, data_information, prior_information)


def reconstruction_bound(
    task: Task,
    data: Batches,
    noise: float | Mapping[str, Tensor] | Defense | None,
    *,
    tau: float = SMOOTHING,
    directions: int | None = 10,
    generator: torch.Generator | None = None,
) -> Bound | None:
    r"""The least mean squared error that any attacker can reach on updates with normal noise; None: no bound.

    .. math:: E|\hat x - x|^2 \ge \frac{n_x^2}{E \, tr J_F + n_x / \tau^2}, \quad tr J_F = \sum_i s_i^2 / \Sigma_{ii}

    The bound is about an attacker who is uncertain of the image to begin with, so the victims are images **smoothed**
    by N(0, tau^2): for those tr J_P is at most n_x / tau^2, whatever the images are. It says nothing about images that
    are not smoothed: an attacker who knows that x is one of two photographs needs no gradient to be nearly right.

    A defense may clip before it adds the noise: a clipped coordinate (``coordinate-dp-sgd``, ``optimal-dp-sgd``) does
    not react to the input and counts as s = 0; clipping by the norm (``dp-sgd``) is left out, which can only make the
    bound lower than it need be.

    There is no bound (None) if dropout is active, if the noise is not normal, if its level depends on the data (then
    the level reveals something too), or for pruning, slicing and everything else that does not put noise on every
    value. (Pruning with noise on what is kept has one if public data decides what is kept: the rest has infinite
    variance.)

    Args:
        task: the model at the weights the victims see.
        data: one batch as a client shares it, or several, whose mean stands for the expectation; not smoothed yet.
        noise: variance of the noise on each value, one number or tensors by layer; or a prepared defense, which knows
            its own.
        tau: standard deviation of the smoothing.
        directions: number of random directions that estimate each s^2 (tr J_F stays unbiased); None: exact.
        generator: source of smoothing and directions; default: fresh entropy.

    References:
        Chen, Gürsoy & Lei, Optimal Defenses Against Gradient Reconstruction Attacks, 2024, theorem 1. **Corrections**:
        the dimension is that of the input, not of the gradient; the prior enters with its trace, because the
        paper's step by Weyl's inequality takes the smallest eigenvalue where the largest belongs, and its result can
        exceed the error of the best estimator.

    Example:
        >>> from gradveil import models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = Task(model, input_shape=(1, 4, 4), classes=3)
        >>> batch = torch.rand(1, 1, 4, 4), torch.tensor([2])
        >>> bound = reconstruction_bound(task, batch, noise=1e6)
        >>> round(bound.mse, 6)  # so much noise hides everything: only the variance of the smoothing remains
        0.01
    """
    checks.number("reconstruction_bound", "tau", tau, above=0)
    batches = _batches(data)
    if not batches or len({inputs.shape for inputs, _ in batches}) != 1:
        raise InputError("reconstruction_bound: expected at least one batch, all of the same size")
    defense = noise if isinstance(noise, Defense) else None
    if isinstance(noise, Defense):
        noise = noise.noise_variance(batch_size=len(batches[0][0]))
    if noise is None or task.has_dropout:  # what a victim's masks hide is not known
        return None
    variance = {
        name: noise[name].double() if isinstance(noise, Mapping) else torch.full_like(value, noise, dtype=torch.float64)
        for name, value in task.parameters.items()
    }
    if any(bool((value < 0).any()) for value in variance.values()):
        raise InputError("reconstruction_bound: a variance must not be negative")
    generator = generator or fresh_generator(task.device)
    traces = []
    for inputs, labels in batches:
        smoothing = torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype, device=inputs.device)
        smoothed = inputs + tau * smoothing
        squared = task.sensitivity(smoothed, labels, directions, generator=generator)
        if defense is not None:
            gradients = task.gradients(smoothed, labels)
            clipped = defense.clipped(gradients)
            squared = {name: value * (clipped[name] == gradients[name]) for name, value in squared.items()}
        traces.append(math.fsum(information(squared[name], variance[name]) for name in squared))
    values = batches[0][0].numel()
    return cramer_rao(values, math.fsum(traces) / len(traces), values / tau**2)


def _batches(data: Batches) -> Sequence[Batch]:
    one_batch = isinstance(data, tuple) and isinstance(data[0], Tensor)
    return [data] if one_batch else data  # type: ignore[list-item, return-value]


def information(squared: Tensor, variance: Tensor) -> float:
    """Sum of s^2 / variance; a value that does not react to the input adds nothing, with or without noise."""
    return float(torch.where(squared > 0, squared.double() / variance, 0).sum())


@dataclass(frozen=True)
class Usefulness:
    """What a step with the defended update does to the loss, to first order and per unit of learning rate.

    Args:
        u1: E<g, y>, the expected decrease of the loss.
        u2: -Var<g, y> over the defense's randomness, averaged over the batches; 0 if the defense is deterministic.

    Example:
        >>> Usefulness(u1=2.0, u2=-0.5).u1
        2.0
    """

    u1: float
    u2: float


def usefulness(
    task: Task, data: Batches, defense: Defense, *, draws: int = 32, generator: torch.Generator | None = None
) -> Usefulness:
    r"""U1 and U2 of any defense, measured by sharing each batch several times.

    .. math:: U_1 = E \langle g, y \rangle, \quad U_2 = -E \, Var_y \langle g, y \rangle

    Args:
        task: the model.
        data: one batch as a client shares it, or several.
        defense: the defense, prepared if it needs that.
        draws: number of updates drawn for each batch, at least 2; the relative error of U2 is about sqrt(2 / draws).
        generator: the client's randomness; default: fresh entropy.

    Example:
        >>> import gradveil
        >>> from gradveil import models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = Task(model, input_shape=(1, 4, 4), classes=3)
        >>> batch = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
        >>> measured = usefulness(task, batch, gradveil.defense("none"), draws=2)
        >>> squared = sum(value.square().sum() for value in task.gradients(*batch).values())
        >>> round(measured.u1 / float(squared), 5), measured.u2
        (1.0, 0.0)
    """
    checks.integer("usefulness", "draws", draws, low=2)
    generator = generator or fresh_generator(task.device)
    batches = _batches(data)
    means, variances = [], []
    for inputs, labels in batches:
        gradients = task.without_dropout().gradients(inputs, labels)
        products = []
        for _ in range(draws):
            shared = defense.share(task, inputs, labels, generator=generator, memory={})
            products.append(math.fsum(float((gradients[n].double() * shared[n].double()).sum()) for n in gradients))
        sample = torch.tensor(products, dtype=torch.float64)
        means.append(float(sample.mean()))
        variances.append(float(sample.var()))
    return Usefulness(math.fsum(means) / len(means), 0.0 - math.fsum(variances) / len(variances))
