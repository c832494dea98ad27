"""Learning to invert: the simulated clients, the reduction, both rungs, and what is refused."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import gradveil
from gradveil import data, metrics, models
from gradveil.attacks import _inverse, _limits, _reduction, _simulation
from gradveil.attacks._inverse import Examples, assigned, error_of, fit_linear, gains_of
from gradveil.attacks._learned import Learning
from gradveil.attacks._reduction import Coordinates, centres_of, denoised, principal_directions
from gradveil.attacks._simulation import SimulatedClients, Steps, grouped, hold_out
from gradveil.core.errors import ThreatModelError
from gradveil.modality.image import Image

SIDE = 6


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def blobs(count, seed):
    """Bright spots of random size and place on 6 x 6 images: those of class 0 lie above, those of class 1 below."""
    generator = seeded(seed)
    labels = torch.arange(count) % 2
    centre = torch.rand(count, 2, generator=generator) * torch.tensor([2.0, 5.0]) + labels[:, None] * torch.tensor(
        [3.0, 0]
    )
    axis = torch.arange(SIDE).float()
    down, across = (axis[None, :] - centre[:, :1]) ** 2, (axis[None, :] - centre[:, 1:]) ** 2
    size = 1 + 2 * torch.rand(count, 1, 1, generator=generator)
    return torch.exp(-(down[:, :, None] + across[:, None, :]) / size)[:, None], labels


@pytest.fixture(scope="module")
def small():
    """A small sigmoid network, 400 public spots and 24 victims."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 2))
    with torch.no_grad():
        for value in model.parameters():
            value.uniform_(-0.5, 0.5)
    return gradveil.Task(model, input_shape=(1, SIDE, SIDE), classes=2), blobs(400, 1), blobs(24, 2)


