"""Batched clients against the plain loop over `Defense.share`."""

import pytest
import torch
from torch import nn

import gradveil
from gradveil import models
from gradveil.core.errors import ParameterError
from gradveil.core.randomness import derived_generator
from gradveil.federation import Training
from gradveil.federation._clients import Clients, choose_execution
from gradveil.update import ClientRound, compute_update

SHAPE = (1, 12, 12)
LOCAL = {
    "sgd": None,
    "avg": gradveil.LocalSteps(epochs=2, batch_size=3, lr=0.1),
    "avg with momentum": gradveil.LocalSteps(epochs=2, batch_size=3, lr=0.1, momentum=0.9),
}
SIZES = {"equal": [6, 6, 6, 6], "unequal": [6, 2, 5, 6, 3]}


def task_of(name: str, **parameters) -> gradveil.Task:
    model = models.create(name, input_shape=SHAPE, classes=4, **parameters)
    return gradveil.Task(model, input_shape=SHAPE, classes=4)


def own_norm() -> gradveil.Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(300, 4))
    return gradveil.Task(model, input_shape=SHAPE, classes=4)


def own_loss() -> gradveil.Task:
    model = models.create("mlp", input_shape=SHAPE, classes=4)
    return gradveil.Task(model, lambda out, y: (out.logsumexp(1) - out[:, 0] * y).mean(), input_shape=SHAPE, classes=4)


TASKS = {
    "lenet": lambda: task_of("lenet", init="uniform"),
    "mnist-cnn": lambda: task_of("mnist-cnn"),
    "batch norm": own_norm,
    "a loss of the user's own": own_loss,
}


def batches_of(sizes):
    generator = torch.Generator().manual_seed(5)
    return {
        10 * client + 3: (
            torch.rand(size, *SHAPE, generator=generator),
            torch.randint(0, 4, [size], generator=generator),
        )
        for client, size in enumerate(sizes)
    }


def randomness(client, purpose):
    return derived_generator(0, purpose, client)


def round_of(task, batches, local=None, memories=None):
    """The clients, and the function that makes the `ClientRound` of each."""

    def make_round(client):
        inputs, targets = batches[client]
        return ClientRound(
            task=task,
            inputs=inputs,
            targets=targets,
            generator=randomness(client, "share"),
            memory=(memories or {}).get(client),
            local=local,
        )

    return list(batches), make_round


def shared_by(execution, task, defense, batches, local, *, rounds=1, **options):
    """The updates of several rounds with the same batches, computed by `Clients.share`."""
    memories = {client: {} for client in batches}
    clients = Clients(task, defense, Training(clients=100, batch_size=6, local=local), execution, **options)
    return [clients.share(*round_of(task, batches, local, memories)) for _ in range(rounds)]


