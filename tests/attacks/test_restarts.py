"""Restarts for any attack."""

import itertools
from dataclasses import dataclass

import pytest
import torch

import gradveil
from gradveil.attacks import Attack, Findings, Problem, Reconstruction
from gradveil.attacks._restarts import best_restarts, label_orders
from gradveil.core.errors import ThreatModelError
from gradveil.core.parameters import integer


def test_the_best_restart_has_the_lowest_loss():
    assert best_restarts(torch.tensor([3.0, 1.0, 2.0, 0.5, 0.7, 0.6]), 3).tolist() == [1, 3]


def test_restarts_with_local_steps_assume_different_label_orders():
    labels = torch.tensor([[1, 2, 3], [7, 8, 9]])
    orders = label_orders(labels, 6).tolist()
    assert sorted(map(tuple, orders[:6])) == sorted(itertools.permutations([1, 2, 3]))
    assert orders[6] == [7, 8, 9]
    assert label_orders(labels, 1).tolist() == labels.tolist()
    assert len({tuple(row) for row in label_orders(labels, 3)[:3].tolist()}) == 3


@dataclass(frozen=True, repr=False)
class Guess(Attack):
    """Guesses once per victim and does not deal with restarts itself."""

    name = "guess"
    restarts: int = integer(4, low=1)

    def run(self, problem: Problem) -> Reconstruction:
        shape = (problem.victims, problem.examples, *problem.task.input_shape)
        inputs = torch.rand(shape, generator=problem.generator, dtype=torch.float64)
        assert all(len(value) == problem.victims for _, seen in problem.rounds for value in seen.values())
        assert len(problem.threat.known_labels) == len(problem.threat.statistics["mean"]) == problem.victims
        sums = inputs.flatten(1).sum(1)
        return Reconstruction(inputs, problem.labels, sums, torch.arange(problem.victims), certain=sums[:, None] > 0)


def test_any_attack_can_be_restarted(tiny_task, tiny_batch):
    updates = [tiny_task.gradients(tiny_batch[0][i : i + 1], tiny_batch[1][i : i + 1]) for i in range(3)]
    granted = {"labels": "known", "known_labels": tiny_batch[1][:, None], "statistics": {"mean": torch.arange(3)}}
    threat = gradveil.ThreatModel(**granted)
    found = Guess().reconstruct(tiny_task, updates, threat, generator=torch.Generator().manual_seed(0))
    draws = torch.rand(3, 4, 1, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    best = draws.flatten(2).sum(2).argmin(1)
    assert torch.equal(found.inputs, draws[torch.arange(3), best])
    assert torch.equal(found.loss, draws.flatten(2).sum(2).amin(1))
    assert found.iterations.tolist() == (4 * torch.arange(3) + best).tolist()
    assert found.labels.tolist() == tiny_batch[1][:, None].tolist()
    assert found.certain.shape == (3, 1)
    assert found.history is None


def test_findings_of_another_kind_are_refused_by_reconstruct(tiny_task, tiny_batch):
    class Silent(Guess):
        def run(self, problem):
            return Findings()

    update = tiny_task.gradients(tiny_batch[0][:1], tiny_batch[1][:1])
    with pytest.raises(ThreatModelError, match="guess: reconstruct expects a Reconstruction, got Findings"):
        Silent().reconstruct(tiny_task, update, gradveil.ThreatModel())
