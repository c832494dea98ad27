import dataclasses
import math

import pytest
import torch

import gradveil
from gradveil import models
from gradveil.core.errors import ParameterError
from gradveil.core.randomness import derived_generator
from gradveil.data import Split, partition
from gradveil.federation import Training, train
from gradveil.federation.job import evaluate, performance_maintenance, split_public
from gradveil.update import wire

QUICK = Training(rounds=6, clients=4, batch_size=16, lr=0.05, evaluate_every=2, seed=3)


def task_for(dataset, **parameters) -> gradveil.Task:
    shape = dataset.train.input_shape
    return gradveil.Task(models.create("mlp", input_shape=shape, classes=2, **parameters), input_shape=shape, classes=2)


def test_it_learns_and_reports(two_blobs):
    seen = []
    result = train(
        task_for(two_blobs),
        two_blobs,
        gradveil.defense("none"),
        dataclasses.replace(QUICK, rounds=30),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert result.accuracy > 0.95
    assert result.accuracy == evaluate(result.task, two_blobs.test)[0]
    assert [number for number, _ in result.history] == list(range(2, 31, 2))
    assert seen == [(number, 30) for number in range(1, 31)]
    assert result.round_seconds > 0


@pytest.mark.parametrize("local", [None, gradveil.LocalSteps(epochs=2, batch_size=5, lr=0.05, momentum=0.5)])
@pytest.mark.parametrize(
    "spec", ["none", "gaussian-noise:std=0.01", "aligned-dual-pruning", "dual-pruning+error-feedback", "quantization"]
)
def test_a_batched_training_equals_the_loop(two_blobs, spec, local):
    """Every client has a different number of images, some fewer than they may draw.

    In double precision, with four classes and without ReLU, so that rounding decides no tie and moves no value across
    a threshold (gradients of two classes are equal except for the sign); see test_clients.py for single precision.
    """
    shape = two_blobs.train.input_shape
    labels = torch.randint(0, 4, [300], generator=torch.Generator().manual_seed(0))
    dataset = dataclasses.replace(two_blobs, classes=tuple("abcd"), train=Split(two_blobs.train.inputs, labels))
    model = models.create("mlp", input_shape=shape, classes=4, activation="sigmoid")
    task = gradveil.Task(model, input_shape=shape, classes=4).to(torch.float64)
    training = dataclasses.replace(QUICK, rounds=3, clients=12, scheme="dirichlet", alpha=0.3, local=local)
    one, other = (
        train(task, dataset, gradveil.defense(spec), training, execution=execution) for execution in ("loop", "batch")
    )
    assert (one.execution, other.execution) == ("loop", "batch")
    for name, value in one.task.parameters.items():
        torch.testing.assert_close(other.task.parameters[name], value, rtol=1e-9, atol=1e-9)
    assert [record.loss for record in one.rounds] == pytest.approx([record.loss for record in other.rounds], rel=1e-9)


def test_every_round_is_measured(two_blobs):
    seen = []
    training = dataclasses.replace(QUICK, clients=20, clients_per_round=5)
    result = train(task_for(two_blobs), two_blobs, gradveil.defense("top-k"), training, watch=seen.append)
    assert seen == result.rounds
    assert [record.round for record in seen] == list(range(6))
    assert all(record.clients == 5 for record in seen)
    assert all(min(r.gradient_seconds, r.defense_seconds, r.aggregation_seconds) > 0 for r in seen)
    total = result.gradient_seconds + result.defense_seconds + result.aggregation_seconds
    assert result.round_seconds == pytest.approx(total)
    assert [(r.round + 1, r.accuracy) for r in seen if r.accuracy is not None] == result.history[:-1]
    assert seen[0].loss == pytest.approx(0.69, abs=0.1)  # two classes, nothing learned yet
    assert result.upload_bytes == pytest.approx(sum(record.upload_bytes for record in seen) / 6)


def test_one_server_step_of_adam_moves_every_weight_by_the_learning_rate(two_blobs):
    task = task_for(two_blobs, activation="sigmoid")
    training = Training(rounds=1, clients=4, lr=0.01, optimiser="adam")
    result = train(task, two_blobs, gradveil.defense("none"), training)
    for name, value in task.parameters.items():
        moved = (result.task.parameters[name] - value).abs()
        assert moved.max() < 0.0101
        assert moved.quantile(0.05) > 0.0099  # except those whose gradients are no larger than epsilon


def test_a_loss_that_stays_high_ends_the_training(two_blobs):
    """The loss stays finite: the learning rate makes the logits huge, while a blind guess's loss is 0.69."""
    result = train(
        task_for(two_blobs), two_blobs, gradveil.defense("none"), dataclasses.replace(QUICK, rounds=60, lr=300.0)
    )
    assert result.diverged is not None
    losses = [record.loss for record in result.rounds]
    assert len(losses) == result.diverged + 1 < 60
    assert all(loss > 10 * losses[0] for loss in losses[-5:])
    assert not all(loss > 10 * losses[0] for loss in losses[-6:-1])


def test_the_same_seed_gives_the_same_weights_and_another_one_does_not(two_blobs):
    def final(seed):
        training = dataclasses.replace(QUICK, seed=seed)
        result = train(task_for(two_blobs), two_blobs, gradveil.defense("gaussian-noise:std=0.01"), training)
        return torch.cat([value.flatten() for value in result.task.parameters.values()])

    assert torch.equal(final(1), final(1))
    assert not torch.equal(final(1), final(2))


def test_one_undefended_round_is_a_gradient_step_on_all_the_data(two_blobs):
    """Four clients that each use all their data give the full gradient."""
    task = task_for(two_blobs)
    training = Training(rounds=1, clients=4, batch_size=1000, lr=0.1, momentum=0.0)
    result = train(task, two_blobs, gradveil.defense("none"), training)
    from gradveil.core.randomness import derived_generator
    from gradveil.federation.job import PUBLIC_SAMPLES

    private = torch.randperm(300, generator=derived_generator(0, "public"))[PUBLIC_SAMPLES:]
    full = task.gradients(*two_blobs.train.batch(private))
    for name, value in task.parameters.items():
        torch.testing.assert_close(result.task.parameters[name], value - 0.1 * full[name], rtol=1e-4, atol=1e-6)


def test_bytes_are_those_of_the_encoding(two_blobs):
    task = task_for(two_blobs, activation="sigmoid")  # because ReLU gradients contain zeros
    dense = train(task, two_blobs, gradveil.defense("none"), QUICK)
    sparse = train(task, two_blobs, gradveil.defense("top-k:keep=0.1"), QUICK)
    size = len(wire.encode(gradveil.Update(dense.task.parameters)))
    assert dense.upload_bytes == pytest.approx(size, rel=0.02)
    assert sparse.upload_bytes < 0.2 * dense.upload_bytes
    assert sparse.download_bytes > sparse.upload_bytes  # four clients send different positions


def test_error_feedback_keeps_one_memory_per_client(two_blobs):
    plain = train(task_for(two_blobs), two_blobs, gradveil.defense("top-k:keep=0.05"), QUICK)
    fed_back = train(task_for(two_blobs), two_blobs, gradveil.defense("top-k:keep=0.05+error-feedback"), QUICK)
    name = next(iter(plain.task.parameters))
    assert not torch.equal(plain.task.parameters[name], fed_back.task.parameters[name])


def test_local_steps_and_partial_participation(two_blobs):
    local = gradveil.LocalSteps(epochs=2, batch_size=8, lr=0.05)
    training = Training(
        rounds=10,
        clients=6,
        clients_per_round=2,
        lr=0.05,
        momentum=0.0,
        scheme="classes",
        classes_per_client=1,
        local=local,
    )
    assert train(task_for(two_blobs), two_blobs, gradveil.defense("none"), training).accuracy > 0.9


def test_batch_norm_statistics_are_trained_along(two_blobs):
    shape = two_blobs.train.input_shape
    model = models.create("convnet", input_shape=shape, classes=2)
    task = gradveil.Task(model, input_shape=shape, classes=2)
    result = train(task, two_blobs, gradveil.defense("none"), dataclasses.replace(QUICK, rounds=2, batch_size=4))
    name = next(name for name in task.buffers if name.endswith("running_mean"))
    assert not torch.equal(result.task.buffers[name], task.buffers[name])
    assert torch.equal(task.buffers[name], torch.zeros_like(task.buffers[name]))


def test_a_diverging_training_stops_and_says_so(two_blobs):
    result = train(
        task_for(two_blobs), two_blobs, gradveil.defense("none"), dataclasses.replace(QUICK, rounds=30, lr=1e30)
    )
    assert result.diverged is not None
    assert result.diverged < 29
    assert 0 <= result.accuracy <= 1
    assert all(torch.isfinite(value).all() for value in result.task.parameters.values())


def test_the_first_round_warms_up_and_is_not_timed(two_blobs):
    result = train(task_for(two_blobs), two_blobs, gradveil.defense("none"), dataclasses.replace(QUICK, rounds=3))
    seconds = [record.seconds for record in result.rounds]
    assert result.round_seconds == pytest.approx((seconds[1] + seconds[2]) / 2)
    one = train(task_for(two_blobs), two_blobs, gradveil.defense("none"), dataclasses.replace(QUICK, rounds=1))
    assert one.round_seconds == pytest.approx(one.rounds[0].seconds)


@pytest.mark.parametrize("execution", ["loop", "batch"])
def test_clients_that_all_fail_are_named_though_the_training_ends(two_blobs, execution):
    task = task_for(two_blobs)
    broken = task.with_parameters({name: value * torch.inf for name, value in task.parameters.items()})
    result = train(broken, two_blobs, gradveil.defense("none"), QUICK, execution=execution)
    assert result.diverged == 0
    assert result.fault_counts == {"not finite": QUICK.drawn_clients}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "train: rounds must be a whole number of at least 1, got 0"),
        ({"clients_per_round": 5}, "train: clients_per_round must be a whole number from 1 to 4, got 5"),
        ({"lr": -1.0}, "train: lr must be a number above 0, got -1.0"),
        ({"momentum": 1.0}, "train: momentum must be a number of at least 0 and below 1, got 1.0"),
    ],
)
def test_bad_trainings_are_refused(changes, message):
    with pytest.raises(ParameterError, match=message):
        dataclasses.replace(QUICK, **changes)


