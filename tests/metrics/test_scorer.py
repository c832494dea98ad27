"""Matching, labels, and the scorer that puts them together."""

import json
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil import metrics
from gradveil.core.errors import InputError
from gradveil.metrics.perceptual_distance import ARRAY_SHAPES


def images(count, seed=0, channels=1, side=16):
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(seed))


class TestMatch:
    @settings(deadline=None, max_examples=30)
    @given(order=st.permutations(range(6)), seed=st.integers(0, 2**31))
    def test_finds_the_order_of_shuffled_noisy_images(self, order, seed):
        originals = images(6, seed)
        shuffled = (0.8 * originals + 0.2 * images(6, seed + 1))[list(order)]
        found = metrics.match(originals, shuffled)
        assert [order[i] for i in found.tolist()] == list(range(6))
        assert found.dtype == torch.int64

    @settings(deadline=None, max_examples=20)
    @given(seed=st.integers(0, 2**31))
    def test_no_other_order_has_a_smaller_total_error(self, seed):
        originals, others = images(4, seed, side=3), images(4, seed + 1, side=3)

        def total(order):
            return metrics.mse(originals, others[list(order)]).sum().item()

        best = min(map(total, permutations(range(4))))
        assert total(metrics.match(originals, others).tolist()) == pytest.approx(best)

    def test_optimal_where_taking_the_nearest_first_is_not(self):
        originals = torch.tensor([0.5, 0.0]).reshape(2, 1, 1, 1)
        reconstructions = torch.tensor([0.45, 1.0]).reshape(2, 1, 1, 1)
        assert metrics.match(originals, reconstructions).tolist() == [1, 0]

    def test_tells_apart_what_differs_very_little(self):
        originals = torch.full((40, 1, 8, 8), 0.5, dtype=torch.float64)
        originals += 1e-9 * torch.arange(40).reshape(-1, 1, 1, 1)
        assert metrics.match(originals, originals.flip(0)).tolist() == list(reversed(range(40)))


class TestLabelAccuracy:
    def test_is_the_share_of_equal_labels(self):
        assert metrics.label_accuracy(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 4, 3])) == 0.5

    @pytest.mark.parametrize("guessed", [torch.tensor([1]), torch.tensor([[1, 2]])])
    def test_refuses_other_shapes(self, guessed):
        with pytest.raises(InputError, match="two vectors of the same length"):
            metrics.label_accuracy(torch.tensor([1, 2]), guessed)

    def test_refuses_no_labels(self):
        with pytest.raises(InputError, match="at least 1"):
            metrics.label_accuracy(torch.tensor([]), torch.tensor([]))


