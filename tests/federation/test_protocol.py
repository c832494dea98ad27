"""A server round by itself: who is asked, who is elected, who is missing in the end."""

import re

import pytest
import torch

import gradveil
from gradveil.core.errors import InputError, NotFiniteError
from gradveil.federation.faults import Refused
from gradveil.federation.protocol import OpenRound, Replies, total_weight
from gradveil.update import Meta, Update, wire

MODEL = {"w": torch.arange(10.0)}
ALIGNED = gradveil.defense("aligned-dual-pruning", k1=0.1, keep=0.2)


def opened(defense=ALIGNED, **options):
    faults = []
    return OpenRound(7, [3, 1, 2], faults.append, defense=defense, parameters=MODEL, **options), faults


def named(faults):
    return [(fault.round, fault.client, fault.kind) for fault in faults]


def test_the_first_client_is_elected_and_its_bytes_are_read():
    server, faults = opened()
    asked, published = [], ALIGNED.publish(MODEL)

    def ask(client):
        asked.append(client)
        return wire.encode_locations(published)

    server.elect(ask)
    assert asked == [3]
    assert torch.equal(server.announced["w"], published["w"])
    assert server.locations is server.announced
    assert faults == []


def too_many(_client):
    return {"w": torch.ones(10, dtype=torch.bool)}


def too_few(_client):
    return {"w": torch.zeros(10, dtype=torch.bool)}


def another_size(_client):
    return wire.encode_locations({"w": torch.zeros(1_000_000, dtype=torch.bool)})


def another_layer(_client):
    return {"v": torch.zeros(10, dtype=torch.bool)}


def no_locations(_client):
    return wire.encode(Update({"w": torch.ones(10)}))


def silent(_client):
    raise Refused("missing", "no announcement")


@pytest.mark.parametrize(
    ("first", "kind", "words"),
    [
        (too_many, "malformed", "must mark 4 locations, got 10"),
        (too_few, "malformed", "must mark 4 locations, got 0"),
        (another_size, "malformed", r"expected bool \[10\] as layer 'w', got bool \[1000000\]"),
        (another_layer, "malformed", r"differs in \['v', 'w'\]"),
        (no_locations, "malformed", "it holds an update"),
        (silent, "missing", "no announcement"),
        (lambda _client: None, "missing", "no announcement"),
    ],
)
def test_if_an_announcement_is_refused_the_next_client_is_elected(first, kind, words):
    server, faults = opened()
    server.elect(lambda client: first(client) if client == 3 else ALIGNED.publish(MODEL))
    assert named(faults) == [(7, 3, kind)]
    assert re.search(words, faults[0].reason), faults[0].reason
    assert int(server.announced["w"].sum()) == 4


def test_a_client_that_is_not_finite_is_named_when_it_is_asked_for_its_update():
    server, faults = opened()

    def ask(client):
        if client == 3:
            raise NotFiniteError("gradients must be finite")
        return ALIGNED.publish(MODEL)

    server.elect(ask)
    assert faults == []
    assert server.announced is not None


def test_if_the_defense_announces_nothing_nobody_is_asked():
    server, faults = opened(gradveil.defense("none"))
    server.elect(lambda _client: pytest.fail("it was asked"))
    assert (server.announced, server.locations, faults) == (None, None, [])


def test_if_nobody_is_elected_there_is_no_announcement():
    server, faults = opened()
    server.elect(too_many)
    assert server.announced is None
    assert named(faults) == [(7, client, "malformed") for client in (3, 1, 2)]


@pytest.mark.parametrize("named_once", [False, True])
def test_a_failed_client_is_not_missing_and_a_refused_one_is_unless_named_once(named_once):
    faults = []
    replies = Replies(7, [3, 1, 2, 4], faults.append, named_once=named_once)
    replies.fail(1, "not finite", "it said so")

    def bad():
        raise InputError("not this")

    assert not replies.receive(3, bad)
    assert replies.receive(2, lambda: "two")
    assert not replies.receive(9, lambda: "nine")
    assert replies.close() == {2: "two"}
    refused_too = [] if named_once else [(7, 3, "missing")]
    assert named(faults) == [
        (7, 1, "not finite"),
        (7, 3, "malformed"),
        (7, 9, "stranger"),
        *refused_too,
        (7, 4, "missing"),
    ]


@pytest.mark.parametrize("named_once", [False, True])
def test_a_client_that_was_not_elected_may_still_be_missing(named_once):
    server, faults = opened(named_once=named_once)
    server.elect(lambda client: too_many(client) if client == 3 else ALIGNED.publish(MODEL))
    assert server.close() == {}
    assert named(faults) == [(7, 3, "malformed"), *((7, client, "missing") for client in (3, 1, 2))]


def test_replies_come_in_the_order_of_the_requests():
    server, _ = opened(gradveil.defense("none"))
    message = wire.encode(Update({"w": torch.ones(10)}, Meta(round=7)))
    for client in (1, 2, 3):
        assert server.receive(client, lambda: server.read(message))
    assert list(server.close()) == [3, 1, 2]


def test_an_announcement_is_used_to_read_and_to_aggregate():
    server, _ = opened()
    server.elect(lambda _client: ALIGNED.publish(MODEL))
    update = Update(ALIGNED.perturb(MODEL, announced=server.announced), Meta(round=7))
    outside = Update({"w": torch.ones(10)}, Meta(round=7))
    got = server.read(wire.encode(update, locations=server.locations))
    assert torch.equal(got["w"], update["w"])
    mean = server.aggregate([got, outside], [3.0, 1.0])["w"]
    assert torch.equal(mean, torch.where(server.announced["w"], (3 * update["w"] + 1) / 4, 0.0))


def test_statistics_may_be_left_out_only_if_that_is_allowed():
    statistics = {"mean": torch.tensor([1.0]), "mask": torch.tensor([-torch.inf])}  # the server's own: any value
    update = Update({"w": torch.ones(10)}, Meta(round=7, buffers={"mean": torch.tensor([5.0])}))
    message = wire.encode(update)
    some, _ = opened(statistics=statistics, all_statistics=False)
    assert some.read(message).meta.buffers == {"mean": torch.tensor([5.0]), "mask": torch.tensor([-torch.inf])}
    strict, _ = opened(statistics=statistics)
    with pytest.raises(InputError, match="both sides must name the same statistics"):
        strict.read(message)


@pytest.mark.parametrize("claimed", [0, 33, -1, float("nan"), float("inf"), "3", [3], True, None])
def test_a_weight_is_a_whole_number_within_its_bound(claimed):
    assert total_weight("samples", 32, 32) == 32.0
    with pytest.raises(ValueError, match="samples must be a number from 1 to 32, got"):
        total_weight("samples", claimed, 32)
    with pytest.raises(InputError, match="samples must be a whole number, got 1.5"):
        total_weight("samples", 1.5, 32)
