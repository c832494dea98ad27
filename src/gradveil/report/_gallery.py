"""The figures of the page: the victims and what each attack recovers of them under each defense."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.audit.rows import MethodId, ResultRow
from gradveil.audit.store import BLIND_GUESS
from gradveil.modality import Drawn, Fragment
from gradveil.modality.written import from_file
from gradveil.report import _images as images
from gradveil.report._scores import primary_of, score
from gradveil.report.read import Audit, title

MAX_VICTIMS = 12  # shown in a figure; the tables count all of them
MAX_WRITTEN = 6  # of written examples, which take more room


@dataclass(frozen=True)
class Shot:
    """One picture or text with its caption and description; `leaked` is None if there is nothing to judge.

    A picture has a `uri`, a text the fragments of each of its `examples`; a shot that is missing has neither.
    """

    caption: str
    description: str
    leaked: bool | None = None
    uri: str | None = None
    examples: Sequence[Sequence[Fragment]] = ()

    @property
    def missing(self) -> bool:
        """Whether there is nothing to show."""
        return self.uri is None and not self.examples


@dataclass(frozen=True)
class Strip:
    """A row of a figure: its name, a note and one picture per victim."""

    name: str
    note: str
    shots: Sequence[Shot]
    leaked: bool | None = None
    adaptive: bool = False


def figures(audit: Audit) -> dict[str, list[Strip]]:
    """For each attack: originals and blind guess on top, then each defense, adaptive attackers below plain ones."""
    originals = [
        _shot(audit, images.original(audit, victim), "", f"original of victim {victim}")
        for victim in _shown_victims(audit)
    ]
    top = [Strip("original", "what the client has", originals)]
    if audit.blind:
        note = f"median {audit.primary.with_unit(score(audit, audit.blind).median)}"
        top.append(Strip(BLIND_GUESS, note, _shots(audit, BLIND_GUESS, audit.blind)))
    return {
        audit.short_name(method): [
            *top,
            *(_strip(audit, *pair) for pair in audit.expected if pair[1].spec == method.spec),
        ]
        for method in map(MethodId, audit.methods)
    }


def victim_names(audit: Audit) -> list[str]:
    """The classes of each victim that is shown."""
    names, labels = audit.config["classes"], audit.config["victim_labels"]
    return [
        ", ".join(names[label] if names else str(label) for label in labels[victim]) for victim in _shown_victims(audit)
    ]


def _shown_victims(audit: Audit) -> range:
    return range(min(audit.victims, MAX_VICTIMS))


def _strip(audit: Audit, defense: str, attack: MethodId) -> Strip:
    rows = audit.rows_of(defense, attack)
    name = "adaptive attacker" if attack.adaptive else title(defense)  # its row is below the plain attacker's
    shots = _shots(audit, f"{title(defense)}, {name}" if attack.adaptive else name, rows)
    if not rows:
        return Strip(name, "not attacked yet", shots, adaptive=attack.adaptive)
    result = score(audit, rows)
    note = f"median {audit.primary.with_unit(result.median)}, leaked {result.leaked} of {result.victims}"
    return Strip(name, note, shots, result.leaked > 0, attack.adaptive)


def _shots(audit: Audit, name: str, rows: Sequence[ResultRow]) -> list[Shot]:
    by_victim = {row.victim: row for row in rows}
    return [_attempt_shot(audit, name, by_victim.get(victim)) for victim in _shown_victims(audit)]


def _attempt_shot(audit: Audit, name: str, row: ResultRow | None) -> Shot:
    if row is None:
        return Shot("not run", f"{name}: not run yet")
    leaked = None if row.defense_spec is None else row.leaked  # a blind guess is not judged
    suffix = "" if leaked is None else f", leaked by {row.leak_rule}" if leaked else ", not leaked"
    values = [
        f"{metric.title} {metric.with_unit(value)}"
        for metric in sorted(audit.metrics, key=lambda metric: metric != audit.primary)
        if metric.column and metric.compares and (value := row.scores[metric.name]) is not None
    ]
    caption = audit.primary.with_unit(primary_of(audit, [row])[row.victim])
    description = f"{name}, victim {row.victim}: {', '.join(values)}{suffix}"
    return _shot(audit, images.reconstruction(audit, row), caption, description, leaked)


def _shot(audit: Audit, content: bytes | None, caption: str, description: str, leaked: bool | None = None) -> Shot:
    if content is None:
        return Shot(caption, f"{description} (no {audit.modality.unit})", leaked)
    if not isinstance(audit.modality, Drawn):
        return Shot(caption, description, leaked, examples=from_file(content))
    encoded = base64.b64encode(content).decode()
    return Shot(caption, description, leaked, uri=f"data:image/png;base64,{encoded}")


@dataclass(frozen=True)
class Page:
    """A written example in a figure: whose it is, the names of its columns, if it has any, and its row of each strip.

    `lines` has, for each strip, the strip, the shot of the victim and the fragments of the example; None: they are
    missing.
    """

    title: str
    columns: Sequence[str]
    lines: Sequence[tuple[Strip, Shot, Sequence[Fragment] | None]]


def pages(audit: Audit, strips: Sequence[Strip]) -> list[Page]:
    """The first written examples of a figure, each as the client has it beside what was recovered of it."""
    names, found = victim_names(audit), list[Page]()
    places = [(victim, example) for victim in _shown_victims(audit) for example in range(audit.examples)]
    for victim, example in places[:MAX_WRITTEN]:
        lines = [(strip, shot, _at(shot.examples, example)) for strip in strips for shot in [strip.shots[victim]]]
        original = lines[0][2] or ()
        number = f", {audit.modality.unit} {example + 1} of {audit.examples}" if audit.examples > 1 else ""
        columns = [fragment.column for fragment in original] if any(part.column for part in original) else []
        found.append(Page(f"Victim {victim + 1} ({names[victim]}){number}", columns, lines))
    return found


def _at(examples: Sequence[Sequence[Fragment]], place: int) -> Sequence[Fragment] | None:
    return examples[place] if place < len(examples) else None
