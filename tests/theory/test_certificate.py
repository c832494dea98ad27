"""Certificates, compared with another library, with closed forms and with trade-off functions written out."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

import gradveil
from gradveil.core.errors import ParameterError
from gradveil.defenses.accounting import SampledGaussian, privacy_spent
from gradveil.theory import (
    certificate,
    certificate_of,
    curve_epsilon,
    gaussian_success,
    in_words,
    sampled_curve,
    success_from_curve,
)

pytest.importorskip("dp_accounting")
FULL_BATCH = {"rounds": 1, "batch_size": 8, "examples": 8}

# Figures of riskcal 1.5.1: noise multiplier, rounds, batch size and examples; success by chance. Poisson sampling.
RISKCAL = {
    (1.0, 1, 10, 1000): {0.001: 0.00117, 0.01: 0.01082, 0.1: 0.10289, 0.5: 0.50383},
    (1.0, 1000, 10, 1000): {0.001: 0.00401, 0.01: 0.0291, 0.1: 0.19418, 0.5: 0.65857},
    (0.8, 200, 32, 1200): {0.001: 0.01173, 0.01: 0.06003, 0.1: 0.28284, 0.5: 0.74977},
    (4.0, 50, 100, 1000): {0.001: 0.00185, 0.01: 0.01614, 0.1: 0.1358, 0.5: 0.57101},
    (2.0, 4, 50, 50): {0.001: 0.0183, 0.01: 0.09236, 0.1: 0.38914, 0.5: 0.84134},
}


@pytest.mark.parametrize(
    ("kappa", "added", "replaced"), [(0.01, 0.092, 0.372), (1e-4, 0.0033, 0.043)], ids=["1 in 100", "1 in 10,000"]
)
def test_noise_as_large_as_the_clip(kappa, added, replaced):
    defense = gradveil.defense("dp-sgd", noise_multiplier=1.0)
    for relation, mu, expected in (("add-or-remove", 1.0, added), ("replace", 2.0, replaced)):
        found = certificate(defense, kappa=kappa, relation=relation, **FULL_BATCH)
        assert found.success == pytest.approx(expected, rel=0.02)
        assert found.mu == mu
        assert found.kappa == kappa


@pytest.mark.parametrize("noise_multiplier", [0.1, 0.01])
@pytest.mark.parametrize("relation", ["replace", "add-or-remove"])
def test_so_little_noise_certifies_nothing(noise_multiplier, relation):
    defense = gradveil.defense("dp-sgd", noise_multiplier=noise_multiplier)
    found = certificate(defense, kappa=0.01, relation=relation, **FULL_BATCH)
    assert found.success == pytest.approx(1)
    assert found.is_vacuous
    assert in_words(found).startswith("none: the bound is 1")


def test_clipping_alone_certifies_nothing():
    assert certificate(gradveil.defense("dp-sgd", noise_multiplier=0), kappa=0.01, **FULL_BATCH) is None
    assert in_words(None) == "none"


@pytest.mark.parametrize("name", gradveil.list_defenses())
def test_only_who_has_an_epsilon_has_a_certificate(name):
    defense = gradveil.defense(name)
    has_epsilon = defense.privacy_spent(rounds=1, batch_size=4, examples=8) is not None
    assert (certificate(defense, kappa=0.01, rounds=1, batch_size=4, examples=8) is not None) == has_epsilon
    assert has_epsilon == (name == "dp-sgd")


def test_a_certificate_survives_what_is_done_to_the_update_afterwards():
    alone = certificate(gradveil.defense("dp-sgd"), kappa=0.01, **FULL_BATCH)
    for spec in ("dp-sgd+top-k+quantization", "dp-sgd+gaussian-noise", "dp-sgd+laplace-noise+top-k"):
        assert certificate(gradveil.defense(spec), kappa=0.01, **FULL_BATCH) == alone
    fed_back = gradveil.Chain(gradveil.defense("dp-sgd"), gradveil.ErrorFeedback(gradveil.defense("top-k")))
    assert certificate(fed_back, kappa=0.01, **FULL_BATCH) == alone
    for spec in ("top-k+gaussian-noise", "gaussian-noise+error-feedback", "top-k+error-feedback"):
        assert certificate(gradveil.defense(spec), kappa=0.01, **FULL_BATCH) is None


def test_a_simulation_says_so():
    found = certificate(gradveil.defense("dp-sgd"), kappa=0.01, **FULL_BATCH)
    assert "simulated" not in in_words(found)
    assert "simulated with a seeded generator, in use only without one" in in_words(replace(found, seeded=True))


@pytest.mark.parametrize("run", RISKCAL, ids=str)
def test_it_agrees_with_the_pinned_figures_of_another_library(run):
    for kappa, expected in RISKCAL[run].items():
        found = certificate_of(SampledGaussian(*run, "poisson"), kappa=kappa)
        assert found.success == pytest.approx(expected, abs=1e-3)
        assert found.relation == "add-or-remove"


@pytest.mark.parametrize("run", RISKCAL, ids=str)
def test_it_agrees_with_another_library(run):
    calibration = pytest.importorskip(
        "riskcal.calibration.dpsgd", reason="riskcal is not installed: pip install riskcal; its figures are pinned"
    )
    noise_multiplier, rounds, batch_size, examples = run
    for kappa in RISKCAL[run]:
        beta = calibration.get_beta_for_dpsgd(noise_multiplier, batch_size / examples, rounds, kappa)
        found = certificate_of(SampledGaussian(*run, "poisson"), kappa=kappa)
        assert found.success == pytest.approx(1 - float(beta), abs=1e-3)


@pytest.mark.parametrize("relation", ["replace", "add-or-remove"])
def test_rounds_and_local_epochs_compose_as_a_root(relation):
    defense = gradveil.defense("dp-sgd", noise_multiplier=8.0)
    run = {"batch_size": 8, "examples": 8, "kappa": 0.01, "relation": relation}
    once = certificate(defense, rounds=1, **run)
    assert certificate(defense, rounds=4, **run).mu == pytest.approx(2 * once.mu)
    epochs = certificate(defense, rounds=2, local=gradveil.LocalSteps(epochs=2), **run)
    assert epochs.mu == pytest.approx(2 * once.mu)
    assert certificate(defense, rounds=0, **run).success == 0.01


def lower_hull(points):
    """The lower convex hull, by Andrew's monotone chain."""
    hull = []
    for point in sorted(set(points)):
        while len(hull) > 1:
            (x1, y1), (x2, y2) = hull[-2:]
            if (x2 - x1) * (point[1] - y1) - (y2 - y1) * (point[0] - x1) > 0:
                break
            hull.pop()
        hull.append(point)
    return np.array(hull)


