"""The report on an audit folder: an HTML page, a contact sheet, tables, figures, and a verdict in plain sentences."""

from gradveil.core.extras import missing

try:
    from gradveil.report.export import CONDITIONS, Refusal, figures, refusal
    from gradveil.report.page import raised_flags, summary, verdict, write
    from gradveil.report.read import Audit, read
except ModuleNotFoundError as error:
    raise missing("gradveil.report", error.name or "more", "audit") from error

__all__ = [
    "CONDITIONS",
    "Audit",
    "Refusal",
    "figures",
    "raised_flags",
    "read",
    "refusal",
    "summary",
    "verdict",
    "write",
]
