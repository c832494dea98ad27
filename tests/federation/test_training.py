"""The server's optimisers and schedules against torch's."""

import dataclasses

import pytest
import torch

from gradveil.core.errors import ParameterError
from gradveil.federation import Training
from gradveil.federation._optimiser import ServerOptimiser

OPTIMISERS = {
    "plain": (Training(lr=0.1, momentum=0.0), lambda w: torch.optim.SGD(w, lr=0.1)),
    "momentum": (Training(lr=0.1, momentum=0.9), lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9)),
    "adam": (
        Training(lr=0.1, momentum=0.8, optimiser="adam"),
        lambda w: torch.optim.Adam(w, lr=0.1, betas=(0.8, 0.999)),
    ),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers_are_torchs(name):
    training, make = OPTIMISERS[name]
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(size, generator=generator, dtype=torch.float64) for n, size in (("a", 7), ("b", 3))}
    theirs = {n: torch.nn.Parameter(value.clone()) for n, value in weights.items()}
    optimiser, reference = ServerOptimiser(training, weights), make(theirs.values())
    for number in range(8):
        update = {n: torch.randn(value.shape, generator=generator, dtype=torch.float64) for n, value in weights.items()}
        before = {n: value.clone() for n, value in (weights | update).items()}
        weights = optimiser.step(weights, update, number)
        assert all(torch.equal(before[n], value) for n, value in update.items())  # nothing given is changed
        for n, parameter in theirs.items():
            parameter.grad = update[n].clone()
        reference.step()
        for n, value in weights.items():
            torch.testing.assert_close(value, theirs[n].detach())


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        ("constant", lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=1.0)),
        ("step", lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [10, 15], gamma=0.1)),
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20)),
    ],
)
def test_schedules_are_torchs(schedule, make):
    training = Training(rounds=20, lr=0.3, schedule=schedule)
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = make(optimiser)
    for number in range(20):
        assert training.learning_rate(number) == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-9)
        optimiser.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimiser": "adagrad"}, "train: optimiser must be one of sgd, adam, got 'adagrad'"),
        ({"schedule": "linear"}, "train: schedule must be one of constant, step, cosine, got 'linear'"),
        ({"checkpoint_every": 0}, "train: checkpoint_every must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_choices_are_refused(changes, message):
    with pytest.raises(ParameterError, match=message):
        dataclasses.replace(Training(), **changes)
