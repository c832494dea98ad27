"""When not to trust an audit: checks in the manner of AutoAttack, each with a page that says why and what to do.

Every flag is a function of the rows on disk whose docstring is its page. Where a figure is null, it raises no flag that
needs it.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from gradveil.audit.rows import MethodId, ResultRow
from gradveil.audit.statistics import possible_share
from gradveil.metrics import METRICS, Metric
from gradveil.modality import IMAGE, Modality
from gradveil.report._scores import difference_to_plain, difference_to_undefended, gain, score, strongest
from gradveil.report._text import join, names, percent, plural
from gradveil.report.read import UNDEFENDED, Audit

FEW_VICTIMS = 8  # 0 of 7 still allows a true rate of one in three
# Shares of all the descent of a loss, from start to end. On MNIST and LeNet, Inverting Gradients made at most .0005 of
# it in the last tenth of 80 steps, iDLG cut off at 40 steps up to .0034. iDLG under noise still makes up to .008 after
# 150 steps, which is why only victims that were not recovered count. Restarts ended within .0006.
STILL_FALLING = 0.001
RESTARTS_APART = 0.01
ENOUGH = 0.25  # of the victims: fewer raise nothing
NOTHING = 1e-9  # of the gradient's power: rounding
CLOSE = 0.5  # of the blind guess's distance: what lies so much nearer was not guessed
STILL_LEARNING = 0.02  # accuracy gained from one fifth of a training to the next
NAMED = 4  # more than this are only counted in a sentence


@dataclass(frozen=True)
class Flag:
    """A reason not to trust an audit.

    Args:
        name: by which the page, the terminal and the documentation call it.
        title: what is wrong, in a few words.
        when: when it is raised.
        why: why that matters.
        remedy: what to do.
        check: yields a sentence for each thing in an audit that raises it (names between backticks).

    Example:
        >>> [flag.name for flag in FLAGS][:2]
        ['attack-fails-undefended', 'not-converged']
    """

    name: str
    title: str
    when: str
    why: str
    remedy: str
    check: Callable[[Audit], Iterator[str]]


FLAGS: list[Flag] = []
"""All flags; their texts name modality and metrics by the fields of `flags_for`."""


def _flag(name: str) -> Callable[[Callable[[Audit], Iterator[str]]], Callable[[Audit], Iterator[str]]]:
    """Decorator that makes a flag of a check: title, when, why and remedy are the paragraphs of its docstring."""

    def register(check: Callable[[Audit], Iterator[str]]) -> Callable[[Audit], Iterator[str]]:
        doc = inspect.getdoc(check) or f"{name}\n\n\n\n\n\n"  # `python -OO` has no docstrings
        title, *texts = (" ".join(part.split()) for part in doc.split("\n\n"))
        when, why, remedy = (re.sub(r"^(Raised when|Why it matters\.|What to do\.) ", "", text) for text in texts)
        FLAGS.append(Flag(name, title.removesuffix("."), when, why, remedy, check))
        return check

    return register


@dataclass(frozen=True)
class Raised:
    """A flag that an audit raises, and what raised it in one or two sentences (names between backticks).

    Example:
        >>> Raised(FLAGS[0], "`idlg` recovers nothing.").flag.name
        'attack-fails-undefended'
    """

    flag: Flag
    text: str


def raised(audit: Audit) -> list[Raised]:
    """All flags that the audit raises, in the order of the documentation, each at most once."""
    found = ((flag, list(flag.check(audit))) for flag in flags_for(audit.modality, audit.metrics))
    return [Raised(flag, " ".join(sentences)) for flag, sentences in found if sentences]


def flags_for(modality: Modality, metrics: Sequence[Metric]) -> list[Flag]:
    """The flags of audits with these metrics, as a reader is shown them."""
    primary = METRICS.get(modality.primary)
    others = [metric for metric in metrics if metric.second_opinion]
    words = {
        "primary": primary.title,
        "worse": primary.worse,
        "lower": "lower" if primary.better == "higher" else "higher",
        "least": primary.words(primary.noticeable),
        "guess": modality.guess,
        "others": join([metric.title for metric in others]),
        "opinions": " ".join(metric.second_opinion or "" for metric in others),
    }
    return [
        dataclasses.replace(flag, **{key: getattr(flag, key).format(**words) for key in ("title", "when", "why")})
        for flag in FLAGS
        if others or "{others}" not in flag.title
    ]


def documentation(modality: Modality = IMAGE) -> str:
    """The page docs/flags.md."""
    shown = flags_for(modality, METRICS.of(modality))
    parts = [
        "# Trust flags",
        "An audit that proves nothing looks just like one that proves a defense: nothing is recovered in either. These "
        "checks tell the two apart as far as the rows themselves can. A report shows the flags that are raised above "
        "its verdict; `gradveil audit` prints them and, with `--json`, lists them by name.",
        *(f"- [{flag.name}](#{flag.name}): {flag.title}" for flag in shown),
    ]
    for flag in shown:
        parts += [
            f"## {flag.name}",
            f"**{flag.title}.**",
            f"**Raised when** {flag.when}",
            f"**Why it matters.** {flag.why}",
            f"**What to do.** {flag.remedy}",
        ]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ").replace("name.\n- ", "name.\n\n- ") + "\n"


# -- the flags, in the order in which they are shown -------------------------------------------------------------------


@_flag("attack-fails-undefended")
def _fails_undefended(audit: Audit) -> Iterator[str]:
    """The attack does not recover undefended data.

    Raised when an attack recovers fewer than half of the victims without a defense, or there is no finished undefended
    run.

    Why it matters. A defense that stops an attack which does not work has stopped nothing. Attacks fail for many
    reasons that are no defense: too few iterations, a network with dead units, a large batch.

    What to do. Give the attack more iterations (`--budget standard`), restarts, or another optimiser; or audit a model
    and batch size on which it works. Until then read only the other attacks.
    """
    if not audit.attempts:
        return
    plain = map(MethodId, audit.methods)
    before = {method: score(audit, rows) for method in plain if (rows := audit.of(UNDEFENDED, method))}
    if not before:
        yield (
            "There is no finished undefended run to compare with, so nothing about the defenses follows: add "
            f"`--defense {UNDEFENDED}`."
        )
    elif not any(result.leaked for result in before.values()):
        yield (
            "No attack recovers undefended data here, so nothing about the defenses follows from this audit. "
            "Give the attacks more iterations, or a model and batch size on which they work."
        )
    else:
        for method, result in before.items():
            name = f"`{audit.short(method)}`"
            if not result.leaked:
                yield f"{name} recovers nothing even without a defense; its rows say nothing about the defenses."
            elif result.leaked < result.victims / 2:
                yield (
                    f"{name} is weak here: undefended it recovers only {result.leaked} of {result.victims}, so its "
                    "failures say little about the defenses."
                )


@_flag("not-converged")
def _not_converged(audit: Audit) -> Iterator[str]:
    """The matching loss was still falling.

    Raised when the strongest attack under a defense fails to recover at least a quarter of the victims while more than
    0.1 % of all the descent of its loss came in the last tenth of its steps. Where the step size decays (Adam), every
    loss flattens at the end and the flag sees less.

    Why it matters. The search was cut off, not finished. A defense may do no more than slow it down, and a fixed number
    of iterations then passes for protection.

    What to do. More iterations for this attack (`--attack NAME:iterations=...`), until the flag is gone or the
    reconstruction no longer changes.
    """
    falling = [pair for pair, rows in _decisive(audit) if _often(rows, _is_falling)]
    if falling:
        yield f"The loss was still falling when the iterations ran out: {_list(audit, falling)}."


def _is_falling(row: ResultRow) -> bool | None:
    if row.loss is None or row.loss_start is None or row.loss_late is None:
        return None
    return not row.leaked and row.loss_late - row.loss > STILL_FALLING * (row.loss_start - row.loss)


@_flag("restarts-disagree")
def _restarts_disagree(audit: Audit) -> Iterator[str]:
    """Restarts end at different losses.

    Raised when the strongest attack under a defense fails to recover at least a quarter of the victims while its
    typical restart stays above its best one by more than 1 % of all the descent. With `restarts=1` there is nothing to
    compare and the flag cannot be raised.

    Why it matters. Where the end depends on the start, the best of a few tries is a matter of luck, and an attacker
    with more time has more of it.

    What to do. More restarts (`--attack NAME:restarts=...`), until the best loss is found more than once.
    """
    apart = [pair for pair, rows in _decisive(audit) if _often(rows, _are_apart)]
    if apart:
        yield f"Restarts end at different losses, so more of them may find more: {_list(audit, apart)}."


def _are_apart(row: ResultRow) -> bool | None:
    if row.loss_start is None or row.loss_restarts is None or len(row.loss_restarts) < 2:
        return None
    best, *_ = ordered = sorted(row.loss_restarts)
    return not row.leaked and ordered[len(ordered) // 2] - best > RESTARTS_APART * (row.loss_start - best)


@_flag("stronger-does-worse")
def _stronger_does_worse(audit: Audit) -> Iterator[str]:
    """An attacker who knows more recovers less.

    Raised when an attacker adapted to the defense has a {lower} {primary} than the plain one, or the same attack a
    {lower} one without a defense than under it: by at least {least} in the median, and with a 95 % interval over the
    victims that excludes zero.

    Why it matters. Whoever knows more can always ignore it. If it does worse, the stronger attack is badly tuned, and
    so is what it says about the defense.

    What to do. Mend the adaptive attack, or give the undefended one more iterations. Until then the weaker attacker's
    rows are the better estimate of what leaks.
    """
    primary = audit.primary
    for defense, attack in audit.expected:
        found = difference_to_plain(audit, defense, attack)
        if found and (won := gain(audit, found)).high < 0 and won.estimate <= -primary.noticeable:
            yield (
                f"Against `{defense}`, `{audit.short(attack)}` is {primary.words(-won.estimate)} "
                f"{primary.worse} the attacker who does not know the defense "
                f"({primary.figure(-won.high)} to {primary.figure(-won.low)})."
            )
    for method in map(MethodId, audit.methods):
        better = [
            defense
            for defense in audit.real_defenses
            if (found := difference_to_undefended(audit, defense, method))
            and (won := gain(audit, found)).low > 0
            and won.estimate >= primary.noticeable
        ]
        if better:
            yield (
                f"`{audit.short(method)}` recovers more under {names(better, NAMED)} than undefended, which a sound "
                "attack should not: it had not converged or was lucky."
            )


@_flag("adaptive-below-blind")
def _below_blind(audit: Audit) -> Iterator[str]:
    """An attacker who knows the defense does worse than guessing.

    Raised when under a defense that no attack breaks, every adaptive attacker stays {worse} the blind guess in the
    median {primary}.

    Why it matters. Anybody can answer with {guess}. An adaptive attacker that does worse has not made use of what it
    could know, so what it fails to recover says little about what the defense protects.

    What to do. Give it a stronger prior or more restarts, or another attack; until then take the verdict for that of
    plain gradient matching.
    """
    if not audit.blind:
        return
    primary, guessed = audit.primary, score(audit, audit.blind).median
    below = {}
    for defense in audit.real_defenses:
        rows = {attack: found for attack in audit.attacks if (found := audit.of(defense, attack))}
        medians = [score(audit, found).median for attack, found in rows.items() if attack.adaptive]
        best = max(medians, key=primary.closeness, default=guessed)
        if primary.closeness(best) < primary.closeness(guessed) and not any(
            row.leaked for found in rows.values() for row in found
        ):
            below[defense] = best
    if below:
        best = max(below.values(), key=primary.closeness)
        yield (
            f"Under {names(list(below), NAMED)} the best adaptive attacker reaches {primary.words(best)} in the "
            f"median, the blind guess {primary.words(guessed)}."
        )


@_flag("defense-changed-nothing")
def _changed_nothing(audit: Audit) -> Iterator[str]:
    """The defense left the update as it was.

    Raised when what the server sees of the victims' updates is, up to rounding, what they would have shared without the
    defense.

    Why it matters. A defense that is switched off, or too weak for the model's scale, costs no accuracy and looks like
    the best one. Secure aggregation of a single client is the classic.

    What to do. Check the parameters against the size of the gradients; give secure aggregation clients to hide among
    (`--aggregated 4`).
    """
    for defense in audit.real_defenses:
        powers = [row.power for row in audit.attempts if row.defense_spec == defense and row.power is not None]
        if powers and max(powers) < NOTHING:
            yield f"`{defense}` left the updates as they were."


@_flag("metrics-disagree")
def _metrics_disagree(audit: Audit) -> Iterator[str]:
    """{primary} and {others} disagree about the verdict.

    Raised when for at least a quarter of the victims of an attack under a defense, a reconstruction counts as leaked
    but lies farther from the original than the blind guess by {others}, or it does not count as leaked but lies less
    than half as far from the original as the blind guess.

    Why it matters. {opinions} Where they disagree, which defense wins depends on the metric that was chosen.

    What to do. Look at the pictures. Report both metrics and say which one the claim rests on.
    """
    for metric in audit.metrics:
        if metric.second_opinion and (pairs := list(_contradicted(audit, metric))):
            yield (
                f"By {audit.primary.title} and by {metric.title} the verdict is not the same: {_list(audit, pairs)}."
            )


def _contradicted(audit: Audit, metric: Metric) -> Iterator[tuple[str, MethodId]]:
    """The pairs whose verdict a distance contradicts."""
    guesses = {row.victim: row.scores[metric.name] for row in audit.blind}

    def contradicts(row: ResultRow) -> bool | None:
        guess, distance = guesses.get(row.victim), row.scores[metric.name]
        if distance is None or guess is None:
            return None
        return distance > guess if row.leaked else distance < CLOSE * guess

    return (pair for pair, rows in _pairs(audit) if _often(rows, contradicts))


@_flag("few-victims")
def _too_few_victims(audit: Audit) -> Iterator[str]:
    """Too few victims for what is claimed.

    Raised when an attack has fewer than 8 finished victims.

    Why it matters. None of 7 recovered still allows that one victim in three is. Below 6 victims there is no 95 %
    interval for a median at all, and so no ranking.

    What to do. More victims (`--victims 16`); they are attacked together and cost less than one at a time.
    """
    fewest = min((len(rows) for _, rows in _pairs(audit)), default=FEW_VICTIMS)
    if fewest < FEW_VICTIMS:
        yield (
            f"Only {plural(fewest, 'victim')} per attack: the counts are anecdotal. None of {fewest} recovered still "
            f"allows that {percent(possible_share(0, fewest))} are (at 95 %). From {FEW_VICTIMS} victims on "
            "(`--victims`) they begin to mean something."
        )


@_flag("training-too-short")
def _training_too_short(audit: Audit) -> Iterator[str]:
    """The trainings are too short to compare.

    Raised when the undefended model is near chance, or a model was more than 2 points of accuracy better in the last
    fifth of its rounds than in the fifth before, on average.

    Why it matters. Before the end of learning a defense that delays looks like one that costs, and one that costs only
    in the end looks free. PMM then measures speed, not what the defense costs.

    What to do. More rounds (`--rounds`), or a higher learning rate (`--lr`), until the curves are flat.
    """
    unknown = [row for row in audit.utility.values() if row.pmm is None]
    if unknown:
        baseline = next((row.baseline_accuracy for row in unknown if row.baseline_accuracy is not None), None)
        reached = f" ({percent(baseline)} accuracy)" if baseline is not None else ""
        yield (
            f"The undefended model is near chance{reached}, so the share of accuracy that a defense keeps "
            "(PMM) is not given: train longer (`--rounds`)."
        )
    gains = {row.defense_spec: _late_gain(row.history) for row in audit.utility.values()}
    learning = [defense for defense, gain in gains.items() if gain > STILL_LEARNING]
    if learning:
        most = max(gains[defense] for defense in learning)
        yield (
            f"The models under {names(learning, NAMED)} were still learning: up to {100 * most:.1f} points of accuracy "
            "from the last but one fifth of the rounds to the last."
        )


def _late_gain(history: Sequence[float]) -> float:
    """From the last but one fifth of the evaluations, which are evenly spaced, to the last; 0 if there are too few.

    Means, because a single accuracy on a thousand examples is uncertain by almost a point.
    """
    fifth = len(history) // 5
    return fmean(history[-fifth:]) - fmean(history[-2 * fifth : -fifth]) if fifth else 0.0


# -- shared ----------------------------------------------------------------------------------------------------------


def _pairs(audit: Audit) -> list[tuple[tuple[str, MethodId], list[ResultRow]]]:
    """(defense, attack) and their rows, where there are any."""
    return [(pair, rows) for pair in audit.expected if (rows := audit.of(*pair))]


def _decisive(audit: Audit) -> list[tuple[tuple[str, MethodId], list[ResultRow]]]:
    """The pairs on which a verdict rests: each defense with its strongest attack."""
    best = {(defense, found[0]) for defense in audit.defenses if (found := strongest(audit, defense))}
    return [(pair, rows) for pair, rows in _pairs(audit) if pair in best]


def _often(rows: Sequence[ResultRow], check: Callable[[ResultRow], bool | None]) -> bool:
    """Whether the check holds for enough of the rows that it can judge."""
    judged = [found for row in rows if (found := check(row)) is not None]
    return bool(judged) and sum(judged) >= ENOUGH * len(judged)


def _list(audit: Audit, pairs: Sequence[tuple[str, MethodId]]) -> str:
    """Pairs of attack and defense in a sentence, those of one attack together."""
    by_attack: dict[MethodId, list[str]] = {}
    for defense, attack in pairs:
        by_attack.setdefault(attack, []).append(defense)
    clauses = []
    for attack, defenses in by_attack.items():
        where = names([defense for defense in defenses if defense != UNDEFENDED], NAMED)
        clauses.append(
            f"`{audit.short(attack)}` "
            + " and ".join(filter(None, ["undefended" * (UNDEFENDED in defenses), where and f"under {where}"]))
        )
    return join(clauses)
