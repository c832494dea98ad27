"""The command line, run in the process of the tests."""

import sys
import warnings

import pytest

from gradveil.cli import main


@pytest.fixture
def gradveil_command(monkeypatch, capsys):
    """Run the command line in this process; returns exit code, stdout and stderr."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main sets its own
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["gradveil", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return run
