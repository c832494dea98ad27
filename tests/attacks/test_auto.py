"""`auto` chooses by what its own simulated clients show, and never by the victims."""

import pytest
import torch

import gradveil
from gradveil.attacks import _portfolio
from gradveil.attacks._learned import Learning
from gradveil.attacks._portfolio import Calibration, Member, Price, Trial, best_policy, distances, second_opinions
from gradveil.attacks.auto import Auto
from gradveil.attacks.findings import Reconstruction
from gradveil.core.errors import ThreatModelError
from gradveil.core.work import nominal_seconds
from gradveil.modality import IMAGE

attack_with = Auto._attack_with
SMALL = (Member("idlg", 50), Member("inverting-gradients:optimiser=lbfgs,tv=0.001", 20))


def trial(name, closeness, distances):
    return Trial(Member(name), Price(0.0, 0.0), gradveil.attack("idlg"), closeness, distances)


def public_of(task, count=200):
    generator = torch.Generator().manual_seed(5)
    images = torch.rand(count, *task.input_shape, generator=generator, dtype=task.dtype)
    return images, torch.arange(count) % task.classes


def test_the_best_median_wins():
    poor, good = trial("poor", [30.0, 9.0, 9.0], [0.0] * 3), trial("good", [12.0, 12.0, 12.0], [0.1] * 3)
    assert best_policy([poor, good], 0.5) == [good]


def test_two_members_are_used_if_their_distances_tell_which_is_right():
    one, other = trial("one", [40.0, 8.0, 41.0, 9.0], [0.01, 0.9, 0.01, 0.9]), trial("other", [20.0] * 4, [0.2] * 4)
    assert set(best_policy([one, other], 0.5)) == {one, other}
    blind = trial("blind", one.closeness, [0.01] * 4)  # it always looks right
    assert best_policy([blind, other], 0.5) == [blind]  # the better median, 24.5


def test_a_second_member_must_be_worth_half_of_the_budget():
    one, other = trial("one", [20.0, 20.0], [0.1, 0.1]), trial("other", [20.2, 20.2], [0.0, 0.2])
    assert best_policy([one, other], 0.5) == [other]


def test_a_second_opinion_must_do_no_harm():
    learned = trial("learned", [20.0, 21.0, 22.0, 23.0], [1.0, 1.2, 0.9, 1.1])
    search = trial("search", [12.0, 12.0, 12.0, 24.0], [0.1, 0.1, 0.1, 0.1])  # nearer to updates, further from examples
    weaker = trial("weaker", [15.0, 15.0, 15.0, 15.0], [2.0, 2.0, 2.0, 2.0])  # its distances show that
    assert second_opinions([learned], [search, weaker], 0.5) == [weaker]


def test_a_victim_is_not_given_to_a_search_whose_distance_misleads(monkeypatch, tiny_task, tiny_batch):
    monkeypatch.setattr("gradveil.attacks.auto.PORTFOLIO", SMALL)
    monkeypatch.setattr("gradveil.attacks.auto.second_opinions", lambda *_: [])
    threat = gradveil.ThreatModel()
    attack = gradveil.attack("auto", seconds=0.1).fit(tiny_task, threat, generator=torch.Generator().manual_seed(0))
    plain = gradveil.defense("none").share(tiny_task, tiny_batch[0][:1], tiny_batch[1][:1])
    noisy = {name: value + 100 for name, value in plain.items()}
    found = attack.reconstruct(tiny_task, noisy, threat)
    assert found.found_by[0] in attack.chosen["members"]


def test_the_distance_is_that_of_the_updates(tiny_task, tiny_batch):
    inputs, labels = tiny_batch[0][:2, None], tiny_batch[1][:2, None]
    sent = [tiny_task.gradients(x, y) for x, y in zip(inputs, labels, strict=True)]
    updates = {name: torch.stack([update[name] for update in sent]) for name in sent[0]}
    found = Reconstruction(inputs.flip(0), labels.flip(0), torch.zeros(2), torch.zeros(2))
    exact = Reconstruction(inputs, labels, torch.zeros(2), torch.zeros(2))
    assert distances(tiny_task, updates, exact, gradveil.ThreatModel()).max() < 1e-6
    flat = [torch.cat([value.flatten() for value in update.values()]) for update in sent]
    expected = [float((flat[0] - flat[1]).norm() / flat[place].norm()) for place in (0, 1)]
    got = distances(tiny_task, updates, found, gradveil.ThreatModel())
    assert got.tolist() == pytest.approx(expected, rel=1e-5)


def test_work_is_counted_and_repeats():
    layer = torch.nn.Linear(100, 100)
    batch = torch.rand(50, 100)
    assert nominal_seconds(lambda: layer(batch)) == nominal_seconds(lambda: layer(batch))
    assert nominal_seconds(lambda: [layer(batch) for _ in range(3)]) == pytest.approx(
        3 * nominal_seconds(lambda: layer(batch))
    )


