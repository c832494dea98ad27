"""Several starting points for any attack, of which the attacker keeps the best.

An attack that has restarts declares a parameter of that name; nothing in its own `run` knows of them.
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
    """Attack every victim `restarts` times and keep what has the lowest loss, which is the attacker's own.

    A victim's restarts are victims next to each other, so they differ by what `run` draws for each. With local steps
    each also supposes another order of the labels: it matters which example came when.
    """
    if restarts == 1:
        return run(problem)

    def repeated(tensors: Gradients) -> Gradients:
        return {name: value.repeat_interleave(restarts, 0) for name, value in tensors.items()}

    threat = problem.threat
    labels = label_orders(problem.labels, restarts) if threat.local else problem.labels.repeat_interleave(restarts, 0)
    known = None if threat.known_labels is None else labels
    granted = None if threat.statistics is None else repeated(threat.statistics)
    found = run(
        replace(
            problem,
            rounds=[(task, repeated(updates)) for task, updates in problem.rounds],
            labels=labels,
            threat=replace(threat, known_labels=known, statistics=granted),
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
    """Of every `restarts` neighbouring victims, which are one victim's restarts, the place of the lowest loss."""
    chosen = losses.view(-1, restarts).argmin(1)
    return chosen + torch.arange(len(chosen), device=chosen.device) * restarts


def label_orders(labels: Tensor, orders: int) -> Tensor:
    """Each row in `orders` different orders, next to each other.

    The orders are spread evenly over all permutations; the first is the given one.
    """
    examples = labels.shape[1]
    every = math.factorial(examples)
    picked = [_permutation(examples, place * every // orders) for place in range(orders)]
    return torch.stack([row[order] for row in labels for order in picked])


def _permutation(count: int, number: int) -> list[int]:
    """Permutation `number` of `count` things in lexical order."""
    rest, order = list(range(count)), []
    for left in range(count, 0, -1):
        block = math.factorial(left - 1)
        order.append(rest.pop(number // block % left))
        number %= block
    return order
