"""The report of an audit: an HTML page, a contact sheet and a verdict in words, from the files on disk."""

from gradveil.report.page import raised_flags, summary, verdict, write

__all__ = ["raised_flags", "summary", "verdict", "write"]
