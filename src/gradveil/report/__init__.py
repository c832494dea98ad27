"""The report on an audit folder: an HTML page, a contact sheet and a verdict in plain sentences."""

from gradveil.core.extras import missing

try:
    from gradveil.report.page import raised_flags, summary, verdict, write
    from gradveil.report.read import Audit, read
except ModuleNotFoundError as error:
    raise missing("gradveil.report", error.name or "more", "audit") from error

__all__ = ["Audit", "raised_flags", "read", "summary", "verdict", "write"]
