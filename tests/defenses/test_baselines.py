"""The baselines, compared with slow but obvious references and with other libraries."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

import gradveil
from gradveil import data, models
from gradveil.core.errors import InputError
from gradveil.core.randomness import source_of
from gradveil.defenses import _transforms as transforms
from gradveil.defenses._clipping import clipped_sum
from gradveil.defenses.ats import accuracy_score, privacy_score, random_policies
from gradveil.defenses.outpost import layer_risk
from gradveil.defenses.precode import divergence
from gradveil.defenses.soteria import estimated_slopes, exact_slopes
from gradveil.models.base import takes_text


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def double_task(model: nn.Module, shape=(1, 6, 6), classes: int = 4) -> gradveil.Task:
    return gradveil.Task(model.double(), input_shape=shape, classes=classes)


def norm(gradients) -> float:
    return float(torch.cat([value.flatten() for value in gradients.values()]).norm())


@pytest.fixture
def relu_task() -> gradveil.Task:
    torch.manual_seed(1)
    layers = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 4))
    return double_task(nn.Sequential(*layers))


@pytest.fixture
def batch_norm_task() -> gradveil.Task:
    torch.manual_seed(1)
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 4))
    return double_task(nn.Sequential(*layers))


# -- top-k -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.floats(0.01, 1), st.integers(0, 40))
def test_global_top_k_keeps_the_largest_of_all_layers(values, keep, cut):
    """Compare with a sorted list; many values are equal, so that ties by position are checked too."""
    layers = {
        "a": torch.tensor(values[:cut], dtype=torch.float32),
        "b": torch.tensor(values[cut:], dtype=torch.float64),
    }
    sent = gradveil.defense("top-k", keep=keep, form="global").perturb(layers)
    count = math.ceil(round(keep * len(values), 9))
    kept = set(sorted(range(len(values)), key=lambda i: -abs(values[i]))[:count])
    assert torch.cat(list(sent.values())).tolist() == [v if i in kept else 0 for i, v in enumerate(values)]
    assert [value.dtype for value in sent.values()] == [torch.float32, torch.float64]


def test_global_top_k_of_many_clients_equals_the_loop_and_travels():
    clients = [
        {"a": torch.randn(70, 80, generator=seeded(n)), "b": 1e-3 * torch.randn(9, generator=seeded(n))}
        for n in range(3)
    ]
    defense = gradveil.defense("top-k", keep=0.1, form="global")
    together = defense.perturb_clients({name: torch.stack([c[name] for c in clients]) for name in clients[0]})
    for index, client in enumerate(clients):
        alone = defense.perturb(client)
        assert all(torch.equal(alone[name], together[name][index]) for name in alone)
        assert sum(int((value != 0).sum()) for value in alone.values()) == math.ceil(0.1 * 5609)
        assert not alone["b"].any()
        received = gradveil.wire.decode(gradveil.wire.encode(alone))
        assert all(torch.equal(alone[name], received[name]) for name in alone)


def test_what_magnitude_and_optimal_pruning_keep_of_utility_and_sensitivity():
    """One batch of 16 of the embedded digits on mnist-cnn, 20 % kept.

    On MNIST (experiments/optimal_defenses) the shares of U1 and of the sum of s^2 are about the same: magnitude
    pruning keeps more than twice the sensitivity, and it keeps most of U1 in its global form.
    """
    split = data.load("mnist").train
    torch.manual_seed(0)
    model = models.create("mnist-cnn", input_shape=(1, 28, 28), classes=10)
    task = gradveil.Task(model, input_shape=(1, 28, 28), classes=10)
    batch = split.batch(torch.arange(16) * (len(split) // 16))
    gradients, squared = task.gradients(*batch), task.sensitivity(*batch, 20, generator=seeded(1))
    total = sum(float(value.sum()) for value in squared.values())
    shares = {}
    for spec in (
        "top-k:keep=0.2",
        "top-k:keep=0.2,form=global",
        "optimal-pruning:rate=0.8",
        "optimal-pruning:rate=0.8,layerwise=true",
    ):
        sent = gradveil.defense(spec).share(task, *batch, generator=seeded())
        u1 = (norm(sent) / norm(gradients)) ** 2
        shares[spec] = u1, sum(float((squared[name] * (sent[name] != 0)).sum()) for name in sent) / total
    layerwise, everywhere, optimal, optimal_layerwise = shares.values()
    assert layerwise == pytest.approx((0.79, 0.46), abs=0.12)
    assert everywhere == pytest.approx((0.96, 0.47), abs=0.12)
    assert optimal == pytest.approx((0.85, 0.20), abs=0.12)
    assert optimal_layerwise == pytest.approx((0.64, 0.20), abs=0.12)
    assert everywhere[0] > max(layerwise[0], optimal[0]) > optimal_layerwise[0]


# -- coordinate-dp-sgd -----------------------------------------------------------------------------------------------


def test_coordinates_are_clipped_before_the_noise_and_no_epsilon_is_claimed():
    gradients = {"w": torch.cat([torch.full((5000,), 9.0), torch.full((5000,), -0.25)])}
    defense = gradveil.defense("coordinate-dp-sgd:clip=0.5,std=0.1")
    sent = defense.perturb(gradients, generator=seeded())["w"]
    for part, centre in ((sent[:5000], 0.5), (sent[5000:], -0.25)):
        assert float(part.mean()) == pytest.approx(centre, abs=0.006)
        assert float(part.std()) == pytest.approx(0.1, rel=0.05)
    assert defense.privacy_spent(rounds=10, batch_size=16, examples=1000) is None
    assert "no (epsilon, delta)" in defense.caveat


# -- soteria ---------------------------------------------------------------------------------------------------------


def slopes_by_a_loop(task, inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Slopes and values by one backward pass per unit."""
    inputs = inputs.clone().requires_grad_()
    values = task.representation(task.parameters, inputs)
    slopes = []
    for unit in range(values.shape[1]):
        [slope] = torch.autograd.grad(values[:, unit].sum(), inputs, retain_graph=True)
        slopes.append(slope.flatten(1).norm(dim=1))
    return torch.stack(slopes, 1), values.detach()


