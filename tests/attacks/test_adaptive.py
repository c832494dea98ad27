"""What attackers gain from knowing the defense and from seeing several rounds."""

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradveil
from gradveil.attacks import _adaptive as adaptive
from gradveil.attacks.matching import COSINE, LBFGS, SQUARED, Matching, Objective, match
from gradveil.attacks.problem import Problem
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.core.randomness import source_of
from gradveil.defenses import _transforms as transforms
from gradveil.defenses.knowledge import Knowledge, read_ranked, read_trimmed, read_weighted, typical_variance
from gradveil.defenses.refiner import Refiner
from gradveil.update import variance_factor


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def task() -> gradveil.Task:
    """Smooth, in double precision, with more parameters than pixels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(25, 40), nn.Sigmoid(), nn.Linear(40, 3)).double()
    with torch.no_grad():
        model[1].weight *= 3
    return gradveil.Task(model, input_shape=(1, 5, 5), classes=3)


@pytest.fixture
def example() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(1, 1, 5, 5, generator=seeded(1), dtype=torch.float64), torch.tensor([2])


def observed(
    defense: gradveil.Defense, task: gradveil.Task, batch: tuple[torch.Tensor, torch.Tensor], rounds: int = 1
) -> tuple[gradveil.Defense, gradveil.Task, gradveil.Rounds]:
    """What a client sends in its first rounds, with different weights in each."""
    public = torch.rand(6, *task.input_shape, generator=seeded(5), dtype=task.dtype), torch.arange(6) % task.classes
    defense, task = defense.prepare(task, public=public, generator=seeded(4))
    first = task
    memory: dict[str, torch.Tensor] = {}
    seen = []
    for number in range(rounds):
        seen.append((task, defense.share(task, *batch, generator=seeded(number), memory=memory)))
        task = task.with_parameters({name: 0.9 * value for name, value in task.parameters.items()})
    return defense, first, gradveil.Rounds(seen)


def cost_at(inputs: torch.Tensor, labels: torch.Tensor, rounds: gradveil.Rounds, knowledge: Knowledge | None) -> float:
    problem = Problem(rounds, labels[None], gradveil.ThreatModel(), seeded(), knowledge)
    cost = Matching(list(problem.updates), SQUARED).cost(problem, [task for task, _ in rounds])
    return float(cost(inputs, [update for _, update in rounds], labels))


EXACT = [  # defenses whose effect on a gradient is explained exactly by knowing them
    "dual-pruning:k1=0.1,k2=0.6",
    "dual-pruning:k1=0.1,k2=0.6+error-feedback",
    "dual-pruning:k1=0.1,k2=0.6+error-feedback:decay=0.5,clip=2.0",
    "aligned-dual-pruning:k1=0.1,keep=0.2",
    "top-k:keep=0.3",
    "top-k:keep=0.3+error-feedback",
    "top-k:keep=0.3,form=global",
    "top-k:keep=0.3,form=global+error-feedback",
    "optimal-pruning:rate=0.6",
    "gradient-dropout:keep=0.6,std=0.5",
    "gradient-dropout:keep=0.6,std=0.5+error-feedback",
    "quantization:bits=3",
    "quantization:bits=3,rounding=stochastic",
    "soteria:rate=0.5",
    "recup:epsilon=0.01",
    "risk-slicing:slices=8,ratio=0.4,std=0.5",
    "risk-slicing:slices=8,ratio=0.4,std=0.5,clip=0.01",
    "risk-slicing:slices=8,ratio=0.4,std=0.0,clip=0.01",
    "dp-sgd:clip=0.01,noise_multiplier=0.0",
    "optimal-dp-sgd:clip=0.01,std=0.0",
    "coordinate-dp-sgd:clip=0.01,std=0.0",
    "outpost:scale=0,pruned=0.7,decay=0",
    "precode:width=4",
]


class TestTheTruthExplainsTheUpdate:
    @pytest.mark.parametrize("spec", EXACT)
    @pytest.mark.parametrize("rounds", [1, 3])
    def test_the_true_image_costs_nothing_though_it_costs_the_plain_attacker_something(
        self, spec, rounds, task, example
    ):
        defense = gradveil.defense(spec)
        defense, task, seen = observed(defense, task, example, rounds)
        other = torch.rand(example[0].shape, generator=seeded(9), dtype=torch.float64)
        for name, knowledge in defense.adapt(task).items():
            if knowledge.before is None and name != "inner-half":  # which demands more than the update reveals
                true, wrong = (cost_at(inputs, example[1], seen, knowledge) for inputs in (example[0], other))
                assert true <= 1e-9 * wrong, name
                assert wrong > 1e-9, name
                assert cost_at(*example, seen, None) > 1e6 * true
        assert cost_at(*example, seen, None) > 1e-7

    @pytest.mark.parametrize("spec", ["gaussian-noise:std=0.1", "optimal-noise:std=0.1", "laplace-noise:std=0.1"])
    def test_under_noise_the_truth_costs_as_much_as_the_noise(self, spec, task, example):
        defense = gradveil.defense(spec)
        defense, task, seen = observed(defense, task, example)
        knowledge = list(defense.adapt(task).values())[-1]
        plain = Knowledge("no prior", read=knowledge.read)
        squares = [(seen[0][1][name] - value).square() for name, value in task.gradients(*example).items()]
        if spec.startswith("gaussian"):
            assert cost_at(*example, seen, plain) == pytest.approx(float(sum(s.sum() for s in squares)))
            assert knowledge.variance == pytest.approx(0.01)
        elif spec.startswith("laplace"):
            size = 0.1 / math.sqrt(2)
            expected = sum((size * s / (s + (size / 5) ** 2).sqrt()).sum() for s in squares)
            assert cost_at(*example, seen, plain) == pytest.approx(float(expected))
        else:
            weights = knowledge.read(task.gradients(*example), dict(seen[0][1])).weights
            expected = sum((weights[name] * s).sum() for name, s in zip(weights, squares, strict=True))
            assert cost_at(*example, seen, plain) == pytest.approx(float(expected))

    def test_error_feedback_must_be_known_from_the_second_round_on(self, task, example):
        defense = gradveil.defense("top-k:keep=0.3+error-feedback")
        defense, task, seen = observed(defense, task, example, rounds=3)
        unaware = gradveil.defense("top-k:keep=0.3").adapt(task)["arrived"]
        assert cost_at(*example, seen, unaware) > 1e-4

    def test_outpost_left_alone_is_matched_exactly(self, task, example):
        defense = gradveil.defense("outpost:scale=0.8,pruned=0.7")
        honest = gradveil.Rounds([(task, gradveil.defense("none").share(task, *example))])
        [knowledge] = defense.adapt(task).values()
        assert cost_at(*example, honest, knowledge) < 1e-12
        assert float(knowledge.variance(dict(honest[0][1]))) == 0
        _, _, pruned = observed(defense, task, example)
        assert float(knowledge.variance(dict(pruned[0][1]))) > 0

    @pytest.mark.parametrize("spec", EXACT)
    def test_batch_and_loop_agree(self, spec, task, example):
        defense = gradveil.defense(spec)
        defense, task, seen = observed(defense, task, example, rounds=2)
        knowledge = next(iter(defense.adapt(task).values()))
        stacked = [
            (round_task, {name: torch.stack([value, 0.7 * value]) for name, value in update.items()})
            for round_task, update in seen
        ]
        problem = Problem(stacked, example[1].expand(2, 1), gradveil.ThreatModel(), seeded(), knowledge)
        cost = Matching(list(problem.updates), COSINE).cost(problem, [round_task for round_task, _ in stacked])
        candidates = torch.rand(2, *example[0].shape, generator=seeded(7), dtype=torch.float64)
        labels, updates = example[1].expand(2, 1), [update for _, update in stacked]
        loop, batch = (
            Objective(cost, updates, labels, execution=execution)(candidates, torch.tensor([0, 1]))
            for execution in ("loop", "batch")
        )
        torch.testing.assert_close(loop, batch)
        assert loop[1].abs().max() > 0


class TestEvidence:
    def test_every_defense_declares_what_can_be_known(self, task, example):
        for name in gradveil.list_defenses():
            defense = gradveil.defense(name)
            if name == "ats":
                defense = gradveil.defense("ats", policy="flip")
            if name != "refiner":
                defense, prepared, _ = observed(defense, task, example)
            else:
                prepared = task
            forms = defense.adapt(prepared)
            assert forms, name
            assert all(form.summary for form in forms.values())
        for name in ("none", "secure-aggregation"):
            [form] = gradveil.defense(name).adapt(task).values()
            assert "nothing to know" in form.summary

    def test_the_page_names_every_form_and_no_other(self, task):
        page = (Path(__file__).parents[2] / "docs" / "adaptive-attackers.md").read_text()
        documented: dict[str, set[str]] = {}
        names: list[str] = []
        for row in re.findall(r"^\|(.*)\|$", page, flags=re.MULTILINE)[2:]:
            first, forms, _ = (cell.strip() for cell in row.split("|"))
            names = first.split(", ") if first else names
            for name in names:
                documented.setdefault(name, set()).update(forms.split(", "))
        public = torch.rand(6, 1, 5, 5, generator=seeded(), dtype=torch.float64), torch.arange(6) % 3
        settings = {"ats": [{"policy": "flip"}], "risk-slicing": [{}, {"ratio": 1.0}]}
        for name in gradveil.list_defenses():
            found: set[str] = set()
            for parameters in settings.get(name, [{}]):
                defense = gradveil.defense(name, **parameters)
                defense, prepared = defense.prepare(task, public=public, generator=seeded())
                for images, local in ((1, None), (4, None), (4, gradveil.LocalSteps(epochs=2, batch_size=1))):
                    found |= set(defense.adapt(prepared, batch_size=images, local=local) or {"expectation"})
            assert found == documented.get(name, documented["any other"]), name

    def test_ranks_over_all_layers_bound_a_layer_that_sent_nothing(self, task):
        gradient = {"small": torch.tensor([0.1, -0.2]), "large": torch.tensor([3.0, 4.0, -1.0, 2.0])}
        defense = gradveil.defense("top-k:keep=0.5,form=global")
        sent = dict(defense.perturb(gradient))
        assert not sent["small"].any()
        candidate = {"small": torch.tensor([5.0, -0.2]), "large": torch.tensor([3.0, 4.0, -9.0, 2.0])}
        evidence = defense.adapt(task)["ordered"].read(candidate, sent)
        torch.testing.assert_close(evidence.allowed["small"], torch.tensor([2.0, -0.2]))
        torch.testing.assert_close(evidence.allowed["large"][2], torch.tensor(-2.0))
        assert evidence.weights["large"].tolist() == [1, 1, 0, 1]

    def test_pruning_with_noise_is_read_where_it_arrived_and_weighed_by_its_noise(self, task, example):
        local = gradveil.LocalSteps(epochs=1, batch_size=2, lr=0.1)
        for form in ("local", "global"):
            defense = gradveil.defense("optimal-pruning", rate=0.6, std=0.1, form=form)
            defense, prepared, seen = observed(defense, task, example)
            [knowledge] = defense.adapt(prepared).values()
            assert knowledge.variance == pytest.approx(0.01)
            evidence = knowledge.read(task.gradients(*example), dict(seen[0][1]))
            kept = sum(float(weight.sum()) for weight in evidence.weights.values())
            assert kept == task.size - int(0.6 * task.size)
            steps = defense.adapt(prepared, batch_size=4, local=local)
            if form == "local":
                assert not steps  # each step may have dropped other coordinates
            else:
                assert steps["arrived"].variance == pytest.approx(0.01 * variance_factor(local, 4))

    @given(st.lists(st.floats(-3, 3), min_size=4, max_size=12), st.integers(0, 10_000), st.booleans())
    def test_ranks_are_bounds_that_the_candidate_is_moved_into(self, gradient, seed, top):
        gradient = torch.tensor(gradient, dtype=torch.float64)
        name = "dual-pruning:k1=0.2,k2=0.5" if top else "top-k:keep=0.5"
        sent = gradveil.defense(name).perturb({"w": gradient})
        candidate = 2 * torch.randn(len(gradient), generator=seeded(seed), dtype=torch.float64)
        evidence = read_ranked(withheld_top=top)({"w": candidate}, dict(sent))
        arrived = sent["w"].abs()[sent["w"] != 0]
        for index, value in enumerate(candidate.tolist()):
            if sent["w"][index] != 0:
                assert evidence.weights["w"][index] == 1
                continue
            low = arrived.min().item() if len(arrived) else math.inf
            high = arrived.max().item() if top and len(arrived) else math.inf
            choices = [min(abs(value), low), max(abs(value), high)] if top else [min(abs(value), low)]
            if not len(arrived):
                choices = [abs(value)]
            nearest = min(choices, key=lambda size, value=value: abs(size - abs(value)))
            assert abs(evidence.allowed["w"][index].item()) == pytest.approx(nearest)
            assert evidence.weights["w"][index] == 0

    def test_the_interval_costs_nothing_inside_and_the_square_outside(self):
        defense = gradveil.defense("quantization", bits=2)
        sent = dict(defense.perturb({"w": torch.tensor([0.0, 1.1, 1.8, 3.0])}))
        cells = {
            "interval": [(1.49, 1.49), (0.5, 0.5), (1.7, 1.5), (0.1, 0.5)],
            "inner-half": [(1.2, 1.2), (1.4, 1.25)],
        }
        for form, cases in cells.items():
            for candidate, expected in cases:
                evidence = defense.adapt(None)[form].read({"w": torch.tensor([0.0, candidate, 1.8, 3.0])}, sent)
                assert evidence.values["w"][1].item() == pytest.approx(expected)

    def test_trimming_believes_the_best_fitting_share(self):
        update = {"a": torch.randn(60, generator=seeded()), "b": torch.randn(40, generator=seeded(1))}
        candidate = {"a": torch.randn(60, generator=seeded(2)), "b": torch.randn(40, generator=seeded(3))}
        evidence = read_trimmed(0.8, scale=2.0)(candidate, update)
        misfits = {
            (n, i): abs(float(candidate[n][i] - update[n][i] / 2)) for n in update for i in range(len(update[n]))
        }
        best = sorted(misfits, key=misfits.__getitem__)[:68]  # 80 less three times 4
        assert {(n, i) for n in update for i in range(len(update[n])) if evidence.weights[n][i]} == set(best)
        torch.testing.assert_close(evidence.values["a"], update["a"] / 2)

    def test_weights_are_inverse_variances_up_to_a_hundred(self):
        variance = {"w": torch.tensor([0.0, 1e-9, 1.0, 2.0, 4.0, 8.0])}
        weights = read_weighted(variance)({}, {"w": torch.zeros(6)}).weights["w"]
        assert typical_variance(variance) == 2.0
        torch.testing.assert_close(weights, torch.tensor([100, 100, 2, 1, 0.5, 0.25]))

    def test_clipping_is_simulated(self, task, example):
        defense = gradveil.defense("dp-sgd", clip=0.01, noise_multiplier=0.0)
        defense, task, seen = observed(defense, task, example)
        [expected] = next(iter(defense.adapt(task).values())).expect([task.gradients(*example)], [])
        for name, value in seen[0][1].items():
            torch.testing.assert_close(expected[name], value)

    def test_compensation_is_abused_on_each_single_update(self, task, example):
        defense = gradveil.defense("risk-slicing", slices=4, ratio=0.5, std=0.3)
        defense, task, seen = observed(defense, task, example)
        before = defense.adapt(task)["compensate"].before
        updates = {name: torch.stack([value, 2 * value]) for name, value in seen[0][1].items()}
        cleaned = before(task, updates, seeded())
        for victim in range(2):
            alone = gradveil.compensate({name: value[victim] for name, value in updates.items()}, 0.5 * 0.09)
            assert all(torch.equal(cleaned[name][victim], value) for name, value in alone.items())


class TestLocalSteps:
    """Defenses that act in every local step: what an attacker knows of the sum of the steps."""

    LOCAL = (
        None,
        gradveil.LocalSteps(lr=1e-9),
        gradveil.LocalSteps(epochs=2, batch_size=1, lr=1e-9),
        gradveil.LocalSteps(epochs=2, batch_size=3, lr=1e-9),  # steps of 3, 1, 3 and 1 images
        gradveil.LocalSteps(epochs=4, lr=1e-9, momentum=0.9),
    )

    @pytest.mark.parametrize("local", LOCAL)
    @pytest.mark.parametrize("name", ["dp-sgd", "optimal-noise", "optimal-dp-sgd"])
    def test_the_noise_level_is_the_measured_one(self, name, local, task, example):
        """With four equal images, so that only the noise differs from draw to draw."""
        batch, images, draws = (example[0].expand(4, 1, 5, 5), example[1].expand(4)), 4, 40
        global_form = {} if name == "dp-sgd" else {"form": "global", "directions": 1}
        level = {"dp-sgd": "noise_multiplier"}.get(name, "std")
        both = [gradveil.defense(name, **{level: value}, **global_form) for value in (1.0, 0.0)]
        noisy, silent = (defense.prepare(task, public=example, generator=seeded()).defense for defense in both)
        [knowledge] = noisy.adapt(task, batch_size=images, local=local).values()
        clean, generator = silent.share(task, *batch, local=local), seeded()
        squares = {layer: torch.zeros_like(value) for layer, value in task.parameters.items()}
        for _ in range(draws):
            for layer, value in noisy.share(task, *batch, local=local, generator=generator).items():
                squares[layer] += (value - clean[layer]).square() / draws
        # A coordinate's weight is the typical variance over its own, so all weighted squares have the typical size.
        weights = {layer: torch.ones_like(value) for layer, value in squares.items()}
        if knowledge.read:
            weights = knowledge.read(squares, squares).weights
        levels = torch.cat([(weights[layer] * value).flatten() for layer, value in squares.items()])
        # A weight of 100 is the largest: such coordinates have hardly any noise.
        noisy_enough = torch.cat([value.flatten() for value in weights.values()]) < 100
        error = math.sqrt(2 / (draws * int(noisy_enough.sum())))  # of a mean of squares of normal numbers
        assert float(levels[noisy_enough].mean()) == pytest.approx(knowledge.variance, rel=5 * error)

    @pytest.mark.parametrize("local", [None, LOCAL[1], LOCAL[2], LOCAL[4]])
    @pytest.mark.parametrize(
        "spec", ["soteria:rate=0.5", "optimal-pruning:rate=0.5", "optimal-pruning:rate=0.5,form=global"]
    )
    def test_what_is_trusted_is_the_undefended_update(self, spec, local, task):
        """With steps so small that the weights stay where they are."""
        images, labels = torch.rand(4, 1, 5, 5, generator=seeded(1), dtype=torch.float64), torch.arange(4) % 3
        defense = gradveil.defense(spec)
        defense, _ = defense.prepare(task, public=(images, labels), generator=seeded())
        sent = defense.share(task, images, labels, local=local, generator=seeded())
        honest = gradveil.defense("none").share(task, images, labels, local=local, generator=seeded())
        forms = defense.adapt(task, batch_size=4, local=local)
        if not forms:  # each step of the local form drops its own coordinates, so attackers simulate the steps
            assert spec == "optimal-pruning:rate=0.5"
            assert local in (self.LOCAL[2], self.LOCAL[4])
            known = {"labels": "known", "known_labels": labels[None], "batch_size": 4, "local": local}
            threat = gradveil.ThreatModel(adaptive="expectation", defense=defense, **known)
            found = gradveil.attack("idlg", iterations=1).reconstruct(task, sent, threat, generator=seeded())
            assert bool(found.loss.isfinite())
            return
        [knowledge] = forms.values()
        weights = knowledge.read(dict(sent), dict(sent)).weights
        trusted = {layer: weight.expand_as(sent[layer]).bool() for layer, weight in weights.items()}
        assert sum(int(chosen.sum()) for chosen in trusted.values()) > 0.4 * task.size
        for layer, chosen in trusted.items():
            torch.testing.assert_close(sent[layer][chosen], honest[layer][chosen], rtol=0, atol=1e-7)


class TestRiskSlicingWithoutNoise:
    def test_there_is_nothing_to_know(self, task):
        [form] = gradveil.defense("risk-slicing", std=0.0).adapt(task).values()
        assert "nothing to know" in form.summary

    def test_no_slice_of_clipped_gradients_is_left_out(self, task, example):
        defense = gradveil.defense("risk-slicing", std=0.0, clip=0.01)
        defense, task, _ = observed(defense, task, example)
        forms = defense.adapt(task)
        assert list(forms) == ["prior", "compensate"]
        assert forms["prior"].read is None
        assert forms["prior"].variance == 0


class TestPrecode:
    def test_the_bottleneck_gives_its_noise_away(self, task, example):
        defense = gradveil.defense("precode", width=4)
        defense, task, seen = observed(defense, task, example)
        solved = defense.adapt(task)["solve-noise"].task(task, dict(seen[0][1]))
        drawn = task.with_noise(1, source_of(seeded(0)))
        name = f"{task.place}.noise"
        torch.testing.assert_close(solved.buffers[name], drawn.buffers[name])

    def test_it_is_left_out_for_a_batch(self, task, example):
        defense = gradveil.defense("precode", width=4)
        defense, task = defense.prepare(task, generator=seeded())
        update = task.gradients(*example)
        weights = defense.adapt(task, batch_size=2)["mute"].read(update, update).weights
        silent = {name for name, value in weights.items() if not value.any()}
        block = task.place.rpartition(".")[0]
        assert silent == {name for name in update if name.startswith(block)}
        assert silent != set(update)


class TestATS:
    @pytest.mark.parametrize("text", transforms.names())
    def test_undoing_leads_nearer_to_the_original(self, text, picture):
        image = picture.clamp(0.25, 0.5)
        changed = transforms.apply_policy(text, image)
        undone = transforms.undo_policy(text, changed)
        inside = (slice(None), slice(None), slice(14, 18), slice(14, 18))  # pixels moved out of the image are lost
        before = (changed - image)[inside].abs().mean().item()
        after = (undone - image)[inside].abs().mean().item()
        if text.split("@")[0] in ("solarize", "equalize", "autocontrast"):
            assert torch.equal(undone, changed)
        elif text.startswith("posterize"):
            cell = 2 ** (8 - int(text[-1])) / 255
            assert (undone - image).abs().max() <= cell / 2 + 1 / 255
            assert torch.equal(transforms.apply_policy(text, undone), changed)
        else:
            assert after <= before + 1 / 255
            assert after < 0.02

    def test_the_policy_that_explains_the_image_is_undone(self, picture):
        defense = gradveil.defense("ats", policy="rotate@30>invert|translate-x@0.4")
        image = picture
        for policy in defense.policies:
            found = defense.adapt(None)["invert"].after(transforms.apply_policy(policy, image))
            torch.testing.assert_close(found, transforms.undo_policy(policy, transforms.apply_policy(policy, image)))


class TestRounds:
    def test_averaging_rounds_divides_the_variance(self, task, example):
        """The cost of n rounds is that of their mean plus a constant, so its minimum has an nth of the variance."""
        defense, rounds = gradveil.defense("gaussian-noise", std=0.1), 16
        updates = [defense.share(task, *example, generator=seeded(number)) for number in range(rounds)]
        mean = gradveil.Update({name: sum(u[name] for u in updates) / rounds for name in updates[0]})
        several = gradveil.Rounds([(task, update) for update in updates])
        single = gradveil.Rounds([(task, mean)])
        [knowledge] = defense.adapt(task).values()
        of_mean = Knowledge("", variance=0.01 / rounds)
        differences = []
        for seed in range(3):
            inputs = torch.rand(example[0].shape, generator=seeded(seed), dtype=torch.float64)
            differences.append(
                cost_at(inputs, example[1], several, knowledge) - cost_at(inputs, example[1], single, of_mean)
            )
        assert max(differences) - min(differences) < 1e-9
        error = torch.cat([(mean[name] - value).flatten() for name, value in task.gradients(*example).items()])
        assert error.var().item() == pytest.approx(0.01 / rounds, rel=0.3)

    def test_rounds_help_a_plain_attacker_too(self, task, example):
        defense = gradveil.defense("gaussian-noise", std=0.02)

        def error(rounds):
            _, _, seen = observed(defense, task, example, rounds)
            threat = gradveil.ThreatModel(rounds=rounds)
            found = gradveil.attack("idlg", iterations=100).reconstruct(task, seen, threat, generator=seeded())
            return (found.inputs[0] - example[0]).square().mean().item()

        assert error(16) < 0.3 * error(1)

    def test_what_does_not_fit_is_refused(self, task, example):
        _, _, seen = observed(gradveil.defense("none"), task, example, rounds=2)
        attack = gradveil.attack("idlg", iterations=1)
        with pytest.raises(ThreatModelError, match=r"1 rounds of each victim were seen, got \[2\]"):
            attack.reconstruct(task, seen, gradveil.ThreatModel())
        with pytest.raises(InputError, match="the same weights in round 0"):
            attack.reconstruct(seen[1][0], seen, gradveil.ThreatModel(rounds=2))
        swapped = gradveil.Rounds([seen[0], (task, seen[1][1])])
        with pytest.raises(InputError, match="the same weights in round 1"):
            attack.reconstruct(task, [seen, swapped], gradveil.ThreatModel(rounds=2))
        with pytest.raises(InputError, match="at least one observed round"):
            gradveil.Rounds([])
        with pytest.raises(ThreatModelError, match="r-gap: uses neither knowledge of the defense nor several rounds"):
            gradveil.attack("r-gap").reconstruct(task, seen, gradveil.ThreatModel(rounds=2))


class TestRecovery:
    @pytest.mark.parametrize(
        "spec", ["dual-pruning:k1=0.05,k2=0.75", "top-k:keep=0.2", "soteria:rate=0.8", "precode:width=8"]
    )
    def test_what_arrived_is_enough(self, spec, task, example):
        """More values arrive than there are pixels, and they are exact: so is the image."""
        defense = gradveil.defense(spec)
        defense, task, seen = observed(defense, task, example)
        stacked = [(task, {name: value[None] for name, value in seen[0][1].items()})]
        start = torch.rand(1, *example[0].shape, generator=seeded(3), dtype=torch.float64)
        errors = []
        for knowledge in (None, next(iter(defense.adapt(task).values()))):
            problem = Problem(
                stacked, example[1][None], gradveil.ThreatModel(), seeded(), knowledge=knowledge, execution="loop"
            )
            found = match(problem, start, LBFGS(), Matching(list(problem.updates), SQUARED), iterations=300)
            errors.append((found.inputs[0] - example[0]).abs().max().item())
        assert errors[1] < 1e-3
        assert errors[0] > 100 * errors[1]

    @pytest.mark.parametrize("name", ["dlg", "idlg", "inverting-gradients", "grad-inversion"])
    def test_every_matching_attack_adapts(self, name, task, example):
        options = {
            "dlg": {"iterations": 60},
            "idlg": {"iterations": 60},
            "inverting-gradients": {"optimiser": "lbfgs", "iterations": 60, "tv": 0.0},
            "grad-inversion": {"iterations": 200, "tv": 0.0, "l2": 0.0, "seeds": 1, "lr": 0.05},
        }
        defense = gradveil.defense("gradient-dropout", keep=0.5, std=0.5)
        update = defense.share(task, *example, generator=seeded())
        attack = gradveil.attack(name, **options[name])

        def found(adaptive):
            threat = gradveil.ThreatModel(
                labels="known", known_labels=example[1][None], adaptive=adaptive, defense=defense
            )
            return attack.reconstruct(task, update, threat, generator=seeded(), execution="loop").inputs

        plain, adapted = ((found(adaptive) - example[0]).square().mean().item() for adaptive in (False, True))
        assert adapted < plain / 2


class TestExpectation:
    def test_a_defense_that_declares_no_knowledge_is_simulated(self, task, example):
        chain = gradveil.Chain(gradveil.defense("top-k", keep=0.5), gradveil.defense("quantization", bits=4))
        assert not chain.adapt(task)
        knowledge = adaptive.expectation(chain)
        _, _, seen = observed(chain, task, example)
        assert cost_at(*example, seen, knowledge) < 1e-12  # it has no randomness, so its simulation is the update
        assert cost_at(*example, seen, None) > 1e-5

    def test_the_cost_is_averaged_over_draws(self, task, example):
        noise = gradveil.defense("gaussian-noise", std=0.1)
        seen = gradveil.Rounds([(task, gradveil.Update(task.gradients(*example)))])
        size = sum(value.numel() for value in task.parameters.values())
        assert cost_at(*example, seen, adaptive.expectation(noise)) == pytest.approx(0.01 * size, rel=0.3)

    def test_slopes_are_those_of_the_undefended_gradient(self, task, example):
        [drawn, *_] = adaptive.expectation(gradveil.defense("top-k", keep=0.1)).draw(
            task, {"w": torch.arange(10.0).requires_grad_()}, *example
        )
        assert torch.equal(torch.autograd.grad(drawn["w"].sum(), drawn["w"])[0], torch.ones(10))
        assert drawn["w"].tolist() == [0] * 9 + [9]

    def test_data_dependent_defenses_are_simulated_too(self, task, example):
        class Doubling(gradveil.StepDefense):
            name = "doubling"

            def step_gradients(self, client):
                gradients = client.task.gradients(client.inputs, client.targets)
                return {name: 2 * value for name, value in gradients.items()}

        defense = Doubling()
        update = defense.share(task, *example)
        threat = gradveil.ThreatModel(adaptive=True, defense=defense)
        found = gradveil.attack("inverting-gradients", optimiser="lbfgs", iterations=40, tv=0.0).reconstruct(
            task, update, threat, generator=seeded()
        )
        assert found.execution == "loop"
        assert (found.inputs[0] - example[0]).abs().mean() < 0.1

    @pytest.mark.parametrize("name", ["dp-sgd", "optimal-noise", "soteria"])
    def test_defenses_that_use_functional_transforms_are_simulated_too(self, name, task, example):
        """An attacker on one victim differentiates with autograd; the transforms must still work inside it."""
        defense, gradients = gradveil.defense(name), task.gradients(*example)
        outside = adaptive.expectation(defense).draw(task, gradients, *example)
        inside = adaptive.expectation(defense).draw(task.by_autograd(), gradients, *example)
        for expected, drawn in zip(outside, inside, strict=True):
            assert all(torch.equal(value, drawn[layer]) for layer, value in expected.items())


class TestUndoBlend:
    def test_it_recovers_a_blended_picture(self, picture):
        image = picture
        blended = torch.lerp(image, torch.rand(image.shape, generator=seeded()), 0.5)
        found = gradveil.defense("refiner", blend=0.5).undo_blend(blended)
        before, after = (10 * math.log10(1 / (x - image).square().mean()) for x in (blended, found))
        assert before < 15
        assert after > before + 6

    def test_a_clean_picture_stays_nearly_as_it_is(self, picture):
        image = picture[:, 1:2]  # the slope, which the noise estimate does not see
        found = gradveil.defense("refiner").undo_blend(image)
        assert (found - image).abs().max() < 0.01

    def test_it_never_unblends_more_than_was_blended(self):
        noise = torch.rand(1, 1, 32, 32, generator=seeded())
        found = gradveil.defense("refiner", blend=0.1, iterations=1).undo_blend(noise)
        limit = math.hypot(0.1 / math.sqrt(12), Refiner().step) / 0.9
        moved = (found - (noise - 0.05) / 0.9).square().mean().sqrt().item()
        assert moved == pytest.approx(limit, rel=0.01)


class TestSolveGradient:
    def test_it_solves_the_equation(self, tiny_task, tiny_batch):
        defense = gradveil.defense("refiner", epsilon=0.3)
        shared = {name: torch.stack([value, 2 * value]) for name, value in tiny_task.gradients(*tiny_batch).items()}
        found = defense.solve_gradient(tiny_task, shared, seeded())
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
        found = gradveil.defense("refiner", epsilon=0).solve_gradient(tiny_task, shared, seeded())
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
        expected = gradveil.defense("refiner").undo_blend(plain.inputs[0])
        torch.testing.assert_close(named.inputs[0], expected)
        assert torch.equal(plain.loss, named.loss)

    def test_solving_changes_what_is_inverted(self, tiny_task, tiny_batch):
        plain, solved = (self.attack(tiny_task, tiny_batch, form) for form in (False, "solve-gradient"))
        assert not torch.equal(plain.loss, solved.loss)
        assert solved.inputs.shape == plain.inputs.shape

    def test_forms_that_do_not_exist_or_do_not_fit_are_refused(self, tiny_task, tiny_batch):
        with pytest.raises(ThreatModelError, match="no adaptive form 'magic' against refiner; it has: undo-blend, sol"):
            self.attack(tiny_task, tiny_batch, "magic")
        with pytest.raises(ThreatModelError, match="'solve-gradient' expects each update to be a single gradient"):
            self.attack(tiny_task, tiny_batch, "solve-gradient", local=gradveil.LocalSteps(lr=0.1))
