"""Defenses in Flower (flwr): a client mod, a strategy wrapper, and the local engine's training on Flower's simulation.

On a client that exists already, one line::

    app = ClientApp(mods=[gradveil.flower.defense_mod("dual-pruning+error-feedback", lr=0.1)])

and on the server one line::

    strategy = gradveil.flower.GradveilStrategy(FedAvg(), "dual-pruning+error-feedback", lr=0.1)

**Whom the mod protects from.** The mod is part of the app, and whoever starts a run ships the app. It protects from a
server that keeps to the app which the client's owner has accepted: nodes must run accepted apps only, which
`gradveil.federation.supernode` sees to.

**What travels.** The server's train message has two records more: ``gradveil`` (round, learning rate, defense) and,
where a client announced locations, ``gradveil.locations``. The reply has ``gradveil.update``, the bytes of
`gradveil.wire`, in the place of the trained arrays; Flower chunks and carries them like any array. Beside it leave
``num-examples`` and those metrics that the client lists, as the app made them: nothing protects those.

**Which arrays are defended.** All floating-point ones, but for the statistics that the client names; those travel as
they are. Other arrays (whole numbers) must come back as they went.
"""

import copy
import dataclasses
import importlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from gradveil.errors import GradveilError, InputError, MissingPackageError, NotFiniteError, ParameterError

try:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        MessageType,
        MetricRecord,
        RecordDict,
    )
    from flwr.clientapp import ClientApp
    from flwr.common.constant import ErrorCode
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg, Result, Strategy
except ModuleNotFoundError as missing:
    if missing.name is not None and missing.name.partition(".")[0] != "flwr":
        raise
    raise MissingPackageError(
        "gradveil.flower needs Flower, which is not installed: pip install 'gradveil[flower]'"
    ) from missing

from gradveil import checks, wire
from gradveil.data import Dataset, Split
from gradveil.defenses import Defense
from gradveil.defenses import create as create_defense
from gradveil.federation.faults import (
    DUPLICATE,
    FAILED,
    MALFORMED,
    MISSING,
    NOT_FINITE,
    STALE,
    STRANGER,
    Fault,
    statistics_objection,
)
from gradveil.federation.local import (
    after_warming_up,
    as_batch,
    choose_clients,
    deal,
    draw,
    evaluate,
    has_grown,
    mean_or_nan,
    privacy_spent,
    split_public,
    training_loss,
)
from gradveil.federation.optimiser import ServerOptimiser
from gradveil.federation.training import RoundRecord, Training, TrainingResult
from gradveil.randomness import derived_generator
from gradveil.task import Task
from gradveil.update import Announced, Meta, Update

if TYPE_CHECKING:
    from flwr.clientapp.typing import ClientAppCallable

__all__ = ["Fault", "GradveilStrategy", "announced", "answer_once", "defense_mod", "memory", "reply", "simulate"]

INSTRUCTIONS = "gradveil"
LOCATIONS = "gradveil.locations"
UPDATE = "gradveil.update"
MEMORY = "gradveil.memory"
ROUNDS = "gradveil.rounds"
OUR_RECORDS = (INSTRUCTIONS, LOCATIONS, UPDATE)
WEIGHT = "num-examples"
SERVER_ROUND = "server-round"  # Flower's strategies number their rounds under this name

SEND = ("wire", "dense")
OTHER_MESSAGES = ("evaluate", "query")

CLIP = 10.0
"""Largest norm of an update, in gradient units, that a defense with noise is given unless the client says otherwise."""

MOST_EXAMPLES = 10_000_000

Statistics = torch.nn.Module | Iterable[str] | None

logger = logging.getLogger("flwr")


# -- what both sides read and write ----------------------------------------------------------------------------------


def _bytes_record(data: bytes) -> ArrayRecord:
    """Bytes as Flower carries arrays: in chunks, so that an update may be of any size."""
    return ArrayRecord({"bytes": Array("uint8", (len(data),), "gradveil.wire", data)})


def _bytes_of(content: RecordDict, key: str) -> bytes | None:
    record = content.array_records.get(key)
    if record is None:
        return None
    if list(record) != ["bytes"]:
        raise InputError(f"flower: expected one array of bytes as {key!r}, got {sorted(record)}")
    return record["bytes"].data


def _model_arrays(content: RecordDict, whose: str) -> tuple[str, ArrayRecord]:
    """The one record of arrays in a message that is not ours, and its key."""
    found = {key: record for key, record in content.array_records.items() if key not in OUR_RECORDS}
    if len(found) != 1:
        raise InputError(
            f"flower: expected one ArrayRecord, the model, in {whose}, got {sorted(found)}; "
            "arrays beside the model would leave undefended"
        )
    return next(iter(found.items()))


@dataclass(frozen=True)
class _Arrays:
    """A model's arrays by what becomes of them."""

    parameters: dict[str, Tensor]  # trained and defended
    statistics: dict[str, Tensor]  # named by their owner; they travel as they are
    constants: dict[str, Tensor]  # whole numbers and truth values that nobody named: not trained, not sent


def _split_arrays(record: ArrayRecord, statistics: Collection[str]) -> _Arrays:
    arrays = _Arrays({}, {}, {})
    for name, value in record.to_torch_state_dict().items():
        if value.is_complex():
            raise InputError(f"flower: no defense knows complex numbers, got {value.dtype} for {name!r}")
        if name in statistics:
            arrays.statistics[name] = value
        else:
            (arrays.parameters if value.is_floating_point() else arrays.constants)[name] = value
    if missing := sorted(set(statistics) - set(arrays.statistics)):
        raise InputError(f"flower: expected the statistics {missing} among the model's arrays, got {list(record)}")
    return arrays


def _statistic_names(owner: str, statistics: Statistics) -> frozenset[str]:
    """The names that a caller means: a model's buffers, or a list."""
    if statistics is None:
        return frozenset()
    if isinstance(statistics, torch.nn.Module):
        sent = statistics.state_dict()
        return frozenset(name for name, _ in statistics.named_buffers(remove_duplicate=False) if name in sent)
    return _names(owner, "statistics", statistics, "a model (its buffers) or names of arrays")


def _names(owner: str, parameter: str, given: Iterable[str], expected: str) -> frozenset[str]:
    names = None if isinstance(given, str) else list(given)
    if names is None or not all(isinstance(name, str) for name in names):
        raise ParameterError(f"{owner}: {parameter} must be {expected}, got {given!r}; write a list")
    return frozenset(names)


def _size(content: RecordDict) -> int:
    return sum(record.count_bytes() for record in content.values())


