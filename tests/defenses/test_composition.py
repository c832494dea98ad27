import pytest
import torch

import gradveil
from gradveil.defenses.base import Defense, Perturbation, scoped
from gradveil.errors import InputError, ParameterError, UnknownNameError


class NeedsData(Defense):
    """A stand-in for a defense that works on the data itself."""

    name = "needs-data"

    def share(self, task, inputs, labels, *, generator=None, memory=None, public=None, local=None):
        memory["seen"] = inputs
        return gradveil.Update(task.gradients(inputs * 0, labels))


class OwnAggregate(Perturbation):
    name = "own-aggregate"

    def perturb_rows(self, rows, draws):
        return rows.clone()

    def aggregate(self, updates, *, weights=None, memory=None, public=None):
        return updates[0]


def test_error_feedback_sends_everything_in_the_end():
    """sent + residual = all gradients so far, exactly what the wrapper is for."""
    defense = gradveil.ErrorFeedback(gradveil.defense("top-k", keep=0.2))
    generator = torch.Generator().manual_seed(0)
    memory, total, sent = {}, torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    for _ in range(30):
        gradient = torch.randn(50, generator=generator, dtype=torch.float64)
        total += gradient
        sent += defense.perturb({"w": gradient}, memory=memory)["w"]
    torch.testing.assert_close(sent + memory["residual/w"], total)
    assert memory["residual/w"].abs().max() > 0


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
    class Prepared(Perturbation):
        name = "prepared"

        def prepare(self, task, *, public=None, generator=None):
            self.seen = public
            return task

        def perturb_rows(self, rows, draws):
            return rows.clone()

    inner = Prepared()
    public = (torch.zeros(1), torch.zeros(1))
    gradveil.Chain(gradveil.ErrorFeedback(inner), gradveil.defense("top-k")).prepare(tiny_task, public=public)
    assert inner.seen is public


def test_memories_of_two_clients_are_apart(tiny_task, tiny_batch):
    defense = gradveil.defense("top-k:keep=0.1+error-feedback")
    mine, other = {}, {}
    defense.share(tiny_task, *tiny_batch, memory=mine)
    defense.share(tiny_task, tiny_batch[0] * 0.5, tiny_batch[1], memory=other)
    assert not torch.equal(mine["residual/3.weight"], other["residual/3.weight"])


def test_a_chain_acts_in_order():
    gradient = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    scale_then_prune = gradveil.Chain(
        gradveil.defense("dual-pruning", k1=0.25, k2=0.0), gradveil.defense("top-k", keep=0.25)
    )
    assert scale_then_prune.perturb(gradient)["w"].tolist() == [0, 0, 3, 0]


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
        name = "announcer"

        def announce(self, task, inputs, labels, *, generator=None, memory=None, local=None):
            memory["told"] = inputs
            return {"places": inputs}

        def share(self, task, inputs, labels, *, generator=None, memory=None, public=None, local=None):
            assert torch.equal(memory["told"], public["places"])
            return super().share(task, inputs, labels, generator=generator)

    chain, memory = gradveil.Chain(Announcer(), gradveil.defense("top-k")), {}
    public = chain.announce(tiny_task, *tiny_batch, memory=memory)
    assert chain.share(tiny_task, *tiny_batch, memory=memory, public=public)
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
