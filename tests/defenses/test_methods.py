"""What each method does, compared with closed forms and slow but obvious references."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradveil

SIZE = 200_000


def sample(name: str, value: torch.Tensor, **parameters) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return gradveil.defense(name, **parameters).perturb({"w": value}, generator=generator)["w"]


@pytest.mark.parametrize(("name", "fourth_moment"), [("gaussian-noise", 3.0), ("laplace-noise", 6.0)])
def test_noise_has_its_moments(name, fourth_moment):
    noise = sample(name, torch.zeros(SIZE, dtype=torch.float64), std=0.3) / 0.3
    # The tolerances are four standard errors of each estimate.
    assert abs(float(noise.mean())) < 4 / SIZE**0.5
    assert abs(float(noise.square().mean()) - 1) < 4 * ((fourth_moment - 1) / SIZE) ** 0.5
    assert float(noise.pow(4).mean()) == pytest.approx(fourth_moment, rel=0.1)


def test_laplace_noise_follows_its_distribution():
    noise = sample("laplace-noise", torch.zeros(SIZE, dtype=torch.float64), std=2**0.5)
    for point in (-2.0, -0.5, 0.0, 0.5, 2.0):
        expected = 0.5 * math.exp(point) if point < 0 else 1 - 0.5 * math.exp(-point)
        assert float((noise <= point).double().mean()) == pytest.approx(expected, abs=4 * 0.5 / SIZE**0.5)


def test_noise_is_added_to_the_gradient():
    value = torch.linspace(-5, 5, SIZE, dtype=torch.float64)
    for name in ("gaussian-noise", "laplace-noise"):
        noise = sample(name, value, std=0.1) - value
        assert float(noise.std()) == pytest.approx(0.1, rel=0.02)
        assert abs(float((noise * value).mean())) < 0.01


arrays = hnp.arrays(
    "float64", st.integers(1, 80), elements=st.one_of(st.sampled_from([0.0, 1.0, -1.0, 2.0]), st.floats(-9, 9))
)


def slow_band(values: list[float], top: int, bottom: int) -> list[float]:
    ranked = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    removed = set(ranked[:top]) | set(ranked[len(values) - bottom :])
    return [0.0 if i in removed else v for i, v in enumerate(values)]


@given(arrays, st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.5]), st.sampled_from([0.0, 0.1, 0.3, 0.49]))
def test_dual_pruning_removes_exact_counts(array, k1, k2):
    value = torch.from_numpy(array)
    n = len(value)
    top = math.ceil(round(k1 * n, 9))
    bottom = min(math.floor(round(k2 * n, 9)), n - top)
    sent = sample("dual-pruning", value, k1=k1, k2=k2)
    assert sent.tolist() == slow_band(value.tolist(), top, bottom)
    assert torch.equal(sent + (value - sent), value)


@given(arrays, st.sampled_from([0.01, 0.2, 0.5, 1.0]))
def test_top_k_keeps_exact_counts(array, keep):
    value = torch.from_numpy(array)
    kept = math.ceil(round(keep * len(value), 9))
    assert sample("top-k", value, keep=keep).tolist() == slow_band(value.tolist(), 0, len(value) - kept)


def test_dual_pruning_always_hides_the_largest_bias_entry():
    bias = torch.tensor([0.1, -0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2])
    assert sample("dual-pruning", bias, k1=0.05, k2=0.1)[1] == 0


def test_gradient_dropout_shares_with_the_stated_probability():
    value = torch.randn(SIZE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    keep = 0.7
    sent = sample("gradient-dropout", value, keep=keep, std=0.4)
    exactly_shared = torch.isclose(sent, value / keep, rtol=1e-12, atol=0)
    assert float(exactly_shared.double().mean()) == pytest.approx(keep, abs=4 * (keep * (1 - keep) / SIZE) ** 0.5)
    decoys = sent[~exactly_shared] / 0.4
    assert abs(float(decoys.square().mean()) - 1) < 4 * (2 / len(decoys)) ** 0.5


def test_decoys_of_the_layers_scale_spread_like_what_is_shared():
    value = 1e-4 * torch.randn(SIZE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    sent = sample("gradient-dropout", value, keep=0.5, std=2.0, scale="layer")
    decoys = sent[~torch.isclose(sent, value / 0.5, rtol=1e-12, atol=0)]
    spread = 2.0 * float((value / 0.5).square().mean().sqrt())
    assert float(decoys.square().mean().sqrt()) == pytest.approx(spread, rel=0.02)


def starvation(spec: str, noise: float, rounds: int = 300) -> tuple[int, float, float]:
    """Number of coordinates never sent, residual energy relative to the gradient's, cosine of sent and true sums."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(1000, generator=generator) * torch.rand(1000, generator=generator)
    defense, memory = gradveil.defense(spec), {}
    times_sent, sent, total = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)
    for _ in range(rounds):
        gradient = base + noise * base.std() * torch.randn(1000, generator=generator)
        update = defense.perturb({"w": gradient}, memory=memory)["w"]
        times_sent += update != 0
        sent += update
        total += gradient
    energy = float(memory["residual/w"].square().sum() / base.square().sum())
    return int((times_sent == 0).sum()), energy, float(torch.cosine_similarity(sent, total, dim=0))


def test_plain_error_feedback_starves_the_largest_coordinates_and_clipping_frees_them():
    starved, energy, cosine = starvation("dual-pruning+error-feedback", noise=2)
    assert starved > 20
    assert energy > 1e4
    clipped_starved, clipped_energy, clipped_cosine = starvation("dual-pruning+error-feedback:clip=0.75", noise=2)
    assert clipped_starved == 0
    assert clipped_energy < 10
    assert clipped_cosine > cosine + 0.1


def test_decay_bounds_the_residual_and_frees_some():
    starved, energy, _ = starvation("dual-pruning+error-feedback", noise=2)
    decayed_starved, decayed_energy, _ = starvation("dual-pruning+error-feedback:decay=0.9", noise=2)
    assert decayed_starved < 0.6 * starved
    assert decayed_energy < 0.01 * energy
    # A coordinate that is never sent accumulates at most decay / (1 - decay) gradients.
    assert starvation("dual-pruning+error-feedback:decay=0.9", noise=0)[1] < 0.9**2 / (1 - 0.9) ** 2


def test_on_a_constant_gradient_clipping_bounds_the_residual_but_frees_nothing():
    """The largest values of such a gradient are always at the top, so no change to the residual gets them sent."""
    starved, energy, _ = starvation("dual-pruning+error-feedback", noise=0)
    clipped_starved, clipped_energy, _ = starvation("dual-pruning+error-feedback:clip=0.75", noise=0)
    assert starved >= 50
    assert clipped_starved >= 50
    assert energy > 1e4
    assert clipped_energy < 10
