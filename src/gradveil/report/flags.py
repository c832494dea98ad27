"""When not to trust an audit: checks in the manner of AutoAttack, each with a page that says why and what to do.

Every flag is a function of the rows on disk. It looks only at what an audit measured: rows of older audits, which lack
some of the figures, raise no flag that needs them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from gradveil.audit.statistics import possible_share
from gradveil.report.read import ADAPTIVE, UNDEFENDED, Attempt, Audit
from gradveil.report.scores import gain_over_plain, gain_over_undefended, score, strongest
from gradveil.report.text import join, names, percent, plural

FEW_VICTIMS = 8  # 0 of 7 still allows a true rate of one in three
# Shares of all the descent of a loss, from start to end. On MNIST and LeNet, Inverting Gradients made at most .0005 of
# it in the last tenth of 80 steps, iDLG cut off at 40 steps up to .0034. iDLG under noise still makes up to .008 after
# 150 steps, which is why only victims that were not recovered count. Restarts ended within .0006.
STILL_FALLING = 0.001
RESTARTS_APART = 0.01
ENOUGH = 0.25  # of the victims: fewer raise nothing
LEAST_HARM = 0.5  # dB that a stronger attacker must lose before it is called worse
NOTHING = 1e-9  # of the gradient's power: rounding
LPIPS_CLOSE = 0.5  # of the blind guess's distance: what looks so much nearer was not guessed
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

    Example:
        >>> [flag.name for flag in FLAGS][:2]
        ['attack-fails-undefended', 'not-converged']
    """

    name: str
    title: str
    when: str
    why: str
    remedy: str


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
    found = ((flag, list(check(audit))) for flag, check in _CHECKS.items())
    return [Raised(flag, " ".join(sentences)) for flag, sentences in found if sentences]


def documentation() -> str:
    """The page docs/flags.md."""
    parts = [
        "# Trust flags",
        "An audit that proves nothing looks just like one that proves a defense: all its images are grey. These checks "
        "tell the two apart as far as the rows themselves can. A report shows the flags that are raised above its "
        "verdict; `gradveil audit` prints them and, with `--json`, lists them by name.",
        *(f"- [{flag.name}](#{flag.name}): {flag.title}" for flag in FLAGS),
    ]
    for flag in FLAGS:
        parts += [
            f"## {flag.name}",
            f"**{flag.title}.**",
            f"**Raised when** {flag.when}",
            f"**Why it matters.** {flag.why}",
            f"**What to do.** {flag.remedy}",
        ]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ").replace("name.\n- ", "name.\n\n- ") + "\n"


# -- the flags -------------------------------------------------------------------------------------------------------