def sampled_tradeoff(mu, rate, points=1200):
    """C_p(G_mu) of Dong, Roth and Su: f_p and its inverse, and the hull of both."""
    alpha = norm.cdf(np.linspace(-6, 6, points))
    f_p = rate * norm.cdf(norm.ppf(1 - alpha) - mu) + (1 - rate) * (1 - alpha)
    corners = [(0.0, 1.0), (1.0, 0.0)]
    curve = list(zip(alpha.tolist(), f_p.tolist(), strict=True))
    return lower_hull([*corners, *curve, *[(second, first) for first, second in curve]])


def test_one_sampled_round_is_the_written_out_tradeoff_function():
    mu, rate = 2 / 0.8, 0.1
    alpha, f = sampled_tradeoff(mu, rate).T
    for kappa in (1e-3, 0.01, 0.1, 0.3, 0.5, 0.9):
        found = certificate_of(SampledGaussian(0.8, 1, 10, 100), kappa=kappa)
        assert found.success == pytest.approx(1 - np.interp(kappa, alpha, f), abs=1e-4)
        assert found.mu is None
    # Where one direction alone decides, it is the mixture of the two cases, drawn or not.
    small = certificate_of(SampledGaussian(0.8, 1, 10, 100), kappa=0.01).success
    assert small == pytest.approx(0.9 * 0.01 + 0.1 * gaussian_success(0.01, mu), abs=1e-5)


@pytest.mark.parametrize(("noise_multiplier", "rate"), [(1.0, 0.2), (0.5, 0.05), (3.0, 0.5)])
def test_two_sampled_rounds_are_the_product_written_out(noise_multiplier, rate):
    alpha, f = sampled_tradeoff(2 / noise_multiplier, rate).T
    without, present = np.diff(alpha), -np.diff(f)  # two distributions that have this trade-off function
    joint_without, joint = np.outer(without, without).ravel(), np.outer(present, present).ravel()
    order = np.argsort(-joint / joint_without)
    false_positives, successes = np.cumsum(joint_without[order]), np.cumsum(joint[order])
    for kappa in (1e-3, 0.01, 0.1, 0.5):
        exact = np.interp(kappa, false_positives, successes)
        found = certificate_of(SampledGaussian(noise_multiplier, 2, round(100 * rate), 100), kappa=kappa)
        # The polygon with which this test replaces the curve loses a little; the certificate must not.
        assert exact - 1e-6 <= found.success <= exact + 1e-3


