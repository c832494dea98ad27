"""What shows that a defense stops an attack: tests on the same victims with and without it, and adapted attackers."""

import math
from dataclasses import dataclass

from gradveil.audit.rows import MethodId, ResultRow
from gradveil.audit.statistics import sign_test
from gradveil.report._scores import closeness_of
from gradveil.report.read import Audit

ALPHA = 0.05
WORKING = 0.5
"""Share of the victims that an attack must recover without a defense before its failure under one says anything."""
LEAST_LEAKS = math.ceil(-math.log2(ALPHA))
"""Victims that must leak without a defense and not with it: five in a row by chance have a probability of 2^-5."""

RULE = (
    "A defense stops an attack if nothing leaks under it, to any attacker, and if all of this holds. Without a "
    "defense, the attack recovers at least half of the same victims. Under the defense it recovers significantly fewer "
    f"of them (McNemar's exact test, one-sided, p ≤ {ALPHA:g}) and comes significantly less close to them (sign test "
    f"on the paired differences, p ≤ {ALPHA:g}). And some such attack was tried in a form made for this defense: the "
    "generic adaptive attacker, which averages over simulated draws of any defense, is not; one who learned from draws "
    "of this very defense is. Otherwise protection is not shown."
)


@dataclass(frozen=True)
class Evidence:
    """What one attack, plain or adaptive, says about a defense on the victims that it met with and without it.

    Args:
        method: its spec.
        victims: victims attacked both with and without the defense.
        recovered: those of them that leaked without it.
        still_recovered: those that leaked under it, to any form of the attack.
        leak_p: how likely such a fall in the number of leaks is by chance (McNemar's exact test, one-sided).
        score_p: how likely such a fall in the primary metric is by chance (sign test, one-sided).
        adapted: whether a form of the attack that is made for this defense was tried.

    Example:
        >>> found = Evidence("idlg", 8, 8, 0, leak_p=0.004, score_p=0.004, adapted=True)
        >>> found.works, found.shown
        (True, True)
    """

    method: str
    victims: int
    recovered: int
    still_recovered: int
    leak_p: float
    score_p: float
    adapted: bool

    @property
    def works(self) -> bool:
        """Whether the attack works well enough without a defense for its failure to say something."""
        return self.recovered > 0 and self.recovered >= WORKING * self.victims

    @property
    def shown(self) -> bool:
        """Whether the fall is more than chance, for an attack that works."""
        return self.works and self.leak_p <= ALPHA and self.score_p <= ALPHA


def evidence(audit: Audit, defense: str) -> list[Evidence]:
    """The evidence of every attack that ran with and without `defense`."""
    found = (_evidence_of(audit, defense, method) for method in audit.methods)
    return [each for each in found if each.victims]


def _evidence_of(audit: Audit, defense: str, method: str) -> Evidence:
    plain, adaptive = MethodId(method), MethodId(method, adaptive=True)
    adaptive_rows = audit.rows_of(defense, adaptive)
    without, under = audit.without_defense(plain), audit.rows_of(defense, plain) + adaptive_rows
    victims = {row.victim for row in without} & {row.victim for row in under}
    leaking, still = (_leaking(rows) & victims for rows in (without, under))
    before = closeness_of(audit, without)
    # The attacker chooses the form that comes closest, so the comparison is with that one.
    forms = [closeness_of(audit, audit.rows_of(defense, form)) for form in (plain, adaptive)]
    falls = [
        before[victim] - max(form[victim] for form in forms if victim in form)
        for victim in victims & before.keys()
        if any(victim in form for form in forms)
    ]
    least = audit.primary.noticeable
    wins, losses = (sum(sign * fall > 0 and sign * fall >= least for fall in falls) for sign in (1, -1))
    return Evidence(
        method,
        len(victims),
        len(leaking),
        len(still),
        sign_test(len(leaking - still), len(still - leaking)),
        sign_test(wins, losses),
        bool(adaptive_rows) and (defense not in audit.generic or method in audit.simulating),
    )


def _leaking(rows: list[ResultRow]) -> set[int]:
    return {row.victim for row in rows if row.leaked}


def weakened(audit: Audit, defense: str) -> bool:
    """Whether significantly fewer of the same victims leak, to any attack, under `defense` than without it."""
    without = [row for method in audit.methods for row in audit.without_defense(MethodId(method))]
    under = [row for attack in audit.attacks for row in audit.rows_of(defense, attack)]
    victims = {row.victim for row in without} & {row.victim for row in under}
    leaking, still = (_leaking(rows) & victims for rows in (without, under))
    return sign_test(len(leaking - still), len(still - leaking)) <= ALPHA


def stopped(audit: Audit, defense: str) -> list[str]:
    """The methods that `defense` is shown to stop, provided that nothing leaks under it."""
    return [each.method for each in evidence(audit, defense) if each.shown]


def adapted(audit: Audit, defense: str) -> list[str]:
    """The methods that work undefended and met `defense` in a form made for it."""
    return [each.method for each in evidence(audit, defense) if each.works and each.adapted]


def lacking(audit: Audit, defense: str) -> list[str]:
    """What would show that `defense` protects, if nothing leaks under it; empty if that is shown."""
    found = evidence(audit, defense)
    working = [each for each in found if each.works]
    shown = [each for each in working if each.shown]
    wanted = []
    if not working:
        best = max(found, key=lambda each: each.recovered / each.victims, default=None)
        count = f"{best.recovered or 'none'} of {best.victims}" if best else "none"
        only = "only " if best and best.recovered else ""
        wanted.append(
            f"a stronger attack (`--budget thorough`): without a defense the best one recovers {only}{count}, and at "
            "least half are needed"
        )
    elif not shown:
        needed = min(math.ceil(LEAST_LEAKS * each.victims / each.recovered) for each in working)
        if needed > working[0].victims:
            wanted.append(f"more victims: at least {needed} (`--victims {needed}`)")
        else:
            wanted.append("a clearer difference between the victims with and without it, so a stronger attack")
    if not any(each.adapted for each in shown or working or found):
        wanted.append(_wanted_attacker(audit, defense))
    return wanted


def _wanted_attacker(audit: Audit, defense: str) -> str:
    if audit.config["adaptive"] is False:
        return "an attacker who knows the defense: only plain ones were tried (`--plain`)"
    if defense in audit.generic:
        return "an adaptive attacker written for this defense: only the generic adaptive attacker was tried"
    return "an attack that works here and has a form adapted to this defense"