@dataclass(frozen=True)
class _Instructions:
    """What a `GradveilStrategy` tells the clients of a round."""

    round: int
    lr: float
    defense: str
    announce: bool = False

    def record(self) -> ConfigRecord:
        return ConfigRecord(dataclasses.asdict(self))

    @classmethod
    def of(cls, message: Message) -> "_Instructions | None":
        record = message.content.config_records.get(INSTRUCTIONS)
        if record is None:
            return None
        expected = {field.name for field in dataclasses.fields(cls)}
        if set(record) != expected:
            raise InputError(
                f"flower: expected instructions {sorted(expected)} from the server, got {sorted(record)}; use one "
                "version of gradveil on both sides"
            )
        return cls(
            checks.integer("flower", "the server's round", record["round"], low=1),
            checks.number("flower", "the server's lr", record["lr"], above=0),
            str(record["defense"]),
            checks.flag("flower", "the server's announce", record["announce"]),
        )

    @classmethod
    def required(cls, message: Message) -> "_Instructions":
        found = cls.of(message)
        if found is None:
            raise InputError(
                "flower: the train message comes from a server without GradveilStrategy, which could not read the "
                'update; wrap the strategy there, or use defense_mod(..., send="dense")'
            )
        return found


# -- the client ------------------------------------------------------------------------------------------------------


