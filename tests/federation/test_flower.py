"""Flower: the mod, the strategy and the simulated training, with real messages; Ray only in the last test."""

import copy
import dataclasses
import importlib
import itertools
import json
import math
import os
import random
import re
import struct
import subprocess
import sys
import types
import warnings
import zlib

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg, Krum
from flwr.supercore.task_identity import TaskIdentity

import gradveil
from gradveil import cli
from gradveil.core.errors import DataError, InputError, MissingPackageError, NotFiniteError, ParameterError
from gradveil.core.tensors import Tensors
from gradveil.defenses import DEFENSES
from gradveil.federation import ENGINES, Training, flower, train
from gradveil.federation.flower import GradveilStrategy, defense_mod, mod, simulation, strategy
from gradveil.federation.flower._arrays import moved_arrays
from gradveil.federation.flower._messages import bytes_record
from gradveil.federation.flower._on_ray import run_on_ray
from gradveil.update import Meta, Update, wire

LR = 0.5
NODES = (11, 12, 13)


@pytest.fixture(autouse=True)
def identity():
    """In a Flower server process, this holds the run for which messages are made."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def start_arrays(seed: int = 0) -> ArrayRecord:
    """A model with two arrays, one of them so large that its values make up most of the bytes."""
    drawn = torch.Generator().manual_seed(seed)
    return ArrayRecord({"0.weight": torch.randn(50, 40, generator=drawn), "0.bias": torch.randn(50, generator=drawn)})


def gradient(seed: int) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.numpy()) for name, array in start_arrays(seed + 100).items()}


def trained(arrays: ArrayRecord, step: dict[str, torch.Tensor]) -> ArrayRecord:
    state = arrays.to_torch_state_dict()
    return ArrayRecord({name: state[name] - LR * step[name] if name in step else state[name] for name in state})


def client_app(*mods, step=gradient) -> ClientApp:
    """An ordinary app: it trains, and knows nothing about gradveil. Its step depends only on the node."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def _(message: Message, context: Context) -> Message:
        assert set(message.content) == {"arrays", "config"}
        context.state["visits"] = ConfigRecord({"count": visits(context) + 1})
        arrays = trained(message.content["arrays"], step(context.node_id))
        metrics = MetricRecord({"num-examples": 10 * context.node_id, "loss": 0.5})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def _(message: Message, _context: Context) -> Message:
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    return app


def visits(context: Context) -> int:
    return context.state["visits"]["count"] if "visits" in context.state else 0


class LoopGrid(Grid):
    """Nodes that are called one after the other; every message and context is serialised as in Flower."""

    def __init__(self, app: ClientApp, nodes=NODES, tamper=lambda _node, reply: [reply]) -> None:
        self.app, self.tamper = app, tamper
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={}) for node in nodes
        }
        self.numbers = itertools.count(1)
        self.sent: list[int] = []
        self.received: list[int] = []

    def set_run(self, run) -> None: ...

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.contexts)

    def get_nodes(self):
        raise NotImplementedError

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"question {next(self.numbers)}"
            packed = message_to_proto(message)
            self.sent.append(packed.ByteSize())
            received = message_from_proto(packed)
            node = received.metadata.dst_node_id
            context = context_from_proto(context_to_proto(self.contexts[node]))
            try:
                reply = self.app(received, context)
            except Exception as error:
                reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=received)
            else:
                self.contexts[node] = context
            for one in self.tamper(node, reply):
                packed = message_to_proto(one)
                self.received.append(packed.ByteSize())
                replies.append(message_from_proto(packed))
        return replies[::-1]  # Flower promises no order


def question(instructions: dict | None = None, config: dict | None = None, kind: str = MessageType.TRAIN) -> Message:
    content = RecordDict({"arrays": start_arrays(), "config": ConfigRecord(config or {"server-round": 1})})
    if instructions is not None:
        content["gradveil"] = ConfigRecord({"lr": LR, "announce": False, "round": 1, "used": 0, **instructions})
    return Message(content, 11, kind)


def context_of(node: int = 11) -> Context:
    return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})


def update_in(reply: Message) -> Update:
    return wire.decode(reply.content["gradveil.update"]["bytes"].data)


def assert_same(one, other, **tolerance) -> None:
    assert list(one) == list(other)
    for name in one:
        torch.testing.assert_close(torch.as_tensor(one[name]), torch.as_tensor(other[name]), **tolerance)


def state_of(record: ArrayRecord) -> dict[str, torch.Tensor]:
    return dict(record.to_torch_state_dict())


def run(strategy, app, *, rounds=1, arrays=None, nodes=NODES, tamper=lambda _node, reply: [reply]):
    grid = LoopGrid(app, nodes, tamper)
    return strategy.start(grid, arrays or start_arrays(), num_rounds=rounds), grid


def wrapped(defense="none", inner=None, **options) -> GradveilStrategy:
    return GradveilStrategy(inner or FedAvg(min_train_nodes=3, fraction_evaluate=0.0), defense, lr=LR, **options)


# -- the mod ---------------------------------------------------------------------------------------------------------


def test_the_update_is_sent_in_gradient_units_with_the_listed_metrics():
    app = client_app(defense_mod("none", lr=LR, metrics=["loss"]))
    reply = app(question({"defense": "none", "round": 7}), context_of())
    assert set(reply.content) == {"gradveil.update", "metrics"}
    assert dict(reply.content["metrics"]) == {"num-examples": 110, "loss": 0.5}
    assert_same(update_in(reply), gradient(11), atol=1e-5, rtol=1e-5)
    assert update_in(reply).meta.round == 7


def test_the_mod_sends_what_the_defense_makes_of_the_update():
    defense = gradveil.defense("dual-pruning", k1=0.05, k2=0.75)
    exact = client_app(defense_mod("none"))(question({"defense": "none"}), context_of())
    sparse = client_app(defense_mod("dual-pruning", k1=0.05, k2=0.75))(
        question({"defense": str(defense)}), context_of()
    )
    assert_same(update_in(sparse), defense.perturb(update_in(exact)), atol=0, rtol=0)


def test_error_feedback_is_kept_in_the_nodes_context():
    spec = "top-k:keep=0.1+error-feedback"
    defense, app = gradveil.defense(spec), client_app(defense_mod(spec, lr=LR))
    contexts, memories = {node: context_of(node) for node in (11, 12)}, {11: {}, 12: {}}
    for number, node in enumerate((11, 12, 11, 11), start=1):
        exact = update_in(client_app(defense_mod("none"))(question({"defense": "none"}), context_of(node)))
        expected = defense.perturb(exact, memory=memories[node])
        used = {1: 0, 2: 0, 3: 1, 4: 3}[number]  # the round of the node's last update
        reply = app(question({"defense": spec, "round": number, "used": used}), contexts[node])
        assert_same(update_in(reply), expected, atol=0, rtol=0)
    assert "residual/0.bias" in contexts[12].state["gradveil.memory"]
    memory = flower.memory(contexts[12])
    assert len(memory) == len(list(memory)) == 4
    del memory["residual/0.bias"]
    assert sorted(flower.memory(contexts[12])) == ["pending/0.bias", "pending/0.weight", "residual/0.weight"]


@pytest.mark.parametrize(
    "spec",
    [
        "top-k:keep=0.1+error-feedback",
        "dual-pruning+error-feedback",
        "aligned-dual-pruning+error-feedback",
        "gaussian-noise:std=0.1+error-feedback",
    ],
)
def test_with_error_feedback_a_reply_that_is_lost_or_refused_takes_nothing(spec):
    """What the server used and what the node owes in the end add up to the node's updates."""
    arrived, replies, rounds = {}, dict.fromkeys(NODES, 0), 6

    def tamper(node, reply):
        if "gradveil.update" not in reply.content:
            return [reply]
        number, replies[node] = replies[node], replies[node] + 1
        if (number + node) % 3 == 0 and number < rounds - 1:  # all arrive in the last round, so nothing is pending
            return [] if number % 2 else [damaged(reply)]
        received = wire.decode(reply.content["gradveil.update"]["bytes"].data, sets[-1])
        for name, value in received.items():
            arrived[node, name] = arrived.get((node, name), 0) + value.double()
        return [reply]

    class Watched(GradveilStrategy):
        def configure_train(self, *args):
            asked = super().configure_train(*args)
            sets.append(self._round.server.locations)
            return asked

    sets = []
    inner = FedAvg(min_train_nodes=3, fraction_evaluate=0.0)
    server = Watched(inner, spec, lr=LR)
    _, grid = run(server, client_app(defense_mod(spec, lr=LR, clip=None)), rounds=rounds, tamper=tamper)
    assert len(server.faults) >= 4
    assert set(replies.values()) == {rounds}
    for node in NODES:
        memory = flower.memory(grid.contexts[node])
        for name, value in gradient(node).items():
            owed = arrived[node, name] + memory[f"residual/{name}"]
            torch.testing.assert_close(owed, rounds * value.double(), atol=1e-4, rtol=1e-4)


def damaged(reply: Message) -> Message:
    """The reply with bytes that are no update."""
    reply = copy.copy(reply)
    reply.content = RecordDict({**reply.content, "gradveil.update": bytes_record(b"nothing")})
    return reply


