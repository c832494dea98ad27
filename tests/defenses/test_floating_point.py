"""Guarantees must survive floating point: only the noise may decide the last bits of an update."""

import math

import pytest
import torch

import gradveil
from gradveil import models
from gradveil.core.errors import NotFiniteError, ParameterError
from gradveil.core.randomness import derived_generator
from gradveil.core.randomness.discrete import grid_step
from gradveil.defenses._clipping import clipped_sum

CANDIDATES = 100


@pytest.fixture(scope="module")
def victims():
    """A small mlp and a hundred images, each of them a possible victim."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(CANDIDATES, 1, 8, 8, generator=generator)
    labels = torch.randint(4, (CANDIDATES,), generator=generator)
    model = models.create("mlp", input_shape=(1, 8, 8), classes=4)
    return gradveil.Task(model, input_shape=(1, 8, 8), classes=4), images, labels


def distance_from_24_bits(noise):
    """Mean distance of the angles of Box-Muller pairs from multiples of 2^-24 turns; .25 by chance.

    torch pairs value j with value j + 8 of every sixteen, and the angle comes from one 24-bit uniform draw.
    """
    blocks = noise[: len(noise) // 16 * 16].double().view(-1, 2, 8)
    turns = torch.atan2(blocks[:, 1], blocks[:, 0]) / (2 * math.pi) * 2**24
    return float((turns - turns.round()).abs().mean())


def identified(victims, victim, generator):
    """The candidate whose clipped gradient, subtracted from a dp-sgd update, leaves the most regular noise."""
    task, images, labels = victims
    defense = gradveil.defense("dp-sgd", clip=1.0, noise_multiplier=10.0)
    update = defense.share(task, images[victim, None], labels[victim, None], generator=generator)
    name, sent = max(update.items(), key=lambda item: item[1].numel())
    distances = [
        distance_from_24_bits(
            (sent.double() - clipped_sum(task, images[index, None], labels[index, None], 1.0)[name].double()).flatten()
        )
        for index in range(CANDIDATES)
    ]
    return min(range(CANDIDATES), key=distances.__getitem__), min(distances)


def test_a_seeded_update_identifies_its_image(victims):
    """The accountant says epsilon .8, yet the server picks the right one of a hundred images every time."""
    for victim in range(5):
        found, distance = identified(victims, victim, derived_generator(victim))
        assert found == victim
        assert distance < 0.2


def test_an_update_in_use_identifies_nobody(victims):
    hits = 0
    for victim in range(5):
        found, distance = identified(victims, victim, None)
        hits += found == victim
        assert distance > 0.24
    assert hits <= 1


def test_clipped_gradients_on_the_grid_are_never_longer_than_the_clip(victims):
    task, images, labels = victims
    grid = grid_step(0.5 * 1e-3)
    for index in range(20):
        total = clipped_sum(task, images[index, None], labels[index, None], 1e-3, grid=grid)
        steps = {name: value / grid for name, value in total.items()}
        assert all(bool((value == value.round()).all()) for value in steps.values())
        # In integers, so without rounding: the squared steps add up to at most the square of the clip.
        assert (
            sum(int(step) ** 2 for value in steps.values() for step in value.flatten().tolist()) <= (1e-3 / grid) ** 2
        )


def test_the_sum_on_the_grid_is_exact(victims):
    """Compare with Python integers: each example's grid steps computed in the slow, obvious way, and their sum."""
    task, images, labels = victims
    grid = grid_step(1.0)
    gradients = task.per_example_gradients(images, labels)
    norms = torch.stack([value.double().flatten(1).square().sum(1) for value in gradients.values()]).sum(0).sqrt()
    scales = [min(1.0, (1 - 2**-20) / float(norm)) for norm in norms]
    found, plain = clipped_sum(task, images, labels, 1.0, grid=grid), clipped_sum(task, images, labels, 1.0)
    for name, value in gradients.items():
        flat = value.flatten(1)[:, :50].double().tolist()
        expected = [
            sum(math.trunc(row[column] * scale / grid) for row, scale in zip(flat, scales, strict=True))
            for column in range(len(flat[0]))
        ]
        got = [round(value / grid) for value in found[name].flatten()[:50].tolist()]
        # The order of rounding differs when scaling: an example is off by one step at most, and mostly by none.
        assert max(abs(steps - expected_steps) for steps, expected_steps in zip(got, expected, strict=True)) <= 2
        torch.testing.assert_close(found[name].float(), plain[name], rtol=1e-4, atol=2e-5)


