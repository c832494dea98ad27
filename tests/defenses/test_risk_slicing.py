"""Risk, slices, noise, clipping and the server's side of risk slicing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import gradveil
from gradveil import data, models
from gradveil.core.errors import InputError, ParameterError
from gradveil.core.randomness import derived_generator
from gradveil.defenses.risk_slicing import BALANCES, RiskSlicing, cut_slices, layer_risks
from gradveil.update import Update


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prepared(task, batch, **parameters) -> RiskSlicing:
    defense = RiskSlicing(**parameters)
    defense, same = defense.prepare(task, public=batch, generator=seeded())
    assert same is task
    return defense


def slice_risks(slice_of, risks, slices) -> torch.Tensor:
    """The risk of each slice, summed coordinate by coordinate."""
    total = torch.zeros(slices, dtype=torch.float64)
    for name, numbers in slice_of.items():
        coordinate_risks = torch.full((numbers.numel(),), risks[name] / numbers.numel(), dtype=torch.float64)
        total.index_add_(0, numbers.flatten().long(), coordinate_risks)
    return total


def test_risk_is_the_mean_frobenius_norm_of_the_jacobian(tiny_task, tiny_batch):
    inputs, labels = tiny_batch
    expected = dict.fromkeys(tiny_task.parameters, 0.0)
    for n in range(3):
        label = labels[n : n + 1]
        jacobian = torch.autograd.functional.jacobian(
            lambda x, label=label: tuple(tiny_task.gradients(x, label).values()), inputs[n : n + 1]
        )
        for name, part in zip(expected, jacobian, strict=True):
            expected[name] += float(part.norm()) / 3
    assert layer_risks(tiny_task, inputs, labels, directions=None) == pytest.approx(expected)
    estimate = layer_risks(tiny_task, inputs, labels, directions=2000, generator=seeded())
    assert estimate == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("model", "side"), [("lenet", 28), ("cnn6", 16)])
def test_the_ranking_of_layers_is_that_of_the_brute_force_jacobian(model, side):
    """Three digits (cropped for cnn6); layers whose true risks differ by less than 5 % may swap ranks.

    Full-size digits and the complete root set are in experiments/sensitivity.
    """
    digits = data.load("mnist").train
    images, labels = digits.batch(torch.arange(0, len(digits), len(digits) // 3)[:3])
    edge = (28 - side) // 2
    images = images[..., edge : edge + side, edge : edge + side]
    net = models.create(model, input_shape=(1, side, side), classes=10)
    task = gradveil.Task(net, input_shape=(1, side, side), classes=10)
    estimate = layer_risks(task, images, labels, generator=seeded())
    exact = layer_risks(task, images, labels, directions=None)
    assert max(estimate, key=estimate.__getitem__) == max(exact, key=exact.__getitem__) == "classifier.weight"
    for a in exact:
        for b in exact:
            if exact[a] > 1.05 * exact[b]:
                assert estimate[a] > estimate[b], (a, b)


@pytest.mark.parametrize("model", ["lenet", "cnn6", "resnet18"])
def test_slices_are_balanced_and_every_coordinate_is_in_one(model):
    shape = (3, 32, 32)
    layers = dict(models.create(model, input_shape=shape, classes=10).named_parameters())
    # Risks as uneven as real ones: a few layers have most of it, biases almost none.
    risks = {name: 1.3 ** -(n % 7) * value.numel() ** 0.3 for n, (name, value) in enumerate(layers.items())}
    slice_of = cut_slices(layers, risks, 10)
    assert {name: value.shape for name, value in slice_of.items()} == {n: v.shape for n, v in layers.items()}
    assert {int(number) for value in slice_of.values() for number in value.unique()} == set(range(10))
    total = slice_risks(slice_of, risks, 10)
    assert float(total.max() / total.mean()) <= 1.10


def test_real_risks_are_balanced_too(tiny_task, tiny_batch):
    risks = layer_risks(tiny_task, *tiny_batch, generator=seeded())
    total = slice_risks(cut_slices(tiny_task.parameters, risks, 4), risks, 4)
    assert float(total.max() / total.mean()) <= 1.10


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any),
    slices=st.integers(1, 12),
    balance=st.sampled_from(["risk-share", "layer-risk", "size"]),
)
def test_slices_agree_with_a_slow_reference(sizes, slices, balance):
    """The reference packs block by block, by the same greedy rule but without a heap."""
    layers = {f"l{n}": torch.zeros(size) for n, size in enumerate(sizes)}
    risks = {name: float(n + 1) for n, name in enumerate(layers)}
    block = max(1, min(math.gcd(*[size for size in sizes if size]), sum(sizes) // (4 * slices)))
    blocks = [(n, i, min(block, len(v) - i)) for n, v in layers.items() for i in range(0, len(v), block)]
    weight = {
        "risk-share": lambda name, size: risks[name] * size / len(layers[name]),
        "layer-risk": lambda name, _size: risks[name],
        "size": lambda _name, size: size,
    }[balance]
    loads = [[0.0, 0] for _ in range(slices)]  # weight and number of blocks
    got = cut_slices(layers, risks, slices, balance)
    for name, first, size in sorted(blocks, key=lambda entry: -weight(entry[0], entry[2])):
        number = min(range(slices), key=lambda s: (*loads[s], s))
        loads[number] = [loads[number][0] + weight(name, size), loads[number][1] + 1]
        assert set(got[name][first : first + size].tolist()) == {number}


@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=5).filter(any),
    slices=st.integers(1, 12),
    balance=st.sampled_from(BALANCES),
)
def test_no_slice_is_empty_if_there_are_enough_values(sizes, slices, balance):
    """Even if the model is a single layer, and whatever the risks: here most of them are 0."""
    layers = {f"l{n}": torch.zeros(size) for n, size in enumerate(sizes)}
    risks = {name: float(n == 0) for n, name in enumerate(layers)}
    got = cut_slices(layers, risks, slices, balance)
    used = {int(number) for value in got.values() for number in value.unique()}
    assert used <= set(range(slices))
    assert len(used) == min(slices, sum(sizes))


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize(("inputs", "outputs"), [(784, 10), (5, 1), (1, 1), (3, 4), (41, 1)])
def test_every_update_is_changed(inputs, outputs, balance):
    """One layer without a bias, down to a single value: its sizes' common divisor is the whole model."""
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(inputs, outputs, bias=False))
    loss = "logistic" if outputs == 1 else "cross-entropy"
    task = gradveil.Task(net, input_shape=(1, 1, inputs), classes=max(2, outputs), loss=loss)
    batch = torch.rand(2, 1, 1, inputs, generator=seeded()), torch.tensor([0, 1])
    defense = prepared(task, batch, slices=10, ratio=0.2, std=0.1, balance=balance)
    clean = task.gradients(*batch)
    for number in range(50):
        sent = defense.perturb(clean, generator=derived_generator(0, "round", number))
        assert any((sent[name] != value).any() for name, value in clean.items())


