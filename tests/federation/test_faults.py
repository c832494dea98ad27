"""What clients may do wrong: the round continues, the fault is counted and named, and no garbage is averaged."""

import dataclasses
import random
import struct
import zlib
from collections import Counter

import pytest
import torch
from torch import nn

import gradveil
from gradveil import models
from gradveil.defenses.base import StepDefense
from gradveil.federation import Training, local, train
from gradveil.federation.memory import ClientMemories
from gradveil.federation.protocol import OpenRound
from gradveil.update import LocalSteps, Meta, Update, wire

ROUND = 6
MODEL = {"conv.weight": torch.zeros(4, 1, 3, 3), "fc.weight": torch.zeros(3, 40), "fc.bias": torch.zeros(3)}
BUFFERS = {"norm.running_mean": torch.zeros(4), "norm.running_var": torch.ones(4), "norm.count": torch.tensor(1)}
MARK = struct.pack("<f", 1234.5678)  # a value that can be found again among the bytes


def honest(*, values=MODEL, **changes) -> Update:
    generator = torch.Generator().manual_seed(0)
    layers = {name: torch.randn(value.shape, generator=generator).to(value.dtype) for name, value in values.items()}
    meta = {"round": ROUND, "samples": 8, "buffers": BUFFERS} | changes
    return Update(layers, Meta(**meta))


class Server(OpenRound):
    """A round in which three clients are asked, with its faults."""

    def __init__(self) -> None:
        self.faults = []
        super().__init__(
            ROUND,
            [0, 1, 2],
            self.faults.append,
            defense=gradveil.defense("none"),
            parameters=MODEL,
            statistics=BUFFERS,
            max_samples=32,
        )

    def accepts(self, client: int, message: bytes) -> bool:
        return self.receive(client, lambda: self.read(message))


def sealed(message: bytes) -> bytes:
    """The message with a correct checksum."""
    return message[:10] + struct.pack("<I", zlib.crc32(message[14:])) + message[14:]


def mutated(message: bytes, rng: random.Random) -> bytes:
    data = bytearray(message)
    at, other = rng.randrange(len(data)), rng.randrange(len(data) + 1)
    kind = rng.randrange(7)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at : at + 4] = rng.randbytes(4)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        data += rng.randbytes(rng.randrange(1, 9))
    elif kind == 4:
        del data[min(at, other) : max(at, other)]
    elif kind == 5:
        data[at:other] = data[at:other][::-1]
    else:
        data[at:at] = data[other:]
    return bytes(data)


def test_an_honest_update_is_accepted():
    server, update = Server(), honest()
    assert server.accepts(1, wire.encode(update))
    updates, faults = server.close(), server.faults
    assert list(updates) == [1]
    assert all(torch.equal(updates[1][name], value) for name, value in update.items())
    assert [(fault.client, fault.kind) for fault in faults] == [(0, "missing"), (2, "missing")]


def test_ten_thousand_mutated_messages_are_all_refused():
    rng, message, server = random.Random(0), wire.encode(honest()), Server()
    sent = 0
    while sent < 10_000:
        hostile = mutated(message, rng)
        if hostile != message:
            sent += 1
            assert not server.accepts(sent % 3, hostile)
    updates, faults = server.close(), server.faults
    assert not updates
    assert Counter(fault.kind for fault in faults) == {"malformed": 10_000, "missing": 3}
    assert Counter(fault.client for fault in faults if fault.kind == "malformed")[1] == 3334
    assert server.accepts(0, message)  # none of them has harmed the server


def without(values, name):
    return {key: value for key, value in values.items() if key != name}


def not_finite(rng):
    update = honest()
    name = rng.choice(list(MODEL))
    update[name].view(-1)[rng.randrange(update[name].numel())] = struct.unpack("<f", MARK)[0]
    message = wire.encode(update)
    assert message.count(MARK) == 1
    return sealed(message.replace(MARK, struct.pack("<f", rng.choice([float("nan"), float("inf"), -float("inf")]))))


