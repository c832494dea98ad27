"""The verdict on an audit in sentences, with the caveats that limit it.

Sentences put names and commands between backticks; the page shows these as code, the terminal drops the backticks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from gradveil.audit.rows import MethodId
from gradveil.audit.store import resume_command
from gradveil.metrics.identification import proportion
from gradveil.report._evidence import adapted, lacking, stopped, weakened
from gradveil.report._scores import Score, score
from gradveil.report._text import join, names, percent, plural
from gradveil.report.flags import Raised, raised
from gradveil.report.read import UNDEFENDED, Audit

COSTLY_PMM = 0.8  # below this, "keeps" becomes "keeps only"
MAX_SEPARATE = 3  # if there are more defenses than this, they share a sentence
MIN_RIGHT_LABELS = 0.5  # share of right labels below which a defense may owe its success to the wrong ones


class Outcome(Enum):
    """What a defense does to the attacks that work without it; the value is the badge on the page."""

    STOPS = "stops"
    NOT_SHOWN = "not shown"
    WEAKENS = "weakens"
    FAILS = "fails"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Sentence:
    """One sentence of the headline and the outcome it describes."""

    text: str
    outcome: Outcome


@dataclass(frozen=True)
class Verdict:
    """The raised flags, the headline (which begins with the undefended run), two more verdicts and the caveats.

    Args:
        flags: the reasons not to rely on the audit.
        headline: what attackers rebuild.
        identification: whether they can tell whose data it was; empty if no game has been played.
        labels: whether they read off the labels; empty if they were given them or there are no classes.
        caveats: what limits these verdicts.

    Example:
        >>> Verdict((), (Sentence("`idlg` recovers 4 of 4 images.", Outcome.FAILS),), (), (), ()).lines()
        ['idlg recovers 4 of 4 images.']
    """

    flags: tuple[Raised, ...]
    headline: tuple[Sentence, ...]
    identification: tuple[Sentence, ...]
    labels: tuple[Sentence, ...]
    caveats: tuple[str, ...]

    def lines(self) -> list[str]:
        """Everything as plain sentences for a terminal."""
        flags = [f"Flag {found.flag.name}: {found.text}" for found in self.flags]
        caveats = [f"Note: {caveat}" for caveat in self.caveats]
        verdicts = [sentence.text for sentence in (*self.headline, *self.identification, *self.labels)]
        return [text.replace("`", "") for text in [*flags, *verdicts, *caveats]]


def judge(audit: Audit) -> Verdict:
    """Judge the audit."""
    headline = (_lead(audit), *_defense_sentences(audit))
    return Verdict(
        tuple(raised(audit)),
        headline,
        tuple(_identification_sentences(audit)),
        tuple(_label_sentences(audit)),
        tuple(_caveats(audit)),
    )


def outcome(audit: Audit, defense: str) -> Outcome:
    """What `defense` does, judged by the attacker who recovers the largest share of the victims.

    A leak counts whichever attack causes it. That a defense weakens or stops attacks is shown only by tests on the
    victims that were attacked with and without it; that it stops them, only as `_evidence.RULE` says.
    """
    undefended = [score(audit, rows) for attack in audit.attacks if (rows := audit.without_defense(attack))]
    if any(result.leaked for _, result in _results(audit, defense)):
        return Outcome.WEAKENS if weakened(audit, defense) else Outcome.FAILS
    unfinished = any(name in (defense, UNDEFENDED) for name, _, _ in audit.missing_attempts())
    if not undefended or unfinished:
        return Outcome.UNKNOWN
    return Outcome.NOT_SHOWN if lacking(audit, defense) else Outcome.STOPS


def _short_names(audit: Audit, methods: Sequence[str]) -> str:
    return join([f"`{audit.short_name(MethodId(method))}`" for method in methods])


def _results(audit: Audit, defense: str) -> list[tuple[MethodId, Score]]:
    """The attacks that ran under `defense`, with their scores."""
    return [(attack, score(audit, rows)) for attack in audit.attacks if (rows := audit.rows_of(defense, attack))]


def _share(result: Score) -> float:
    return result.leaked / result.victims


def _success(audit: Audit, result: Score) -> tuple[float, float]:
    """The key by which attacks are compared: first the share that leaked, then how close they came."""
    return _share(result), audit.primary.closeness(result.median)


def _victims(audit: Audit, count: int) -> str:
    unit = audit.modality.unit
    return plural(count, unit) if audit.examples == 1 else f"{plural(count, 'batch')} of {audit.examples} {unit}s"


def _noun(audit: Audit) -> str:
    return f"{audit.modality.unit}s" if audit.examples == 1 else "batches"


def _lead(audit: Audit) -> Sentence:
    if not audit.attempts:
        return Sentence("No attack has finished yet.", Outcome.UNKNOWN)
    if UNDEFENDED not in audit.defenses:
        return Sentence(f"No attack was run without a defense (`{UNDEFENDED}`).", Outcome.UNKNOWN)
    results = _results(audit, UNDEFENDED)
    if not results:
        return Sentence("The attacks without a defense have not finished yet.", Outcome.UNKNOWN)
    clauses = []
    for position, (attack, result) in enumerate(results):
        count = f"{result.leaked or 'none'} of {result.victims:,}"
        if position == 0:
            count = f"recovers {result.leaked or 'none'} of {_victims(audit, result.victims)}"
        clauses.append(f"`{audit.short_name(attack)}` {count} (median {audit.primary.with_unit(result.median)})")
    leaks = any(result.leaked for _, result in results)
    return Sentence(f"Without a defense, {join(clauses)}.", Outcome.FAILS if leaks else Outcome.UNKNOWN)


def _defense_sentences(audit: Audit) -> Iterator[Sentence]:
    """The defenses grouped by outcome; no sentence before the undefended attacks have rows."""
    if not _results(audit, UNDEFENDED):
        return
    outcomes = {defense: outcome(audit, defense) for defense in audit.real_defenses}
    groups = {kind: [defense for defense in outcomes if outcomes[defense] is kind] for kind in Outcome}
    texts = {
        Outcome.STOPS: _stopping(audit, groups[Outcome.STOPS]),
        Outcome.NOT_SHOWN: _not_showing(audit, groups[Outcome.NOT_SHOWN]),
        Outcome.WEAKENS: _weakening(audit, groups[Outcome.WEAKENS]),
        Outcome.FAILS: _failing(audit, groups[Outcome.FAILS]),
        Outcome.UNKNOWN: _unfinished(groups[Outcome.UNKNOWN]),
    }
    for kind, lines in texts.items():
        yield from (Sentence(line, kind) for line in lines)


def _stopping(audit: Audit, defenses: list[str]) -> Iterator[str]:
    if len(defenses) <= MAX_SEPARATE:
        for defense in defenses:
            attacks = _attack_phrase(audit, stopped(audit, defense))
            yield f"`{defense}` stops {attacks}{_even_when_adapted(audit, defense)}{_cost(audit, defense)}."
        return
    each = [stopped(audit, defense) for defense in defenses]
    attacks = _attack_phrase(audit, [method for method in each[0] if all(method in methods for methods in each)])
    full = [defense for defense in defenses if adapted(audit, defense) == stopped(audit, defense)]
    kept = {name: pmm for name in defenses if name in audit.utility and (pmm := audit.utility[name].pmm) is not None}
    text = f"{names(defenses)} stop {attacks}"
    if full:
        text += ", even when adapted to them" if full == defenses else f" ({names(full)} even when adapted)"
    if kept:
        best, worst = max(kept, key=kept.__getitem__), min(kept, key=kept.__getitem__)
        text += (
            f"; of these `{best}` keeps the most accuracy ({percent(kept[best])} of the undefended model's), "
            f"`{worst}` the least ({percent(kept[worst])})"
        )
    yield f"{text}."


def _not_showing(audit: Audit, defenses: list[str]) -> Iterator[str]:
    by_reason: dict[tuple[str, ...], list[str]] = {}
    for defense in defenses:
        by_reason.setdefault(tuple(lacking(audit, defense)), []).append(defense)
    for reasons, alike in by_reason.items():
        yield (
            f"{names(alike)}: protection is not shown. Nothing is recovered, but that proves nothing yet. What would "
            f"show it: {'; and '.join(reasons)}."
        )


def _weakening(audit: Audit, defenses: list[str]) -> Iterator[str]:
    if len(defenses) > MAX_SEPARATE:
        yield f"{names(defenses)} are not enough: under each of them, some attack still recovers {_noun(audit)}."
        return
    for defense in defenses:
        attack, result = _strongest(audit, defense)
        yield (
            f"`{defense}` is not enough: `{audit.short_name(attack)}` still recovers {result.leaked} of "
            f"{_victims(audit, result.victims)}{_unaware_attackers(audit, defense, attack, result)}."
        )


def _failing(audit: Audit, defenses: list[str]) -> Iterator[str]:
    if defenses:
        best = [_strongest(audit, defense)[1] for defense in defenses]
        verb, counts = "does" if len(defenses) == 1 else "do", [f"{each.leaked} of {each.victims:,}" for each in best]
        yield (
            f"{names(defenses)} {verb} not help: {join(counts)} {_noun(audit)} are recovered, not significantly fewer "
            "than without a defense."
        )


def _strongest(audit: Audit, defense: str) -> tuple[MethodId, Score]:
    """The attack that recovers most under `defense`, with its score."""
    return max(_results(audit, defense), key=lambda pair: _success(audit, pair[1]))


def _unfinished(defenses: list[str]) -> Iterator[str]:
    if defenses:
        verb = "is" if len(defenses) == 1 else "are"
        yield f"{names(defenses)} {verb} not judged yet: some attacks have not finished."


def identification_outcome(audit: Audit, defense: str) -> Outcome:
    """Whether `defense` hides which candidate a client trained on, judged by the attacker who names it most often.

    That it hides it is shown only if significantly fewer are named than without a defense, and no more than by chance.
    """
    found, undefended = audit.most_identified(defense), audit.most_identified(UNDEFENDED)
    if found is None or undefended is None:
        return Outcome.UNKNOWN
    fewer = found.named_high < undefended.named_low
    by_chance = found.named_low <= found.chance and (found.auc_low is None or found.auc_low <= 0.5)
    if by_chance:
        return Outcome.STOPS if fewer else Outcome.NOT_SHOWN
    return Outcome.WEAKENS if fewer else Outcome.FAILS


def _identification_sentences(audit: Audit) -> Iterator[Sentence]:
    """The second verdict: without a defense, then under each."""
    undefended, unit = audit.most_identified(UNDEFENDED), audit.modality.unit
    if undefended is None:
        return
    among = "" if audit.examples == 1 else f", one of the {audit.examples} behind the update,"
    share, chance = percent(undefended.share), percent(undefended.chance)
    text = (
        f"Shown {undefended.candidates:,} candidate {unit}s, the server names the one that the client trained on"
        f"{among} in {share} of the updates without a defense (chance {chance})."
    )
    yield Sentence(text, Outcome.FAILS if undefended.named_low > undefended.chance else Outcome.UNKNOWN)
    outcomes = {defense: identification_outcome(audit, defense) for defense in audit.real_defenses}
    texts = {
        Outcome.STOPS: "{} {verb} the client's {unit}: {shares} are named, no more than by chance.",
        Outcome.NOT_SHOWN: "{}: not shown. No more are named than by chance ({shares}), but hardly more without it.",
        Outcome.WEAKENS: "{} {is_are} not enough: {shares} are still named.",
        Outcome.FAILS: "{} {does} not hide the client's {unit}: {shares} are named, not significantly fewer.",
        Outcome.UNKNOWN: "{}: not played yet.",
    }
    for outcome, template in texts.items():
        defenses = [defense for defense in outcomes if outcomes[defense] is outcome]
        if not defenses:
            continue
        shares = [percent(row.share) for defense in defenses if (row := audit.most_identified(defense))]
        one = len(defenses) == 1
        yield Sentence(
            template.format(
                names(defenses),
                unit=unit,
                shares=join(shares if len(set(shares)) > 1 else shares[:1]),
                verb="hides" if one else "hide",
                is_are="is" if one else "are",
                does="does" if one else "do",
            ),
            outcome,
        )


@dataclass(frozen=True)
class LabelLeak:
    """How many labels an attacker inferred from the updates under a defense.

    Args:
        right: labels that it got right.
        labels: labels behind the updates.
        low, high: the 95 % interval of that share (Clopper and Pearson).
        chance: the share that always naming the most frequent class of the training data gets right.

    Example:
        >>> LabelLeak(8, 8, 0.63, 1.0, chance=0.11).share
        1.0
    """

    right: int
    labels: int
    low: float
    high: float
    chance: float

    @property
    def share(self) -> float:
        """The share of the labels that is right."""
        return self.right / self.labels

    @property
    def leaks(self) -> bool:
        """Whether more labels are right than by chance."""
        return self.low > self.chance


def label_leak(audit: Audit, defense: str) -> LabelLeak | None:
    """The labels that the best attacker inferred under `defense`; None if none had to or could."""
    chance = audit.config["largest_class"]
    if audit.config["labels"] == "known" or chance is None:
        return None
    counts = []
    for attack in audit.attacks:
        shares = [row.label_correct for row in audit.rows_of(defense, attack) if row.label_correct is not None]
        counts.append((round(sum(shares) * audit.examples), len(shares) * audit.examples))
    right, labels = max(counts, key=lambda count: (count[0] / max(count[1], 1), count[1]), default=(0, 0))
    if not labels:
        return None
    share = proportion(right, labels)
    return LabelLeak(right, labels, share.low, share.high, chance)


def label_outcome(audit: Audit, defense: str) -> Outcome:
    """Whether the labels leak under `defense`.

    It is never shown that they do not: attackers infer them by one rule, which nobody has adapted to the defense.
    """
    found, undefended = label_leak(audit, defense), label_leak(audit, UNDEFENDED)
    if found is None or undefended is None:
        return Outcome.UNKNOWN
    if not found.leaks:
        return Outcome.NOT_SHOWN
    return Outcome.WEAKENS if found.high < undefended.low else Outcome.FAILS


def _label_sentences(audit: Audit) -> Iterator[Sentence]:
    """The third verdict: the labels, which are a leak of their own if the class is a diagnosis."""
    undefended = label_leak(audit, UNDEFENDED)
    if undefended is None:
        return
    every = "Every label is read off" if undefended.right == undefended.labels else "Labels are read off"
    what = f"{undefended.right} of {plural(undefended.labels, 'label')} inferred from the updates"
    text = f"{every if undefended.leaks else 'Labels'}: {what} without a defense (chance {percent(undefended.chance)})."
    yield Sentence(text, Outcome.FAILS if undefended.leaks else Outcome.UNKNOWN)
    by_text: dict[tuple[Outcome, str], list[str]] = {}
    for defense in audit.real_defenses:
        found = label_leak(audit, defense)
        if found is None:
            continue
        count = f"{found.right} of {plural(found.labels, 'label')} inferred from the updates"
        if found.right == found.labels and found.leaks:
            words = f"every label is read off: {count}"
        elif found.leaks:
            words = f"labels are read off: {count}"
        else:
            words = f"not shown to hide labels: {count}, no more than by chance, by a rule not made for the defense"
        by_text.setdefault((label_outcome(audit, defense), words), []).append(defense)
    for (kind, words), defenses in by_text.items():
        yield Sentence(f"{names(defenses)}: {words}.", kind)


def _unaware_attackers(audit: Audit, defense: str, attack: MethodId, result: Score) -> str:
    """What attackers who do not know the defense recover, if that is less than `result`."""
    if not attack.adaptive:
        return ""
    plain = [plain_result for other, plain_result in _results(audit, defense) if not other.adaptive]
    best = max(plain, key=_share, default=None)
    if best is None or _share(best) >= _share(result):
        return ""
    return f"; attackers who do not know the defense recover {best.leaked or 'none'}"


def _even_when_adapted(audit: Audit, defense: str) -> str:
    """Says which of the attacks that `defense` stops were adapted to it; follows the names of the stopped attacks."""
    methods = stopped(audit, defense)
    tried = [method for method in adapted(audit, defense) if method in methods]
    return f", {'' if tried == methods else _short_names(audit, tried) + ' '}even when adapted to it" if tried else ""


def _attack_phrase(audit: Audit, methods: Sequence[str]) -> str:
    if len(methods) < len(audit.methods):
        return _short_names(audit, methods)
    return {1: "the attack", 2: "both attacks"}.get(len(methods), f"all {len(methods)} attacks")


def _cost(audit: Audit, defense: str) -> str:
    """The end of a sentence about a defense: what it costs."""
    if defense not in audit.utility:
        return "; its cost in accuracy was not measured"
    utility = audit.utility[defense]
    if utility.pmm is None:
        return f"; the model trained with it reaches {percent(utility.accuracy)} accuracy"
    if utility.pmm >= 1:
        return "; it costs no accuracy"
    return f"; it keeps {'only ' if utility.pmm < COSTLY_PMM else ''}{percent(utility.pmm)} of the accuracy"


def _caveats(audit: Audit) -> Iterator[str]:
    for part in (_unfinished_caveats, _attack_caveats, _randomness_caveats, _blind_caveats, _metric_caveats):
        yield from part(audit)


def _unfinished_caveats(audit: Audit) -> Iterator[str]:
    attempts, games, costs = audit.missing_attempts(), audit.missing_identifications(), audit.missing_utility()
    parts = []
    if attempts:
        total = len(audit.expected) * audit.victims
        parts.append(f"{len(attempts):,} of {plural(total, 'attack run')}")
    if games:
        parts.append(f"the identification games under {names(games)}")
    if costs:
        parts.append(f"the cost in accuracy of {names(costs)}")
    if parts:
        verb = "are" if attempts or len(parts) > 1 or games else "is"
        yield (
            f"The audit is not complete: {join(parts)} {verb} missing. `{resume_command(audit.folder)}` runs what is "
            "missing."
        )
    for file in audit.torn:
        yield f"The last line of `{file}` was cut short and is not counted."


def _attack_caveats(audit: Audit) -> Iterator[str]:
    for caveat, specs in audit.caveats.items():
        yield f"{names(specs)}: {caveat}"
    stopping = [defense for defense in audit.real_defenses if outcome(audit, defense) is Outcome.STOPS]
    unit, examples = audit.modality.unit, audit.config["public_examples"]
    if audit.learned:
        yield (
            f"{_short_names(audit, audit.learned)}: an attacker with {examples:,} public {unit}s of the same kind as "
            "the victims'; one with more of them may recover more, one with others less."
        )
    if stopping:
        untried = [] if audit.learned else [f"attackers who learn from public {unit}s"]
        untried += [] if audit.identified else ["attackers who only want to know whose data it was"]
        others = f"; {join(untried)} are not among them and may succeed where these fail" if untried else ""
        yield f"{names(stopping)}: only the attacks named here were tried{others}."
    generic = [defense for defense in stopping if defense in audit.generic]
    if generic:
        yield (
            f"{names(generic)}: only the generic adaptive attacker was tried, which averages over simulated draws, and "
            f"attackers who learned from such draws ({_short_names(audit, audit.simulating)}); an attacker written for "
            "the defense may recover more."
        )
    by_adapted: dict[tuple[str, ...], list[str]] = {}
    for defense in [defense for defense in stopping if defense not in generic]:
        by_adapted.setdefault(tuple(adapted(audit, defense)), []).append(defense)
    for methods, defenses in by_adapted.items():
        if any(set(stopped(audit, defense)) - set(methods) for defense in defenses):
            verb = "were" if len(methods) > 1 else "was"
            yield (
                f"{names(defenses)}: only {_short_names(audit, methods)} {verb} adapted to the defense; other "
                "attackers who know it may recover more."
            )
    misled = [defense for defense in stopping if _labels_right(audit, defense) < MIN_RIGHT_LABELS]
    if misled:
        yield (
            f"{names(misled)}: most labels were inferred wrongly, and with a wrong label no "
            f"{audit.modality.unit} is found. An attacker who knows the labels, or tries all of them, may recover "
            "more: see `--labels known`."
        )


def _randomness_caveats(audit: Audit) -> Iterator[str]:
    if audit.real_defenses:
        yield (
            "Noise, masks and batches were drawn from seeded generators, so that this audit can be repeated. That is "
            "for simulations only: anyone who sees some draws of a seeded generator can compute the others. Real "
            "clients pass no generator and draw from a cryptographic stream."
        )


def _labels_right(audit: Audit, defense: str) -> float:
    """Share of the labels that the attackers had right under `defense`."""
    known = [
        row.label_correct for row in audit.attempts if row.defense_spec == defense and row.label_correct is not None
    ]
    return fmean(known) if known else 1.0


def _blind_caveats(audit: Audit) -> Iterator[str]:
    if not audit.attempts:
        return
    if not audit.blind:
        yield "The blind-guess rows are missing, so it is unknown what anyone could guess without a gradient."
        return
    reaching = [row for row in audit.blind if audit.modality.leak_rule(row.scores, blind=None)]
    if reaching:
        modality, median = audit.modality, audit.primary.with_unit(score(audit, audit.blind).median)
        margin = (
            f" To count as leaked, a reconstruction must be {modality.margin} that guess." if modality.margin else ""
        )
        yield (
            f"The blind guess alone, {modality.guess}, reaches the threshold for {len(reaching)} of "
            f"{_victims(audit, len(audit.blind))} (median {median}): these {modality.unit}s look alike.{margin}"
        )


def _metric_caveats(audit: Audit) -> Iterator[str]:
    for metric in audit.metrics:
        without = sum(row.scores[metric.name] is None for row in audit.attempts)
        if without and metric.remedy:
            yield (
                f"{metric.title} is missing in {without:,} of {plural(len(audit.attempts), 'row')}: its weights were "
                f"not available. `{metric.remedy}` fetches them."
            )
