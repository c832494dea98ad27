import pytest
import torch
from torch import nn

import gradveil
from gradveil import metrics, models
from gradveil.attacks.peel import peeled
from gradveil.core.errors import InputError, ThreatModelError


def shared(task, images, labels):
    return [task.gradients(images[i : i + 1], labels[i : i + 1]) for i in range(len(images))]


def attacked(task, images, labels, **parameters):
    found = gradveil.attack("peel", **parameters).reconstruct(
        task, shared(task, images, labels), gradveil.ThreatModel(), generator=torch.Generator().manual_seed(0)
    )
    return found, metrics.psnr(images, found.inputs[:, 0].to(images).clamp(0, 1))


def network(activation):
    """Its second convolution is determined by its gradient and its active outputs, the first is not."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1),
        activation(),
        nn.Conv2d(3, 8, 3, padding=1),
        activation(),
        nn.Flatten(),
        nn.Linear(288, 10),
    )
    return gradveil.Task(model, input_shape=(1, 12, 12), classes=10)


@pytest.fixture
def images(generator):
    """Smooth images: a few bright spots."""
    rows = torch.nn.functional.interpolate(torch.rand(2, 1, 4, 4, generator=generator), size=12, mode="bilinear")
    return rows, torch.tensor([3, 7])


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid, nn.LeakyReLU])
def test_what_is_known_at_the_frontier_is_the_truth(activation, images):
    """The reference is the network itself, run on the true image, and autograd."""
    task = network(activation).to(torch.float64)
    for image, label in zip(images[0].double(), images[1], strict=True):
        frontier, found = peeled(task, task.gradients(image[None], label[None]), 1, torch.Generator())
        assert found.tolist() == [int(label)]
        assert frontier.module == "1"
        assert frontier.below == ("0.weight", "0.bias")
        true = task.inputs_of(frontier.module, task.parameters, image[None])
        scale = float(true.abs().max())
        assert torch.where(frontier.known, true - frontier.values, 0).abs().max() < 1e-5 * scale
        assert not bool((true[~frontier.known] > 1e-5 * scale).any())

        fed = []
        model = task.copy_model()
        model.get_submodule(frontier.module).register_forward_pre_hook(lambda _, args, fed=fed: fed.append(args[0]))
        loss = nn.functional.cross_entropy(model(image[None]), label[None])
        expected = torch.autograd.grad(loss, fed[0])[0]
        torch.testing.assert_close(frontier.signal, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def test_the_examples_of_a_batch_are_told_apart_and_peeled_together(generator):
    """The reference is the network itself, run on the true images, and autograd; labels repeat."""
    task, labels = network(nn.ReLU).to(torch.float64), torch.tensor([3, 7, 3])
    images = torch.rand(3, 1, 12, 12, generator=generator, dtype=torch.float64)
    frontier, found = peeled(task, task.gradients(images, labels), 3, generator)
    assert sorted(found.tolist()) == [3, 3, 7]
    assert frontier.module == "1"
    true = task.inputs_of(frontier.module, task.parameters, images)
    order = torch.cdist(true.clamp_min(0).flatten(1), frontier.values.flatten(1)).argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2]
    assert found[order].tolist() == labels.tolist()
    values, known, scale = frontier.values[order], frontier.known[order], float(true.abs().max())
    assert torch.where(known, true - values, 0).abs().max() < 1e-5 * scale
    assert not bool((true[~known] > 1e-5 * scale).any())

    fed = []
    model = task.copy_model()
    model.get_submodule(frontier.module).register_forward_pre_hook(lambda _, args: fed.append(args[0]))
    expected = torch.autograd.grad(nn.functional.cross_entropy(model(images), labels), fed[0])[0]
    torch.testing.assert_close(frontier.signal[order], expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def test_batches_are_recovered(images):
    task, batch = network(nn.ReLU), torch.cat([images[0][:1], 1 - images[0][:1]])
    found = gradveil.attack("peel", iterations=150, tv=1e-3).reconstruct(
        task,
        task.gradients(batch, images[1]),
        gradveil.ThreatModel(batch_size=2),
        generator=torch.Generator().manual_seed(0),
    )
    order = metrics.match(batch, found.inputs[0].to(batch))
    assert found.labels[0, order].tolist() == images[1].tolist()
    assert metrics.psnr(batch, found.inputs[0, order].to(batch).clamp(0, 1)).min() > 20


def test_examples_that_switch_on_the_same_units_are_not_told_apart(images):
    """Each leaves on two units that the other leaves off; two places and what noise makes of them say too little."""
    task = network(nn.ReLU)
    with pytest.raises(InputError, match="got 0 of 2 after"):
        gradveil.attack("peel").reconstruct(task, task.gradients(*images), gradveil.ThreatModel(batch_size=2))


def test_features_without_zeros_and_defended_batches_are_refused(images):
    attack, threat = gradveil.attack("peel"), gradveil.ThreatModel(batch_size=2)
    with pytest.raises(InputError, match="zeros that a ReLU leaves in their features, got 0 of 2"):
        attack.reconstruct(network(nn.Sigmoid), network(nn.Sigmoid).gradients(*images), threat)
    task = network(nn.ReLU)
    noisy = gradveil.defense("gaussian-noise:std=0.01").share(task, *images)
    with pytest.raises(InputError, match="whose rank is the size of the batch, 2, got rank 10"):
        attack.reconstruct(task, noisy, threat)


def test_examples_that_do_not_explain_their_signals_are_refused(generator):
    """Twice the bias's gradient: the features come out at half their size, and the classifier does not confirm them."""
    task = network(nn.ReLU).to(torch.float64)
    gradients = task.gradients(torch.rand(2, 1, 12, 12, generator=generator).double(), torch.tensor([3, 7]))
    gradients["5.bias"] = 2 * gradients["5.bias"]
    with pytest.raises(InputError, match="whose features explain their error signals to 0.01, got"):
        peeled(task, gradients, 2, generator)


