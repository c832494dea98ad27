"""The pieces that an audit falls into: each can be performed by any process, in any order, with the same rows."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradveil.attacks import create as create_attack
from gradveil.audit.rows import IdentificationRow, MatchRow, ResultRow, Row, UtilityRow, with_lists, with_tuples
from gradveil.defenses import create as create_defense

KINDS = ("match", "attack", "games", "training")


@dataclass(frozen=True)
class Piece:
    """One piece of an audit. It names everything by its spec, so that it can be sent to another process.

    Args:
        kind: one of `KINDS`.
        defense: the defense as it was asked for.
        attack: the attack; None unless the piece is an attack.
        adaptive: whether the attacker knows the defense.
        first: the first victim of the chunk that is attacked.
        stop: the victim after its last.
        missing: the victims of the chunk whose rows are wanted.

    Example:
        >>> import json
        >>> piece = Piece("attack", "top-k:keep=0.1", "idlg:iterations=8", adaptive=True, stop=2, missing=(0, 1))
        >>> piece.what
        'idlg against top-k, adaptive'
        >>> Piece.from_json(json.loads(json.dumps(piece.to_json()))) == piece
        True
    """

    kind: str
    defense: str
    attack: str | None = None
    adaptive: bool = False
    first: int = 0
    stop: int = 0
    missing: tuple[int, ...] = ()

    @property
    def what(self) -> str:
        """The piece in words."""
        name = create_defense(self.defense).name
        words = {
            "match": f"matching {name}",
            "attack": f"{(self.attack or '').partition(':')[0]} against {name}",
            "games": f"identification under {name}",
            "training": f"training under {name}",
        }[self.kind]
        return f"{words}, adaptive" if self.adaptive else words

    @property
    def learns(self) -> tuple[str, str | None] | None:
        """What its attack has to learn first, the same for all pieces with an equal value; None: nothing.

        A plain attacker knows no defense, so what it learns serves against all of them.
        """
        if self.attack is None or not create_attack(self.attack).takes_public:
            return None
        return self.attack, self.defense if self.adaptive else None

    @property
    def attacking_share(self) -> float:
        """Roughly, the share of its time that does not go into learning.

        >>> [Piece("attack", "none", attack, stop=8).attacking_share for attack in ("idlg", "auto")]
        [1.0, 0.4]
        """
        if self.attack is None or self.learns is None:
            return 1.0
        if self.budgeted is not None:
            return self.budgeted[1] / sum(self.budgeted)
        victims = self.stop - self.first
        return victims / (victims + create_attack(self.attack).learning_victims)

    @property
    def budgeted(self) -> tuple[float, float] | None:
        """The nominal seconds of learning and attacking, if its attack budgets them."""
        return None if self.attack is None else create_attack(self.attack).budgeted(self.stop - self.first)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON holds them."""
        return with_lists(vars(self))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Piece":
        """The piece that `to_json` wrote."""
        return cls(**with_tuples(fields))


@dataclass(frozen=True)
class Finished:
    """What a piece leaves: rows, and the pictures that they name.

    Args:
        rows: the rows.
        pictures: files that show examples, by path in the folder; they must be there before the rows are.

    Example:
        >>> import json
        >>> found = Finished([], {"images/a.png": b"..."})
        >>> Finished.from_json(json.loads(json.dumps(found.to_json()))) == found
        True
    """

    rows: Sequence[Row]
    pictures: Mapping[str, bytes] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON holds it."""
        return {
            "rows": [[type(row).__name__, row.to_json()] for row in self.rows],
            "pictures": {path: base64.b64encode(content).decode() for path, content in self.pictures.items()},
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Finished":
        """What `to_json` wrote."""
        return cls(
            [_ROWS[name].from_json(values) for name, values in fields["rows"]],
            {path: base64.b64decode(text) for path, text in fields["pictures"].items()},
        )


_ROWS: Mapping[str, type[Row]] = {kind.__name__: kind for kind in (ResultRow, IdentificationRow, UtilityRow, MatchRow)}
