"""The pictures of the page: the victims, and what each attack makes of them under each defense."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.audit.rows import MethodId, ResultRow
from gradveil.audit.store import BLIND_GUESS
from gradveil.report import _images as images
from gradveil.report._scores import primary_of, score
from gradveil.report.read import Audit, title

MOST_VICTIMS = 12  # in the picture; the tables count all


@dataclass(frozen=True)
class Shot:
    """One small picture with its words; `leaked` is None where there is nothing to judge."""

    uri: str | None
    caption: str
    description: str
    leaked: bool | None = None


@dataclass(frozen=True)
class Strip:
    """A row of pictures: its name, a remark, one picture per victim."""

    name: str
    note: str
    shots: Sequence[Shot]
    leaked: bool | None = None
    adaptive: bool = False


def figures(audit: Audit) -> dict[str, list[Strip]]:
    """By attack: the originals and the blind guess on top, the adaptive attacker below the plain one."""
    originals = [
        _shot(audit, images.original(audit, victim), "", f"original of victim {victim}") for victim in _shown(audit)
    ]
    top = [Strip("original", "what the client has", originals)]
    if audit.blind:
        note = f"median {audit.primary.words(score(audit, audit.blind).median)}"
        top.append(Strip(BLIND_GUESS, note, _shots(audit, BLIND_GUESS, audit.blind)))
    return {
        audit.short(method): [*top, *(_strip(audit, *pair) for pair in audit.expected if pair[1].spec == method.spec)]
        for method in map(MethodId, audit.methods)
    }


def victim_names(audit: Audit) -> list[str]:
    """What each shown victim is."""
    names, labels = audit.config["classes"], audit.config["victim_labels"]
    return [", ".join(names[label] if names else str(label) for label in labels[victim]) for victim in _shown(audit)]


def _shown(audit: Audit) -> range:
    return range(min(audit.victims, MOST_VICTIMS))


def _strip(audit: Audit, defense: str, attack: MethodId) -> Strip:
    rows = audit.of(defense, attack)
    name = "adaptive attacker" if attack.adaptive else title(defense)  # it stands below the plain one
    shots = _shots(audit, f"{title(defense)}, {name}" if attack.adaptive else name, rows)
    if not rows:
        return Strip(name, "not attacked yet", shots, adaptive=attack.adaptive)
    result = score(audit, rows)
    note = f"median {audit.primary.words(result.median)}, leaked {result.leaked} of {result.victims}"
    return Strip(name, note, shots, result.leaked > 0, attack.adaptive)


def _shots(audit: Audit, name: str, rows: Sequence[ResultRow]) -> list[Shot]:
    found = {row.victim: row for row in rows}
    return [_attempt_shot(audit, name, found.get(victim)) for victim in _shown(audit)]


def _attempt_shot(audit: Audit, name: str, row: ResultRow | None) -> Shot:
    if row is None:
        return Shot(None, "not run", f"{name}: not run yet")
    judged = None if row.defense_spec is None else row.leaked
    words = {None: "", True: ", leaked", False: ", not leaked"}[judged]
    shown = [
        f"{metric.title} {metric.words(value)}"
        for metric in sorted(audit.metrics, key=lambda metric: metric != audit.primary)
        if metric.column and metric.compares and (value := row.scores[metric.name]) is not None
    ]
    caption = audit.primary.words(primary_of(audit, [row])[row.victim])
    description = f"{name}, victim {row.victim}: {', '.join(shown)}{words}"
    return _shot(audit, images.found(audit, row), caption, description, judged)


def _shot(audit: Audit, content: bytes | None, caption: str, description: str, leaked: bool | None = None) -> Shot:
    if content is None:
        return Shot(None, caption, f"{description} (no {audit.modality.unit})", leaked)
    encoded = base64.b64encode(content).decode()
    return Shot(f"data:image/png;base64,{encoded}", caption, description, leaked)
