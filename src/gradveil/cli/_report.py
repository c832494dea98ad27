"""``gradveil report``: what it does, and how ``gradveil audit`` ends."""

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from gradveil import report
from gradveil.cli._console import print_result, say, stdout
from gradveil.core import plugins


def run(folder: Path, fail_if: Sequence[str], plugin_files: Sequence[str], *, as_json: bool) -> None:
    """Run the command."""
    plugins.load_files(plugin_files)
    show(folder, fail_if, as_json=as_json)


def show(folder: Path, fail_if: Sequence[str], *, as_json: bool) -> None:
    """Write the report on a folder, print its verdict, and exit with the code of a refusal if a gate is not passed."""
    audit = report.read(folder)
    refused = report.refusal(audit, fail_if)  # first, so that a wrong condition is refused before anything is written
    page = report.write(audit)
    figures = report.figures(audit)
    for sentence in figures["verdict"]:
        say(sentence)
    if as_json:
        refusal = refused and {"code": refused.code, "reason": refused.reason}
        stdout.print_json(json.dumps({"report": str(page), **figures, "refused": refusal}))
    else:
        print_result(f"report: {page}")
    if refused:
        say(f"refused (--fail-if {' --fail-if '.join(fail_if)}): {refused.reason}")
        raise typer.Exit(refused.code)