def test_a_client_that_was_not_told_takes_its_update_to_have_arrived():
    spec = "top-k:keep=0.1+error-feedback"
    app, context, memory = client_app(defense_mod(spec, lr=LR, send="dense")), context_of(), {}
    for number in (1, 2, 3):
        before = {name: value.clone() for name, value in flower.memory(context).items()}
        app(question(config={"server-round": number}), context)
        gradveil.defense(spec).perturb(gradient(11), memory=memory)
    assert before
    for name, value in memory.items():
        torch.testing.assert_close(flower.memory(context)[name], value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("announce", [False, True])
def test_what_the_server_used_last_decides_what_is_owed(announce):
    """Also if the server asks for an announcement first, and if a message in between never reached the client."""
    spec = "aligned-dual-pruning+error-feedback"
    defense, app = gradveil.defense(spec), client_app(defense_mod(spec, lr=LR))
    defense = str(defense)
    for used, factor in ((2, None), (1, 2), (0, 2)):
        context = context_of()
        app(question({"defense": defense, "round": 2}), context)
        held = flower.memory(context)["residual/0.bias"].clone()
        if announce:
            app(question({"defense": defense, "round": 5, "used": used, "announce": True}), context)
        app(question({"defense": defense, "round": 5, "used": used}), context)
        memory = flower.memory(context)
        total = memory["residual/0.bias"] + memory["pending/0.bias"]
        expected = gradient(11)["0.bias"] + held if factor is None else factor * gradient(11)["0.bias"]
        torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)


def test_own_train_functions_settle_with_answer_once():
    defense, context = gradveil.defense("top-k:keep=0.1+error-feedback"), context_of()
    for number, used in ((1, 0), (2, 0)):
        asked = question({"defense": str(defense), "round": number, "used": used})
        flower.answer_once(asked, context, defense=defense)
        if number == 1:
            defense.perturb(gradient(11), memory=flower.memory(context))
    memory = flower.memory(context)
    assert sorted(memory) == ["residual/0.bias", "residual/0.weight"]
    for name, value in gradient(11).items():
        torch.testing.assert_close(memory[f"residual/{name}"], value)


def test_dense_replies_suit_any_strategy():
    """They are start - lr * sent, so that a plain FedAvg takes a step along the mean of the defended updates."""
    defense = gradveil.defense("dual-pruning")
    result, _ = run(
        FedAvg(min_train_nodes=3, fraction_evaluate=0.0), client_app(defense_mod(defense, lr=LR, send="dense"))
    )
    sent = [defense.perturb(gradient(node)) for node in NODES]
    weights = [node / sum(NODES) for node in NODES]
    expected = {
        name: value - LR * sum(weight * update[name] for weight, update in zip(weights, sent, strict=True))
        for name, value in state_of(start_arrays()).items()
    }
    assert_same(state_of(result.arrays), expected, atol=1e-5, rtol=1e-5)


def test_the_rate_may_come_with_the_message():
    app = client_app(defense_mod("none", send="dense"))
    reply = app(question(config={"lr": LR, "server-round": 1}), context_of())
    assert_same(
        state_of(reply.content["arrays"]), state_of(trained(start_arrays(), gradient(11))), atol=1e-5, rtol=1e-5
    )
    with pytest.raises(InputError, match="neither the mod nor the train message says lr; write defense_mod"):
        app(question(), context_of())


@pytest.mark.parametrize("send", ["wire", "dense"])
def test_named_statistics_and_constants_are_sent_as_they_are(send):
    """For several rounds, with a FedAvg that turns whole numbers into floats."""
    named = ["bn.running_mean", "bn.num_batches_tracked"]
    start = {
        "bn.weight": torch.ones(3),
        "bn.running_mean": torch.zeros(3),
        "bn.num_batches_tracked": torch.tensor(4),
        "position_ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
    }
    app = ClientApp(mods=[defense_mod("gaussian-noise:std=1.0", lr=LR, send=send, statistics=named)])

    @app.train()
    def _(message: Message, _context: Context) -> Message:
        got = message.content["arrays"].to_torch_state_dict()
        state = {name: got[name].to(value.dtype) for name, value in start.items()}  # as load_state_dict does
        state["bn.running_mean"] += 2
        state["bn.num_batches_tracked"] += 1
        content = RecordDict({"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    inner = FedAvg(min_train_nodes=3, fraction_evaluate=0.0)
    strategy = wrapped("gaussian-noise:std=1.0", inner, statistics=named) if send == "wire" else inner
    result, grid = run(strategy, app, rounds=3, arrays=ArrayRecord(start))
    assert len(grid.received) == 9
    new = result.arrays.to_torch_state_dict()
    assert new["bn.running_mean"].tolist() == pytest.approx([6, 6, 6])
    assert new["bn.num_batches_tracked"] == pytest.approx(7)
    assert new["position_ids"].tolist() == pytest.approx([0, 1, 2, 3, 4])
    assert new["mask"].tolist() == [1, 0]
    assert not torch.equal(new["bn.weight"], torch.ones(3))
    if send == "wire":
        assert strategy.faults == []
        assert {name: value.dtype for name, value in new.items()} == {n: v.dtype for n, v in start.items()}


@pytest.mark.parametrize("name", DEFENSES.names())
def test_every_defense_becomes_a_mod_or_says_why_not(name):
    defense = gradveil.defense(name)
    if defense.gradient_only and name not in ("secure-aggregation", "risk-slicing", "recup"):
        assert str(defense_mod(name, lr=LR).defense) == str(defense)
        return
    words = {
        "secure-aggregation": "would send every update in the clear",
        "risk-slicing": r"has to look at public data first: d = gradveil.defense\(...\)",
        "recup": r"has to look at public data first: d = gradveil.defense\(...\)",
    }.get(name, rf"{name} needs the client's data, which a mod never sees(.|\n)*defense.share\(task, inputs, labels")
    with pytest.raises(ParameterError, match=words):
        defense_mod(name, lr=LR)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: defense_mod("none", lr=0), "defense_mod: lr must be a number above 0, got 0"),
        (lambda: defense_mod("none", send="post"), "defense_mod: send must be one of wire, dense, got 'post'"),
        (lambda: defense_mod(gradveil.defense("top-k"), keep=0.1), "has its parameters already, got also keep"),
        (lambda: GradveilStrategy(FedAvg(), "none", lr=-1), "GradveilStrategy: lr must be a number above 0, got -1"),
        (lambda: wrapped(max_examples=0), "GradveilStrategy: max_examples must be a whole number from 1"),
        (lambda: wrapped(statistics="bn"), "GradveilStrategy: statistics must be a model .* got 'bn'; write a list"),
        (lambda: defense_mod("none", statistics=[1]), r"defense_mod: statistics must be a model .* got \[1\]"),
        (lambda: defense_mod("none", metrics="loss"), "defense_mod: metrics must be names of metrics, got 'loss'"),
        (lambda: defense_mod("none", arrays=["train"]), "defense_mod: arrays must be one of evaluate, query"),
        (lambda: defense_mod("none", clip=0), "defense_mod: clip must be a number above 0, got 0"),
        (lambda: defense_mod("none", rounds=0), "defense_mod: rounds must be a whole number of at least 1, got 0"),
        (lambda: flower.simulate(None, None, None, None, actors=0), "simulate: actors must be a whole number"),
    ],
)
def test_bad_arguments_are_refused(make, words):
    with pytest.raises(ParameterError, match=words):
        make()


@pytest.mark.parametrize(
    ("mod", "instructions", "words"),
    [
        (defense_mod("none", lr=LR), None, "comes from a server without GradveilStrategy"),
        (defense_mod("none", lr=0.1), {"defense": "none"}, "mod has lr=0.1, the server's strategy lr=0.5"),
        (
            defense_mod("top-k"),
            {"defense": "none"},
            "defends with top-k:keep=0.2, the server's .* expects none",
        ),
        (defense_mod("none"), {"defense": "none", "lr": -1.0}, "flower: the server's lr must be a number above 0"),
        (
            defense_mod("none"),
            {"defense": "none", "epoch": 1},
            "expected instructions .* use the same version of gradveil",
        ),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_anything_is_sent(mod, instructions, words):
    with pytest.raises((InputError, ParameterError), match=words):
        client_app(mod)(question(instructions), context_of())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"arrays": start_arrays(), "more": start_arrays()}, r"expected one ArrayRecord.* got \['arrays', 'more'\]"),
        ({}, r"expected one ArrayRecord.* got \[\]"),
        ({"arrays": ArrayRecord({"0.weight": torch.zeros(50, 40)})}, "they differ in .'0.bias'."),
        (
            {"arrays": ArrayRecord({"0.weight": torch.zeros(40, 50), "0.bias": torch.zeros(50)})},
            "they differ in .'0.weight'.",
        ),
        (
            {"arrays": ArrayRecord({"0.bias": torch.zeros(50), "0.weight": torch.zeros(50, 40)})},
            "differ in their order",
        ),
        ({"arrays": ArrayRecord({"0.weight": torch.full((50, 40), torch.nan), "0.bias": torch.zeros(50)})}, "NaN"),
        (
            {"arrays": ArrayRecord({"0.weight": torch.zeros(50, 40), "0.bias": torch.zeros(50, dtype=torch.int64)})},
            "whole numbers as they were sent, got others in .'0.bias'.",
        ),
        (
            {
                "arrays": ArrayRecord(
                    {"0.weight": torch.zeros(50, 40), "0.bias": torch.zeros(50, dtype=torch.complex64)}
                )
            },
            "no defense knows complex numbers, got torch.complex64 for '0.bias'",
        ),
    ],
)
def test_an_app_whose_reply_cannot_be_defended_sends_nothing(answer, words):
    app = ClientApp(mods=[defense_mod("gaussian-noise", lr=LR)])

    @app.train()
    def _(message: Message, _context: Context) -> Message:
        return Message(RecordDict(answer), reply_to=message)

    with pytest.raises(InputError, match=words):
        app(question({"defense": "gaussian-noise:std=0.01"}), context_of())


