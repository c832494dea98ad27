"""What a client can do wrong in a round, by name."""

from dataclasses import dataclass

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
        round: the number of the round.
        client: the number of the client.
        kind: ``"missing"``: nothing usable arrived; ``"stranger"``: not asked in this round; ``"duplicate"``: sent a
            second update after one was accepted; ``"malformed"``: bytes, names, shapes, types or values that cannot be
            an update of this model; ``"stale"``: sent an update of another round; ``"not finite"``: the client itself
            found NaN or Inf in its gradients and sent nothing; ``"failed"``: the client reports another error (Flower).
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


class Refused(Exception):
    """Raised when a reply cannot be used for a reason of another kind than ``"malformed"``.

    Args:
        kind: see `Fault`.
        reason: what was expected and what was got.

    Example:
        >>> Refused("stale", "expected an update of round 3, got one of round 2").kind
        'stale'
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
