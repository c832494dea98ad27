"""The metrics in clients' replies: whether they can be used, and what most of them have in common."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from flwr.app import Message, MetricRecord, RecordDict

from gradveil.core.errors import InputError
from gradveil.federation.protocol import weight_of

_Shape = tuple[str, int | None]  # a metric's name, and its length if it is a list


def weight_in(message: Message, key: str, most: int) -> float:
    """What a reply says to weigh, if its metrics can be used.

    Args:
        message: the reply.
        key: the metric that is its weight.
        most: the largest weight it may claim.
    """
    records = list(message.content.metric_records.values())
    if len(records) != 1 or key not in records[0]:
        found = {name: sorted(record) for name, record in message.content.metric_records.items()}
        raise InputError(f"expected one MetricRecord with {key!r}, got {found}")
    weight = weight_of(key, records[0][key], most)
    for name, value in records[0].items():
        if not all(map(math.isfinite, value if isinstance(value, list) else [value])):
            raise InputError(f"metrics must be finite, got {value} for {name!r}")
    return weight


def alike(replies: Mapping[int, Message], refuse: Callable[[int, Exception], None]) -> dict[int, Message]:
    """The replies cut to the metrics that most of them have; strategies stop at different ones.

    One client must not stop the others, and of two clients that differ nobody can tell which one is odd.

    Args:
        replies: by node; each has one record of metrics.
        refuse: is told who lacks a metric that most others have.
    """
    shapes = {node: _shapes(message.content) for node, message in replies.items()}
    usual = _most(shapes.values(), len(replies))
    keys = Counter(next(iter(message.content.metric_records)) for message in replies.values())
    key, count = keys.most_common(1)[0] if keys else ("", 0)
    if 2 * count <= len(replies):
        key = "metrics"
    cut: dict[int, Message] = {}
    for node, message in replies.items():
        if lacking := sorted(name for name, _ in usual - shapes[node]):
            reason = f"its metrics are {sorted(map(str, shapes[node]))}; most others have {lacking}"
            refuse(node, InputError(reason))
            continue
        [(old, record)] = message.content.metric_records.items()
        kept = MetricRecord({name: record[name] for name, _ in sorted(usual, key=str)})
        others = {name: value for name, value in message.content.items() if name not in (old, key)}
        message.content = RecordDict({**others, key: kept})
        cut[node] = message
    return cut


def _shapes(content: RecordDict) -> set[_Shape]:
    [record] = content.metric_records.values()
    return {(name, len(value) if isinstance(value, list) else None) for name, value in record.items()}


def _most(sets: Iterable[set[_Shape]], count: int) -> set[_Shape]:
    """What more than half of the sets hold."""
    held = Counter(shape for one in sets for shape in one)
    return {shape for shape, times in held.items() if 2 * times > count}