FAILS_UNDEFENDED = Flag(
    "attack-fails-undefended",
    "The attack does not recover undefended data",
    "an attack recovers fewer than half of the victims without a defense, or there is no finished undefended run.",
    "A defense that stops an attack which does not work has stopped nothing. Attacks fail for many reasons that are no "
    "defense: too few iterations, a network with dead units, a large batch.",
    "Give the attack more iterations (`--budget standard`), restarts, or another optimiser; or audit a model and batch "
    "size on which it works. Until then read only the other attacks.",
)
NOT_CONVERGED = Flag(
    "not-converged",
    "The matching loss was still falling",
    "the strongest attack under a defense fails to recover at least a quarter of the victims while more than 0.1 % of "
    "all the descent of its loss came in the last tenth of its steps. Where the step size decays (Adam), every loss "
    "flattens at the end and the flag sees less.",
    "The search was cut off, not finished. A defense may do no more than slow it down, and a fixed number of "
    "iterations then passes for protection.",
    "More iterations for this attack (`--attack NAME:iterations=...`), until the flag is gone or the reconstruction no "
    "longer changes.",
)
RESTARTS_DISAGREE = Flag(
    "restarts-disagree",
    "Restarts end at different losses",
    "the strongest attack under a defense fails to recover at least a quarter of the victims while its typical restart "
    "stays above its best one by more than 1 % of all the descent. With `restarts=1` there is nothing to compare and "
    "the flag cannot be raised.",
    "Where the end depends on the start, the best of a few tries is a matter of luck, and an attacker with more time "
    "has more of it.",
    "More restarts (`--attack NAME:restarts=...`), until the best loss is found more than once.",
)
STRONGER_DOES_WORSE = Flag(
    "stronger-does-worse",
    "An attacker who knows more recovers less",
    "an attacker adapted to the defense has a lower PSNR than the plain one, or the same attack a lower one without a "
    "defense than under it: by at least 0.5 dB in the median, and with a 95 % interval over the victims that excludes "
    "zero.",
    "Whoever knows more can always ignore it. If it does worse, the stronger attack is badly tuned, and so is what it "
    "says about the defense.",
    "Mend the adaptive attack, or give the undefended one more iterations. Until then the weaker attacker's rows are "
    "the better estimate of what leaks.",
)
BELOW_BLIND = Flag(
    "adaptive-below-blind",
    "An attacker who knows the defense does worse than guessing",
    "under a defense that no attack breaks, every adaptive attacker stays below the blind guess in the median PSNR.",
    "Anybody can answer with the public mean image of the class. An adaptive attacker that does worse has not made use "
    "of what it could know, so what it fails to recover says little about what the defense protects.",
    "Give it a stronger prior or more restarts, or another attack; until then take the verdict for that of plain "
    "gradient matching.",
)
CHANGED_NOTHING = Flag(
    "defense-changed-nothing",
    "The defense left the update as it was",
    "what the server sees of the victims' updates is, up to rounding, what they would have shared without the defense.",
    "A defense that is switched off, or too weak for the model's scale, costs no accuracy and looks "
    "like the best one. Secure aggregation of a single client is the classic.",
    "Check the parameters against the size of the gradients; give secure aggregation clients to hide among "
    "(`--aggregated 4`).",
)
METRICS_DISAGREE = Flag(
    "metrics-disagree",
    "PSNR and LPIPS disagree about the verdict",
    "for at least a quarter of the victims of an attack under a defense, a reconstruction counts as leaked by PSNR or "
    "SSIM but lies farther from the original than the blind guess by LPIPS, or it does not count as leaked but lies "
    "less than half as far from the original as the blind guess.",
    "Pixels forgive blur and punish a shift; a vision network does the opposite. Where they disagree, which defense "
    "wins depends on the metric that was chosen.",
    "Look at the pictures. Report both metrics and say which one the claim rests on.",
)
TOO_FEW_VICTIMS = Flag(
    "few-victims",
    "Too few victims for what is claimed",
    "an attack has fewer than 8 finished victims.",
    "None of 7 recovered still allows that one victim in three is. Below 6 victims there is no 95 % interval for a "
    "median at all, and so no ranking.",
    "More victims (`--victims 16`); they are attacked together and cost less than one at a time.",
)
TRAINING_TOO_SHORT = Flag(
    "training-too-short",
    "The trainings are too short to compare",
    "the undefended model is near chance, or a model was more than 2 points of accuracy better in the last fifth of "
    "its rounds than in the fifth before, on average.",
    "Before the end of learning a defense that delays looks like one that costs, and one that costs only in the end "
    "looks free. PMM then measures speed, not what the defense costs.",
    "More rounds (`--rounds`), or a higher learning rate (`--lr`), until the curves are flat.",
)


# -- the checks ------------------------------------------------------------------------------------------------------


def _fails_undefended(audit: Audit) -> Iterator[str]:
    if not audit.attempts:
        return
    before = {method: score(rows) for method in audit.methods if (rows := audit.of(UNDEFENDED, method))}
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


def _not_converged(audit: Audit) -> Iterator[str]:
    falling = [pair for pair, rows in _decisive(audit) if _often(rows, _is_falling)]
    if falling:
        yield f"The loss was still falling when the iterations ran out: {_list(audit, falling)}."


def _is_falling(row: Attempt) -> bool | None:
    if row.loss is None or row.loss_start is None or row.loss_late is None:
        return None
    return not row.leaked and row.loss_late - row.loss > STILL_FALLING * (row.loss_start - row.loss)


def _restarts_disagree(audit: Audit) -> Iterator[str]:
    apart = [pair for pair, rows in _decisive(audit) if _often(rows, _are_apart)]
    if apart:
        yield f"Restarts end at different losses, so more of them may find more: {_list(audit, apart)}."


