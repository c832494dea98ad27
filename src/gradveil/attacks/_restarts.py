"""Restarts: run any attack from several starting points and keep the best result, or an average of the best ones.

An attack that offers restarts declares a parameter of that name; its own `run` does not deal with them.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks.findings import LossHistory, Reconstruction
from gradveil.attacks.problem import Problem
from gradveil.metrics import match
from gradveil.modality import Modality
from gradveil.task import Gradients

AS_GOOD = 0.01
"""By how much more than the lowest loss, relative to it, a restart explains an update just as well."""


def best_of(restarts: int, run: Callable[[Problem], Reconstruction], problem: Problem) -> Reconstruction:
    """Attack every victim `restarts` times and keep the result with the lowest loss by the attacker's own objective.

    The restarts of a victim are passed to `run` as neighbouring victims, so they differ in what `run` draws for each.
    With local steps each restart also assumes a different order of the labels, because the order of the examples
    matters then. If the modality `ensembles`, restarts whose loss is as good as the best one are averaged; the loss
    that is returned is that of the best.
    """
    if restarts == 1:
        return run(problem)

    def repeated(tensors: Gradients) -> Gradients:
        return {name: value.repeat_interleave(restarts, 0) for name, value in tensors.items()}

    threat = problem.threat
    labels = label_orders(problem.labels, restarts) if threat.local else problem.labels.repeat_interleave(restarts, 0)
    known_labels = None if threat.known_labels is None else labels
    statistics = None if threat.statistics is None else repeated(threat.statistics)
    found = run(
        replace(
            problem,
            rounds=[(task, repeated(updates)) for task, updates in problem.rounds],
            labels=labels,
            threat=replace(threat, known_labels=known_labels, statistics=statistics),
        )
    )
    best = best_restarts(found.loss, restarts)
    history = found.history
    if history is not None:
        history = LossHistory(history.start[best], history.late[best], found.loss.view(-1, restarts))
    return replace(
        found,
        inputs=ensembled(found, best, restarts, problem.modality) if problem.modality.ensembles else found.inputs[best],
        labels=found.labels[best],
        loss=found.loss[best],
        iterations=found.iterations[best.cpu()],
        certain=None if found.certain is None else found.certain[best],
        history=history,
    )


def best_restarts(losses: Tensor, restarts: int) -> Tensor:
    """For each run of `restarts` neighbouring victims (the restarts of one), the index of the lowest loss."""
    chosen = losses.view(-1, restarts).argmin(1)
    return chosen + torch.arange(len(chosen), device=chosen.device) * restarts


def ensembled(found: Reconstruction, best: Tensor, restarts: int, modality: Modality) -> Tensor:
    """The inputs of the best restart of each victim, averaged with those of the others that are as good.

    If noise hides what the update says, restarts end in different places with nearly the same loss, and their mean is
    closer to the truth than any of them (Vero et al., TabLeak, ICML 2023, take the median). Examples are first matched
    to those of the best restart. Restarts that are worse have not converged, and would only blur the best.

    Args:
        found: all restarts, those of a victim next to each other.
        best: the index of the best restart of each victim.
        restarts: how many there are of each victim.
        modality: what the inputs are.
    """
    results = []
    for chosen in best.tolist():
        first, limit = chosen - chosen % restarts, (1 + AS_GOOD) * found.loss[chosen]
        places = [place for place in range(first, first + restarts) if place == chosen or found.loss[place] <= limit]
        inputs = [modality.repaired(found.inputs[place]) for place in places]
        anchor = inputs[places.index(chosen)]
        aligned = [other[match(anchor, other, modality)] for other in inputs]
        results.append(torch.stack(aligned).mean(0) if len(aligned) > 1 else found.inputs[chosen])
    return torch.stack(results)


def label_orders(labels: Tensor, orders: int) -> Tensor:
    """Each row in `orders` different orders, as neighbouring rows.

    The orders are spread evenly over all permutations; the first is the given one.
    """
    examples = labels.shape[1]
    permutations = math.factorial(examples)
    chosen = [_permutation(examples, index * permutations // orders) for index in range(orders)]
    return torch.stack([row[order] for row in labels for order in chosen])


def _permutation(count: int, number: int) -> list[int]:
    """Permutation `number` of `count` items in lexicographic order."""
    remaining, order = list(range(count)), []
    for left in range(count, 0, -1):
        block = math.factorial(left - 1)
        order.append(remaining.pop(number // block % left))
        number %= block
    return order
