"""Chains, error feedback, and how their capabilities follow from those of their parts."""

import pytest
import torch

import gradveil
from gradveil.core.errors import InputError, ParameterError, UnknownNameError
from gradveil.defenses.base import Defense, Perturbation, Prepared
from gradveil.defenses.composition import scoped
from gradveil.federation.memory import ClientMemories


class NeedsData(Defense):
    """A stand-in for a defense that works on the data itself."""

    name = "needs-data"

    def make_update(self, client):
        client.memory["seen"] = client.inputs
        return gradveil.Update(client.task.gradients(client.inputs * 0, client.targets))


class OwnAggregate(Perturbation):
    name = "own-aggregate"
    aggregates = True

    def perturb_rows(self, rows, draws):
        return rows.clone()

    def combine(self, received):
        return received.updates[0]


def test_error_feedback_sends_everything_in_the_end():
    """sent + residual equals the sum of all gradients so far, which is what the wrapper is for."""
    defense = gradveil.ErrorFeedback(gradveil.defense("top-k", keep=0.2))
    generator = torch.Generator().manual_seed(0)
    memory, total, sent = {}, torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    for _ in range(30):
        gradient = torch.randn(50, generator=generator, dtype=torch.float64)
        total += gradient
        sent += defense.perturb({"w": gradient}, memory=memory)["w"]
    torch.testing.assert_close(sent + memory["residual/w"], total)
    assert memory["residual/w"].abs().max() > 0


def chained(*parts):
    return gradveil.Chain(*(gradveil.defense(part) if isinstance(part, str) else part for part in parts))


FEEDBACK = [
    gradveil.defense(f"{inner}+error-feedback{options}")
    for inner in ("none", "top-k:keep=0.2", "dual-pruning", "gaussian-noise:std=0.5", "top-k:keep=0.3+gaussian-noise")
    for options in ("", ":decay=0.9", ":clip=0.5", ":decay=0.5,clip=0.1")
] + [
    gradveil.defense(spec)
    for spec in (
        "aligned-dual-pruning+error-feedback",
        "quantization:bits=2+error-feedback",
        "gradient-dropout:keep=0.5,std=0.1+error-feedback",
        "laplace-noise:std=0.5+error-feedback",
        "top-k:keep=0.2+error-feedback+error-feedback",
    )
]


@pytest.mark.parametrize("defense", FEEDBACK, ids=str)
def test_a_lost_message_takes_nothing_from_the_residual(defense):
    """After it, the residual is gradient + residual as before the round, whatever was sent, forgotten or clipped."""
    generator, memory, owed = torch.Generator().manual_seed(0), {}, torch.zeros(60, dtype=torch.float64)
    for number in range(8):
        gradient = torch.randn(60, generator=generator, dtype=torch.float64)
        owed = memory.get("residual/w", torch.zeros(60, dtype=torch.float64)) + gradient
        before = dict(memory)
        defense.perturb({"w": gradient}, memory=memory, generator=generator)
        kept = memory["residual/w"]
        if number % 2:
            defense.take_back(memory)
            torch.testing.assert_close(memory["residual/w"], owed)
            assert memory["residual/w"] is not kept  # always a new tensor
            taken = dict(memory)
            defense.take_back(memory)  # it was taken back already
            assert memory == taken
        elif number % 4:
            defense.settle(memory, arrived=True)
            assert memory["residual/w"] is kept
            defense.take_back(memory)  # it is too late
            assert memory["residual/w"] is kept
        assert all(value is not before.get(key) for key, value in memory.items())


@pytest.mark.parametrize("defense", [one for one in FEEDBACK if one.decay == 1 and one.clip is None], ids=str)
def test_what_arrived_and_what_is_owed_add_up_to_the_gradients(defense):
    generator, memory = torch.Generator().manual_seed(0), ClientMemories(ram_bytes=0)[3]  # on disk
    total, arrived = torch.zeros(60, dtype=torch.float64), torch.zeros(60, dtype=torch.float64)
    for _ in range(30):
        gradient = torch.randn(60, generator=generator, dtype=torch.float64)
        total += gradient
        sent = defense.perturb({"w": gradient}, memory=memory, generator=generator)["w"]
        if torch.rand((), generator=generator) < 0.4:
            defense.take_back(memory)
        else:
            arrived += sent
    torch.testing.assert_close(arrived + memory["residual/w"], total)