class _ContextMemory(MutableMapping[str, Tensor]):
    """A defense's memory in the state that Flower keeps for a node through all rounds of a run."""

    def __init__(self, state: RecordDict) -> None:
        if MEMORY not in state:
            state[MEMORY] = ArrayRecord()
        self._record = state.array_records[MEMORY]

    def __getitem__(self, key: str) -> Tensor:
        return torch.from_numpy(self._record[key].numpy())

    def __setitem__(self, key: str, value: Tensor) -> None:
        self._record[key] = Array(value.detach().cpu().numpy())

    def __delitem__(self, key: str) -> None:
        del self._record[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


def memory(context: Context) -> MutableMapping[str, Tensor]:
    """The client's own memory for ``defense.share(..., memory=...)``; it lives in the node's context and stays there.

    >>> context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    >>> memory(context)["residual/weight"] = torch.tensor([1.0, 2.0])
    >>> memory(context)["residual/weight"].tolist()
    [1.0, 2.0]
    """
    return _ContextMemory(context.state)


def announced(message: Message) -> Announced | None:
    """What the elected client of this round announced, for ``defense.share(..., announced=...)``; mostly None.

    The server passes it on, so it is read as a stranger's: whatever it declares, no more is allocated than the model in
    the message is large, and only layers of that model are accepted.
    """
    data = _bytes_of(message.content, LOCATIONS)
    if data is None:
        return None
    model = _model_arrays(message.content, "the train message")[1].to_torch_state_dict()
    public = wire.decode_locations(data, max_values=sum(value.numel() for value in model.values()))
    for name, value in public.items():
        shape = list(model[name].shape) if name in model else "no such layer"
        if list(value.shape) != shape:
            raise InputError(
                f"flower: expected announced locations of the model's layers, got {list(value.shape)} for {name!r}, "
                f"which has {shape}"
            )
    return public


@dataclass
class _Ledger:
    """Which rounds a client has answered; it lives in the node's context."""

    run: str
    announced: int = 0
    trained: int = 0
    rounds: int = 0  # different ones, in all runs that share the context

    @classmethod
    def of(cls, context: Context) -> "_Ledger":
        kept = context.state.config_records.get(ROUNDS)
        ledger = cls(str(context.run_id)) if kept is None else cls(**kept)  # type: ignore[arg-type]
        if ledger.run != str(context.run_id):  # every run counts from 1
            ledger = cls(str(context.run_id), rounds=ledger.rounds)
        return ledger

    def claim(self, number: int | None, budget: int | None, *, announce: bool = False) -> None:
        latest = max(self.announced, self.trained)
        if number is None:
            number = latest + 1
        # A round may be announced and then trained, each once.
        if number < latest or number == (latest if announce else self.trained):
            raise InputError(
                f"flower: expected a round after {latest}, got round {number} again; a round is answered once and "
                "rounds only grow, since several answers to one question average the noise away"
            )
        if number > latest:
            if budget is not None and self.rounds >= budget:
                raise InputError(
                    f"flower: this client answers {budget} rounds and has answered {self.rounds}; if more are wanted, "
                    "its owner allows more: rounds="
                )
            self.rounds += 1
        if announce:
            self.announced = number
        else:
            self.trained = number

    def keep(self, context: Context) -> None:
        context.state[ROUNDS] = ConfigRecord(dataclasses.asdict(self))


def answer_once(message: Message, context: Context, *, rounds: int | None = None) -> None:
    """Refuse (`InputError`) a train message of a round that this client has answered already.

    For the first line of train functions that call `reply` themselves; `defense_mod` does the same.

    Args:
        message: the train message.
        context: the node's; what was answered is kept in its state.
        rounds: how many rounds this client answers at all; None: any number.

    Example:
        >>> context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        >>> instructions = _Instructions(round=3, lr=0.1, defense="dp-sgd").record()
        >>> message = Message(RecordDict({"gradveil": instructions}), 1, "train")
        >>> answer_once(message, context)
        >>> answer_once(message, context)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        gradveil.errors.InputError: flower: expected a round after 3, got round 3 again; ...
    """
    budget = None if rounds is None else checks.integer("answer_once", "rounds", rounds, low=1)
    instructions, ledger = _Instructions.required(message), _Ledger.of(context)
    ledger.claim(instructions.round, budget, announce=instructions.announce)
    ledger.keep(context)


def reply(message: Message, update: Update, defense: Defense, metrics: Mapping[str, float] | None = None) -> Message:
    """The answer to a train message of a `GradveilStrategy`: an update as bytes, for defenses that need the data.

    Args:
        message: the train message.
        update: what ``defense.share`` made; how many samples it says to stand on is its weight.
        defense: the one that made it.
        metrics: figures to send along; nothing protects them.
    """
    instructions = _Instructions.required(message)
    _check_same(defense, instructions)
    sent = Update(update, dataclasses.replace(update.meta, round=instructions.round))
    data = wire.encode(sent, locations=defense.locations(announced(message)))
    figures = MetricRecord({WEIGHT: update.meta.samples, **(metrics or {})})
    return Message(RecordDict({UPDATE: _bytes_record(data), "metrics": figures}), reply_to=message)


def _announcement(message: Message, public: Announced | None) -> Message:
    content = RecordDict() if public is None else RecordDict({LOCATIONS: _bytes_record(wire.encode_locations(public))})
    return Message(content, reply_to=message)


def _check_same(defense: Defense, instructions: _Instructions) -> None:
    if instructions.defense != str(defense):
        raise InputError(
            f"flower: this client defends with {defense}, the server's strategy expects {instructions.defense}; "
            "use one on both sides"
        )


@dataclass(frozen=True, repr=False)
class _DefenseMod:
    """See `defense_mod`."""

    defense: Defense
    lr: float | None
    send: str
    clip: float | None
    rounds: int | None
    statistics: frozenset[str]
    metrics: frozenset[str]
    arrays: frozenset[str]

    def __call__(self, message: Message, context: Context, call_next: "ClientAppCallable") -> Message:
        kind = message.metadata.message_type.partition(".")[0]
        if kind != "train":
            return self._other(kind, message, context, call_next)
        instructions = _Instructions.of(message) if self.send == "dense" else _Instructions.required(message)
        lr = self._rate(message, instructions)
        if instructions is not None:
            _check_same(self.defense, instructions)
        announce = instructions is not None and instructions.announce
        public = announced(message)
        _, before = _model_arrays(message.content, "the train message")
        bare = copy.copy(message)
        bare.content = RecordDict({key: r for key, r in message.content.items() if key not in OUR_RECORDS})

        # Before the app sees the message: a round in which it fails is not asked for again either.
        ledger = _Ledger.of(context)
        ledger.claim(self._number(message, instructions), self.rounds, announce=announce)
        ledger.keep(context)
        state = copy.deepcopy(context.state) if announce else None
        answer = call_next(bare, context)
        if state is not None:
            context.state = state  # the round itself is still to come
        ledger.keep(context)  # whatever the app did to its state
        if answer.has_error():
            return answer
        _refuse_reserved(answer.content)
        key, after = _model_arrays(answer.content, "the client's reply")
        update = self._bounded(_update(before, after, lr, self.statistics), context)
        if announce:
            return _announcement(message, self.defense.publish(update, memory(context)))
        update = self.defense.perturb(update, memory=memory(context), announced=public)
        others = self._listed({name: record for name, record in answer.content.items() if name != key})
        if self.send == "dense":
            answer.content = RecordDict({key: _moved(before, update, lr), **others})
            return answer
        assert instructions is not None
        update.meta.round = instructions.round
        data = wire.encode(update, locations=self.defense.locations(public))
        answer.content = RecordDict({UPDATE: _bytes_record(data), **others})
        return answer

    def _other(self, kind: str, message: Message, context: Context, call_next: "ClientAppCallable") -> Message:
        """The reply to a message that asks for no training: what it says about the data is not defended at all."""
        answer = call_next(message, context)
        if answer.has_error():
            return answer
        _refuse_reserved(answer.content)
        found = sorted(answer.content.array_records)
        if found and kind not in self.arrays:
            raise InputError(
                f"flower: expected no arrays in the reply to a message of type {kind!r}, got {found}; no defense acts "
                f'on them. If they may leave as they are, write defense_mod(..., arrays=["{kind}"])'
            )
        answer.content = RecordDict(self._listed(answer.content))
        return answer

    def _listed(self, records: Mapping[str, ArrayRecord | MetricRecord | ConfigRecord]) -> dict[str, Any]:
        """The records without what the client has not listed; one of which nothing is left is left out too."""
        listed: dict[str, Any] = {}
        dropped: list[str] = []
        for key, record in records.items():
            if isinstance(record, ArrayRecord):
                listed[key] = record
                continue
            kept: dict[str, Any] = {n: v for n, v in record.items() if self._may_leave(n, v, record)}
            dropped += [name for name in record if name not in kept]
            if kept:
                listed[key] = type(record)(kept)
        if dropped:
            logger.warning(
                "gradveil: left out of the reply: %s; to send them as they are, write defense_mod(..., metrics=[...])",
                ", ".join(sorted(dropped)),
            )
        return listed

    def _may_leave(self, name: str, value: object, record: MetricRecord | ConfigRecord) -> bool:
        weight = name == WEIGHT and isinstance(record, MetricRecord) and not isinstance(value, list)
        return weight or name in self.metrics

    def _bounded(self, update: Update, context: Context) -> Update:
        """The update cut to the client's norm, and so is what error feedback will add to it.

        Noise protects what is not much larger than itself. How large an update is the server may decide (by the weights
        it sends, or a learning rate that the app takes from the message), so it is not left to grow; nor is a residual,
        which would sum up over the rounds what is cut in each.
        """
        if self.clip is None:
            return update
        for residual in self.defense.residuals(memory(context)):
            residual.update(_cut(dict(residual), self.clip, "what error feedback kept"))
        return Update(_cut(update, self.clip, "the update"), update.meta)

    def _rate(self, message: Message, instructions: _Instructions | None) -> float:
        if instructions is not None:
            if self.lr is not None and self.lr != instructions.lr:
                raise InputError(
                    f"flower: this client's mod has lr={self.lr:g}, the server's strategy lr={instructions.lr:g}; "
                    "noise is in units of update / lr, so both must be the rate the client trains with"
                )
            return instructions.lr
        if self.lr is not None:
            return self.lr
        for record in message.content.config_records.values():
            if "lr" in record:
                return checks.number("defense_mod", "lr in the train message", record["lr"], above=0)
        raise InputError(
            "flower: the update in gradient units is (start - end) / lr, and neither the mod nor the train message "
            "says lr; write defense_mod(..., lr=RATE)"
        )

    def _number(self, message: Message, instructions: _Instructions | None) -> int | None:
        """The round's number; None: the server has none, and messages are counted."""
        if instructions is not None:
            return instructions.round
        numbers = [r[SERVER_ROUND] for r in message.content.config_records.values() if SERVER_ROUND in r]
        if len(numbers) == 1:
            return checks.integer("flower", SERVER_ROUND, numbers[0], low=1)
        if numbers or self.rounds is None:
            raise InputError(
                f"flower: expected the round's number as {SERVER_ROUND!r} in the train message's config, got "
                f"{numbers or 'none'}, so that a round is answered once; Flower's strategies send it. For a server "
                "that does not, say how many messages to answer: defense_mod(..., rounds=N)"
            )
        return None

    def __repr__(self) -> str:
        return (
            f"gradveil.flower.defense_mod({str(self.defense)!r}, lr={self.lr}, send={self.send!r}, clip={self.clip}, "
            f"rounds={self.rounds})"
        )


def defense_mod(
    defense: str | Defense,
    /,
    *,
    lr: float | None = None,
    send: str = "wire",
    clip: float | Literal["default"] | None = "default",
    rounds: int | None = None,
    statistics: Statistics = None,
    metrics: Iterable[str] = (),
    arrays: Iterable[str] = (),
    **parameters: Any,
) -> _DefenseMod:
    r"""A mod that protects what an existing client app sends, without touching the app.

    The app trains as ever; of the arrays it got and the arrays it returns the mod makes

    .. math:: u = (start - end) / lr, \quad sent = D(u \min(1, clip / |u|))

    so that noise is always in gradient units, and sends the defended update in the place of the arrays. The defense
    acts once, on the finished update; error feedback keeps its residual in the node's context.

    A round is answered once, and rounds only grow: what was answered is kept in the node's context, which lives as long
    as the run. A stock SuperNode may begin with the next message before it has kept the context; one started with
    `gradveil.federation.supernode` does not.

    Args:
        defense: a gradient-only defense, or its name or text (``"dual-pruning:k1=0.05+error-feedback"``).
        lr: the client's learning rate. None: the one that the server's strategy says (or, with ``send="dense"``, that
            the train message calls ``lr``). **Say it** where the defense adds noise and the server is not trusted:
            whoever chooses lr chooses how loud the noise is beside the update, up to `clip`.
        send: ``"wire"``: as bytes that only a `GradveilStrategy` reads; zeros cost next to nothing. ``"dense"``: as
            arrays start - lr * sent that any strategy reads; nothing is saved, and what the method does on the
            server (compensation, aligned locations) does not happen.
        clip: largest norm of the update over all layers, in gradient units; what error feedback adds to it is cut to
            the same norm. A larger one is scaled down before the defense acts, with a warning. Default: 10 if the
            defense adds noise (`Defense.adds_noise`), else None: no limit. A server can make an update as large as it
            likes, and noise vanish beside it, so choose the norm of your honest updates rather than None.
        rounds: how many rounds this client answers in this context; None: any number. Needed with ``send="dense"``
            if the server's messages have no ``server-round``.
        statistics: the arrays that travel as they are, undefended: a model, which means its buffers (batch-norm
            statistics), or names. Every other floating-point array is defended, and one of whole numbers must come
            back as it went. The server's strategy must be told the same.
        metrics: names of the metrics and config values that may leave beside ``num-examples``, undefended, in replies
            of every kind. Others are left out, with a warning.
        arrays: ``"evaluate"``, ``"query"``: kinds of messages whose replies may hold arrays, which leave undefended.
            With others, such a reply is an error.
        parameters: of the defense, if it is given by name.

    Example:
        >>> defense_mod("dual-pruning", k1=0.05, k2=0.75)
        gradveil.flower.defense_mod('dual-pruning:k1=0.05,k2=0.75', lr=None, send='wire', clip=None, rounds=None)
        >>> defense_mod("gaussian-noise:std=0.3", lr=0.1, rounds=100, metrics=["loss"])
        gradveil.flower.defense_mod('gaussian-noise:std=0.3', lr=0.1, send='wire', clip=10.0, rounds=100)
        >>> defense_mod("soteria", lr=0.1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        gradveil.errors.ParameterError: defense_mod: soteria needs the client's data, which a mod never sees...
    """
    if lr is not None:
        lr = checks.number("defense_mod", "lr", lr, above=0)
    checks.choice("defense_mod", "send", send, SEND)
    if isinstance(defense, Defense) and parameters:
        raise ParameterError(
            f"defense_mod: {defense!r} has its parameters already, got also {', '.join(parameters)}; give a name"
        )
    chosen = defense if isinstance(defense, Defense) else create_defense(defense, **parameters)
    if not chosen.gradient_only:
        raise ParameterError(
            f"defense_mod: {chosen.name} needs the client's data, which a mod never sees. Write in the client's train "
            "function:\n"
            "    gradveil.flower.answer_once(message, context)\n"
            "    update = defense.share(task, images, labels, memory=gradveil.flower.memory(context))\n"
            "    return gradveil.flower.reply(message, update, defense)\n"
            'where task = task.with_parameters(message.content["arrays"].to_torch_state_dict())'
        )
    if chosen.hides_updates:
        raise ParameterError(
            f"defense_mod: {chosen.name} stands for the outcome of a protocol, not for its cryptography; as a mod it "
            "would send every update in the clear. Run a secure-aggregation protocol in Flower instead"
        )
    if isinstance(defense, str) and chosen.needs_preparing:
        raise ParameterError(
            f"defense_mod: {chosen.name} has to look at public data first: d = gradveil.defense(...), "
            "d, task = d.prepare(task, public=(inputs, labels)), then defense_mod(d)"
        )
    if clip == "default":
        clip = CLIP if chosen.adds_noise else None
    elif clip is not None:
        clip = checks.number("defense_mod", "clip", clip, above=0)
    if rounds is not None:
        rounds = checks.integer("defense_mod", "rounds", rounds, low=1)
    kinds = _names("defense_mod", "arrays", arrays, "kinds of messages")
    for kind in kinds:
        checks.choice("defense_mod", "arrays", kind, OTHER_MESSAGES)
    return _DefenseMod(
        chosen,
        lr,
        send,
        clip,
        rounds,
        _statistic_names("defense_mod", statistics),
        _names("defense_mod", "metrics", metrics, "names of metrics"),
        kinds,
    )


def _cut(layers: Mapping[str, Tensor], norm: float, what: str) -> dict[str, Tensor]:
    """The layers, scaled down together if their norm is larger."""
    got = math.hypot(*(float(torch.linalg.vector_norm(value.double())) for value in layers.values()))
    if not got > norm:
        return dict(layers)
    logger.warning("gradveil: %s has norm %.3g, cut to %g; see defense_mod(..., clip=...)", what, got, norm)
    return {name: (value.double() * (norm / got)).to(value.dtype) for name, value in layers.items()}


def _refuse_reserved(content: RecordDict) -> None:
    """Our names are ours alone: what stands there is taken for a defended update."""
    if taken := sorted(key for key in content if key.partition(".")[0] == INSTRUCTIONS):
        raise InputError(
            f"flower: expected a reply without records called {INSTRUCTIONS!r} or {INSTRUCTIONS + '.*'!r}, which "
            f"gradveil keeps for itself, got {taken}; call them something else in the client app"
        )


def _update(before: ArrayRecord, after: ArrayRecord, lr: float, statistics: Collection[str]) -> Update:
    start, end = _split_arrays(before, statistics), _split_arrays(after, statistics)
    sent, returned = before.to_torch_state_dict(), after.to_torch_state_dict()
    trained = {
        name: value
        for name, value in end.parameters.items()
        # FedAvg makes floats of whole numbers: an app that gives back the numbers themselves has not trained them.
        if name in start.parameters or name not in sent or not _equal(sent[name], value)
    }
    differing = [name for name in {**sent, **returned} if name not in sent or name not in returned]
    differing += [
        name
        for name, value in trained.items()
        if name in sent and (sent[name].shape, sent[name].dtype) != (value.shape, value.dtype)
    ]
    differing += [n for n, v in end.statistics.items() if n in sent and sent[n].shape != v.shape]
    if differing or list(before) != list(after):
        raise InputError(
            "flower: expected the client to return the arrays it got, trained, in the same order; "
            f"they differ in {differing or 'their order'}"
        )
    changed = [name for name, value in end.constants.items() if not _equal(sent[name], value)]
    if changed:
        raise InputError(
            f"flower: expected floating-point arrays, or whole numbers as they were sent, got others in {changed}; no "
            "defense acts on whole numbers. If they are statistics that may leave as they are, write "
            "defense_mod(..., statistics=model)"
        )
    return Update(
        {name: (sent[name] - value) / lr for name, value in trained.items()}, Meta(buffers=dict(end.statistics))
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    """The same numbers, whatever their types."""
    return one.shape == other.shape and bool((one == other).all())


def _moved(before: ArrayRecord, update: Update, lr: float) -> ArrayRecord:
    """The arrays that a client would have returned whose update was this one."""
    start = before.to_torch_state_dict()
    moved = {name: start[name] - lr * value for name, value in update.items()}
    for name, value in moved.items():
        if not torch.isfinite(value).all():
            raise NotFiniteError(f"flower: start - lr * update overflows in {name!r}; leave this one out")
    values = {**start, **update.meta.buffers, **moved}
    return ArrayRecord({name: values[name] for name in before})


# -- the server ------------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """Why a reply is not used."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass
class _Round:
    """What the server remembers of a round from its messages to their replies."""

    number: int
    arrays: ArrayRecord
    key: str
    parameters: dict[str, Tensor]
    statistics: dict[str, Tensor]
    asked: list[Message]
    public: Announced | None = None
    announcement_up: int = 0  # bytes that announcing cost the elected client, up and down
    announcement_down: int = 0


@dataclass(frozen=True)
class _Accepted:
    """A reply that can be used, and the arrays that the inner strategy gets in its place."""

    message: Message
    size: int  # bytes as it arrived
    update: Update
    weight: float
    moved: ArrayRecord


class GradveilStrategy(Strategy):
    """A strategy around another one: it tells clients what they need, reads their updates and refuses bad ones.

    Each round it sends out what the inner strategy sends, with the round's number, the learning rate, and, for defenses
    that align locations, what an elected client announced. Of the replies it decodes the updates and refuses what is
    not an update of this model in this round: broken bytes, other layers, shapes or types, NaN, a stale round, a
    second reply, metrics unlike the others', an error, or no reply. Replies to evaluate messages are looked at in the
    same way. Every refusal is logged, counted, and named in `faults`; the round goes on with the others, and if none is
    left, the model stays as it was.

    Of the metrics the inner strategy gets those that more than half of the replies have; who lacks one of them is
    refused. So of two clients neither gets the other one refused, whoever answers first.

    The inner strategy then gets ordinary arrays, start - lr * update: each client's own, so that medians and Krum work;
    or, where the defense aggregates itself (compensation, aligned locations), the defense's aggregate for every client.

    It cannot tell a well-formed lie: a huge update is for a robust inner strategy, and so is a weight within its bound.

    Args:
        inner: any strategy that sends all clients the same model.
        defense: the defense of the clients, or its name or text; for one that needs preparing, the prepared object.
        lr: the learning rate of the clients, with which an update becomes a step again.
        statistics: as in the clients' `defense_mod`: the model, or the names of the arrays that travel undefended.
        most_examples: largest weight (``num-examples``) that a reply may claim; it must be a whole number from 1. Say
            the size of the largest client: whoever claims more than it has moves the mean further.

    Example:
        >>> GradveilStrategy(FedAvg(), "dual-pruning", lr=0.1)
        GradveilStrategy(FedAvg, 'dual-pruning:k1=0.05,k2=0.75', lr=0.1)
    """

    def __init__(
        self,
        inner: Strategy,
        defense: str | Defense,
        *,
        lr: float,
        statistics: Statistics = None,
        most_examples: int = MOST_EXAMPLES,
    ) -> None:
        self.inner = inner
        self.defense = defense if isinstance(defense, Defense) else create_defense(defense)
        self.lr = checks.number("GradveilStrategy", "lr", lr, above=0)
        self.statistics = _statistic_names("GradveilStrategy", statistics)
        self.most_examples = checks.integer("GradveilStrategy", "most_examples", most_examples, low=1, high=2**53)
        self.faults: list[Fault] = []
        self.uploads: list[int] = []  # bytes of every accepted reply
        self.downloads: list[int] = []  # bytes of every train message
        self._weight_key = getattr(inner, "weighted_by_key", WEIGHT)
        self._memory: dict[str, Tensor] = {}
        self._round: _Round | None = None
        self._evaluated: list[Message] = []  # the evaluate messages of this round
        self._timeout: float | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """As `Strategy.start`; an announcement is waited for as long as a training."""
        self._timeout = timeout
        result = super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        if not result.arrays:  # no round had an update that could be used
            result.arrays = initial_arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's messages with the round's instructions."""
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        self._round = None
        if not messages:
            return messages
        key, sent = _model_arrays(messages[0].content, "the strategy's train message")
        if any(message.content.get(key) != sent for message in messages):
            raise InputError(
                f"GradveilStrategy: {type(self.inner).__name__} sends different models to the clients of a round; "
                "expected one for all"
            )
        arrays_of = _split_arrays(sent, self.statistics)
        now = _Round(server_round, sent, key, arrays_of.parameters, arrays_of.statistics, asked=messages)
        instructions = _Instructions(server_round, self.lr, str(self.defense))
        if self.defense.announces:
            now.public = self._elect(now, instructions, grid)
        extra: dict[str, Any] = {INSTRUCTIONS: instructions.record()}
        if now.public is not None:
            extra[LOCATIONS] = _bytes_record(wire.encode_locations(now.public))
        for message in messages:
            message.content = RecordDict({**message.content, **extra})
            self.downloads.append(_size(message.content))
        self.downloads[-1] += now.announcement_down
        self._round = now
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode, refuse, and let the inner strategy aggregate the rest."""
        if self._round is None or self._round.number != server_round:
            raise InputError(f"GradveilStrategy: round {server_round} was aggregated before it was configured")
        now, self._round = self._round, None
        accepted = self._accepted(now, replies)
        if not accepted:
            logger.warning("gradveil: no update of round %d is left; the model stays as it was", server_round)
            return None, None
        if self.defense.aggregates:
            aggregate = self.defense.aggregate(
                [one.update for one in accepted],
                weights=[one.weight for one in accepted],
                memory=self._memory,
                announced=now.public,
            )
            moved = _moved(now.arrays, aggregate, self.lr)
            # A record of its own for each: medians take arrays out of theirs.
            accepted = [dataclasses.replace(one, moved=ArrayRecord(dict(moved))) for one in accepted]
        for one in accepted:
            self.uploads.append(one.size)
            others = {key: value for key, value in one.message.content.items() if key != UPDATE}
            one.message.content = RecordDict({**others, now.key: one.moved})
        self.uploads[-1] += now.announcement_up
        arrays, metrics = self.inner.aggregate_train(server_round, [one.message for one in accepted])
        if arrays is not None:
            if not _is_finite(arrays):
                raise NotFiniteError(
                    f"GradveilStrategy: the model stopped being finite in round {server_round}, though every update "
                    "was; lower the learning rate"
                )
            arrays = _typed_like(now.arrays, arrays)
        if metrics is not None:
            metrics["gradveil-refused"] = sum(fault.round == server_round for fault in self.faults)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the inner strategy says."""
        self._evaluated = list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        return self._evaluated

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Refuse what would stop the inner strategy, and let it aggregate the rest."""
        asked, self._evaluated = self._evaluated, []
        heard = self._heard(server_round, asked, replies, self._evaluation)
        if asked and not heard:
            logger.warning("gradveil: no evaluation of round %d is left", server_round)
            return None
        return self.inner.aggregate_evaluate(server_round, list(heard.values()))

    def summary(self) -> None:
        """Log the defense, and the inner strategy's summary."""
        logger.info("\t├──> gradveil: %s, lr %g", self.defense, self.lr)
        self.inner.summary()

    def __repr__(self) -> str:
        return f"GradveilStrategy({type(self.inner).__name__}, {str(self.defense)!r}, lr={self.lr:g})"

    def _elect(self, now: _Round, instructions: _Instructions, grid: Grid) -> Announced | None:
        """What the first client announces; if that has to be refused, the next one's."""
        question = dataclasses.replace(instructions, announce=True).record()
        for message in now.asked:
            node = message.metadata.dst_node_id
            ask = Message(RecordDict({**message.content, INSTRUCTIONS: question}), node, message.metadata.message_type)
            try:
                answers = list(grid.send_and_receive([ask], timeout=self._timeout))
                if not answers:
                    raise _Refused(MISSING, "no announcement")
                _refuse_error(answers[0])
                now.announcement_up += _size(answers[0].content)
                now.announcement_down += _size(ask.content)
                data = _bytes_of(answers[0].content, LOCATIONS)
                public = None if data is None else wire.decode_locations(data, like=now.parameters)
                self.defense.check_announced(public, now.parameters)
            except (_Refused, GradveilError) as error:
                self._refuse(now.number, node, error)
                continue
            return public
        return None

    def _accepted(self, now: _Round, replies: Iterable[Message]) -> "list[_Accepted]":
        """The replies that can be used, in the order in which their nodes were asked."""
        opened: dict[int, _Accepted] = {}

        def open_reply(node: int, message: Message) -> None:
            opened[node] = self._open(now, message)

        return [opened[node] for node in self._heard(now.number, now.asked, replies, open_reply)]

    def _heard(
        self,
        number: int,
        asked: Sequence[Message],
        replies: Iterable[Message],
        look: Callable[[int, Message], None],
    ) -> dict[int, Message]:
        """The replies that can be used by node, in the order in which the nodes were asked; their metrics are alike.

        Args:
            number: the round.
            asked: the messages that they answer.
            replies: what arrived.
            look: raises if a reply cannot be used.
        """
        node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in asked}
        usable: dict[int, Message] = {}
        heard: set[int] = set()
        for message in replies:
            # The error for a dead node comes from the SuperLink, so it is the question that tells whose it is.
            node = node_of.get(message.metadata.reply_to_message_id)
            if node is None:
                nobody = _Refused(STRANGER, "it answers no message of this round")
                self._refuse(number, message.metadata.src_node_id, nobody)
                continue
            try:
                _refuse_error(message)
                if message.metadata.src_node_id != node:
                    raise _Refused(STRANGER, f"its reply came from node {message.metadata.src_node_id}")
                if node in usable:
                    raise _Refused(DUPLICATE, "expected one reply, got another one; the first counts")
                look(node, message)
                usable[node] = message
            except (_Refused, GradveilError) as error:
                self._refuse(number, node, error)
            heard.add(node)
        for node in node_of.values():
            if node not in heard:
                self._refuse(number, node, _Refused(MISSING, "no reply"))
        alike = self._alike(number, usable)
        return {node: alike[node] for node in node_of.values() if node in alike}

    def _alike(self, number: int, replies: dict[int, Message]) -> dict[int, Message]:
        """The replies cut to the metrics that most of them have; strategies stop at different ones.

        One client must not stop the others, and of two clients that differ nobody can tell which one is odd.
        """
        shapes = {node: _metrics_shape(message.content) for node, message in replies.items()}
        usual = _most(shapes.values(), len(replies))
        keys = Counter(next(iter(message.content.metric_records)) for message in replies.values())
        key, count = keys.most_common(1)[0] if keys else ("", 0)
        if 2 * count <= len(replies):
            key = "metrics"
        alike: dict[int, Message] = {}
        for node, message in replies.items():
            if lacking := sorted(name for name, _ in usual - shapes[node]):
                reason = f"its metrics are {sorted(map(str, shapes[node]))}; most others have {lacking}"
                self._refuse(number, node, InputError(reason))
                continue
            [(old, record)] = message.content.metric_records.items()
            kept = MetricRecord({name: record[name] for name, _ in sorted(usual, key=str)})
            others = {name: value for name, value in message.content.items() if name not in (old, key)}
            message.content = RecordDict({**others, key: kept})
            alike[node] = message
        return alike

    def _open(self, now: _Round, message: Message) -> "_Accepted":
        """What a reply holds; anything but an update of this model in this round raises."""
        data = _bytes_of(message.content, UPDATE)
        if data is None:
            raise InputError('it holds no update of gradveil; put defense_mod(..., send="wire") into the client app')
        beside = sorted({*message.content.array_records, now.key} & set(message.content) - {UPDATE})
        if beside:
            raise InputError(f"it holds arrays, or what could be taken for them, beside the update: {beside}")
        update = wire.decode(data, self.defense.locations(now.public), like=now.parameters)
        if update.meta.round != now.number:
            raise _Refused(STALE, f"expected an update of round {now.number}, got one of round {update.meta.round}")
        # A client may leave some out: those stay as they were.
        expected = {name: value for name, value in now.statistics.items() if name in update.meta.buffers}
        if reason := statistics_objection(expected, update.meta.buffers):
            raise InputError(f"{reason}; say the same statistics= to the mod and to the strategy")
        moved = _moved(now.arrays, update, self.lr)
        return _Accepted(message, _size(message.content), update, self._weight(message), moved)

    def _evaluation(self, _node: int, message: Message) -> None:
        """Look at a reply to an evaluate message, of which only the metrics are used."""
        if found := sorted(message.content.array_records):
            raise InputError(f"expected metrics alone in an evaluation, got also the arrays {found}")
        self._weight(message)

    def _weight(self, message: Message) -> float:
        """What a reply says to weigh, if its metrics can be used."""
        records = list(message.content.metric_records.values())
        if len(records) != 1 or self._weight_key not in records[0]:
            found = {key: sorted(record) for key, record in message.content.metric_records.items()}
            raise InputError(f"expected one MetricRecord with {self._weight_key!r}, got {found}")
        weight = checks.number("reply", self._weight_key, records[0][self._weight_key], low=1, high=self.most_examples)
        if not weight.is_integer():
            raise InputError(f"{self._weight_key} must be a whole number, got {weight}")
        for name, value in records[0].items():
            if not all(map(math.isfinite, value if isinstance(value, list) else [value])):
                raise InputError(f"metrics must be finite, got {value} for {name!r}")
        return weight

    def _refuse(self, number: int, node: int, error: Exception) -> None:
        kind = error.kind if isinstance(error, _Refused) else MALFORMED
        self.faults.append(Fault(number, node, kind, str(error)))
        logger.warning("gradveil: refused: %s", self.faults[-1])


def _refuse_error(message: Message) -> None:
    if message.has_error():
        code, reason = message.error.code, message.error.reason or ""
        told = NOT_FINITE if NotFiniteError.__name__ in reason else FAILED
        raise _Refused(MISSING if code == ErrorCode.NODE_UNAVAILABLE else told, f"error {code}: {reason}")


def _typed_like(before: ArrayRecord, after: ArrayRecord) -> ArrayRecord:
    """The arrays in the types they had: FedAvg's means of whole numbers are floats, which would count as trained."""
    types = {name: value.dtype for name, value in before.to_torch_state_dict().items()}
    values = after.to_torch_state_dict()
    for name, value in values.items():
        dtype = types.get(name, value.dtype)
        if value.dtype != dtype:
            values[name] = (value if dtype.is_floating_point else value.round()).to(dtype)
    return ArrayRecord(values)


_Shape = tuple[str, int | None]  # a metric's name, and its length if it is a list


def _metrics_shape(content: RecordDict) -> set[_Shape]:
    [record] = content.metric_records.values()
    return {(name, len(value) if isinstance(value, list) else None) for name, value in record.items()}


def _most(sets: Iterable[set[_Shape]], count: int) -> set[_Shape]:
    """What more than half of the sets hold."""
    held = Counter(shape for one in sets for shape in one)
    return {shape for shape, times in held.items() if 2 * times > count}


def _is_finite(record: ArrayRecord) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in record.to_torch_state_dict().values())


