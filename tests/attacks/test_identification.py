"""Which of some candidates a client trained on."""

import pytest
import torch
from torch import nn

import gradveil
from gradveil import metrics
from gradveil.attacks._candidates import CandidateClients
from gradveil.attacks._ridge import DualRidge, WeightedGrams, weighted_gram, weighted_products
from gradveil.core.errors import InputError, ThreatModelError

COUNT = 24
COMPOSED = ("top-k:keep=0.3+error-feedback", "gaussian-noise:std=0.01+top-k:keep=0.5", "top-k+gaussian-noise:std=0.01")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def task():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(36, 4)
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model[0].weight *= 3
    return gradveil.Task(model, input_shape=(3, 8, 8), classes=4)


@pytest.fixture
def candidates():
    return torch.rand(COUNT, 3, 8, 8, generator=seeded(1)), torch.arange(COUNT) % 4


def shared(task, candidates, members, defense="none", seed=0, **others):
    return gradveil.defense(defense).share(
        task, *(part[members] for part in candidates), generator=seeded(seed), memory={}, **others
    )


def scores(task, update, candidates, attack="identification", **threat):
    threat = gradveil.ThreatModel(**threat)
    return gradveil.attack(attack).identify(task, update, candidates, threat, generator=seeded()).scores


def is_member(members):
    return torch.isin(torch.arange(COUNT), torch.as_tensor(members))