def test_a_batch_that_is_not_taken_apart_does_not_hinder_the_others(images):
    task, threat = network(nn.ReLU), gradveil.ThreatModel(batch_size=2)
    apart = torch.cat([images[0][:1], 1 - images[0][:1]])
    updates = [task.gradients(batch, images[1]) for batch in (images[0], apart)]
    found = gradveil.attack("peel", iterations=5).reconstruct(task, updates, threat)
    assert found.loss.isfinite().tolist() == [False, True]
    assert sorted(found.labels[1].tolist()) == sorted(images[1].tolist())


def test_images_are_recovered_where_the_closed_form_is_not_enough(images):
    task = network(nn.ReLU)
    _, psnr = attacked(task, *images, iterations=150, tv=1e-3)
    closed_form = gradveil.attack("r-gap").reconstruct(task, shared(task, *images), gradveil.ThreatModel())
    exact = metrics.psnr(images[0], closed_form.inputs[:, 0].to(images[0]).nan_to_num(nan=0.5).clamp(0, 1))
    assert psnr.min() > 20
    assert bool((psnr > exact + 5).all())


def test_a_network_that_can_be_peeled_to_the_input_needs_no_search(images):
    model = models.create("mlp", input_shape=(1, 12, 12), classes=10)
    task = gradveil.Task(model, input_shape=(1, 12, 12), classes=10, mean=(0.4,), std=(0.3,))
    found, psnr = attacked(task, *images)
    assert psnr.min() > 80
    assert found.iterations.tolist() == [0, 0]
    assert found.labels[:, 0].tolist() == images[1].tolist()


def test_it_stops_above_anything_that_it_cannot_solve(images):
    """A pool, a shortcut and an operation outside any module: the search goes through all of them."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
            self.hidden, self.last = nn.Linear(216, 40), nn.Linear(40, 10)
            self.act = nn.Tanh()

        def forward(self, inputs):
            found = self.act(self.first(inputs))
            found = nn.functional.avg_pool2d(found + self.act(self.second(found)), 2)
            return self.last(self.hidden(found.flatten(1)))

    torch.manual_seed(1)
    task = gradveil.Task(Own(), input_shape=(1, 12, 12), classes=10)
    gradients = {name: value.double() for name, value in shared(task, *images)[0].items()}
    frontier, _ = peeled(task.to(torch.float64), gradients, 1, torch.Generator())
    assert frontier.module == "hidden"
    assert set(frontier.below) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    _, psnr = attacked(task, *images, iterations=150, tv=1e-3)
    assert psnr.min() > 20


def test_it_refuses_what_it_cannot_peel(tiny_task):
    attack = gradveil.attack("peel")
    with pytest.raises(ThreatModelError, match="if there are fewer than classes, got batch_size=4 and 4 classes"):
        attack.check_threat(tiny_task, gradveil.ThreatModel(batch_size=4))
    headless = nn.Sequential(nn.Conv2d(1, 10, 12), nn.Flatten())
    with pytest.raises(InputError, match="must end in a linear layer with a bias"):
        attack.check_threat(gradveil.Task(headless, input_shape=(1, 12, 12), classes=10), gradveil.ThreatModel())


def test_the_loss_of_a_network_peeled_to_the_input_tells_a_defended_update(images):
    """Undefended, what was found explains the update; under noise it does not, and the loss says so."""
    model = models.create("mlp", input_shape=(1, 12, 12), classes=10)
    task = gradveil.Task(model, input_shape=(1, 12, 12), classes=10)
    threat, losses = gradveil.ThreatModel(), {}
    for spec in ("none", "gaussian-noise:std=0.01"):
        defense = gradveil.defense(spec)
        update = defense.share(task, images[0][:1], images[1][:1], generator=torch.Generator().manual_seed(0))
        losses[spec] = float(gradveil.attack("peel").reconstruct(task, update, threat).loss[0])
    assert losses["none"] < 1e-5
    assert losses["gaussian-noise:std=0.01"] > 0.1