def _are_apart(row: Attempt) -> bool | None:
    if row.loss_start is None or len(row.loss_restarts) < 2:
        return None
    best, *_ = ordered = sorted(row.loss_restarts)
    return not row.leaked and ordered[len(ordered) // 2] - best > RESTARTS_APART * (row.loss_start - best)


def _stronger_does_worse(audit: Audit) -> Iterator[str]:
    for defense, attack in audit.expected:
        gain = gain_over_plain(audit, defense, attack)
        if gain and gain.high < 0 and gain.estimate <= -LEAST_HARM:
            yield (
                f"Against `{defense}`, `{audit.short(attack)}` is {-gain.estimate:.1f} dB below the attacker who does "
                f"not know the defense ({-gain.high:.1f} to {-gain.low:.1f})."
            )
    for method in audit.methods:
        better = [
            defense
            for defense in audit.real_defenses
            if (gain := gain_over_undefended(audit, defense, method)) and gain.low > 0 and gain.estimate >= LEAST_HARM
        ]
        if better:
            yield (
                f"`{audit.short(method)}` recovers more under {names(better, NAMED)} than undefended, which a sound "
                "attack should not: it had not converged or was lucky."
            )


def _below_blind(audit: Audit) -> Iterator[str]:
    if not audit.blind:
        return
    guessed = score(audit.blind).psnr
    below = {}
    for defense in audit.real_defenses:
        rows = {attack: found for attack in audit.attacks if (found := audit.of(defense, attack))}
        adaptive = [score(found).psnr for attack, found in rows.items() if attack.endswith(ADAPTIVE)]
        if adaptive and max(adaptive) < guessed and not any(row.leaked for found in rows.values() for row in found):
            below[defense] = max(adaptive)
    if below:
        yield (
            f"Under {names(list(below), NAMED)} the best adaptive attacker reaches {max(below.values()):.1f} dB in the "
            f"median, the blind guess {guessed:.1f} dB."
        )


def _changed_nothing(audit: Audit) -> Iterator[str]:
    for defense in audit.real_defenses:
        powers = [row.power for row in audit.attempts if row.defense == defense and row.power is not None]
        if powers and max(powers) < NOTHING:
            yield f"`{defense}` left the updates as they were."


def _metrics_disagree(audit: Audit) -> Iterator[str]:
    guesses = {row.victim: row.lpips for row in audit.blind if row.lpips is not None}

    def disagrees(row: Attempt) -> bool | None:
        guess = guesses.get(row.victim)
        if row.lpips is None or guess is None:
            return None
        return row.lpips > guess if row.leaked else row.lpips < LPIPS_CLOSE * guess

    pairs = [pair for pair, rows in _pairs(audit) if _often(rows, disagrees)]
    if pairs:
        yield f"By pixels and by LPIPS the verdict is not the same: {_list(audit, pairs)}."


def _too_few_victims(audit: Audit) -> Iterator[str]:
    fewest = min((len(rows) for _, rows in _pairs(audit)), default=FEW_VICTIMS)
    if fewest < FEW_VICTIMS:
        yield (
            f"Only {plural(fewest, 'victim')} per attack: the counts are anecdotal. None of {fewest} recovered still "
            f"allows that {percent(possible_share(0, fewest))} are (at 95 %). From {FEW_VICTIMS} victims on "
            "(`--victims`) they begin to mean something."
        )


def _training_too_short(audit: Audit) -> Iterator[str]:
    unknown = [row for row in audit.utility.values() if row.pmm is None]
    if unknown:
        baseline = next((row.baseline_accuracy for row in unknown if row.baseline_accuracy is not None), None)
        reached = f" ({percent(baseline)} accuracy)" if baseline is not None else ""
        yield (
            f"The undefended model is near chance{reached}, so the share of accuracy that a defense keeps "
            "(PMM) is not given: train longer (`--rounds`)."
        )
    gains = {row.defense: _late_gain(row.history) for row in audit.utility.values()}
    learning = [defense for defense, gain in gains.items() if gain > STILL_LEARNING]
    if learning:
        most = max(gains[defense] for defense in learning)
        yield (
            f"The models under {names(learning, NAMED)} were still learning: up to {100 * most:.1f} points of accuracy "
            "from the last but one fifth of the rounds to the last."
        )


def _late_gain(history: Sequence[float]) -> float:
    """From the last but one fifth of the evaluations, which are evenly spaced, to the last; 0 if there are too few.

    Means, because a single accuracy on a thousand images is uncertain by almost a point.
    """
    fifth = len(history) // 5
    return fmean(history[-fifth:]) - fmean(history[-2 * fifth : -fifth]) if fifth else 0.0


_CHECKS: dict[Flag, Callable[[Audit], Iterator[str]]] = {
    FAILS_UNDEFENDED: _fails_undefended,
    NOT_CONVERGED: _not_converged,
    RESTARTS_DISAGREE: _restarts_disagree,
    STRONGER_DOES_WORSE: _stronger_does_worse,
    BELOW_BLIND: _below_blind,
    CHANGED_NOTHING: _changed_nothing,
    METRICS_DISAGREE: _metrics_disagree,
    TOO_FEW_VICTIMS: _too_few_victims,
    TRAINING_TOO_SHORT: _training_too_short,
}
FLAGS = tuple(_CHECKS)


# -- shared ----------------------------------------------------------------------------------------------------------


def _pairs(audit: Audit) -> list[tuple[tuple[str, str], list[Attempt]]]:
    """(defense, attack) and their rows, where there are any."""
    return [(pair, rows) for pair in audit.expected if (rows := audit.of(*pair))]


def _decisive(audit: Audit) -> list[tuple[tuple[str, str], list[Attempt]]]:
    """The pairs on which a verdict rests: each defense with its strongest attack."""
    best = {(defense, found[0]) for defense in audit.defenses if (found := strongest(audit, defense))}
    return [(pair, rows) for pair, rows in _pairs(audit) if pair in best]


def _often(rows: Sequence[Attempt], check: Callable[[Attempt], bool | None]) -> bool:
    """Whether the check holds for enough of the rows that it can judge."""
    judged = [found for row in rows if (found := check(row)) is not None]
    return bool(judged) and sum(judged) >= ENOUGH * len(judged)


def _list(audit: Audit, pairs: Sequence[tuple[str, str]]) -> str:
    """Pairs of attack and defense in a sentence, those of one attack together."""
    by_attack: dict[str, list[str]] = {}
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
