"""``gradveil report``: its options."""

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli._console import FailIf, Json, Plugins


def report(
    folder: Annotated[Path, typer.Argument(help="An audit's folder, finished or not.", show_default=False)],
    fail_if: FailIf = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Write the report on an audit again, with its tables as CSV and LaTeX, from its rows alone."""
    from gradveil.cli import _report

    _report.run(folder, fail_if or [], plugin or [], as_json=as_json)
