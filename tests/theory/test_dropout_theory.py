"""Measurements of what the theory of Gradient Dropout predicts."""

import math
from dataclasses import dataclass
from statistics import fmean

import pytest
import torch
from torch import Tensor

import gradveil
from gradveil import theory
from gradveil.core.errors import InputError, ParameterError

SIZE = 200_000


def gradient(seed: int = 5, scale: float = 1.0, size: int = SIZE) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dropped_out(value: Tensor, keep: float, std: float, seed: int = 0) -> Tensor:
    defense = gradveil.defense("gradient-dropout", keep=keep, std=std)
    generator = torch.Generator().manual_seed(1000 + seed)  # no seed that also draws a gradient: masks would follow it
    return defense.perturb({"w": value}, generator=generator)["w"]


def printed_distance(value: Tensor, keep: float, std: float) -> float:
    """The expectation as the paper's appendix A prints it."""
    return float(((1 - keep) ** 2 / keep + (1 - keep) ** 2) * value.square().mean() + (1 - keep) * std**2)


@pytest.mark.parametrize(("keep", "std"), [(0.8, 5e-3), (0.7, 0.4), (0.3, 2.0), (0.95, 0.0)])
def test_mean_and_squared_distance_lie_within_three_standard_errors(keep, std):
    value = gradient()
    error = dropped_out(value, keep, std) - value
    assert abs(float(error.mean())) < 3 * float(error.std()) / SIZE**0.5
    squared = error.square()
    measured, standard_error = float(squared.mean()), float(squared.std()) / SIZE**0.5
    assert abs(measured - theory.dropout_distance(value, keep, std)) < 3 * standard_error
    assert abs(measured - printed_distance(value, keep, std)) > 3 * standard_error


def test_the_slip_of_the_appendix_is_on_the_gradient_and_not_on_the_decoys():
    keep, std = 0.3, 2.0
    value = gradient()
    value *= math.sqrt(0.995 / float(value.square().mean()))
    corrected, printed = theory.dropout_distance(value, keep, std), printed_distance(value, keep, std)
    assert (round(corrected, 3), round(printed, 3)) == (5.122, 4.913)
    measured = fmean(float((dropped_out(value, keep, std, seed) - value).square().mean()) for seed in range(10))
    assert round(measured, 2) == 5.12
    zero = torch.zeros(SIZE)  # for which only the decoys count: both are right
    assert theory.dropout_distance(zero, keep, std) == pytest.approx(printed_distance(zero, keep, std))
    assert float(dropped_out(zero, keep, std).square().mean()) == pytest.approx((1 - keep) * std**2, rel=0.01)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_a_sufficient_keep_exceeds_the_gap_for_any_gradient(scale):
    gap, std = 0.002, 0.1
    keep = theory.sufficient_keep(gap, std) - 0.02
    value = gradient(scale=scale)
    assert float((dropped_out(value, keep, std) - value).square().mean()) > gap
    if scale == 0:  # for a zero gradient the limit is tight
        keep = theory.sufficient_keep(gap, std) + 0.02
        assert float((dropped_out(value, keep, std) - value).square().mean()) < gap


def test_a_gap_above_the_variance_of_the_decoys_is_refused():
    with pytest.raises(ParameterError, match="a gap of 0.04 needs decoys of a variance above it, got 0.01; raise std"):
        theory.sufficient_keep(0.04, 0.1)


def printed_limit(keep: float, std: float, convexity: float) -> float:
    """The limit of the squared distance as the paper's theorem 3 prints it."""
    return (1 - keep) ** 2 * std**2 / (2 * convexity)


@dataclass(frozen=True)
class Ridge:
    """Ridge regression on data that is split among clients: f_c(w) = |X_c w - y_c|^2 / 2n + ridge |w|^2 / 2."""

    inputs: Tensor  # [clients, n, d]
    targets: Tensor  # [clients, n]
    ridge: float = 0.1

    @property
    def hessian(self) -> Tensor:
        clients, examples, size = self.inputs.shape
        flat = self.inputs.reshape(-1, size)
        return flat.T @ flat / (clients * examples) + self.ridge * torch.eye(size, dtype=flat.dtype)

    def gradients(self, weights: Tensor) -> Tensor:
        """The gradient [clients, trials, d] of every client at the weights [trials, d]."""
        errors = torch.einsum("cnd,td->ctn", self.inputs, weights) - self.targets[:, None]
        return torch.einsum("ctn,cnd->ctd", errors, self.inputs) / self.inputs.shape[1] + self.ridge * weights


