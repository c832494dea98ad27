import pytest
import torch

import gradveil.core.randomness.generators as generators
from gradveil.core.randomness import Draws, SeededSource, derived_generator, fresh_generator


def draw(generator, count=1000):
    return torch.rand(count, generator=generator)


def test_different_paths_give_different_streams():
    assert torch.equal(draw(derived_generator(1, "share", 2)), draw(derived_generator(1, "share", 2)))
    streams = [draw(derived_generator(seed, path)) for seed in (1, 1 + 2**32) for path in ("a", "b")]
    assert len({tuple(stream.tolist()) for stream in streams}) == 4


def test_fresh_generators_are_not_what_their_seed_would_give():
    """Torch's CPU generator uses only 32 bits of a seed, few enough to try them all."""
    generator = fresh_generator()
    guessed = torch.Generator().manual_seed(generator.initial_seed())
    assert not torch.equal(draw(generator), draw(guessed))
    assert not torch.equal(draw(fresh_generator()), draw(fresh_generator()))


def test_derived_generators_draw_uniform_independent_values():
    sample = draw(derived_generator(0), 1_000_000).double()
    assert abs(float(sample.mean()) - 0.5) < 4 * (1 / 12 / 1e6) ** 0.5
    assert abs(float(sample.var()) * 12 - 1) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([sample[:-1], sample[1:]]))[0, 1])) < 0.005


def test_the_layout_in_memory_does_not_matter():
    rows = torch.zeros(3, 40)
    strided = torch.zeros(40, 3).t()
    first = Draws([SeededSource(derived_generator(i)) for i in range(3)]).normal(rows)
    second = Draws([SeededSource(derived_generator(i)) for i in range(3)]).normal(strided)
    assert torch.equal(first, second)


def test_a_changed_layout_of_torchs_state_is_refused(monkeypatch):
    generators._check_layout.cache_clear()
    monkeypatch.setattr(generators, "_STATE_OFFSET", 32)
    with pytest.raises(RuntimeError, match="in a layout that gradveil does not know"):
        derived_generator(1)
    generators._check_layout.cache_clear()
