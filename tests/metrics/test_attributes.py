"""Figures of attribute inference, against sums by hand."""

import math

import pytest
import torch

from gradveil.core.errors import InputError
from gradveil.metrics import attribute_summary

SCORES = torch.tensor([[0.7, 0.3], [0.4, 0.6], [0.2, 0.8], [0.9, 0.1]], dtype=torch.float64).log()
BASELINE = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.75, 0.25], [0.75, 0.25]], dtype=torch.float64).log()


def test_figures_by_hand():
    found = attribute_summary(SCORES, BASELINE, torch.tensor([0, 0, 1, 0]))
    assert found["accuracy"].value == 0.75
    assert found["baseline"].value == 0.5  # of equal rates, the first is guessed
    assert found["lift"].value == 0.25
    gains = [math.log2(0.7 / 0.5), math.log2(0.4 / 0.25), math.log2(0.8 / 0.25), math.log2(0.9 / 0.75)]
    assert found["bits"].value == pytest.approx(sum(gains) / 4)
    assert found["lift"].high == math.inf  # four victims are too few for an interval


def test_what_says_no_more_than_the_label_adds_nothing():
    found = attribute_summary(BASELINE, BASELINE, torch.tensor([0, 1, 0, 1]))
    assert found["lift"].value == found["bits"].value == 0


def test_bad_input_is_refused():
    with pytest.raises(InputError, match=r"expected scores and baseline .* got \[4, 2\], \[4, 2\] and \[3\]"):
        attribute_summary(SCORES, BASELINE, torch.tensor([0, 1, 0]))
    with pytest.raises(
        InputError, match="truths must lie in 0 to 1, got 0 to 2; public data must have every attribute"
    ):
        attribute_summary(SCORES, BASELINE, torch.tensor([0, 1, 2, 0]))