def assert_same(one, other):
    assert list(one) == list(other)
    for client, update in one.items():
        for name, value in update.items():
            torch.testing.assert_close(other[client][name], value, rtol=1e-5, atol=1e-5)
        assert (update.meta.samples, update.meta.local) == (other[client].meta.samples, other[client].meta.local)
        assert update.meta.buffers.keys() == other[client].meta.buffers.keys()
        for name, value in update.meta.buffers.items():
            torch.testing.assert_close(other[client].meta.buffers[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("task", TASKS)
def test_batched_clients_equal_the_loop(task, local, sizes):
    task, local = TASKS[task](), LOCAL[local]
    defense, batches = gradveil.defense("gaussian-noise", std=0.1), batches_of(SIZES[sizes])
    [batched] = shared_by("batch", task, defense, batches, local)
    plain = {
        client: defense.share(task, *batch, generator=randomness(client, "share"), local=local)
        for client, batch in batches.items()
    }
    assert_same(plain, batched.updates)
    assert not batched.failed


def test_padding_needs_few_programs_and_changes_nothing():
    """Batches of 1 to 8 images run as four programs: 1, 2, 4 and 8 images."""
    task = task_of("mlp")
    batches = batches_of(range(1, 9))
    clients = Clients(task, gradveil.defense("none"), Training(clients=100, batch_size=8), "batch")
    lengths, run = [], clients._batched._run
    clients._batched._run = lambda weights, own_weights, steps, length: (
        lengths.append(length) or run(weights, own_weights, steps, length)
    )
    batched = clients.share(*round_of(task, batches))
    assert lengths == [1, 2, 4, 8]
    for client, (images, labels) in batches.items():
        for name, value in task.gradients(images, labels).items():
            torch.testing.assert_close(batched.updates[client][name], value, rtol=1e-5, atol=1e-6)


def soft(batches):
    """The same labels as probabilities."""
    return {client: (inputs, nn.functional.one_hot(labels, 4).float()) for client, (inputs, labels) in batches.items()}


@pytest.mark.parametrize("local", LOCAL)
def test_targets_that_are_not_class_numbers_are_batched_without_padding(local):
    """Cross-entropy accepts probabilities too, and there is no probability that it ignores."""
    task, batches, none = task_of("mlp"), soft(batches_of(SIZES["unequal"])), gradveil.defense("none")
    [batched] = shared_by("batch", task, none, batches, LOCAL[local])
    [plain] = shared_by("loop", task, none, batches, LOCAL[local])
    assert_same(plain.updates, batched.updates)
    for client, (inputs, targets) in batches.items() if LOCAL[local] is None else ():
        by_number = task.gradients(inputs, targets.argmax(1))
        for name, value in by_number.items():
            torch.testing.assert_close(batched.updates[client][name], value, rtol=1e-4, atol=1e-6)


def test_targets_need_not_be_one_class_number_per_example():
    """A regression on two values per example, with a custom loss."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 2))
    task = gradveil.Task(model, lambda out, y: (out - y).square().mean(), input_shape=SHAPE, classes=2)
    batches = {
        client: (inputs, inputs[:, 0, 0, :2].contiguous()) for client, (inputs, _) in batches_of([6, 2, 5]).items()
    }
    none = gradveil.defense("none")
    [batched], [plain] = (shared_by(execution, task, none, batches, LOCAL["avg"]) for execution in ("batch", "loop"))
    assert_same(plain.updates, batched.updates)


@pytest.mark.parametrize("spec", [s for s in gradveil.list_defenses() if gradveil.defense(s).gradient_only])
@pytest.mark.parametrize("local", ["sgd", "avg"])
@pytest.mark.parametrize("wrapped", ["", "+error-feedback", "+gaussian-noise:std=0.01"])
def test_every_gradient_only_defense_shares_the_same_in_a_batch(spec, local, wrapped):
    task, local = task_of("mlp"), LOCAL[local]
    batches = batches_of([6, 4, 6])
    public = batches.popitem()[1]
    if gradveil.defense(spec).removes_noise and wrapped == "+error-feedback":
        spec += ":compensate=false"  # a server that removes noise needs it fresh
    defense = gradveil.defense(spec + wrapped)
    defense, _ = defense.prepare(task, public=public, generator=randomness(0, "prepare"))
    batched = shared_by("batch", task, defense, batches, local, rounds=2)
    memories = {client: {} for client in batches}
    for shared in batched:  # two rounds, so that memories matter
        plain = {
            client: defense.share(
                task, *batch, generator=randomness(client, "share"), memory=memories[client], local=local
            )
            for client, batch in batches.items()
        }
        assert list(plain) == list(shared.updates)
        for client, update in plain.items():
            for name, value in update.items():
                # Rounding may turn one code into its neighbour, or swap two values at a threshold.
                differing = (shared.updates[client][name] - value).abs() > 1e-5 * value.abs().max()
                assert differing.double().mean() < 0.01
            assert update.meta.grids.keys() == shared.updates[client].meta.grids.keys()


def test_chunks_do_not_matter():
    task, batches = task_of("mlp"), batches_of([4] * 7)
    [together] = shared_by("batch", task, gradveil.defense("gaussian-noise"), batches, None)
    [chunked] = shared_by("batch", task, gradveil.defense("gaussian-noise"), batches, None, cache_bytes=1)
    assert_same(together.updates, chunked.updates)


def test_a_model_whose_modules_are_never_called_is_batched():
    """The number of its activations is then unknown."""

    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(144, 4)

        def forward(self, images):
            return images.flatten(1) @ self.linear.weight.T + self.linear.bias

    task, batches = gradveil.Task(ByHand(), input_shape=SHAPE, classes=4), batches_of([4, 4, 4])
    assert task.activations == 0
    [shared] = shared_by("batch", task, gradveil.defense("none"), batches, None)
    assert_same({client: compute_update(task, *batch) for client, batch in batches.items()}, shared.updates)


def test_defenses_that_need_data_run_client_by_client():
    task, batches = task_of("mlp"), batches_of([4, 4])
    defense = gradveil.defense("dp-sgd", clip=1.0, noise_multiplier=0.5)
    assert choose_execution(task, defense, Training()) == "loop"
    [shared] = shared_by("auto", task, defense, batches, None)
    for client, batch in batches.items():
        alone = defense.share(task, *batch, generator=randomness(client, "share"))
        for name, value in alone.items():
            assert torch.equal(shared.updates[client][name], value)
    assert shared.gradient_seconds > 0
    with pytest.raises(ParameterError, match="clients under dp-sgd cannot be batched"):
        shared_by("batch", task, defense, batches, None)


@pytest.mark.parametrize("execution", ["loop", "batch"])
@pytest.mark.parametrize("spec", ["none", "top-k+error-feedback", "gaussian-noise:std=0.1"])
def test_a_client_whose_gradients_overflow_is_named_and_the_others_are_not_changed(execution, spec):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 4))
    with torch.no_grad():
        model[1].weight[:, 0] = 3e38  # matters only for an image that is bright in the first corner
    task = gradveil.Task(model, input_shape=SHAPE, classes=4)
    batches = batches_of([3, 3, 3])
    for images, _ in batches.values():
        images[:, :, 0, 0] = 0
    good = {client: batch for client, batch in batches.items() if client != 13}
    batches[13][0][:, :, 0, 0] = torch.tensor([100.0]).view(1, 1)
    [shared] = shared_by(execution, task, gradveil.defense(spec), batches, None)
    assert list(shared.updates) == [3, 23]
    assert list(shared.failed) == [13]
    assert "NaN or Inf" in shared.failed[13]
    [without] = shared_by(execution, task, gradveil.defense(spec), good, None)
    assert_same(without.updates, shared.updates)


def test_the_choice_is_made_by_size(monkeypatch):
    none, small = gradveil.defense("none"), task_of("lenet")
    assert choose_execution(small, none, Training(rounds=10)) == "batch"
    assert choose_execution(small, none, Training(rounds=10, clients_per_round=1)) == "loop"
    assert choose_execution(small, none, Training(rounds=10, batch_size=1000)) == "loop"
    assert choose_execution(own_norm(), none, Training(rounds=10)) == "loop"
    monkeypatch.setattr("gradveil.core.compilation.has_compiler", lambda: True)
    assert choose_execution(small, none, Training(rounds=1_000_000)) == "compile"
    monkeypatch.setattr("gradveil.core.compilation.has_compiler", lambda: False)
    assert choose_execution(small, none, Training(rounds=1_000_000)) == "batch"


@pytest.mark.parametrize("local", LOCAL)
def test_the_same_calls_run_compiled_when_a_training_is_resumed(monkeypatch, local):
    """A call runs compiled if it has the full shape or can be padded to it, whatever ran before in this process."""
    compiled = []

    def stand_in(function, **_options):
        def call(weights, images, labels):
            compiled.append(tuple(labels.shape))
            return function(weights, images, labels)

        return call

    monkeypatch.setattr(torch, "compile", stand_in)
    task, training = task_of("mlp"), Training(clients=5, batch_size=6, local=LOCAL[local])
    rounds = [batches_of(sizes) for sizes in ([1, 1, 1, 2, 2], [6, 2, 6, 5, 6], [6, 6, 6, 6, 6])]

    def run(rounds):
        clients = Clients(task, gradveil.defense("none"), training, "compile")
        compiled.clear()
        calls = []
        for batches in rounds:
            clients.share(*round_of(task, batches, LOCAL[local]))
            calls.append(compiled.copy())
            compiled.clear()
        return calls

    uninterrupted = run(rounds)
    assert uninterrupted[1:] == run(rounds[1:])
    assert uninterrupted[2:] == run(rounds[2:])
    images = 6 if LOCAL[local] is None else 3
    assert not uninterrupted[0]
    assert {shape for calls in uninterrupted for shape in calls} == {(5, images)}
    assert len(uninterrupted[2]) == (1 if LOCAL[local] is None else 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_clients_equal_the_loop():
    """A smaller second chunk is padded; batches of other lengths run uncompiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 4))
    task = gradveil.Task(model, input_shape=SHAPE, classes=4)
    batches = batches_of([6, 6, 6, 6, 6, 2])
    three_clients = 3 * 4 * 3 * 6 * (144 + task.activations)
    [shared] = shared_by("compile", task, gradveil.defense("none"), batches, None, cache_bytes=three_clients)
    plain = {client: compute_update(task, *batch) for client, batch in batches.items()}
    assert_same(plain, shared.updates)