def test_an_apps_error_passes():
    app = ClientApp(mods=[defense_mod("none", lr=LR)])

    @app.train()
    def _(message: Message, _context: Context) -> Message:
        return Message(Error(0, "no data"), reply_to=message)

    assert app(question({"defense": "none"}), context_of()).error.reason == "no data"
    assert app(question({"defense": "none", "announce": True}), context_of()).error.reason == "no data"


def test_a_defense_that_needs_the_data_takes_three_lines(tiny_task, tiny_batch):
    defense, app, sent = gradveil.defense("soteria", rate=0.5), ClientApp(), {}

    @app.train()
    def _(message: Message, context: Context) -> Message:
        task = tiny_task.with_parameters(message.content["arrays"].to_torch_state_dict())
        update = defense.share(task, *tiny_batch, memory=flower.memory(context))
        sent[context.node_id] = update
        return flower.reply(message, update, defense, {"loss": 1.5})

    result, _ = run(wrapped(defense), app, arrays=ArrayRecord(tiny_task.parameters))
    assert result.train_metrics_clientapp[1] == {"loss": 1.5, "gradveil-refused": 0}
    for name, value in tiny_task.parameters.items():
        step = sum(update[name] for update in sent.values()) / len(NODES)  # all have the same number of samples
        torch.testing.assert_close(torch.from_numpy(result.arrays[name].numpy()), value - LR * step)
    with pytest.raises(InputError, match="this client defends with soteria:rate=0.5,.* expects none"):
        flower.reply(question({"defense": "none"}), sent[11], defense)


# -- the strategy ----------------------------------------------------------------------------------------------------


def mean_step(updates, weights) -> dict[str, torch.Tensor]:
    return {
        name: value - LR * sum(w * u[name] for w, u in zip(weights, updates, strict=True)) / sum(weights)
        for name, value in state_of(start_arrays()).items()
    }


def test_around_fedavg_nothing_changes_without_a_defense():
    with_us, grid = run(wrapped(), client_app(defense_mod("none", lr=LR, metrics=["loss"])), rounds=3)
    without, _ = run(FedAvg(min_train_nodes=3, fraction_evaluate=0.0), client_app(), rounds=3)
    assert_same(state_of(with_us.arrays), state_of(without.arrays), atol=1e-5, rtol=1e-5)
    assert with_us.train_metrics_clientapp[3] == {"loss": pytest.approx(0.5), "gradveil-refused": 0}
    assert visits(grid.contexts[11]) == 3


def test_sparse_updates_take_few_bytes():
    """A fifth of the values is sent, in 32 bits each and a few for the position; measured on serialised messages."""
    sizes = {}
    for spec in ("none", "dual-pruning"):
        strategy = wrapped(spec)
        _, grid = run(strategy, client_app(defense_mod(spec, lr=LR)))
        sizes[spec] = sum(grid.received)
        assert strategy.uploads == pytest.approx(grid.received, rel=0.25, abs=200)
        assert sum(strategy.downloads) == pytest.approx(sum(grid.sent), rel=0.1)
    values = len(NODES) * (50 * 40 + 50)
    assert sizes["none"] == pytest.approx(4 * values, rel=0.1)
    assert sizes["dual-pruning"] < 0.3 * sizes["none"]


def test_an_inner_strategy_gets_the_clients_own_arrays():
    steps = {11: 0.0, 12: 1.0, 13: 100.0}

    def step(node):
        return {name: torch.full_like(value, steps[node]) for name, value in gradient(0).items()}

    median, _ = run(
        wrapped(inner=FedMedian(min_train_nodes=3, fraction_evaluate=0.0)), client_app(defense_mod("none"), step=step)
    )
    assert_same(state_of(median.arrays), state_of(trained(start_arrays(), step(12))), atol=1e-5, rtol=1e-5)
    krum = wrapped(inner=Krum(min_train_nodes=3, fraction_evaluate=0.0, num_malicious_nodes=1))
    result, _ = run(krum, client_app(defense_mod("none"), step=step))
    far = result.arrays["0.bias"].numpy() - start_arrays()["0.bias"].numpy()
    assert np.abs(far).max() < 2 * LR


def test_compensation_happens_on_the_server():
    task = gradveil.Task(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(40, 50)), input_shape=(1, 5, 8), classes=50
    )
    drawn = torch.Generator().manual_seed(0)
    public = torch.rand(8, 1, 5, 8, generator=drawn), torch.arange(8)
    defense, _ = gradveil.defense("risk-slicing", ratio=0.5, std=0.3).prepare(task, public=public, generator=drawn)
    renamed = {name.replace("1.", "0."): value for name, value in defense.slice_of.items()}
    defense = dataclasses.replace(defense, slice_of=Tensors(renamed))
    sent = {}

    def tap(node, reply):
        sent[node] = update_in(reply)
        return [reply]

    def no_step(_node):
        return {}

    result, _ = run(wrapped(defense), client_app(defense_mod(defense, lr=LR), step=no_step), tamper=tap)
    expected = defense.aggregate([sent[node] for node in NODES], weights=NODES)
    noise = gradveil.defense("none").aggregate([sent[node] for node in NODES], weights=NODES)
    step = {n: (state_of(start_arrays())[n] - v) / LR for n, v in state_of(result.arrays).items()}
    assert_same(step, expected, atol=1e-5, rtol=1e-4)
    assert step["0.weight"].norm() < 0.7 * noise["0.weight"].norm()


@pytest.mark.parametrize("spec", ["aligned-dual-pruning", "aligned-dual-pruning+error-feedback"])
def test_one_client_announces_and_all_send_only_those_locations(spec):
    defense, sent = gradveil.defense(spec), {}

    def tap(node, reply):
        if "gradveil.update" in reply.content:
            sent[node] = reply.content["gradveil.update"]["bytes"].data
        return [reply]

    strategy = wrapped(spec, inner=FedAvg(min_train_nodes=3, fraction_evaluate=0.0))
    result, grid = run(strategy, client_app(defense_mod(spec, lr=LR)), tamper=tap)
    assert not strategy.faults
    # The elected client trained twice, but its app's state is that of one training run.
    assert len(grid.sent) == 4
    assert [visits(context) for context in grid.contexts.values()] == [1, 1, 1]
    publisher = next(
        node
        for node in NODES
        if all(
            wire.digest(inner_of(defense).publish(exact_update(node))) == digest_of(message)
            for message in sent.values()
        )
    )
    public = inner_of(defense).publish(exact_update(publisher))
    updates = [defense.perturb(exact_update(node), memory={}, announced=public) for node in NODES]
    assert_same(state_of(result.arrays), mean_step(updates, NODES), atol=1e-5, rtol=1e-5)
    assert strategy.uploads[-1] > strategy.uploads[0]  # the announcement is counted


def inner_of(defense):
    return getattr(defense, "inner", defense)


def exact_update(node: int) -> Update:
    return update_in(client_app(defense_mod("none"))(question({"defense": "none"}), context_of(node)))


def digest_of(message: bytes) -> bytes:
    return wire._container.read(memoryview(message))[0].digest


def test_a_lying_publisher_is_refused_and_the_next_one_elected():
    first = []

    def tamper(node, reply):
        if "gradveil.locations" in reply.content and not first:
            first.append(node)
            everything = {name: torch.ones_like(value, dtype=torch.bool) for name, value in gradient(0).items()}
            reply.content["gradveil.locations"] = bytes_record(wire.encode_locations(everything))
        return [reply]

    strategy = wrapped("aligned-dual-pruning")
    result, _ = run(strategy, client_app(defense_mod("aligned-dual-pruning", lr=LR)), tamper=tamper)
    [fault] = strategy.faults
    assert fault.client == first[0]
    assert "must mark 800 locations, got 2000" in fault.reason
    assert result.train_metrics_clientapp[1]["gradveil-refused"] == 1


def repaired(message: bytes) -> bytes:
    rest = message[14:]
    return message[:10] + struct.pack("<I", zlib.crc32(rest)) + rest


def with_update(reply: Message, update: Update, number: int | None = 1) -> list[Message]:
    update.meta.round = number
    reply.content["gradveil.update"] = bytes_record(wire.encode(update))
    return [reply]


def with_bytes(reply: Message, change) -> list[Message]:
    data = bytearray(reply.content["gradveil.update"]["bytes"].data)
    reply.content["gradveil.update"] = bytes_record(bytes(change(data)))
    return [reply]