def another_shape(rng):
    name = rng.choice(list(MODEL))
    shape = rng.choice([[1], [], [*MODEL[name].shape, 1], [MODEL[name].numel() + 1], (*MODEL[name].shape[::-1], 2)])
    return wire.encode(honest(values={**MODEL, name: torch.zeros(shape)}))


def another_type(rng):
    name, dtype = rng.choice(list(MODEL)), rng.choice([torch.float16, torch.float64, torch.bfloat16])
    return wire.encode(honest(values={**MODEL, name: MODEL[name].to(dtype)}))


def other_layers(rng):
    name = rng.choice(list(MODEL))
    return wire.encode(honest(values=rng.choice([without(MODEL, name), {**MODEL, "extra": torch.zeros(2)}, {}])))


def another_round(rng):
    return wire.encode(honest(round=rng.choice([None, 0, -1, ROUND - 1, ROUND + 1, 2**60])))


def another_weight(rng):
    return wire.encode(honest(samples=rng.choice([0, 33, 10**9, 2**64 - 1])))


def other_steps(rng):
    return wire.encode(honest(local=LocalSteps(epochs=rng.randrange(1, 9))))


def other_statistics(rng):
    name = rng.choice(list(BUFFERS)[:2])
    bad = [
        without(BUFFERS, name),
        {**BUFFERS, name: torch.full((4,), float("nan"))},
        {**BUFFERS, name: torch.zeros(5)},
        {**BUFFERS, name: torch.zeros(4, dtype=torch.float64)},
        {**BUFFERS, "norm.running_var": torch.tensor([1.0, -1.0, 1.0, 1.0])},
        {**BUFFERS, "other": torch.zeros(1)},
    ]
    return wire.encode(honest(buffers=rng.choice(bad)))


def locations(_rng):
    return wire.encode_locations({name: torch.ones(value.shape, dtype=torch.bool) for name, value in MODEL.items()})


HOSTILE = {
    not_finite: ("malformed", "values must be finite, got NaN or Inf in "),
    another_shape: ("malformed", "both sides must use the same model"),
    another_type: ("malformed", "both sides must use the same model"),
    other_layers: ("malformed", "both sides must use the same model"),
    another_round: ("stale", f"expected an update of round {ROUND}, got one "),
    another_weight: ("malformed", "samples must be a number from 1 to 32, got "),
    other_steps: ("malformed", "expected local steps None, got LocalSteps"),
    other_statistics: ("malformed", "expected b"),
    locations: ("malformed", "it holds locations"),
}


@pytest.mark.parametrize("make", HOSTILE)
def test_well_formed_garbage_is_refused_and_named(make):
    """Nine kinds of 125 messages each, all with a correct checksum."""
    rng, server = random.Random(1), Server()
    kind, words = HOSTILE[make]
    for number in range(125):
        message = make(rng)
        assert sealed(message) == message
        assert not server.accepts(number % 3, message)
    updates, faults = server.close(), server.faults
    assert not updates
    refused = [fault for fault in faults if fault.kind != "missing"]
    assert len(refused) == 125
    assert {fault.kind for fault in refused} == {kind}
    assert all(words in fault.reason for fault in refused)
    assert [fault.client for fault in refused] == [number % 3 for number in range(125)]


def test_the_first_of_two_counts_and_strangers_do_not():
    server, first, second = Server(), honest(), honest(samples=9)
    assert server.accepts(0, wire.encode(first))
    assert not server.accepts(0, wire.encode(second))
    assert not server.accepts(77, wire.encode(first))
    updates, faults = server.close(), server.faults
    assert updates[0].meta.samples == 8
    assert [(fault.client, fault.kind) for fault in faults][:2] == [(0, "duplicate"), (77, "stranger")]


def test_a_client_may_try_again_after_a_refusal():
    server, message = Server(), wire.encode(honest())
    assert not server.accepts(2, message[:-1])
    assert server.accepts(2, message)


# -- in a training run -------------------------------------------------------------------------------------------------

TRAINING = Training(rounds=4, clients=5, batch_size=8, lr=0.05, seed=2)


