import pytest
import torch
from torch import nn

import gradveil
from gradveil import metrics, models
from gradveil.attacks._linear_input import find_layer, fit_product, joined
from gradveil.attacks.spear import _Search, separate
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.modality import Column, Table


def mlp(shape=(1, 8, 8), hidden=100, dtype=torch.float64, **given):
    model = models.create("mlp", input_shape=shape, classes=10, hidden=hidden).to(dtype)
    return gradveil.Task(model, input_shape=shape, classes=10, **given)


@pytest.fixture
def task():
    return mlp(mean=(0.5,), std=(0.3,))


def drawn(task, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, *task.input_shape, generator=generator, dtype=task.dtype)
    return inputs, torch.randint(task.classes, (count,), generator=generator)


def attacked(task, batches, defense="none", samples=100_000, adaptive=False, **given):
    defended = gradveil.defense(defense)
    updates = [
        defended.share(task, *batch, generator=torch.Generator().manual_seed(number))
        for number, batch in enumerate(batches)
    ]
    threat = gradveil.ThreatModel(batch_size=len(batches[0][0]), defense=defended, adaptive=adaptive, **given)
    attack = gradveil.attack("spear", samples=samples)
    return attack.reconstruct(task, updates, threat, generator=torch.Generator().manual_seed(0))


def errors(inputs, found):
    """The largest error of each input, with the reconstructions in the best order; and that order."""
    order = metrics.match(inputs, found.nan_to_num())
    return (inputs - found[order]).abs().flatten(1).amax(1), order


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_batches_are_recovered_exactly_with_their_labels(task, count):
    """Two victims at once; 1e-9 is 180 dB."""
    batches = [drawn(task, count, seed) for seed in (1, 2)]
    found = attacked(task, batches)
    assert found.inputs.shape == (2, count, 1, 8, 8)
    assert found.certain.all()
    assert found.loss.max() < 1e-12
    for number, (inputs, labels) in enumerate(batches):
        error, order = errors(inputs, found.inputs[number])
        assert error.max() < 1e-9
        assert torch.equal(found.labels[number, order], labels)


def test_single_precision_is_noise_of_a_known_size():
    task = mlp(dtype=torch.float32, mean=(0.5,), std=(0.3,))
    inputs, labels = drawn(task, 4)
    found = attacked(task, [(inputs, labels)])
    error, order = errors(inputs, found.inputs[0])
    assert error.max() < 1e-4
    assert found.certain.all()
    assert torch.equal(found.labels[0, order], labels)


def test_flat_inputs_and_a_relu_outside_any_module():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(20, 60), nn.Linear(60, 4)

        def forward(self, inputs):
            return self.last(torch.relu(self.first(inputs)))

    torch.manual_seed(0)
    task = gradveil.Task(Flat().double(), input_shape=(20,), classes=4)
    inputs, labels = drawn(task, 5)
    found = attacked(task, [(2 * inputs - 1, labels)])
    assert errors(2 * inputs - 1, found.inputs[0])[0].max() < 1e-9
    assert found.certain.all()


def test_rows_of_a_table(generator):
    columns = [Column(f"number {i}", 0, 1) for i in range(4)]
    columns += [Column(f"category {i}", categories=("a", "b", "c")) for i in range(6)]
    table = Table(columns=tuple(columns))
    stored = torch.cat([torch.rand(6, 4, generator=generator), torch.randint(3, (6, 6), generator=generator)], dim=1)
    rows, labels = table.inputs_of(stored), torch.tensor([0, 1, 1, 0, 1, 0])
    model = models.create("mlp", input_shape=(22,), classes=2, hidden=100)
    found = attacked(gradveil.Task(model, input_shape=(22,), classes=2, modality=table), [(rows, labels)])
    error, order = errors(rows, found.inputs[0])
    assert error.max() < 1e-4
    assert torch.equal(found.labels[0, order], labels)


def test_known_labels_are_put_in_order(task):
    inputs, labels = drawn(task, 4)
    shuffled = labels[[2, 0, 3, 1]]
    found = attacked(task, [(inputs, labels)], labels="known", known_labels=shuffled[None])
    _, order = errors(inputs, found.inputs[0])
    assert torch.equal(found.labels[0, order], labels)


def test_one_missing_direction_follows_from_the_others(task):
    """The reference is the true input: without its direction, the b - 1 others give it, and so the direction."""
    inputs, labels = drawn(task, 6)
    layer = find_layer("spear", task)
    product = fit_product(joined(layer, task.gradients(inputs, labels)), 6)
    search, generator = _Search(product, layer), torch.Generator().manual_seed(0)
    while len(search.directions) < 6:
        search.sample(4096, generator)
    for left_out in range(6):
        partial = _Search(product, layer)
        kept = torch.arange(6) != left_out
        partial.directions, partial.zeros = search.directions[kept], search.zeros[kept]
        batch = partial.assembled()
        assert errors(inputs, task.denormalised(batch.inputs.view_as(inputs)))[0].max() < 1e-9


