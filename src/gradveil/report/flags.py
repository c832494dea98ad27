"""Trust flags: checks, in the manner of AutoAttack, that tell when an audit should not be relied on.

Each flag is a function of an audit; its docstring is its page in the documentation. A figure that is null never raises
a flag.
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
from gradveil.report._scores import (
    as_closeness,
    difference_to_blind,
    difference_to_plain,
    difference_to_undefended,
    score,
    strongest,
)
from gradveil.report._text import join, names, percent, plural
from gradveil.report.read import UNDEFENDED, Audit

FEW_GAMES = 50  # a share near one half is then known to within 14 points
FEW_VICTIMS = 8  # 0 of 7 still allows a true rate of one in three
# The next two are shares of the total decrease of a loss. On MNIST and LeNet, at most .0005 of the decrease came in the
# last tenth of 80 steps of Inverting Gradients, but up to .0034 in that of iDLG cut off at 40 steps. iDLG under noise
# still reaches .008 after 150 steps, so only victims that were not recovered count. Restarts ended within .0006.
STILL_FALLING = 0.001
RESTARTS_APART = 0.01
MIN_SHARE = 0.25  # share of the victims that must show a problem to raise a flag
ROUNDING = 1e-9  # changes below this share of the gradient's power are rounding errors
CLOSE = 0.5  # share of the blind guess's distance below which a reconstruction is better than guessing
STILL_LEARNING = 0.02  # accuracy gained from one fifth of a training run to the next
MAX_NAMED = 4  # a sentence gives only the number of defenses if there are more


@dataclass(frozen=True)
class Flag:
    """A reason not to trust an audit.

    Args:
        name: the name used on the page, in the terminal and in the documentation.
        title: what is wrong, in a few words.
        when: when it is raised.
        why: why that matters.
        remedy: what to do.
        check: yields a sentence for each reason to raise the flag (names between backticks).

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
"""All flags. Their texts have placeholders such as `{primary}`, which `flags_for` fills in."""


def _flag(name: str) -> Callable[[Callable[[Audit], Iterator[str]]], Callable[[Audit], Iterator[str]]]:
    """Register a check as a flag whose title, when, why and remedy are the paragraphs of its docstring."""

    def register(check: Callable[[Audit], Iterator[str]]) -> Callable[[Audit], Iterator[str]]:
        doc = inspect.getdoc(check) or f"{name}\n\n\n\n\n\n"  # `python -OO` removes docstrings
        title, *texts = (" ".join(part.split()) for part in doc.split("\n\n"))
        when, why, remedy = (re.sub(r"^(Raised when|Why it matters\.|What to do\.) ", "", text) for text in texts)
        FLAGS.append(Flag(name, title.removesuffix("."), when, why, remedy, check))
        return check

    return register


@dataclass(frozen=True)
class Raised:
    """A flag that an audit raises, and the reasons in one or two sentences (names between backticks).

    Example:
        >>> Raised(FLAGS[0], "`idlg` recovers nothing.").flag.name
        'attack-fails-undefended'
    """

    flag: Flag
    text: str


def raised(audit: Audit) -> list[Raised]:
    """All flags that the audit raises, in the order of the documentation, each at most once."""
    checked = ((flag, list(flag.check(audit))) for flag in flags_for(audit.modality, audit.metrics))
    return [Raised(flag, " ".join(sentences)) for flag, sentences in checked if sentences]


