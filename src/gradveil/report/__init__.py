"""The report of an audit: an HTML page, a contact sheet and a verdict in words, from the files on disk."""

from gradveil.report.page import raised_flags, summary, verdict, write
from gradveil.report.read import Audit, read

__all__ = ["Audit", "raised_flags", "read", "summary", "verdict", "write"]
