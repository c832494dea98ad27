"""What a candidate costs: how far its update is from the one that was shared, and how unlikely it is by itself."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.matching.distances import Distance, squared_length
from gradveil.attacks.matching.priors import ROUNDING, Prior
from gradveil.attacks.problem import Problem
from gradveil.core.errors import ParameterError
from gradveil.core.registry import suggest
from gradveil.defenses.knowledge import Evidence
from gradveil.task import Gradients, Task
from gradveil.update import LocalSteps, steps_of, with_momentum

Cost = Callable[[Tensor, Sequence[Gradients], Tensor], Tensor]
"""``(inputs, updates, labels)``: what one victim's candidate costs, with one update per round."""

NOTHING = "none"
"""What `mute` says when every layer is matched."""

# Memory of one victim's evaluation, in units of its activations and the model's parameters together. Measured peaks:
# resnet18 3.9, lenet 4.5, convnet 7.3; this leaves room.
VALUES_PER_UNIT = 12


def matched_layers(owner: str, layers: Iterable[str], mute: str) -> list[str]:
    """The layers an attacker matches: all but those in `mute`.

    Args:
        owner: who asks, for the error message.
        layers: the names of all parameters.
        mute: ``"none"``, or names of parameters or modules to leave out, separated by ``|``.

    >>> matched_layers("idlg", ["0.weight", "0.bias", "1.weight"], "0.bias|1")
    ['0.weight']
    """
    left = every = list(layers)
    for entry in mute.split("|") if mute != NOTHING else ():
        named = [name for name in every if name == entry or name.startswith(f"{entry}.")]
        if not named:
            raise ParameterError(f"{owner}: mute names no layer of the model: {entry!r}; {suggest(entry, every)}")
        left = [name for name in left if name not in named]
    if not left:
        raise ParameterError(f"{owner}: mute={mute} leaves no layer to match; name fewer")
    return left


def simulate(task: Task, parameters: Gradients, inputs: Tensor, labels: Tensor, local: LocalSteps | None) -> Gradients:
    """The update a client with these inputs would send, as a pure function; its examples come in the given order."""
    if local is None:
        return task.gradient(parameters, inputs, labels)
    total: Gradients = {}
    velocity: Gradients = {}
    current = parameters
    size = local.batch_size or len(inputs)
    for _ in range(local.epochs):
        for first in range(0, len(inputs), size):
            batch = slice(first, first + size)
            step = task.gradient(current, inputs[batch], labels[batch])
            velocity = with_momentum(velocity, step, local.momentum)
            total = {name: total[name] + velocity[name] if total else velocity[name] for name in velocity}
            current = {name: value - local.lr * velocity[name] for name, value in current.items()}
    return total