def test_no_ratio_from_a_model_near_chance():
    ten_classes = Split(torch.zeros(100, 1, 1, 1, dtype=torch.uint8), torch.arange(100) % 10)
    assert performance_maintenance(0.3, 0.32, ten_classes) is None
    assert performance_maintenance(0.4, 0.8, ten_classes) == pytest.approx(0.5)
    lopsided = Split(torch.zeros(100, 1, 1, 1, dtype=torch.uint8), (torch.arange(100) < 80).long())
    assert performance_maintenance(0.8, 0.84, lopsided) is None  # always predicting 1 would be right in 80 % of cases


def test_the_privacy_spent_is_that_of_the_client_that_spent_most(two_blobs):
    pytest.importorskip("dp_accounting")
    defense = gradveil.defense("dp-sgd", noise_multiplier=3.0)
    training = Training(rounds=4, clients=4, clients_per_round=2, batch_size=16, scheme="dirichlet", seed=3)
    spent = train(task_for(two_blobs), two_blobs, defense, training).privacy
    chosen = [torch.randperm(4, generator=derived_generator(3, "clients", number))[:2].tolist() for number in range(4)]
    private = split_public(two_blobs.train, 3)[1]
    shares = partition(two_blobs.train.targets[private], clients=4, scheme="dirichlet", alpha=0.5, seed=3)
    expected = max(
        defense.privacy_spent(
            rounds=sum(client in drawn for drawn in chosen), batch_size=min(16, len(share)), examples=len(share)
        ).epsilon
        for client, share in enumerate(shares)
    )
    assert spent is not None
    assert spent.epsilon == expected > 0
    assert train(task_for(two_blobs), two_blobs, gradveil.defense("gaussian-noise"), QUICK).privacy is None


@pytest.mark.parametrize("loss", ["logistic", "own"])
def test_other_losses_are_trained_and_reported_as_what_they_are(two_blobs, loss):
    shape, outputs = two_blobs.train.input_shape, 1 if loss == "logistic" else 2
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(shape), outputs))

    def squares(values, labels):
        return (values - torch.eye(2)[labels]).square().sum(1).mean()

    task = gradveil.Task(model, "logistic" if loss == "logistic" else squares, input_shape=shape, classes=2)
    result = train(task, two_blobs, gradveil.defense("none"), Training(rounds=40, clients=4, batch_size=8, lr=0.05))
    images, labels = two_blobs.test.batch(torch.arange(len(two_blobs.test)))
    values = result.task.predict(images)
    if loss == "logistic":
        predicted, expected = values[:, 0] > 0, torch.nn.functional.softplus((1 - 2 * labels) * values[:, 0]).mean()
    else:
        predicted, expected = values.argmax(1), squares(values, labels)
    assert result.accuracy == pytest.approx(float((predicted == labels).double().mean()))
    assert result.accuracy > 0.9
    assert result.loss == pytest.approx(float(expected), rel=1e-4)
