"""The server's side: a strategy that wraps another one."""

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
from gradveil.federation.flower._metrics import keep_common_metrics, weight_in
from gradveil.federation.protocol import OpenRound, Replies
from gradveil.update import Update, wire

MAX_EXAMPLES = 10_000_000

T = TypeVar("T")

logger = logging.getLogger("flwr")


@dataclass
class _Round:
    """What the server remembers about a round from sending its messages until their replies."""

    server: "OpenRound[_Accepted]"
    arrays: ArrayRecord
    key: str
    asked: list[Message]
    announcement_up: int = 0  # bytes that announcing cost the elected client, up and down
    announcement_down: int = 0


@dataclass(frozen=True)
class _Accepted:
    """A usable reply, and the arrays that the inner strategy gets in its place."""

    message: Message
    size: int  # in bytes, as it arrived
    update: Update
    weight: float
    moved: ArrayRecord


class GradveilStrategy(Strategy):
    """A strategy around another one: it tells clients what they need, reads their updates and refuses bad ones.

    In each round it sends the inner strategy's messages, adding the round's number, the learning rate, and, for
    defenses that align locations, what an elected client announced. It decodes the updates in the replies and refuses
    whatever is not an update of this model in this round: broken bytes, other layers, shapes or types, NaN, a stale
    round, a second reply, metrics that lack what most others have, an error, or no reply. Replies to evaluate messages
    are checked in the same way. Every refusal is logged, counted, and listed in `faults`; the round continues with the
    other replies, and if none is left, the model stays as it was. Each client's next train message says which of its
    updates was used last, so that error feedback can take back a later one.

    The inner strategy gets the metrics that more than half of the replies have; a reply that lacks one of them is
    refused. So if there are two clients, neither can get the other one refused, whoever answers first.

    The inner strategy then gets ordinary arrays, start - lr * update: each client's own, so that medians and Krum work;
    or, if the defense aggregates itself (compensation, aligned locations), the defense's aggregate for every client.

    It cannot recognise a well-formed lie: huge updates, and false weights within the bound, are left to a robust inner
    strategy.

    Args:
        inner: any strategy that sends all clients the same model.
        defense: the defense of the clients, or its name or text; for one that needs preparing, the prepared object.
        lr: the learning rate of the clients, which turns an update into a step again.
        statistics: as in the clients' `defense_mod`: the model, or the names of the arrays that are sent undefended.
        max_examples: largest weight (``num-examples``) that a reply may claim; it must be a whole number from 1. Use
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
        max_examples: int = MAX_EXAMPLES,
    ) -> None:
        self.inner = inner
        self.defense = defense if isinstance(defense, Defense) else create_defense(defense)
        self.lr = checks.number("GradveilStrategy", "lr", lr, above=0)
        self.statistics = statistic_names("GradveilStrategy", statistics)
        self.max_examples = checks.integer("GradveilStrategy", "max_examples", max_examples, low=1, high=2**53)
        self.faults: list[Fault] = []
        self.uploads: list[int] = []  # bytes of every accepted reply
        self.downloads: list[int] = []  # bytes of every train message
        self._weight_key = getattr(inner, "weighted_by_key", messages.WEIGHT)
        self._memory: dict[str, Tensor] = {}
        self._used: dict[int, int] = {}  # the latest round in which an update of each node was used
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
        """As `Strategy.start`; `timeout` also limits how long an announcement is waited for."""
        self._timeout = timeout
        result = super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        if not result.arrays:  # no round had a usable update
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
        current = _Round(server, sent, key, asked)
        instructions = Instructions(server_round, self.lr, str(self.defense))
        server.elect(partial(self._announcement, current, instructions, grid))
        extra: dict[str, Any] = {}
        if server.announced is not None:
            extra[LOCATIONS] = messages.bytes_record(wire.encode_locations(server.announced))
        for message, node in zip(asked, nodes, strict=True):
            own = dataclasses.replace(instructions, used=self._used.get(node, 0))
            message.content = RecordDict({**message.content, INSTRUCTIONS: own.record(), **extra})
            self.downloads.append(messages.size_of(message.content))
        self.downloads[-1] += current.announcement_down
        self._round = current
        return asked

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode, refuse, and let the inner strategy aggregate the rest."""
        current, self._round = self._round, None
        if current is None or current.server.number != server_round:
            raise InputError(f"GradveilStrategy: round {server_round} was aggregated before it was configured")
        opened = _collect(current.server, current.asked, replies, partial(self._open, current))
        usable = keep_common_metrics({node: one.message for node, one in opened.items()}, current.server.refuse)
        accepted = [opened[node] for node in usable]
        if not accepted:
            logger.warning("gradveil: no update of round %d is left; the model stays as it was", server_round)
            return None, None
        if self.defense.aggregates:
            aggregate = current.server.aggregate(
                [one.update for one in accepted], [one.weight for one in accepted], self._memory
            )
            moved = moved_arrays(current.arrays, aggregate, self.lr)
            # A separate record for each client, because strategies of medians remove arrays from theirs.
            accepted = [dataclasses.replace(one, moved=ArrayRecord(dict(moved))) for one in accepted]
        for one in accepted:
            self.uploads.append(one.size)
            others = {key: record for key, record in one.message.content.items() if key != UPDATE}
            one.message.content = RecordDict({**others, current.key: one.moved})
        self.uploads[-1] += current.announcement_up
        arrays, metrics = self.inner.aggregate_train(server_round, [one.message for one in accepted])
        if arrays is not None:
            if not _is_finite(arrays):
                raise NotFiniteError(
                    f"GradveilStrategy: the model stopped being finite in round {server_round}, though every update "
                    "was; lower the learning rate"
                )
            arrays = typed_like(current.arrays, arrays)
            self._used.update(dict.fromkeys(usable, server_round))
        if metrics is not None:
            metrics["gradveil-refused"] = sum(fault.round == server_round for fault in self.faults)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's messages."""
        self._evaluated = list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        return self._evaluated

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Refuse what would stop the inner strategy, and let it aggregate the rest."""
        asked, self._evaluated = self._evaluated, []
        nodes = [message.metadata.dst_node_id for message in asked]
        evaluations: Replies[Message] = Replies(server_round, nodes, self._note, named_once=True)
        usable = keep_common_metrics(_collect(evaluations, asked, replies, self._check_evaluation), evaluations.refuse)
        if asked and not usable:
            logger.warning("gradveil: no evaluation of round %d is left", server_round)
            return None
        return self.inner.aggregate_evaluate(server_round, list(usable.values()))

    def summary(self) -> None:
        """Log the defense, and the inner strategy's summary."""
        logger.info("\t├──> gradveil: %s, lr %g", self.defense, self.lr)
        self.inner.summary()

    def __repr__(self) -> str:
        return f"GradveilStrategy({type(self.inner).__name__}, {str(self.defense)!r}, lr={self.lr:g})"

    def _announcement(self, current: _Round, instructions: Instructions, grid: Grid, node: int) -> bytes | None:
        """Ask a client to announce, and return the bytes that it announces."""
        message = next(message for message in current.asked if message.metadata.dst_node_id == node)
        question = dataclasses.replace(instructions, announce=True, used=self._used.get(node, 0)).record()
        ask = Message(RecordDict({**message.content, INSTRUCTIONS: question}), node, message.metadata.message_type)
        answers = list(grid.send_and_receive([ask], timeout=self._timeout))
        if not answers:
            raise Refused(MISSING, "no announcement")
        if error := _error_of(answers[0]):
            raise error
        current.announcement_up += messages.size_of(answers[0].content)
        current.announcement_down += messages.size_of(ask.content)
        return messages.bytes_of(answers[0].content, LOCATIONS)

    def _open(self, current: _Round, message: Message) -> _Accepted:
        """Decode a reply; raise unless it holds an update of this model in this round."""
        data = messages.bytes_of(message.content, UPDATE)
        if data is None:
            raise InputError('it holds no update of gradveil; put defense_mod(..., send="wire") into the client app')
        extra = sorted({*message.content.array_records, current.key} & set(message.content) - {UPDATE})
        if extra:
            raise InputError(f"it holds arrays, or what could be taken for them, besides the update: {extra}")
        update = current.server.read(data)
        moved = moved_arrays(current.arrays, update, self.lr)
        return _Accepted(message, messages.size_of(message.content), update, self._weight(message), moved)

    def _check_evaluation(self, message: Message) -> Message:
        """Check a reply to an evaluate message, of which only the metrics are used."""
        if found := sorted(message.content.array_records):
            raise InputError(f"expected only metrics in an evaluation, got also the arrays {found}")
        self._weight(message)
        return message

    def _weight(self, message: Message) -> float:
        return weight_in(message, self._weight_key, self.max_examples)

    def _note(self, fault: Fault) -> None:
        self.faults.append(fault)
        logger.warning("gradveil: refused: %s", fault)


def _collect(
    replies: Replies[T], asked: Sequence[Message], arrived: Iterable[Message], read: Callable[[Message], T]
) -> dict[int, T]:
    """What `read` returns for each usable reply, by node, in the order in which the nodes were asked."""
    node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in asked}
    for message in arrived:
        # The error for a dead node comes from the SuperLink, so the request tells which node it is about.
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
    reported = NOT_FINITE if NotFiniteError.__name__ in reason else FAILED
    return Refused(MISSING if code == ErrorCode.NODE_UNAVAILABLE else reported, f"error {code}: {reason}")


def _is_finite(record: ArrayRecord) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in record.to_torch_state_dict().values())
