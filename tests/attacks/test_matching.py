import copy
import itertools

import pytest
import torch
from torch import nn

import gradveil
from gradveil import metrics, models
from gradveil.attacks.matching.cost import simulate
from gradveil.attacks.matching.distances import squared_distance
from gradveil.core.errors import ThreatModelError
from gradveil.core.randomness import source_of
from gradveil.update import LocalSteps, compute_update, steps_of


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_simulated_client_sends_what_the_real_one_sends(tiny_task, tiny_batch, momentum):
    """For one order of the images: the client shuffles them, the simulation takes them in the given order."""
    inputs, labels = tiny_batch
    local = LocalSteps(epochs=1, batch_size=1, lr=0.3, momentum=momentum)
    real = compute_update(tiny_task, inputs, labels, local=local, generator=torch.Generator().manual_seed(1))
    distances = [
        float(
            squared_distance(simulate(tiny_task, tiny_task.parameters, inputs[list(o)], labels[list(o)], local), real)
        )
        for o in itertools.permutations(range(3))
    ]
    assert min(distances) < 1e-20
    assert max(distances) > 1e-8
    assert steps_of(local, 3) == 3
    assert steps_of(LocalSteps(epochs=2, batch_size=2), 3) == 4
    assert steps_of(None, 3) == 1


def test_local_steps_are_inverted(generator):
    """Two local steps with a different image in each."""
    model = models.create("lenet", input_shape=(1, 12, 12), classes=4, init="uniform")
    task = gradveil.Task(model, input_shape=(1, 12, 12), classes=4)
    images, labels = torch.rand(2, 1, 12, 12, generator=generator), torch.tensor([1, 3])
    local = LocalSteps(epochs=1, batch_size=1, lr=0.01)
    update = gradveil.defense("none").share(task, images, labels, local=local, generator=generator)
    threat = gradveil.ThreatModel(batch_size=2, local=local)
    found = gradveil.attack("idlg", iterations=300, restarts=2).reconstruct(task, update, threat, generator=generator)
    recovered = found.inputs[0].clamp(0, 1)
    assert sorted(found.labels[0].tolist()) == [1, 3]
    assert metrics.psnr(images, recovered[metrics.match(images, recovered)]).min() > 20


def dropout_task():
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Dropout(0.4), nn.Linear(36, 40), nn.Sigmoid(), nn.Dropout(0.4), nn.Linear(40, 3)]
    return gradveil.Task(nn.Sequential(*layers).double(), input_shape=(1, 6, 6), classes=3)


@pytest.mark.parametrize("local", [None, LocalSteps(epochs=2, lr=0.1, momentum=0.5)])
def test_a_simulated_client_with_the_same_masks_sends_the_same(local, generator):
    task, inputs = dropout_task(), torch.rand(2, 1, 6, 6, dtype=torch.float64, generator=generator)
    labels, state = torch.tensor([0, 2]), torch.Generator().manual_seed(5)
    real = compute_update(task, inputs, labels, local=local, generator=state)
    source, masks, orders = source_of(torch.Generator().manual_seed(5)), [], []
    for _ in range(steps_of(local, 2)):
        orders.append(source.permutation(2) if local else torch.arange(2))
        masks.append(task.with_masks(2, source)._masks)
    # A step of all examples does not depend on their order, but each example has its mask.
    masks = [
        {name: mask[order.argsort()] for name, mask in step.items()} for step, order in zip(masks, orders, strict=True)
    ]
    simulated = simulate(task, task.parameters, inputs, labels, local, masks)
    for name, value in real.items():
        torch.testing.assert_close(simulated[name], value)


