"""The picture of the page: the victims, and what each attack makes of them under each defense."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.audit.store import BLIND_GUESS
from gradveil.report.read import ADAPTIVE, Attempt, Audit, title
from gradveil.report.scores import score

MOST_VICTIMS = 12  # in the picture; the tables count all


@dataclass(frozen=True)
class Shot:
    """One small image of the picture with its words; `leaked` is None where there is nothing to judge."""

    uri: str | None
    caption: str
    description: str
    leaked: bool | None = None


@dataclass(frozen=True)
class Strip:
    """A row of the picture: its name, a remark, an image a victim."""

    name: str
    note: str
    shots: Sequence[Shot]
    leaked: bool | None = None
    adaptive: bool = False


@dataclass(frozen=True)
class Figure:
    """What one attack recovers."""

    attack: str
    strips: Sequence[Strip]


def figures(audit: Audit) -> list[Figure]:
    """One figure an attack, with the originals and the blind guess on top and the adaptive attacker below the plain."""
    originals = [_shot(audit.original(victim), "", f"original of victim {victim}") for victim in _shown(audit)]
    top = [Strip("original", "what the client has", originals)]
    if audit.blind:
        note = f"median {score(audit.blind).psnr:.1f} dB"
        top.append(Strip(BLIND_GUESS, note, _shots(audit, BLIND_GUESS, audit.blind)))
    return [
        Figure(
            audit.short(method),
            [*top, *(_strip(audit, *pair) for pair in audit.expected if audit.plain(pair[1]) == method)],
        )
        for method in audit.methods
    ]


def victim_names(audit: Audit) -> list[str]:
    """What each shown victim is."""
    names, labels = audit.config["classes"], audit.config["victim_labels"]
    return [", ".join(names[label] for label in labels[victim]) for victim in _shown(audit)]


def _shown(audit: Audit) -> range:
    return range(min(audit.victims, MOST_VICTIMS))


def _strip(audit: Audit, defense: str, attack: str) -> Strip:
    rows = audit.of(defense, attack)
    knows = attack.endswith(ADAPTIVE)
    name = "adaptive attacker" if knows else title(defense)  # it stands below the plain one
    shots = _shots(audit, f"{title(defense)}, {name}" if knows else name, rows)
    if not rows:
        return Strip(name, "not attacked yet", shots, adaptive=knows)
    result = score(rows)
    note = f"median {result.psnr:.1f} dB, leaked {result.leaked} of {result.victims}"
    return Strip(name, note, shots, result.leaked > 0, knows)


def _shots(audit: Audit, name: str, rows: Sequence[Attempt]) -> list[Shot]:
    found = {row.victim: row for row in rows}
    return [_attempt_shot(audit, name, found.get(victim)) for victim in _shown(audit)]


def _attempt_shot(audit: Audit, name: str, row: Attempt | None) -> Shot:
    if row is None:
        return Shot(None, "not run", f"{name}: not run yet")
    judged = None if row.defense is None else row.leaked
    words = {None: "", True: ", leaked", False: ", not leaked"}[judged]
    description = f"{name}, victim {row.victim}: PSNR {row.psnr:.1f} dB, SSIM {row.ssim:.2f}{words}"
    return _shot(audit.picture(row), f"{row.psnr:.1f} dB", description, judged)


def _shot(content: bytes | None, caption: str, description: str, leaked: bool | None = None) -> Shot:
    if content is None:
        return Shot(None, caption, f"{description} (no image)", leaked)
    encoded = base64.b64encode(content).decode()
    return Shot(f"data:image/png;base64,{encoded}", caption, description, leaked)