def test_in_a_chain_the_last_error_feedback_takes_back_and_the_others_have_delivered():
    first, second = (
        gradveil.defense(f"{name}+error-feedback") for name in ("top-k:keep=0.5", "dual-pruning:k1=0.2,k2=0.3")
    )
    defense = chained("quantization:bits=6", first, "quantization:bits=8", second, "top-k:keep=0.3")
    generator, memory = torch.Generator().manual_seed(0), {}
    given, through, arrived = torch.zeros(3, 60, dtype=torch.float64)
    for number in range(20):
        gradient = {"w": torch.randn(60, generator=generator, dtype=torch.float64)}
        before = {key: value.clone() for key, value in memory.items()}
        inputs = defense.parts[0].perturb(gradient)
        handed = defense.parts[2].perturb(first.inner.perturb({"w": inputs["w"] + before.get("1/residual/w", 0)}))
        defense.perturb(gradient, memory=memory)
        given, through = given + inputs["w"], through + handed["w"]
        if number % 3 == 0:
            after = dict(memory)
            defense.take_back(memory)
            assert memory["1/residual/w"] is after["1/residual/w"]
            torch.testing.assert_close(memory["3/residual/w"], before.get("3/residual/w", 0) + handed["w"])
            assert sorted(memory) == ["1/residual/w", "3/residual/w"]
        else:
            arrived = arrived + second.inner.perturb({"w": before.get("3/residual/w", 0) + handed["w"]})["w"]
    torch.testing.assert_close(arrived + memory["3/residual/w"], through)


def test_other_defenses_have_nothing_to_take_back():
    for spec in ("none", "gaussian-noise", "top-k+gaussian-noise"):
        memory = {"something": torch.ones(2)}
        gradveil.defense(spec).take_back(memory)
        assert list(memory) == ["something"]


def test_error_feedback_around_a_server_that_removes_noise_is_refused():
    """With error feedback the noise of an update is z_t - z_{t-1}: twice the variance, but not in a first round."""
    for spec in ("risk-slicing+error-feedback", "top-k+risk-slicing:std=0.5+error-feedback:decay=0.9"):
        with pytest.raises(ParameterError, match=r"removes noise and expects it to be fresh.*; use compensate=false"):
            gradveil.defense(spec)
    assert gradveil.defense("risk-slicing:compensate=false+error-feedback").aggregates


def test_the_noise_that_error_feedback_sends_is_not_fresh(tiny_task, tiny_batch):
    """Its variance is that of the docstring: (1 + decay^2) times that of the noise of a client's first round."""
    for decay in (1.0, 0.5):
        defense = gradveil.defense(f"risk-slicing:std=2.0,ratio=0.3,compensate=false+error-feedback:decay={decay}")
        defense, task = defense.prepare(tiny_task, public=tiny_batch, generator=torch.manual_seed(0))
        zero = {name: torch.zeros_like(value) for name, value in task.parameters.items()}
        first, later = [], []
        for client in range(400):
            memory, generator = {}, torch.Generator().manual_seed(client)
            for noise in (first, later, later):
                sent = defense.perturb(zero, memory=memory, generator=generator)
                noise.append(torch.cat([value.flatten() for value in sent.values()]).square().mean())
        fresh = defense.inner.aggregate_variance([1.0])
        assert float(torch.stack(first).mean()) == pytest.approx(fresh, rel=0.1)
        assert float(torch.stack(later[::2]).mean()) == pytest.approx((1 + decay**2) * fresh, rel=0.1)


def test_error_feedback_needs_a_memory_and_a_gradient_only_defense():
    with pytest.raises(InputError, match="error-feedback: needs memory="):
        gradveil.ErrorFeedback(gradveil.defense("top-k")).perturb({"w": torch.ones(3)})
    with pytest.raises(ParameterError, match="must need only gradients, got needs-data"):
        gradveil.ErrorFeedback(NeedsData())
    with pytest.raises(ParameterError, match="error-feedback: clip must be a number above 0, got 0"):
        gradveil.defense("top-k+error-feedback:clip=0")
    with pytest.raises(ParameterError, match="error-feedback: decay must be a number above 0 and at most 1, got 2"):
        gradveil.defense("top-k+error-feedback:decay=2")
    with pytest.raises(UnknownNameError, match="error-feedback: unknown parameter 'limit'; it takes: decay, clip"):
        gradveil.defense("top-k+error-feedback:limit=0.9")


def test_error_feedback_leaves_the_server_side_to_the_inner_defense():
    first, second = (gradveil.Update({"w": torch.tensor([v])}) for v in (1.0, 3.0))
    assert gradveil.ErrorFeedback(OwnAggregate()).aggregate([first, second])["w"].tolist() == [1.0]


