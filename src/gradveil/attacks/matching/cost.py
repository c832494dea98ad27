"""The cost of a candidate: how far its update is from the shared one, and how unlikely the candidate itself is."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.matching.distances import Distance, squared_length
from gradveil.attacks.matching.masks import MaskSearch, StepMasks
from gradveil.attacks.matching.priors import ROUNDING, Prior
from gradveil.attacks.matching.space import Space
from gradveil.attacks.problem import Problem
from gradveil.core.errors import ParameterError
from gradveil.core.registry import suggest
from gradveil.defenses.knowledge import Evidence
from gradveil.task import Gradients, Task
from gradveil.update import LocalSteps, steps_of, with_momentum

Cost = Callable[[Tensor, Sequence[Gradients], Tensor], Tensor]
"""``(candidate, updates, labels)``: the cost of one victim's candidate, with one update per round."""

NOTHING = "none"
"""The value of `mute` if every layer is matched."""

# Memory to evaluate one victim, as a multiple of its activations plus the model's parameters. Measured peaks: resnet18
# 3.9, lenet 4.5, convnet 7.3; this leaves room.
VALUES_PER_UNIT = 12


def matched_layers(owner: str, layers: Iterable[str], mute: str) -> list[str]:
    """The layers that an attacker matches: all but those in `mute`.

    Args:
        owner: the caller's name, for error messages.
        layers: the names of all parameters.
        mute: ``"none"``, or names of parameters or modules to leave out, separated by ``|``.

    >>> matched_layers("idlg", ["0.weight", "0.bias", "1.weight"], "0.bias|1")
    ['0.weight']
    """
    remaining = all_layers = list(layers)
    for entry in mute.split("|") if mute != NOTHING else ():
        muted = [name for name in all_layers if name == entry or name.startswith(f"{entry}.")]
        if not muted:
            raise ParameterError(
                f"{owner}: mute must name layers of the model, got {entry!r}; {suggest(entry, all_layers)}"
            )
        remaining = [name for name in remaining if name not in muted]
    if not remaining:
        raise ParameterError(f"{owner}: mute={mute} leaves no layer to match; name fewer")
    return remaining


def simulate(
    task: Task,
    parameters: Gradients,
    inputs: Tensor,
    labels: Tensor,
    local: LocalSteps | None,
    masks: StepMasks = (),
) -> Gradients:
    """The update that a client with these inputs, in this order, would send; a pure function.

    Args:
        task: the model and its loss.
        parameters: the weights that the client was sent.
        inputs: the client's inputs.
        labels: their labels.
        local: its local steps.
        masks: the dropout masks of every step; none: dropout is in inference mode.
    """
    step_masks = iter(masks)

    def gradient(weights: Gradients, step_inputs: Tensor, step_labels: Tensor) -> Gradients:
        step_task = task.with_given_masks(next(step_masks)) if masks else task
        return step_task.gradient(weights, step_inputs, step_labels)

    if local is None:
        return gradient(parameters, inputs, labels)
    total: Gradients = {}
    velocity: Gradients = {}
    current = parameters
    size = local.batch_size or len(inputs)
    for _ in range(local.epochs):
        for first in range(0, len(inputs), size):
            batch = slice(first, first + size)
            step = gradient(current, inputs[batch], labels[batch])
            velocity = with_momentum(velocity, step, local.momentum)
            total = {name: total[name] + velocity[name] if total else velocity[name] for name in velocity}
            current = {name: value - local.lr * velocity[name] for name, value in current.items()}
    return total


