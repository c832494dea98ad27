"""Rows of tables: projection against a slow reference, the prior against a histogram, the blind guess and the rule."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from gradveil.core.errors import DataError
from gradveil.metrics import Scorer, match
from gradveil.modality import MODALITIES, Column, Fragment, Table
from gradveil.modality.table import nearest_on_simplex

TABLE = Table(
    columns=(
        Column("age", 20, 70, whole=True, middle=0.4, spread=0.2),
        Column("job", categories=("baker", "clerk", "pilot"), shares=(0.5, 0.3, 0.2)),
        Column("pay", -1, 1),
        Column("sex", categories=("f", "m")),
    )
)
STORED = torch.tensor([[20, 0, -1, 1], [45, 2, 0.5, 0], [70, 1, 1, 0]], dtype=torch.float32)
INPUTS = torch.tensor([[0, 1, 0, 0, 0, 0, 1], [0.5, 0, 0, 1, 0.75, 1, 0], [1, 0, 1, 0, 1, 1, 0]])


def test_numbers_are_scaled_and_categories_expanded():
    assert torch.equal(TABLE.inputs_of(STORED), INPUTS)
    assert TABLE.input_shape(STORED.shape[1:]) == (7,)
    outside = torch.tensor([[10.0, 0, 7, 1]])  # a test row may lie outside the range of the training rows
    assert TABLE.inputs_of(outside)[0, [0, 4]].tolist() == [0, 1]


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=6))
def test_blocks_move_to_the_nearest_point_of_the_simplex(values):
    block = torch.tensor(values, dtype=torch.float64)
    found = nearest_on_simplex(block)
    assert found.sum().item() == pytest.approx(1)
    assert (found >= 0).all()
    assert torch.equal(nearest_on_simplex(found), found)
    # Of the nearest point y and any corner z, (x - y) (z - y) <= 0 (the variational inequality of a projection).
    for corner in torch.eye(len(values), dtype=torch.float64):
        assert (block - found) @ (corner - found) <= 1e-9 * (1 + block.abs().max())


def test_the_projection_is_what_a_slow_optimiser_finds():
    block = torch.tensor([0.9, 0.4, -0.3, 0.2], dtype=torch.float64)
    slow = minimize(
        lambda y: ((y - block.numpy()) ** 2).sum(),
        [0.25] * 4,
        bounds=[(0, 1)] * 4,
        constraints={"type": "eq", "fun": lambda y: y.sum() - 1},
        tol=1e-12,
    )
    torch.testing.assert_close(nearest_on_simplex(block), torch.from_numpy(slow.x), rtol=0, atol=1e-5)


def test_huge_values_do_not_overflow():
    huge = torch.tensor([3e38, -3e38, 3e38])
    assert nearest_on_simplex(huge).tolist() == [0.5, 0, 0.5]


def test_the_largest_value_of_a_block_decides():
    soft = torch.tensor([[0.2, 0.1, 0.5, 0.4, 0.9, 0.3, 0.2]])
    assert TABLE.decode(soft).tolist() == [[pytest.approx(0.2), 0, 1, 0, pytest.approx(0.9), 1, 0]]


def test_the_prior_is_half_the_surprise_per_value():
    # The jobs of the three rows: baker, pilot, clerk; both sexes count as equally frequent.
    expected = sum(abs(x - 0.4) / 0.2 for x in (0, 0.5, 1)) + sum(abs(x - 0.5) / 0.25 for x in (0, 0.75, 1))
    expected += -sum(map(math.log, (0.5, 0.2, 0.3))) + 3 * math.log(2)
    assert TABLE.prior(INPUTS).item() == pytest.approx(expected / (2 * INPUTS.numel()))
    # A search may leave the simplex for a while; that must not look likely.
    assert TABLE.prior(-5 * INPUTS) > TABLE.prior(INPUTS)


def test_the_blind_guess_has_medians_and_modes():
    stored = torch.tensor([[30, 2, 0, 1], [40, 1, 0.2, 1], [65, 1, -1, 0], [20, 0, 0, 0]])
    guess = TABLE.blind(stored, torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1]), 2)
    assert torch.equal(guess[0], TABLE.inputs_of(torch.tensor([[40.0, 1, 0, 1]]))[0])
    assert torch.equal(guess[1], TABLE.inputs_of(stored[3:])[0])


def test_cells_within_the_tolerance_count():
    found = INPUTS.clone()
    found[0, 0] = 0.049  # of the range
    found[1, 0] = 0.56
    found[2, 1:4] = torch.tensor([0.4, 0.35, 0.25])  # another category
    scores = Scorer(TABLE).compute(INPUTS, found)
    assert scores["cells"].tolist() == [100, 75, 75]
    assert scores["numeric_cells"].tolist() == [100, 50, 100]
    assert scores["categorical_cells"].tolist() == [100, 100, 50]
    numeric = Table(columns=TABLE.columns[:1])
    assert Scorer(numeric).compute(INPUTS[:, :1], INPUTS[:, :1])["categorical_cells"] is None


def test_rows_are_matched_by_their_cells():
    found = INPUTS[[2, 0, 1]].clone()
    found[0, 0] = 0.0  # far in one number, but still the row with the most cells in common
    assert match(INPUTS, found, TABLE).tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("cells", "blind", "leaked"),
    [
        (100, 90, True),
        (94, 90, False),
        (95, 90, True),
        (80, 60, True),
        (79, 60, False),
        (60, 0, True),
        (49, 0, False),
        (100, 100, False),
        (100, None, True),
        (40, None, False),
        (None, 50, False),
    ],
)
def test_a_leak_recovers_half_of_what_the_guess_misses(cells, blind, leaked):
    guess = None if blind is None else {"cells": blind}
    assert TABLE.leak_rule({"cells": cells}, guess) == ("cells" if leaked else None)


def test_what_was_recovered_is_marked():
    found = INPUTS.clone()
    found[0, 0], found[0, 1:4] = 0.3, torch.tensor([0.0, 1, 0])
    row = TABLE.write(found, INPUTS)[0]
    assert row == [
        Fragment("35", False, "age"),
        Fragment("clerk", False, "job"),
        Fragment("-1", True, "pay"),
        Fragment("m", True, "sex"),
    ]
    assert [fragment.recovered for fragment in TABLE.write(INPUTS, None)[1]] == [None] * 4
    assert TABLE.write(INPUTS, None)[1][2].text == "0.5"


def test_settings_survive_json():
    settings = json.loads(json.dumps(dict(TABLE.settings)))
    assert MODALITIES.create("table").with_settings(settings) == TABLE


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (STORED.double(), r"rows must be float32 \[N, 4\], got float64 \[3, 4\]"),
        (STORED[:, :3], r"got float32 \[3, 3\]"),
        (torch.full((1, 4), torch.nan), "must be finite"),
        (torch.tensor([[20.0, 3, 0, 0]]), "an index below 3 in the categorical column 'job', got 3"),
        (torch.tensor([[20.0, 0.5, 0, 0]]), "got 0.5"),
    ],
)
def test_other_rows_are_refused(stored, message):
    with pytest.raises(DataError, match=message):
        TABLE.check_stored("here:", stored)


@pytest.mark.parametrize("column", [{"low": 1.0, "high": 1.0}, {"categories": ("a",)}])
def test_a_column_needs_two_values(column):
    with pytest.raises(DataError, match="column 'x': expected at least two different values, got one"):
        Column("x", **column)