def test_iterations_follow_the_budget(tiny_task):
    learning, member = Learning(torch.Generator().manual_seed(0)), Member("idlg", 1000)
    price = Calibration.of(tiny_task, gradveil.ThreatModel(), learning).price(member)
    assert price.step > 0
    affordable = member.within(price.base + 300 * price.step, price, least=20)
    assert affordable.iterations == pytest.approx(300, abs=1)
    again = member.within(3.5 * (price.base + 1000 * price.step), price, least=20)
    assert (again.iterations, again.restarts) == (1000, 3)


def test_a_surprising_victim_meets_the_next_member_too(monkeypatch, tiny_task, tiny_batch):
    monkeypatch.setattr("gradveil.attacks.auto.PORTFOLIO", SMALL)
    threat = gradveil.ThreatModel()
    attack = gradveil.attack("auto", seconds=0.1).fit(tiny_task, threat, generator=torch.Generator().manual_seed(0))
    ran = []
    monkeypatch.setattr(
        "gradveil.attacks.auto.Auto._attack_with",
        lambda self, spec, problem, progress: ran.append(spec) or attack_with(self, spec, problem, progress),
    )
    plain = gradveil.defense("none").share(tiny_task, tiny_batch[0][:1], tiny_batch[1][:1])
    noisy = {name: value + 100 for name, value in plain.items()}
    attack.reconstruct(tiny_task, noisy, threat)
    assert ran == [*attack.chosen["members"], *attack.chosen["second opinions"]][: len(ran)]
    assert len(ran) == len(attack.chosen["members"]) + 1


@pytest.mark.parametrize("granted", [True, False])
def test_it_attacks_with_what_worked_on_its_own_clients(granted, monkeypatch, tiny_task, tiny_batch):
    monkeypatch.setattr("gradveil.attacks.auto.PORTFOLIO", SMALL)
    public = public_of(tiny_task) if granted else None
    threat = gradveil.ThreatModel(public=public)
    attack = gradveil.attack("auto", seconds=0.2).fit(tiny_task, threat, generator=torch.Generator().manual_seed(0))
    assert attack.chosen["closeness"].keys() == {member.spec for member in SMALL}
    update = gradveil.defense("none").share(tiny_task, tiny_batch[0][:1], tiny_batch[1][:1])
    found = attack.reconstruct(tiny_task, update, threat, generator=torch.Generator().manual_seed(0))
    assert found.found_by[0] in attack.chosen["members"]
    alone = gradveil.attack(found.found_by[0]).reconstruct(
        tiny_task, update, threat, generator=torch.Generator().manual_seed(0)
    )
    if len(attack.chosen["members"]) == 1:
        assert torch.equal(found.inputs, alone.inputs)


def test_a_closed_form_that_is_exact_ends_the_trials():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    task = gradveil.Task(model.double(), input_shape=(1, 4, 4), classes=3)
    attack = gradveil.attack("auto").fit(task, gradveil.ThreatModel(), generator=torch.Generator().manual_seed(0))
    assert attack.chosen["members"] == ["first-layer"]
    assert list(attack.chosen["closeness"]) == ["first-layer"]


def test_a_search_that_was_cut_short_is_compared_as_it_would_attack(monkeypatch, tiny_task):
    calibration = Calibration.of(tiny_task, gradveil.ThreatModel(), Learning(torch.Generator().manual_seed(0)))
    price = Price(0.0, 0.001)

    def tried(member, closeness, iterations=10):
        attack = member.attack(iterations)
        return Trial(member, price, attack, 4 * [closeness], 4 * [0.1])

    learns, search, other = (
        Member("lti:form=linear"),
        Member("idlg", 500),
        Member("inverting-gradients:optimiser=lbfgs,tv=0.001", 500),
    )
    asked = []

    def again(_calibration, member, _price, attack, *_rest):
        asked.append(attack)
        return tried(member, 30.0, 300)

    monkeypatch.setattr(Calibration, "trial", again)
    attack, refused = gradveil.attack("auto", seconds=0.3), {}
    slow, fast = tried(search, 12.0), tried(other, 11.0)
    leads = Trial(learns, Price(0.0, 0.0), learns.attack(), 4 * [15.0], 4 * [0.5])
    compared = attack._with_a_fair_search([slow, leads, fast], calibration, refused)
    assert [one.iterations for one in asked] == [300]
    assert [one.median for one in compared] == [30.0, 15.0, 11.0]
    assert attack._with_a_fair_search(compared, calibration, refused) == compared  # a search leads
    whole = tried(search, 12.0, 300)
    assert attack._with_a_fair_search([whole, leads], calibration, refused) == [whole, leads]  # it was not cut short
    assert len(asked) == 1

    def refuses(*_):
        raise ThreatModelError("not here")

    monkeypatch.setattr(Calibration, "trial", refuses)
    assert attack._with_a_fair_search([slow, leads, fast], calibration, refused) == [leads, fast]
    assert refused == {"idlg": "not here"}