def flags_for(modality: Modality, metrics: Sequence[Metric]) -> list[Flag]:
    """The flags that apply to audits with these metrics, with the placeholders in their texts filled in."""
    primary = METRICS.get(modality.primary)
    others = [metric for metric in metrics if metric.second_opinion]
    words = {
        "primary": primary.title,
        "worse": primary.worse,
        "lower": "lower" if primary.better == "higher" else "higher",
        "least": primary.with_unit(primary.noticeable),
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
        "An audit that proves nothing looks just like one that proves that a defense works: neither recovers anything. "
        "These checks tell the two apart as far as the rows allow. A report shows the raised flags above its verdict; "
        "`gradveil audit` prints them and, with `--json`, lists them by name.",
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

    Raised when an attack recovers fewer than half of the victims without a defense, or when there is no finished
    undefended run.

    Why it matters. Stopping an attack that does not work proves nothing about a defense. Attacks fail for many other
    reasons: too few iterations, a network with dead units, a large batch.

    What to do. Give the attack more iterations (`--budget standard`), more restarts or another optimiser, or audit a
    model and batch size on which it works. Until then, rely only on the other attacks.
    """
    if not audit.attempts:
        return
    plain = map(MethodId, audit.methods)
    undefended = {method: score(audit, rows) for method in plain if (rows := audit.rows_of(UNDEFENDED, method))}
    if not undefended:
        yield (
            "There is no finished undefended run to compare with, so this audit says nothing about the defenses: add "
            f"`--defense {UNDEFENDED}`."
        )
    elif not any(result.leaked for result in undefended.values()):
        yield (
            "No attack recovers undefended data here, so this audit says nothing about the defenses. "
            "Give the attacks more iterations, or a model and batch size on which they work."
        )
    else:
        for method, result in undefended.items():
            name = f"`{audit.short_name(method)}`"
            if not result.leaked:
                yield f"{name} recovers nothing even without a defense; its rows say nothing about the defenses."
            elif result.leaked < result.victims / 2:
                yield (
                    f"{name} is weak here: without a defense it recovers only {result.leaked} of {result.victims}, so "
                    "its failures say little about the defenses."
                )


@_flag("not-converged")
def _not_converged(audit: Audit) -> Iterator[str]:
    """The matching loss was still falling.

    Raised when the strongest attack under a defense fails on at least a quarter of the victims while its loss on them
    is still falling: more than 0.1 % of the total decrease came in the last tenth of the steps. If the step size decays
    (Adam), every loss flattens at the end and the flag is less sensitive.

    Why it matters. The search was cut off before it finished. The defense may only slow it down, and a fixed number of
    iterations is then mistaken for protection.

    What to do. Give this attack more iterations (`--attack NAME:iterations=...`) until the flag is gone or the
    reconstruction no longer changes.
    """
    falling = [pair for pair, rows in _decisive(audit) if _holds_often(rows, _still_falling)]
    if falling:
        yield f"The loss was still falling when the iterations ran out: {_join_pairs(audit, falling)}."


def _still_falling(row: ResultRow) -> bool | None:
    if row.loss is None or row.loss_start is None or row.loss_late is None:
        return None
    return not row.leaked and row.loss_late - row.loss > STILL_FALLING * (row.loss_start - row.loss)


@_flag("restarts-disagree")
def _restarts_disagree(audit: Audit) -> Iterator[str]:
    """Restarts end at different losses.

    Raised when the strongest attack under a defense fails on at least a quarter of the victims while its restarts on
    them disagree: the loss of the median restart exceeds that of the best one by more than 1 % of the total decrease.
    With `restarts=1` there is nothing to compare and the flag cannot be raised.

    Why it matters. If the result depends on the starting point, the best of a few tries is a matter of luck, and an
    attacker with more time gets more tries.

    What to do. Give this attack more restarts (`--attack NAME:restarts=...`) until the best loss is found more than
    once.
    """
    apart = [pair for pair, rows in _decisive(audit) if _holds_often(rows, _restarts_apart)]
    if apart:
        yield f"Restarts end at different losses, so more of them may find more: {_join_pairs(audit, apart)}."


def _restarts_apart(row: ResultRow) -> bool | None:
    if row.loss_start is None or row.loss_restarts is None or len(row.loss_restarts) < 2:
        return None
    best, *_ = ordered = sorted(row.loss_restarts)
    return not row.leaked and ordered[len(ordered) // 2] - best > RESTARTS_APART * (row.loss_start - best)


@_flag("stronger-does-worse")
def _stronger_does_worse(audit: Audit) -> Iterator[str]:
    """An attacker who knows more recovers less.

    Raised when an attacker adapted to the defense reaches a {lower} {primary} than the plain one, or when an attack
    reaches a {lower} {primary} without a defense than under it. The median difference must be at least {least}, with a
    95 % interval over the victims that excludes zero.

    Why it matters. An attacker who knows more can always ignore that knowledge. If it does worse, the stronger attack
    is badly tuned, and what it says about the defense is unreliable.

    What to do. Improve the adaptive attack, or give the undefended one more iterations. Until then, the weaker
    attacker's rows are the better estimate of what leaks.
    """
    primary = audit.primary
    for defense, attack in audit.expected:
        difference = difference_to_plain(audit, defense, attack)
        if difference and (gain := as_closeness(audit, difference)).high < 0 and gain.estimate <= -primary.noticeable:
            yield (
                f"Against `{defense}`, `{audit.short_name(attack)}` is {primary.with_unit(-gain.estimate)} "
                f"{primary.worse} the attacker who does not know the defense "
                f"({primary.without_unit(-gain.high)} to {primary.without_unit(-gain.low)})."
            )
    for method in map(MethodId, audit.methods):
        better = [
            defense
            for defense in audit.real_defenses
            if (difference := difference_to_undefended(audit, defense, method))
            and (gain := as_closeness(audit, difference)).low > 0
            and gain.estimate >= primary.noticeable
        ]
        if better:
            yield (
                f"`{audit.short_name(method)}` recovers more under {names(better, MAX_NAMED)} than without a defense. "
                "A sound attack should not: it had not converged or was lucky."
            )


@_flag("adaptive-below-blind")
def _below_blind(audit: Audit) -> Iterator[str]:
    """An attacker who knows the defense does worse than guessing.

    Raised when no attack breaks a defense and the median {primary} of every adaptive attacker under it is {worse} that
    of the blind guess.

    Why it matters. Anyone can guess {guess}. An adaptive attacker that does worse has not used what it could know, so
    its failure says little about how well the defense protects.

    What to do. Give it a stronger prior or more restarts, or try another attack. Until then, read the verdict as one
    about plain gradient matching.
    """
    if not audit.blind:
        return
    primary, guess = audit.primary, score(audit, audit.blind).median
    below = {}
    for defense in audit.real_defenses:
        by_attack = {attack: rows for attack in audit.attacks if (rows := audit.rows_of(defense, attack))}
        medians = [score(audit, rows).median for attack, rows in by_attack.items() if attack.adaptive]
        best = max(medians, key=primary.closeness, default=guess)
        if primary.closeness(best) < primary.closeness(guess) and not any(
            row.leaked for rows in by_attack.values() for row in rows
        ):
            below[defense] = best
    if below:
        best = max(below.values(), key=primary.closeness)
        yield (
            f"Under {names(list(below), MAX_NAMED)}, the best adaptive attacker reaches a median of "
            f"{primary.with_unit(best)}, the blind guess {primary.with_unit(guess)}."
        )


@_flag("learned-nothing")
def _learned_nothing(audit: Audit) -> Iterator[str]:
    """An attacker who learns does no better than guessing without a defense.

    Raised when an attack that learned from public examples is not shown to come closer to undefended victims than the
    blind guess: the 95 % interval of the median paired difference in {primary} does not exclude zero.

    Why it matters. What it learned is worth no more than {guess}. Its failure under a defense then says nothing about
    the defense.

    What to do. Grant it more public examples (`--public`) or more epochs, or use other public data.
    """
    for method in map(MethodId, audit.learned):
        difference = difference_to_blind(audit, UNDEFENDED, method)
        if difference and as_closeness(audit, difference).low <= 0:
            yield (
                f"Without a defense `{audit.short_name(method)}` is not shown to do better than the blind guess, so "
                "its rows say nothing about the defenses."
            )


@_flag("victims-are-public")
def _victims_are_public(audit: Audit) -> Iterator[str]:
    """Victims are among the public data.

    Raised when an attack learns from public examples and some of them are victims, to the bit.

    Why it matters. The attacker has seen what it is to find, so the figures say more about its memory than about what
    updates leak.

    What to do. Remove duplicates from the data, so that no test example is also a training example.
    """
    overlap = audit.config["public_overlap"]
    if audit.learned and overlap:
        yield (
            f"{overlap:,} of the {plural(audit.victims * audit.examples, f'victim {audit.modality.unit}')} "
            f"{'is' if overlap == 1 else 'are'} also among the {audit.config['public_examples']:,} public ones from "
            f"which {names([audit.short_name(MethodId(spec)) for spec in audit.learned])} learned."
        )


@_flag("defense-changed-nothing")
def _changed_nothing(audit: Audit) -> Iterator[str]:
    """The defense left the update unchanged.

    Raised when what the server sees of the victims' updates is, up to rounding, what they would have shared without the
    defense.

    Why it matters. A defense that is switched off, or too weak for the model's scale, costs no accuracy and therefore
    looks like the best one. Secure aggregation of a single client is the classic example.

    What to do. Compare the parameters with the size of the gradients. Give secure aggregation other clients to hide
    among (`--aggregated 4`).
    """
    for defense in audit.real_defenses:
        powers = [row.power for row in audit.attempts if row.defense_spec == defense and row.power is not None]
        if powers and max(powers) < ROUNDING:
            yield f"`{defense}` left the updates unchanged."


@_flag("metrics-disagree")
def _metrics_disagree(audit: Audit) -> Iterator[str]:
    """{primary} and {others} disagree about the verdict.

    Raised when the verdict conflicts with {others} for at least a quarter of the victims of an attack under a defense:
    a reconstruction counts as leaked but lies farther from the original than the blind guess, or it does not count as
    leaked but lies less than half as far from the original as the blind guess.

    Why it matters. {opinions} If they disagree, which defense wins depends on the choice of metric.

    What to do. Look at the pictures. Report both metrics and say which one the claim rests on.
    """
    for metric in audit.metrics:
        if metric.second_opinion and (pairs := list(_contradicted(audit, metric))):
            yield f"{audit.primary.title} and {metric.title} give different verdicts: {_join_pairs(audit, pairs)}."


def _contradicted(audit: Audit, metric: Metric) -> Iterator[tuple[str, MethodId]]:
    """The pairs of defense and attack whose verdict the metric contradicts."""
    guesses = {row.victim: row.scores[metric.name] for row in audit.blind}

    def contradicts(row: ResultRow) -> bool | None:
        guess, distance = guesses.get(row.victim), row.scores[metric.name]
        if distance is None or guess is None:
            return None
        return distance > guess if row.leaked else distance < CLOSE * guess

    return (pair for pair, rows in _pairs(audit) if _holds_often(rows, contradicts))


@_flag("updates-disclose")
def _updates_disclose(audit: Audit) -> Iterator[str]:
    """Updates give inputs away without any attack.

    Raised when what the clients send tells what their inputs are by its zeros alone, as the gradient of a text model's
    embedding does.

    Why it matters. The figures are about attacks on the rest of the update. However well these are stopped, the words
    of every batch can be read off.

    What to do. Withhold the embedding: audit and train without `--shared`, or with patterns that leave it out.
    """
    yield from audit.config["disclosed"]


@_flag("few-victims")
def _too_few_victims(audit: Audit) -> Iterator[str]:
    """There are too few victims for firm conclusions.

    Raised when an attack has fewer than 8 finished victims.

    Why it matters. Even if none of 7 victims is recovered, the true share may be one in three. With fewer than 6
    victims there is no 95 % interval for a median at all, and so no ranking.

    What to do. Attack more victims (`--victims 16`); they are attacked together and cost less than one at a time.
    """
    fewest = min((len(rows) for _, rows in _pairs(audit)), default=FEW_VICTIMS)
    if fewest < FEW_VICTIMS:
        yield (
            f"Only {plural(fewest, 'victim')} per attack: the counts are anecdotal. Even if none of {fewest} is "
            f"recovered, the true share may be as high as {percent(possible_share(0, fewest))} (at 95 % confidence). "
            f"Attack at least {FEW_VICTIMS} victims (`--victims`)."
        )


@_flag("few-games")
def _too_few_games(audit: Audit) -> Iterator[str]:
    """There are too few identification games for the shares shown.

    Raised when fewer than 50 games were played under a defense.

    Why it matters. With 49 games, a share near one half is only known to within 14 percentage points, and a defense
    under which nothing is named may still let one update in seventeen be traced.

    What to do. Play more games (`--games 200`); they cost little.
    """
    fewest = min((row.games for rows in audit.identified.values() for row in rows), default=FEW_GAMES)
    if fewest < FEW_GAMES:
        yield (
            f"Only {plural(fewest, 'identification game')} per defense: even if none is won, the true share may be as "
            f"high as {percent(possible_share(0, fewest))} (at 95 % confidence). Play at least {FEW_GAMES} (`--games`)."
        )


@_flag("training-too-short")
def _training_too_short(audit: Audit) -> Iterator[str]:
    """The training runs are too short to compare.

    Raised when the undefended model is near chance, or when a model's mean accuracy in the last fifth of its rounds was
    more than 2 points above that in the fifth before.

    Why it matters. While models are still learning, a defense that only slows learning down looks costly, and one that
    costs accuracy only in the end looks free. PMM then measures speed, not cost.

    What to do. Train for more rounds (`--rounds`) or with a higher learning rate (`--lr`) until the curves are
    flat; with a lower one if the undefended training has diverged.
    """
    unknown = [row for row in audit.utility.values() if row.pmm is None]
    if unknown:
        baseline = next((row.baseline_accuracy for row in unknown if row.baseline_accuracy is not None), None)
        reached = f" ({percent(baseline)} accuracy)" if baseline is not None else ""
        undefended = audit.utility.get(UNDEFENDED)
        diverged = None if undefended is None else undefended.diverged
        remedy = "train longer (`--rounds`)"
        if diverged is not None:
            remedy = f"its training has diverged in round {diverged}; train with a lower rate (`--lr`)"
        yield (
            f"The undefended model is near chance{reached}, so the share of accuracy that a defense keeps "
            f"(PMM) is not given: {remedy}."
        )
    gains = {row.defense_spec: _late_gain(row.history) for row in audit.utility.values()}
    learning = [defense for defense, gain in gains.items() if gain > STILL_LEARNING]
    if learning:
        most = max(gains[defense] for defense in learning)
        yield (
            f"The models under {names(learning, MAX_NAMED)} were still learning: they gained up to {100 * most:.1f} "
            "points of accuracy from the second-to-last fifth of the rounds to the last."
        )


def _late_gain(history: Sequence[float]) -> float:
    """Gain from the second-to-last fifth of the evenly spaced evaluations to the last; 0 if there are too few.

    It compares means, because a single accuracy on a thousand examples is uncertain by almost a point.
    """
    fifth = len(history) // 5
    return fmean(history[-fifth:]) - fmean(history[-2 * fifth : -fifth]) if fifth else 0.0


# -- helpers ---------------------------------------------------------------------------------------------------------


def _pairs(audit: Audit) -> list[tuple[tuple[str, MethodId], list[ResultRow]]]:
    """The pairs of defense and attack that have rows, with those rows."""
    return [(pair, rows) for pair in audit.expected if (rows := audit.rows_of(*pair))]


def _decisive(audit: Audit) -> list[tuple[tuple[str, MethodId], list[ResultRow]]]:
    """The pairs on which a verdict rests: each defense with its strongest attack."""
    decisive = {(defense, best[0]) for defense in audit.defenses if (best := strongest(audit, defense))}
    return [(pair, rows) for pair, rows in _pairs(audit) if pair in decisive]


def _holds_often(rows: Sequence[ResultRow], check: Callable[[ResultRow], bool | None]) -> bool:
    """Whether the check holds for at least `MIN_SHARE` of the rows that it can judge, those where it is not None."""
    judged = [result for row in rows if (result := check(row)) is not None]
    return bool(judged) and sum(judged) >= MIN_SHARE * len(judged)


def _join_pairs(audit: Audit, pairs: Sequence[tuple[str, MethodId]]) -> str:
    """Pairs of defense and attack joined for use in a sentence, grouped by attack."""
    by_attack: dict[MethodId, list[str]] = {}
    for defense, attack in pairs:
        by_attack.setdefault(attack, []).append(defense)
    clauses = []
    for attack, defenses in by_attack.items():
        defended = names([defense for defense in defenses if defense != UNDEFENDED], MAX_NAMED)
        clauses.append(
            f"`{audit.short_name(attack)}` "
            + " and ".join(filter(None, ["undefended" * (UNDEFENDED in defenses), defended and f"under {defended}"]))
        )
    return join(clauses)