@pytest.mark.parametrize("rounds", [1, 2])
def test_masks_are_searched_for_with_the_inputs(generator, rounds):
    """An attacker who computes in inference mode finds nothing; one who searches for the masks finds the image."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(288, 3)]
    task = gradveil.Task(nn.Sequential(*layers), input_shape=(1, 12, 12), classes=3)
    image, label = torch.rand(1, 1, 3, 3, generator=generator), torch.tensor([1])
    image = nn.functional.interpolate(image, size=12, mode="bilinear")
    seen = [gradveil.defense("none").share(task, image, label, generator=generator) for _ in range(rounds)]
    attack = gradveil.attack("inverting-gradients", optimiser="lbfgs", iterations=100, tv=0.01)

    def psnr(attacked):
        observed = gradveil.Rounds([(attacked, update) for update in seen])
        threat, randomness = gradveil.ThreatModel(rounds=rounds), torch.Generator().manual_seed(0)
        found = attack.reconstruct(attacked, observed, threat, generator=randomness)
        assert found.inputs.shape == (1, 1, 1, 12, 12)
        return float(metrics.psnr(image, found.inputs[0].clamp(0, 1)))

    assert psnr(task) > psnr(task.without_dropout()) + 4


def test_smoothing_approaches_the_network_it_smooths():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 20), nn.LeakyReLU(0.1), nn.Linear(20, 3)
    )
    task = gradveil.Task(model, input_shape=(1, 3, 3), classes=3)
    batch = torch.rand(4, 1, 3, 3), torch.tensor([0, 1, 2, 0])
    exact = task.gradients(*batch)
    errors = [float(squared_distance(task.smoothed(s).gradients(*batch), exact)) for s in (3, 30, 300, 30_000)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6
    assert task.has_kinks
    assert not task.smoothed(10).has_kinks
    for name, value in task.gradients(*batch).items():
        assert torch.equal(value, exact[name])  # the task itself is as it was


def test_the_smooth_form_finds_what_adam_does_not():
    """On a ReLU network with equal numbers of evaluations, it finds a lower cosine distance and so a better image."""
    model = models.create("lenet", input_shape=(1, 16, 16), classes=4, activation="relu")
    task = gradveil.Task(model, input_shape=(1, 16, 16), classes=4)
    grid = torch.linspace(0, 3, 16)
    images = torch.stack([(grid[:, None] * k).sin() * (grid * k).cos() for k in (1.0, 1.5, 2.0)])[:, None] / 2 + 0.5
    labels = torch.tensor([0, 1, 2])
    updates = [gradveil.defense("none").share(task, images[i : i + 1], labels[i : i + 1]) for i in range(3)]

    def psnr(**parameters):
        attack = gradveil.attack("inverting-gradients", tv=1e-3, **parameters)
        found = attack.reconstruct(task, updates, gradveil.ThreatModel(), generator=torch.Generator().manual_seed(0))
        return metrics.psnr(images, found.inputs[:, 0].clamp(0, 1)).median()

    assert psnr(optimiser="lbfgs", iterations=100) > psnr(optimiser="adam", iterations=300) + 2


def test_layer_weights_change_the_cost_and_nothing_else(tiny_task, tiny_batch):
    update = gradveil.defense("none").share(tiny_task, tiny_batch[0][:1], tiny_batch[1][:1])

    def loss(**parameters):
        attack = gradveil.attack("inverting-gradients", iterations=5, **parameters)
        found = attack.reconstruct(
            tiny_task, update, gradveil.ThreatModel(), generator=torch.Generator().manual_seed(0)
        )
        return float(found.loss[0])

    assert loss() == loss(layer_decay=1.0)
    assert loss() != loss(layer_decay=0.5)


def batch_norm_task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 3))
    return gradveil.Task(model, input_shape=(1, 6, 6), classes=3)


def test_pure_statistics_equal_those_of_a_training_step():
    task, images = batch_norm_task(), torch.rand(4, 1, 6, 6)
    trained = copy.deepcopy(task._functional.live)
    trained(images)
    statistics = task.statistics(task.parameters, images)
    assert list(statistics) == ["1.running_mean", "1.running_var"]
    for name, value in statistics.items():
        torch.testing.assert_close(value, trained.state_dict()[name])


def test_batch_norm_statistics_help_only_if_they_are_granted(generator):
    task, images = batch_norm_task(), torch.rand(2, 1, 6, 6, generator=generator)
    labels = torch.tensor([0, 2])
    update = gradveil.defense("none").share(task, images, labels)
    granted = {name: value[None] for name, value in update.meta.buffers.items() if value.is_floating_point()}
    attack = gradveil.attack("grad-inversion", iterations=60, seeds=2, statistics=1.0)

    def run(**grants):
        threat = gradveil.ThreatModel(batch_size=2, **grants)
        return attack.reconstruct(task, update, threat, generator=torch.Generator().manual_seed(0)).inputs[0]

    def error(inputs):
        return float(squared_distance(task.statistics(task.parameters, inputs), {k: v[0] for k, v in granted.items()}))

    assert error(run(statistics=granted)) < error(run())
    local = LocalSteps()
    stepped = gradveil.defense("none").share(task, images, labels, local=local)
    with pytest.raises(ThreatModelError, match="single gradients only"):
        attack.reconstruct(task, stepped, gradveil.ThreatModel(batch_size=2, local=local, statistics=granted))


def test_the_group_term_keeps_the_seeds_close_to_each_other(tiny_task, tiny_batch):
    update = gradveil.defense("none").share(tiny_task, tiny_batch[0][:1], tiny_batch[1][:1])

    def loss(group):
        attack = gradveil.attack("grad-inversion", iterations=30, seeds=3, group=group)
        found = attack.reconstruct(
            tiny_task, update, gradveil.ThreatModel(), generator=torch.Generator().manual_seed(0)
        )
        return float(found.loss[0])

    assert loss(10.0) > loss(0.0)
