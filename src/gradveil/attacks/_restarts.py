"""Restarts: run any attack from several starting points and keep the best result.

An attack that offers restarts declares a parameter of that name; its own `run` does not deal with them.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks.findings import LossHistory, Reconstruction
from gradveil.attacks.problem import Problem
from gradveil.task import Gradients


def best_of(restarts: int, run: Callable[[Problem], Reconstruction], problem: Problem) -> Reconstruction:
    """Attack every victim `restarts` times and keep the result with the lowest loss by the attacker's own objective.

    The restarts of a victim are passed to `run` as neighbouring victims, so they differ in what `run` draws for each.
    With local steps each restart also assumes a different order of the labels, because the order of the examples
    matters then.
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
        inputs=found.inputs[best],
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