class TestRidge:
    @pytest.fixture
    def problem(self):
        rows, update = torch.randn(5, 40, generator=seeded(), dtype=torch.float64), torch.randn(40, generator=seeded(1))
        return rows, (rows[0] + rows[3]) / 2 + 0.3 * update

    def test_ratios_are_those_of_the_normal_densities(self, problem):
        """Against the densities themselves, with covariances of 40 x 40 values."""
        rows, update = problem
        share, products = 0.5, weighted_products(rows, update[None])
        ridge = DualRidge(weighted_gram(rows), 40)
        fit = ridge.fit(products, update.square().sum()[None], share=share)
        mean = rows.mean(0, keepdim=True)
        basis = torch.eye(40, dtype=torch.float64) - mean.T @ mean / mean.square().sum()
        centred, target = rows @ basis, basis @ update

        def cost(signal, penalty):
            covariance = signal * (centred.T @ centred + penalty * torch.eye(40, dtype=torch.float64))
            return covariance.logdet() + target @ torch.linalg.solve(covariance, target)

        penalties = [float(ridge.decomposition[0][-1]) * 10 ** (-12 + number / 4) for number in range(61)]
        found = {}
        for penalty in penalties[20:]:
            length = target @ torch.linalg.solve(centred.T @ centred + penalty * torch.eye(40), target)
            found[penalty] = float(length) / 40, float(cost(length / 40, penalty))
        penalty = min(found, key=lambda each: found[each][1])
        signal = found[penalty][0]
        for place in range(5):
            others = torch.cat([centred[:place], centred[place + 1 :]])
            covariance = signal * (others.T @ others + penalty * torch.eye(40, dtype=torch.float64))
            explained = target - share * centred[place]
            ratio = (
                target @ torch.linalg.solve(covariance, target) - explained @ torch.linalg.solve(covariance, explained)
            ) / 2
            assert float(fit.ratios[0, place]) == pytest.approx(float(ratio), rel=1e-6)
        coefficients = torch.linalg.solve(
            centred @ centred.T + penalty * torch.eye(5, dtype=torch.float64), centred @ target
        )
        torch.testing.assert_close(fit.coefficients[0], coefficients)

    def test_weights_are_as_good_as_scaled_values(self, problem):
        rows, _ = problem
        weights = torch.rand(40, generator=seeded(3), dtype=torch.float64)
        torch.testing.assert_close(weighted_gram(rows, weights), (rows * weights.sqrt()) @ (rows * weights.sqrt()).T)
        torch.testing.assert_close(weighted_products(rows, rows, weights), weighted_gram(rows, weights))

    def test_single_precision_leaves_a_small_error(self):
        rows, weights = torch.randn(150, 3000, generator=seeded()), torch.rand(3000, generator=seeded(1))
        exact, fast = (weighted_gram(rows, weights, exact=exact) for exact in (True, False))
        assert 0 < float((exact - fast).abs().max()) < 1e-6 * float(exact.max())
        assert fast.dtype == torch.float64
        double = rows.double()
        assert torch.equal(weighted_gram(double, exact=False), weighted_gram(double))

    def test_gram_matrices_follow_the_weights(self):
        """Each is computed from another one; against the matrix itself."""
        rows = torch.randn(150, 60, generator=seeded())
        grams, weights = WeightedGrams(rows), torch.ones(60)
        for changes in (0, 3, 30, 57, 5):
            weights = weights.clone()
            weights[torch.randperm(60, generator=seeded(changes))[:changes]] *= 0.5 if changes == 3 else 0
            expected = (rows.double() * weights) @ rows.double().T
            torch.testing.assert_close(grams.under(weights), expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("noise", [0.0, 1e-3, 1.0])
    @pytest.mark.parametrize("begin", [1e-9, 1.0, 1e9])
    def test_a_search_nearby_finds_what_the_whole_grid_finds(self, noise, begin, monkeypatch):
        rows = torch.randn(30, 400, generator=seeded(), dtype=torch.float64)
        update = (rows[0] + rows[3]) / 2 + noise * torch.randn(400, generator=seeded(1), dtype=torch.float64)
        products, squares, least = weighted_products(rows, update[None]), update.square().sum()[None], torch.zeros(1)
        ridge = DualRidge(weighted_gram(rows), 400)
        slow = ridge.fit(products, squares, share=0.5)
        fast = ridge.near(products, squares, torch.tensor([begin]), share=0.5, least_noise=least)
        assert sorted(fast.ratios[0].topk(2).indices.tolist()) == [0, 3]
        if not noise:  # the least penalty is the best
            return
        assert float(fast.cost) == pytest.approx(float(slow.cost), abs=2)
        assert abs(float((fast.penalty / slow.penalty).log10())) <= 0.25
        monkeypatch.setattr("gradveil.attacks._ridge._RATIOS", fast.penalty / ridge.decomposition[0][-1])
        same = ridge.fit(products, squares, share=0.5)
        for field in ("cost", "coefficients", "of_mean", "ratios"):
            torch.testing.assert_close(getattr(fast, field), getattr(same, field), rtol=1e-4, atol=1e-6, msg=field)


@pytest.mark.parametrize("form", ["ridge", "likelihood"])
def test_one_example_is_named(form, task, candidates):
    update = shared(task, candidates, [5])
    assert int(scores(task, update, candidates, f"identification:form={form}").argmax()) == 5


@pytest.mark.parametrize("local", [None, gradveil.LocalSteps(epochs=2, batch_size=2, lr=0.01)])
def test_a_whole_batch_is_named(local, task, candidates):
    members = [1, 6, 11, 20]
    update = shared(task, candidates, members, local=local)
    threat = gradveil.ThreatModel(batch_size=4, local=local)
    found = gradveil.attack("identification").identify(task, [update, update], candidates, threat)
    assert found.scores.shape == (2, COUNT)
    assert sorted(found.named(4)[1].tolist()) == members
    assert found.seconds > 0


class TestLocalSteps:
    LOCAL = gradveil.LocalSteps(epochs=5, lr=0.5)

    def test_one_table_for_all_paths_is_as_good_as_one_for_each(self, task, candidates):
        """Against all candidates' gradients in the middle of each client's own path."""
        local = gradveil.LocalSteps(epochs=5, lr=1.0)
        games = [torch.randperm(COUNT, generator=seeded(game))[:10] for game in range(8)]
        updates = [shared(task, candidates, members, local=local) for members in games]
        areas = {}
        for path in ("start", "shared", "midpoint", "evidence"):
            every = scores(task, updates, candidates, f"identification:path={path}", batch_size=10, local=local)
            each = [metrics.auc(one, is_member(members)) for one, members in zip(every, games, strict=True)]
            areas[path] = sum(each) / len(each)
        assert areas["start"] < areas["shared"], areas
        assert areas["shared"] > areas["midpoint"] - 0.01, areas
        assert areas["evidence"] > areas["midpoint"] - 0.01, areas

    def test_a_single_update_has_its_own_path(self, task, candidates):
        """In double precision, because in single the two round differently, see `weighted_gram`."""
        task, candidates = task.to(torch.float64), (candidates[0].double(), candidates[1])
        update = shared(task, candidates, [1, 6, 11], local=self.LOCAL)
        own, same = (
            scores(task, update, candidates, f"identification:path={path}", batch_size=3, local=self.LOCAL)
            for path in ("midpoint", "shared")
        )
        torch.testing.assert_close(own, same)

    def test_a_sum_of_gradients_takes_one_backward_pass(self, task, candidates):
        places, weights = torch.tensor([3, 0, 9]), torch.tensor([0.5, -2.0, 1.5])
        [fast] = CandidateClients([task], candidates).weighted_sum(places, weights)
        slow = task.per_example_gradients(*(part[places] for part in candidates))
        for name, value in slow.items():
            torch.testing.assert_close(fast[name], torch.tensordot(weights, value, 1))


@pytest.mark.parametrize("spec", ["top-k:keep=0.1", "gradient-dropout:keep=0.6,std=0.5", "quantization:bits=3"])
def test_updates_are_read_together_as_they_are_alone(spec, task, candidates):
    games = [[1, 6, 11], [2, 3, 20], [0, 5, 9]]
    updates = [shared(task, candidates, members, spec, seed) for seed, members in enumerate(games)]
    threat = {"batch_size": 3, "adaptive": True, "defense": gradveil.defense(spec)}
    together = scores(task, updates, candidates, **threat)
    for update, one in zip(updates, together, strict=True):
        alone = scores(task, update, candidates, **threat)[0]
        assert float(torch.corrcoef(torch.stack([alone, one]))[0, 1]) > 0.99
        assert sorted(alone.topk(3).indices.tolist()) == sorted(one.topk(3).indices.tolist())


LOCAL = gradveil.LocalSteps(epochs=2, batch_size=2, lr=0.01)


@pytest.mark.parametrize(
    ("spec", "attack", "adaptive", "local"),
    [
        ("none", "identification", False, None),
        ("none", "identification:form=matched-filter", False, None),
        ("none", "identification", False, LOCAL),
        ("none", "identification:path=shared", False, LOCAL),
        ("top-k:keep=0.3", "identification", True, None),
        ("top-k:keep=0.3", "identification", True, LOCAL),
        ("gradient-dropout:keep=0.6,std=0.5", "identification", True, LOCAL),
        ("dp-sgd:noise_multiplier=0.01", "identification", True, None),
        ("ats:policy=invert", "identification", True, None),
    ],
)
def test_a_question_about_some_candidates_is_answered_as_if_there_were_no_others(
    spec, attack, adaptive, local, task, candidates
):
    """Every question against a call of its own with these candidates alone."""
    update = shared(task, candidates, [1, 6, 11], spec, local=local)
    among = torch.stack([torch.ones(COUNT).bool(), torch.arange(COUNT) < 17, torch.arange(COUNT) % 3 > 0])[None]
    threat = {"batch_size": 3, "adaptive": adaptive, "defense": gradveil.defense(spec), "local": local}
    asked = gradveil.attack(attack).identify(
        task, update, candidates, gradveil.ThreatModel(**threat), among=among, generator=seeded()
    )
    assert asked.scores.shape == among.shape
    assert asked.named(1).shape == (1, 3, 1)
    for question, scored in zip(among[0], asked.scores[0], strict=True):
        alone = scores(task, update, [part[question] for part in candidates], attack, **threat)[0]
        assert scored[~question].isneginf().all()
        found = scored[question]
        assert float(torch.corrcoef(torch.stack([alone, found]))[0, 1]) > 0.99
        assert alone.topk(2).indices.tolist() == found.topk(2).indices.tolist()


def test_questions_about_several_clients_with_public_examples(task, candidates):
    games = [[1, 6], [9, 2], [20, 3]]
    updates = [shared(task, candidates, members, "top-k:keep=0.5", seed) for seed, members in enumerate(games)]
    public = torch.rand(30, 3, 8, 8, generator=seeded(7)), torch.arange(30) % 4
    threat = {"batch_size": 2, "adaptive": True, "defense": gradveil.defense("top-k:keep=0.5"), "public": public}
    among = torch.ones(3, 2, COUNT, dtype=torch.bool)
    for victim, (_, other) in enumerate(games):
        among[victim, 1, other] = False
    found = gradveil.attack("identification").identify(
        task, updates, candidates, gradveil.ThreatModel(**threat), among=among, generator=seeded()
    )
    assert [sorted(row.tolist()) for row in found.named(2)[:, 0]] == [sorted(members) for members in games]
    assert found.named(1)[:, 1, 0].tolist() == [one for one, _ in games]
    whole = scores(task, updates, candidates, **threat)
    for one, other in zip(found.scores[:, 0], whole, strict=True):
        assert float(torch.corrcoef(torch.stack([one, other]))[0, 1]) > 0.99


def test_bad_questions_are_refused(task, candidates):
    attack, update, threat = gradveil.attack("identification"), shared(task, candidates, [1]), gradveil.ThreatModel()
    for among in (torch.ones(1, COUNT), torch.ones(2, 1, COUNT).bool(), torch.ones(1, 0, COUNT).bool()):
        with pytest.raises(InputError, match=r"expected among=\[victims, questions, candidates\] of booleans for 1"):
            attack.identify(task, update, candidates, threat, among=among)
    with pytest.raises(InputError, match="expected questions about at least two candidates, got one about 1"):
        attack.identify(task, update, candidates, threat, among=(torch.arange(COUNT) == 3)[None, None])


def test_the_ridge_beats_the_matched_filter(task, candidates):
    games = [torch.randperm(COUNT, generator=seeded(game))[:8] for game in range(6)]
    updates, found = [shared(task, candidates, members) for members in games], []
    for form in ("ridge", "matched-filter"):
        every = scores(task, updates, candidates, f"identification:form={form}", batch_size=8)
        found.append(sum(metrics.auc(one, is_member(members)) for one, members in zip(every, games, strict=True)) / 6)
    assert found[0] > 0.99
    assert found[1] < 0.9


@pytest.mark.parametrize("spec", ["dual-pruning:k1=0.1,k2=0.6", "gradient-dropout:keep=0.6,std=0.5", "top-k:keep=0.03"])
def test_knowledge_of_the_defense_helps(spec, task, candidates):
    results = []
    for adaptive in (False, True):
        found = []
        for game in range(6):
            members = torch.randperm(COUNT, generator=seeded(game))[:4]
            update = shared(task, candidates, members, spec, seed=game)
            threat = {"batch_size": 4, "adaptive": adaptive, "defense": gradveil.defense(spec)}
            found.append(metrics.auc(scores(task, update, candidates, **threat)[0], is_member(members)))
        results.append(sum(found) / 6)
    assert results[1] > 0.9
    assert results[1] > results[0] + 0.05


def test_noise_makes_it_harder(task, candidates):
    members = torch.tensor([3, 9, 14, 17])
    found = []
    for std in (0.0, 0.01, 10.0):
        games = [
            scores(task, shared(task, candidates, members, f"gaussian-noise:std={std}", seed), candidates, batch_size=4)
            for seed in range(8)
        ]
        found.append(sum(metrics.auc(game[0], is_member(members)) for game in games) / 8)
    assert found[0] > 0.99
    assert found[0] >= found[1] > found[2]
    assert found[2] < 0.75


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("spec", [*gradveil.list_defenses(), *COMPOSED])
def test_it_runs_against_every_defense(spec, adaptive, task, candidates):
    defense, prepared = gradveil.defense(spec).prepare(task, public=candidates, generator=seeded())
    members = torch.tensor([2, 5, 8])
    batch = [part[members] for part in candidates]
    announced = defense.announce(prepared, *batch, generator=seeded(), memory={})
    update = defense.share(prepared, *batch, generator=seeded(), memory={}, announced=announced)
    few = [part[:10] for part in candidates]
    threat = gradveil.ThreatModel(batch_size=3, adaptive=adaptive, defense=defense)
    found = gradveil.attack("identification").identify(prepared, update, few, threat, generator=seeded())
    assert found.scores.shape == (1, 10)
    assert torch.isfinite(found.scores).all()


@pytest.mark.parametrize("spec", ["none", "dual-pruning:k1=0.1,k2=0.6+error-feedback"])
def test_several_rounds_are_one_long_update(spec, task, candidates):
    defense, memory, seen, sent = gradveil.defense(spec), {}, [], task
    for number in range(2):
        update = defense.share(sent, *(part[[4, 7]] for part in candidates), generator=seeded(number), memory=memory)
        seen.append((sent, update))
        sent = sent.with_parameters({name: 0.9 * value for name, value in sent.parameters.items()})
    threat = gradveil.ThreatModel(batch_size=2, rounds=2, adaptive=True, defense=defense)
    found = gradveil.attack("identification").identify(task, gradveil.Rounds(seen), candidates, threat)
    assert sorted(found.named(2)[0].tolist()) == [4, 7]


def test_chunks_change_nothing(task, candidates, monkeypatch):
    update = shared(task, candidates, [1, 2])
    whole = scores(task, update, candidates, batch_size=2)
    monkeypatch.setattr("gradveil.attacks._candidates.chunk_size", lambda *_: 5)
    torch.testing.assert_close(scores(task, update, candidates, batch_size=2), whole, rtol=1e-3, atol=1e-3)


def test_a_subset_of_the_coordinates(task, candidates):
    members = [1, 6, 11]
    update = shared(task, candidates, members)
    whole, enough, few = (
        scores(task, update, candidates, f"identification:coordinates={most}", batch_size=3)
        for most in (100_000, task.size, 150)
    )
    assert torch.equal(whole, enough)
    assert not torch.equal(whole, few)
    assert sorted(few[0].topk(3).indices.tolist()) == members


def test_a_large_model_is_read_with_the_fit_of_some_candidates(task, candidates):
    defense = gradveil.defense("gradient-dropout:keep=0.6,std=0.5")
    members = [1, 6, 11]
    update = shared(task, candidates, members, str(defense))
    found = scores(
        task, update, candidates, "identification:coordinates=150", batch_size=3, adaptive=True, defense=defense
    )
    assert metrics.auc(found[0], is_member(members)) > 0.8


def test_the_order_of_the_candidates_does_not_matter(task, candidates):
    update = shared(task, candidates, [1, 2])
    order = torch.randperm(COUNT, generator=seeded(7))
    first = scores(task, update, candidates, batch_size=2)[0]
    mixed = scores(task, update, [part[order] for part in candidates], batch_size=2)[0]
    torch.testing.assert_close(mixed, first[order], rtol=1e-3, atol=1e-3)


def test_public_examples_are_not_scored(task, candidates):
    public = torch.rand(30, 3, 8, 8, generator=seeded(5)), torch.arange(30) % 4
    update = shared(task, candidates, [1, 2])
    assert scores(task, update, candidates, batch_size=2, public=public).shape == (1, COUNT)


def test_batch_statistics(candidates):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4)
    task = gradveil.Task(nn.Sequential(*layers), input_shape=(3, 8, 8), classes=4)
    assert task.has_batch_statistics
    assert int(scores(task, shared(task, candidates, [5]), candidates).argmax()) == 5
    games = [torch.randperm(COUNT, generator=seeded(game))[:4] for game in range(12)]
    every = scores(task, [shared(task, candidates, members) for members in games], candidates, batch_size=4)
    areas = [metrics.auc(one, is_member(members)) for one, members in zip(every, games, strict=True)]
    assert sum(areas) / len(areas) > 0.75


