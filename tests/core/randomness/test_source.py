import numpy as np
import pytest
import torch
from scipy import stats

from gradveil.core.errors import ParameterError
from gradveil.core.randomness import SecureSource, SeededSource, source_of
from gradveil.core.randomness.discrete import grid_step


def test_none_gives_a_secure_source_and_a_generator_a_seeded_one():
    assert source_of(None).secure
    assert not source_of(torch.Generator()).secure
    source = SecureSource()
    assert source_of(source) is source


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", [1e-3, 0.3, 40.0])
def test_noisy_values_lie_on_the_grid_for_any_value(dtype, std):
    step = grid_step(std)
    values = torch.linspace(-3 * std, 3 * std, 20_000, dtype=dtype)
    for noisy in (
        SecureSource().add_normal(values, std),
        SecureSource().add_laplace(values, std),
        SecureSource().add_normal(values, torch.full_like(values, std), typical=std),
        SecureSource().replace_normal(values, std, torch.arange(20_000) % 2 == 0),
        SecureSource().add_normal(values, std, where=torch.arange(20_000) % 2 == 0),
    ):
        assert noisy.dtype == dtype
        steps = noisy.double() / step
        exact = steps.abs() < 2**24  # float32 rounds larger sums
        assert torch.equal(steps[exact], steps[exact].round())


@pytest.mark.parametrize("kind", ["normal", "normal each", "laplace"])
def test_noise_has_its_deviation_and_distribution(kind):
    values = torch.full((400_000,), 0.123)
    source = SecureSource()
    if kind == "laplace":
        noise, law = source.add_laplace(values, 0.3) - values, stats.laplace(scale=0.3 / 2**0.5)
    elif kind == "normal":
        noise, law = source.add_normal(values, 0.3) - values, stats.norm(scale=0.3)
    else:
        each = torch.full_like(values, 0.3)
        noise, law = source.add_normal(values, each, typical=1.0) - values, stats.norm(scale=0.3)
    assert stats.kstest(noise.double().numpy(), law.cdf).pvalue > 1e-6


def test_values_without_noise_are_only_put_on_the_grid():
    values, where = torch.randn(1000, generator=torch.manual_seed(0)), torch.arange(1000) % 3 == 0
    noisy = SecureSource().add_normal(values, 0.3, where=where)
    assert bool(((noisy - values).abs()[~where] <= grid_step(0.3)).all())
    assert bool(((noisy - values).abs()[where] > 1e-6).all())
    assert torch.equal(SecureSource().add_normal(values, 0.0), values)
    with pytest.raises(ValueError, match="typical"):
        SecureSource().add_normal(values, torch.ones(1000))


def test_uniform_integers_and_permutations():
    source = SecureSource()
    assert stats.kstest(source.uniform(torch.empty(100_000)).numpy(), "uniform").pvalue > 1e-6
    assert stats.kstest(source.uniform(torch.empty(100_000, dtype=torch.float64)).numpy(), "uniform").pvalue > 1e-6
    assert stats.chisquare(np.bincount(source.integers(7, 70_000), minlength=7)).pvalue > 1e-6
    orders = torch.stack([source.permutation(4) for _ in range(4800)])
    assert torch.equal(orders.sort(1).values, torch.arange(4).expand(4800, 4))
    codes = (orders * torch.tensor([64, 16, 4, 1])).sum(1)
    counts = torch.unique(codes, return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts.numpy()).pvalue > 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_at_the_end(dtype):
    values, source = torch.full((100_000,), 0.5, dtype=dtype), SecureSource()
    for noisy in (
        source.add_normal(values, 0.3),
        source.add_laplace(values, 0.3),
        source.add_normal(values, torch.full_like(values, 0.3), typical=0.3),
        0.5 + 0.3 * source.normal(values),
    ):
        assert noisy.dtype == dtype
        assert float(noisy.float().std()) == pytest.approx(0.3, rel=0.02)
    assert source.uniform(values).dtype == dtype
    assert float(source.uniform(values).max()) < 1


def test_zero_has_no_sign():
    tiny = torch.full((2000,), -1e-12)
    for noisy in (
        SecureSource().add_normal(tiny, 0.3, where=torch.zeros(2000, dtype=torch.bool)),
        SecureSource().add_normal(tiny, torch.zeros(2000), typical=0.3),
        SecureSource().replace_normal(tiny, 0.3, torch.zeros(2000, dtype=torch.bool)),
    ):
        assert not noisy.any()
        assert not noisy.signbit().any()


@pytest.mark.parametrize("std", [1e-300, 1e300])
def test_deviations_that_no_grid_can_represent_are_refused(std):
    for add in (SecureSource().add_normal, SecureSource().add_laplace):
        with pytest.raises(ParameterError, match="standard deviation must be from 1e-280 to 1e\\+280"):
            add(torch.zeros(20, dtype=torch.float64), std)


def test_shapes_strides_and_empty_tensors():
    source = SecureSource()
    assert source.normal(torch.empty(0, 3)).shape == (0, 3)
    assert source.add_normal(torch.empty(0), 1.0).shape == (0,)
    assert source.add_laplace(torch.empty(0), 1.0).shape == (0,)
    assert source.add_normal(torch.tensor(2.0), 1e-6).item() == pytest.approx(2.0, abs=1e-4)
    strided = torch.arange(12.0).view(3, 4).t()
    assert torch.allclose(source.add_normal(strided, 1e-6), strided, atol=1e-4)


# -- what floating point reveals -------------------------------------------------------------------------------------


def off_grid(noisy):
    """The share of the small outputs that are not multiples of 2^-24."""
    small = noisy[noisy.abs() < 0.25].double() * 2**24
    assert len(small) > 10_000
    return float((small != small.round()).double().mean())


def test_the_last_bits_of_four_added_draws_reveal_the_value():
    """Adding up four float32 draws, as Opacus' secure mode does, hides the noise's grid, not the sum's rounding."""
    generator = torch.Generator().manual_seed(0)
    noise = sum(torch.randn(2_000_000, generator=generator) for _ in range(4)) / 2 * 10.0
    assert off_grid(noise) > 0.03
    assert off_grid(noise + 1.0) == 0


def test_the_last_bits_of_secure_noise_reveal_nothing():
    zero, one = (SecureSource().add_normal(torch.full((1_000_000,), value), 10.0) for value in (0.0, 1.0))
    assert off_grid(zero) == off_grid(one) == 0
    # Nothing lies below the noise's grid; above it every residue is equally probable for both values.
    residues = [np.bincount((x.double() / grid_step(10.0)).long().numpy() % 64, minlength=64) for x in (zero, one)]
    assert stats.chi2_contingency(np.stack(residues)).pvalue > 1e-6


def test_seeded_noise_is_what_torch_draws():
    generator, again = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    values = torch.linspace(0, 1, 50)
    assert torch.equal(SeededSource(generator).add_normal(values, 0.5), values + 0.5 * torch.randn(50, generator=again))
