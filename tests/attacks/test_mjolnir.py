"""Mjolnir: the channel, the linear rung, the diffusion model, the noise level, and what is refused."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradveil
from gradveil import metrics
from gradveil.attacks import _reduction
from gradveil.attacks._diffusion import (
    LEAST_SLOPE,
    SPAN,
    Channel,
    Denoiser,
    Noisy,
    calibration,
    error_of,
    train_denoiser,
)
from gradveil.core.errors import ThreatModelError

SIDE = 6


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def bars(count, seed):
    """Bright lines at random places on 6 x 6 images: those of class 0 are horizontal, those of class 1 vertical."""
    generator, labels = seeded(seed), torch.arange(count) % 2
    place, size = 5 * torch.rand(count, 1, generator=generator), 0.3 + torch.rand(count, 1, generator=generator)
    line = torch.exp(-((torch.arange(SIDE) - place) ** 2) / size)[:, :, None].expand(-1, -1, SIDE)
    return torch.where((labels == 1)[:, None, None], line.mT, line)[:, None].clone(), labels


@pytest.fixture(scope="module")
def small():
    """A small sigmoid network, 400 public images and 24 victims."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 2))
    with torch.no_grad():
        for value in model.parameters():
            value.uniform_(-0.5, 0.5)
    return gradveil.Task(model, input_shape=(1, SIDE, SIDE), classes=2), bars(400, 1), bars(24, 2)


def threat_of(small, spec, adaptive=True):
    _, public, victims = small
    defense = gradveil.defense(spec)
    known = {"labels": "known", "known_labels": victims[1][:, None]}
    return gradveil.ThreatModel(public=public, defense=defense, adaptive=adaptive, **known)


def posed(small, spec, attack, adaptive=True):
    """The fitted attack and its problem."""
    task, _, victims = small
    threat = threat_of(small, spec, adaptive)
    fitted = gradveil.attack(attack).fit(task, threat, generator=seeded(0))
    pairs = enumerate(zip(*(part.split(1) for part in victims), strict=True))
    updates = [threat.defense.share(task, *pair, generator=seeded(100 + n), memory={}) for n, pair in pairs]
    return fitted, fitted.pose(task, updates, threat, seeded(0))


def flat(updates):
    return torch.cat([value.flatten(1) for value in updates.values()], 1)


def cosines(small, fitted, problem):
    """Mean cosines of the received and the denoised updates with the true gradients, without the means of the class."""
    task, _, victims = small
    centres = fitted.learned["centres"][victims[1]]
    true = flat(task.per_example_gradients(*victims)) - centres
    received, denoised = flat(problem.updates) - centres, flat(fitted.denoise(problem).updates) - centres
    return tuple(float(functional.cosine_similarity(one, true).mean()) for one in (received, denoised))


# -- the channel and the linear rung -----------------------------------------------------------------------------


def test_the_linear_rung_is_the_best_linear_estimate(generator):
    """Normal features of known covariance, scaled, mixed and with correlated noise: C A^T (A C A^T + N)^-1 is known."""
    changes = 0.3 * torch.randn(3, 5, 5, generator=generator, dtype=torch.float64)
    mixing, spread, root = changes + torch.eye(5, dtype=torch.float64)
    clean = torch.randn(200_000, 5, generator=generator, dtype=torch.float64) @ root
    noise = torch.randn(200_000, 5, generator=generator, dtype=torch.float64) @ spread
    received = clean @ mixing + noise
    covariance = root.T @ root
    total = mixing.T @ covariance @ mixing + spread.T @ spread
    best = torch.linalg.solve(total, mixing.T @ covariance)
    channel = Channel.of_simulated(clean, received[None], best)
    denoiser = Denoiser(channel.profile, (0.1, 1.0), [])
    observed = received @ channel.observe
    found = denoiser(observed, torch.ones(len(received)), torch.ones(len(received), 1)) @ channel.mix
    torch.testing.assert_close(found, received @ best, rtol=0, atol=1e-9)
    error = torch.trace(covariance - covariance @ mixing @ best)
    assert float((found - clean).square().sum(1).mean()) == pytest.approx(float(error), rel=0.02)
    # What is observed is the truth plus uncorrelated noise of the given profile.
    truth = clean @ channel.whiten
    added = observed - truth
    torch.testing.assert_close(added.square().mean(0).sqrt(), channel.profile, rtol=0.02, atol=0.01)
    torch.testing.assert_close(truth.T @ truth / len(truth), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-6)
    assert float((truth.T @ (added / channel.profile) / len(truth)).abs().max()) < 0.02