def flip_bit(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 4
    return data


def put_nan(data: bytearray) -> bytes:
    data[-4:] = struct.pack("<f", float("nan"))  # the last value of a dense layer
    return repaired(bytes(data))


def with_metrics(reply: Message, **metrics) -> list[Message]:
    reply.content["metrics"] = MetricRecord(metrics)
    return [reply]


def like(dtype=torch.float32, **changes) -> Update:
    return Update({**{name: value.to(dtype) for name, value in gradient(0).items()}, **changes})


def with_statistic(name: str, value: torch.Tensor):
    def change(reply):
        return with_update(reply, Update(gradient(0), Meta(buffers={name: value})))

    return change


def with_record(key, record):
    def change(reply):
        reply.content[key] = record
        return [reply]

    return change


def without_update(reply):
    del reply.content["gradveil.update"]
    reply.content["arrays"] = start_arrays()
    return [reply]


BAD = {
    "nothing": (lambda _reply: [], "no reply"),
    "error": (lambda reply: [Message(Error(3, "out of memory"), reply_to=back(reply))], "error 3: out of memory"),
    "gone": (lambda reply: [Message(Error(5, "no heartbeat"), reply_to=back(reply))], "error 5: no heartbeat"),
    "short": (lambda reply: with_bytes(reply, lambda data: data[:-3]), "expected the bytes of an encoded update"),
    "bit": (lambda reply: with_bytes(reply, flip_bit), "expected the bytes of an encoded update"),
    "empty": (lambda reply: with_bytes(reply, lambda _data: b""), "expected the bytes of an encoded update"),
    "nan": (lambda reply: with_bytes(reply, put_nan), "values must be finite, got NaN or Inf"),
    "shape": (
        lambda reply: with_update(reply, like(**{"0.bias": torch.zeros(51)})),
        r"expected float32 \[50\] as layer '0.bias', got float32 \[51\]",
    ),
    "type": (
        lambda reply: with_update(reply, like(torch.float64)),
        r"expected float32 \[50, 40\] as layer '0.weight', got float64",
    ),
    "layers": (lambda reply: with_update(reply, like(extra=torch.zeros(1))), "expected nothing as layer 'extra'"),
    "stale": (lambda reply: with_update(reply, like(), 0), "expected an update of round 1, got one of round 0"),
    "no round": (lambda reply: with_update(reply, like(), None), "got one of round None"),
    "dense": (without_update, "it holds no update of gradveil"),
    "more arrays": (with_record("arrays", start_arrays()), r"besides the update: \['arrays'\]"),
    "our arrays": (with_record("gradveil.locations", start_arrays()), r"besides the update: \['gradveil.locations'\]"),
    "arrays as instructions": (with_record("gradveil", start_arrays()), r"besides the update: \['gradveil'\]"),
    "in the model's place": (with_record("arrays", ConfigRecord({"a": 1})), r"besides the update: \['arrays'\]"),
    "two updates": (
        with_record("gradveil.update", ArrayRecord({"a": Array(np.zeros(1)), "b": Array(np.zeros(1))})),
        "expected one array of bytes",
    ),
    "other record": (with_record("gradveil.update", MetricRecord({"a": 1})), "it holds no update of gradveil"),
    "statistic": (
        with_statistic("running_mean", torch.zeros(3)),
        r"expected buffers \{\}, got \{'running_mean'",
    ),
    "weight": (lambda reply: with_metrics(reply, loss=0.5), "expected one MetricRecord with 'num-examples'"),
    "negative": (
        lambda reply: with_metrics(reply, **{"num-examples": -1, "loss": 0.5}),
        "num-examples must be a number from 1 to 1e\\+07, got -1",
    ),
    "no number": (
        lambda reply: with_metrics(reply, **{"num-examples": float("nan"), "loss": 0.5}),
        "num-examples must be a number from 1 to 1e\\+07, got nan",
    ),
    "a list": (
        lambda reply: with_metrics(reply, **{"num-examples": [1, 2], "loss": 0.5}),
        "num-examples must be a number from 1",
    ),
    "half an image": (
        lambda reply: with_metrics(reply, **{"num-examples": 1.5, "loss": 0.5}),
        "num-examples must be a whole number, got 1.5",
    ),
    "more images than anybody has": (
        lambda reply: with_metrics(reply, **{"num-examples": 1.79e308, "loss": 0.5}),
        "num-examples must be a number from 1 to 1e\\+07, got 1.79e\\+308",
    ),
    "metrics": (lambda reply: with_metrics(reply, **{"num-examples": 5, "loss": [0.5]}), "its metrics are"),
    "fewer metrics": (lambda reply: with_metrics(reply, **{"num-examples": 5}), "most others have .'loss'."),
    "a metric of no number": (
        lambda reply: with_metrics(reply, **{"num-examples": 5, "loss": float("nan")}),
        "metrics must be finite, got nan for 'loss'",
    ),
}


KINDS = {"nothing": "missing", "error": "failed", "gone": "missing", "stale": "stale", "no round": "stale"}


def back(reply: Message) -> Message:
    """A message that this is the reply to."""
    message = question()
    message.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    message.metadata.__dict__["_dst_node_id"] = reply.metadata.src_node_id
    return message


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_reply_is_named_and_the_round_continues_with_the_others(fault):
    tamper, words = BAD[fault]
    strategy = wrapped()
    app = client_app(defense_mod("none", lr=LR, metrics=["loss"]))
    result, _ = run(strategy, app, tamper=lambda node, reply: tamper(reply) if node == 12 else [reply])
    [named] = strategy.faults
    assert (named.round, named.client, named.kind) == (1, 12, KINDS.get(fault, "malformed"))
    assert re.search(words, named.reason), named.reason
    assert_same(state_of(result.arrays), mean_step([gradient(11), gradient(13)], [11, 13]), atol=1e-5, rtol=1e-5)
    assert result.train_metrics_clientapp[1]["gradveil-refused"] == 1


def test_a_second_reply_and_a_strangers_are_refused():
    def tamper(node, reply):
        if node == 12:
            return [reply, reply]
        if node == 13:
            stranger = message_from_proto(message_to_proto(reply))
            stranger.metadata.__dict__["_src_node_id"] = 99
            return [stranger]
        return [reply]

    strategy = wrapped()
    result, _ = run(strategy, client_app(defense_mod("none")), tamper=tamper)
    assert {(fault.client, fault.kind) for fault in strategy.faults} == {(12, "duplicate"), (13, "stranger")}
    assert_same(state_of(result.arrays), mean_step([gradient(11), gradient(12)], [11, 12]), atol=1e-5, rtol=1e-5)

    arrays = start_arrays()
    grid = LoopGrid(client_app(defense_mod("none")))
    replies = list(grid.send_and_receive(strategy.configure_train(2, arrays, ConfigRecord(), grid)))
    replies[0].metadata.__dict__["_reply_to_message_id"] = "question of another round"
    strategy.aggregate_train(2, replies)
    assert [fault.kind for fault in strategy.faults[2:]] == ["stranger", "missing"]


def test_if_no_update_is_left_the_model_stays():
    strategy = wrapped()
    result, _ = run(
        strategy, client_app(defense_mod("none")), rounds=2, tamper=lambda _node, reply: BAD["bit"][0](reply)
    )
    assert_same(state_of(result.arrays), state_of(start_arrays()), atol=0, rtol=0)
    assert len(strategy.faults) == 6


def normed_arrays() -> ArrayRecord:
    statistics = {"running_mean": torch.zeros(2), "running_var": torch.ones(2), "num_batches_tracked": torch.tensor(3)}
    return ArrayRecord({**start_arrays().to_torch_state_dict(), **{f"1.{n}": v for n, v in statistics.items()}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("running_var", torch.tensor([1.0, -100.0])),
        ("running_var", torch.tensor([True, True])),
        ("running_mean", torch.zeros(2, dtype=torch.bfloat16)),
        ("running_mean", torch.full((2,), 1e300, dtype=torch.float64)),
        ("running_mean", torch.tensor([0.0, torch.inf])),
        ("running_mean", torch.zeros(3)),
        ("num_batches_tracked", torch.tensor(4.0)),
    ],
)
def test_impossible_statistics_are_refused(name, value):
    names = [name for name in normed_arrays() if name.startswith("1.")]
    strategy, change = wrapped(statistics=names), with_statistic(f"1.{name}", value)
    result, _ = run(
        strategy,
        client_app(defense_mod("none", statistics=names)),
        arrays=normed_arrays(),
        tamper=lambda node, reply: change(reply) if node == 12 else [reply],
    )
    [named] = strategy.faults
    assert (named.client, named.kind) == (12, "malformed")
    assert f"1.{name}" in named.reason
    assert state_of(result.arrays)["1.running_var"].tolist() == [1, 1]


def test_statistics_that_a_client_leaves_out_stay_as_they_were():
    """Also if the defense aggregates itself: one client must not stop the others."""
    names = [name for name in normed_arrays() if name.startswith("1.")]
    change = with_statistic("1.running_mean", torch.full((2,), 3.0))
    strategy = wrapped(ALIGNED, statistics=names)

    def tamper(node, reply):
        return change(reply) if node == 12 and "gradveil.update" in reply.content else [reply]

    result, _ = run(strategy, client_app(defense_mod(ALIGNED, statistics=names)), arrays=normed_arrays(), tamper=tamper)
    assert strategy.faults == []
    mean = state_of(result.arrays)["1.running_mean"].tolist()
    assert mean == pytest.approx([3.0 * 12 / sum(NODES)] * 2)
    assert state_of(result.arrays)["1.running_var"].tolist() == pytest.approx([1, 1])


def test_a_client_whose_reply_was_refused_may_send_another():
    def tamper(node, reply):
        return [reply, *BAD["bit"][0](message_from_proto(message_to_proto(reply)))] if node == 12 else [reply]

    strategy = wrapped()
    result, _ = run(strategy, client_app(defense_mod("none")), tamper=tamper)  # the grid reverses the order
    assert [(fault.client, fault.kind) for fault in strategy.faults] == [(12, "malformed")]
    steps = [gradient(node) for node in NODES]
    assert_same(state_of(result.arrays), mean_step(steps, NODES), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("inner", [FedMedian, FedTrimmedAvg])
def test_strategies_that_take_their_arrays_apart_get_the_defenses_aggregate(inner):
    spec = "aligned-dual-pruning"
    strategy = wrapped(spec, inner(min_train_nodes=3, fraction_evaluate=0.0))
    averaged = wrapped(spec)
    for one in (strategy, averaged):
        random.seed(0)  # Flower shuffles the nodes, and all use the first one's locations
        one.result, _ = run(one, client_app(defense_mod(spec)))
        assert one.faults == []
    assert_same(state_of(strategy.result.arrays), state_of(averaged.result.arrays), atol=1e-6, rtol=1e-6)


def test_a_client_with_another_defense_is_named():
    app = client_app(defense_mod("top-k", lr=LR))
    strategy = wrapped("none")
    run(strategy, app)
    assert {fault.client for fault in strategy.faults} == set(NODES)
    assert "this client defends with top-k:keep=0.2, the server's strategy expects none" in strategy.faults[0].reason


def test_a_model_that_stops_being_finite_stops_the_training():
    class Exploding(FedAvg):
        def aggregate_train(self, server_round, replies):
            _, metrics = super().aggregate_train(server_round, replies)
            return ArrayRecord({"w": torch.tensor([torch.inf])}), metrics

    strategy = wrapped(inner=Exploding(min_train_nodes=3, fraction_evaluate=0.0))
    with pytest.raises(NotFiniteError, match="the model stopped being finite in round 1"):
        run(strategy, client_app(defense_mod("none")))
    with pytest.raises(NotFiniteError, match="start - lr \\* update overflows in 'w'"):
        moved_arrays(ArrayRecord({"w": torch.ones(1)}), Update({"w": torch.full((1,), 3e38)}), lr=4)


def test_an_inner_strategy_that_sends_several_models_is_refused():
    class Several(FedAvg):
        def configure_train(self, *args):
            messages = list(super().configure_train(*args))
            messages[0].content = RecordDict({**messages[0].content, "arrays": start_arrays(5)})
            return messages

    with pytest.raises(InputError, match="Several sends different models to the clients of a round"):
        run(wrapped(inner=Several(min_train_nodes=3, fraction_evaluate=0.0)), client_app(defense_mod("none")))


def test_the_inner_strategy_decides_about_rounds_without_training_and_evaluation():
    strategy = GradveilStrategy(FedAvg(fraction_train=0.0, min_evaluate_nodes=3), "none", lr=LR)
    grid = LoopGrid(client_app())
    assert list(strategy.configure_train(1, start_arrays(), ConfigRecord(), grid)) == []
    with pytest.raises(InputError, match="round 1 was aggregated before it was configured"):
        strategy.aggregate_train(1, [])
    assert len(list(strategy.configure_evaluate(1, start_arrays(), ConfigRecord(), grid))) == 3
    assert strategy.aggregate_evaluate(1, []) is None


def test_mutated_updates_never_move_the_model():
    """One to three bytes of every update in every round are changed, and the checksum is not."""
    rng, strategy = random.Random(0), wrapped()
    arrays, grid = start_arrays(), LoopGrid(client_app(defense_mod("none")), nodes=NODES)
    for number in range(1, 61):

        def change(data):
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
            return data

        grid.tamper = lambda _node, reply, change=change: with_bytes(reply, change)
        replies = grid.send_and_receive(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        assert strategy.aggregate_train(number, replies) == (None, None)
    assert len(strategy.faults) == 60 * len(NODES)


# -- a hostile server ------------------------------------------------------------------------------------------------


NOISE = "gaussian-noise:std=0.3"
ALIGNED = "aligned-dual-pruning:k1=0.05,keep=0.2"


def obedient_app(mod, *, lr: float = LR) -> ClientApp:
    """An app that trains with the rate that the server writes into the message, as many do."""
    app = ClientApp(mods=[mod])

    @app.train()
    def _(message: Message, context: Context) -> Message:
        rate, state = message.content["config"].get("lr", lr), message.content["arrays"].to_torch_state_dict()
        arrays = ArrayRecord({name: state[name] - rate * step for name, step in gradient(context.node_id).items()})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def flat(layers) -> torch.Tensor:
    return torch.cat([torch.as_tensor(layers[name]).double().flatten() for name in gradient(0)])


def cosine(one, other) -> float:
    return float(torch.nn.functional.cosine_similarity(flat(one), flat(other), dim=0))


def sent_by(app: ClientApp, message: Message, context: Context | None = None) -> dict[str, torch.Tensor]:
    """What the server sees of the update, in gradient units, however it was sent."""
    reply = app(message, context or context_of())
    if "gradveil.update" in reply.content:
        return update_in(reply)
    start, end = state_of(message.content["arrays"]), state_of(reply.content["arrays"])
    return {name: (start[name] - end[name]) / LR for name in start}


@pytest.mark.parametrize("send", ["wire", "dense"])
def test_a_server_cannot_drown_the_noise_with_its_learning_rate(send):
    """The mod divides by the rate it was given; the app trains with the ten thousand in the message."""
    attack = {"lr": 1e4, "server-round": 1}
    instructions = {"defense": NOISE} if send == "wire" else None
    bare = sent_by(obedient_app(defense_mod(NOISE, lr=LR, send=send, clip=None)), question(instructions, attack))
    assert cosine(bare, gradient(11)) > 0.9999  # the attack works
    held = sent_by(obedient_app(defense_mod(NOISE, lr=LR, send=send)), question(instructions, attack))
    noise = 0.3 * math.sqrt(len(flat(held)))
    assert float(flat(held).norm()) < 1.3 * math.hypot(noise, 10)
    assert cosine(held, gradient(11)) == pytest.approx(10 / math.hypot(noise, 10), abs=0.1)


def test_a_server_whose_rate_is_trusted_cannot_drown_the_noise_either():
    app = obedient_app(defense_mod(NOISE))
    held = sent_by(app, question({"defense": NOISE, "lr": 1e-6}, {"lr": LR}))
    assert cosine(held, gradient(11)) < 0.8


@pytest.mark.parametrize(
    ("spec", "clip"),
    [
        ("none", None),
        ("dual-pruning+error-feedback", None),
        ("top-k+quantization", None),
        ("gaussian-noise", 10.0),
        ("laplace-noise", 10.0),
        ("gradient-dropout", 10.0),
        ("top-k+laplace-noise", 10.0),
        ("gaussian-noise+error-feedback", 10.0),
    ],
)
def test_defenses_with_noise_have_a_norm_by_default(spec, clip):
    assert defense_mod(spec, lr=LR).clip == clip
    assert defense_mod(spec, lr=LR, clip=3).clip == 3
    assert defense_mod(spec, lr=LR, clip=None).clip is None


class Holding(type(gradveil.defense("none"))):
    """Sends nothing, so that error feedback keeps everything; it claims to add noise, so that updates are clipped."""

    name = "holding"
    adds_noise = True

    def perturb_layers(self, layers, draws, announced=None):
        self.given.append(math.hypot(*(float(value.norm()) for value in layers.values())))
        return {name: torch.zeros_like(value) for name, value in layers.items()}


def test_what_error_feedback_keeps_does_not_grow_past_the_norm(caplog):
    holding = Holding()
    holding.given = []
    defense = gradveil.ErrorFeedback(holding)
    app, context = obedient_app(defense_mod(defense, lr=LR)), context_of()
    for number in range(1, 7):
        app(question({"defense": str(defense), "round": number}, {"lr": 100.0}), context)
    assert holding.given == pytest.approx([10, 20, 20, 20, 20, 20], rel=1e-4)
    assert re.search(r"the update has norm [\d.e+]+, cut to 10; see defense_mod", caplog.text)
    assert "what error feedback kept has norm 20, cut to 10" in caplog.text


def test_an_update_within_the_norm_is_not_touched(caplog):
    exact = update_in(client_app(defense_mod("none", clip=100))(question({"defense": "none"}), context_of()))
    assert_same(exact, exact_update(11), atol=0, rtol=0)
    assert "cut to" not in caplog.text


def test_a_norm_that_cannot_be_computed_sends_no_signal():
    """Squares of such values overflow even double precision."""
    assert mod._clipped({"w": torch.full((3,), 1e200, dtype=torch.float64)}, 10.0, "it")["w"].tolist() == [0, 0, 0]
    assert mod._clipped({"w": torch.full((4,), 60000.0, dtype=torch.float16)}, 10.0, "it")["w"].tolist() == [5] * 4


@pytest.mark.parametrize("send", ["wire", "dense"])
def test_a_round_is_answered_once(send):
    """The average of two thousand answers to one request has no noise left."""
    app, context = client_app(defense_mod(NOISE, lr=LR, send=send)), context_of()

    def ask(number):
        return app(
            question({"defense": NOISE, "round": number} if send == "wire" else None, {"server-round": number}), context
        )

    ask(3)
    for number in (3, 3, 2, 1):
        with pytest.raises(InputError, match=f"expected a round after 3, got round {number} again"):
            ask(number)
    ask(4)
    assert visits(context) == 2  # the app did not even train for the others
    context.run_id = 2  # another run counts from 1 again
    ask(1)
    with pytest.raises(InputError, match="expected a round after 1, got round 1 again"):
        ask(1)


def test_a_server_that_repeats_itself_gets_one_answer_through_flowers_serialisation():
    grid = LoopGrid(client_app(defense_mod(NOISE, lr=LR)))
    replies = grid.send_and_receive([question({"defense": NOISE}) for _ in range(20)])
    assert sum(reply.has_content() for reply in replies) == 1


@pytest.mark.parametrize("send", ["wire", "dense"])
def test_a_budget_of_rounds_ends(send):
    app, context = client_app(defense_mod(NOISE, lr=LR, send=send, rounds=2)), context_of()
    for number in (5, 9):
        app(
            question({"defense": NOISE, "round": number} if send == "wire" else None, {"server-round": number}), context
        )
    context.run_id = 2  # the budget is the context's
    with pytest.raises(InputError, match="this client answers 2 rounds and has answered 2; if more are wanted"):
        app(question({"defense": NOISE, "round": 10} if send == "wire" else None, {"server-round": 10}), context)


def test_announcing_and_training_are_one_round_and_each_happens_once():
    app, context = client_app(defense_mod(ALIGNED, lr=LR, rounds=2)), context_of()

    def ask(number, announce):
        return app(question({"defense": ALIGNED, "round": number, "announce": announce}), context)

    ask(1, True)
    ask(1, False)
    for announce in (True, False):
        with pytest.raises(InputError, match="expected a round after 1, got round 1 again"):
            ask(1, announce)
    ask(9, True)
    with pytest.raises(InputError, match="expected a round after 9, got round 9 again"):
        ask(9, True)
    with pytest.raises(InputError, match="expected a round after 9, got round 5 again"):
        ask(5, False)  # it would not count against the budget
    ask(9, False)
    with pytest.raises(InputError, match="answers 2 rounds and has answered 2"):
        ask(10, True)


def test_a_dense_server_without_numbers_is_answered_only_within_a_budget():
    unnumbered = {"epochs": 1}
    with pytest.raises(InputError, match=r"'server-round' in the train message's config, got none.*rounds=N"):
        client_app(defense_mod(NOISE, lr=LR, send="dense"))(question(config=unnumbered), context_of())
    app, context = client_app(defense_mod(NOISE, lr=LR, send="dense", rounds=2)), context_of()
    for _ in range(2):
        app(question(config=unnumbered), context)
    with pytest.raises(InputError, match="answers 2 rounds and has answered 2"):
        app(question(config=unnumbered), context)
    twice = question()
    twice.content["more"] = ConfigRecord({"server-round": 7})
    with pytest.raises(InputError, match=r"got \[1, 7\], so that a round is answered once"):
        app(twice, context_of())


def test_an_app_that_forgets_or_fails_does_not_make_the_client_forget():
    app = ClientApp(mods=[defense_mod("none", lr=LR)])

    @app.train()
    def _(message: Message, context: Context) -> Message:
        context.state = RecordDict()
        if context.node_id == 12:
            return Message(Error(0, "no data"), reply_to=message)
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    for context in (context_of(11), context_of(12)):
        app(question({"defense": "none"}), context)
        with pytest.raises(InputError, match="got round 1 again"):
            app(question({"defense": "none"}), context)


@pytest.mark.parametrize(
    "instructions", [{"round": 0}, {"round": 1.5}, {"round": "1"}, {"announce": 1}, {"lr": "fast"}, {"lr": math.nan}]
)
def test_malformed_instructions_are_refused(instructions):
    with pytest.raises(ParameterError, match="flower: the server's "):
        client_app(defense_mod("none"))(question({"defense": "none", **instructions}), context_of())


def test_a_weight_is_defended_whatever_it_is_called():
    """A server may call the first layer's weight a running mean."""
    app = ClientApp(mods=[defense_mod("gaussian-noise:std=1.0", lr=LR)])

    @app.train()
    def _(message: Message, _context: Context) -> Message:
        state = message.content["arrays"].to_torch_state_dict()
        arrays = ArrayRecord({name: value - 1.0 for name, value in state.items()})
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    message = question({"defense": "gaussian-noise:std=1.0"})
    message.content["arrays"] = ArrayRecord({"0.running_mean": torch.zeros(400), "0.running_var": torch.zeros(400)})
    update = update_in(app(message, context_of()))
    assert set(update) == {"0.running_mean", "0.running_var"}
    assert not update.meta.buffers
    for value in update.values():
        assert float(value.std()) == pytest.approx(1.0, abs=0.2)


def normed_app(mod) -> ClientApp:
    app = ClientApp(mods=[mod])

    @app.train()
    def _(message: Message, _context: Context) -> Message:
        model = normed_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        model.train()(torch.ones(4, 3) * torch.arange(4)[:, None])
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 4})}
        return Message(RecordDict(content), reply_to=message)

    return app


