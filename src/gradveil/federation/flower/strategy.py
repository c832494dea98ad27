"""The server's side: a strategy around another one."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import InputError, NotFiniteError
from gradveil.defenses import Defense
from gradveil.defenses import create as create_defense
from gradveil.federation.faults import FAILED, MISSING, NOT_FINITE, STRANGER, Fault, Refused
from gradveil.federation.flower import _messages as messages
from gradveil.federation.flower._arrays import Statistics, moved_arrays, split_arrays, statistic_names, typed_like
from gradveil.federation.flower._messages import INSTRUCTIONS, LOCATIONS, UPDATE, Instructions
from gradveil.federation.flower._metrics import alike, weight_in
from gradveil.federation.protocol import OpenRound, Replies
from gradveil.update import Update, wire

MOST_EXAMPLES = 10_000_000

T = TypeVar("T")

logger = logging.getLogger("flwr")


@dataclass
class _Round:
    """What the server remembers of a round from its messages to their replies."""

    server: "OpenRound[_Accepted]"
    arrays: ArrayRecord
    key: str
    asked: list[Message]
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
        >>> from flwr.serverapp.strategy import FedAvg
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
        self.statistics = statistic_names("GradveilStrategy", statistics)
        self.most_examples = checks.integer("GradveilStrategy", "most_examples", most_examples, low=1, high=2**53)
        self.faults: list[Fault] = []
        self.uploads: list[int] = []  # bytes of every accepted reply
        self.downloads: list[int] = []  # bytes of every train message
        self._weight_key = getattr(inner, "weighted_by_key", messages.WEIGHT)
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
        asked = list(self.inner.configure_train(server_round, arrays, config, grid))
        self._round = None
        if not asked:
            return asked
        key, sent = messages.model_arrays(asked[0].content, "the strategy's train message")
        if any(message.content.get(key) != sent for message in asked):
            raise InputError(
                f"GradveilStrategy: {type(self.inner).__name__} sends different models to the clients of a round; "
                "expected one for all"
            )
        model, nodes = split_arrays(sent, self.statistics), [message.metadata.dst_node_id for message in asked]
        server: OpenRound[_Accepted] = OpenRound(
            server_round,
            nodes,
            self._note,
            defense=self.defense,
            parameters=model.parameters,
            statistics=model.statistics,
            all_statistics=False,
            named_once=True,
        )
        now = _Round(server, sent, key, asked)
        instructions = Instructions(server_round, self.lr, str(self.defense))
        server.elect(partial(self._announcement, now, instructions, grid))
        extra: dict[str, Any] = {INSTRUCTIONS: instructions.record()}
        if server.announced is not None:
            extra[LOCATIONS] = messages.bytes_record(wire.encode_locations(server.announced))
        for message in asked:
            message.content = RecordDict({**message.content, **extra})
            self.downloads.append(messages.size_of(message.content))
        self.downloads[-1] += now.announcement_down
        self._round = now
        return asked

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode, refuse, and let the inner strategy aggregate the rest."""
        now, self._round = self._round, None
        if now is None or now.server.number != server_round:
            raise InputError(f"GradveilStrategy: round {server_round} was aggregated before it was configured")
        opened = _heard(now.server, now.asked, replies, partial(self._open, now))
        accepted = [opened[node] for node in alike({n: o.message for n, o in opened.items()}, now.server.refuse)]
        if not accepted:
            logger.warning("gradveil: no update of round %d is left; the model stays as it was", server_round)
            return None, None
        if self.defense.aggregates:
            aggregate = now.server.aggregate(
                [one.update for one in accepted], [one.weight for one in accepted], self._memory
            )
            moved = moved_arrays(now.arrays, aggregate, self.lr)
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
            arrays = typed_like(now.arrays, arrays)
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
        nodes = [message.metadata.dst_node_id for message in asked]
        evaluations: Replies[Message] = Replies(server_round, nodes, self._note, named_once=True)
        heard = alike(_heard(evaluations, asked, replies, self._evaluation), evaluations.refuse)
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

    def _announcement(self, now: _Round, instructions: Instructions, grid: Grid, node: int) -> bytes | None:
        """What a client announces when it is asked to."""
        message = next(message for message in now.asked if message.metadata.dst_node_id == node)
        question = dataclasses.replace(instructions, announce=True).record()
        ask = Message(RecordDict({**message.content, INSTRUCTIONS: question}), node, message.metadata.message_type)
        answers = list(grid.send_and_receive([ask], timeout=self._timeout))
        if not answers:
            raise Refused(MISSING, "no announcement")
        if error := _error_of(answers[0]):
            raise error
        now.announcement_up += messages.size_of(answers[0].content)
        now.announcement_down += messages.size_of(ask.content)
        return messages.bytes_of(answers[0].content, LOCATIONS)

    def _open(self, now: _Round, message: Message) -> _Accepted:
        """What a reply holds; anything but an update of this model in this round raises."""
        data = messages.bytes_of(message.content, UPDATE)
        if data is None:
            raise InputError('it holds no update of gradveil; put defense_mod(..., send="wire") into the client app')
        beside = sorted({*message.content.array_records, now.key} & set(message.content) - {UPDATE})
        if beside:
            raise InputError(f"it holds arrays, or what could be taken for them, beside the update: {beside}")
        update = now.server.read(data)
        moved = moved_arrays(now.arrays, update, self.lr)
        return _Accepted(message, messages.size_of(message.content), update, self._weight(message), moved)

    def _evaluation(self, message: Message) -> Message:
        """Look at a reply to an evaluate message, of which only the metrics are used."""
        if found := sorted(message.content.array_records):
            raise InputError(f"expected metrics alone in an evaluation, got also the arrays {found}")
        self._weight(message)
        return message

    def _weight(self, message: Message) -> float:
        return weight_in(message, self._weight_key, self.most_examples)

    def _note(self, fault: Fault) -> None:
        self.faults.append(fault)
        logger.warning("gradveil: refused: %s", fault)


def _heard(
    replies: Replies[T], asked: Sequence[Message], arrived: Iterable[Message], read: Callable[[Message], T]
) -> dict[int, T]:
    """What `read` makes of the replies that can be used, by node, in the order in which the nodes were asked."""
    node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in asked}
    for message in arrived:
        # The error for a dead node comes from the SuperLink, so it is the question that tells whose it is.
        source, node = message.metadata.src_node_id, node_of.get(message.metadata.reply_to_message_id)
        if node is None:
            replies.refuse_stranger(source, "it answers no message of this round")
        elif error := _error_of(message):
            replies.refuse(node, error)
        elif source != node:
            replies.refuse(node, Refused(STRANGER, f"its reply came from node {source}"))
        else:
            replies.receive(node, partial(read, message))
    return replies.close()


def _error_of(message: Message) -> Refused | None:
    """The error that a client, or the SuperLink in its place, replied with."""
    if not message.has_error():
        return None
    code, reason = message.error.code, message.error.reason or ""
    told = NOT_FINITE if NotFiniteError.__name__ in reason else FAILED
    return Refused(MISSING if code == ErrorCode.NODE_UNAVAILABLE else told, f"error {code}: {reason}")


def _is_finite(record: ArrayRecord) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in record.to_torch_state_dict().values())