def test_a_memory_of_another_model_is_refused():
    defense = gradveil.defense("top-k:keep=0.5+error-feedback")
    with pytest.raises(InputError, match=r"a residual of shape \[4\] for 'w', whose gradient has shape \[3, 4\]"):
        defense.perturb({"w": torch.ones(3, 4)}, memory={"residual/w": torch.ones(4)})


def test_preparing_reaches_the_wrapped_defense(tiny_task):
    class Preparable(Perturbation):
        name = "preparable"
        seen = None

        def prepare(self, task, *, public=None, generator=None):
            prepared = Preparable()
            prepared.seen = public
            return Prepared(prepared, task)

        def perturb_rows(self, rows, draws):
            return rows.clone()

    public = (torch.zeros(1), torch.zeros(1))
    chain = gradveil.Chain(gradveil.ErrorFeedback(Preparable()), gradveil.defense("top-k"))
    prepared, task = chain.prepare(tiny_task, public=public)
    assert prepared.parts[0].inner.seen is public
    assert chain.parts[0].inner.seen is None
    assert task is tiny_task


def test_memories_of_two_clients_are_separate(tiny_task, tiny_batch):
    defense = gradveil.defense("top-k:keep=0.1+error-feedback")
    first, second = {}, {}
    defense.share(tiny_task, *tiny_batch, memory=first)
    defense.share(tiny_task, tiny_batch[0] * 0.5, tiny_batch[1], memory=second)
    assert not torch.equal(first["residual/3.weight"], second["residual/3.weight"])


def test_a_chain_acts_in_order():
    gradient = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    chain = gradveil.Chain(gradveil.defense("dual-pruning", k1=0.25, k2=0.0), gradveil.defense("top-k", keep=0.25))
    assert chain.perturb(gradient)["w"].tolist() == [0, 0, 3, 0]


def test_a_chain_may_begin_with_a_defense_that_needs_data(tiny_task, tiny_batch):
    chain = gradveil.Chain(NeedsData(), gradveil.defense("top-k", keep=0.1))
    memory = {}
    update = chain.share(tiny_task, *tiny_batch, memory=memory)
    assert (update["3.weight"] != 0).sum() == 44  # ceil(0.1 * 432)
    assert torch.equal(memory["0/seen"], tiny_batch[0])
    with pytest.raises(InputError, match="needs-data: needs the client's data; call share"):
        chain.perturb(tiny_task.gradients(*tiny_batch))
    with pytest.raises(ParameterError, match="chain: needs-data needs data and must come first"):
        gradveil.Chain(gradveil.defense("top-k"), NeedsData())


def test_a_chain_has_one_server_side():
    chain = gradveil.Chain(gradveil.defense("top-k"), OwnAggregate())
    first, second = (gradveil.Update({"w": torch.tensor([v])}) for v in (1.0, 3.0))
    assert chain.aggregate([first, second])["w"].tolist() == [1.0]
    with pytest.raises(
        ParameterError, match="at most one defense may have a server side, got own-aggregate and own-aggregate"
    ):
        gradveil.Chain(OwnAggregate(), OwnAggregate())
    with pytest.raises(ParameterError, match="two or more defenses, got 1"):
        gradveil.Chain(OwnAggregate())


def test_a_defense_that_announces_comes_first_and_keeps_its_memory(tiny_task, tiny_batch):
    class Announcer(OwnAggregate):
        announces = True

        name = "announcer"

        def make_announcement(self, client):
            client.memory["announced"] = client.inputs
            return {"places": client.inputs}

        def make_update(self, client):
            assert torch.equal(client.memory["announced"], client.announced["places"])
            return super().make_update(client)

    chain, memory = gradveil.Chain(Announcer(), gradveil.defense("top-k")), {}
    public = chain.announce(tiny_task, *tiny_batch, memory=memory)
    assert chain.share(tiny_task, *tiny_batch, memory=memory, announced=public)
    with pytest.raises(ParameterError, match="announcer announces something before the round and must come first"):
        gradveil.Chain(gradveil.defense("top-k"), Announcer())


def test_a_scoped_memory_is_a_mapping_of_its_own():
    memory = {"other": torch.ones(1)}
    view = scoped(memory, "0")
    view["a"] = torch.zeros(1)
    assert dict(view) == {"a": memory["0/a"]}
    assert len(view) == 1
    del view["a"]
    assert list(memory) == ["other"]


