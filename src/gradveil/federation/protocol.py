"""A round as its server sees it, whoever carries the messages: ask, elect, receive, close.

Whatever arrives, the round goes on with the replies that are in order. One that is refused changes nothing and is named
as a fault.
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
    """The answers to one question of a round: from each client that was asked, the first usable reply counts.

    Args:
        number: the round.
        clients: who is asked, in order.
        note: is told every fault.
        named_once: a client whose replies were all refused is not also named as missing.

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
    _named: set[int] = field(default_factory=set, init=False)  # not to be named as missing

    def receive(self, client: int, read: Callable[[], T]) -> bool:
        """Whether a client's reply was accepted; if not, the reason is among the faults.

        Args:
            client: who sent it.
            read: what the reply holds; raises `Refused` or `GradveilError` if it cannot be used.
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
            self._named.add(client)

    def refuse_stranger(self, client: int, reason: str) -> None:
        """Note a message that answers no question of this round."""
        self._fault(client, Refused(STRANGER, reason))

    def fail(self, client: int, kind: str, reason: str) -> None:
        """Note that a client says itself that it cannot answer; nothing more is expected from it."""
        self._fault(client, Refused(kind, reason))
        self._named.add(client)

    def _fault(self, client: int, error: Exception) -> None:
        kind = error.kind if isinstance(error, Refused) else MALFORMED
        self.note(Fault(self.number, client, kind, str(error)))

    def close(self) -> dict[int, T]:
        """The usable replies, in the order in which the clients were asked; who has none is missing."""
        for client in self.clients:
            if client not in self._usable and client not in self._named:
                self._fault(client, Refused(MISSING, "no reply that could be used"))
        return {client: self._usable[client] for client in self.clients if client in self._usable}


@dataclass(kw_only=True)
class OpenRound(Replies[T]):
    """One round of a training: `elect` who announces, `receive` what `read` accepts, `close`, `aggregate`.

    Args:
        number: the round.
        clients: who is asked for an update, in order.
        note: is told every fault.
        defense: that of the clients.
        parameters: tensors of the names, shapes and types that an update must have, such as ``task.parameters``.
        statistics: the batch-norm statistics that must come along, as they were before the round.
        all_statistics: False: a client may leave some out; those stay as they were.
        most_samples: examples that a client may claim to have used: its weight in the mean. None: another part of the
            reply says the weight, and what the bytes say of samples and local steps is not looked at.
        local: the local steps that were asked for.
        named_once: see `Replies`.

    Example:
        >>> from gradveil.defenses import create
        >>> from gradveil.update import Meta
        >>> faults, model = [], {"w": torch.zeros(2)}
        >>> server = OpenRound(0, [4, 5], faults.append, defense=create("none"), parameters=model, most_samples=8)
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
    most_samples: int | None = None
    local: LocalSteps | None = None
    announced: Announced | None = field(default=None, init=False)

    def elect(self, ask: Callable[[int], bytes | Announced | None]) -> None:
        """Take what the first client announces; if that has to be refused, what the next one does.

        Args:
            ask: has one client announce; raises `Refused` or `GradveilError` if it does not.
        """
        for client in self.clients if self.defense.announces else ():
            try:
                announced = ask(client)
                if isinstance(announced, bytes):
                    announced = wire.decode_locations(announced, like=self.parameters)
                self.defense.check_announced(announced, self.parameters)
            except NotFiniteError:
                continue  # it will say so again when it is asked for its update
            except (Refused, GradveilError) as error:
                self._fault(client, error)
                continue
            self.announced = announced
            return

    @property
    def locations(self) -> Announced | None:
        """The positions that both sides know all updates of this round to lie in."""
        return self.defense.locations(self.announced)

    def read(self, message: bytes) -> Update:
        """The update in a message; anything but one of this model in this round raises."""
        update = wire.decode(message, self.locations, like=self.parameters)
        meta = update.meta
        if meta.round != self.number:
            raise Refused(STALE, f"expected an update of round {self.number}, got one of round {meta.round}")
        if self.most_samples is not None:
            weight_of("samples", meta.samples, self.most_samples)
            if meta.local != self.local:
                raise InputError(f"expected local steps {self.local}, got {meta.local}")
        known = self.statistics
        check_statistics({n: v for n, v in known.items() if self.all_statistics or n in meta.buffers}, meta.buffers)
        meta.buffers = {**known, **meta.buffers}
        return update

    def aggregate(self, updates: Sequence[Update], weights: Sequence[float], memory: Memory | None = None) -> Update:
        """What the defense makes of the updates of this round.

        Args:
            updates: those that were accepted.
            weights: their weights in the mean.
            memory: what the server's side of the defense remembers.
        """
        return self.defense.aggregate(updates, weights=weights, memory=memory, announced=self.announced)


def weight_of(name: str, claimed: object, most: int) -> float:
    """A weight in the mean as a client claims it, if it may: a whole number from 1 to `most`."""
    weight = checks.number("reply", name, claimed, low=1, high=most)
    if not weight.is_integer():
        raise InputError(f"{name} must be a whole number, got {weight}")
    return weight


def check_statistics(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> None:
    """Refuse (`InputError`) what cannot be the statistics of a model that has the expected ones."""
    wanted, found = ({name: (tuple(v.shape), v.dtype) for name, v in some.items()} for some in (expected, got))
    if found != wanted:
        raise InputError(f"expected buffers {wanted}, got {found}; both sides must name the same statistics")
    for name, value in got.items():
        if not torch.isfinite(value).all() or (name.endswith("running_var") and (value < 0).any()):
            raise InputError(f"expected batch-norm statistics, got impossible values in {name!r}")