# -- the local engine's training on Flower's simulation --------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """What a simulated client needs; the weights come with each message."""

    task: Task
    train: Split
    shares: Sequence[Tensor]
    defense: Defense
    training: Training


class _SameRounds(FedAvg):
    """The local engine's server: the same clients in each round, and its optimiser's steps on the weighted mean."""

    def __init__(self, training: Training, parameters: Mapping[str, Tensor], statistics: Collection[str]) -> None:
        super().__init__()
        self.training, self.statistics = training, statistics
        self.number = 0  # of the round at work, as the local engine counts
        self.elapsed = 0.0  # seconds of the last one
        self.rounds_of: Counter[int] = Counter()
        self._optimiser = ServerOptimiser(training, parameters)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients that the local engine would ask."""
        self.number, self._started, self._arrays = server_round - 1, time.perf_counter(), arrays
        training = self.training
        while len(nodes := sorted(grid.get_node_ids())) < training.clients:
            time.sleep(0.05)  # they register while the server starts
        chosen = choose_clients(training, self.number)
        self.rounds_of.update(chosen)
        return [
            Message(
                RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: ConfigRecord({"client": client})}),
                nodes[client],
                MessageType.TRAIN,
            )
            for client in chosen
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """FedAvg's mean of the arrays is one update away from the start; statistics are averaged only."""
        mean, metrics = super().aggregate_train(server_round, replies)
        if mean is None:
            return None, metrics
        start = _split_arrays(self._arrays, self.statistics)
        averaged = mean.to_torch_state_dict()
        moved = {name: averaged[name] for name in start.statistics}
        update = {name: value - averaged[name] for name, value in start.parameters.items()}
        moved |= self._optimiser.step(start.parameters, update, self.number)
        self.elapsed = time.perf_counter() - self._started
        return ArrayRecord({name: moved[name] for name in self._arrays}), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: the server evaluates."""
        return []


def simulate(
    task: Task,
    dataset: Dataset,
    defense: Defense,
    training: Training,
    *,
    actors: int | None = None,
    watch: Callable[[RoundRecord], None] | None = None,
) -> TrainingResult:
    """The training of `gradveil.federation.train` on Flower's simulation: one simulated node a client, on Ray.

    Clients, batches, seeds and the order of all draws are those of the local engine, so the weights are the same up to
    rounding. Every defense works: clients call ``defense.share``, and updates travel as `gradveil.wire` bytes. Bytes
    are those of Flower's messages: down goes the whole model to every client, up the encoded update with its metrics.
    `round_seconds` is the time of a round on the server, sending and waiting included.

    Flower's own `run_simulation` is deprecated in favour of the command ``flwr run``, which needs an app in a folder
    and leaves a SuperLink running. This calls the function that both of them run (`_run_simulation`), which is not
    public: hence the narrow range of versions in the extra. While it runs, Flower's and Ray's telemetry is off.

    Args:
        task: model and loss at the initial weights, on the CPU; not changed.
        dataset: as for the local engine.
        defense: as for the local engine.
        training: as for the local engine.
        actors: processes that work for the clients, one CPU each; None: Flower's default, two CPUs each.
        watch: called with what was measured of each round; all of its time counts as that of the gradients.
    """
    if actors is not None:
        checks.integer("simulate", "actors", actors, low=1)
    if task.device.type != "cpu":
        raise InputError(f"flower: simulate trains on the CPU, got a task on {task.device}")
    seed = training.seed
    public, private = split_public(dataset.train, seed)
    shares = deal(dataset.train, private, training)
    known = as_batch(task, dataset.train.batch(public))
    defense, task = defense.prepare(task, public=known, generator=derived_generator(seed, "prepare"))
    statistics = list(task.updated_buffers(known[0][:2]))
    rounds = _SameRounds(training, task.parameters, statistics)
    # The server's steps have a rate of their own.
    strategy = GradveilStrategy(rounds, defense, lr=1.0, statistics=statistics)
    last = ArrayRecord({**task.parameters, **{name: task.buffers[name] for name in statistics}})
    records: list[RoundRecord] = []
    history: list[tuple[int, float]] = []
    diverged: int | None = None
    uploaded = 0  # replies accepted in the rounds before
    stopped = threading.Event()

    def at(arrays: ArrayRecord) -> Task:
        return _task_at(task, arrays)

    def look(done: int, arrays: ArrayRecord) -> None:
        nonlocal last, uploaded
        for fault in strategy.faults:
            if fault.round == done and fault.kind != NOT_FINITE:  # a simulated client has no other reason to fail
                raise InputError(f"flower: {fault}")
        before, last = at(last), arrays
        if not done:
            return
        uploads, uploaded = strategy.uploads[uploaded:], len(strategy.uploads)
        if not uploads:
            raise NotFiniteError("flower: no client's gradients are finite")
        batches = draw(before, dataset.train, shares, training, done - 1)
        accuracy = None
        if training.evaluate_every and done % training.evaluate_every == 0 and done < training.rounds:
            accuracy = evaluate(at(arrays), dataset.test)[0]
            history.append((done, accuracy))
        records.append(
            RoundRecord(
                round=done - 1,
                clients=len(uploads),
                loss=training_loss(before, batches),
                accuracy=accuracy,
                gradient_seconds=rounds.elapsed,
                defense_seconds=0.0,
                aggregation_seconds=0.0,
                upload_bytes=mean_or_nan(uploads),
                download_bytes=mean_or_nan(strategy.downloads[-len(batches) :]),
            )
        )
        if watch:
            watch(records[-1])
        if has_grown([record.loss for record in records], task.classes):
            raise NotFiniteError("flower: the loss has grown beyond hope")

    server = ServerApp()

    @server.main()
    def main(grid: Grid, _context: Context) -> None:
        nonlocal diverged
        _give_up_when(stopped, grid)
        try:
            strategy.start(grid, last, num_rounds=training.rounds, evaluate_fn=look)
        except NotFiniteError:
            diverged = rounds.number

    try:
        _run_on_ray(_Job(task, dataset.train, shares, defense, training), server, actors)
    finally:
        stopped.set()
    trained = at(last)
    accuracy, loss = evaluate(trained, dataset.test)
    history.append((len(records), accuracy))
    return TrainingResult(
        trained,
        accuracy,
        loss,
        mean_or_nan(record.seconds for record in after_warming_up(records)),
        mean_or_nan(strategy.uploads),
        mean_or_nan(strategy.downloads),
        history,
        diverged,
        privacy_spent(defense, training, [len(share) for share in shares], rounds.rounds_of),
        records,
        faults=[dataclasses.replace(fault, round=fault.round - 1) for fault in strategy.faults],
        execution="flower",
    )


def _task_at(task: Task, record: ArrayRecord) -> Task:
    arrays = _split_arrays(record, [name for name in record if name not in task.parameters])
    return task.with_parameters(arrays.parameters, arrays.statistics)


def _give_up_when(stopped: threading.Event, grid: Grid) -> None:
    """Let the server's thread end when the simulation is over: it would wait an hour for clients that are gone."""
    pull = grid.pull_messages

    def pull_messages(message_ids: Iterable[str]) -> Iterable[Message]:
        if stopped.is_set():
            raise InterruptedError("the simulation was stopped")
        return pull(message_ids)

    grid.pull_messages = pull_messages  # type: ignore[method-assign]


