import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import gradveil
from gradveil.core.errors import InputError, ParameterError
from gradveil.update import LocalSteps, Meta, Update, compute_update, weighted_mean


def test_one_full_batch_step_is_the_gradient(tiny_task, tiny_batch):
    gradient = tiny_task.gradients(*tiny_batch)
    update = compute_update(tiny_task, *tiny_batch, local=LocalSteps(epochs=1, lr=0.5))
    for name in gradient:
        torch.testing.assert_close(update[name], gradient[name])
    assert update.meta.samples == 3


def test_local_steps_equal_sgd_by_hand(tiny_task, tiny_batch):
    inputs, labels = tiny_batch
    local = LocalSteps(epochs=2, batch_size=2, lr=0.3)
    order = torch.Generator().manual_seed(0)
    weights = tiny_task.parameters
    for _ in range(2):
        for batch in torch.randperm(3, generator=order).split(2):
            step = tiny_task.with_parameters(weights).gradients(inputs[batch], labels[batch])
            weights = {name: weights[name] - 0.3 * step[name] for name in weights}
    update = compute_update(tiny_task, inputs, labels, local=local, generator=torch.Generator().manual_seed(0))
    for name, start in tiny_task.parameters.items():
        torch.testing.assert_close(start - 0.3 * update[name], weights[name])


def test_momentum_equals_torchs_and_starts_at_zero():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Sigmoid(), nn.Linear(5, 3)).double()
    task = gradveil.Task(model, input_shape=(1, 6, 6), classes=3)
    start = {name: value.clone() for name, value in task.parameters.items()}
    images, labels = torch.rand(7, 1, 6, 6, dtype=torch.float64), torch.arange(7) % 3
    local = LocalSteps(epochs=3, batch_size=3, lr=0.1, momentum=0.9)
    update = compute_update(task, images, labels, local=local, generator=torch.Generator().manual_seed(0))
    order, optimiser = torch.Generator().manual_seed(0), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for batch in torch.randperm(7, generator=order).split(3):
            optimiser.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimiser.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(start[name] - 0.1 * update[name], value.detach())


def test_local_steps_carry_the_statistics_of_the_last_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3))
    task = gradveil.Task(model, input_shape=(1, 6, 6), classes=3)
    images, labels = torch.rand(8, 1, 6, 6), torch.arange(8) % 3
    update = compute_update(
        task, images, labels, local=LocalSteps(3, 4, 0.1), generator=torch.Generator().manual_seed(0)
    )
    order, optimiser = torch.Generator().manual_seed(0), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for batch in torch.randperm(8, generator=order).split(4):
            optimiser.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimiser.step()
    for name, value in update.meta.buffers.items():
        torch.testing.assert_close(value, model.state_dict()[name])
    assert int(update.meta.buffers["1.num_batches_tracked"]) == 6


@given(st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(lambda w: sum(w) > 0.01))
def test_the_weighted_mean_equals_its_formula(weights):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(len(weights), 7, generator=generator, dtype=torch.float64)
    got = weighted_mean([Update({"w": row}) for row in values], weights)["w"]
    expected = (values * torch.tensor(weights, dtype=torch.float64)[:, None]).sum(0) / sum(weights)
    torch.testing.assert_close(got, expected)


def test_statistics_are_averaged_and_counts_kept():
    updates = [
        Update({"w": torch.ones(1)}, Meta(samples=1, buffers={"mean": torch.tensor([v]), "n": torch.tensor(4)}))
        for v in (1.0, 3.0)
    ]
    mean = weighted_mean(updates, [1, 3])
    assert mean.meta.buffers["mean"].tolist() == [2.5]
    assert int(mean.meta.buffers["n"]) == 4
    assert mean.meta.samples == 2


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(InputError, match="expected 2 finite, non-negative weights"):
        weighted_mean([Update({"w": torch.ones(1)})] * 2, weights)


def test_updates_of_different_models_are_refused():
    with pytest.raises(InputError, match="updates of one model"):
        weighted_mean([Update({"w": torch.ones(1)}), Update({"v": torch.ones(1)})])
    with pytest.raises(InputError, match="updates of one model"):
        weighted_mean([Update({"w": torch.ones(3)}), Update({"w": torch.ones(1)})])
    with pytest.raises(InputError, match="at least one update"):
        weighted_mean([])


def test_local_steps_check_their_parameters():
    with pytest.raises(ParameterError, match="LocalSteps: lr must be a number above 0, got 0"):
        gradveil.LocalSteps(lr=0)


def test_updates_with_other_statistics_are_refused():
    layers = {"w": torch.ones(2)}
    updates = [Update(layers, Meta(buffers=buffers)) for buffers in ({"mean": torch.zeros(2)}, {})]
    for pair in (updates, updates[::-1], [updates[0], Update(layers, Meta(buffers={"mean": torch.zeros(3)}))]):
        with pytest.raises(InputError, match="aggregate: expected of every update for the statistic 'mean'"):
            weighted_mean(pair)
