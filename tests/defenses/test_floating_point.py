"""dp-sgd's guarantee must survive floating point: nothing but the noise may decide the last bits of an update."""

import math

import pytest
import torch

import gradveil
from gradveil import models
from gradveil.clipping import clipped_sum
from gradveil.errors import NotFiniteError, ParameterError
from gradveil.randomness import derived_generator
from gradveil.randomness.discrete import grid_step

CANDIDATES = 100


@pytest.fixture(scope="module")
def victims():
    """A small mlp and a hundred images, each a possible victim."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(CANDIDATES, 1, 8, 8, generator=generator)
    labels = torch.randint(4, (CANDIDATES,), generator=generator)
    model = models.create("mlp", input_shape=(1, 8, 8), classes=4)
    return gradveil.Task(model, input_shape=(1, 8, 8), classes=4), images, labels


def distance_from_24_bits(noise):
    """How far the angles of Box-Muller pairs are from multiples of 2^-24 turns, on average; chance gives .25.

    torch pairs value j with value j + 8 of every sixteen, and the angle comes from one 24-bit uniform.
    """
    blocks = noise[: len(noise) // 16 * 16].double().view(-1, 2, 8)
    turns = torch.atan2(blocks[:, 1], blocks[:, 0]) / (2 * math.pi) * 2**24
    return float((turns - turns.round()).abs().mean())


def named(victims, victim, generator):
    """The candidate whose clipped gradient leaves the most regular noise of a dp-sgd update with multiplier 10."""
    task, images, labels = victims
    defense = gradveil.defense("dp-sgd", clip=1.0, noise_multiplier=10.0)
    update = defense.share(task, images[victim, None], labels[victim, None], generator=generator)
    name, sent = max(update.items(), key=lambda item: item[1].numel())
    distances = [
        distance_from_24_bits(
            (sent.double() - clipped_sum(task, images[one, None], labels[one, None], 1.0)[name].double()).flatten()
        )
        for one in range(CANDIDATES)
    ]
    return min(range(CANDIDATES), key=distances.__getitem__), min(distances)


def test_a_seeded_update_names_its_image(victims):
    """The accountant says epsilon .8; the server names the right one of a hundred images every time."""
    for victim in range(5):
        found, distance = named(victims, victim, derived_generator(victim))
        assert found == victim
        assert distance < 0.2


def test_an_update_in_use_names_nobody(victims):
    hits = 0
    for victim in range(5):
        found, distance = named(victims, victim, None)
        hits += found == victim
        assert distance > 0.24
    assert hits <= 1


def test_clipped_gradients_on_the_grid_are_never_longer_than_the_clip(victims):
    task, images, labels = victims
    grid = grid_step(0.5 * 1e-3)
    for one in range(20):
        total = clipped_sum(task, images[one, None], labels[one, None], 1e-3, grid=grid)
        steps = {name: value / grid for name, value in total.items()}
        assert all(bool((value == value.round()).all()) for value in steps.values())
        # In whole numbers: the squares of the steps add up to at most the square of the clip.
        assert (
            sum(int(step) ** 2 for value in steps.values() for step in value.flatten().tolist()) <= (1e-3 / grid) ** 2
        )


def test_the_sum_on_the_grid_is_exact(victims):
    """Against whole numbers of any size: each example's steps by the slow obvious way, and their sum."""
    task, images, labels = victims
    grid = grid_step(1.0)
    gradients = task.per_example_gradients(images, labels)
    norms = torch.stack([value.double().flatten(1).square().sum(1) for value in gradients.values()]).sum(0).sqrt()
    scales = [min(1.0, (1 - 2**-20) / float(norm)) for norm in norms]
    found, plain = clipped_sum(task, images, labels, 1.0, grid=grid), clipped_sum(task, images, labels, 1.0)
    for name, value in gradients.items():
        flat = value.flatten(1)[:, :50].double().tolist()
        expected = [
            sum(math.trunc(row[place] * scale / grid) for row, scale in zip(flat, scales, strict=True))
            for place in range(len(flat[0]))
        ]
        got = [round(one / grid) for one in found[name].flatten()[:50].tolist()]
        # Scaling is rounded once more or less here and there: a step an example at the most, mostly none.
        assert max(abs(one - other) for one, other in zip(got, expected, strict=True)) <= 2
        torch.testing.assert_close(found[name].float(), plain[name], rtol=1e-4, atol=2e-5)


def test_a_longer_gradient_than_a_float_holds_is_refused(victims):
    task, images, labels = victims
    broken = task.with_parameters({name: value * 1e30 for name, value in task.parameters.items()})
    with pytest.raises(NotFiniteError, match="an example's gradient is not finite"):
        gradveil.defense("dp-sgd").share(broken, images[:2], labels[:2])


def test_noise_too_small_for_an_exact_sum_is_refused(victims):
    task, images, labels = victims
    with pytest.raises(ParameterError, match="noise_multiplier is too small for the sum of 100"):
        gradveil.defense("dp-sgd", noise_multiplier=1e-7).share(task, images, labels)


@pytest.mark.parametrize("spec", ["gradient-dropout:keep=0.5,std=0.3", "gradient-dropout:keep=0.8,std=1,scale=layer"])
def test_the_last_bits_do_not_tell_decoys_from_values(spec):
    """Dividing by `keep` leaves gaps between floats, and a decoy that falls into one is no value."""
    gradient = {"w": 0.3 * torch.randn(100_000, generator=torch.manual_seed(1))}
    defense = gradveil.defense(spec)
    keep = defense.keep

    def possible(sent):
        """Whether a float32 gradient divided by `keep` can give this."""
        back = (sent.double() * keep).float()
        neighbours = [torch.nextafter(back, torch.full_like(back, side)) for side in (-math.inf, math.inf)]
        return torch.stack([value / keep == sent for value in (back, *neighbours)]).any(0)

    seeded = defense.perturb(gradient, generator=derived_generator(0))["w"]
    used = defense.perturb(gradient)["w"]
    if keep == 0.8:  # with a power of two nothing is lost
        assert float((~possible(seeded)).double().mean()) > 0.01  # decoys, all of them
    step = grid_step(
        float(0.3 if defense.scale == "absolute" else (gradient["w"] / keep).double().square().mean().sqrt())
    )
    assert torch.equal((used.double() / step).round(), used.double() / step)