def summing_task(size=16):
    """A layer whose gradient is the input itself, so that the map back is linear."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(size, 1))
    side = int(size**0.5)
    return gradveil.Task(model, lambda outputs, _labels: outputs.mean(), input_shape=(1, side, side), classes=2)


def share(task, defense, victims, batch_size=1, local=None):
    groups = zip(*(part.split(batch_size) for part in victims), strict=True)
    return [
        defense.share(task, *batch, generator=seeded(100 + number), memory={}, local=local)
        for number, batch in enumerate(groups)
    ]


def attacked(small, spec, attack="lti:form=linear", adaptive=True, **granted):
    """The fitted attack and the median PSNR of what it finds."""
    task, public, victims = small
    defense = gradveil.defense(spec)
    threat = gradveil.ThreatModel(
        labels="known", known_labels=victims[1][:, None], public=public, defense=defense, adaptive=adaptive, **granted
    )
    fitted = gradveil.attack(attack).fit(task, threat, generator=seeded(0))
    found = fitted.reconstruct(task, share(task, defense, victims), threat)
    return fitted, float(metrics.psnr(victims[0], found.inputs[:, 0]).median())


def blind(small):
    _, public, victims = small
    means = torch.stack([public[0][public[1] == label].mean(0) for label in range(2)])
    return float(metrics.psnr(victims[0], means[victims[1]]).median())


# -- simulated clients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    ["none", "gaussian-noise:std=0.1", "top-k:keep=0.3+error-feedback", "gradient-dropout+laplace-noise:std=0.1"],
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_clients_simulated_together_send_what_each_would_send_alone(small, spec, batch_size):
    task, public, _ = small
    clients = SimulatedClients(task, gradveil.defense(spec), public)
    assert clients.together
    groups, seeds = torch.arange(4 * batch_size).view(4, batch_size), torch.arange(8).view(2, 4)
    for row, together in zip(seeds.tolist(), clients.draws(groups, seeds), strict=True):
        for place, (group, seed) in enumerate(zip(groups, row, strict=True)):
            batch = public[0][group], public[1][group]
            alone = clients.defense.share(task, *batch, generator=seeded(seed), memory={})
            for name, value in alone.items():
                torch.testing.assert_close(together[name][place], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", ["dp-sgd", "soteria", "aligned-dual-pruning", "ats", "secure-aggregation", "refiner"])
def test_defenses_that_need_data_or_announce_are_simulated_client_by_client(small, spec):
    task, public, _ = small
    prepared, sent = gradveil.defense(spec).prepare(task, public=(public[0][:50], public[1][:50]), generator=seeded(0))
    clients = SimulatedClients(sent, prepared, public)
    one, again = (list(clients.draws(torch.arange(3)[:, None], torch.tensor([[1, 2, 3]]))) for _ in range(2))
    assert all(torch.equal(value, again[0][name]) for name, value in one[0].items())
    assert all(len(value) == 3 and value.isfinite().all() for value in one[0].values())


def test_only_what_draws_is_drawn_again(small):
    task, public, _ = small
    groups = torch.arange(6)[:, None]
    random = {
        spec: SimulatedClients(task, gradveil.defense(spec), public).are_random(groups)
        for spec in ("none", "top-k:keep=0.2", "gaussian-noise", "gradient-dropout")
    }
    assert random == {"none": False, "top-k:keep=0.2": False, "gaussian-noise": True, "gradient-dropout": True}


def test_held_out_inputs_are_of_every_class_and_never_learned_from(generator):
    kinds = torch.arange(57) % 4
    learning, held = hold_out("lti", kinds, 4, 3, generator)
    assert sorted([*learning.tolist(), *held.tolist()]) == list(range(57))
    assert kinds[held].bincount().tolist() == [2, 2, 2, 2]
    images = torch.rand(57, 1, 2, 2, generator=generator)
    groups = grouped(learning, kinds, images, 3, generator)
    assert groups.shape == (3 * (len(learning) // 3), 3)
    assert not set(groups.flatten().tolist()) & set(held.tolist())
    assert (kinds[groups].diff(dim=1) >= 0).all()
    assert all(len(set(group)) == 3 for group in groups.tolist())


def test_a_single_input_of_a_class_is_learned_from_and_a_class_without_inputs_gets_the_mean(generator):
    kinds = torch.tensor([0, 0, 0, 1])
    learning, held = hold_out("lti", kinds, 3, 1, generator)
    assert sorted(kinds[learning].tolist()) == [0, 0, 1]
    assert kinds[held].tolist() == [0]
    rows = torch.tensor([[1.0], [2.0], [6.0], [7.0]])
    assert centres_of(rows, torch.nn.functional.one_hot(kinds, 3)).tolist() == [[3.0], [7.0], [4.0]]


def test_of_several_rounds_the_first_is_attacked(small):
    task, public, victims = small
    defense = gradveil.defense("gaussian-noise", std=0.01)
    threat = gradveil.ThreatModel(public=public, adaptive=True, defense=defense)
    attack = gradveil.attack("lti:form=linear,draws=2").fit(task, threat, generator=seeded(0))
    update = share(task, defense, victims)[0]
    moved = task.with_parameters({name: value + 0.1 for name, value in task.parameters.items()})
    rounds = gradveil.Rounds([(task, update), (moved, update)])
    several = attack.reconstruct(task, [rounds], replace(threat, rounds=2))
    assert torch.equal(several.inputs, attack.reconstruct(task, [update], threat).inputs)


# -- the reduction -----------------------------------------------------------------------------------------------


def test_principal_directions_are_those_of_the_singular_value_decomposition(generator):
    rows = torch.randn(12, 40, generator=generator)
    directions = principal_directions(rows, 5)
    expected = torch.linalg.svd(rows, full_matrices=False).Vh[:5]
    torch.testing.assert_close((expected @ directions).abs(), torch.eye(5), rtol=0, atol=1e-4)
    assert principal_directions(rows[:3], 5).shape == (40, 3)


def test_centres_of_batches_are_fitted_to_the_shares_of_the_classes(generator):
    shares = torch.rand(30, 3, generator=generator).softmax(1)
    centres = torch.randn(3, 7, generator=generator)
    torch.testing.assert_close(centres_of(shares @ centres, shares), centres, rtol=1e-3, atol=1e-3)


def test_the_noise_of_a_few_draws_is_removed_and_what_a_defense_changes_is_kept(generator):
    """Half of the values get noise on twice the gradient; the others are replaced by something else, without noise."""
    undefended, other = torch.randn(2, 500, 40, generator=generator)
    truth = torch.cat([2 * undefended[:, :20], other[:, 20:]], 1)
    noisy = truth.clone()
    noisy[:, :20] += torch.randn(500, 20, generator=generator)
    noise = torch.tensor(20 * [1.0] + 20 * [0.0])
    found = denoised(noisy.clone(), undefended.clone(), noise)
    torch.testing.assert_close(found[:, 20:], truth[:, 20:])
    left = (found - truth)[:, :20].square().mean()
    assert left < 0.7  # the factor is that of all values, so the first half is not twice the gradient, as a whole
    alone = denoised(noisy[:, :20].clone(), undefended[:, :20].clone(), noise[:20])
    assert (alone - truth[:, :20]).square().mean() < 0.1


def test_the_values_that_differ_most_within_a_class_are_kept(small, monkeypatch):
    task, public, _ = small
    gradients = task.per_example_gradients(*public)
    everything = Coordinates(task, None).rows(gradients)
    variances = torch.stack([everything[public[1] == label].var(0) for label in range(2)]).mean(0)
    monkeypatch.setattr(_reduction, "EXACT_SIZE", 40)
    monkeypatch.setattr(_reduction, "_PAIRS", 200)
    clients = SimulatedClients(task, gradveil.defense("gaussian-noise:std=5"), public)
    chosen = Coordinates.most_telling(clients, torch.arange(400)[:, None], public[1], seeded(0))
    assert chosen.width == 40
    torch.testing.assert_close(chosen.rows(gradients), everything[:, chosen.places])
    assert variances[chosen.places].sum() > 0.97 * variances.topk(40).values.sum()
    again = Coordinates.of_learned(task, chosen.learned)
    assert torch.equal(again.rows(gradients), chosen.rows(gradients))


def test_small_updates_are_used_as_they_are(small):
    task, public, _ = small
    clients = SimulatedClients(task, gradveil.defense("none"), public)
    chosen = Coordinates.most_telling(clients, torch.arange(400)[:, None], public[1], seeded(0))
    assert chosen.places is None
    assert chosen.learned == {}
    gradients = task.per_example_gradients(*public)
    assert all(torch.equal(value, gradients[name]) for name, value in chosen.updates(chosen.rows(gradients)).items())


def test_under_noise_half_of_the_values_give_nearly_as_much(small, monkeypatch):
    _, exact = attacked(small, "gaussian-noise:std=0.05")
    monkeypatch.setattr(_reduction, "EXACT_SIZE", 80)
    fitted, some = attacked(small, "gaussian-noise:std=0.05")
    assert fitted.learned["directions"].shape[0] == 80
    assert exact + 1.5 > some > exact - 1.5
    assert some > blind(small) + 1


def reduced(small, defense, draws, taught):
    """Directions from 30 clients, the features of these and of others, and how many updates were simulated."""
    task, public, _ = small
    clients, learning = SimulatedClients(task, defense, public), Learning(seeded(0))
    groups = torch.arange(taught)[:, None]
    shares, done = nn.functional.one_hot(public[1][:30], 2).float(), []
    steps = Steps(lambda count, *_: done.append(count), 10_000)
    coordinates = Coordinates.most_telling(clients, groups, public[1], learning.generator)
    directions, kept = _reduction.simulated_directions(
        clients, coordinates, groups[:30], shares, draws, 5, learning, steps
    )
    features = _reduction.simulated_features(
        clients, coordinates, directions, groups, draws, "taught", learning, steps, kept
    )
    return clients, coordinates, directions, kept, features, done[-1]


@pytest.mark.parametrize(("room", "draws_kept"), [(1 << 28, 3), (2 * 30 * 170, 2), (100, 0)])
def test_clients_that_take_long_are_not_simulated_twice(small, monkeypatch, room, draws_kept):
    monkeypatch.setattr(_reduction, "KEPT_VALUES", room)
    defense, _ = gradveil.defense("dp-sgd:noise_multiplier=0.01").prepare(small[0])
    seeds = []
    draw_seeds = _reduction.draw_seeds
    monkeypatch.setattr(_reduction, "draw_seeds", lambda *how: seeds.append(draw_seeds(*how)) or seeds[-1])
    clients, coordinates, directions, kept, features, simulated = reduced(small, defense, 3, 40)
    assert small[0].size == 170
    assert kept.shape == (draws_kept, 30, 170)
    assert simulated == 3 * 30 + (3 - draws_kept) * 30 + 3 * 10
    groups, first = torch.arange(40)[:, None], seeds[0][:, :30]
    sent = torch.stack([coordinates.rows(updates) for updates in clients.draws(groups[:30], first)])
    torch.testing.assert_close(kept, sent[:draws_kept])
    torch.testing.assert_close(features[:draws_kept, :30], sent[:draws_kept] @ directions)
    assert features.isfinite().all()
    assert not torch.equal(features[0], features[1])


def test_cheap_clients_are_simulated_again_unless_their_updates_are_large(small, monkeypatch):
    defense = gradveil.defense("gaussian-noise:std=0.1")
    assert reduced(small, defense, 2, 40)[3].numel() == 0
    monkeypatch.setattr(_reduction, "EXACT_SIZE", 80)
    assert reduced(small, defense, 2, 40)[3].shape == (2, 30, 80)


@pytest.mark.parametrize("spec", ["optimal-noise:std=0.1", "optimal-dp-sgd:std=0.1,clip=1"])
def test_the_noise_of_one_client_is_drawn_again_without_its_sensitivity(small, monkeypatch, spec):
    task, public, _ = small
    defense, clients = gradveil.defense(spec), SimulatedClients(task, gradveil.defense(spec), public)
    groups, seeds = torch.tensor([[3], [8]]), torch.arange(120).view(60, 2)
    alone = defense.share(task, public[0][3:4], public[1][3:4], generator=seeded(0))
    measured, sensitivity = [], type(task).sensitivity
    monkeypatch.setattr(type(task), "sensitivity", lambda *a, **k: measured.append(1) or sensitivity(*a, **k))
    sent = [Coordinates(task, None).rows(updates) for updates in clients.draws(groups, seeds)]
    assert len(measured) == 2
    torch.testing.assert_close(sent[0][:1], Coordinates(task, None).rows({n: v[None] for n, v in alone.items()}))
    noise = torch.stack(sent)[:, 0] - torch.stack(sent)[:, 0].mean(0)
    variance = noise.square().sum(0) / 59
    first, again = (part.square().mean() for part in (noise[:30], noise[30:]))
    assert 0.5 < first / again < 2
    assert 0.5 < variance.mean() / 0.1**2 < 2
    local = SimulatedClients(task, defense, public, gradveil.LocalSteps(2, 1, 0.1))
    assert all(len(updates) for updates in local.draws(groups, seeds[:3]))
    assert len(measured) == 2 + 3 * 2 * 2  # every step has one of its own


def test_defenses_that_draw_nothing_else_are_not_repeated():
    specs = ("optimal-pruning", "optimal-noise:form=global", "optimal-noise:std=0", "optimal-noise:every=2", "refiner")
    assert [gradveil.defense(spec).repeated(4) for spec in specs] == len(specs) * [None]


# -- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [1e-9, 1e-3, 0.5])
def test_errors_of_clients_that_are_left_out(generator, monkeypatch, ridge):
    """Against fitting all others anew for each client, classes without a penalty."""
    rows, shares = torch.randn(20, 7, generator=generator), nn.functional.one_hot(torch.arange(20) % 3).float()
    targets = rows @ torch.randn(7, 4, generator=generator) + shares @ torch.randn(3, 4, generator=generator)
    targets += 0.3 * torch.randn(20, 4, generator=generator)
    monkeypatch.setattr(_limits, "_RIDGES", (ridge,))
    found = _limits.left_out_errors(rows, shares, targets)
    both, wanted = torch.cat([rows, shares], 1).double().numpy(), targets.double().numpy()
    classes = both[:, 7:]
    apart = np.eye(20) - classes @ np.linalg.pinv(classes)
    penalty = ridge * np.linalg.eigvalsh(apart @ both[:, :7] @ both[:, :7].T @ apart).mean()
    for left_out in range(20):
        others = np.arange(20) != left_out
        gram = both[others].T @ both[others] + np.diag([penalty] * 7 + [0] * 3)
        map_ = np.linalg.solve(gram, both[others].T @ wanted[others])
        expected = ((wanted[left_out] - both[left_out] @ map_) ** 2).mean()
        assert float(found[left_out]) == pytest.approx(expected, rel=1e-4)


def test_values_are_limited_where_a_few_of_them_hide_the_rest(small, monkeypatch):
    """The same updates, but of one client in ten a few values are a thousand times as large."""
    task, public, victims = small
    rows = SimulatedClients.draws

    def with_outliers(self, groups, seeds):
        for updates in rows(self, groups, seeds):
            hit = (groups[:, 0] % 10 == 0).view(-1, 1, 1, 1, 1) & (torch.arange(3) == 1)
            yield {**updates, "0.weight": torch.where(hit, 1e3 * updates["0.weight"], updates["0.weight"])}

    _, plain = attacked((task, public, victims), "none", "lti:form=linear")
    monkeypatch.setattr(SimulatedClients, "draws", with_outliers)
    limited, good = attacked((task, public, victims), "none", "lti:form=linear")
    assert limited.learned["limits"].shape == (task.size,)
    monkeypatch.setattr(_limits, "LIMITS", ())
    unlimited, bad = attacked((task, public, victims), "none", "lti:form=linear")
    assert "limits" not in unlimited.learned
    assert bad + 1 < good < plain + 0.5
    again = Coordinates.of_learned(task, limited.learned)
    updates = task.per_example_gradients(*victims)
    values = Coordinates(task, None).rows(updates)
    expected = torch.cat([values, _reduction.softly_limited(values, limited.learned["limits"])], 1)
    assert torch.equal(again.rows(updates), expected)
    assert again.width == 2 * task.size == len(limited.learned["directions"])


# -- the linear rung ---------------------------------------------------------------------------------------------


def test_the_linear_map_is_the_least_squares_solution(generator, monkeypatch):
    features, inputs = torch.randn(1, 90, 5, generator=generator), torch.rand(90, 4, generator=generator)
    zeros, shares = torch.zeros(90, 1, 4), torch.ones(90, 1)
    examples = Examples(features, shares, zeros, torch.arange(90)[:, None], inputs)
    for ridge in (1e-9, 0.5):
        monkeypatch.setattr(_inverse, "RIDGES", (ridge,))
        weights, error = fit_linear(examples, examples)
        f, x = (part.double().numpy() for part in (features[0], inputs))
        stacked = np.vstack([f, np.sqrt(90 * ridge) * np.eye(5)]), np.vstack([x, np.zeros((5, 4))])
        expected = np.linalg.lstsq(*stacked, rcond=None)[0]
        np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-4, atol=1e-5)
        assert error == pytest.approx(float(((f @ expected - x) ** 2).mean()), rel=1e-5)


def test_a_gradient_that_is_the_input_is_inverted_exactly(generator):
    task = summing_task()
    images, labels = torch.rand(68, 1, 4, 4, generator=generator), torch.arange(68) % 2
    public, victims = (images[:60], labels[:60]), (images[60:], labels[60:])
    threat = gradveil.ThreatModel(labels="known", known_labels=victims[1][:, None], public=public)
    attack = gradveil.attack("lti:form=linear").fit(task, threat, generator=generator)
    found = attack.reconstruct(task, share(task, gradveil.defense("none"), victims), threat)
    torch.testing.assert_close(found.inputs[:, 0], victims[0], rtol=0, atol=1e-3)
    assert found.iterations.tolist() == [0] * 8
    assert float(found.loss[0]) < 1e-6
    assert "limits" not in attack.learned


def test_with_noise_it_is_the_best_linear_estimate(generator):
    """For x of variance s^2 and a gradient x + noise of variance t^2, the error is s^2 t^2 / (s^2 + t^2)."""
    task = summing_task()
    images, labels = 0.5 + 0.1 * torch.randn(1500, 1, 4, 4, generator=generator), torch.arange(1500) % 2
    threat = gradveil.ThreatModel(
        labels="known",
        known_labels=labels[:1, None],
        public=(images, labels),
        defense=gradveil.defense("gaussian-noise:std=0.1"),
        adaptive=True,
    )
    attack = gradveil.attack("lti:form=linear,draws=2").fit(task, threat, generator=generator)
    assert float(attack.learned["error"]) == pytest.approx(0.01 * 0.01 / 0.02, rel=0.1)


# -- what it finds -----------------------------------------------------------------------------------------------


def test_it_beats_the_blind_guess_under_noise(small):
    _, psnr = attacked(small, "gaussian-noise:std=0.05", "lti:form=linear")
    assert psnr > blind(small) + 1


def test_digits_under_noise_that_stops_gradient_matching():
    """Embedded digits, the default network: 400 public ones are enough to see more than the class mean."""
    dataset = data.load("mnist")
    model = models.create("lenet", input_shape=(1, 28, 28), classes=10, init="uniform")
    task = gradveil.Task(model, input_shape=(1, 28, 28), classes=10)
    public, victims = dataset.train.batch(torch.arange(400)), dataset.test.batch(torch.arange(16))
    _, psnr = attacked((task, public, victims), "gaussian-noise:std=0.1", "lti:form=linear,draws=4")
    means = torch.stack([public[0][public[1] == label].mean(0) for label in range(10)])
    assert psnr > float(metrics.psnr(victims[0], means[victims[1]]).median()) + 1


@pytest.mark.parametrize("spec", ["top-k:keep=0.05", "gaussian-noise:std=0.1"])
def test_an_attacker_who_simulates_the_defense_finds_more(small, spec):
    _, adaptive = attacked(small, spec)
    _, plain = attacked(small, spec, adaptive=False)
    assert adaptive > plain + 1


def test_each_form_is_better_on_held_out_inputs_than_the_one_before(small):
    linear, network, blend = (
        attacked(small, "gaussian-noise:std=0.05", f"lti:form={form},draws=4,epochs=15")[0]
        for form in ("linear", "network", "blend")
    )
    assert float(blend.learned["error"]) < float(network.learned["error"]) < float(linear.learned["error"])
    assert int(blend.learned["steps"]) == int(network.learned["steps"]) > 0
    assert 0 < float(blend.learned["share"]) < 1 == float(network.learned["share"])


def test_the_share_of_a_blend_has_the_least_error():
    """A network that is .3 too high and a linear map that is .2 too low, together right: .4 times .3 is .6 times .2."""
    truth, guesses = torch.rand(40, 9, generator=seeded(0)), torch.zeros(40, 1, 9)
    features, places = truth - 0.2, torch.arange(40)[:, None]
    held = Examples(features[None], torch.ones(40, 1), guesses, places, truth)
    network = lambda features, _shares, guesses: features.view_as(guesses) + 0.5  # noqa: E731
    share, error = _inverse.best_share([network], torch.eye(9), held, None)
    assert share == 0.4
    assert error == pytest.approx(0, abs=1e-12)
    found = _inverse.blend_of([network], torch.eye(9), 0.4, None)(features, held.shares, guesses)
    torch.testing.assert_close(found[:, 0], truth)


def test_a_blend_that_saves_next_to_nothing_is_not_used(monkeypatch):
    """A tenth of a map with 18.5 times the squared error, in another direction, saves half a per cent."""
    truth, noise = torch.rand(4000, 9, generator=seeded(0)), 0.43 * torch.randn(4000, 9, generator=seeded(1))
    features = truth + noise
    places = torch.arange(4000)[:, None]
    held = Examples(features[None], torch.ones(4000, 1), torch.zeros(4000, 1, 9), places, truth)
    network = lambda _features, _shares, _guesses: truth[:, None] + 0.1  # noqa: E731
    monkeypatch.setattr(_inverse, "_ROWS", 4000)
    share, error = _inverse.best_share([network], torch.eye(9), held, None)
    assert share == 1
    assert error == pytest.approx(0.01, rel=1e-3)
    monkeypatch.setattr(_inverse, "WORTHWHILE", 0.0)
    share, least = _inverse.best_share([network], torch.eye(9), held, None)
    assert share == 0.9
    assert 0.98 < least / error < 1


def test_of_a_network_that_is_no_better_than_the_linear_map_nothing_is_kept_that_does_not_help(monkeypatch):
    """Its errors are those of the linear map and a little more, so that every share of it only costs."""
    truth, noise = torch.rand(4000, 9, generator=seeded(0)), 0.43 * torch.randn(4000, 9, generator=seeded(1))
    features = truth + noise
    places = torch.arange(4000)[:, None]
    held = Examples(features[None], torch.ones(4000, 1), torch.zeros(4000, 1, 9), places, truth)
    network = lambda _features, _shares, _guesses: (truth + 1.001 * noise)[:, None]  # noqa: E731
    monkeypatch.setattr(_inverse, "_ROWS", 4000)
    share, error = _inverse.best_share([network], torch.eye(9), held, None)
    assert share == 0
    assert error == pytest.approx(0.43**2, rel=0.02)


def test_the_linear_part_of_a_blend_stays_within_bounds():
    guesses, shares = torch.zeros(1, 1, 2), torch.ones(1, 1)
    network = lambda *_: torch.full((1, 1, 2), 0.5)  # noqa: E731
    found = _inverse.blend_of([network], torch.eye(2), 0.5, (0.0, 1.0))(torch.tensor([[3.0, -3.0]]), shares, guesses)
    torch.testing.assert_close(found, torch.tensor([[[0.75, 0.25]]]))


def test_the_first_rung_of_a_network_is_the_linear_form(small):
    task, public, victims = small
    linear, _ = attacked(small, "gaussian-noise:std=0.05", "lti:form=linear,draws=4")
    network, _ = attacked(small, "gaussian-noise:std=0.05", "lti:draws=4,epochs=2")
    defense = gradveil.defense("gaussian-noise:std=0.05")
    threat = gradveil.ThreatModel(public=public, defense=defense, adaptive=True)
    updates = share(task, defense, victims)
    found = [attack.reconstruct(task, updates, threat) for attack in (linear, network.first_rung(), network)]
    assert torch.equal(found[0].inputs, found[1].inputs)
    assert torch.equal(found[0].loss, found[1].loss)
    assert not torch.equal(found[0].inputs, found[2].inputs)
    with pytest.raises(ThreatModelError, match="lti: must be fitted first"):
        gradveil.attack("lti").first_rung()


class Unbounded(Image):
    """Images that do not declare their range."""

    bounds = None

    def project(self, inputs):
        return inputs.clamp(0, 1)


def test_inputs_with_bounds_are_predicted_by_their_logits(small):
    """At random weights the network predicts values inside the bounds; without bounds, values outside them too."""
    _, public, _ = small
    features, shares = 10 * torch.randn(50, 4, generator=seeded(0)), torch.ones(50, 1)
    guesses = public[0][:50].flatten(1)[:, None]
    bounded, free = (
        _inverse.Network.untrained(torch.ones(4), 1, guesses.shape[-1], 8, bounds, seeded(1))
        for bounds in ((-1.0, 3.0), None)
    )
    inside, outside = (network(features, shares, guesses) for network in (bounded, free))
    moved = outside - guesses
    expected = -1 + 4 * torch.sigmoid(torch.logit(((guesses + 1) / 4).clamp(0.01, 0.99)) + moved)
    torch.testing.assert_close(inside, expected, rtol=1e-4, atol=1e-5)
    assert outside.min() < -1
    shifted = (guesses + 1) / 4
    cross_entropy = nn.functional.binary_cross_entropy((inside + 1) / 4, shifted)
    torch.testing.assert_close(bounded.loss(features, shares, guesses, guesses), cross_entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(free.loss(features, shares, guesses, guesses), moved.square().mean())


def test_a_network_learns_inputs_without_bounds(small):
    task, public, victims = small
    model = task.copy_model()
    unbounded = gradveil.Task(model, input_shape=task.input_shape, classes=2, modality=Unbounded())
    _, psnr = attacked((unbounded, public, victims), "gaussian-noise:std=0.05", "lti:draws=4,epochs=15")
    assert psnr > blind(small) + 1


def test_several_networks_are_averaged(small):
    """The first of two networks is the one that is trained alone, and their mean has the smaller held-out error."""
    alone, _ = attacked(small, "gaussian-noise:std=0.05", "lti:form=network,draws=4,epochs=6")
    both, _ = attacked(small, "gaussian-noise:std=0.05", "lti:form=network,draws=4,epochs=6,networks=2")
    layers = [name for name in both.learned if name.startswith("layer")]
    assert len(layers) == 2 * len([name for name in alone.learned if name.startswith("layer")])
    assert all(torch.equal(value, both.learned[name]) for name, value in alone.learned.items() if name in layers)
    assert float(both.learned["error"]) < float(alone.learned["error"])


def test_networks_of_a_batch_agree_on_the_order():
    guesses = torch.zeros(1, 2, 1)
    one, other = (lambda *_: torch.tensor([[[0.0], [1.0]]])), (lambda *_: torch.tensor([[[0.8], [0.2]]]))
    found = _inverse.average_of([one, other])(guesses, guesses, guesses)
    torch.testing.assert_close(found, torch.tensor([[[0.1], [0.9]]]))


def test_a_network_that_only_gets_worse_is_dropped(small, monkeypatch):
    monkeypatch.setattr(_inverse, "LEARNING_RATE", 1e3)
    linear, psnr = attacked(small, "none", "lti:form=linear")
    network, same = attacked(small, "none", "lti:form=network,epochs=2")
    assert not any(name.startswith("layer") for name in network.learned)
    assert float(network.learned["error"]) == float(linear.learned["error"])
    assert same == psnr
    blend, nearly = attacked(small, "none", "lti:epochs=2")
    assert float(blend.learned["share"]) <= 0.1
    assert nearly == pytest.approx(psnr, abs=0.1)


def test_features_count_by_the_share_of_them_that_is_signal(generator):
    """Signal of variance 1 and noise of variance 0, 1 and 9, scaled to a total of 1; the last feature is all noise."""
    noise = torch.tensor([0.0, 1.0, 3.0, 1.0])
    signal = torch.randn(4000, 4, generator=generator) * torch.tensor([1.0, 1.0, 1.0, 0.0])
    drawn = signal + noise * torch.randn(8, 4000, 4, generator=generator)
    gains = gains_of(drawn / drawn.square().mean((0, 1)).sqrt())
    torch.testing.assert_close(gains / gains[0], torch.tensor([1.0, 0.5, 0.1, 0.0]).sqrt(), rtol=0, atol=0.04)
    assert float(gains.square().mean()) == pytest.approx(1, abs=1e-5)
    assert gains_of(drawn[:1]).tolist() == [1.0] * 4


def test_time_ends_the_training_after_the_epoch(small):
    fitted, _ = attacked(small, "none", "lti:epochs=50,seconds=1e-9")
    assert int(fitted.learned["steps"]) == 3  # one epoch of 360 clients in batches of 128


# -- batches, local steps ----------------------------------------------------------------------------------------


def test_examples_are_assigned_to_the_nearest_predictions(generator):
    truth = torch.rand(6, 4, 9, generator=generator)
    order = torch.stack([torch.randperm(4, generator=generator) for _ in range(6)])
    found = truth.gather(1, order[..., None].expand_as(truth)) + 0.01
    torch.testing.assert_close(assigned(found, truth), found - 0.01)
    examples = Examples(torch.zeros(1, 6, 1), torch.ones(6, 1), found, torch.arange(24).view(6, 4), truth.flatten(0, 1))
    assert error_of(lambda _features, _shares, guesses: guesses, examples) == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize("attack", ["lti:form=linear", "lti:epochs=2"])
def test_the_order_of_a_batch_does_not_matter(small, attack):
    task, public, victims = small
    labels = victims[1].view(-1, 3)
    threat = gradveil.ThreatModel(labels="known", known_labels=labels, public=public, batch_size=3)
    fitted = gradveil.attack(attack).fit(task, threat, generator=seeded(0))
    updates = share(task, gradveil.defense("none"), victims, 3)
    found = fitted.reconstruct(task, updates, threat)
    other = fitted.reconstruct(task, updates, replace(threat, known_labels=labels.flip(1)))
    assert torch.equal(found.inputs, other.inputs)
    assert found.inputs.shape == (8, 3, 1, SIDE, SIDE)
    assert torch.equal(found.labels, labels.sort(1).values)
    means = torch.stack([public[0][public[1] == label].mean(0) for label in range(2)])
    errors = [
        float((guess - assigned(guess, victims[0].view(8, 3, -1))).square().mean())
        for guess in (found.inputs.flatten(2), means[found.labels].flatten(2))
    ]
    assert errors[0] < 0.8 * errors[1]


def test_local_steps_are_simulated(small):
    task, public, victims = small
    local = gradveil.LocalSteps(epochs=2, batch_size=1, lr=0.1)
    public = public[0][:60], public[1][:60]
    threat = gradveil.ThreatModel(
        labels="known", known_labels=victims[1].view(-1, 2), public=public, batch_size=2, local=local
    )
    ticks = []
    attack = gradveil.attack("lti:form=linear,draws=2")
    fitted = attack.fit(task, threat, generator=seeded(0), progress=lambda *at: ticks.append(at))
    found = fitted.reconstruct(task, share(task, gradveil.defense("none"), victims, 2, local), threat)
    assert found.inputs.shape == (12, 2, 1, SIDE, SIDE)
    assert found.inputs.isfinite().all()
    assert ticks[-1][0] == ticks[-1][1]
    assert all(one[0] < other[0] for one, other in pairwise(ticks))


# -- trust -------------------------------------------------------------------------------------------------------


def test_the_same_generator_learns_the_same(small):
    one, first = attacked(small, "gaussian-noise:std=0.1", "lti:draws=2,epochs=2")
    other, second = attacked(small, "gaussian-noise:std=0.1", "lti:draws=2,epochs=2")
    assert one == other
    assert first == second


def test_it_sees_raw_updates_whatever_matching_attacks_know_of_the_defense(small):
    """Knowledge of some defenses changes updates and results; what was learned from raw updates must get raw ones."""
    task, public, victims = small
    public, victims = tuple(part[:40] for part in public), tuple(part[:4] for part in victims)
    for spec in ("gaussian-noise:std=0.1", "precode", "ats"):
        prepared, sent = gradveil.defense(spec).prepare(task, public=public, generator=seeded(0))
        threat = gradveil.ThreatModel(
            labels="known", known_labels=victims[1][:, None], public=public, defense=prepared, adaptive=True
        )
        attack = gradveil.attack("lti:form=linear,draws=2").fit(sent, threat, generator=seeded(0))
        updates = share(sent, prepared, victims)
        problem = attack.pose(sent, updates, threat, seeded(0))
        assert problem.knowledge is None
        assert all(torch.equal(problem.updates[name][0], value) for name, value in updates[0].items())


def test_what_it_cannot_do_is_refused(small):
    task, public, victims = small
    attack = gradveil.attack("lti:form=linear")
    known = {"labels": "known", "known_labels": victims[1][:, None]}

    def refused(message, **granted):
        with pytest.raises(ThreatModelError, match=message):
            attack.fit(task, gradveil.ThreatModel(**{**known, "public": public, **granted}))

    refused("lti: needs public data", public=None)
    refused("updates of 8 examples need .* got 18 and 2 of 20", public=(public[0][:20], public[1][:20]), batch_size=8)
    refused("no adaptive form 'noise': it simulates", adaptive="noise", defense=gradveil.defense("gaussian-noise"))
    refused("no adaptive form without a defense", adaptive=True)
    with pytest.raises(ThreatModelError, match="at most 32,768 values, got 36,000 behind each update; use form=linear"):
        gradveil.attack("lti").fit(task, gradveil.ThreatModel(public=public, batch_size=1000))


def test_what_was_learned_for_another_setting_is_not_used(small):
    task, public, victims = small
    threat = gradveil.ThreatModel(public=public)
    attack = gradveil.attack("lti:form=linear").fit(task, threat, generator=seeded(0))
    updates = share(task, gradveil.defense("none"), victims)
    moved = task.with_parameters({name: value + 0.1 for name, value in task.parameters.items()})
    with pytest.raises(
        ThreatModelError, match="was fitted for batches of 1, no local steps, no known defense, weights"
    ):
        attack.reconstruct(moved, updates, threat)
    knowing = replace(threat, adaptive=True, defense=gradveil.defense("gaussian-noise"))
    with pytest.raises(ThreatModelError, match="got batches of 1, no local steps, gaussian-noise"):
        attack.reconstruct(task, updates, knowing)


def test_no_table_is_larger_than_allowed(small, monkeypatch):
    """2,000 values hold 2 times 5 updates of this model, and 5 features of one draw of 360 clients."""
    drawn = []
    draws = SimulatedClients.draws

    def record(self, groups, seeds):
        drawn.append((len(seeds), len(groups)))
        return draws(self, groups, seeds)

    monkeypatch.setattr(SimulatedClients, "draws", record)
    monkeypatch.setattr(_simulation, "MEMORY_VALUES", 2000)
    attacked(small, "gaussian-noise:std=0.1", "lti:form=linear,directions=5,draws=4")
    # The first is the trial whether anything is drawn; the undefended updates are one draw of those of the directions.
    # Then the limits of the values are chosen.
    assert drawn[1:] == [(1, 5), (4, 5), (1, 5), (1, 256), (1, 104), (1, 40)]
