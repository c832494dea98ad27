"""The glossary of the page: what its terms, badges, columns and metrics mean."""

from collections.abc import Iterable

from gradveil.report._tables import Table
from gradveil.report.judgement import Outcome
from gradveil.report.read import Audit

OUTCOMES = {
    Outcome.STOPS: "Nothing is recovered under the defense, and the audit can show it: see what shows that.",
    Outcome.NOT_SHOWN: "Nothing is recovered under the defense, but that may be the attacks' fault or luck.",
    Outcome.WEAKENS: "Significantly less is recovered than without the defense, but still something.",
    Outcome.FAILS: "No significantly smaller share is recovered than without the defense.",
    Outcome.UNKNOWN: "Not judged: something has not run.",
}


def glossary(audit: Audit, tables: Iterable[Table]) -> dict[str, str]:
    """The meaning of every term on the page; the columns of `tables` explain themselves."""
    modality, unit = audit.modality, audit.modality.unit
    terms = {
        "Victim": "A client whose update is attacked. The attacker sees the model and what the client shared, never "
        f"the {unit}. An attack with several tries keeps the one that fits the update best, not the one that looks "
        "best.",
        "Adaptive": "An attacker who knows which defense is used and with which parameters, but not its random draws. "
        "The generic one averages over simulated draws of any defense; others are written for one.",
        "Plain": "An attacker who does not know that there is a defense.",
        "Blind guess": f"{modality.guess[0].upper()}{modality.guess[1:]}, scored like an attack. It uses no update at "
        "all, so only what goes beyond it was leaked by an update.",
        "Leaked": f"A reconstruction has leaked if it has a {modality.rule}.",
        **{kind.value: words for kind, words in OUTCOMES.items()},
        "95 % interval": "Bootstrap interval of a median over the victims; differences are paired by victim. It needs "
        "at least 6 victims. Intervals of shares are exact (Clopper and Pearson).",
        "p": "Probability of a difference at least as large as the one seen, if the defense did nothing.",
        "Trust flag": "A check that tells when an audit should not be relied on.",
    }
    metrics = {metric.title: metric.summary for metric in audit.metrics}
    titles = {metric.heading: metric.title for metric in audit.metrics}
    columns = {
        titles.get(column.title, column.title): column.hint
        for table in tables
        if table.rows
        for column in table.columns
        if column.title not in ("Defense", "Attack")
    }
    own = {
        "Defense": "What the client did to its update before sharing it.",
        "Attack": f"How the server tries to rebuild the {unit} from the update.",
    }
    return {**terms, **own, **{term: words for term, words in columns.items() if term not in terms}, **metrics}
