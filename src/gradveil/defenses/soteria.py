"""Soteria: prune the gradient of the classifier by what its inputs reveal about the image."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from gradveil.core.errors import InputError
from gradveil.core.parameters import integer, number
from gradveil.core.randomness import Randomness, Source, source_of
from gradveil.defenses._selection import share_of
from gradveil.defenses.base import DEFENSES, StepDefense
from gradveil.defenses.knowledge import Evidence, Knowledge
from gradveil.task import Gradients, Task
from gradveil.update import ClientRound, LocalSteps, steps_of

MEMORY_BUDGET = 1 << 28
"""Bytes that the units or directions processed together may take."""


@DEFENSES.register("soteria")
@dataclass(frozen=True, repr=False)
class Soteria(StepDefense):
    r"""Zero the columns of the classifier's weight gradient that belong to the most revealing units.

    .. math:: score_i = \sum_{images} |\partial r_i / \partial x| \, / \, |r_i|

    r is the representation before the classifier, found by observing the model as it runs. The `rate` share of its
    units with the *smallest* scores lose their columns: for these, a change of r costs the attacker most in x. All
    other layers and the classifier's bias are sent unchanged; **an attacker who ignores the classifier's weight sees an
    undefended update** (``mute=classifier`` of the matching attacks).

    Under FedAvg it acts in every local step.

    Choices where the sources differ or say nothing (four denominators are in use): \|r_i\| itself, with nothing added;
    in a batch, scores are computed for each image separately and then summed; an image on which a unit is silent
    (r_i = 0 with zero slope) adds nothing, and units that are silent on every image are not counted, because their
    columns are zero already. With batch norm in train mode r_i stands for the unit's sum over the batch.

    Args:
        rate: share of the (not silent) units whose columns are zeroed, rounded down; 0 is the identity.
        directions: with 0, scores are exact, from one vectorised backward pass per unit; otherwise they are estimated
            from this many random input directions in forward mode, :math:`|\partial r_i/\partial x|^2 = E_v (J v)_i^2`,
            with a relative standard error of sqrt(1 / (2 directions)).

    References:
        Sun et al., Soteria: Provable Defense against Privacy Leakage in Federated Learning from Representation
        Perspective, CVPR 2021.

    Example:
        >>> import gradveil
        >>> from gradveil import models
        >>> model = models.create("lenet", input_shape=(1, 8, 8), classes=3)
        >>> task = gradveil.Task(model, input_shape=(1, 8, 8), classes=3)
        >>> update = Soteria(rate=0.75).share(task, torch.rand(1, 1, 8, 8), torch.tensor([2]))
        >>> float((update["classifier.weight"] == 0).float().mean())
        0.75
    """

    paper = "Sun et al., CVPR 2021"
    has_adaptive_attacker = True

    rate: float = number(0.8, low=0, high=1, strength=(0.0, 1.0))
    directions: int = integer(0, low=0)

    def step_gradients(self, client: ClientRound) -> Gradients:
        """The gradients, with the chosen columns zeroed."""
        weight = self._pruned_layer(client.task)
        gradients = client.task.gradients(client.inputs, client.targets)
        scores = self.scores(client.task, client.inputs, generator=client.source)
        zeroed = share_of(self.rate, int(scores.isfinite().sum()), math.floor)
        columns = scores.argsort(stable=True)[:zeroed]
        return {**gradients, weight: gradients[weight].index_fill(1, columns, 0.0)}

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """Everything is exact except the zeroed columns of the classifier's weight, so only these are left out.

        If there are several local steps, each zeroes different columns; then the whole weight is left out.
        """
        weight, several = self._pruned_layer(task), steps_of(local, batch_size) > 1

        def read(_expected: Gradients, update: Gradients) -> Evidence:
            weights = {name: torch.ones_like(value) for name, value in update.items()}
            if weight in update:
                kept = (update[weight] != 0).any(0) & (not several)
                weights[weight] = kept.to(update[weight].dtype).expand_as(update[weight])
            return Evidence(update, weights)

        if several:
            return {"mute": Knowledge("leaves the classifier's weight out", read=read)}
        return {"arrived": Knowledge("leaves the zeroed columns of the classifier out", read=read)}

    def _pruned_layer(self, task: Task) -> str:
        """The name of the classifier's weight."""
        if task.classifier is None:
            raise InputError(
                f"{self.name}: the model has no linear classifier whose gradient could be pruned; use another defense"
            )
        if task.classifier.weight not in task.parameters:
            raise InputError(
                f"{self.name}: the classifier's weight {task.classifier.weight!r} is frozen, so there is no gradient "
                "to prune; train it or use another defense"
            )
        return task.classifier.weight

    @torch.no_grad()
    def scores(self, task: Task, inputs: Tensor, *, generator: Randomness | None = None) -> Tensor:
        """The score of every unit, ``[units]``; infinite for units that are silent on every image."""
        if self.directions:
            slopes, values = estimated_slopes(task, inputs, self.directions, source_of(generator))
        else:
            slopes, values = exact_slopes(task, inputs)
        ratios = slopes / values.abs()
        silent = ratios.isnan()  # 0 / 0
        return ratios.masked_fill(silent, 0).sum(0).masked_fill(silent.all(0), math.inf)


def exact_slopes(task: Task, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of d r_i / d x, and r itself, both ``[N, units]``: one backward pass per unit, many units at once."""
    parameters = task.parameters
    values: Tensor
    values, pull_back, *_ = vjp(lambda x: task.representation(parameters, x), inputs)

    def norms(unit: Tensor) -> Tensor:
        slope: Tensor = pull_back(unit.expand_as(values))[0]
        length: Tensor = slope.flatten(1).norm(dim=1)
        return length

    units = torch.eye(values.shape[1], dtype=values.dtype, device=values.device)
    slopes: Tensor = vmap(norms, out_dims=1, chunk_size=_chunk(task, len(inputs)))(units)
    return slopes, values


def estimated_slopes(task: Task, inputs: Tensor, directions: int, source: Source) -> tuple[Tensor, Tensor]:
    """`exact_slopes`, estimated from random directions; each image gets directions of its own."""
    parameters = task.parameters
    inputs = inputs.clone()  # the tangent of a view is as large as the tensor behind it

    def represent(inputs: Tensor) -> Tensor:
        return task.representation(parameters, inputs)

    def squared_response(direction: Tensor) -> Tensor:
        tangent: Tensor = jvp(represent, (inputs,), (direction,))[1]
        return tangent.square()

    drawn = source.normal(inputs.expand(directions, *inputs.shape))
    squares: Tensor = vmap(squared_response, chunk_size=_chunk(task, len(inputs)))(drawn)
    return squares.mean(0).sqrt(), represent(inputs)


def _chunk(task: Task, batch: int) -> int:
    # Two values per activation: the derivatives of its input and of its output. Larger chunks gain nothing (measured:
    # lenet is fastest with 64, resnet18 with the 16 that this budget allows).
    values = 2 * batch * task.activations
    return max(1, min(64, MEMORY_BUDGET // (values * task.dtype.itemsize)))
