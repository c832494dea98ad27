"""Attacks on trained networks: what a victim costs, in seconds of one core that was shared with other work."""

from kinds import Row


def derive(row: Row) -> Row:
    """The seconds of one victim."""
    return {"seconds_each": row["seconds"] / row["victims"]}
