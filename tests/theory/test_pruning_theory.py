"""Measurements of what the theory of pruning predicts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradveil
from gradveil import theory
from gradveil.core.errors import InputError, ParameterError


def layers(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "conv": scale * torch.randn(4, 3, 3, generator=generator, dtype=torch.float64).pow(3),
        "fc": scale * torch.randn(57, generator=generator, dtype=torch.float64),
    }


def flat(values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in values.values()])


@given(st.integers(0, 1000), st.sampled_from(["dual-pruning", "top-k", "aligned-dual-pruning"]))
def test_distance_and_cosine_follow_from_the_pruned_share(seed, name):
    gradients = layers(seed)
    sent = gradveil.defense(name).perturb(gradients)
    share = theory.pruned_share(gradients, sent)
    g, s = flat(gradients), flat(sent)
    assert float((g - s).norm()) == pytest.approx(theory.pruning_distance(share, float(g.norm())), rel=1e-12)
    assert float(torch.cosine_similarity(g, s, dim=0)) == pytest.approx(theory.pruning_cosine(share), rel=1e-9)


def rounds_of_error_feedback(gradients_of_round, defense, rounds):
    """Over all rounds, the largest |e_t|^2, pruned share of P_t, pruned share of g_t, and norm of g_t."""
    memory, residual, corrected_share, gradient_share, norm = {}, 0.0, 0.0, 0.0, 0.0
    plain = defense.inner
    for number in range(rounds):
        gradients = gradients_of_round(number)
        residuals = {name: memory.get(f"residual/{name}", torch.zeros_like(v)) for name, v in gradients.items()}
        sent = defense.perturb(gradients, memory=memory)
        corrected = {name: value + residuals[name] for name, value in gradients.items()}
        corrected_share = max(corrected_share, theory.pruned_share(corrected, sent))
        gradient_share = max(gradient_share, theory.pruned_share(gradients, plain.perturb(gradients)))
        norm = max(norm, float(flat(gradients).norm()))
        residual = max(residual, sum(float(memory[f"residual/{name}"].square().sum()) for name in gradients))
    return residual, corrected_share, gradient_share, norm


@pytest.mark.parametrize("spec", ["dual-pruning", "dual-pruning:k1=0.02,k2=0.3", "top-k:keep=0.3"])
@pytest.mark.parametrize("stationary", [True, False])
def test_the_residual_stays_below_the_bound_with_the_share_of_what_is_pruned(spec, stationary):
    defense = gradveil.ErrorFeedback(gradveil.defense(spec))
    residual, corrected_share, _, norm = rounds_of_error_feedback(
        lambda number: layers(0 if stationary else number), defense, 60
    )
    assert residual <= theory.residual_bound(corrected_share, norm)


def test_with_the_share_of_the_gradient_the_bound_is_false():
    """This is the paper's version; on a constant gradient it is off by orders of magnitude."""
    residual, corrected_share, gradient_share, norm = rounds_of_error_feedback(
        lambda _: layers(0), gradveil.defense("dual-pruning+error-feedback"), 400
    )
    assert residual > 100 * theory.residual_bound(gradient_share, norm)
    assert gradient_share < 0.95 < corrected_share


def test_invalid_arguments_are_refused():
    with pytest.raises(ParameterError, match="residual_bound: share must be a number of at least 0 and below 1, got 1"):
        theory.residual_bound(1, 1.0)
    with pytest.raises(ParameterError, match="share must be a number from 0 to 1, got 1.5"):
        theory.pruning_cosine(1.5)
    with pytest.raises(InputError, match="a gradient that is not zero everywhere"):
        theory.pruned_share({"w": torch.zeros(2)}, {"w": torch.zeros(2)})
    with pytest.raises(InputError, match=r"the same layers in both, but they differ in \['v', 'w'\]"):
        theory.pruned_share({"w": torch.zeros(2)}, {"v": torch.zeros(2)})
    assert theory.residual_bound(0, 1.0) == 0
    assert math.isfinite(theory.residual_bound(0.999, 1.0))