def ridge(kind: str, clients: int, size: int = 20, examples: int = 40) -> Ridge:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(clients, examples, size, generator=draw, dtype=torch.float64)
    if kind == "round":  # the Hessian is a multiple of the identity, so that mu = L and the bound is an equation
        inputs = torch.linalg.qr(inputs).Q * examples**0.5
    truth = torch.randn(size, generator=draw, dtype=torch.float64)
    noise = torch.randn(clients, examples, generator=draw, dtype=torch.float64)
    return Ridge(inputs, inputs @ truth + noise)


def drifts(problem: Ridge, keep: float, std: float, lr: float, steps: int) -> tuple[list[float], list[float]]:
    """The measured squared distance to training without dropout after each step, and each step's variance."""
    size = problem.inputs.shape[-1]
    noisy = torch.zeros(2000, size, dtype=torch.float64)
    clean = noisy[:1]
    distances, variances = [0.0], []
    for step in range(steps):
        gradients = problem.gradients(noisy)
        squared_norm = float(gradients.square().sum(-1).mean())
        variances.append(theory.dropout_variance(squared_norm, size, keep, std))
        noisy = noisy - lr * dropped_out(gradients, keep, std, seed=step).mean(0)
        clean = clean - lr * problem.gradients(clean).mean(0)
        distances.append(float((noisy - clean).square().sum(-1).mean()))
    return distances, variances


def constants(problem: Ridge, lr: float) -> dict[str, float]:
    eigenvalues = torch.linalg.eigvalsh(problem.hessian)
    return {
        "lr": lr,
        "convexity": float(eigenvalues[0]),
        "smoothness": float(eigenvalues[-1]),
        "clients": len(problem.inputs),
    }


@pytest.mark.parametrize("clients", [1, 4])
@pytest.mark.parametrize(("keep", "std"), [(0.8, 0.5), (0.3, 0.0)])
def test_training_drifts_no_further_than_the_corrected_theorems_say(clients, keep, std):
    problem, lr, steps = ridge("oblong", clients), 0.02, 150
    known = constants(problem, lr)
    distances, variances = drifts(problem, keep, std, lr, steps)
    sampling = 1.1  # the error of a mean over 2000 trials
    without_convexity = {**known, "convexity": -known["smoothness"]}  # theorem 2
    for before, after, variance in zip(distances[:-1], distances[1:], variances, strict=True):
        assert after <= sampling * theory.dropout_drift(before, variance, **known)
        assert after <= sampling * theory.dropout_drift(before, variance, **without_convexity)
    assert max(distances) <= theory.dropout_drift_limit(max(variances), **known)


@pytest.mark.parametrize("clients", [1, 4])
def test_the_corrected_bound_is_reached_if_the_loss_curves_alike_in_all_directions(clients):
    problem, lr = ridge("round", clients), 0.1
    known = constants(problem, lr)
    assert known["convexity"] == pytest.approx(known["smoothness"])
    keep, std = 0.7, 0.5
    distances, variances = drifts(problem, keep, std, lr, steps=60)
    for before, after, variance in zip(distances[:-1], distances[1:], variances, strict=True):
        assert after == pytest.approx(theory.dropout_drift(before, variance, **known), rel=0.05)
    assert distances[-1] == pytest.approx(theory.dropout_drift_limit(variances[-1], **known), rel=0.05)
    assert distances[-1] > 1.5 * printed_limit(keep, std, known["convexity"])


