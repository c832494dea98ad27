"""The figures of an audit for other programs: a JSON object, CSV and LaTeX tables, and the gate for scripts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.core import checks
from gradveil.core.folders import replace_file
from gradveil.metrics.identification import proportion
from gradveil.report._evidence import evidence, lacking
from gradveil.report._scores import score
from gradveil.report._tables import (
    Table,
    attack_table,
    column_table,
    evidence_table,
    identification_table,
    utility_table,
)
from gradveil.report._text import join
from gradveil.report.judgement import Outcome, identification_outcome, judge, label_leak, label_outcome, outcome
from gradveil.report.read import UNDEFENDED, Audit

TABLES: Mapping[str, Callable[[Audit], Table]] = {
    "attacks": attack_table,
    "columns": column_table,
    "evidence": evidence_table,
    "identification": identification_table,
    "cost": utility_table,
}
"""The tables that are written as CSV and LaTeX, by the name of their files."""


def write_tables(audit: Audit) -> list[Path]:
    """Write every table that has rows as ``NAME.csv`` and ``NAME.tex`` into the audit's folder."""
    written = []
    for name, build in TABLES.items():
        table = build(audit)
        if table.rows:
            for ending, text in (("csv", table.csv()), ("tex", table.latex())):
                written.append(replace_file(audit.folder / f"{name}.{ending}", [text.encode()]))
    return written


def figures(audit: Audit) -> dict[str, Any]:
    """Everything that the verdict says, as figures: for the audit, and for each defense, `none` first."""
    verdict = judge(audit)
    return {
        "folder": str(audit.folder),
        "complete": complete(audit),
        "flags": [found.flag.name for found in verdict.flags],
        "verdict": verdict.lines(),
        "defenses": {defense: _of_defense(audit, defense) for defense in audit.defenses},
    }


def complete(audit: Audit) -> bool:
    """Whether nothing that the audit is to run is missing."""
    return not (audit.missing_attempts() or audit.missing_identifications() or audit.missing_utility() or audit.torn)


def _of_defense(audit: Audit, defense: str) -> dict[str, Any]:
    undefended, utility = defense == UNDEFENDED, audit.utility.get(defense)
    attacks = {attack: rows for attack in audit.attacks if (rows := audit.rows_of(defense, attack))}
    results = {attack: score(audit, rows) for attack, rows in attacks.items()}
    strongest = max(results, key=lambda attack: results[attack].leaked / results[attack].victims, default=None)
    leaked = None
    if strongest is not None:
        found = results[strongest]
        share = proportion(found.leaked, found.victims)
        leaked = {
            "attack": strongest.title,
            "victims": found.victims,
            "leaked": found.leaked,
            "share": share.value,
            "low": share.low,
            "high": share.high,
            "rules": dict(found.rules),
        }
    named, labels = audit.most_identified(defense), label_leak(audit, defense)
    return {
        "outcome": None if undefended else outcome(audit, defense).value,
        "would_show": [] if undefended or outcome(audit, defense) is not Outcome.NOT_SHOWN else lacking(audit, defense),
        "leaked": leaked,
        "evidence": []
        if undefended
        else [{**vars(each), "works": each.works, "shown": each.shown} for each in evidence(audit, defense)],
        "identification": named
        and {
            "outcome": None if undefended else identification_outcome(audit, defense).value,
            "named": named.share,
            "low": named.named_low,
            "high": named.named_high,
            "chance": named.chance,
        },
        "labels": labels
        and {
            "outcome": None if undefended else label_outcome(audit, defense).value,
            **vars(labels),
            "share": labels.share,
        },
        "accuracy": utility and utility.accuracy,
        "pmm": utility and utility.pmm,
        "upload_bytes": utility and utility.upload_bytes,
        "download_bytes": utility and utility.download_bytes,
    }


# -- the gate ----------------------------------------------------------------------------------------------------------

LEAKS = 3
NOT_SHOWN = 4

_OUTCOMES: Mapping[str, Callable[[Audit, str], Outcome]] = {
    "leaked": outcome,
    "identified": identification_outcome,
    "labels": label_outcome,
}
CONDITIONS = tuple(_OUTCOMES)
"""What a gate can be about."""

_WORDS = {
    "leaked": "data is recovered under {}",
    "identified": "the client's example is named under {}",
    "labels": "labels are read off under {}",
}


@dataclass(frozen=True)
class Refusal:
    """Why an audit does not pass a gate.

    Args:
        code: the exit code: `LEAKS` if something leaks, `NOT_SHOWN` if nothing does but that is not shown.
        reason: one line for people.

    Example:
        >>> Refusal(LEAKS, "data is recovered under top-k").code
        3
    """

    code: int
    reason: str


def refusal(audit: Audit, conditions: Iterable[str]) -> Refusal | None:
    """Why an audit does not pass a gate with these conditions; None if it passes.

    Any leak under any defense counts, however small. What nobody has tried does not pass as safe: an audit that is not
    complete, that has no defense, or whose verdict is "not shown" or "unknown" is refused too, with a code of its own.
    Labels are never shown to be hidden, see `label_outcome`: they pass if no more of them are right than by chance,
    and significantly fewer than without a defense.

    Args:
        audit: the audit.
        conditions: of `CONDITIONS`; with none of them every audit passes.
    """
    asked = list(dict.fromkeys(conditions))
    for condition in asked:
        checks.choice("report", "fail-if", condition, CONDITIONS)
    if not asked:
        return None
    leaks, doubts = [], []
    if not complete(audit):
        doubts.append("the audit is not complete")
    if not audit.real_defenses:
        doubts.append("no defense was audited")
    for condition in asked:
        outcomes = {defense: _OUTCOMES[condition](audit, defense) for defense in audit.real_defenses}
        if leaking := [defense for defense, found in outcomes.items() if found in (Outcome.WEAKENS, Outcome.FAILS)]:
            leaks.append(_WORDS[condition].format(join(leaking)))
        doubtful = [
            defense
            for defense, found in outcomes.items()
            if found is Outcome.UNKNOWN or (found is Outcome.NOT_SHOWN and not _fewer_labels(audit, condition, defense))
        ]
        if doubtful:
            doubts.append(f"{condition}: protection is not shown for {join(doubtful)}")
    if not leaks and not doubts:
        return None
    return Refusal(LEAKS if leaks else NOT_SHOWN, "; ".join([*leaks, *doubts]))


def _fewer_labels(audit: Audit, condition: str, defense: str) -> bool:
    found, undefended = label_leak(audit, defense), label_leak(audit, UNDEFENDED)
    if condition != "labels" or found is None or undefended is None:
        return False
    return undefended.leaks and found.high < undefended.low
