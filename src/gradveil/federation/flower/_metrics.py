"""The metrics in clients' replies: whether they can be used, and which ones most replies have."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from flwr.app import Message, MetricRecord, RecordDict

from gradveil.core.errors import InputError
from gradveil.federation.protocol import total_weight

_Shape = tuple[str, int | None]  # a metric's name, and its length if it is a list


def weight_in(message: Message, key: str, most: int) -> float:
    """The weight that a reply claims; raise if its metrics cannot be used.

    Args:
        message: the reply.
        key: the name of the metric that is the weight.
        most: the largest weight it may claim.
    """
    records = list(message.content.metric_records.values())
    if len(records) != 1 or key not in records[0]:
        found = {name: sorted(record) for name, record in message.content.metric_records.items()}
        raise InputError(f"expected one MetricRecord with {key!r}, got {found}")
    weight = total_weight(key, records[0][key], most)
    for name, value in records[0].items():
        if not all(map(math.isfinite, value if isinstance(value, list) else [value])):
            raise InputError(f"metrics must be finite, got {value} for {name!r}")
    return weight


def keep_common_metrics(replies: Mapping[int, Message], refuse: Callable[[int, Exception], None]) -> dict[int, Message]:
    """Reduce the replies to the metrics that most of them have, because strategies fail if metrics differ.

    One client must not stop the others, and if only two clients differ, nobody can tell which one is wrong.

    Args:
        replies: by node; each has one record of metrics.
        refuse: called with each node that lacks a metric that most others have, and the error.
    """
    shapes = {node: _shapes(message.content) for node, message in replies.items()}
    common = _held_by_most(shapes.values(), len(replies))
    keys = Counter(next(iter(message.content.metric_records)) for message in replies.values())
    key, count = keys.most_common(1)[0] if keys else ("", 0)
    if 2 * count <= len(replies):
        key = "metrics"
    reduced: dict[int, Message] = {}
    for node, message in replies.items():
        if lacking := sorted(name for name, _ in common - shapes[node]):
            reason = f"its metrics are {sorted(map(str, shapes[node]))}; most others have {lacking}"
            refuse(node, InputError(reason))
            continue
        [(old, record)] = message.content.metric_records.items()
        kept = MetricRecord({name: record[name] for name, _ in sorted(common, key=str)})
        others = {name: value for name, value in message.content.items() if name not in (old, key)}
        message.content = RecordDict({**others, key: kept})
        reduced[node] = message
    return reduced


def _shapes(content: RecordDict) -> set[_Shape]:
    [record] = content.metric_records.values()
    return {(name, len(value) if isinstance(value, list) else None) for name, value in record.items()}


def _held_by_most(sets: Iterable[set[_Shape]], count: int) -> set[_Shape]:
    """The elements that more than half of the sets hold."""
    counts = Counter(shape for each in sets for shape in each)
    return {shape for shape, times in counts.items() if 2 * times > count}