def test_the_noise_of_the_mask_counts_the_gradients_of_the_clients_and_not_their_mean():
    problem, keep, lr, steps = ridge("round", clients=4), 0.3, 0.1, 80
    known = constants(problem, lr)
    distances, variances = drifts(problem, keep, 0.0, lr, steps)
    assert distances[-1] == pytest.approx(theory.dropout_drift_limit(variances[-1], **known), rel=0.05)
    assert printed_limit(keep, 0.0, known["convexity"]) == 0
    # At the minimum the mean is zero: taken for the clients' own, it leaves only what the drift itself makes of it.
    mean_only = (1 - keep) / keep * known["smoothness"] ** 2 * distances[-1]
    assert distances[-1] > 3 * theory.dropout_drift_limit(mean_only, **known)


def test_a_drift_without_a_limit_is_refused():
    known = {"convexity": 0.5, "smoothness": 1.0}
    assert theory.dropout_drift_limit(1.0, lr=0.99, **known) > 0
    with pytest.raises(ParameterError, match=r"a small learning rate, below .* = 1, got 1; use dropout_drift"):
        theory.dropout_drift_limit(1.0, lr=1.0, **known)
    with pytest.raises(ParameterError, match="convexity must be a number from -1 to 1, got 2"):
        theory.dropout_drift(0.0, 1.0, lr=0.1, convexity=2.0, smoothness=1.0)


def measured_cosines(value: Tensor, keep: float, std: float, trials: int = 20_000) -> Tensor:
    sent = dropped_out(value.expand(trials, -1), keep, std)
    return torch.cosine_similarity(value[None], sent, dim=1)


VECTORS = {
    "one": torch.tensor([3.0], dtype=torch.float64),
    "two": torch.tensor([1.0, -2.0], dtype=torch.float64),
    "with zeros": torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=torch.float64),
    "gaussian": gradient(size=50),
    "dominated": torch.cat([torch.tensor([100.0], dtype=torch.float64), gradient(scale=1e-3, size=50)]),
}


@pytest.mark.parametrize("keep", [0.2, 0.8])
@pytest.mark.parametrize("std", [0.0, 5e-3, 1.0])
@pytest.mark.parametrize("vector", VECTORS)
def test_the_expected_cosine_is_exact_for_every_vector(vector, keep, std):
    value = VECTORS[vector]
    cosines = measured_cosines(value, keep, std)
    expected = theory.dropout_cosine(value, keep, std)
    assert abs(float(cosines.mean()) - expected) < 4 * float(cosines.std()) / len(cosines) ** 0.5 + 1e-8


def test_the_expected_cosine_of_two_equal_values_without_decoys_is_known():
    keep = 0.4  # both are sent: 1; one: 1 / sqrt(2); none: 0
    expected = keep**2 + 2 * keep * (1 - keep) / math.sqrt(2)
    assert theory.dropout_cosine(torch.ones(2), keep, 0.0) == pytest.approx(expected, abs=1e-8)
    assert theory.dropout_cosine(torch.ones(2), 1.0, 0.5) == 1


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("std", [0.0, 5e-3, 1.0])
def test_the_cosine_of_a_gaussian_gradient_is_near_its_limit_which_counts_the_decoys(keep, std):
    value = gradient()
    cosine = float(torch.cosine_similarity(value, dropped_out(value, keep, std), dim=0))
    limit = theory.dropout_cosine_limit(value, keep, std)
    assert cosine == pytest.approx(limit, abs=0.01)
    assert theory.dropout_cosine(value[:5000], keep, std) == pytest.approx(limit, abs=0.01)
    assert limit <= math.sqrt(keep) + 1e-12
    if std == 1:
        assert limit < math.sqrt(keep) - 0.02


def test_the_cosine_limit_does_not_hold_for_a_gradient_that_one_value_dominates():
    value = VECTORS["dominated"]
    assert float(measured_cosines(value, 0.8, 0.0).quantile(0.5)) > theory.dropout_cosine_limit(value, 0.8, 0.0) + 0.1
    assert theory.dropout_cosine(value, 0.8, 0.0) == pytest.approx(0.8, abs=1e-3)


def test_a_gradient_of_zeros_has_no_cosine():
    for function in (theory.dropout_cosine, theory.dropout_cosine_limit):
        with pytest.raises(InputError, match="expected a gradient that is not zero everywhere"):
            function(torch.zeros(3), 0.5, 0.1)