def test_a_gradient_that_overflows_is_not_reported_in_use(victims):
    """A refusal would leak one bit about the data that no epsilon covers, and a server could build a model for that."""
    task, images, labels = victims
    broken = task.with_parameters({name: value * 1e30 for name, value in task.parameters.items()})
    with pytest.raises(NotFiniteError, match="an example's gradient is not finite"):
        gradveil.defense("dp-sgd").share(broken, images[:2], labels[:2], generator=derived_generator(0))
    total = clipped_sum(broken, images[:2], labels[:2], 1.0, grid=grid_step(1.0))
    assert not any(value.any() for value in total.values())
    update = gradveil.defense("dp-sgd").share(broken, images[:2], labels[:2])
    assert all(bool(value.isfinite().all()) for value in update.values())


def test_an_update_that_overflows_is_not_sent(victims):
    task, images, labels = victims
    with pytest.raises(NotFiniteError, match="the result overflows"):
        gradveil.defense("dp-sgd", clip=1e30, noise_multiplier=1e10).share(task, images[:2], labels[:2])


@pytest.mark.parametrize("options", [{}, {"layerwise": True}])
def test_noise_of_many_deviations_identifies_nobody(victims, options):
    """If noise were a multiple of its deviation's step, there would be gaps that only a wrong candidate hits."""
    task, images, labels = victims
    defense = gradveil.defense("optimal-noise", std=10.0, form="global", directions=2, **options)
    defense, _ = defense.prepare(task, public=(images[:10], labels[:10]), generator=derived_generator(1))
    variance, step = defense.noise_variance(), grid_step(10.0)
    name = max(variance, key=lambda layer: variance[layer].numel())
    draw_steps = variance[name].sqrt().double().flatten() * (2.0**-24 / step)

    def impossible(sent, index):
        """How many coordinates would have noise that is not a multiple of its smallest unit under this candidate."""
        gradient = task.gradients(images[index, None], labels[index, None])[name].double().flatten()
        noise = sent.double().flatten() / step - (gradient / step).round()
        judged = (draw_steps > 1.2) & (sent.double().flatten().abs() < 2**24 * step)
        assert int(judged.sum()) > 1000
        return int(((noise / draw_steps).round() * draw_steps).round()[judged].ne(noise[judged]).sum())

    hits = 0
    for victim in range(5):
        sent = defense.share(task, images[victim, None], labels[victim, None])[name]
        counts = [impossible(sent, index) for index in range(20)]
        assert counts[victim] > 100
        hits += min(range(20), key=counts.__getitem__) == victim
    assert hits <= 2


def test_noise_too_small_for_an_exact_sum_is_refused(victims):
    task, images, labels = victims
    with pytest.raises(ParameterError, match="noise_multiplier is too small for the sum of 100"):
        gradveil.defense("dp-sgd", noise_multiplier=1e-7).share(task, images, labels)


@pytest.mark.parametrize(("keep", "scale"), [(0.8, "absolute"), (0.9, "absolute"), (0.8, "layer")])
def test_the_last_bits_do_not_tell_decoys_from_values(keep, scale):
    """Dividing by `keep` leaves gaps between floats, and whatever falls into a gap must be a decoy."""
    gradient = 0.005 * torch.randn(200_000, generator=torch.manual_seed(1))
    defense = gradveil.defense("gradient-dropout", keep=keep, std=0.005 if scale == "absolute" else 1.0, scale=scale)

    def certain_decoys(sent, grid):
        """How many values cannot come from a float32 gradient divided by `keep` and rounded to the grid."""
        candidate, possible = (sent.double() * keep).float(), torch.zeros(len(sent), dtype=torch.bool)
        for _ in range(3):
            candidate = torch.nextafter(candidate, torch.full_like(candidate, -math.inf))
        for _ in range(7):
            value = (candidate / keep).double()
            possible |= (value if grid is None else (value / grid).round() * grid).float() == sent
            candidate = torch.nextafter(candidate, torch.full_like(candidate, math.inf))
        return int((~possible).sum())

    spread = 0.005 if scale == "absolute" else float((gradient / keep).double().square().mean().sqrt())
    assert certain_decoys(defense.perturb({"w": gradient}, generator=derived_generator(0))["w"], None) > 1000
    assert certain_decoys(defense.perturb({"w": gradient})["w"], grid_step(spread) * 2**6) == 0