def test_specs_of_compositions():
    assert str(gradveil.defense("top-k:keep=1e-1+error-feedback")) == "top-k:keep=0.1+error-feedback"
    assert str(gradveil.defense("top-k:keep=0.1,form=global+error-feedback")) == (
        "top-k:keep=0.1,form=global+error-feedback"
    )
    with pytest.raises(ParameterError, match="error-feedback wraps a defense"):
        gradveil.defense("error-feedback")
    with pytest.raises(ParameterError, match="not both"):
        gradveil.defense("top-k:keep=0.1", keep=0.2)


def test_batch_norm_statistics_travel_with_the_update():
    from torch import nn

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3))
    task = gradveil.Task(model, input_shape=(1, 6, 6), classes=3)
    defense = gradveil.defense("gaussian-noise:std=0.1")
    updates = [defense.share(task, torch.rand(4, 1, 6, 6) * scale, torch.tensor([0, 1, 2, 0])) for scale in (1, 2)]
    mean = defense.aggregate(updates)
    expected = (updates[0].meta.buffers["1.running_mean"] + updates[1].meta.buffers["1.running_mean"]) / 2
    torch.testing.assert_close(mean.meta.buffers["1.running_mean"], expected)
    assert torch.equal(model[1].running_mean, torch.zeros(2))


# -- declared capabilities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", gradveil.list_defenses())
def test_what_a_defense_declares_is_what_it_does(name):
    defense = gradveil.defense(name)
    overridden = {m for m in ("publish", "visible", "combine", "prepare") if m in vars(type(defense))}
    assert defense.announces == ("publish" in overridden)
    assert defense.hides_updates == ("visible" in overridden)
    assert defense.aggregates == ("combine" in overridden)
    if defense.needs_preparing:
        assert "prepare" in overridden
    if defense.keeps_zeros and name != "aligned-dual-pruning":  # which needs an announcement
        gradient = {"w": torch.randn(200, generator=torch.manual_seed(0)) * (torch.arange(200) % 2)}
        assert not defense.perturb(gradient)["w"][::2].any()
    # Without noise, an update that is twice as large is sent twice as large.
    if defense.gradient_only and not defense.adds_noise and name != "aligned-dual-pruning":
        once = {"w": torch.randn(200, generator=torch.manual_seed(0))}
        twice = {"w": 2 * once["w"]}
        torch.testing.assert_close(defense.perturb(twice)["w"], 2 * defense.perturb(once)["w"])


def test_a_guarantee_survives_what_is_done_to_the_update_afterwards():
    alone, chain = gradveil.defense("dp-sgd"), gradveil.defense("dp-sgd+top-k+quantization")
    run = {"rounds": 10, "batch_size": 8, "examples": 100}
    assert chain.privacy_spent(**run) == alone.privacy_spent(**run) is not None
    assert gradveil.defense("top-k+gaussian-noise").privacy_spent(**run) is None


def test_a_chain_has_the_noise_of_its_first_part_and_error_feedback_has_none():
    assert gradveil.defense("gaussian-noise:std=0.5+top-k").noise_variance() == 0.25
    assert gradveil.defense("top-k+gaussian-noise:std=0.5").noise_variance() is None
    assert gradveil.defense("gaussian-noise:std=0.5+error-feedback").noise_variance() is None


def test_announced_locations_hold_for_a_chain_that_keeps_zeros(tiny_task, tiny_batch):
    for last_part, known in (("top-k:keep=0.5", True), ("gaussian-noise", False), ("quantization", False)):
        chain = gradveil.defense(f"aligned-dual-pruning+{last_part}")
        assert chain.announces
        assert chain.aggregates
        public = chain.announce(tiny_task, *tiny_batch, memory={})
        locations = chain.locations(public)
        assert (locations is not None) == known
        if locations is not None:
            update = chain.share(tiny_task, *tiny_batch, memory={}, announced=public)
            assert all(not value[~locations[name].bool()].any() for name, value in update.items())


@pytest.mark.parametrize(
    ("spec", "noisy", "prepared"),
    [
        ("top-k+error-feedback", False, False),
        ("top-k+gaussian-noise", True, False),
        ("gaussian-noise+error-feedback", True, False),
        ("risk-slicing+top-k", True, True),
        ("dual-pruning+top-k+error-feedback", False, False),
    ],
)
def test_compositions_declare_what_their_parts_do(spec, noisy, prepared):
    defense = gradveil.defense(spec)
    assert (defense.adds_noise, defense.needs_preparing) == (noisy, prepared)


