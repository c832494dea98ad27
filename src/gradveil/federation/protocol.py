"""A round as its server sees it, whatever carries the messages: elect, receive, close, aggregate.

Whatever arrives, the round continues with the usable replies. A refused reply changes nothing and is noted as a fault.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import GradveilError, InputError, NotFiniteError
from gradveil.defenses import Defense
from gradveil.federation.faults import DUPLICATE, MALFORMED, MISSING, STALE, STRANGER, Fault, Refused
from gradveil.update import Announced, LocalSteps, Memory, Update, wire

T = TypeVar("T")


@dataclass
class Replies(Generic[T]):
    """The replies to one request of a round: from each client that was asked, the first usable reply counts.

    Args:
        number: the number of the round.
        clients: the clients that are asked, in order.
        note: called with every fault.
        named_once: a client whose replies were all refused is not also noted as missing.

    Example:
        >>> faults = []
        >>> replies = Replies(0, [4, 5], faults.append)
        >>> replies.receive(4, lambda: "first"), replies.receive(4, lambda: "second")
        (True, False)
        >>> replies.close(), [(fault.client, fault.kind) for fault in faults]
        ({4: 'first'}, [(4, 'duplicate'), (5, 'missing')])
    """

    number: int
    clients: Sequence[int]
    note: Callable[[Fault], None]
    named_once: bool = field(default=False, kw_only=True)
    _usable: dict[int, T] = field(default_factory=dict, init=False)
    _explained: set[int] = field(default_factory=set, init=False)  # these have a fault and are not noted as missing

    def receive(self, client: int, read: Callable[[], T]) -> bool:
        """Take a client's reply; return whether it was accepted. If not, the reason is noted as a fault.

        Args:
            client: the client that sent it.
            read: returns what the reply holds; raises `Refused` or `GradveilError` if it cannot be used.
        """
        try:
            if client not in self.clients:
                raise Refused(STRANGER, "it was not asked in this round")
            if client in self._usable:
                raise Refused(DUPLICATE, "expected one reply, got another one; the first counts")
            self._usable[client] = read()
        except (Refused, GradveilError) as error:
            self.refuse(client, error)
            return False
        return True

    def refuse(self, client: int, error: Exception) -> None:
        """Note why a client's reply is not used; it may send another one."""
        self._fault(client, error)
        if self.named_once:
            self._explained.add(client)

    def refuse_stranger(self, client: int, reason: str) -> None:
        """Note a message that answers no request of this round."""
        self._fault(client, Refused(STRANGER, reason))

    def fail(self, client: int, kind: str, reason: str) -> None:
        """Note that a client itself reports that it cannot answer; nothing more is expected from it."""
        self._fault(client, Refused(kind, reason))
        self._explained.add(client)

    def _fault(self, client: int, error: Exception) -> None:
        kind = error.kind if isinstance(error, Refused) else MALFORMED
        self.note(Fault(self.number, client, kind, str(error)))

    def close(self) -> dict[int, T]:
        """Return the usable replies, in the order in which the clients were asked; note who is missing."""
        for client in self.clients:
            if client not in self._usable and client not in self._explained:
                self._fault(client, Refused(MISSING, "no reply that could be used"))
        return {client: self._usable[client] for client in self.clients if client in self._usable}