def test_it_fits_itself_if_nobody_did(monkeypatch, tiny_task, tiny_batch):
    monkeypatch.setattr("gradveil.attacks.auto.PORTFOLIO", SMALL[:1])
    update = gradveil.defense("none").share(tiny_task, tiny_batch[0][:1], tiny_batch[1][:1])
    found = gradveil.attack("auto", seconds=0.1).reconstruct(tiny_task, update, gradveil.ThreatModel())
    assert found.inputs.shape == (1, 1, *tiny_task.input_shape)


def test_a_member_that_refuses_is_replaced(monkeypatch, tiny_task, tiny_batch):
    monkeypatch.setattr("gradveil.attacks.auto.PORTFOLIO", SMALL)
    threat = gradveil.ThreatModel()
    attack = gradveil.attack("auto", seconds=0.1).fit(tiny_task, threat, generator=torch.Generator().manual_seed(0))
    first = attack.chosen["members"][0].partition(":")[0]

    def refuse(self, _problem):
        raise ThreatModelError(f"{self.name}: not this one")

    monkeypatch.setattr(_portfolio.ATTACKS.get(first), "run", refuse)
    update = gradveil.defense("none").share(tiny_task, tiny_batch[0][:1], tiny_batch[1][:1])
    found = attack.reconstruct(tiny_task, update, threat)
    assert found.found_by[0].partition(":")[0] != first


def test_an_adaptive_attacker_tries_members_on_defended_clients(monkeypatch, tiny_task):
    """With noise this large no search finds anything, so a learned map of the class is nearest."""
    monkeypatch.setattr("gradveil.attacks.auto.PORTFOLIO", (SMALL[0], Member("lti:directions=8,draws=2,epochs=2")))
    monkeypatch.setattr(_portfolio, "FEWEST_PUBLIC", 20)
    defense = gradveil.defense("gaussian-noise", std=50.0)
    public = public_of(tiny_task)
    noisy = gradveil.ThreatModel(public=public, defense=defense, adaptive=True)
    seconds = 1.0
    known = gradveil.attack("auto", seconds=seconds).fit(tiny_task, noisy, generator=torch.Generator().manual_seed(0))
    assert known.chosen["members"][0].startswith("lti")


def test_what_it_learned_is_found_again(monkeypatch, tiny_task, tiny_batch, tmp_path):
    monkeypatch.setattr("gradveil.attacks.auto.PORTFOLIO", (Member("lti:directions=8,draws=1,epochs=2"),))
    threat = gradveil.ThreatModel(public=public_of(tiny_task, 600))

    def fitted():
        return gradveil.attack("auto").fit(
            tiny_task, threat, generator=torch.Generator().manual_seed(0), cache=tmp_path
        )

    first = fitted()
    monkeypatch.setattr(_portfolio.Calibration, "of", None)  # nothing is tried again
    update = gradveil.defense("none").share(tiny_task, tiny_batch[0][:1], tiny_batch[1][:1])
    one, two = (attack.reconstruct(tiny_task, update, threat).inputs for attack in (first, fitted()))
    assert torch.equal(one, two)


def test_what_no_member_can_attack_is_refused(monkeypatch, tiny_task):
    monkeypatch.setattr("gradveil.attacks.auto.PORTFOLIO", (Member("peel", 20),))
    with pytest.raises(ThreatModelError, match="auto: no attack of its portfolio applies here: peel: "):
        gradveil.attack("auto").fit(tiny_task, gradveil.ThreatModel(batch_size=4))


def test_labels_that_are_no_classes_take_public_examples():
    model = torch.nn.Linear(4, 2)
    task = gradveil.Task(model, lambda out, y: (out - y).square().mean(), input_shape=(4,), classes=None)
    threat = gradveil.ThreatModel(labels="known", known_labels=torch.zeros(1, 1, 2))
    with pytest.raises(ThreatModelError, match="labels that are not classes cannot be made up"):
        gradveil.attack("auto").fit(task, threat)


def test_images_imitate_photographs():
    made = IMAGE.imitations(4, (3, 16, 16), torch.Generator().manual_seed(0), dtype=torch.float32)
    assert made.shape == (4, 3, 16, 16)
    assert 0 <= made.min() <= made.max() <= 1
    pixels = made.flatten(1)
    shuffled = pixels[:, torch.randperm(768, generator=torch.Generator().manual_seed(0))]
    assert (made[..., 1:] - made[..., :-1]).abs().mean() < 0.5 * (shuffled - pixels).abs().mean()