def normed_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def test_a_models_buffers_are_its_statistics():
    strategy = wrapped("none", statistics=normed_model())
    app = normed_app(defense_mod("none", lr=LR, statistics=normed_model()))
    result, _ = run(strategy, app, rounds=2, arrays=ArrayRecord(normed_model().state_dict()))
    assert strategy.faults == []
    assert result.arrays["1.num_batches_tracked"].numpy() == 2
    assert np.abs(result.arrays["1.running_mean"].numpy()).min() > 0


def test_statistics_that_nobody_named_are_not_sent():
    message = question({"defense": "none"})
    message.content["arrays"] = ArrayRecord(normed_model().state_dict())
    with pytest.raises(InputError, match=r"got others in \['1.num_batches_tracked'\].*statistics=model"):
        normed_app(defense_mod("none", lr=LR))(message, context_of())
    strategy = wrapped("none")
    app = normed_app(defense_mod("none", lr=LR, statistics=normed_model()))
    run(strategy, app, arrays=ArrayRecord(normed_model().state_dict()))
    assert {fault.kind for fault in strategy.faults} == {"malformed"}
    with pytest.raises(InputError, match=r"expected the statistics \['1.running_meen'\] among the model's arrays"):
        client_app(defense_mod("none", statistics=["1.running_meen"]))(question({"defense": "none"}), context_of())