@dataclass(frozen=True)
class Matching:
    """How a gradient-matching attack judges its candidates.

    Args:
        layers: the parameters that are matched, see `matched_layers`.
        distance: the distance between the simulated and the shared update.
        prior: a term added to the cost of a candidate.
        least_prior: weight of the modality's prior for an adaptive attacker even if there is no noise, in units of the
            update's squared length; needed because defended updates leave some directions of the inputs undetermined.

    Example:
        >>> from gradveil.attacks.matching import SQUARED
        >>> Matching(["0.weight"], SQUARED).least_prior
        0.0
    """

    layers: Sequence[str]
    distance: Distance
    prior: Prior | None = None
    least_prior: float = 0.0

    def cost(
        self, problem: Problem, tasks: Sequence[Task], space: Space | None = None, search: MaskSearch | None = None
    ) -> Cost:
        r"""The cost of one victim's candidate.

        A plain attacker takes the distance between simulated and shared updates, averaged over the rounds, plus the
        prior. An adaptive attacker (`Knowledge`) compares e, what the defense should make of the candidate's gradient,
        with v, what the update reveals, and weights each coordinate by w, how much it reveals. Coordinates that reveal
        nothing must at least have allowed values a. The more noise there is, the more the modality's prior P counts
        (for images, the total variation):

        .. math:: distance(\sqrt w e, \sqrt w v) + unit \cdot \Big(\sum_{w_i = 0} (e_i - a_i)^2 +
                  (4 \, variance \cdot values + least \cdot |u|^2) \, P(x)\Big) + prior(x)

        The factor 4 variance follows from a prior under which the differences of neighbours are independent Laplace
        variables of mean absolute value 0.5. In photographs that mean is 0.05, but the differences are far from
        independent. We tried means from 0.02 to 2 with idlg on four CIFAR-10 images and LeNet: under normal noise of
        0.1 a mean of 0.5 was best, under 0.01 a mean of 0.17, by half a decibel.

        Candidates that stand for inputs (`Space`) may have a prior of their own. Then both terms with P(x) are replaced
        by variance times their surprise, and the cost of any attacker has the term weight times surprise.

        Args:
            problem: what is known, and the local steps.
            tasks: one per round, in the precision of the search.
            space: what the candidates stand for; None: they are the inputs.
            search: what the candidates are extended by if dropout is active; None: it is in inference mode.
        """
        distance, prior, local = self.distance, self.prior, problem.threat.local
        parameters, modality = [task.parameters for task in tasks], problem.task.modality
        surprise = space.surprise if space else None

        no_masks: list[StepMasks] = [() for _ in tasks]

        def unpack(extended: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, list[StepMasks]]:
            candidate, masks = search.split(extended) if search else (extended, no_masks)
            inputs, labels = space.unpack(candidate, labels) if space else (candidate, labels)
            return candidate, inputs, labels, masks

        def with_priors(loss: Tensor, candidate: Tensor, inputs: Tensor) -> Tensor:
            if prior is not None:
                loss = loss + prior(inputs)
            return loss + space.weight * surprise(candidate) if space and surprise else loss

        def matched(gradients: Gradients) -> Gradients:
            return {name: gradients[name] for name in self.layers}

        def plain(extended: Tensor, updates: Sequence[Gradients], labels: Tensor) -> Tensor:
            candidate, inputs, labels, masks = unpack(extended, labels)
            parts = [
                distance.between(simulate(task, weights, inputs, labels, local, steps), matched(update))
                for task, weights, update, steps in zip(tasks, parameters, updates, masks, strict=True)
            ]
            loss = parts[0] if len(parts) == 1 else torch.stack(parts).mean()
            return with_priors(loss, candidate, inputs)

        if problem.knowledge is None or not problem.knowledge.changes_matching:
            return plain
        knowledge = problem.knowledge  # a name that the type checker knows is not None in the functions below

        def adaptive(extended: Tensor, updates: Sequence[Gradients], labels: Tensor) -> Tensor:
            candidate, inputs, labels, masks = unpack(extended, labels)
            expected = []
            for task, weights, update, steps in zip(tasks, parameters, updates, masks, strict=True):
                client_task = knowledge.task(task, update) if knowledge.task else task
                expected.append(simulate(client_task, weights, inputs, labels, local, steps))
            if knowledge.expect:
                expected = knowledge.expect(expected, updates)
            modality_prior = None if surprise else modality.prior(inputs, rounding=ROUNDING)
            penalty = inputs.new_zeros(()) if modality_prior is None else modality_prior
            parts = []
            for task, values, update in zip(tasks, expected, updates, strict=True):
                variance = knowledge.variance(update) if callable(knowledge.variance) else knowledge.variance
                if surprise:
                    noise_prior = variance / len(updates) * surprise(candidate)
                else:
                    noise_prior = 4 * variance / len(updates) * inputs.numel() * penalty
                draws = knowledge.draw(task, values, inputs, labels) if knowledge.draw else [values]
                parts += [mismatch(matched(draw), matched(update), variance, noise_prior, penalty) for draw in draws]
            loss = torch.stack(parts).mean()
            return with_priors(loss, candidate, inputs)

        def mismatch(
            values: Gradients, update: Gradients, variance: Tensor | float, noise_prior: Tensor, penalty: Tensor
        ) -> Tensor:
            """The distance from one update, plus the squared terms in the distance's unit."""
            evidence = knowledge.read(values, update) if knowledge.read else Evidence(update)
            revealed, squares = evidence.values, noise_prior + self.least_prior * squared_length(update) * penalty
            if evidence.weights is not None:
                roots = {name: weight.sqrt() for name, weight in evidence.weights.items()}
                if evidence.allowed is not None:
                    outside = [
                        ((values[n] - evidence.allowed[n]).square() * (root == 0)).sum() for n, root in roots.items()
                    ]
                    squares = squares + torch.stack(outside).sum()
                values, revealed = _times(roots, values), _times(roots, revealed)
            length = squared_length(revealed).clamp_min(torch.finfo(squares.dtype).tiny)
            signal = (length - variance * sum(value.numel() for value in revealed.values())).maximum(0.01 * length)
            return distance.between(values, revealed) + distance.unit(length, signal) * squares

        return adaptive


def _times(factors: Gradients, values: Gradients) -> Gradients:
    return {name: factors[name] * values[name] for name in factors}


def victim_bytes(task: Task, problem: Problem, unpacking: int = 0) -> int:
    """Memory needed to evaluate one victim's cost and the cost's gradient.

    Args:
        task: the model, in the precision of the search.
        problem: says how many rounds, examples and local steps there are.
        unpacking: how many values are kept while a candidate is unpacked, see `Space.kept_values`.
    """
    values = problem.examples * task.activations + task.size
    steps = len(problem.rounds) * steps_of(problem.threat.local, problem.examples)
    # Unpacking is differentiated once, so besides what is kept there is at most as much again.
    return (VALUES_PER_UNIT * values * steps + 2 * unpacking) * task.dtype.itemsize