@dataclass(kw_only=True)
class OpenRound(Replies[T]):
    """One round of a training run: `elect` who announces, `receive` what `read` accepts, `close`, `aggregate`.

    Args:
        number: the number of the round.
        clients: the clients that are asked for an update, in order.
        note: called with every fault.
        defense: the defense of the clients.
        parameters: tensors with the names, shapes and types that an update must have, such as ``task.parameters``.
        statistics: the batch-norm statistics that an update must carry, with their values before the round.
        all_statistics: False: a client may leave some out; those stay as they were.
        max_samples: the most examples that a client may claim to have used, which are its weight in the mean. None:
            another part of the reply gives the weight, and the samples and local steps in the bytes are ignored.
        local: the local steps that were asked for.
        named_once: see `Replies`.

    Example:
        >>> from gradveil.defenses import create
        >>> from gradveil.update import Meta
        >>> faults, model = [], {"w": torch.zeros(2)}
        >>> server = OpenRound(0, [4, 5], faults.append, defense=create("none"), parameters=model, max_samples=8)
        >>> message = wire.encode(Update({"w": torch.ones(2)}, Meta(round=0, samples=1)))
        >>> server.receive(4, lambda: server.read(message)), server.receive(5, lambda: server.read(message[:-1]))
        (True, False)
        >>> updates = server.close()
        >>> list(updates), [(fault.client, fault.kind) for fault in faults]
        ([4], [(5, 'malformed'), (5, 'missing')])
        >>> server.aggregate(list(updates.values()), [1.0])["w"].tolist()
        [1.0, 1.0]
    """

    defense: Defense
    parameters: Mapping[str, Tensor]
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    all_statistics: bool = True
    max_samples: int | None = None
    local: LocalSteps | None = None
    announced: Announced | None = field(default=None, init=False)

    def elect(self, ask: Callable[[int], bytes | Announced | None]) -> None:
        """Ask the first client to announce; if its announcement is refused, ask the next one, and so on.

        If all are refused, the round goes on without an announcement, which every defense can do.

        Args:
            ask: returns one client's announcement; raises `Refused` or `GradveilError` if there is none.
        """
        for client in self.clients if self.defense.announces else ():
            try:
                announced = ask(client)
                if announced is None:
                    raise Refused(MISSING, "no announcement")
                if isinstance(announced, bytes):
                    announced = wire.decode_locations(announced, like=self.parameters)
                self.defense.check_announced(announced, self.parameters)
            except NotFiniteError:
                continue  # the client will report that again when it is asked for its update
            except (Refused, GradveilError) as error:
                self._fault(client, error)
                continue
            self.announced = announced
            return

    @property
    def locations(self) -> Announced | None:
        """The positions, known to both sides, that hold all values of this round's updates."""
        return self.defense.locations(self.announced)

    def read(self, message: bytes) -> Update:
        """Decode the update in a message; raise unless it is one of this model in this round."""
        update = wire.decode(message, self.locations, like=self.parameters)
        meta = update.meta
        if meta.round != self.number:
            raise Refused(STALE, f"expected an update of round {self.number}, got one of round {meta.round}")
        if self.max_samples is not None:
            total_weight("samples", meta.samples, self.max_samples)
            if meta.local != self.local:
                raise InputError(f"expected local steps {self.local}, got {meta.local}")
        expected = {n: v for n, v in self.statistics.items() if self.all_statistics or n in meta.buffers}
        check_statistics(expected, meta.buffers)
        meta.buffers = {**self.statistics, **meta.buffers}
        return update

    def aggregate(self, updates: Sequence[Update], weights: Sequence[float], memory: Memory | None = None) -> Update:
        """The defense's aggregate of the updates of this round.

        Args:
            updates: the accepted updates.
            weights: their weights in the mean.
            memory: what the server's side of the defense remembers.
        """
        return self.defense.aggregate(updates, weights=weights, memory=memory, announced=self.announced)


def total_weight(name: str, claimed: object, most: int) -> float:
    """The weight in the mean that a client claims; raise unless it is a whole number from 1 to `most`."""
    weight = checks.number("reply", name, claimed, low=1, high=most)
    if not weight.is_integer():
        raise InputError(f"{name} must be a whole number, got {weight}")
    return weight


def check_statistics(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> None:
    """Raise `InputError` unless the names, shapes and types are the expected ones and the values are possible."""
    wanted, found = ({name: (tuple(v.shape), v.dtype) for name, v in group.items()} for group in (expected, got))
    if found != wanted:
        raise InputError(f"expected buffers {wanted}, got {found}; both sides must name the same statistics")
    for name, value in got.items():
        if not torch.isfinite(value).all() or (name.endswith("running_var") and (value < 0).any()):
            raise InputError(f"expected batch-norm statistics, got impossible values in {name!r}")