def answering_app(mod, content) -> ClientApp:
    """Answers every kind of message with the same records."""
    app = ClientApp(mods=[mod])
    for kind in (app.train, app.evaluate, app.query):
        kind()(lambda message, _context: Message(RecordDict(content), reply_to=message))
    return app


@pytest.mark.parametrize("kind", ["evaluate", "query", "evaluate.special", "query.weights"])
def test_arrays_are_sent_outside_of_training_only_if_the_client_allows_it(kind):
    content, base = {"arrays": start_arrays()}, kind.partition(".")[0]

    def app(**options):
        made = answering_app(defense_mod(NOISE, lr=LR, **options), content)
        for add in (made.evaluate, made.query):
            for action in ("special", "weights"):
                add(action)(lambda message, _context: Message(RecordDict(content), reply_to=message))
        return made

    with pytest.raises(InputError, match=rf"expected no arrays in the reply to a message of type '{base}'"):
        app()(question(kind=kind), context_of())
    other = "query" if base == "evaluate" else "evaluate"
    with pytest.raises(InputError, match="expected no arrays"):
        app(arrays=[other])(question(kind=kind), context_of())
    assert app(arrays=[base])(question(kind=kind), context_of()).content["arrays"] == start_arrays()


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
def test_only_listed_metrics_and_config_values_are_sent(kind, caplog):
    content = {
        "metrics": MetricRecord({"num-examples": 3, "loss": 0.5, "pixels": [0.1, 0.2]}),
        "more": MetricRecord({"pixels": [0.3]}),
        "config": ConfigRecord({"num-examples": "raw", "image": b"raw", "note": "hello"}),
    }
    if kind == "train":
        content["arrays"] = start_arrays()
    app = answering_app(defense_mod("none", lr=LR, metrics=["loss", "note"]), content)
    reply = app(question({"defense": "none"}, kind=kind), context_of())
    got = {key: dict(record) for key, record in reply.content.items() if key != "gradveil.update"}
    assert got == {"metrics": {"num-examples": 3, "loss": 0.5}, "config": {"note": "hello"}}
    assert "left out of the reply: image, num-examples, pixels, pixels" in caplog.text
    content["metrics"] = MetricRecord({"num-examples": [0.1, 0.2]})
    app = answering_app(defense_mod("none", lr=LR), content)
    assert set(app(question({"defense": "none"}, kind=kind), context_of()).content) <= {"gradveil.update"}


@pytest.mark.parametrize("kind", ["train", "announce", "evaluate", "query"])
@pytest.mark.parametrize("key", ["gradveil", "gradveil.update", "gradveil.locations", "gradveil.memory"])
def test_an_app_cannot_use_our_names(kind, key):
    for record in (start_arrays(), ConfigRecord({"a": 1}), MetricRecord({"a": 1})):
        app = answering_app(
            defense_mod(ALIGNED, lr=LR, arrays=["evaluate", "query"]), {"arrays": start_arrays(), key: record}
        )
        message = question({"defense": ALIGNED, "announce": kind == "announce"}, kind=kind.replace("announce", "train"))
        with pytest.raises(InputError, match=f"which gradveil keeps for itself, got .'{key}'."):
            app(message, context_of())