def test_the_curve_lies_below_renyi_accounting_and_meets_the_gaussian():
    for run in (
        {"noise_multiplier": 1.1, "rounds": 100, "batch_size": 256, "examples": 60_000},
        {"noise_multiplier": 4.0, "rounds": 50, "batch_size": 100, "examples": 1000},
        {"noise_multiplier": 4.0, "rounds": 1, "batch_size": 4, "examples": 4},
    ):
        for delta in (1e-5, 1e-2):
            epsilon = curve_epsilon(SampledGaussian(**run), delta=delta)
            assert 0 < epsilon <= privacy_spent(**run, delta=delta).epsilon
    mu, epsilon = 1.0, 2.0
    exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert sampled_curve([epsilon], mu, 1.0)[0] == pytest.approx(exact)
    assert sampled_curve([epsilon], mu / 2, 1.0, rounds=4)[0] == pytest.approx(exact)
    assert curve_epsilon(SampledGaussian(2.0, 1, 1, 1), delta=exact) == pytest.approx(epsilon, abs=2e-3)
    assert curve_epsilon(SampledGaussian(0.0, 1, 1, 1), delta=0.1) == math.inf
    assert curve_epsilon(SampledGaussian(1.0, 0, 1, 1), delta=0.1) == 0


def test_drawing_batches_is_counted_only_where_a_theorem_covers_it():
    fixed, poisson = (SampledGaussian(2.0, 4, 10, 100, sampling, passes=1) for sampling in ("fixed", "poisson"))
    assert certificate_of(fixed, kappa=0.01).theorem == "subsampling without replacement"
    assert certificate_of(fixed, kappa=0.01, relation="add-or-remove").mu == 1.0
    assert certificate_of(poisson, kappa=0.01).theorem == "Poisson subsampling"
    several = SampledGaussian(2.0, 4, 10, 100, "poisson", passes=4)
    assert certificate_of(several, kappa=0.01).mu == 2.0
    with pytest.raises(ParameterError, match="added or removed; use relation='add-or-remove'"):
        certificate_of(poisson, kappa=0.01, relation="replace")


def test_local_epochs_on_a_drawn_batch_are_one_mechanism_on_it():
    one_step = SampledGaussian(2.0, 1, 10, 100)
    two_epochs = SampledGaussian(2.0, 1, 10, 100, passes=2)
    as_one_step = SampledGaussian(math.sqrt(2), 1, 10, 100)
    success = [certificate_of(run, kappa=0.01).success for run in (one_step, two_epochs, as_one_step)]
    assert success[0] < success[1] == pytest.approx(success[2])


@given(
    kappa=st.floats(1e-6, 0.999),
    noise_multiplier=st.floats(0.05, 50),
    batch_size=st.integers(1, 20),
    rounds=st.sampled_from([1, 1, 3]),
)
def test_a_certificate_lies_between_the_chance_and_that_without_sampling(kappa, noise_multiplier, batch_size, rounds):
    found = certificate_of(SampledGaussian(noise_multiplier, rounds, batch_size, 20), kappa=kappa)
    unsampled = gaussian_success(kappa, 2 * math.sqrt(rounds) / noise_multiplier)
    assert kappa * (1 - 1e-9) <= found.success <= unsampled


@given(kappa=st.floats(1e-6, 0.999), mu=st.floats(0.01, 8))
def test_all_points_of_a_curve_together_are_its_tradeoff_function(kappa, mu):
    epsilons = np.linspace(0, 60, 20_001)
    found = success_from_curve(kappa, epsilons, sampled_curve(epsilons, mu, 1.0))
    assert found == pytest.approx(gaussian_success(kappa, mu), abs=1e-4)
    assert found >= gaussian_success(kappa, mu) - 1e-12
    few = success_from_curve(kappa, epsilons[::5000], sampled_curve(epsilons[::5000], mu, 1.0))
    assert found <= few <= 1


def test_bad_values_are_refused():
    defense = gradveil.defense("dp-sgd")
    for kappa in (0, 1, -0.1):
        with pytest.raises(ParameterError, match="certificate: kappa must be a number above 0 and below 1"):
            certificate(defense, kappa=kappa, **FULL_BATCH)
    with pytest.raises(ParameterError, match="relation must be one of replace, add-or-remove, got 'zero-out'"):
        certificate(gradveil.defense("none"), kappa=0.1, relation="zero-out", **FULL_BATCH)
    with pytest.raises(ParameterError, match="batch_size must be a whole number from 1 to 4, got 5"):
        certificate(defense, kappa=0.1, rounds=1, batch_size=5, examples=4)
    with pytest.raises(ParameterError, match="expected a delta for each of one or more epsilons"):
        success_from_curve(0.1, [1.0, 2.0], [0.1])
    with pytest.raises(ParameterError, match="sampling must be one of fixed, got 'poisson'"):
        curve_epsilon(SampledGaussian(1.0, 1, 1, 2, "poisson"), delta=0.1)
