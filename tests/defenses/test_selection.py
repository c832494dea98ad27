"""The linear-time selection, compared with sorting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.defenses import _selection as selection
from gradveil.defenses._selection import keep_ranks, largest

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def inputs(kind: str, size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    kinds = {
        "normal": values,
        "tied": values.round(),
        "equal": torch.full((size,), -0.3),
        "zeros": torch.zeros(size) * values.sign(),
        "sparse": values * (values > 1.5),
        "heavy": values.pow(9).clamp(-6e4, 6e4),
        "subnormal": values * torch.finfo(dtype).tiny * 2**-6,
        # The leading bits are all the same, so only the last digit of the radix selection distinguishes them.
        "neighbours": 1 + torch.randint(0, 4, (size,), generator=generator) * torch.finfo(dtype).eps,
    }
    return kinds[kind].to(dtype)


KINDS = ["normal", "tied", "equal", "zeros", "sparse", "heavy", "subnormal", "neighbours"]


@given(
    st.sampled_from(KINDS), st.integers(1, 300), st.integers(0, 99), st.sampled_from(DTYPES), st.floats(0, 1), st.data()
)
def test_the_histogram_selects_what_sorting_selects(kind, size, seed, dtype, upper, data):
    row = inputs(kind, size, seed, dtype)
    first = int(upper * size)
    last = data.draw(st.integers(first, size))
    fast = selection._keep_ranks_by_histogram(row, first, last)
    slow = selection._keep_ranks_by_sorting(row[None], first, last)[0]
    assert fast.dtype == dtype
    assert torch.equal(fast, slow)
    # Zeroed values must be +0, because the wire format looks at the bits.
    assert torch.equal(torch.signbit(fast) & (fast == 0), torch.signbit(slow) & (slow == 0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_of_several_clients(kind, dtype):
    rows = torch.stack([inputs(kind, selection.SHORT + 7, seed, dtype) for seed in range(3)])
    assert torch.equal(keep_ranks(rows, 50, 1000), selection._keep_ranks_by_sorting(rows, 50, 1000))
    marked = largest(rows, 123)
    assert marked.sum(1).tolist() == [123] * 3
    order = rows.abs().argsort(dim=1, descending=True, stable=True)[:, :123]
    assert marked.gather(1, order).all()


def test_the_largest_values_of_short_rows_are_marked():
    rows = torch.tensor([[1.0, -2.0, 2.0, 0.0], [3.0, 3.0, -3.0, 3.0]])
    assert largest(rows, 2).tolist() == [[False, True, True, False], [True, True, False, False]]
    assert not largest(rows, 0).any()


def test_rows_that_are_not_contiguous():
    rows = torch.randn(selection.SHORT + 1, 2, generator=torch.Generator().manual_seed(0)).t()
    assert torch.equal(keep_ranks(rows, 5, 50), selection._keep_ranks_by_sorting(rows, 5, 50))
