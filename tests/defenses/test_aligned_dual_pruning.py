"""The protocol of Aligned Dual Gradient Pruning, and the damage that a lying publisher does."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradveil
from gradveil import models
from gradveil.core.errors import InputError
from gradveil.defenses._selection import largest
from gradveil.defenses.aligned_dual_pruning import AlignedDualPruning
from gradveil.federation import Training, train


def gradient(seed: int, size: int = 40) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(size, generator=torch.Generator().manual_seed(seed)).round(decimals=1)}


def slow_share(values: list[float], marked: list[bool], k1: float, keep: float) -> list[float]:
    """Step 2 of the protocol, written as plainly as possible."""
    n = len(values)
    ranked = sorted(range(n), key=lambda i: (-abs(values[i]), i))
    withheld = set(ranked[: math.ceil(round(k1 * n, 9))])
    # A withheld value counts as zero, and equal values are ranked by position.
    candidates = [i for i in range(n) if marked[i]]
    candidates.sort(key=lambda i: (-(0 if i in withheld else abs(values[i])), i))
    sent = set(candidates[: math.ceil(round(keep * n, 9))]) - withheld
    return [values[i] if i in sent else 0.0 for i in range(n)]


@given(st.integers(0, 500), st.integers(1, 60), st.sampled_from([0.0, 0.05, 0.3]), st.sampled_from([0.05, 0.2, 0.7]))
def test_clients_send_the_largest_of_what_is_left_inside_the_set(seed, size, k1, keep):
    defense = AlignedDualPruning(k1=k1, keep=keep)
    publisher, client = gradient(seed, size), gradient(seed + 1000, size)
    public = defense.publish(publisher)
    assert int(public["w"].sum()) == min(size, math.ceil(round(2 * keep * size, 9)))
    assert torch.equal(public["w"], largest(publisher["w"][None], int(public["w"].sum()))[0])
    sent = defense.perturb(client, announced=public)["w"]
    assert sent.tolist() == slow_share(client["w"].tolist(), public["w"].tolist(), k1, keep)


def test_a_batch_of_clients_uses_the_announced_set_as_each_client_would_alone():
    defense = AlignedDualPruning()
    clients = [gradient(seed) for seed in range(5)]
    public = defense.publish(clients[0])
    together = defense.perturb_clients({"w": torch.stack([c["w"] for c in clients])}, announced=public)["w"]
    for client, row in zip(clients, together, strict=True):
        assert torch.equal(defense.perturb(client, announced=public)["w"], row)


def test_the_server_returns_only_values_inside_the_set():
    defense = AlignedDualPruning(keep=0.25)
    public = {"w": torch.tensor([True, True, False, False])}
    honest = gradveil.Update({"w": torch.tensor([2.0, 0.0, 0.0, 0.0])})
    disobedient = gradveil.Update({"w": torch.tensor([0.0, 4.0, 8.0, 8.0])})
    aggregate = defense.aggregate([honest, disobedient], weights=[3, 1], announced=public)
    assert aggregate["w"].tolist() == [1.5, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("public", "message"),
    [
        ({}, r"a location set for each layer of the model, but it differs in \['w'\]"),
        (
            {"w": torch.zeros(3, dtype=torch.bool)},
            r"a mask \(torch.bool\) of shape \[40\], got torch.bool of shape \[3\]",
        ),
        ({"w": torch.zeros(40)}, r"got torch.float32 of shape \[40\]"),
        ({"w": torch.ones(40, dtype=torch.bool)}, "the set of 'w' must mark 16 locations, got 40"),
        ({"w": torch.zeros(40, dtype=torch.bool)}, "the set of 'w' must mark 16 locations, got 0"),
    ],
)
def test_an_announcement_that_does_not_fit_is_refused(public, message):
    defense = AlignedDualPruning()
    for wrapped in (defense, gradveil.ErrorFeedback(defense), gradveil.Chain(defense, gradveil.defense("top-k"))):
        with pytest.raises(InputError, match=message):
            wrapped.check_announced(public, gradient(0))
    with pytest.raises(InputError, match=message):
        defense.perturb(gradient(0), announced=public)
    with pytest.raises(InputError, match=message):
        defense.aggregate([gradveil.Update(gradient(0))], announced=public)


def test_with_error_feedback_the_set_is_made_from_gradient_plus_residual(tiny_task, tiny_batch):
    defense = gradveil.defense("aligned-dual-pruning+error-feedback")
    gradients = tiny_task.gradients(*tiny_batch)
    memory = {f"residual/{name}": torch.randn_like(value) for name, value in gradients.items()}
    public = defense.announce(tiny_task, *tiny_batch, memory=memory)
    corrected = {name: value + memory[f"residual/{name}"] for name, value in gradients.items()}
    expected = defense.inner.publish(corrected)
    assert all(torch.equal(public[name], expected[name]) for name in corrected)
    sent = defense.share(tiny_task, *tiny_batch, memory=memory, announced=public)
    for name in corrected:
        assert not sent[name][~public[name]].any()
        torch.testing.assert_close(sent[name] + memory[f"residual/{name}"], corrected[name])


class Liar(AlignedDualPruning):
    """A defense whose publisher announces the locations of its smallest values."""

    name = "liar"

    def publish(self, gradients, memory=None):
        return super().publish({name: 1 / (1e-9 + value.abs()) for name, value in gradients.items()})


class Miser(AlignedDualPruning):
    """A defense whose publisher announces too few locations, in a layer so long that it is searched by histogram."""

    name = "miser"

    def publish(self, gradients, memory=None):
        return {name: torch.zeros_like(value, dtype=torch.bool) for name, value in gradients.items()}


class Garbler(AlignedDualPruning):
    """A defense whose publisher announces something that is not a location set."""

    name = "garbler"

    def publish(self, gradients, memory=None):
        return {"nonsense": torch.ones(3)}


def test_training_survives_a_lying_publisher_and_the_damage_shows(two_blobs):
    """A well-formed lie costs the round's progress but breaks nothing; a malformed one only costs another election."""
    shape = two_blobs.train.input_shape
    task = gradveil.Task(models.create("mlp", input_shape=shape, classes=2), input_shape=shape, classes=2)
    training = Training(rounds=15, clients=4, batch_size=16, lr=0.05)
    kinds = (AlignedDualPruning, Liar, Garbler, Miser)
    results = {kind.name: train(task, two_blobs, kind(), training) for kind in kinds}
    assert all(result.diverged is None for result in results.values())
    honest = results["aligned-dual-pruning"].loss
    assert results["liar"].loss > honest + 0.3
    # No announcement is acceptable, so every client uses its own set.
    assert results["garbler"].loss == results["miser"].loss < honest + 0.3


def test_a_small_set_in_a_long_layer_is_refused():
    """It used to end the training with an IndexError."""
    values = {"w": torch.randn(100_000, generator=torch.Generator().manual_seed(0))}
    small = {"w": largest(values["w"][None], 5_000)[0]}
    with pytest.raises(InputError, match="the set of 'w' must mark 40000 locations, got 5000"):
        AlignedDualPruning(keep=0.2).perturb(values, announced=small)