@pytest.mark.parametrize(
    ("locations", "error", "words"),
    [
        ({"0.weight": torch.zeros(3_000_000, dtype=torch.bool)}, DataError, "expected at most 2,050 values"),
        ({"0.weight": torch.zeros(40, 50, dtype=torch.bool)}, InputError, r"got \[40, 50\] for '0.weight', which has"),
        ({"1.weight": torch.zeros(5, dtype=torch.bool)}, InputError, r"'1.weight', which has no such layer"),
    ],
)
def test_an_announcement_is_read_within_the_models_size(locations, error, words):
    message = question({"defense": ALIGNED})
    message.content["gradveil.locations"] = bytes_record(wire.encode_locations(locations))
    with pytest.raises(error, match=words):
        flower.announced(message)
    app, context = client_app(defense_mod(ALIGNED, lr=LR)), context_of()
    with pytest.raises(error, match=words):
        app(message, context)
    assert visits(context) == 0


# -- hostile clients -------------------------------------------------------------------------------------------------


def evaluating_app(metrics=lambda node: {"num-examples": node, "accuracy": node / 100}) -> ClientApp:
    app = ClientApp(mods=[defense_mod("none", lr=LR, metrics=["accuracy", "loss"])])

    @app.train()
    def _(message: Message, context: Context) -> Message:
        arrays = trained(message.content["arrays"], gradient(context.node_id))
        records = {"arrays": arrays, "metrics": MetricRecord(metrics(context.node_id))}
        return Message(RecordDict(records), reply_to=message)

    @app.evaluate()
    def _(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord(metrics(context.node_id))}), reply_to=message)

    return app


def replaced(*records):
    def change(reply):
        reply.content = RecordDict({f"metrics{index or ''}": record for index, record in enumerate(records)})
        return [reply]

    return change


BAD_EVALUATIONS = {
    "nothing": (lambda _reply: [], "missing", "no reply"),
    "an error": (lambda reply: [Message(Error(3, "broken"), reply_to=back(reply))], "failed", "error 3: broken"),
    "no metrics": (replaced(), "malformed", "expected one MetricRecord"),
    "two records": (replaced(*[MetricRecord({"num-examples": 1, "accuracy": 1.0})] * 2), "malformed", "expected one"),
    "other metrics": (replaced(MetricRecord({"num-examples": 1})), "malformed", "most others have .'accuracy'."),
    "a list": (replaced(MetricRecord({"num-examples": 1, "accuracy": [1.0]})), "malformed", "its metrics are"),
    "no weight": (replaced(MetricRecord({"accuracy": 1.0})), "malformed", "expected one MetricRecord"),
    "weights": (replaced(MetricRecord({"num-examples": [1], "accuracy": 1.0})), "malformed", "must be a number"),
    "no number": (replaced(MetricRecord({"num-examples": 1, "accuracy": math.nan})), "malformed", "must be finite"),
    "a huge weight": (replaced(MetricRecord({"num-examples": 1.79e308, "accuracy": 1.0})), "malformed", "from 1 to"),
    "arrays": (with_record("arrays", start_arrays()), "malformed", "got also the arrays .'arrays'."),
    "config instead": (replaced(ConfigRecord({"num-examples": 1})), "malformed", "expected one MetricRecord"),
    "two replies": (lambda reply: [reply, reply], "duplicate", "the first counts"),
}


@pytest.mark.parametrize("fault", BAD_EVALUATIONS)
def test_a_bad_evaluation_is_named_and_the_others_are_averaged(fault):
    change, kind, words = BAD_EVALUATIONS[fault]

    def tamper(node, reply):
        training = reply.has_content() and "gradveil.update" in reply.content
        return change(reply) if node == 12 and not training else [reply]

    strategy = wrapped(inner=FedAvg(min_train_nodes=3, min_evaluate_nodes=3))
    result, _ = run(strategy, evaluating_app(), rounds=2, tamper=tamper)
    assert [(named.round, named.client, named.kind) for named in strategy.faults] == [(1, 12, kind), (2, 12, kind)]
    assert re.search(words, strategy.faults[0].reason), strategy.faults[0].reason
    nodes = NODES if kind == "duplicate" else (11, 13)
    expected = sum(node * node / 100 for node in nodes) / sum(nodes)
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(expected)


def test_if_no_evaluation_is_left_the_training_goes_on():
    def tamper(_node, reply):
        return [reply] if "gradveil.update" in reply.content else []

    strategy = wrapped(inner=FedAvg(min_train_nodes=3, min_evaluate_nodes=3))
    result, _ = run(strategy, evaluating_app(), rounds=2, tamper=tamper)
    assert result.evaluate_metrics_clientapp == {}
    assert len(strategy.faults) == 6


def test_huge_weights_do_not_set_the_model_to_zero():
    def tamper(node, reply):
        return [reply] if node == 11 else with_metrics(reply, **{"num-examples": 1.79e308, "loss": 0.5})

    strategy = wrapped()
    result, _ = run(strategy, client_app(defense_mod("none", lr=LR, metrics=["loss"])), tamper=tamper)
    assert_same(state_of(result.arrays), mean_step([gradient(11)], [1]), atol=1e-5, rtol=1e-5)
    assert {fault.client for fault in strategy.faults} == {12, 13}


def test_weights_up_to_the_bound_count():
    strategy = wrapped(max_examples=120)
    run(strategy, client_app(defense_mod("none", lr=LR)))  # they have 110, 120 and 130
    [fault] = strategy.faults
    assert (fault.client, fault.reason) == (13, "reply: num-examples must be a number from 1 to 120, got 130")


@pytest.mark.parametrize("odd", [11, 12])
@pytest.mark.parametrize(
    "metrics",
    [{"accuracy": [1.0]}, {"accuracy": 0.5, "loss": 1.0}, {"loss": 1.0}, {}],
    ids=lambda m: "+".join(m) or "none",
)
def test_with_two_nodes_an_odd_one_cannot_get_the_other_refused(odd, metrics):
    def of(node):
        return {"num-examples": 10, **(metrics if node == odd else {"accuracy": 0.5})}

    strategy = wrapped(inner=FedAvg())
    result, _ = run(strategy, evaluating_app(of), nodes=(11, 12))  # the grid answers in the order 12, 11
    assert strategy.faults == []
    assert_same(state_of(result.arrays), mean_step([gradient(11), gradient(12)], [1, 1]), atol=1e-5, rtol=1e-5)
    shared = {"accuracy": 0.5} if metrics.get("accuracy") == 0.5 else {}
    assert result.train_metrics_clientapp[1] == {**shared, "gradveil-refused": 0}
    assert result.evaluate_metrics_clientapp[1] == shared


@pytest.mark.parametrize("odd", [11, 12])
def test_with_two_nodes_a_record_of_another_name_stops_nobody(odd):
    def tamper(node, reply):
        if node == odd:
            reply.content["figures"] = reply.content.pop("metrics")
        return [reply]

    strategy = wrapped(inner=FedAvg())
    result, _ = run(strategy, evaluating_app(), nodes=(11, 12), tamper=tamper)
    assert strategy.faults == []
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx((1.21 + 1.44) / 23)


# -- the simulated training ------------------------------------------------------------------------------------------


def in_process(job, work, server, *, clients, actors):  # noqa: ARG001
    """Flower's server app and client app, called one after the other instead of on Ray."""
    app = ClientApp()
    app.train()(lambda message, context: work(job, message, context))
    server(LoopGrid(app, nodes=range(100, 100 + clients)), context_of())


FIVE = Training(rounds=5, clients=4, clients_per_round=3, batch_size=16, lr=0.05, evaluate_every=2, seed=3)


def task_for(dataset, *layers) -> gradveil.Task:
    """In double precision and with a third class, so that rounding does not decide which of two values is pruned: with
    two classes the gradients of the last layer are equal except for the sign."""
    shape = dataset.train.input_shape
    torch.manual_seed(0)
    layers = layers or (torch.nn.Flatten(), torch.nn.Linear(144, 20), torch.nn.Sigmoid(), torch.nn.Linear(20, 3))
    return gradveil.Task(torch.nn.Sequential(*layers).double(), input_shape=shape, classes=3)


def batch_norm() -> tuple[torch.nn.Module, ...]:
    nn = torch.nn
    return nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Sigmoid(), nn.Flatten(), nn.Linear(300, 3)


