from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from gradveil.core.randomness import discrete
from gradveil.core.randomness._stream import Keystream, SecretKey
from gradveil.core.randomness.discrete import DiscreteGaussian, grid_step

DEVIATIONS = (2.0**24, 1.3 * 2**24, 1.999 * 2**24)


def drawn(deviation, count):
    return np.concatenate(list(DiscreteGaussian(deviation).draw(count, SecretKey().stream())))


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_the_tables_are_exact(deviation):
    """The columns of the alias table add up to the weights exactly, and weight x keep is the density."""
    sampler = DiscreteGaussian(deviation)
    weights, keep = discrete._envelope(sampler._edges.tolist(), deviation)
    mass = [0] * len(weights)
    for column, (threshold, alias) in enumerate(zip(sampler._threshold.tolist(), sampler._alias.tolist(), strict=True)):
        mass[column] += threshold
        mass[alias] += 2**32 - threshold
    assert mass == weights
    assert sum(mass) == 512 * 2**32
    assert keep.max() <= 1
    # The kept weight as a function of the edge is the density, compared as far out as double precision allows.
    near = sampler._edges < 6 * deviation
    kept = np.array([float(Fraction(w) * Fraction(k)) for w, k in zip(weights, keep, strict=True)])
    density = np.exp(-(sampler._edges[near].astype(float) ** 2) / (2 * deviation**2))
    ratio = kept[near] / density
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-13)


def test_cells_cover_the_line_without_gap():
    sampler = DiscreteGaussian(2.0**24)
    assert np.array_equal(sampler._edges, np.arange(512) * 2**20)


def test_the_quick_test_never_keeps_what_the_exact_one_would_reject():
    sampler = DiscreteGaussian(1.7 * 2**24)
    rate, count, single = sampler._rate, 400_000, np.float32
    chance, place, cell = Keystream(bytes(32)).words(3 * count).reshape(3, count)
    place, cell = (place & ((1 << 20) - 1)).astype(np.int32), (cell % 120).astype(np.intp)  # its range of use
    value = sampler._edges[cell] + place
    assert value.max() < sampler._quick_limit
    exponent = place.astype(single) * single(2 * rate) * value.astype(single)
    quick = chance.astype(single) * single(2.0**-32) + exponent < 1 - discrete._MARGIN
    # The exact condition, at the worst value of the bits that the quick test ignores.
    edge = sampler._edges[cell].astype(np.int64)
    probability = sampler._keep[cell] * np.exp(-((value - edge) * (value + edge)) * rate)
    worst = (chance.astype(np.float64) + 1) * 2.0**-32
    assert quick.mean() > 0.9
    assert bool((worst[quick] <= probability[quick]).all())


def test_zero_is_as_probable_as_it_should_be(monkeypatch):
    """A coarse sampler of the same code, with so few steps per deviation that zero is common, follows the law."""
    monkeypatch.setattr(discrete, "_CELL_BITS", 2)
    monkeypatch.setattr(discrete, "LOG2_STEPS", 6)
    deviation, count = 1.3 * 2**6, 1_000_000
    sample = np.concatenate(list(DiscreteGaussian(deviation).draw(count, SecretKey().stream())))
    values = np.arange(-2047, 2048)
    law = np.exp(-(values**2) / (2 * deviation**2))
    expected = law / law.sum() * count
    observed = np.bincount(sample + 2047, minlength=4095)
    common = expected > 50
    tails = [observed[~common].sum()], [expected[~common].sum()]
    observed, expected = np.append(observed[common], tails[0]), np.append(expected[common], tails[1])
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-6


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_values_have_the_distribution_they_should(deviation):
    """Mean, variance, kurtosis and 200 cells, each tested at a significance level of 1e-6."""
    count = 2_000_000
    sample = drawn(deviation, count) / deviation
    assert abs(sample.mean()) < 4.9 / count**0.5
    assert abs(sample.var() - 1) < 4.9 * (2 / count) ** 0.5
    assert abs((sample**4).mean() - 3) < 4.9 * (96 / count) ** 0.5
    edges = stats.norm.ppf(np.linspace(0, 1, 201))
    observed = np.histogram(sample, edges)[0]
    assert stats.chisquare(observed).pvalue > 1e-6


def test_tails_are_right_to_one_in_a_million():
    """How many of 2^24 values lie beyond 1e-2, ..., 1e-6 of the normal distribution, by exact binomial tests."""
    count, beyond = 1 << 24, {}
    for _ in range(16):
        sample = np.abs(drawn(1.5 * 2**24, count // 16) / (1.5 * 2**24))
        for power in range(2, 7):
            beyond[power] = beyond.get(power, 0) + int((sample > stats.norm.isf(10.0**-power / 2)).sum())
    for power, found in beyond.items():
        assert stats.binomtest(found, count, 10.0**-power).pvalue > 1e-6, power


def test_low_bits_are_uniform():
    """Every residue of the last eight bits is as probable as any other: the grid has no holes."""
    low = drawn(1.2 * 2**24, 1_000_000) & 255
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > 1e-6


def test_a_deviation_out_of_range_is_refused():
    with pytest.raises(ValueError, match="from 2\\^24 to 2\\^25"):
        DiscreteGaussian(2.0**25)
    assert [grid_step(std) for std in (0.3, 1e-4)] == [2.0**-26, 2.0**-38]
