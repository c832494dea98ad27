"""Robbing the Fed and LOKI: the algebra on hand-made rows, and the attacks on whole models."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradveil
from gradveil import metrics, models
from gradveil.attacks import _imprint as imprint
from gradveil.core.errors import InputError, ParameterError, ThreatModelError
from gradveil.update import Meta, Update, weighted_mean

SHAPE = (1, 12, 12)


@pytest.fixture
def victim_task():
    model = models.create("lenet", input_shape=SHAPE, classes=10, init="uniform")
    return gradveil.Task(model, input_shape=SHAPE, classes=10)


def pictures(count, seed):
    """Images of clearly different brightness."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.rand(count, 1, 1, 1, generator=generator) * (0.5 + 0.5 * torch.rand(count, *SHAPE, generator=generator)),
        torch.randint(0, 10, (count,), generator=generator),
    )


def alone_in_their_bins(images, edges):
    place = torch.bucketize(images.flatten(1).mean(1), edges)
    return (place[:, None] == place).sum(1) == 1


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=6),
    st.integers(0, 99),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_bins_of_hand_made_rows(places, seed, dtype):
    """Rows are built one image at a time; bins with one image return it, and mixtures are recognised."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(len(places), 5, generator=generator, dtype=dtype)
    factors = torch.randn(len(places), 2, generator=generator, dtype=dtype)
    rows, biases = torch.zeros(2, 8, 5, dtype=dtype), torch.zeros(2, 8, dtype=dtype)
    for place, image, factor in zip(places, images, factors, strict=True):
        for copy in range(2):
            rows[copy, : place + 1] += factor[copy] * image
            biases[copy, : place + 1] += factor[copy]
    bins = imprint.read_bins(rows, biases)
    for number in range(8):
        inside = [t for t, place in enumerate(places) if place == number]
        assert bool(bins.occupied[number]) == (len(inside) > 0)
        assert bool(bins.single[number]) == (len(inside) == 1)
        if len(inside) == 1 and factors[inside[0]].abs().max() > 0.05:
            torch.testing.assert_close(bins.images[number], images[inside[0]], rtol=1e-3, atol=1e-3)


def test_single_bins_come_first_and_what_is_missing_is_grey(victim_task):
    rows, biases = torch.zeros(1, 2, 4, 144), torch.zeros(1, 2, 4)
    image, other = torch.full((144,), 0.25), torch.rand(144, generator=torch.Generator().manual_seed(0))
    # Bin 2 holds one faint image, bin 0 a strong mixture.
    for copy, (a, b, c) in enumerate([(0.1, 5.0, 3.0), (0.2, 5.0, -4.0)]):
        rows[0, copy, :3] += a * image
        biases[0, copy, :3] += a
        rows[0, copy, :1] += b * image + c * other
        biases[0, copy, :1] += b + c
    selection = imprint.select_images(imprint.read_bins(rows, biases), count=3)
    assert selection.source.tolist() == [[2, 0, -1]]
    assert selection.certain.tolist() == [[True, False, False]]
    images = imprint.as_images(victim_task, selection.images)[0]
    torch.testing.assert_close(images[0].flatten(), image, rtol=1e-4, atol=1e-4)
    assert images[2].unique().tolist() == [0.5]


def test_bins_are_equally_likely():
    """Few public images, many bins: the bins still share new images evenly."""
    generator = torch.Generator().manual_seed(0)
    edges = imprint.thresholds(0.5 + 0.1 * torch.randn(100, generator=generator), 64, lowest=-1.0)
    assert edges[0] == -1
    assert (edges.diff() >= 0).all()
    fresh = 0.5 + 0.1 * torch.randn(200_000, generator=generator)
    shares = torch.bucketize(fresh, edges.float()).bincount(minlength=65)[1:] / len(fresh)
    # Two images meet with probability sum(share^2), which is 1/64 at best; raw quantiles of 100 values give twice that.
    assert float(shares.square().sum()) < 1.4 / 64
    with pytest.raises(InputError, match="must differ in brightness"):
        imprint.thresholds(torch.full((5,), 0.5), 4, lowest=0.0)


@pytest.mark.parametrize("signal", [1.0, 100.0])
def test_the_modified_model_predicts_like_the_given_one_and_has_the_requested_signal(victim_task, signal):
    images, labels = pictures(60, 0)
    attack = gradveil.attack("robbing-the-fed", bins=32, signal=signal)
    sent = attack.modify(victim_task, public=(images, labels), generator=torch.Generator().manual_seed(1))
    change = (sent.predict(images) - victim_task.predict(images)).abs().max()
    assert change < 0.2 * victim_task.predict(images).std(0).max() + 0.05
    biases = [
        sent.gradients(images[t : t + 1], labels[t : t + 1])["imprint.encode.bias"].view(2, 32)[:, 0] for t in range(16)
    ]
    assert float(torch.stack(biases).square().mean().sqrt()) == pytest.approx(signal, rel=0.2)


@pytest.mark.parametrize(("mean", "std"), [(None, None), ([0.5], [0.25])])
def test_robbing_recovers_exactly_the_images_that_are_alone(victim_task, mean, std):
    task = gradveil.Task(victim_task.copy_model(), input_shape=SHAPE, classes=10, mean=mean, std=std)
    public = pictures(200, 0)
    attack = gradveil.attack("robbing-the-fed", bins=64)
    sent = attack.modify(task, public=public, generator=torch.Generator().manual_seed(1))
    images, labels = pictures(12, 7)
    update = gradveil.defense("none").share(sent, images, labels)
    found = attack.reconstruct(sent, update, gradveil.ThreatModel(server="active", batch_size=12))
    encode = sent.parameters["imprint.encode.weight"][0, 0] * 144
    edges = -(sent.parameters["imprint.encode.bias"][:64] / encode)
    alone = alone_in_their_bins(task.normalised(images), edges)
    order = metrics.match(images, found.inputs[0].clamp(0, 1))
    good = metrics.psnr(images, found.inputs[0].clamp(0, 1)[order]) > 60
    assert alone.sum() >= 7
    assert good.tolist() == alone.tolist()
    assert found.certain[0][order].tolist() == alone.tolist()  # and the attacker knows which
    assert (found.labels[0][order] == labels)[alone].all()


def test_noise_of_a_fixed_size_is_beaten_by_the_signal_and_pruning_is_not(victim_task):
    public, (images, labels) = pictures(200, 0), pictures(6, 3)

    def median(defense, signal):
        attack = gradveil.attack("robbing-the-fed", bins=64, signal=signal)
        sent = attack.modify(victim_task, public=public, generator=torch.Generator().manual_seed(1))
        update = gradveil.defense(defense).share(sent, images, labels, generator=torch.Generator().manual_seed(2))
        found = attack.reconstruct(sent, update, gradveil.ThreatModel(server="active", batch_size=6))
        inputs = found.inputs[0].nan_to_num(nan=0.5).clamp(0, 1)
        return float(metrics.psnr(images, inputs[metrics.match(images, inputs)]).median())

    noisy = [median("gaussian-noise:std=0.01", signal) for signal in (0.1, 1.0, 10.0, 100.0)]
    assert noisy == sorted(noisy)
    assert noisy[0] < 15
    assert noisy[-1] > 40
    assert noisy[-1] - noisy[-2] == pytest.approx(20, abs=4)  # ten times the signal, 20 dB
    undefended = median("none", 100.0)
    assert undefended > 80
    assert median("top-k:keep=0.2", 100.0) < undefended - 50
    assert median("dual-pruning", 100.0) < undefended - 50


@pytest.mark.parametrize("local", [None, gradveil.LocalSteps(epochs=1, batch_size=2, lr=0.01)])
def test_loki_separates_clients_in_the_mean(victim_task, local):
    attack = gradveil.attack("loki", clients=3, bins=64)
    sent = attack.modify(victim_task, public=pictures(200, 0), generator=torch.Generator().manual_seed(1))
    batches = [pictures(4, seed) for seed in (11, 12, 13)]
    # All clients hold the same image, so only separate columns can keep these apart.
    for images, _ in batches[1:]:
        images[0] = batches[0][0][0]
    updates = [
        gradveil.defense("none").share(
            attack.for_client(sent, client), *batch, local=local, generator=torch.Generator().manual_seed(client)
        )
        for client, batch in enumerate(batches)
    ]
    mean = Update(weighted_mean(updates), Meta(samples=12, local=local))
    stacked = {name: value[None] for name, value in mean.items()}
    bins = attack.read(sent, stacked)
    edges = sent.parameters["imprint.encode.weight"]
    edges = -edges[:64, -1] / (edges[:64, 0] * 144)
    for client, (images, _) in enumerate(batches):
        own = slice(64 * client, 64 * (client + 1))
        # After local steps the copies differ by the drift, and the strict test for single images says no.
        sure = bins.single if local is None else bins.occupied
        recovered = bins.images[0, own][sure[0, own]]
        alone = images[alone_in_their_bins(images, edges)].flatten(1)
        assert len(alone) >= 2
        distance = torch.cdist(alone, recovered).amin(1) / 12
        assert distance.max() < (1e-3 if local is None else 0.02)
    found = attack.reconstruct(sent, mean, gradveil.ThreatModel(server="active", batch_size=12, local=local))
    assert found.inputs.shape == (1, 12, *SHAPE)


def test_loki_recognises_the_block_of_a_single_client(victim_task):
    """As in an audit, every update is attacked by itself, and each client has its own kernels."""
    attack = gradveil.attack("loki", clients=3, bins=64)
    sent = attack.modify(victim_task, public=pictures(200, 0), generator=torch.Generator().manual_seed(1))
    images, labels = pictures(2, 5)
    update = gradveil.defense("none").share(attack.for_client(sent, 4), images, labels)
    bins = attack.read(sent, {name: value[None] for name, value in update.items()})
    assert bins.occupied[0].view(3, 64).sum(1).tolist() == [0, 2, 0]  # 4 modulo 3


def test_active_attacks_refuse_what_they_cannot_do(victim_task):
    images, labels = pictures(4, 0)
    plain = gradveil.defense("none").share(victim_task, images, labels)
    for name in ("robbing-the-fed", "loki"):
        attack = gradveil.attack(name)
        with pytest.raises(ThreatModelError, match=r"changes the model.*server='active'"):
            attack.reconstruct(victim_task, plain, gradveil.ThreatModel(batch_size=4))
        with pytest.raises(InputError, match="expected a model with one imprint block"):
            attack.reconstruct(victim_task, plain, gradveil.ThreatModel(server="active", batch_size=4))
        with pytest.raises(ThreatModelError, match="needs public images"):
            attack.modify(victim_task)
    local = gradveil.LocalSteps()
    stepped = gradveil.defense("none").share(victim_task, images, labels, local=local)
    with pytest.raises(ThreatModelError, match="loki is made for local steps"):
        gradveil.attack("robbing-the-fed").reconstruct(
            victim_task, stepped, gradveil.ThreatModel(server="active", batch_size=4, local=local)
        )
    with pytest.raises(ParameterError, match="robbing-the-fed: bins must be a whole number of at least 2, got 1"):
        gradveil.attack("robbing-the-fed", bins=1)
    dead = gradveil.Task(nn.Sequential(nn.Flatten(), nn.Linear(144, 10)), input_shape=SHAPE, classes=10)
    dead = dead.with_parameters({name: torch.zeros_like(value) for name, value in dead.parameters.items()})
    with pytest.raises(InputError, match="the loss does not depend on the images"):
        gradveil.attack("robbing-the-fed").modify(dead, public=(images, labels))
