"""The optimal defenses, compared with the theorems they come from."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradveil
from gradveil.core.errors import InputError, NotFiniteError, ParameterError
from gradveil.defenses._optimal import SMALLEST_GRADIENT, optimal_variance

positive = st.floats(1e-3, 1e3)
pairs = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*[hnp.arrays("float64", n, elements=positive) for _ in range(2)])
)
zero_or_more = st.one_of(st.just(0.0), st.floats(1e-12, 1e6))
rough_pairs = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*[hnp.arrays("float64", n, elements=zero_or_more) for _ in range(2)])
)


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def split(array) -> dict[str, torch.Tensor]:
    """One array as two layers, the second of which may be empty."""
    value = torch.from_numpy(array.copy())
    return {"a": value[: len(value) // 2 + 1], "b": value[len(value) // 2 + 1 :]}


def flat(layers) -> torch.Tensor:
    return torch.cat([value.flatten() for value in layers.values()])


@given(pairs, st.sampled_from([(0.5, 0.5), (0.0, 0.0), (-0.5, -0.5), (0.5, 0.0), (0.0, 0.5), (1.0, 0.5)]))
def test_the_derived_allocation_leaks_least_at_equal_u2(arrays, powers):
    """Compare tr J_F with that of s^a |g|^-b noise (uniform, inverse and others), scaled to the optimal noise's U2."""
    s2, g2 = split(arrays[0]), split(arrays[1])
    best = flat(optimal_variance(s2, g2, std=0.1))
    torch.testing.assert_close(best / best[0], (flat(s2) / flat(g2)).sqrt() / (flat(s2) / flat(g2))[0].sqrt())
    other = flat(s2) ** powers[0] * flat(g2) ** -powers[1]
    other = other * (flat(g2) * best).sum() / (flat(g2) * other).sum()
    leak, least = float((flat(s2) / other).sum()), float((flat(s2) / best).sum())
    assert leak >= least * (1 - 1e-9)


def test_uniform_and_inverse_noise_leak_strictly_more():
    generator = seeded()
    s2, g2 = {"w": torch.rand(500, generator=generator) ** 4}, {"w": torch.rand(500, generator=generator) ** 4}
    best = optimal_variance(s2, g2, std=1.0)["w"]
    for other in (torch.ones(500), 1 / best):
        scaled = other * (g2["w"] * best).sum() / (g2["w"] * other).sum()
        assert (s2["w"] / scaled).sum() > 1.5 * (s2["w"] / best).sum()


@given(rough_pairs, st.one_of(st.none(), st.floats(1, 100)), st.booleans(), st.floats(1e-3, 10))
def test_the_mean_variance_is_the_square_of_std_after_the_cap(arrays, cap, layerwise, std):
    s2, g2 = split(arrays[0]), split(arrays[1])
    variance = optimal_variance(s2, g2, std=std, cap=cap, layerwise=layerwise)
    assert float(flat(variance).mean()) == pytest.approx(std**2, rel=1e-6)
    assert bool(torch.isfinite(flat(variance)).all())
    single = optimal_variance(
        {n: v.float() for n, v in s2.items()}, {n: v.float() for n, v in g2.items()}, std=std, cap=cap
    )
    assert float(flat(single).double().mean()) == pytest.approx(std**2, rel=1e-6)


def test_the_cap_is_a_multiple_of_the_median_ratio():
    s2, g2 = {"w": torch.tensor([1.0, 4.0, 9.0, 1e6, 0.0])}, {"w": torch.ones(5)}
    variance = optimal_variance(s2, g2, std=1.0, cap=5.0)["w"]
    ratios = torch.tensor([1.0, 2.0, 3.0, 10.0, 0.0])  # the median of those above zero is 2
    torch.testing.assert_close(variance, ratios * 5 / ratios.sum())


