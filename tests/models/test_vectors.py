"""Small classifiers of vectors, against conditions of optimality and problems that only some of them can solve."""

import pytest
import torch
from torch.nn import functional

from gradveil.models.vectors import VectorClassifier, fit_logistic, fit_perceptron, standardisation


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def examples():
    vectors = torch.randn(200, 3, generator=seeded(), dtype=torch.float64) * torch.tensor([1.0, 100.0, 0.01])
    return vectors, (vectors[:, 0] > 0).long() + (vectors[:, 1] > 50).long()


def test_logistic_regression_is_at_its_minimum(examples):
    """Slow and obvious: at the minimum the gradient of the penalised cross-entropy is zero."""
    vectors, kinds = examples
    targets = functional.one_hot(kinds, 3).double()
    fitted = fit_logistic(vectors, targets, penalty=0.1)
    *_, weight, bias = fitted.tensors
    values = (vectors - vectors.mean(0)) / vectors.std(0, correction=0)
    residual = (values @ weight.T + bias).softmax(1) - targets
    torch.testing.assert_close(residual.T @ values / 200, -0.1 * weight, rtol=0, atol=1e-5)
    torch.testing.assert_close(residual.mean(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(fitted(vectors), values @ weight.T + bias)


def test_targets_may_be_shares(examples):
    vectors, _ = examples
    shares = torch.tensor([[0.25, 0.75]], dtype=torch.float64).expand(200, 2)
    fitted = fit_logistic(vectors, shares, penalty=1.0)
    torch.testing.assert_close(fitted(vectors).softmax(1), shares, rtol=0, atol=1e-4)


def test_a_value_that_never_changes_is_left_as_it_is():
    mean, scale = standardisation(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    assert (mean.tolist(), scale.tolist()) == ([2.0, 5.0], [1.0, 1.0])


def test_a_perceptron_solves_what_logistic_regression_cannot():
    vectors = torch.rand(600, 2, generator=seeded()) * 2 - 1
    targets = functional.one_hot((vectors[:, 0] * vectors[:, 1] > 0).long(), 2).float()
    known, unseen = (vectors[:500], targets[:500]), (vectors[500:], targets[500:])
    linear = fit_logistic(*known, penalty=1e-3)
    network = fit_perceptron(*known, hidden=[32, 32], epochs=100, generator=seeded(1), held_out=unseen)
    right = [float((each(unseen[0]).argmax(1) == unseen[1].argmax(1)).float().mean()) for each in (linear, network)]
    assert right[0] < 0.7
    assert right[1] > 0.9
    assert network.cross_entropy(*unseen) < linear.cross_entropy(*unseen)


def test_the_best_epoch_on_what_is_held_out_is_kept():
    """Labels are random, so more epochs fit noise: what is returned is never worse than the first weights."""
    vectors, kinds = torch.randn(60, 5, generator=seeded()), torch.randint(0, 2, (60,), generator=seeded(1))
    targets = functional.one_hot(kinds, 2).float()
    held = vectors[40:], targets[40:]
    kept = fit_perceptron(
        vectors[:40], targets[:40], hidden=[32], epochs=200, generator=seeded(2), held_out=held
    ).cross_entropy(*held)
    start, last = (
        fit_perceptron(vectors[:40], targets[:40], hidden=[32], epochs=epochs, generator=seeded(2)).cross_entropy(*held)
        for epochs in (0, 200)
    )
    assert kept <= start
    assert kept < last


def test_layers_are_applied_in_their_order():
    tensors = (
        torch.zeros(1),
        torch.ones(1),
        torch.tensor([[2.0]]),
        torch.tensor([1.0]),
        torch.tensor([[3.0]]),
        torch.zeros(1),
    )
    expected = 3 * functional.gelu(torch.tensor([[2 * 0.5 + 1.0]]))
    torch.testing.assert_close(VectorClassifier(tensors)(torch.tensor([[0.5]])), expected)