def test_a_mixture_is_never_called_certain(task):
    """Noise as large as the gradient, and samples that do not suffice: the loss and `certain` say so."""
    batch = drawn(task, 6)
    found = attacked(task, [batch], defense="gaussian-noise:std=0.1", samples=5000)
    assert not found.certain.any()
    assert found.loss[0] > 0.5
    assert found.inputs.isfinite().all()
    layer = find_layer("spear", task)
    product = fit_product(joined(layer, task.gradients(*batch)), 6)
    few = separate(product, layer, samples=1, generator=torch.Generator().manual_seed(0))
    assert not len(few.agreement)
    zeros = {name: torch.zeros_like(value) for name, value in task.parameters.items()}
    nothing = gradveil.attack("spear", samples=10).reconstruct(task, zeros, gradveil.ThreatModel(batch_size=2))
    assert not nothing.certain.any()
    assert nothing.loss.isinf().all()


def test_small_noise_is_survived_with_the_declared_edge(task):
    inputs, labels = drawn(task, 4)
    found = attacked(task, [(inputs, labels)], defense="gaussian-noise:std=1e-6", adaptive=True)
    assert errors(inputs, found.inputs[0])[0].max() < 1e-2
    assert found.certain.all()


def test_an_adaptive_attacker_completes_what_pruning_left_out(task):
    """A product of low rank is determined by a part of its entries, except for pixels of which too few arrived."""
    inputs, labels = drawn(task, 2)
    typical = []
    for adaptive in (False, True):
        found = attacked(task, [(inputs, labels)], defense="top-k:keep=0.5", samples=20_000, adaptive=adaptive)
        _, order = errors(inputs, found.inputs[0])
        typical.append(float((found.inputs[0, order] - inputs).abs().median()))
    plain, completed = typical
    assert plain > 1e-3
    assert completed < 1e-6


def test_the_rank_is_cut_at_the_edge_of_the_noise(generator):
    left, right = (torch.randn(2, size, generator=generator, dtype=torch.float64) for size in (60, 90))
    noise = 0.01 * torch.randn(60, 90, generator=generator, dtype=torch.float64)
    product = fit_product(left.T @ right + noise, 5)
    assert len(product.sizes) == 2
    assert product.noise == pytest.approx(0.01, rel=0.1)


def refusing(module, shape=(1, 4, 4), **given):
    return gradveil.Task(module, input_shape=shape, classes=3, **given)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), InputError, "first layer is a linear layer"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(16, 40, bias=False), nn.ReLU(), nn.Linear(40, 3)),
            InputError,
            "'1' must have a trained weight and bias of its own, .*; got no gradient of its bias",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(16, 40), nn.Sigmoid(), nn.Linear(40, 3)),
            InputError,
            "'1' must be followed by a ReLU",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(16, 40), nn.ReLU(), nn.BatchNorm1d(40), nn.Linear(40, 3)),
            InputError,
            "cannot verify what it finds in a model with batch norm",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(16, 40), nn.ReLU(), nn.Dropout(), nn.Linear(40, 3)),
            InputError,
            "cannot verify what it finds in a model with active dropout",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, 3)),
            ThreatModelError,
            "of 10 units on 16 values can tell batches of at most 1 apart, got batch_size=2",
        ),
    ],
)
def test_models_that_it_cannot_read_are_refused(model, error, message):
    with pytest.raises(error, match=f"^spear: .*{message}"):
        gradveil.attack("spear").check_threat(refusing(model), gradveil.ThreatModel(batch_size=2))


def test_a_layer_that_is_fed_the_input_in_another_order_is_refused():
    class Flipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.relu, self.last = nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 3)

        def forward(self, inputs):
            return self.last(self.relu(self.first(inputs.flatten(1).flip(1))))

    with pytest.raises(InputError, match="first layer is a linear layer on the flattened input"):
        gradveil.attack("spear").check_threat(refusing(Flipped()), gradveil.ThreatModel())


def test_threats_that_it_cannot_handle_are_refused(task):
    attack = gradveil.attack("spear")
    with pytest.raises(ThreatModelError, match="reads one gradient, got local=LocalSteps"):
        attack.check_threat(task, gradveil.ThreatModel(local=gradveil.LocalSteps()))
    with pytest.raises(ThreatModelError, match="reads one gradient, got local=None and rounds=2"):
        attack.check_threat(task, gradveil.ThreatModel(rounds=2))
    own = task.with_model(task.copy_model())
    own.loss_name = None
    with pytest.raises(ThreatModelError, match="finds the labels only if every input has one class"):
        attack.check_threat(own, gradveil.ThreatModel())