def test_gradients_of_zero_count_as_the_smallest():
    variance = optimal_variance({"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([0.0, 1.0])}, std=1.0)["w"]
    assert float(variance[0] / variance[1]) == pytest.approx(1 / SMALLEST_GRADIENT, rel=1e-4)


@given(pairs)
def test_layerwise_is_the_best_choice_of_one_variance_per_layer(arrays):
    s2, g2 = split(arrays[0]), split(arrays[1])
    variance = optimal_variance(s2, g2, std=1.0, layerwise=True)
    per_layer = {name: (value.sum() / g2[name].sum()).sqrt() for name, value in s2.items() if len(value)}
    for name, value in per_layer.items():
        assert len(variance[name].unique()) == 1
        torch.testing.assert_close(variance[name][0] / variance["a"][0], value / per_layer["a"])


@pytest.fixture
def public(tiny_batch):
    return tiny_batch


def prepared(name, task, public, **parameters):
    defense = gradveil.defense(name, **parameters)
    defense, _ = defense.prepare(task, public=public, generator=seeded())
    return defense


def test_noise_has_the_stated_variance_in_every_coordinate(tiny_task, tiny_batch, public):
    """In the global form, whose variance is fixed, with 400 draws of each coordinate."""
    defense = prepared("optimal-noise", tiny_task, public, std=0.3, form="global")
    expected = flat(defense.noise_variance())
    assert float(expected.mean()) == pytest.approx(0.09, rel=1e-6)
    clean = flat(tiny_task.gradients(*tiny_batch))
    generator = seeded()
    noise = torch.stack([flat(defense.share(tiny_task, *tiny_batch, generator=generator)) - clean for _ in range(400)])
    noisy = expected > 0
    ratio = noise[:, noisy].square().mean(0) / expected[noisy]
    assert float((ratio - 1).abs().max()) < 6 * (2 / 400) ** 0.5
    assert float(ratio.mean()) == pytest.approx(1, abs=0.03)


def test_local_noise_follows_sensitivity_over_gradient(tiny_task, tiny_batch):
    """With this many directions the estimated sensitivity is nearly exact; compare with the exact one."""
    exact = tiny_task.sensitivity(*tiny_batch, None)
    gradients = tiny_task.gradients(*tiny_batch)
    expected = (flat(exact) / flat(gradients).square()).sqrt()
    expected = expected.clamp_max(100 * expected[expected > 0].median())
    expected = expected / expected.mean() * 0.04
    defense = gradveil.defense("optimal-noise", std=0.2)
    variance = defense.variance(
        tiny_task.sensitivity(*tiny_batch, 3000, generator=seeded()), {n: v.square() for n, v in gradients.items()}
    )
    torch.testing.assert_close(flat(variance), expected, rtol=0.12, atol=0)


def test_the_global_form_is_a_mean_over_single_public_examples(tiny_task, public):
    defense = prepared("optimal-noise", tiny_task, public, form="global", directions=3000, cap=None)
    s2 = g2 = 0
    for image, label in zip(*public, strict=True):
        s2 = s2 + flat(tiny_task.sensitivity(image[None], label[None], None)) / 3
        g2 = g2 + flat(tiny_task.gradients(image[None], label[None])).square() / 3
    expected = (s2 / g2).sqrt()
    expected = expected / expected.mean() * 0.01
    torch.testing.assert_close(flat(defense.noise_variance()), expected, rtol=0.12, atol=0)


def test_clipped_coordinates_get_no_noise_and_the_others_the_full_mean(tiny_task, tiny_batch):
    clean = flat(tiny_task.gradients(*tiny_batch))
    clip = float(clean.abs().quantile(0.7))
    defense = gradveil.defense("optimal-dp-sgd", clip=clip, std=0.5)
    generator = seeded()
    sent = torch.stack([flat(defense.share(tiny_task, *tiny_batch, generator=generator)) for _ in range(60)])
    unclipped = clean.abs() < clip
    assert torch.equal(sent[:, ~unclipped], clean.clamp(-clip, clip)[~unclipped].expand(60, -1))
    noise = sent[:, unclipped] - clean[unclipped]
    assert float(noise.square().mean()) == pytest.approx(0.25, rel=0.1)


def test_the_global_clipped_form_measures_what_is_clipped(tiny_task, public):
    """A coordinate clipped in every public example does not react and gets no noise; the weight is clipped too."""
    gradients = torch.stack([flat(tiny_task.gradients(x[None], y[None])) for x, y in zip(*public, strict=True)])
    clip = float(gradients.abs().quantile(0.8))
    defense = prepared("optimal-dp-sgd", tiny_task, public, clip=clip, form="global")
    s2, g2 = (flat(value) for value in defense.measured)
    torch.testing.assert_close(g2, gradients.clamp(-clip, clip).square().mean(0))
    always_clipped = (gradients.abs() > clip).all(0)
    assert bool(always_clipped.any())
    assert float(s2[always_clipped].max()) == 0
    assert float(flat(defense.noise_variance())[always_clipped].max()) == 0


@given(rough_pairs, st.one_of(st.none(), st.floats(1, 100)), st.booleans(), st.floats(1e-3, 10))
def test_scaled_by_frobenius_the_covariance_has_the_norm_of_uniform_noise(arrays, cap, layerwise, std):
    s2, g2 = split(arrays[0]), split(arrays[1])
    by_norm = flat(optimal_variance(s2, g2, std=std, scale_by="frobenius", cap=cap, layerwise=layerwise))
    by_power = flat(optimal_variance(s2, g2, std=std, cap=cap, layerwise=layerwise))
    assert float(by_norm.norm()) == pytest.approx(std**2 * len(by_norm) ** 0.5, rel=1e-6)
    torch.testing.assert_close(by_norm / by_norm.max(), by_power / by_power.max())
    assert float(by_norm.sum()) <= float(by_power.sum()) * (1 + 1e-6)


def test_optimal_noise_scaled_by_frobenius_has_less_power(tiny_task, public):
    defense = prepared("optimal-noise", tiny_task, public, std=0.3, form="global", scale_by="frobenius")
    variance = flat(defense.noise_variance())
    assert float(variance.square().mean().sqrt()) == pytest.approx(0.09, rel=1e-6)
    assert float(variance.mean()) < 0.09 / 1.1


@pytest.mark.parametrize("form", ["local", "global"])
def test_pruning_with_noise_puts_it_on_what_is_kept_and_on_nothing_else(form, tiny_task, tiny_batch, public):
    """The same coordinates are kept as without noise, since the draws of the sensitivity come first."""
    plain = prepared("optimal-pruning", tiny_task, public, rate=0.6, form=form)
    noisy = prepared("optimal-pruning", tiny_task, public, rate=0.6, form=form, std=0.2)
    noise = []
    for seed in range(60):
        clean = flat(plain.share(tiny_task, *tiny_batch, generator=seeded(seed)))
        sent = flat(noisy.share(tiny_task, *tiny_batch, generator=seeded(seed)))
        assert torch.equal(sent != 0, clean != 0)
        noise.append((sent - clean)[clean != 0])
    values = torch.cat(noise)
    assert len(values) == 60 * (tiny_task.size - int(0.6 * tiny_task.size))
    assert float(values.std()) == pytest.approx(0.2, rel=0.05)
    assert abs(float(values.mean())) < 0.02
    secure = flat(noisy.share(tiny_task, *tiny_batch))
    assert int((secure == 0).sum()) >= int(0.6 * tiny_task.size)


def test_noise_without_pruning_is_gaussian_noise_and_no_identity(tiny_task, tiny_batch):
    clean = flat(tiny_task.gradients(*tiny_batch))
    sent = flat(gradveil.defense("optimal-pruning", rate=0.0, std=0.5).share(tiny_task, *tiny_batch))
    assert float((sent - clean).std()) == pytest.approx(0.5, rel=0.15)


def test_pruning_removes_the_largest_ratios_over_all_layers(tiny_task, tiny_batch):
    defense = gradveil.defense("optimal-pruning", rate=0.6)
    gradients = tiny_task.gradients(*tiny_batch)
    exact = tiny_task.sensitivity(*tiny_batch, None)
    weight = {name: value.square() for name, value in gradients.items()}
    sent = defense.defend(gradients, exact, weight, seeded())
    ratios = (flat(exact).sqrt() / flat(gradients).abs()).tolist()
    ranked = sorted(range(len(ratios)), key=lambda i: -ratios[i])
    removed = set(ranked[: int(0.6 * len(ratios))])
    expected = [0.0 if i in removed else v for i, v in enumerate(flat(gradients).tolist())]
    assert flat(sent).tolist() == expected


@given(
    hnp.arrays("float64", 30, elements=st.sampled_from([0.0, 1.0, 2.0])),
    hnp.arrays("float64", 30, elements=st.sampled_from([0.0, 1.0, -2.0])),
    st.sampled_from([0.0, 0.1, 0.33, 0.8, 1.0]),
    st.booleans(),
)
def test_pruned_counts_are_exact_with_ties_and_zeros(s, g, rate, layerwise):
    """Zero gradients are pruned first, and equal ratios by position."""
    s2, gradients = split(s**2), split(g)
    defense = gradveil.defense("optimal-pruning", rate=rate, layerwise=layerwise)
    weight = {name: value.square() for name, value in gradients.items()}
    sent = defense.defend(gradients, s2, weight, seeded())
    for names in [["a"], ["b"]] if layerwise else [["a", "b"]]:
        values = torch.cat([gradients[name] for name in names]).tolist()
        squares = torch.cat([s2[name] for name in names]).tolist()
        keys = [
            (-float("inf") if v == 0 else -x / v**2, i) for i, (x, v) in enumerate(zip(squares, values, strict=True))
        ]
        removed = {i for _, i in sorted(keys)[: int(round(rate * len(values), 9))]}
        expected = [0.0 if i in removed else v for i, v in enumerate(values)]
        assert torch.cat([sent[name] for name in names]).tolist() == expected


@pytest.mark.parametrize("name", ["optimal-noise", "optimal-dp-sgd", "optimal-pruning"])
def test_the_sensitivity_is_measured_every_r_rounds(name, tiny_task, tiny_batch, monkeypatch):
    calls = []
    measure = gradveil.Task.sensitivity
    monkeypatch.setattr(gradveil.Task, "sensitivity", lambda *a, **k: calls.append(1) or measure(*a, **k))
    defense, memory = gradveil.defense(name, every=3), {}
    calls_after_round = []
    for number in range(7):
        defense.share(tiny_task, *tiny_batch, generator=seeded(number), memory=memory)
        calls_after_round.append(len(calls))
    assert calls_after_round == [1, 1, 1, 2, 2, 2, 3]
    calls.clear()
    local = gradveil.LocalSteps(epochs=2, batch_size=1)
    defense.share(tiny_task, *tiny_batch, memory={}, local=local)
    assert len(calls) == 1
    calls.clear()
    gradveil.defense(name).share(tiny_task, *tiny_batch, local=local)
    assert len(calls) == 6
    with pytest.raises(InputError, match=f"{name}: every=3 needs memory="):
        defense.share(tiny_task, *tiny_batch)


@pytest.mark.parametrize("name", ["optimal-noise", "optimal-dp-sgd", "optimal-pruning"])
def test_the_global_form_must_be_prepared(name, tiny_task, tiny_batch):
    defense = gradveil.defense(name, form="global")
    with pytest.raises(InputError, match=f"{name}: the global form is not prepared yet; call prepare"):
        defense.share(tiny_task, *tiny_batch)
    with pytest.raises(InputError, match="needs prepare.*public="):
        defense, _ = defense.prepare(tiny_task)
    defense, _ = defense.prepare(tiny_task, public=tiny_batch)
    other = gradveil.Task(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 4)).double(), input_shape=(1, 6, 6), classes=4
    )
    with pytest.raises(InputError, match="prepared for layers .* prepare it for this model"):
        defense.share(other, *tiny_batch)
    with pytest.raises(ParameterError, match=f"{name}: every must be 1 in the global form"):
        gradveil.defense(name, form="global", every=2)


def test_weights_that_have_diverged_are_refused(tiny_task, tiny_batch):
    broken = tiny_task.with_parameters({n: torch.full_like(v, torch.inf) for n, v in tiny_task.parameters.items()})
    with pytest.raises(NotFiniteError, match="optimal-noise: gradients must be finite"):
        gradveil.defense("optimal-noise").share(broken, *tiny_batch)


def test_optimal_dp_sgd_says_that_it_has_no_epsilon():
    from gradveil.defenses import DEFENSES

    assert "no (epsilon, delta)" in DEFENSES.get("optimal-dp-sgd").__doc__