@dataclass(frozen=True)
class Matching:
    """What the candidates of a gradient-matching attack are judged by.

    Args:
        layers: the parameters that are matched, see `matched_layers`.
        distance: between the simulated and the shared update.
        prior: what is added to the cost of a candidate.
        least_prior: weight of the modality's prior for someone who knows the defense even where there is no noise, in
            units of the update's squared length: defended updates leave directions of the inputs open.

    Example:
        >>> from gradveil.attacks.matching import SQUARED
        >>> Matching(["0.weight"], SQUARED).least_prior
        0.0
    """

    layers: Sequence[str]
    distance: Distance
    prior: Prior | None = None
    least_prior: float = 0.0

    def cost(self, problem: Problem, tasks: Sequence[Task]) -> Cost:
        r"""What one victim's candidate costs.

        A plain attacker takes the mean over the rounds of the distance between simulated and shared updates, plus the
        prior. One who knows the defense (`Knowledge`) compares what the defense should make of the candidate's gradient
        e with what the update tells, v, by what each coordinate is worth, w; coordinates that tell nothing must at
        least have allowed values a; and the more noise there is, the more the modality's prior P (of images the total
        variation) counts:

        .. math:: distance(\sqrt w e, \sqrt w v) + unit \cdot \Big(\sum_{w_i = 0} (e_i - a_i)^2 +
                  (4 \, variance \cdot values + least \cdot |u|^2) \, P(x)\Big) + prior(x)

        4 variance is what a prior of independent Laplace differences of neighbours of mean 0.5 gives. Such differences
        are 0.05 in photographs, but they are far from independent. Tried by idlg on four CIFAR-10 images and LeNet,
        from 0.02 to 2: under normal noise of 0.1 a mean of 0.5 was best, under 0.01 a mean of 0.17, by half a decibel.

        Args:
            problem: what is known, and the local steps.
            tasks: of the rounds, in the precision of the search.
        """
        distance, prior, knowledge, local = self.distance, self.prior, problem.knowledge, problem.threat.local
        parameters, modality = [task.parameters for task in tasks], problem.task.modality

        def matched(gradients: Gradients) -> Gradients:
            return {name: gradients[name] for name in self.layers}

        def plain(inputs: Tensor, updates: Sequence[Gradients], labels: Tensor) -> Tensor:
            parts = [
                distance.between(simulate(task, weights, inputs, labels, local), matched(update))
                for task, weights, update in zip(tasks, parameters, updates, strict=True)
            ]
            loss = parts[0] if len(parts) == 1 else torch.stack(parts).mean()
            return loss if prior is None else loss + prior(inputs)

        if knowledge is None or not knowledge.changes_matching:
            return plain
        know = knowledge  # for the type checker

        def informed(inputs: Tensor, updates: Sequence[Gradients], labels: Tensor) -> Tensor:
            expected = []
            for task, weights, update in zip(tasks, parameters, updates, strict=True):
                own = know.task(task, update) if know.task else task
                expected.append(simulate(own, weights, inputs, labels, local))
            if know.expect:
                expected = know.expect(expected, updates)
            known = modality.prior(inputs, rounding=ROUNDING)
            unlikely = inputs.new_zeros(()) if known is None else known
            parts = []
            for task, values, update in zip(tasks, expected, updates, strict=True):
                noise = know.variance(update) if callable(know.variance) else know.variance
                smooth = 4 * noise / len(updates) * inputs.numel() * unlikely
                drawn = know.draw(task, values, inputs, labels) if know.draw else [values]
                parts += [judge(matched(one), matched(update), noise, smooth, unlikely) for one in drawn]
            loss = torch.stack(parts).mean()
            return loss if prior is None else loss + prior(inputs)

        def judge(
            values: Gradients, update: Gradients, noise: Tensor | float, smooth: Tensor, unlikely: Tensor
        ) -> Tensor:
            evidence = know.read(values, update) if know.read else Evidence(update)
            told, squares = evidence.values, smooth + self.least_prior * squared_length(update) * unlikely
            if evidence.weights is not None:
                roots = {name: weight.sqrt() for name, weight in evidence.weights.items()}
                if evidence.allowed is not None:
                    outside = [
                        ((values[n] - evidence.allowed[n]).square() * (root == 0)).sum() for n, root in roots.items()
                    ]
                    squares = squares + torch.stack(outside).sum()
                values, told = _times(roots, values), _times(roots, told)
            length = squared_length(told).clamp_min(torch.finfo(squares.dtype).tiny)
            signal = (length - noise * sum(value.numel() for value in told.values())).maximum(0.01 * length)
            return distance.between(values, told) + distance.unit(length, signal) * squares

        return informed


def _times(factors: Gradients, values: Gradients) -> Gradients:
    return {name: factors[name] * values[name] for name in factors}


def victim_bytes(task: Task, problem: Problem) -> int:
    """Memory that one victim takes while its cost and the cost's gradient are evaluated.

    Args:
        task: in the precision of the search.
        problem: how many rounds, examples and local steps there are.
    """
    values = problem.examples * task.activations + task.size
    steps = len(problem.rounds) * steps_of(problem.threat.local, problem.examples)
    return VALUES_PER_UNIT * values * steps * task.dtype.itemsize