def normed_task(dataset) -> gradveil.Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(200, 2))
    return gradveil.Task(model, input_shape=dataset.train.input_shape, classes=2)


def weights_of(result):
    return torch.cat([value.flatten() for value in result.task.parameters.values()])


def deliver(_number, _client, message):
    return [message]


def test_a_faultless_transport_changes_nothing(two_blobs):
    plain = train(normed_task(two_blobs), two_blobs, gradveil.defense("aligned-dual-pruning"), TRAINING)
    carried = train(
        normed_task(two_blobs), two_blobs, gradveil.defense("aligned-dual-pruning"), TRAINING, transport=deliver
    )
    assert torch.equal(weights_of(plain), weights_of(carried))
    assert carried.faults == []
    assert carried.upload_bytes == plain.upload_bytes


def test_no_message_at_all_leaves_the_model_as_it_was(two_blobs):
    rng = random.Random(3)
    task = normed_task(two_blobs)
    for transport in (lambda *_: [], lambda _number, _client, m: [mutated(m, rng) + b"\0"]):
        result = train(task, two_blobs, gradveil.defense("none"), TRAINING, transport=transport)
        assert all(torch.equal(result.task.parameters[name], value) for name, value in task.parameters.items())
        assert all(torch.equal(result.task.buffers[name], value) for name, value in task.buffers.items())
        assert result.fault_counts["missing"] == 4 * 5
        assert [record.clients for record in result.rounds] == [0, 0, 0, 0]
        assert result.diverged is None


def test_the_round_goes_on_with_those_that_remain(two_blobs):
    """One client for each kind of fault; the honest ones make the model, exactly as if they were alone."""
    task, earlier = normed_task(two_blobs), {}

    def transport(number, client, message):
        if client == 0:
            return []
        if client == 1:
            return [message[:-3]]
        if client == 2:  # always sends its update of the previous round
            earlier[number] = message
            return [earlier[number - 1]] if number else [message]
        return [message, message] if client == 3 else [message]

    training = dataclasses.replace(TRAINING, rounds=2)
    result = train(task, two_blobs, gradveil.defense("none"), training, transport=transport)
    assert [record.clients for record in result.rounds] == [3, 2]
    found = Counter((fault.round, fault.client, fault.kind) for fault in result.faults)
    assert found == Counter(
        [
            *((number, 0, "missing") for number in (0, 1)),
            *((number, 1, kind) for number in (0, 1) for kind in ("malformed", "missing")),
            *((1, 2, kind) for kind in ("stale", "missing")),
            *((number, 3, "duplicate") for number in (0, 1)),
        ]
    )

    def only_honest(number, client, message):
        return [message] if client in (3, 4) or (client == 2 and number == 0) else []

    assert torch.equal(
        weights_of(train(task, two_blobs, gradveil.defense("none"), training, transport=only_honest)),
        weights_of(result),
    )


def lossy(number, client, message):
    """Loses, damages, doubles or delivers."""
    return [[], [message[:-3]], [message, message], [message]][(3 * number + client) % 4]


