"""What attackers make of knowing the defense."""

import math

import numpy as np
import pytest
import torch
from skimage.restoration import denoise_tv_chambolle

import gradveil
from gradveil.attacks import adaptive
from gradveil.defenses.refiner import STEP
from gradveil.errors import ThreatModelError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture() -> torch.Tensor:
    """A disc on a slope, in three colours."""
    down, across = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    disc = ((down**2 + across**2) < 0.4).float()
    return torch.stack([0.2 + 0.6 * disc, 0.5 + 0.2 * down, 0.7 - 0.4 * disc])[None]


class TestDenoising:
    def test_it_is_the_total_variation_minimum_that_scikit_image_finds(self):
        # A grey image: scikit-image smooths the channels of a colour image one by one.
        noisy = (picture()[:, :1] + 0.2 * torch.randn(1, 1, 32, 32, generator=seeded())).double()
        expected = denoise_tv_chambolle(noisy[0, 0].numpy(), weight=0.1, eps=1e-9, max_num_iter=3000)
        moved = np.sqrt(np.mean((expected - noisy[0, 0].numpy()) ** 2))
        found = adaptive.denoise(noisy, torch.tensor([moved]))[0, 0].numpy()
        assert np.abs(found - expected).max() < 0.01

    @pytest.mark.parametrize("deviation", [0.02, 0.1, 0.3])
    def test_it_goes_as_far_as_it_is_told(self, deviation):
        noisy = picture().repeat(2, 1, 1, 1) + 0.3 * torch.randn(2, 3, 32, 32, generator=seeded())
        moved = (adaptive.denoise(noisy, torch.full((2,), deviation)) - noisy).square().mean(dim=(1, 2, 3)).sqrt()
        torch.testing.assert_close(moved, torch.full((2,), deviation), rtol=1e-2, atol=0)

    def test_divergence_is_minus_the_transpose_of_the_derivatives(self):
        image = torch.randn(2, 3, 5, 7, generator=seeded(), dtype=torch.float64)
        field = torch.randn(2, 2, 3, 5, 7, generator=seeded(1), dtype=torch.float64)
        left = (adaptive._derivatives(image) * field).sum()
        torch.testing.assert_close(left, -(image * adaptive._divergence(field)).sum())

    def test_each_image_by_itself(self):
        noisy = torch.rand(3, 1, 12, 12, generator=seeded())
        wanted = torch.tensor([0.05, 0.1, 0.2])
        together = adaptive.denoise(noisy, wanted)
        alone = torch.cat([adaptive.denoise(noisy[i : i + 1], wanted[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(together, alone)

    @pytest.mark.parametrize("deviation", [0.05, 0.2])
    def test_the_noise_is_measured(self, deviation):
        noisy = picture().repeat(4, 1, 1, 1) + deviation * torch.randn(4, 3, 32, 32, generator=seeded())
        estimate = adaptive.noise_deviation(noisy)
        assert estimate.shape == (4,)
        assert estimate.mean().item() == pytest.approx(deviation, rel=0.25)


class TestUndoBlend:
    def test_it_recovers_a_blended_picture(self):
        image = picture()
        blended = torch.lerp(image, torch.rand(image.shape, generator=seeded()), 0.5)
        found = adaptive.undo_blend(blended, gradveil.defense("refiner", blend=0.5))
        before, after = (10 * math.log10(1 / (x - image).square().mean()) for x in (blended, found))
        assert before < 15
        assert after > before + 6

    def test_a_clean_picture_stays_nearly_as_it_is(self):
        image = picture()[:, 1:2]  # the slope, which the noise estimate does not see
        found = adaptive.undo_blend(image, gradveil.defense("refiner"))
        assert (found - image).abs().max() < 0.01

    def test_it_never_unblends_more_than_was_blended(self):
        noise = torch.rand(1, 1, 32, 32, generator=seeded())
        found = adaptive.undo_blend(noise, gradveil.defense("refiner", blend=0.1, iterations=1))
        limit = math.hypot(0.1 / math.sqrt(12), STEP) / 0.9
        moved = (found - (noise - 0.05) / 0.9).square().mean().sqrt().item()
        assert moved == pytest.approx(limit, rel=0.01)


class TestSolveGradient:
    def test_it_solves_the_equation(self, tiny_task, tiny_batch):
        defense = gradveil.defense("refiner", epsilon=0.3)
        shared = {name: torch.stack([value, 2 * value]) for name, value in tiny_task.gradients(*tiny_batch).items()}
        found = adaptive.solve_gradient(tiny_task, shared, defense, seeded())
        for victim in range(2):
            weights = {
                name: (found[name][victim] * theta).abs() * 0.95 ** (1 if name.startswith("0.") else 2)
                for name, theta in tiny_task.parameters.items()
            }
            reached = sum((weights[n] * (found[n][victim] - shared[n][victim]).square()).sum() for n in weights)
            known = defense.weights({n: v[victim] for n, v in shared.items()}, tiny_task.parameters)
            mean = torch.cat([value.flatten() for value in known.values()]).mean()
            assert reached.item() == pytest.approx(0.09 * mean.item(), rel=1e-5)

    def test_without_a_perturbation_there_is_nothing_to_solve(self, tiny_task, tiny_batch):
        shared = {name: value[None] for name, value in tiny_task.gradients(*tiny_batch).items()}
        found = adaptive.solve_gradient(tiny_task, shared, gradveil.defense("refiner", epsilon=0), seeded())
        assert all(torch.equal(found[name], value) for name, value in shared.items())


class TestThreatModel:
    def attack(self, task, batch, adaptive_form, **threat):
        defense = gradveil.defense("refiner", epsilon=10)
        update = defense.share(task, *batch, generator=seeded(), local=threat.get("local"))
        known = {"labels": "known", "known_labels": batch[1][None]}
        model = gradveil.ThreatModel(adaptive=adaptive_form, defense=defense, batch_size=3, **known, **threat)
        return gradveil.attack("idlg", iterations=3).reconstruct(task, update, model, generator=seeded())

    def test_the_strongest_form_is_the_default_and_acts_on_the_plain_result(self, tiny_task, tiny_batch):
        plain = self.attack(tiny_task, tiny_batch, False)
        default = self.attack(tiny_task, tiny_batch, True)
        named = self.attack(tiny_task, tiny_batch, "undo-blend")
        assert torch.equal(default.inputs, named.inputs)
        expected = adaptive.undo_blend(plain.inputs[0], gradveil.defense("refiner"))
        torch.testing.assert_close(named.inputs[0], expected)
        assert torch.equal(plain.loss, named.loss)

    def test_solving_changes_what_is_inverted(self, tiny_task, tiny_batch):
        plain, solved = (self.attack(tiny_task, tiny_batch, form) for form in (False, "solve-gradient"))
        assert not torch.equal(plain.loss, solved.loss)
        assert solved.inputs.shape == plain.inputs.shape

    def test_forms_that_do_not_exist_or_do_not_fit_are_refused(self, tiny_task, tiny_batch):
        with pytest.raises(ThreatModelError, match="no adaptive form 'magic' against refiner; it has: undo-blend, sol"):
            self.attack(tiny_task, tiny_batch, "magic")
        with pytest.raises(ThreatModelError, match="'solve-gradient' supposes updates of a single gradient"):
            self.attack(tiny_task, tiny_batch, "solve-gradient", local=gradveil.LocalSteps(lr=0.1))
        update = gradveil.defense("top-k").share(tiny_task, *tiny_batch)
        threat = gradveil.ThreatModel(adaptive=True, defense=gradveil.defense("top-k"), batch_size=3)
        with pytest.raises(ThreatModelError, match="idlg: has no adaptive form against top-k"):
            gradveil.attack("idlg").reconstruct(tiny_task, update, threat)
