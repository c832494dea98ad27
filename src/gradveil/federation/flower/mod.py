"""The client's side: a mod that defends what an existing app sends."""

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
from gradveil.federation.flower._arrays import Statistics, check_names, moved_arrays, statistic_names, update_of
from gradveil.federation.flower._context import Ledger, memory
from gradveil.federation.flower._messages import INSTRUCTIONS, Instructions
from gradveil.update import Update

if TYPE_CHECKING:
    from flwr.clientapp.typing import ClientAppCallable

SEND = ("wire", "dense")
OTHER_MESSAGES = ("evaluate", "query")
SERVER_ROUND = "server-round"  # Flower's strategies number their rounds under this name

CLIP = 10.0
"""Default of `clip` for defenses that add noise: the largest norm of an update, in gradient units."""

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
            return self._answer_other(kind, message, context, call_next)
        instructions = Instructions.of(message) if self.send == "dense" else Instructions.required(message)
        lr = self._learning_rate(message, instructions)
        if instructions is not None:
            instructions.check_defense(self.defense)
        announce = instructions is not None and instructions.announce
        published = messages.announced(message)
        _, before = messages.model_arrays(message.content, "the train message")
        plain = copy.copy(message)  # the message as the app expects it, without gradveil's records
        plain.content = RecordDict({key: r for key, r in message.content.items() if key not in messages.OUR_RECORDS})

        # Before the app sees the message, so that a round in which it fails is not answered again either.
        ledger = Ledger.of(context)
        arrived = instructions is None or instructions.used >= ledger.trained  # before the ledger enters this round
        ledger.claim(self._round_number(message, instructions), self.rounds, announce=announce)
        ledger.keep(context)
        self.defense.settle(memory(context), arrived=arrived)
        state = copy.deepcopy(context.state) if announce else None
        answer = call_next(plain, context)
        if state is not None:
            context.state = state  # training in this round is still to come
        ledger.keep(context)  # again, in case the app changed the state
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

    def _answer_other(self, kind: str, message: Message, context: Context, call_next: "ClientAppCallable") -> Message:
        """Reply to a message that does not ask for training; what the reply says about the data is not defended."""
        answer = call_next(message, context)
        if answer.has_error():
            return answer
        _refuse_reserved(answer.content)
        found = sorted(answer.content.array_records)
        if found and kind not in self.arrays:
            raise InputError(
                f"flower: expected no arrays in the reply to a message of type {kind!r}, got {found}; no defense acts "
                f'on them. If they may be sent as they are, write defense_mod(..., arrays=["{kind}"])'
            )
        answer.content = RecordDict(self._listed(answer.content))
        return answer

    def _listed(self, records: Mapping[str, ArrayRecord | MetricRecord | ConfigRecord]) -> dict[str, Any]:
        """The records, reduced to what the client has listed; records that become empty are left out."""
        listed: dict[str, Any] = {}
        dropped: list[str] = []
        for key, record in records.items():
            if isinstance(record, ArrayRecord):
                listed[key] = record
                continue
            kept: dict[str, Any] = {n: v for n, v in record.items() if self._may_be_sent(n, v, record)}
            dropped += [name for name in record if name not in kept]
            if kept:
                listed[key] = type(record)(kept)
        if dropped:
            logger.warning(
                "gradveil: left out of the reply: %s; to send them as they are, write defense_mod(..., metrics=[...])",
                ", ".join(sorted(dropped)),
            )
        return listed

    def _may_be_sent(self, name: str, value: object, record: MetricRecord | ConfigRecord) -> bool:
        is_weight = name == messages.WEIGHT and isinstance(record, MetricRecord) and not isinstance(value, list)
        return is_weight or name in self.metrics

    def _bounded(self, update: Update, context: Context) -> Update:
        """The update clipped to norm `clip`; what error feedback will add to it is clipped as well.

        Noise protects only what is not much larger than the noise. The server can influence how large an update is (by
        the weights it sends, or by a learning rate that the app takes from the message), so the norm is limited. So is
        that of a residual, which would otherwise add up over the rounds what is clipped in each.
        """
        if self.clip is None:
            return update
        for residual in self.defense.residuals(memory(context)):
            residual.update(_clipped(dict(residual), self.clip, "what error feedback kept"))
        return Update(_clipped(update, self.clip, "the update"), update.meta)

    def _learning_rate(self, message: Message, instructions: Instructions | None) -> float:
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

    def _round_number(self, message: Message, instructions: Instructions | None) -> int | None:
        """The round's number; None: the server does not send one, and messages are counted instead."""
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
    r"""A mod that defends what an existing client app sends, without changing the app.

    The app trains as usual; from the arrays it got and the arrays it returns, the mod computes

    .. math:: u = (start - end) / lr, \quad sent = D(u \min(1, clip / |u|))

    so that noise is always in gradient units, and sends the defended update in place of the arrays. The defense
    acts once, on the finished update; error feedback keeps its residual in the node's context.

    A `GradveilStrategy` tells each client which of its updates it used last; what a later one carried is owed again
    (`Defense.take_back`). Any other server tells nothing, and every update is taken to have arrived: if that is wrong,
    the values of that update are missing, whereas the opposite mistake would send the same values twice. A server that
    claims to have lost an update hears again what it carried, as part of what error feedback adds, which nothing
    protects in any case (`gradveil.ErrorFeedback`).

    A round is answered once, and round numbers only grow: the answered rounds are kept in the node's context, which
    lives as long as the run. A stock SuperNode may begin with the next message before it has saved the context; one
    started with `gradveil.federation.supernode` does not.

    Args:
        defense: a gradient-only defense, or its name or text (``"dual-pruning:k1=0.05+error-feedback"``).
        lr: the client's learning rate. None: the one that the server's strategy sends (or, with ``send="dense"``, the
            ``lr`` in the train message). **Set it** if the defense adds noise and the server is not trusted: whoever
            chooses lr chooses how large the noise is relative to the update, up to `clip`.
        send: ``"wire"``: as bytes that only a `GradveilStrategy` reads; zeros cost next to nothing. ``"dense"``: as
            arrays start - lr * sent that any strategy reads; no bytes are saved, and the method's part on the server
            (compensation, aligned locations) does not happen.
        clip: largest norm of the update over all layers, in gradient units; what error feedback adds to it is clipped
            to the same norm. A larger one is scaled down before the defense acts, with a warning. Default: 10 if the
            defense adds noise (`Defense.adds_noise`), else None: no limit. A server can make an update as large as it
            likes, so that noise is negligible next to it: choose the norm of your honest updates rather than None.
        rounds: how many rounds this client answers in this context; None: any number. Needed with ``send="dense"``
            if the server's messages have no ``server-round``.
        statistics: the arrays that are sent as they are, undefended: a model, which stands for its buffers (batch-norm
            statistics), or names. Every other floating-point array is defended, and one of whole numbers must come
            back unchanged. The server's strategy must be given the same.
        metrics: names of the metrics and config values that may be sent besides ``num-examples``, undefended, in
            replies of every kind. Others are left out, with a warning.
        arrays: ``"evaluate"``, ``"query"``: kinds of messages whose replies may hold arrays, which are sent undefended.
            Arrays in replies of any other kind are an error.
        parameters: parameters of the defense, if it is given by name.

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
    kinds = check_names("defense_mod", "arrays", arrays, "kinds of messages")
    for kind in kinds:
        checks.choice("defense_mod", "arrays", kind, OTHER_MESSAGES)
    named = statistic_names("defense_mod", statistics)
    listed = check_names("defense_mod", "metrics", metrics, "names of metrics")
    return _DefenseMod(chosen, lr, send, clip, rounds, named, listed, kinds)


def _clipped(layers: Mapping[str, Tensor], limit: float, what: str) -> dict[str, Tensor]:
    """The layers, scaled down together if their norm is above the limit."""
    norm = math.hypot(*(float(torch.linalg.vector_norm(value.double())) for value in layers.values()))
    if not norm > limit:
        return dict(layers)
    logger.warning("gradveil: %s has norm %.3g, cut to %g; see defense_mod(..., clip=...)", what, norm, limit)
    return {name: (value.double() * (limit / norm)).to(value.dtype) for name, value in layers.items()}


def _refuse_reserved(content: RecordDict) -> None:
    """Refuse a reply that uses gradveil's record names: what it holds would be taken for a defended update."""
    if taken := sorted(key for key in content if key.partition(".")[0] == INSTRUCTIONS):
        raise InputError(
            f"flower: expected a reply without records called {INSTRUCTIONS!r} or {INSTRUCTIONS + '.*'!r}, which "
            f"gradveil keeps for itself, got {taken}; call them something else in the client app"
        )