@pytest.mark.parametrize("execution", ["loop", "batch"])
@pytest.mark.parametrize(
    "inner",
    ["top-k:keep=0.1", "dual-pruning", "aligned-dual-pruning", "gaussian-noise:std=0.1", "top-k+gaussian-noise"],
)
def test_with_error_feedback_a_lost_message_takes_nothing(two_blobs, monkeypatch, inner, execution):
    """What arrived and what is owed in the end add up to the client's gradients, whichever messages were lost."""
    defense, gradients, arrived = gradveil.defense(f"{inner}+error-feedback"), {}, {}
    memories, perturb = ClientMemories(), gradveil.ErrorFeedback.perturb_gradients

    def add(totals, client, layers):
        for name, value in layers.items():
            totals[client, name] = totals.get((client, name), 0) + value.double()

    def recorded(self, honest, client_round):
        add(gradients, client_round.memory._client, honest)
        return perturb(self, honest, client_round)

    def transport(number, client, message):
        delivered = lossy(number, client, message)
        if message in delivered:
            add(arrived, client, wire.decode(message, sets[number]))
        return delivered

    sets, elect = {}, OpenRound.elect

    def elected(server, ask):
        elect(server, ask)
        sets[server.number] = server.locations

    monkeypatch.setattr(OpenRound, "elect", elected)
    monkeypatch.setattr(gradveil.ErrorFeedback, "perturb_gradients", recorded)
    monkeypatch.setattr(local, "ClientMemories", lambda *_: memories)
    shape = two_blobs.train.input_shape
    task = gradveil.Task(models.create("mlp", input_shape=shape, classes=2), input_shape=shape, classes=2)
    training = dataclasses.replace(TRAINING, rounds=9)
    result = train(task, two_blobs, defense, training, transport=transport, execution=execution)
    assert result.fault_counts["missing"] > 10
    assert len(gradients) == 5 * len(task.parameters)
    for (client, name), total in gradients.items():
        owed = memories[client][f"residual/{name}"].double()
        torch.testing.assert_close(arrived.get((client, name), 0) + owed, total, atol=1e-4, rtol=1e-4)
    assert not [key for client in memories for key in memories[client] if not key.startswith("residual/")]


def test_a_client_that_fails_late_in_a_chain_takes_nothing_from_the_residual(two_blobs, monkeypatch):
    class Overflows(gradveil.Perturbation):
        """Fails in every second call."""

        name, calls = "overflows", 0

        def perturb_rows(self, rows, draws):
            type(self).calls += 1
            return rows * (torch.inf if type(self).calls % 2 else 1)

    memories, task = ClientMemories(), normed_task(two_blobs)
    monkeypatch.setattr(local, "ClientMemories", lambda *_: memories)
    chain = gradveil.Chain(gradveil.defense("top-k:keep=0.1+error-feedback"), Overflows())
    result = train(task, two_blobs, chain, dataclasses.replace(TRAINING, rounds=1), execution="loop")
    assert result.fault_counts["not finite"] == 5
    for client in memories:  # all of the gradient is owed, not only the nine tenths that top-k held back
        assert (memories[client]["0/residual/3.weight"] != 0).double().mean() > 0.95


def test_lossy_training_is_resumed_with_the_identical_weights(two_blobs, tmp_path):
    defense, training = gradveil.defense("top-k:keep=0.1+error-feedback"), dataclasses.replace(TRAINING, rounds=8)
    options = {"transport": lossy, "ram_bytes": 0}
    whole = train(normed_task(two_blobs), two_blobs, defense, training, **options)

    def stop(done, _rounds):
        if done == 4:
            raise KeyboardInterrupt

    often = dataclasses.replace(training, checkpoint_every=3)
    with pytest.raises(KeyboardInterrupt):
        train(normed_task(two_blobs), two_blobs, defense, often, checkpoint=tmp_path, progress=stop, **options)
    resumed = train(normed_task(two_blobs), two_blobs, defense, often, checkpoint=tmp_path, resume=True, **options)
    assert torch.equal(weights_of(whole), weights_of(resumed))
    assert resumed.faults == whole.faults


class BreaksEveryFifth(StepDefense):
    """Makes the gradients of the first client of each round NaN."""

    name, count = "breaks", 0

    def step_gradients(self, client):
        self.count += 1
        factor = float("nan") if self.count % 5 == 1 else 1.0
        gradients = client.task.gradients(client.inputs, client.targets)
        return {name: factor * value for name, value in gradients.items()}


def test_what_a_client_finds_not_finite_never_reaches_the_mean(two_blobs):
    shape = two_blobs.train.input_shape
    task = gradveil.Task(models.create("mlp", input_shape=shape, classes=2), input_shape=shape, classes=2)
    result = train(task, two_blobs, BreaksEveryFifth(), TRAINING)
    assert result.fault_counts == {"not finite": 4}
    assert [record.clients for record in result.rounds] == [4, 4, 4, 4]
    assert torch.isfinite(weights_of(result)).all()