@pytest.mark.parametrize("name", ["tiny_task", "relu_task", "batch_norm_task"])
def test_soteria_slopes_are_those_of_a_loop(name, request, tiny_batch):
    task = request.getfixturevalue(name)
    expected, values = slopes_by_a_loop(task, tiny_batch[0])
    slopes, found = exact_slopes(task, tiny_batch[0])
    torch.testing.assert_close(slopes, expected, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(found, values, rtol=1e-10, atol=1e-14)


def test_soteria_slopes_on_lenet_are_those_of_a_loop():
    task = gradveil.Task(models.create("lenet", input_shape=(3, 16, 16), classes=5), input_shape=(3, 16, 16), classes=5)
    images = torch.rand(2, 3, 16, 16, generator=seeded())
    torch.testing.assert_close(exact_slopes(task, images)[0], slopes_by_a_loop(task, images)[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["tiny_task", "relu_task"])
@pytest.mark.parametrize("rate", [0.3, 0.8, 1.0])
def test_soteria_zeroes_the_columns_with_the_smallest_scores(name, rate, request, tiny_batch):
    task = request.getfixturevalue(name)
    sent = gradveil.defense("soteria", rate=rate).share(task, *tiny_batch)
    expected = task.gradients(*tiny_batch)
    slopes, values = (part.tolist() for part in slopes_by_a_loop(task, tiny_batch[0]))
    scores = {}
    for unit in range(len(values[0])):
        active = [image for image in range(3) if values[image][unit] != 0]
        if active:
            scores[unit] = sum(slopes[image][unit] / abs(values[image][unit]) for image in active)
    assert name == "tiny_task" or len(scores) < len(values[0])  # some ReLU is silent on all three images
    for unit in sorted(scores, key=scores.__getitem__)[: math.floor(rate * len(scores))]:
        expected[task.classifier.weight][:, unit] = 0
    for layer, value in expected.items():
        assert torch.equal(sent[layer], value), layer


def test_soteria_estimates_the_slopes_without_bias(relu_task, tiny_batch):
    exact, _ = exact_slopes(relu_task, tiny_batch[0])
    directions = 20_000
    estimate, _ = estimated_slopes(relu_task, tiny_batch[0], directions, source_of(seeded()))
    # A squared estimate has a relative standard error of sqrt(2 / directions); the tolerance is five times that.
    torch.testing.assert_close(estimate.square(), exact.square(), rtol=5 * (2 / directions) ** 0.5, atol=1e-12)


def test_soteria_acts_in_every_local_step(tiny_task, tiny_batch):
    """Two steps by hand: in the second, the columns are chosen at the weights after the first."""
    defense, lr = gradveil.defense("soteria", rate=0.5), 0.5
    sent = defense.share(tiny_task, *tiny_batch, local=gradveil.LocalSteps(epochs=2, lr=lr), generator=seeded())
    first = defense.share(tiny_task, *tiny_batch)
    weights = {name: value - lr * first[name] for name, value in tiny_task.parameters.items()}
    second = defense.share(tiny_task.with_parameters(weights), *tiny_batch)
    for name in sent:
        torch.testing.assert_close(sent[name], first[name] + second[name])


@pytest.mark.parametrize("name", [name for name in models.names() if not takes_text(name)])
def test_soteria_finds_the_representation_of_every_model(name):
    model = models.create(name, input_shape=(3, 32, 32), classes=10)
    task = gradveil.Task(model, input_shape=(3, 32, 32), classes=10)
    images, labels = torch.rand(2, 3, 32, 32, generator=seeded()), torch.tensor([1, 2])
    expected = model.features(images).detach()
    torch.testing.assert_close(task.representation(task.parameters, images), expected, rtol=1e-4, atol=1e-5)
    sent = gradveil.defense("soteria:rate=0.5,directions=1").share(task, images, labels)
    assert float((sent["classifier.weight"] == 0).all(0).float().mean()) >= 0.49


def test_soteria_finds_the_classifier_by_structure():
    class Odd(nn.Module):
        """A model whose classifier is created first but called last, under a name that does not say so."""

        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(5, 4)
            self.inner = nn.Linear(36, 5)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.out(self.inner(images.flatten(1)).tanh())

    task = double_task(Odd())
    images = torch.rand(2, 1, 6, 6, dtype=torch.float64, generator=seeded())
    sent = gradveil.defense("soteria:rate=0.4").share(task, images, torch.tensor([0, 1]))
    assert (sent["out.weight"] == 0).all(0).sum() == 2
    assert (sent["inner.weight"] != 0).all()
    task = double_task(nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Softplus()))
    with pytest.raises(InputError, match="soteria: the model has no linear classifier"):
        gradveil.defense("soteria").share(task, images, torch.tensor([0, 1]))
    frozen = Odd()
    frozen.out.requires_grad_(False)
    with pytest.raises(InputError, match="soteria: the classifier's weight 'out.weight' is frozen.*; train it or use"):
        gradveil.defense("soteria").share(double_task(frozen), images, torch.tensor([0, 1]))


# -- dp-sgd ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.1, 1.0, 1.7, 1e6])
def test_dp_sgd_clips_every_example_separately(clip, relu_task, tiny_batch):
    images, labels = tiny_batch
    images = images * torch.tensor([1.0, 20.0, 0.1]).view(3, 1, 1, 1).double()
    single = [relu_task.gradients(images[i : i + 1], labels[i : i + 1]) for i in range(3)]
    expected = {name: torch.zeros_like(value) for name, value in single[0].items()}
    for gradients in single:
        scale = min(1.0, clip / norm(gradients))
        for name, value in gradients.items():
            expected[name] += scale * value
        alone = clipped_sum(relu_task, images[:1], labels[:1], clip)
        assert norm(alone) <= clip * (1 + 1e-12)
    total = clipped_sum(relu_task, images, labels, clip)
    sent = gradveil.defense("dp-sgd", clip=clip, noise_multiplier=0.0).share(relu_task, images, labels)
    for name, value in expected.items():
        torch.testing.assert_close(total[name], value)
        torch.testing.assert_close(sent[name], value / 3)


def test_dp_sgd_adds_normal_noise_of_the_right_scale(two_blobs):
    shape = (1, 12, 12)
    task = gradveil.Task(models.create("mlp", input_shape=shape, classes=2), input_shape=shape, classes=2)
    batch = two_blobs.train.batch(torch.arange(5))
    clip, multiplier = 0.5, 0.8
    noisy = gradveil.defense("dp-sgd", clip=clip, noise_multiplier=multiplier).share(task, *batch, generator=seeded())
    clean = gradveil.defense("dp-sgd", clip=clip, noise_multiplier=0.0).share(task, *batch)
    noise = torch.cat([(noisy[name] - clean[name]).flatten() for name in clean]).double()
    noise = noise * len(batch[0]) / (clip * multiplier)
    size = len(noise)
    assert size > 60_000
    assert abs(float(noise.mean())) < 4 / size**0.5
    assert abs(float(noise.square().mean()) - 1) < 4 * (2 / size) ** 0.5
    assert float(noise.pow(4).mean()) == pytest.approx(3, rel=0.1)


def test_dp_sgd_agrees_with_the_engine_of_opacus(relu_task, tiny_batch):
    """It computes the same gradients without noise, and the same epsilon for the same run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import PrivacyEngine

        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 4)
        ).double()
        dataset = torch.utils.data.TensorDataset(tiny_batch[0].repeat(40, 1, 1, 1), tiny_batch[1].repeat(40))
        loader = torch.utils.data.DataLoader(dataset, batch_size=3)
        engine = PrivacyEngine(accountant="prv")
        wrapped, optimiser, _ = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=loader,
            noise_multiplier=1.5,
            max_grad_norm=0.7,
        )
        optimiser.noise_multiplier = 0.0  # compare the deterministic part
        optimiser.expected_batch_size = 3
        nn.functional.cross_entropy(wrapped(tiny_batch[0]), tiny_batch[1]).backward()
        optimiser.step()
        found = {name.removeprefix("_module."): p.grad for name, p in wrapped.named_parameters()}
        engine.accountant.history = []
        for _ in range(60):
            engine.accountant.step(noise_multiplier=1.5, sample_rate=3 / 120)
        epsilon = float(engine.accountant.get_epsilon(1e-4, eps_error=1e-3))
    sent = gradveil.defense("dp-sgd", clip=0.7, noise_multiplier=0.0).share(relu_task, *tiny_batch)
    for name, value in sent.items():
        torch.testing.assert_close(value, found[name], rtol=1e-5, atol=1e-8)  # opacus adds 1e-6 to norms
    spent = gradveil.defenses.accounting.privacy_spent(
        noise_multiplier=1.5, rounds=60, batch_size=3, examples=120, delta=1e-4, sampling="poisson"
    )
    assert spent.epsilon == pytest.approx(epsilon, rel=0.01)


def test_dp_sgd_accounts_for_its_own_run():
    defense = gradveil.defense("dp-sgd", noise_multiplier=2.0, delta=1e-4)
    run = {"rounds": 10, "batch_size": 5, "examples": 100}
    spent = defense.privacy_spent(**run)
    assert (spent.delta, spent.sampling) == (1e-4, "fixed")
    assert spent == gradveil.defenses.accounting.privacy_spent(noise_multiplier=2.0, delta=1e-4, **run)
    assert defense.privacy_spent(**run, local=gradveil.LocalSteps(epochs=3)).epsilon > spent.epsilon
    for other in ("none", "gaussian-noise", "soteria", "secure-aggregation"):
        assert gradveil.defense(other).privacy_spent(**run) is None


def test_dp_sgd_refuses_batch_statistics(batch_norm_task, tiny_batch):
    with pytest.raises(InputError, match="per-example gradients do not exist with batch statistics"):
        gradveil.defense("dp-sgd").share(batch_norm_task, *tiny_batch)


# -- outpost ---------------------------------------------------------------------------------------------------------


def test_outpost_noise_and_pruning_affect_the_right_values(relu_task, tiny_batch):
    clean = relu_task.gradients(*tiny_batch)
    noisy = gradveil.defense("outpost", scale=0.8, noised=0.4, pruned=0.0).share(relu_task, *tiny_batch, memory={})
    pruned = gradveil.defense("outpost", scale=0.0, pruned=0.7).share(relu_task, *tiny_batch, memory={})
    for name, value in clean.items():
        order = sorted(range(value.numel()), key=lambda i: (-value.flatten()[i].square().item(), i))
        count = math.ceil(round(0.4 * value.numel(), 9))
        # Values without noise are only rounded to the grid of the noise, 2^-24 of its deviation.
        changed = ((noisy[name] - value).abs() > 2**-20 * 0.8 * layer_risk(relu_task.parameters[name])).flatten()
        assert set(changed.nonzero().flatten().tolist()) == set(order[:count])
        kept = math.ceil(round(0.3 * value.numel(), 9))
        expected = torch.zeros_like(value).flatten()
        for i in order[:kept]:
            expected[i] = value.flatten()[i]
        assert torch.equal(pruned[name].flatten(), expected)


def test_outpost_noise_has_the_scale_of_the_risk(two_blobs):
    shape = (1, 12, 12)
    model = models.create("mlp", input_shape=shape, classes=2, init="uniform")
    with torch.no_grad():
        model.features[1].weight.mul_(20)  # variance 33, which counts as 1
    task = gradveil.Task(model, input_shape=shape, classes=2)
    batch = two_blobs.train.batch(torch.arange(2))
    defense = gradveil.defense("outpost", scale=0.5, noised=1.0, pruned=0.0)
    sent, clean = defense.share(task, *batch, memory={}, generator=seeded()), task.gradients(*batch)
    for name, risk in (("features.1.weight", 1.0), ("features.3.weight", 1 / 12)):
        noise = (sent[name] - clean[name]) / (0.5 * layer_risk(task.parameters[name]))
        assert layer_risk(task.parameters[name]) == pytest.approx(risk, rel=0.02)
        assert abs(float(noise.square().mean()) - 1) < 5 * (2 / noise.numel()) ** 0.5
    assert layer_risk(torch.ones(1)) == 0


def test_outpost_acts_less_and_less_often(tiny_task, tiny_batch):
    defense, generator = gradveil.defense("outpost", decay=0.25), seeded()
    clean = tiny_task.gradients(*tiny_batch)
    for rounds in (0, 4, 12):
        applied, tries = 0, 200
        for _ in range(tries):
            memory = {"rounds": torch.tensor(rounds)}
            sent = defense.share(tiny_task, *tiny_batch, generator=generator, memory=memory)
            applied += not torch.equal(sent["3.weight"], clean["3.weight"])
            assert int(memory["rounds"]) == rounds + 1
        chance = 1 / (1 + 0.25 * rounds)
        assert abs(applied / tries - chance) <= 4 * (chance * (1 - chance) / tries) ** 0.5


def test_outpost_says_that_a_server_can_switch_its_noise_off(tiny_task, tiny_batch, recwarn):
    defense = gradveil.defense("outpost", decay=0.0)
    public = torch.rand(64, 1, 6, 6, generator=seeded(), dtype=torch.float64), torch.arange(64) % 4
    assert "a layer of equal or tiny weights, such as an imprint block, gets no noise" in defense.caveats[0]
    defense.share(tiny_task, *tiny_batch, memory={})  # an honest model: no warning
    assert not recwarn.list
    attacked = gradveil.attack("robbing-the-fed", bins=16).modify(tiny_task, public=public, generator=seeded())
    block = "imprint.encode.weight"
    with pytest.warns(UserWarning, match=f"outpost: adds no noise to {block}, where .* check the model with") as caught:
        sent = defense.share(attacked, *tiny_batch, memory={}, generator=seeded())
    assert len(caught) == 1
    pruned = gradveil.defense("top-k", keep=0.2).share(attacked, *tiny_batch)
    assert torch.equal(sent[block], pruned[block])
    gradveil.defense("outpost", scale=0.0).share(attacked, *tiny_batch, memory={})  # no noise was asked for


def test_outpost_needs_a_memory(tiny_task, tiny_batch):
    with pytest.raises(InputError, match="outpost: needs memory="):
        gradveil.defense("outpost").share(tiny_task, *tiny_batch)


# -- quantization ----------------------------------------------------------------------------------------------------

arrays = hnp.arrays("float64", st.integers(1, 40), elements=st.floats(-9, 9, allow_subnormal=False))


@given(arrays, st.integers(1, 5))
def test_quantization_rounds_to_the_nearest_level(array, bits):
    levels = np.linspace(array.min(), array.max(), 2**bits)
    sent = gradveil.defense("quantization", bits=bits).perturb({"w": torch.from_numpy(array)})["w"].numpy()
    assert len(np.unique(sent)) <= 2**bits
    nearest = np.abs(array[:, None] - levels[None]).min(1)
    np.testing.assert_allclose(np.abs(sent - array), nearest, atol=1e-12)


@pytest.mark.parametrize("bits", [1, 7, 16, 28])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantized_values_lie_on_the_grid_in_meta(bits, rounding, dtype):
    value = torch.randn(50, 20, generator=seeded()).to(dtype)
    update = gradveil.defense("quantization", bits=bits, rounding=rounding).perturb({"w": value}, generator=seeded())
    grid = update.meta.grids["w"]
    codes = ((update["w"].double() - grid.low) / grid.step).round().long()
    assert 0 <= codes.min() <= codes.max() <= 2**bits - 1
    if bits < 24 or dtype == torch.float64:  # beyond that, neighbouring codes share a float32
        assert torch.equal(grid.values(codes, dtype), update["w"])
    width = grid.step * (0.5 if rounding == "nearest" else 1) + (1e-6 if dtype == torch.float32 else 1e-12)
    assert float((update["w"] - value).abs().max()) <= width


def test_stochastic_rounding_is_unbiased():
    value = torch.cat([torch.tensor([0.0, 1.0]), torch.full((100_000,), 0.3)]).double()
    sent = gradveil.defense("quantization", bits=1, rounding="stochastic").perturb({"w": value}, generator=seeded())
    assert set(sent["w"].tolist()) == {0.0, 1.0}
    assert float(sent["w"][2:].mean()) == pytest.approx(0.3, abs=4 * (0.21 / 100_000) ** 0.5)


def test_the_grid_is_dropped_when_noise_moves_values_off_it():
    update = gradveil.defense("quantization").perturb(gradveil.Update({"w": torch.randn(9)}))
    assert update.meta.grids
    noisy = gradveil.defense("gaussian-noise").perturb(update)
    assert not noisy.meta.grids
    assert update.meta.grids


# -- precode ---------------------------------------------------------------------------------------------------------


def test_the_divergence_agrees_with_torch_distributions():
    moments = torch.randn(5, 8, generator=seeded(), dtype=torch.float64)
    mean, log_variance = moments.chunk(2, dim=1)
    bottleneck, standard = (
        torch.distributions.Normal(m, s) for m, s in ((mean, (0.5 * log_variance).exp()), (mean * 0, mean * 0 + 1))
    )
    expected = torch.distributions.kl_divergence(bottleneck, standard).sum(1).mean()
    torch.testing.assert_close(divergence(moments), expected)


def test_precode_is_the_model_with_a_bottleneck(tiny_task, tiny_batch):
    """Compare with forward pass, KL and gradient written out in plain torch, with the noise that the client drew."""
    images, labels = tiny_batch
    defense = gradveil.defense("precode", width=3, beta=0.2)
    defense, task = defense.prepare(tiny_task, generator=seeded(3))
    sent = defense.share(task, images, labels, generator=seeded(5))
    noise = torch.randn(3, 3, generator=seeded(5), dtype=torch.float64)
    weights = {name: value.clone().requires_grad_() for name, value in task.parameters.items()}
    hidden = nn.functional.conv2d(images, weights["0.weight"], weights["0.bias"], padding=1).sigmoid().flatten(1)
    moments = hidden @ weights["3.0.encoder.weight"].T + weights["3.0.encoder.bias"]
    mean, std = moments[:, :3], (0.5 * moments[:, 3:]).exp()
    decoded = (mean + std * noise) @ weights["3.0.decoder.weight"].T + weights["3.0.decoder.bias"]
    logits = decoded @ weights["3.1.weight"].T + weights["3.1.bias"]
    kl = 0.5 * (mean**2 + std**2 - 1 - 2 * std.log()).sum() / 3
    loss = nn.functional.cross_entropy(logits, labels) + 0.2 * kl
    expected = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    for name, value in expected.items():
        torch.testing.assert_close(sent[name], value)
    without_noise = (mean @ weights["3.0.decoder.weight"].T + weights["3.0.decoder.bias"]) @ weights["3.1.weight"].T
    torch.testing.assert_close(task.predict(images), (without_noise + weights["3.1.bias"]).detach())


def test_precode_keeps_the_weights_and_does_not_change_the_given_task(tiny_task):
    before = {name: value.clone() for name, value in tiny_task.parameters.items()}
    moved = tiny_task.with_parameters({name: value + 1 for name, value in before.items()})
    _, task = gradveil.defense("precode", width=5).prepare(moved)
    assert torch.equal(task.parameters["3.1.weight"], before["3.weight"] + 1)
    assert torch.equal(task.parameters["0.weight"], before["0.weight"] + 1)
    assert task.classifier == gradveil.task.Classifier("3.1.weight", "3.1.bias")
    assert task.size - tiny_task.size == 5 * (3 * 108 + 2) + 108
    assert list(tiny_task.parameters) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in tiny_task.parameters.items())


def test_precode_takes_a_model_that_is_only_a_classifier_and_keeps_normalisation():
    task = gradveil.Task(nn.Linear(4, 3), input_shape=(4,), classes=3)
    _, extended = gradveil.defense("precode", width=2).prepare(task)
    assert extended.place == "0"
    assert extended.gradients(torch.rand(2, 4), torch.tensor([0, 1]))["1.weight"].shape == (3, 4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    plain = gradveil.Task(model, input_shape=(1, 2, 2), classes=3)
    scaled = gradveil.Task(model, input_shape=(1, 2, 2), classes=3, mean=[0.5], std=[0.25])
    first, second = (gradveil.defense("precode", width=2).prepare(t, generator=seeded()).task for t in (plain, scaled))
    images = torch.rand(2, 1, 2, 2)
    torch.testing.assert_close(second.predict(images), first.predict((images - 0.5) / 0.25))


# -- ats -------------------------------------------------------------------------------------------------------------


def test_ats_shares_the_gradient_of_transformed_images(tiny_task, tiny_batch):
    images, labels = tiny_batch
    memory = {}
    defense = gradveil.defense("ats", policy="invert|translate-x@0.4>flip")
    update = defense.share(tiny_task, images.repeat(6, 1, 1, 1), labels.repeat(6), memory=memory, generator=seeded())
    transformed = memory["trained_on"]
    choices = [transforms.apply_policy(policy, images.repeat(6, 1, 1, 1)) for policy in defense.policies]
    first, second = ([torch.equal(a, b) for a, b in zip(transformed, choice, strict=True)] for choice in choices)
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert 0 < sum(first) < len(first)
    expected = tiny_task.gradients(transformed, labels.repeat(6))
    assert all(torch.equal(update[name], value) for name, value in expected.items())


def test_ats_scores_are_those_of_the_paper(relu_task, tiny_batch):
    images, labels = tiny_batch
    noise = torch.rand(images.shape, generator=seeded(), dtype=torch.float64)
    cosines = []
    for i in range(3):
        target = relu_task.gradients(images[i : i + 1], labels[i : i + 1])
        for step in range(10):
            between = (1 - step / 10) * noise[i : i + 1] + step / 10 * images[i : i + 1]
            found = relu_task.gradients(between, labels[i : i + 1])
            dot = sum(float((found[name] * target[name]).sum()) for name in target)
            cosines.append(dot / (norm(found) * norm(target)))
    assert privacy_score(relu_task, images, labels, noise) == pytest.approx(np.mean(cosines), rel=1e-9)

    slopes = []
    for i in range(3):
        image = images[i : i + 1].clone().requires_grad_()
        relu_task.outputs(relu_task.parameters, image).sum().backward()
        slopes.append(image.grad.flatten().numpy())
    eigenvalues = np.linalg.eigvalsh(np.corrcoef(np.stack(slopes))) + 1e-5
    assert accuracy_score(relu_task, images) == pytest.approx(-np.mean(np.log(eigenvalues) + 1 / eigenvalues), rel=1e-6)


def test_the_accuracy_score_prefers_images_that_differ(relu_task):
    different = torch.rand(4, 1, 6, 6, generator=seeded(), dtype=torch.float64)
    alike = different[:1] + 1e-6 * different
    assert accuracy_score(relu_task, alike) < accuracy_score(relu_task, different) <= -1


def test_ats_searches_as_documented_and_its_result_can_be_used_again(relu_task, tiny_batch):
    defense = gradveil.defense("ats", candidates=8, kept=2, samples=3)
    defense, task = defense.prepare(relu_task, public=tiny_batch, generator=seeded(4))
    assert task is relu_task
    generator = seeded(4)
    tried = random_policies(8, source_of(generator))
    noise = torch.rand(tiny_batch[0].shape, generator=generator, dtype=torch.float64)
    transformed = {policy: transforms.apply_policy(policy, tiny_batch[0]) for policy in tried}
    accurate = sorted(tried, key=lambda policy: accuracy_score(relu_task, transformed[policy]))[-4:]
    private = sorted(accurate, key=lambda policy: privacy_score(relu_task, transformed[policy], tiny_batch[1], noise))
    assert set(defense.policies) == set(private[:2])
    again = gradveil.defense("ats", policy="|".join(defense.policies))
    assert gradveil.defense(str(again)) == again
    first, second = (d.share(relu_task, *tiny_batch, generator=seeded()) for d in (defense, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(InputError, match=r"ats: the search needs public=\(images, labels\); pass it, or give policy="):
        gradveil.defense("ats").prepare(relu_task)


# -- secure aggregation ----------------------------------------------------------------------------------------------


def test_the_server_sees_the_sum_and_nothing_else(tiny_task, tiny_batch):
    defense = gradveil.defense("secure-aggregation")
    images, labels = tiny_batch
    updates = [defense.share(tiny_task, images[i : i + 1], labels[i : i + 1]) for i in range(3)]
    [seen] = defense.visible(updates)
    assert (seen.meta.samples, seen.meta.clients) == (3, 3)
    batch_gradients = tiny_task.gradients(images, labels)
    mean = defense.aggregate(updates)
    for name, value in batch_gradients.items():
        torch.testing.assert_close(seen[name], 3 * value)
        torch.testing.assert_close(mean[name], value)
