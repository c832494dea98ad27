"""Checks that a checkpoint fits its training: whatever the seed and the model determine is compared.

A digest finds damage. These checks find a file that is undamaged but wrong: written by other code, or put together from
parts. Above all, the rounds from which epsilon is computed must be those in which the seed has drawn each client.
Everything that does not fit raises `ValueError`.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradveil.federation.faults import KINDS, MISSING, NOT_FINITE, Fault
from gradveil.federation.memory import MemoryFile
from gradveil.federation.training import TIMES, RoundRecord, Training, choose_clients, history_of

RECORD_FIELDS = len(RoundRecord.__dataclass_fields__)
FAULT_FIELDS = len(Fault.__dataclass_fields__)


def check_like(group: str, expected: Mapping[str, Tensor], got: Mapping[str, Tensor], *, ordered: bool) -> None:
    """Compare names, shapes and types, and if `ordered` also the order of the names, in which layers are processed."""
    if list(got) != list(expected) if ordered else got.keys() != expected.keys():
        raise ValueError(f"{group} are {list(got)}, those of this training are {list(expected)}")
    for name, value in got.items():
        saved, wanted = ((list(tensor.shape), tensor.dtype) for tensor in (value, expected[name]))
        if saved != wanted:
            raise ValueError(f"{group}: {name!r} is {saved}, in this training it is {wanted}")


def check_finite(group: str, fresh: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> None:
    """Require finite values wherever those of the `fresh` training are: a model's own buffers may hold infinities."""
    for name, value in got.items():
        if (fresh[name].isfinite() & ~value.isfinite()).any():
            raise ValueError(f"{group}: {name!r} holds NaN or infinity")


def check_squares(group: str, got: Mapping[str, Tensor]) -> None:
    """Require what means of squares are: never negative, never NaN. They may overflow without stopping the run."""
    for name, value in got.items():
        if not (value >= 0).all():
            raise ValueError(f"{group}: {name!r} holds values that no square can have")


def read_records(saved: Any, training: Training) -> list[RoundRecord]:
    """Read the records of the rounds, which must count from 0."""
    records = []
    for number, fields in enumerate(_list(saved, "records")):
        record = RoundRecord(*_list(fields, f"record {number}", RECORD_FIELDS))
        whole_number("round of a record", record.round, number, number)
        whole_number(f"clients of round {number}", record.clients, 0, training.drawn_clients)
        times = tuple(getattr(record, name) for name in TIMES)
        if not all(type(value) is float and 0 <= value < math.inf for value in times):
            raise ValueError(f"the times of round {number} are {times}")
        if type(record.loss) is not float:
            raise ValueError(f"the loss of round {number} is {record.loss!r}")
        for length in (record.upload_bytes, record.download_bytes):
            if type(length) is not float or not (0 <= length < math.inf if record.clients else math.isnan(length)):
                raise ValueError(f"round {number} sent {length!r} bytes among {record.clients} clients")
        _check_accuracy(record, training)
        records.append(record)
    return records


def _check_accuracy(record: RoundRecord, training: Training) -> None:
    evaluated = training.evaluates_after(record.round + 1)
    if not (type(record.accuracy) is float and 0 <= record.accuracy <= 1 if evaluated else record.accuracy is None):
        raise ValueError(f"the accuracy of round {record.round} is {record.accuracy!r}")


def check_history(saved: Any, records: Sequence[RoundRecord]) -> None:
    """Require that the history holds exactly the accuracies in the records."""
    history = history_of(records)
    if saved != [list(entry) for entry in history]:
        raise ValueError(f"the history is {saved}, but the records say {history}")


def read_faults(saved: Any, training: Training, begun: int) -> list[Fault]:
    """Read the faults, which must lie in the first `begun` rounds, in order."""
    faults = [Fault(*_list(fields, "a fault", FAULT_FIELDS)) for fields in _list(saved, "faults")]
    latest = 0
    for fault in faults:
        latest = whole_number("round of a fault", fault.round, latest, begun - 1)
        whole_number("client of a fault", fault.client, 0, training.clients - 1)
        if fault.kind not in KINDS or not isinstance(fault.reason, str):
            raise ValueError(f"a fault is {fault.kind!r}, because {fault.reason!r}")
    return faults


def check_rounds(
    training: Training,
    records: Sequence[RoundRecord],
    faults: Sequence[Fault],
    *,
    number: int,
    steps: int,
    diverged: int | None,
    rounds_of: Any,
) -> Counter[int]:
    """Count the rounds in which each client took part: the seed drew it, and its gradients were finite.

    The saved `rounds_of` must equal that, and the clients in `records` and the `steps` must fit it.
    """
    begun = number + (diverged == number)
    absent: dict[str, list[set[int]]] = {kind: [set() for _ in range(begun)] for kind in (NOT_FINITE, MISSING)}
    for fault in faults:
        if fault.kind in absent:
            if fault.client in absent[fault.kind][fault.round]:
                raise ValueError(f"client {fault.client} is {fault.kind} twice in round {fault.round}")
            absent[fault.kind][fault.round].add(fault.client)
    took_part: Counter[int] = Counter()
    expected_steps = 0
    for done in range(begun):
        drawn, silent, missing = {*choose_clients(training, done)}, absent[NOT_FINITE][done], absent[MISSING][done]
        if silent & missing or not silent | missing <= drawn:
            raise ValueError(f"in round {done}, the clients with faults do not fit those that were drawn")
        arrived = len(drawn) - len(silent) - len(missing)
        if done < number and records[done].clients != arrived:
            raise ValueError(f"round {done} has {records[done].clients} clients, but its faults leave {arrived}")
        took_part.update(drawn - silent)
        expected_steps += arrived > 0
    if steps != expected_steps:
        raise ValueError(f"the server took {steps} steps, but the records say {expected_steps}")
    if rounds_of != [list(entry) for entry in sorted(took_part.items())]:
        raise ValueError(f"clients took part in {rounds_of} rounds, but the seed says {sorted(took_part.items())}")
    return took_part


def read_memories(saved: Any, training: Training) -> dict[int, MemoryFile]:
    """Read which file holds each client's memory."""
    files = {}
    for entry in _list(saved, "memories"):
        client, version, digest = _list(entry, "a memory", 3)
        whole_number("client of a memory", client, 0, training.clients - 1)
        whole_number("version of a memory", version, 0, 2**63)
        if client in files or not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"the memory of client {client} is {digest!r}")
        files[client] = MemoryFile(version, digest)
    return files


def whole_number(what: str, value: Any, low: int, high: int) -> int:
    """Return `value` if it is a whole number in that range."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{what} is {value!r}, expected a whole number from {low} to {high}")
    return value


def _list(value: Any, what: str, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise ValueError(f"{what}: expected a list" + (f" of {length}" if length else ""))
    return value
