"""Compensation removes noise of known variance and keeps correlated signal."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradveil
from gradveil import data, models
from gradveil.core.errors import InputError, ParameterError
from gradveil.core.randomness import derived_generator
from gradveil.core.tensors import Tensors
from gradveil.defenses.compensation import noise_band
from gradveil.defenses.risk_slicing import RiskSlicing, cut_slices
from gradveil.update import Update, weighted_mean

COLUMNS = 50
ROWS = 8 * COLUMNS  # so that aspect 8 gives this shape


def energy(values: torch.Tensor) -> float:
    return float(values.double().square().sum())


def low_rank(rank: int, generator: torch.Generator) -> torch.Tensor:
    """A matrix of that rank whose values have mean square 1."""
    left, right = torch.randn(ROWS, rank, generator=generator), torch.randn(rank, COLUMNS, generator=generator)
    product = (left @ right).double()
    return product / product.square().mean().sqrt()


@pytest.mark.parametrize("size", [5_000, 20_000, 119_530])
@pytest.mark.parametrize("aspect", [1.0, 6.0, 8.0, 12.0])
def test_pure_noise_is_removed(size, aspect, generator):
    noise = 0.3 * torch.randn(size, generator=generator)
    left = gradveil.compensate({"w": noise}, 0.09, aspect=aspect)["w"]
    assert energy(left) < 0.05 * energy(noise)


def test_the_eigenvalues_of_noise_lie_in_the_band(generator):
    noise = torch.randn(800, 100, generator=generator, dtype=torch.float64)
    eigenvalues = torch.linalg.eigvalsh(noise.T @ noise / 800)
    low, high = noise_band(800, 100, 1.0)
    # The edges are blurred by (columns)^(-2/3), here 5 %.
    assert low * 0.9 < float(eigenvalues.min()) < low * 1.2
    assert high * 0.9 < float(eigenvalues.max()) < high * 1.1


@pytest.mark.parametrize("clients", [10, 5])
@pytest.mark.parametrize("model", ["lenet", "cnn6"])
def test_the_noise_of_slices_is_removed(model, clients):
    """Noise on slices is not independent across coordinates, so some of it remains; the weights are unequal."""
    layers = dict(models.create(model, input_shape=(1, 28, 28), classes=10).named_parameters())
    slices = cut_slices(layers, {name: float(value.numel()) ** 0.5 for name, value in layers.items()}, 10)
    defense = RiskSlicing(std=0.1, ratio=0.2, slice_of=Tensors(slices))
    zeros = {name: torch.zeros(value.shape) for name, value in layers.items()}
    updates = [defense.perturb(zeros, generator=derived_generator(3, client)) for client in range(clients)]
    weights = [1.0 + client / clients for client in range(clients)]
    before = sum(energy(value) for value in weighted_mean(updates, weights).values())
    after = sum(energy(value) for value in defense.aggregate(updates, weights=weights).values())
    if clients == 10:
        assert after < 0.2 * before
    assert after < before
    size = sum(value.numel() for value in layers.values())
    assert before / size == pytest.approx(defense.aggregate_variance(weights), rel=0.1)


@given(
    rank=st.integers(1, COLUMNS // 10),
    noise=st.floats(0.02, 20),
    seed=st.integers(0, 10_000),
)
def test_low_rank_signal_comes_out_cleaner_at_every_level_of_noise(rank, noise, seed):
    generator = torch.Generator().manual_seed(seed)
    signal = low_rank(rank, generator)
    noisy = signal + noise * torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    got = gradveil.compensate({"w": noisy.view(10, -1)}, noise**2)["w"].view(ROWS, COLUMNS)
    assert energy(got - signal) < energy(noisy - signal)


def test_the_papers_variance_is_worse(generator):
    """The paper prints m * (d/s) * sum(weights) * sigma^2, the variance of a sum: m^2 too large for the mean.

    Its band lies above the noise, so noise is kept, and covers part of the signal, which is lost.
    """
    clients, sigma, share = 10, 1.0, 0.2
    signal = low_rank(4, generator)
    masked_noise = [
        (torch.rand(ROWS, COLUMNS, generator=generator) < share)
        * sigma
        * torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
        for _ in range(clients)
    ]
    noisy = signal + sum(masked_noise) / clients
    correct, paper = share * sigma**2 / clients, clients * share * sigma**2
    errors = {v: energy(gradveil.compensate({"w": noisy}, v)["w"] - signal) for v in (correct, paper)}
    uncompensated = energy(noisy - signal)
    assert errors[correct] < 0.2 * uncompensated
    assert errors[paper] > 0.9 * uncompensated
    # For a signal whose eigenvalues lie in the paper's band it is worse than useless: it removes the signal.
    weak = signal * (paper / (COLUMNS / 4)) ** 0.5
    noisy = weak + sum(masked_noise) / clients
    errors = {v: energy(gradveil.compensate({"w": noisy}, v)["w"] - weak) for v in (correct, paper)}
    assert errors[correct] < energy(noisy - weak) < errors[paper]


def test_layers_meta_and_input_are_kept(generator):
    update = Update({"a": torch.randn(7, 3, generator=generator), "b": torch.zeros(0, 2), "c": torch.tensor(2.0)})
    update.meta.samples = 9
    copies = {name: value.clone() for name, value in update.items()}
    got = gradveil.compensate(update, 0.5)
    assert {name: value.shape for name, value in got.items()} == {name: value.shape for name, value in update.items()}
    assert got.meta.samples == 9
    assert all(torch.equal(update[name], copies[name]) for name in copies)
    assert all(torch.equal(value, copies[name]) for name, value in gradveil.compensate(update, 0.0).items())
    assert gradveil.compensate({"w": torch.ones(3, dtype=torch.float64)}, 0.1)["w"].dtype == torch.float64


def test_misuse_is_refused():
    with pytest.raises(ParameterError, match="compensate: variance must be a number of at least 0, got -1"):
        gradveil.compensate({"w": torch.ones(3)}, -1)
    with pytest.raises(ParameterError, match="compensate: aspect must be a number of at least 1, got 0.5"):
        gradveil.compensate({"w": torch.ones(3)}, 1.0, aspect=0.5)
    with pytest.raises(InputError, match="compensate: gradients must be finite"):
        gradveil.compensate({"w": torch.tensor([1.0, torch.nan])}, 1.0)
    with pytest.raises(InputError, match="expected gradients by parameter name, got none"):
        gradveil.compensate({}, 1.0)


def test_a_real_aggregate_comes_nearer_but_loses_direction():
    """On real gradients the distance falls because nearly everything is dropped; the cosine shows what that costs."""
    digits = data.load("mnist").train
    model = models.create("mnist-cnn", input_shape=(1, 28, 28), classes=10)
    task = gradveil.Task(model, input_shape=(1, 28, 28), classes=10)
    clean = weighted_mean([Update(task.gradients(*digits.batch(torch.arange(i, i + 8)))) for i in range(0, 80, 8)])
    noisy = gradveil.defense("gaussian-noise", std=0.1 / 10**0.5).perturb(clean, generator=derived_generator(0))
    got = gradveil.compensate(noisy, 0.01 / 10)

    def flat(update):
        return torch.cat([value.flatten() for value in update.values()])

    def cosine(update):
        return float(torch.nn.functional.cosine_similarity(flat(update), flat(clean), dim=0))

    assert energy(flat(got) - flat(clean)) < energy(flat(noisy) - flat(clean))
    assert cosine(got) < cosine(noisy)