def test_bad_input_is_refused(task, candidates):
    attack, update = gradveil.attack("identification"), shared(task, candidates, [1, 2, 3])
    threat = gradveil.ThreatModel(batch_size=3)
    with pytest.raises(InputError, match="at least 3 candidates for updates of 3 images, got 2; add some"):
        attack.identify(task, update, [part[:2] for part in candidates], threat)
    with pytest.raises(InputError, match="at least 2 candidates for updates of 1 images, got 1"):
        attack.identify(task, shared(task, candidates, [1]), [part[:1] for part in candidates], gradveil.ThreatModel())
    with pytest.raises(InputError, match="identification: the candidates do not fit the model: Task: .*shape"):
        attack.identify(task, update, (candidates[0][:, :, :4], candidates[1]), threat)
    broken = gradveil.Update({name: torch.full_like(value, torch.nan) for name, value in update.items()}, update.meta)
    with pytest.raises(InputError, match="the update must be finite"):
        attack.identify(task, broken, candidates, threat)
    with pytest.raises(ThreatModelError, match="form=likelihood compares the update with single .*; use form=ridge"):
        gradveil.attack("identification:form=likelihood").identify(task, update, candidates, threat)
    with pytest.raises(
        ThreatModelError, match="has no reconstruction to return, it finds identification; use identify"
    ):
        attack.reconstruct(task, update, threat)
    with pytest.raises(
        ThreatModelError, match="idlg: has no identification to return, it finds reconstruction; use rec"
    ):
        gradveil.attack("idlg").identify(task, update, candidates, threat)