class TestScorer:
    labels = torch.tensor([3, 1, 4])

    def test_one_assignment_serves_every_metric(self, monkeypatch):
        monkeypatch.delenv("GRADVEIL_DATA", raising=False)  # LPIPS needs weights from there
        originals, order = images(3), [2, 0, 1]
        close = 0.9 * originals + 0.1 * images(3, seed=1)
        blind = metrics.Scorer().blind_scores(originals, torch.zeros_like(originals))
        score = metrics.Scorer().score(originals, close[order], self.labels, self.labels[order], blind)
        assert score == {
            "mse": pytest.approx(metrics.mse(originals, close).mean().item()),
            "psnr": pytest.approx(metrics.psnr(originals, close).mean().item()),
            "psnr_blurred": pytest.approx(metrics.psnr_blurred(originals, close).mean().item()),
            "ssim": pytest.approx(metrics.ssim(originals, close).mean().item()),
            "ssim_blurred": pytest.approx(metrics.ssim_blurred(originals, close).mean().item()),
            "lpips": None,
            "noise_ratio": pytest.approx(metrics.noise_ratio(close).mean().item()),
            "label_correct": 1.0,
            "leaked": True,
            "leak_rule": "pixels",
        }
        assert json.loads(json.dumps(score)) == score

    def test_psnr_is_the_mean_of_the_images_own(self):
        originals = torch.full((2, 1, 16, 16), 0.5)
        originals[1] = 0.0
        reconstructions = originals + torch.tensor([0.1, 0.01]).reshape(2, 1, 1, 1)
        score = metrics.Scorer().score(originals, reconstructions, self.labels[:2], self.labels[:2], None)
        assert score["psnr"] == pytest.approx((20 + 40) / 2, abs=1e-4)

    def test_labels_follow_their_images(self):
        originals = images(3)
        score = metrics.Scorer().score(originals, originals.flip(0), self.labels, self.labels, None)
        assert score["label_correct"] == pytest.approx(1 / 3)  # the same labels, two on the wrong image

    def test_lpips_is_scored_if_its_weights_are_there(self, tmp_path, monkeypatch):
        generator = np.random.default_rng(0)
        weights = {name: generator.standard_normal(shape, np.float32) for name, shape in ARRAY_SHAPES.items()}
        np.savez(tmp_path / "lpips_alex.npz", **weights)
        monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path))
        originals, others = images(3), images(3, seed=1)
        score = metrics.Scorer().score(originals, others, self.labels, self.labels, None)
        matched = others[metrics.match(originals, others)]
        assert score["lpips"] == pytest.approx(metrics.Lpips(weights)(originals, matched).mean().item())
        assert score["lpips"] != 0

    def test_leaked_as_soon_as_one_image_has(self):
        originals = images(2)
        reconstructions = torch.stack([originals[0], torch.zeros(1, 16, 16)])
        labels = self.labels[:2]

        def verdict(reconstructions, blind):
            guess = dict.fromkeys(("psnr", "psnr_blurred"), torch.tensor(blind))
            guess |= dict.fromkeys(("ssim", "ssim_blurred"), torch.tensor(blind) / 100)
            return metrics.Scorer().score(originals, reconstructions, labels, labels, guess)["leaked"]

        assert verdict(reconstructions, [10.0, 10.0]) is True
        assert verdict(reconstructions, [99.0, 0.0]) is False  # each image against its own blind guess
        assert verdict(torch.zeros_like(originals), [0.0, 0.0]) is False

    def test_without_a_blind_guess_there_is_no_verdict(self):
        originals = images(1)
        score = metrics.Scorer().score(originals, originals, self.labels[:1], self.labels[:1], None)
        assert score["leaked"] is None

    def test_nan_counts_as_grey_and_the_rest_is_clamped(self):
        originals = images(1)
        wild = originals.clone()
        wild[0, 0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 7.0])
        tame = originals.clone()
        tame[0, 0, 0, :4] = torch.tensor([0.5, 1.0, 0.0, 1.0])
        one = self.labels[:1]
        scores = [metrics.Scorer().score(originals, guess, one, one, None) for guess in (wild, tame)]
        assert scores[0] == scores[1]
        assert scores[0]["mse"] > 0
        assert torch.isnan(wild).sum() == 1  # the attack's own tensor is left alone

    def test_a_reconstruction_of_nothing_but_nan_scores_like_plain_grey(self):
        originals, one = images(1), self.labels[:1]
        nothing = torch.full_like(originals, torch.nan)
        blind = metrics.Scorer().blind_scores(originals, torch.zeros_like(originals))
        score = metrics.Scorer().score(originals, nothing, one, one, blind)
        assert score["mse"] == pytest.approx((originals - 0.5).square().mean().item())
        assert score["leaked"] is False

    def test_originals_out_of_range_are_refused(self):
        with pytest.raises(InputError, match=r"originals must lie in \[0, 1\]"):
            metrics.Scorer().score(images(3) + 1, images(3), self.labels, self.labels, None)

    def test_blind_guess_of_another_batch_is_refused(self):
        with pytest.raises(InputError, match=r"blind must hold one psnr per original, \[3\], got \[2\]"):
            metrics.Scorer().score(images(3), images(3), self.labels, self.labels, {"psnr": torch.zeros(2)})

    def test_reconstructions_that_still_carry_gradients_are_scored(self):
        originals = images(1)
        attacked = originals.clone().requires_grad_()
        score = metrics.Scorer().score(originals, attacked, self.labels[:1], self.labels[:1], None)
        assert score["psnr"] == 100
