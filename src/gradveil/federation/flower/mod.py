"""The client's side: a mod that protects what an existing app sends."""

import copy
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import InputError, ParameterError
from gradveil.defenses import Defense
from gradveil.defenses import create as create_defense
from gradveil.federation.flower import _messages as messages
from gradveil.federation.flower._arrays import Statistics, moved_arrays, names_of, statistic_names, update_of
from gradveil.federation.flower._context import Ledger, memory
from gradveil.federation.flower._messages import INSTRUCTIONS, Instructions
from gradveil.update import Update

if TYPE_CHECKING:
    from flwr.clientapp.typing import ClientAppCallable

SEND = ("wire", "dense")
OTHER_MESSAGES = ("evaluate", "query")
SERVER_ROUND = "server-round"  # Flower's strategies number their rounds under this name

CLIP = 10.0
"""Largest norm of an update, in gradient units, that a defense with noise is given unless the client says otherwise."""

logger = logging.getLogger("flwr")


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
        instructions = Instructions.of(message) if self.send == "dense" else Instructions.required(message)
        lr = self._rate(message, instructions)
        if instructions is not None:
            instructions.check_defense(self.defense)
        announce = instructions is not None and instructions.announce
        published = messages.announced(message)
        _, before = messages.model_arrays(message.content, "the train message")
        bare = copy.copy(message)
        bare.content = RecordDict({key: r for key, r in message.content.items() if key not in messages.OUR_RECORDS})

        # Before the app sees the message: a round in which it fails is not asked for again either.
        ledger = Ledger.of(context)
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
        key, after = messages.model_arrays(answer.content, "the client's reply")
        update = self._bounded(update_of(before, after, lr, self.statistics), context)
        if announce:
            return messages.announcement(message, self.defense.publish(update, memory(context)))
        update = self.defense.perturb(update, memory=memory(context), announced=published)
        others = self._listed({name: record for name, record in answer.content.items() if name != key})
        if self.send == "dense":
            answer.content = RecordDict({key: moved_arrays(before, update, lr), **others})
            return answer
        assert instructions is not None
        sent = messages.update_record(update, instructions, self.defense.locations(published))
        answer.content = RecordDict({messages.UPDATE: sent, **others})
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
        weight = name == messages.WEIGHT and isinstance(record, MetricRecord) and not isinstance(value, list)
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

    def _rate(self, message: Message, instructions: Instructions | None) -> float:
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

    def _number(self, message: Message, instructions: Instructions | None) -> int | None:
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
        gradveil.core.errors.ParameterError: defense_mod: soteria needs the client's data, which a mod never sees...
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
            "    update = defense.share(task, inputs, labels, memory=gradveil.flower.memory(context))\n"
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
    kinds = names_of("defense_mod", "arrays", arrays, "kinds of messages")
    for kind in kinds:
        checks.choice("defense_mod", "arrays", kind, OTHER_MESSAGES)
    named = statistic_names("defense_mod", statistics)
    listed = names_of("defense_mod", "metrics", metrics, "names of metrics")
    return _DefenseMod(chosen, lr, send, clip, rounds, named, listed, kinds)


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