def test_a_defense_that_declares_nothing_is_assumed_to_add_noise():
    class New(gradveil.Perturbation):
        name = "new"

        def perturb_rows(self, rows, draws):
            return rows

    assert New().adds_noise
    assert not New().keeps_zeros


def test_a_defense_that_overrides_without_declaring_is_refused():
    with pytest.raises(TypeError, match="Forgetful overrides combine: declare aggregates = True"):

        class Forgetful(gradveil.Perturbation):
            def combine(self, received):
                return received.updates[0]


def test_a_defense_must_override_the_hooks_instead_of_the_public_methods():
    with pytest.raises(TypeError, match="Old overrides aggregate: override combine instead, which aggregate calls"):

        class Old(gradveil.Perturbation):
            def aggregate(self, updates, *, weights=None, memory=None, announced=None):
                return updates[0]


# -- prepared values ------------------------------------------------------------------------------------------------


UNCOMPENSATED = "risk-slicing:compensate=false+error-feedback"


def test_preparing_returns_a_new_defense_and_does_not_change_the_first(tiny_task, tiny_batch):
    for spec in ("risk-slicing", "optimal-noise:form=global", UNCOMPENSATED, "risk-slicing+top-k"):
        defense = gradveil.defense(spec)
        prepared, _ = defense.prepare(tiny_task, public=tiny_batch, generator=torch.manual_seed(0))
        again, _ = defense.prepare(tiny_task, public=tiny_batch, generator=torch.manual_seed(0))
        assert prepared != defense == gradveil.defense(spec)
        assert prepared == again
        assert str(prepared) == str(defense)
        memory = {}
        assert prepared.share(tiny_task, *tiny_batch, memory=memory)
        with pytest.raises(InputError, match="prepare"):
            defense.share(tiny_task, *tiny_batch, memory={})


# -- adaptive attackers of a chain ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "known"),
    [
        ("gaussian-noise+top-k", True),
        ("dp-sgd+top-k", True),
        ("dp-sgd+gaussian-noise+quantization", True),
        ("top-k+gaussian-noise", False),  # zeros that are covered by noise reveal nothing
        ("gaussian-noise+error-feedback+top-k", False),
        ("gaussian-noise+top-k+error-feedback", True),
    ],
)
def test_a_chain_declares_whether_it_has_an_adaptive_attacker(spec, known, tiny_task):
    chain = gradveil.defense(spec)
    assert chain.has_adaptive_attacker == known
    assert bool(chain.adapt(tiny_task)) == known


def test_the_attacker_of_a_chain_knows_all_its_parts(tiny_task, tiny_batch):
    single = tiny_batch[0][:1], tiny_batch[1][:1]
    chain = gradveil.defense("dp-sgd:clip=0.5,noise_multiplier=0.2+gaussian-noise:std=0.3+top-k:keep=0.5")
    alone = gradveil.defense("top-k:keep=0.5").adapt(tiny_task)
    forms = chain.adapt(tiny_task)
    assert list(forms) == list(alone)
    form = next(iter(forms.values()))
    assert form.variance == pytest.approx(0.1**2 + 0.3**2)
    assert form.read is not None
    gradients = tiny_task.gradients(*single)
    [expected] = form.expect([gradients], [gradients])
    assert sum(float(value.square().sum()) for value in expected.values()) == pytest.approx(0.25)
    assert sum(float(value.square().sum()) for value in gradients.values()) > 0.25


def test_a_chain_without_noise_is_read_as_exactly_as_its_last_part(tiny_task, tiny_batch):
    """The attacker's evidence agrees with what it expects, at all coordinates that were sent."""
    single = tiny_batch[0][:1], tiny_batch[1][:1]
    chain = gradveil.defense("dp-sgd:clip=0.5,noise_multiplier=0+top-k:keep=0.3")
    update = dict(chain.share(tiny_task, *single, generator=torch.manual_seed(0)))
    form = next(iter(chain.adapt(tiny_task).values()))
    [expected] = form.expect([tiny_task.gradients(*single)], [update])
    evidence = form.read(expected, update)
    for name, weight in evidence.weights.items():
        torch.testing.assert_close((weight * expected[name]), weight * evidence.values[name])


def test_a_sum_of_many_clients_is_not_read_as_one_of_them(tiny_task):
    """A coordinate of the sum may come from only some clients, which no attacker of a single update expects."""
    chain = gradveil.defense("secure-aggregation+top-k")
    assert not chain.has_adaptive_attacker
    assert not chain.adapt(tiny_task)
