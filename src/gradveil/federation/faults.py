"""What a server accepts of the messages of a round, and the names of those it refuses.

Whatever arrives, the round goes on with the updates that are in order. A refused message changes nothing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil import wire
from gradveil.errors import DataError
from gradveil.update import LocalSteps, Update

Transport = Callable[[int, int, bytes], Iterable[bytes]]
"""What becomes of a message on its way: (round, client, message) to the messages that arrive from that client."""

MISSING = "missing"
STRANGER = "stranger"
DUPLICATE = "duplicate"
MALFORMED = "malformed"
STALE = "stale"
NOT_FINITE = "not finite"
FAILED = "failed"
KINDS = (MISSING, STRANGER, DUPLICATE, MALFORMED, STALE, NOT_FINITE, FAILED)


@dataclass(frozen=True)
class Fault:
    """One thing one client did wrong.

    Args:
        round: when.
        client: who.
        kind: ``"missing"``: nothing usable arrived; ``"stranger"``: not asked in this round; ``"duplicate"``: sent a
            second update after one was accepted; ``"malformed"``: bytes, names, shapes, types or values that cannot be
            an update of this model; ``"stale"``: of another round; ``"not finite"``: the client itself found NaN or Inf
            in its gradients and sent nothing; ``"failed"``: the client reports another error (Flower).
        reason: what was expected and what was got.

    Example:
        >>> print(Fault(3, 7, "stale", "expected an update of round 3, got one of round 2"))
        round 3, client 7: stale: expected an update of round 3, got one of round 2
    """

    round: int
    client: int
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"round {self.round}, client {self.client}: {self.kind}: {self.reason}"


class Inbox:
    """The server's letter box of one round: `receive` messages, then `close` it.

    Args:
        number: the round.
        clients: who was asked for an update.
        like: tensors of the names, shapes and types that an update must have, such as ``task.parameters``.
        buffers: the same for the batch-norm statistics that must come along.
        most_samples: images that a client may claim to have used: its weight in the mean.
        local: the local steps that were asked for.
        locations: positions that both sides know, see `wire.encode`.

    Example:
        >>> from gradveil.update import Meta
        >>> update = Update({"w": torch.ones(2)}, Meta(round=0, samples=1))
        >>> inbox = Inbox(0, [4, 5], {"w": torch.zeros(2)})
        >>> inbox.receive(4, wire.encode(update))
        True
        >>> inbox.receive(4, wire.encode(update))
        False
        >>> updates, faults = inbox.close()
        >>> list(updates), [(fault.client, fault.kind) for fault in faults]
        ([4], [(4, 'duplicate'), (5, 'missing')])
    """

    def __init__(
        self,
        number: int,
        clients: Collection[int],
        like: Mapping[str, Tensor],
        *,
        buffers: Mapping[str, Tensor] | None = None,
        most_samples: int = 2**31,
        local: LocalSteps | None = None,
        locations: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.number, self.clients, self.like = number, clients, like
        self.buffers, self.most_samples = buffers or {}, most_samples
        self.local, self.locations = local, locations
        self._updates: dict[int, Update] = {}
        self._faults: list[Fault] = []

    def receive(self, client: int, message: bytes) -> bool:
        """Whether the message was accepted; if not, the reason is among the faults."""
        if client not in self.clients:
            return self._refuse(client, STRANGER, "it was not asked for an update in this round")
        if client in self._updates:
            return self._refuse(client, DUPLICATE, "expected one update, got another one; the first counts")
        try:
            update = wire.decode(message, self.locations, like=self.like)
        except DataError as error:
            return self._refuse(client, MALFORMED, str(error))
        if update.meta.round != self.number:
            got = "one without a round" if update.meta.round is None else f"one of round {update.meta.round}"
            return self._refuse(client, STALE, f"expected an update of round {self.number}, got {got}")
        if reason := self._objection(update):
            return self._refuse(client, MALFORMED, reason)
        self._updates[client] = update
        return True

    def close(self) -> tuple[dict[int, Update], list[Fault]]:
        """The accepted updates in the order in which the clients were asked, and all faults of the round."""
        for client in self.clients:
            if client not in self._updates:
                self._refuse(client, MISSING, "expected an update, got none that could be used")
        return {client: self._updates[client] for client in self.clients if client in self._updates}, self._faults

    def _refuse(self, client: int, kind: str, reason: str) -> bool:
        self._faults.append(Fault(self.number, client, kind, reason))
        return False

    def _objection(self, update: Update) -> str | None:
        meta = update.meta
        if not 1 <= meta.samples <= self.most_samples:
            return f"expected 1 to {self.most_samples} samples, got {meta.samples}"
        if meta.local != self.local:
            return f"expected local steps {self.local}, got {meta.local}"
        return statistics_objection(self.buffers, meta.buffers)


def statistics_objection(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str | None:
    """Why these cannot be the statistics of a model that has the expected ones; None: they can."""
    wanted, found = ({name: (tuple(v.shape), v.dtype) for name, v in some.items()} for some in (expected, got))
    if found != wanted:
        return f"expected buffers {wanted}, got {found}"
    for name, value in got.items():
        if not torch.isfinite(value).all() or (name.endswith("running_var") and (value < 0).any()):
            return f"expected batch-norm statistics, got impossible values in {name!r}"
    return None
