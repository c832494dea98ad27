"""The report on an audit folder: an HTML page, a contact sheet and a verdict in plain sentences."""

from gradveil.report.page import raised_flags, summary, verdict, write
from gradveil.report.read import Audit, read

__all__ = ["Audit", "raised_flags", "read", "summary", "verdict", "write"]