def test_a_model_with_fewer_values_than_slices_has_as_many_slices_as_values(tiny_task, tiny_batch):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 4, bias=False))
    task = gradveil.Task(net, input_shape=(1, 1, 2), classes=4)
    defense = prepared(task, (torch.rand(3, 1, 1, 2), torch.tensor([0, 1, 2])), slices=10, ratio=0.5)
    assert (defense.slices, defense.noisy_slices) == (8, 4)
    assert prepared(tiny_task, tiny_batch, slices=10).slices == 10


def test_what_slices_are_balanced_by():
    """A small layer of two blocks and risk 3, and a large one of fourteen blocks and risk 1; a block has 16 values."""
    layers, risks = {"small": torch.zeros(32), "large": torch.zeros(224)}, {"small": 3.0, "large": 1.0}
    blocks = {  # of each layer in each slice
        "risk-share": ([1, 1, 0, 0], [0, 0, 7, 7]),  # 1.5 for a block of the small layer, 1/14 for one of the large
        "layer-risk": ([1, 1, 0, 0], [2, 2, 5, 5]),  # 3 and 1
        "size": ([1, 1, 0, 0], [3, 3, 4, 4]),
        "consecutive": ([2, 0, 0, 0], [2, 4, 4, 4]),
    }
    for balance in BALANCES:
        cut = cut_slices(layers, risks, 4, balance)
        assert tuple((cut[name].bincount(minlength=4) // 16).tolist() for name in layers) == blocks[balance]
        if balance == "consecutive":
            assert torch.cat(list(cut.values())).diff().min() == 0


def test_noise_is_added_only_to_the_chosen_slices(tiny_task, tiny_batch):
    defense = prepared(tiny_task, tiny_batch, slices=10, ratio=0.35, std=2.0)
    assert defense.noisy_slices == 3
    clean, sent = tiny_task.gradients(*tiny_batch), defense.share(tiny_task, *tiny_batch, generator=seeded())
    changed = torch.cat([(sent[name] != clean[name]).flatten() for name in sent])
    numbers = torch.cat([defense.slice_of[name].flatten() for name in sent])
    noisy = set(numbers[changed].tolist())
    assert len(noisy) == 3
    assert all(changed[numbers == number].all() for number in noisy)
    noise = torch.cat([(sent[name] - clean[name]).flatten() for name in sent])[changed]
    assert float(noise.std()) == pytest.approx(2.0, rel=4 / (2 * int(changed.sum())) ** 0.5)


@pytest.mark.parametrize(("slices", "ratio", "expected"), [(10, 0.2, 2), (10, 0.3, 3), (10, 0.01, 1), (100, 0.29, 29)])
def test_how_many_slices_get_noise(slices, ratio, expected):
    assert RiskSlicing(slices=slices, ratio=ratio).noisy_slices == expected


def test_every_slice_is_chosen_as_often_as_chance_says(tiny_task, tiny_batch):
    defense = prepared(tiny_task, tiny_batch, slices=10, ratio=0.2, std=1.0)
    gradients = {name: torch.zeros_like(value) for name, value in tiny_task.parameters.items()}
    counts = torch.zeros(10)
    for number in range(200):
        sent = defense.perturb(gradients, generator=derived_generator(0, "round", number))
        for chosen in {int(n) for name in sent for n in defense.slice_of[name][sent[name] != 0].unique()}:
            counts[chosen] += 1
    assert int(counts.sum()) == 400
    assert stats.chisquare(counts.numpy()).pvalue > 0.01


def test_clipping_is_per_example(tiny_task, tiny_batch):
    inputs, labels = tiny_batch
    per_example = [tiny_task.gradients(inputs[n : n + 1], labels[n : n + 1]) for n in range(3)]
    norms = [math.sqrt(sum(float(v.square().sum()) for v in gradients.values())) for gradients in per_example]
    clip = sorted(norms)[1]  # one example stays below the limit, one lies on it, one is scaled down
    defense = prepared(tiny_task, tiny_batch, std=0.0, clip=clip)
    sent = defense.share(tiny_task, inputs, labels, generator=seeded())
    for name in sent:
        expected = sum(g[name] * min(1, clip / norm) for g, norm in zip(per_example, norms, strict=True)) / 3
        torch.testing.assert_close(sent[name], expected)
    assert RiskSlicing(std=0.5, clip=4.0).noise_std == 2.0
    with pytest.raises(InputError, match="risk-slicing: needs the client's data"):
        defense.perturb(tiny_task.gradients(inputs, labels))


def test_under_fedavg_noise_is_added_once(tiny_task, tiny_batch):
    local = gradveil.LocalSteps(epochs=3, batch_size=2, lr=0.1)
    for clip in (None, 100.0):
        defense = prepared(tiny_task, tiny_batch, ratio=1.0, std=1.0, clip=clip)
        sent = defense.share(tiny_task, *tiny_batch, generator=seeded(), local=local)
        clean = gradveil.defense("none").share(tiny_task, *tiny_batch, generator=seeded(), local=local)
        noise = torch.cat([(sent[name] - clean[name]).flatten() for name in sent])
        assert float(noise.std()) == pytest.approx(clip or 1.0, rel=0.15)
        assert sent.meta.local == local


def test_the_server_compensates_according_to_the_weights(tiny_task, tiny_batch):
    defense = prepared(tiny_task, tiny_batch, slices=10, ratio=0.3, std=0.5)
    updates = [Update(tiny_task.gradients(*tiny_batch)), Update(tiny_task.gradients(*tiny_batch))]
    assert defense.aggregate_variance([1.0, 1.0]) == pytest.approx(0.3 * 0.5 * 0.25)
    assert defense.aggregate_variance([3.0, 1.0]) == pytest.approx(0.3 * (9 + 1) / 16 * 0.25)
    got = defense.aggregate(updates, weights=[3, 1])
    expected = gradveil.compensate(updates[0], 0.3 * 10 / 16 * 0.25)
    for name in got:
        torch.testing.assert_close(got[name], expected[name])
    plain = RiskSlicing(compensate=False).aggregate(updates, weights=[3, 1])
    torch.testing.assert_close(plain["3.weight"], updates[0]["3.weight"])


def test_it_must_be_prepared_for_the_model(tiny_task, tiny_batch):
    defense = RiskSlicing()
    with pytest.raises(InputError, match=r"risk-slicing: the slices are not cut yet; call prepare\(task, public="):
        defense.share(tiny_task, *tiny_batch)
    with pytest.raises(InputError, match="not cut yet"):
        defense.perturb(tiny_task.gradients(*tiny_batch))
    with pytest.raises(InputError, match="prepare needs public="):
        defense, _ = defense.prepare(tiny_task)
    defense, _ = defense.prepare(tiny_task, public=tiny_batch)
    with pytest.raises(InputError, match="prepared for layers .* prepare it for this model"):
        defense.perturb({"w": torch.ones(3)})


def test_it_can_follow_another_defense_in_a_chain_unless_it_clips():
    assert str(gradveil.defense("top-k:keep=0.5+risk-slicing:std=0.2")).startswith("top-k:keep=0.5+risk-slicing:")
    with pytest.raises(ParameterError, match="risk-slicing needs data and must come first"):
        gradveil.defense("top-k:keep=0.5+risk-slicing:clip=1")