def _run_on_ray(job: _Job, server: ServerApp, actors: int | None) -> None:
    """Run a server app with one simulated client app for each client of the job."""
    try:
        import ray
        from flwr.simulation.run_simulation import _run_simulation
        from flwr.supercore.telemetry import EventType
    except ImportError as error:
        raise MissingPackageError(
            "gradveil.flower.simulate needs the simulation of Flower 1.41: pip install 'gradveil[flower]'"
        ) from error
    if ray.is_initialized():
        raise InputError(
            "flower: Ray is running in this process, and Flower would shut it down; call ray.shutdown() first"
        )
    # What Ray will do anyway in a later version, and warns of until then.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    level = logger.level
    logger.setLevel(logging.WARNING)
    with _no_telemetry():
        ray.init(num_cpus=actors, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        try:
            # Flower hands the client app to Ray with every message, so it holds a reference to the data, not the data.
            _run_simulation(
                num_supernodes=job.training.clients,
                exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
                client_app=_client_app(ray.put(job)),
                server_app=server,
                backend_config={} if actors is None else {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
            )
        finally:
            ray.shutdown()
            logger.setLevel(level)


TELEMETRY = ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED")


@contextmanager
def _no_telemetry() -> Iterator[None]:
    """Keep Flower and Ray from reporting to their makers, in this process and in those that it starts."""
    module = importlib.import_module("flwr.simulation.run_simulation")  # a function of the same name hides it
    before, event = {name: os.environ.get(name) for name in TELEMETRY}, module.event
    os.environ.update(dict.fromkeys(TELEMETRY, "0"))
    # Flower read the environment when it was imported; and it reports from threads, which would outlive a switch.
    module.event = lambda *_args, **_details: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.event = event  # type: ignore[attr-defined]
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_jobs: dict[str, _Job] = {}  # of a worker process: the job it works for


def _job(reference: Any) -> _Job:
    import ray

    key = reference.hex()
    if key not in _jobs:
        _jobs.clear()
        _jobs[key] = ray.get(reference)
    return _jobs[key]


def _client_app(reference: Any) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _work(_job(reference), message, context)

    return app


def _work(job: _Job, message: Message, context: Context) -> Message:
    """What a client of the local engine does in a round; if it cannot, the reason."""
    try:
        return _answer(job, message, context)
    except GradveilError as error:  # for exceptions Flower sends and logs whole tracebacks
        reason = f"{type(error).__name__}: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _answer(job: _Job, message: Message, context: Context) -> Message:
    training, instructions = job.training, _Instructions.required(message)
    number = instructions.round - 1
    client = checks.integer("simulate", "client", message.content.config_records["config"]["client"], low=0)
    current = _task_at(job.task, message.content.array_records["arrays"])
    batch = draw(current, job.train, job.shares, training, number, client)[client]

    def randomness(purpose: str) -> torch.Generator:
        return derived_generator(training.seed, purpose, number, client)

    own = memory(context)
    if instructions.announce:
        public = job.defense.announce(
            current, *batch, generator=randomness("announce"), memory=own, local=training.local
        )
        return _announcement(message, public)
    update = job.defense.share(
        current, *batch, generator=randomness("share"), memory=own, announced=announced(message), local=training.local
    )
    return reply(message, update, job.defense)