def test_equal_noise_shrinks_each_principal_direction_by_its_share_of_signal(generator):
    deviations = torch.tensor([3.0, 1.0, 0.2])
    clean = torch.randn(100_000, 3, generator=generator) * deviations
    channel = Channel.of_equal_noise(clean)
    received = clean + 0.5 * torch.randn(clean.shape, generator=generator)
    levels, shares = torch.full((len(clean),), 0.5), torch.ones(len(clean), 1)
    found = Denoiser(channel.profile, (0.1, 1.0), [])(received @ channel.observe, levels, shares) @ channel.mix
    expected = received * deviations**2 / (deviations**2 + 0.25)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    torch.testing.assert_close(channel.whiten @ channel.mix, torch.eye(3), rtol=0, atol=1e-5)


def test_what_is_regressed_on_simulated_updates_is_the_least_squares_solution(small):
    """The denoised update of the attack itself, without regularisation to speak of, against a slow reference."""
    fitted, problem = posed(small, "gaussian-noise:std=0.05", "mjolnir:form=linear,directions=6")
    learned, labels = fitted.learned, problem.labels[:, 0]
    features = (flat(problem.updates) - learned["centres"][labels]) @ learned["directions"] - learned["offsets"][labels]
    weights = learned["observe"] / (1 + learned["profile"] ** 2) @ learned["mix"]
    denoised = (flat(fitted.denoise(problem).updates) - learned["centres"][labels]) @ learned["directions"]
    torch.testing.assert_close(denoised, features @ weights, rtol=1e-3, atol=1e-4)
    # Equal noise on uncorrelated directions: the regression nearly shrinks each of them on its own.
    task, public, _ = small
    clean = flat(task.per_example_gradients(*public)) - learned["centres"][public[1]]
    variances = (clean @ learned["directions"]).square().mean(0)
    torch.testing.assert_close(weights, (variances / (variances + 0.05**2)).diag(), rtol=0, atol=0.08)


# -- the diffusion model -----------------------------------------------------------------------------------------