@pytest.mark.parametrize(
    ("spec", "layers", "changes"),
    [
        ("none", (), {}),
        ("none", batch_norm(), {}),
        ("none", (), {"local": gradveil.LocalSteps(2, 8, 0.05), "momentum": 0.0, "scheme": "classes"}),
        ("none", (), {"optimiser": "adam", "schedule": "cosine", "lr": 0.01}),
        ("gaussian-noise:std=0.01", (), {}),
        ("dual-pruning+error-feedback", (), {}),
        ("aligned-dual-pruning+error-feedback", (), {}),
        ("risk-slicing:ratio=0.5", (), {"rounds": 2}),
        ("dp-sgd", (), {"scheme": "dirichlet"}),
        ("soteria", (), {"rounds": 2}),
    ],
)
def test_flower_trains_what_the_local_engine_trains(two_blobs, monkeypatch, spec, layers, changes):
    monkeypatch.setattr(simulation, "run_on_ray", in_process)
    training, seen, done = dataclasses.replace(FIVE, **changes), [], []
    here = train(task_for(two_blobs, *layers), two_blobs, gradveil.defense(spec), training)
    there = ENGINES.create("flower").train(
        task_for(two_blobs, *layers),
        two_blobs,
        gradveil.defense(spec),
        training,
        watch=seen.append,
        progress=lambda *figures: done.append(figures),
    )
    assert done == [(number + 1, training.rounds) for number in range(training.rounds)]
    assert_same(there.task.parameters, here.task.parameters, atol=1e-12, rtol=1e-9)
    assert_same(there.task.buffers, here.task.buffers, atol=1e-12, rtol=1e-9)
    assert there.upload_bytes == pytest.approx(here.upload_bytes, rel=0.01, abs=100)
    assert there.download_bytes >= 8 * here.task.size
    assert (there.accuracy, there.history, there.privacy) == (here.accuracy, here.history, here.privacy)
    assert [(r.round, r.clients, r.loss) for r in seen] == [
        (r.round, r.clients, pytest.approx(r.loss, rel=1e-6)) for r in here.rounds
    ]


def test_a_diverging_simulation_stops_in_the_same_round(two_blobs, monkeypatch):
    monkeypatch.setattr(simulation, "run_on_ray", in_process)
    training = dataclasses.replace(FIVE, lr=1e200)
    layers = torch.nn.Flatten(), torch.nn.Linear(144, 8), torch.nn.Linear(8, 3)
    here = train(task_for(two_blobs, *layers), two_blobs, gradveil.defense("none"), training)
    there = flower.simulate(task_for(two_blobs, *layers), two_blobs, gradveil.defense("none"), training)
    assert there.diverged == here.diverged is not None
    assert there.history == here.history
    assert all(torch.isfinite(value).all() for value in there.task.parameters.values())


def test_a_step_that_is_not_finite_is_not_taken(two_blobs, monkeypatch):
    finite = iter([True, True, False])
    monkeypatch.setattr(strategy, "_is_finite", lambda _record: next(finite))
    monkeypatch.setattr(simulation, "run_on_ray", in_process)
    stopped = flower.simulate(task_for(two_blobs), two_blobs, gradveil.defense("none"), FIVE)
    two = train(task_for(two_blobs), two_blobs, gradveil.defense("none"), dataclasses.replace(FIVE, rounds=2))
    assert stopped.diverged == 2
    assert stopped.history[-1] == two.history[-1]
    assert_same(stopped.task.parameters, two.task.parameters, atol=1e-12, rtol=1e-9)


def test_a_client_that_is_not_finite_once_is_left_out_as_in_the_local_engine(two_blobs, monkeypatch):
    class Once(type(gradveil.defense("none"))):
        gradient_only = False

        def __init__(self):
            object.__setattr__(self, "bad", [])

        def make_update(self, client):
            update = super().make_update(client)
            if not self.bad:
                self.bad.append(client.inputs.sum())
            if client.inputs.sum() == self.bad[0]:
                raise NotFiniteError("gradients must be finite")
            return update

    monkeypatch.setattr(simulation, "run_on_ray", in_process)
    here = train(task_for(two_blobs), two_blobs, Once(), FIVE)
    there = flower.simulate(task_for(two_blobs), two_blobs, Once(), FIVE)
    assert there.diverged is here.diverged is None
    assert [(f.round, f.kind) for f in there.faults] == [(f.round, f.kind) for f in here.faults] == [(0, "not finite")]
    assert [record.clients for record in there.rounds] == [record.clients for record in here.rounds]
    assert_same(there.task.parameters, here.task.parameters, atol=1e-12, rtol=1e-9)


def test_a_failing_simulated_client_is_an_error(two_blobs, monkeypatch):
    class Broken(type(gradveil.defense("none"))):
        def make_update(self, client):
            raise InputError("broken on purpose")

    monkeypatch.setattr(simulation, "run_on_ray", in_process)
    with pytest.raises(InputError, match="flower: round 1, client 10.: failed: error 2: .*broken on purpose"):
        flower.simulate(task_for(two_blobs), two_blobs, Broken(), FIVE)


def test_the_simulation_sends_no_telemetry(monkeypatch):
    """Neither from this process nor from those that Ray starts, which read the environment."""
    module, seen = importlib.import_module("flwr.simulation.run_simulation"), []

    def run_simulation(**_options):
        module.event("one more simulation")
        seen.append({name: os.environ.get(name) for name in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED")})

    def report(*_details):
        raise AssertionError("something was reported")

    def nothing(*_args, **_options):
        return False

    ray = types.SimpleNamespace(is_initialized=nothing, init=nothing, put=nothing, shutdown=nothing)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(module, "_run_simulation", run_simulation)
    monkeypatch.setattr(module, "event", report)
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    run_on_ray(None, None, None, clients=4, actors=1)
    assert seen == [{"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}]
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "1"
    assert "RAY_USAGE_STATS_ENABLED" not in os.environ
    assert module.event is report


ON_RAY = """
import urllib.request
reports = []
urllib.request.urlopen = lambda *args, **options: reports.append(args)
import torch, gradveil
from gradveil import models
from gradveil.data import Dataset, Split
from gradveil.federation import Training, train

torch.set_num_threads(1)
images = torch.randint(0, 256, (400, 1, 12, 12), dtype=torch.uint8, generator=torch.manual_seed(0))
labels = (images[:, 0, :6].sum((1, 2)) > images[:, 0, 6:].sum((1, 2))).long()
trained, tested = Split(images[:300], labels[:300]), Split(images[300:], labels[300:])
dataset = Dataset("noise", ("below", "above"), "-", trained, tested)
task = gradveil.Task(models.create("mlp", input_shape=(1, 12, 12), classes=2), input_shape=(1, 12, 12), classes=2)
training = Training(rounds=5, clients=4, clients_per_round=3, batch_size=16, lr=0.1, evaluate_every=2, seed=3)
job = task, dataset, gradveil.defense("none"), training
here, there = train(*job), gradveil.flower.simulate(*job, actors=2)
far = max(float((there.task.parameters[n] - here.task.parameters[n]).abs().max()) for n in task.parameters)
moved = max(float((task.parameters[n] - here.task.parameters[n]).abs().max()) for n in task.parameters)
print(far, moved, here.history == there.history, len(reports))
"""


@pytest.mark.parametrize("kind", ["digits", "table", "text"])
def test_the_command_line_trains_on_flower(monkeypatch, capsys, tmp_path, kind):
    monkeypatch.setattr(simulation, "run_on_ray", in_process)
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main sets its own
    results, data, model, least_values = [], [], "mlp", 28 * 28
    if kind == "table":
        rows = [f"{place % 60},{'abc'[place % 3]},{'no' if place % 7 < 3 else 'yes'}" for place in range(200)]
        (tmp_path / "rows.csv").write_text("\n".join(["age,kind,answer", *rows]))
        data, least_values = ["--dataset", str(tmp_path / "rows.csv"), "--target", "answer"], 200
    if kind == "text":
        films = ["dull", "film", "with", "a", "great", "plot"]
        lines = [f"{'no' if place % 2 else 'yes'}\t{films[place % 6]} {films[place % 5]}" for place in range(200)]
        (tmp_path / "films.tsv").write_text("\n".join(lines))
        data, least_values = ["--dataset", f"{tmp_path / 'films.tsv'}:length=4"], 200
        model = "text-transformer:width=8,depth=1,heads=2"
    for engine in ("local", "flower"):
        words = f"train --engine {engine} --model {model} --rounds 2 --clients 3 --batch-size 8 --json".split() + data
        monkeypatch.setattr(sys, "argv", ["gradveil", *words])
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        results.append(json.loads(capsys.readouterr().out))
    here, there = results
    assert there["accuracy"] == here["accuracy"]
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-4)
    assert there["download_bytes"] > 4 * least_values


@pytest.mark.slow
def test_the_same_on_ray():
    """Five rounds on Flower's own simulation, undefended: the local engine's weights to 1e-4.

    In a process of its own, since Ray leaves subprocesses to the interpreter's end.
    """
    switches = ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED")
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    done = subprocess.run([sys.executable, "-c", ON_RAY], capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr
    far, moved, same_curve, reports = done.stdout.split()
    assert reports == "0"
    assert float(far) < 1e-4 < 1e-2 < float(moved)
    assert same_curve == "True"


# -- Flower is optional ----------------------------------------------------------------------------------------------


def test_it_is_an_attribute_of_the_package_and_an_ordinary_module():
    imported = importlib.import_module("gradveil.flower")
    assert gradveil.flower is imported
    assert {name: getattr(imported, name) for name in flower.__all__} == {n: getattr(flower, n) for n in flower.__all__}
    assert imported.__all__ == flower.__all__
    with pytest.raises(AttributeError, match="module 'gradveil' has no attribute 'flour'"):
        _ = gradveil.flour


def test_without_flower_the_error_says_what_to_install(monkeypatch):
    ours = "gradveil.flower", "gradveil.federation.flower"
    for name in [name for name in sys.modules if name.partition(".")[0] == "flwr" or name.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    for name in ours:
        with pytest.raises(MissingPackageError, match=r"pip install 'gradveil\[flower\]'"):
            importlib.import_module(name)