def trained(clean, profile, epochs=30, at_entry=0.5):
    """A denoiser of these coordinates, and fresh noisy ones at level 1 to judge it by."""
    generator, count = seeded(0), len(clean) // 2
    mix, shares = torch.eye(clean.shape[1]), torch.ones(count, 1)

    def noisy(part):
        noise = torch.randn(part.shape, generator=generator)
        return Noisy(part, part + profile * noise, torch.ones(len(part)), torch.ones(len(part), 1))

    held, unseen = noisy(clean[count : count + count // 2]), noisy(clean[count + count // 2 :])
    start = Denoiser.untrained(profile, (0.05, 1.0), 1, generator)
    done = train_denoiser(
        start, mix, clean[:count], shares, held, generator, at_entry=at_entry, epochs=epochs, after_epoch=lambda: None
    )
    assert done.error == pytest.approx(error_of(done.denoiser, mix, held))
    return done.denoiser, Denoiser(profile, (0.05, 1.0), []), unseen, mix


def test_normal_coordinates_are_denoised_nearly_as_well_as_possible(generator):
    clean, profile = torch.randn(4000, 3, generator=generator), torch.tensor([0.3, 1.0, 2.0])
    denoiser, linear, unseen, mix = trained(clean, profile, epochs=4)
    best = float((profile**2 / (1 + profile**2)).sum())
    assert error_of(linear, mix, unseen) == pytest.approx(best, rel=0.1)
    assert error_of(denoiser, mix, unseen) < 1.1 * error_of(linear, mix, unseen)


def test_two_clusters_are_denoised_better_than_any_linear_map_can(generator):
    """At +1 or -1, the expected sign under noise of variance s^2 is tanh(z / s^2), and its error is known."""
    signs = torch.randint(0, 2, (6000, 1), generator=generator) * 2.0 - 1
    clean, profile = signs.expand(-1, 4).clone(), torch.full((4,), 1.0)
    denoiser, linear, unseen, mix = trained(clean, profile, epochs=10)
    best = (torch.tanh(unseen.observed.sum(1, keepdim=True)) - unseen.clean).square().sum(1).mean()
    error = error_of(denoiser, mix, unseen)
    assert error < 0.5 * error_of(linear, mix, unseen)
    assert error < 1.3 * float(best)


def test_the_chain_ends_at_a_typical_point_and_its_single_step_at_the_expected_one(generator):
    """For normal coordinates the flow is known: it divides them by their standard deviation, which is then 1."""
    profile, observed = torch.tensor([0.5, 1.0, 3.0]), torch.randn(4, 3, generator=generator)
    linear, levels, shares = Denoiser(profile, (0.05, 1.0), []), torch.full((4,), 0.8), torch.ones(4, 1)
    variance = 1 + (0.8 * profile) ** 2
    torch.testing.assert_close(linear.reverse(observed, levels, shares, 1), observed / variance)
    last = 1 + (0.8 / SPAN * profile) ** 2  # at the last level, the expected coordinates are returned
    expected = observed * (last / variance).sqrt() / last
    torch.testing.assert_close(linear.reverse(observed, levels, shares, 3000), expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("steps", [1, 5])
def test_without_noise_the_coordinates_come_back(generator, steps):
    denoiser = Denoiser.untrained(torch.tensor([0.5, 2.0]), (0.1, 1.0), 1, generator)
    denoiser.layers[-1].fill_(3.0)
    observed, shares = torch.randn(4, 2, generator=generator), torch.ones(4, 1)
    assert torch.equal(denoiser.reverse(observed, torch.zeros(4), shares, steps), observed)
    assert not torch.allclose(denoiser.reverse(observed, torch.ones(4), shares, steps), observed)


def test_a_denoiser_that_only_gets_worse_is_dropped(monkeypatch, generator):
    monkeypatch.setattr("gradveil.attacks._diffusion.LEARNING_RATE", 1e3)
    denoiser, linear, unseen, mix = trained(torch.randn(400, 3, generator=generator), torch.ones(3), epochs=2)
    assert denoiser.layers == []
    assert error_of(denoiser, mix, unseen) == error_of(linear, mix, unseen)


def test_calibration_is_the_slope_and_the_variance_around_it(generator):
    clean = torch.randn(50_000, 2, generator=generator)
    denoised = clean * torch.tensor([0.8, 0.0]) + torch.tensor([0.3, 0.1]) * torch.randn(50_000, 2, generator=generator)
    slopes, spreads = calibration(denoised, clean)
    torch.testing.assert_close(slopes, torch.tensor([0.8, LEAST_SLOPE]), rtol=0, atol=0.01)
    torch.testing.assert_close(spreads, torch.tensor([0.09, 0.01]), rtol=0.05, atol=0)
    assert float(calibration(-denoised, clean)[0][0]) == pytest.approx(LEAST_SLOPE)


# -- what it finds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["form=linear", "epochs=20"])
@pytest.mark.parametrize("adaptive", [True, False])
def test_denoising_brings_updates_nearer_to_the_true_gradients(small, form, adaptive):
    fitted, problem = posed(small, "gaussian-noise:std=0.1", f"mjolnir:{form},directions=40", adaptive)
    received, denoised = cosines(small, fitted, problem)
    assert denoised > received + 0.15


def test_the_diffusion_model_leaves_less_than_the_linear_estimate(small):
    errors = [
        float(posed(small, "gaussian-noise:std=0.1", f"mjolnir:{form},directions=40")[0].learned["error"])
        for form in ("form=linear", "epochs=30")
    ]
    assert errors[1] < 0.9 * errors[0]


def test_a_defense_that_scales_and_prunes_is_undone_as_far_as_a_regression_can(small):
    fitted, problem = posed(small, "top-k:keep=0.1", "mjolnir:form=linear,directions=40")
    received, denoised = cosines(small, fitted, problem)
    assert denoised > received + 0.1


@pytest.mark.parametrize("std", [0.05, 0.3])
def test_a_plain_attacker_finds_the_noise_level_outside_the_basis(small, std):
    fitted, problem = posed(small, f"gaussian-noise:std={std}", "mjolnir:form=linear,directions=20", adaptive=False)
    levels = fitted._denoised(problem).levels
    torch.testing.assert_close(levels, torch.full_like(levels, std), rtol=0.25, atol=0)


def test_an_undefended_update_is_only_projected(small):
    task, _, victims = small
    fitted, problem = posed(small, "none", "mjolnir:epochs=2,directions=40")
    true = flat(task.per_example_gradients(*victims))
    centres, directions = fitted.learned["centres"][victims[1]], fitted.learned["directions"]
    projected = centres + (true - centres) @ directions @ directions.T
    torch.testing.assert_close(flat(fitted.denoise(problem).updates), projected, rtol=0, atol=1e-3)


def test_images_are_found_under_noise_that_stops_gradient_matching(small):
    _, public, victims = small
    means = torch.stack([public[0][public[1] == label].mean(0) for label in range(2)])
    blind = metrics.psnr(victims[0], means[victims[1]]).median()
    fitted, problem = posed(small, "gaussian-noise:std=0.03", "mjolnir:epochs=20,directions=40,iterations=40,tv=0.1")
    found = fitted.run(replace(problem, execution="batch"))
    plain = gradveil.attack("inverting-gradients:optimiser=lbfgs,iterations=40").run(
        replace(problem, execution="batch")
    )
    denoised, received = (metrics.psnr(victims[0], each.inputs[:, 0].clamp(0, 1)).median() for each in (found, plain))
    assert denoised > max(blind, received) + 1
    assert found.loss.isfinite().all()


def test_some_values_of_large_updates_are_matched_and_not_mapped_back(small, monkeypatch):
    monkeypatch.setattr(_reduction, "EXACT_SIZE", 128)
    _, public, victims = small
    fitted, problem = posed(small, "none", "mjolnir:form=linear,directions=40,iterations=30,tv=0.1")
    assert fitted.learned["directions"].shape[0] == 128
    brief = replace(fitted, iterations=2)  # later on, rounding decides
    pair = [
        brief.run(replace(problem, generator=seeded(0), execution=execution)).inputs for execution in ("loop", "batch")
    ]
    torch.testing.assert_close(*pair, rtol=0, atol=1e-6)
    batch = fitted.run(replace(problem, execution="batch")).inputs
    means = torch.stack([public[0][public[1] == label].mean(0) for label in range(2)])
    blind = metrics.psnr(victims[0], means[victims[1]]).median()
    assert metrics.psnr(victims[0], batch[:, 0].float().clamp(0, 1)).median() > blind + 1
    with pytest.raises(ThreatModelError, match="only 128 values of an update are denoised, got updates with 170"):
        fitted.denoise(problem)


def test_batches_and_local_steps_are_simulated(small):
    task, public, victims = small
    local = gradveil.LocalSteps(epochs=2, batch_size=1, lr=0.1)
    threat = gradveil.ThreatModel(
        labels="known",
        known_labels=victims[1].view(-1, 2)[:2],
        public=(public[0][:60], public[1][:60]),
        batch_size=2,
        local=local,
    )
    ticks = []
    attack = gradveil.attack("mjolnir:epochs=2,directions=8,iterations=2")
    fitted = attack.fit(task, threat, generator=seeded(0), progress=lambda *at: ticks.append(at))
    groups = zip(*(part[:4].split(2) for part in victims), strict=True)
    updates = [gradveil.defense("none").share(task, *batch, generator=seeded(0), local=local) for batch in groups]
    found = fitted.reconstruct(task, updates, threat, generator=seeded(0))
    assert found.inputs.shape == (2, 2, 1, SIDE, SIDE)
    assert found.inputs.isfinite().all()
    assert ticks[-1][0] == ticks[-1][1]
    assert all(one[0] < other[0] for one, other in pairwise(ticks))


# -- trust -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_same_generator_learns_the_same(small, adaptive):
    attack = "mjolnir:directions=8,draws=2,epochs=2,iterations=2"
    one, other = (posed(small, "gaussian-noise:std=0.1", attack, adaptive) for _ in range(2))
    assert one[0] == other[0]
    first, second = (fitted.run(replace(problem, execution="loop")).inputs for fitted, problem in (one, other))
    assert torch.equal(first, second)


def test_what_it_cannot_do_is_refused(small):
    task, public, victims = small
    attack = gradveil.attack("mjolnir:form=linear")
    known = {"labels": "known", "known_labels": victims[1][:, None]}

    def refused(message, **granted):
        with pytest.raises(ThreatModelError, match=message):
            attack.fit(task, gradveil.ThreatModel(**{**known, "public": public, **granted}))

    refused("mjolnir: needs public data", public=None)
    refused("learns from single rounds, got rounds=2", rounds=2)
    refused("no adaptive form 'noise': it simulates", adaptive="noise", defense=gradveil.defense("gaussian-noise"))
    refused("no adaptive form without a defense", adaptive=True)
    places = torch.tensor([0, 0, 1, 1])
    refused("same class with different updates, got 2 to learn from", public=(public[0][places], public[1][places]))
    flat_task = gradveil.Task(nn.Linear(10, 2), input_shape=(10,), classes=2)
    with pytest.raises(ThreatModelError, match="tv needs inputs with a prior"):
        attack.fit(flat_task, gradveil.ThreatModel(public=(torch.rand(20, 10), torch.arange(20) % 2)))


def test_what_was_learned_for_another_setting_is_not_used(small):
    task, _, _ = small
    fitted, problem = posed(small, "none", "mjolnir:form=linear,directions=8", adaptive=False)
    moved = task.with_parameters({name: value + 0.1 for name, value in task.parameters.items()})
    for act in (fitted.run, fitted.denoise):
        with pytest.raises(ThreatModelError, match="was fitted for batches of 1, no local steps, no known defense"):
            act(replace(problem, rounds=[(moved, problem.updates)]))
        knowing = replace(problem.threat, adaptive=True, defense=gradveil.defense("gaussian-noise"))
        with pytest.raises(ThreatModelError, match="got batches of 1, no local steps, gaussian-noise"):
            act(replace(problem, threat=knowing))
