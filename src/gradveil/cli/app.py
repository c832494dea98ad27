"""All commands together."""

import sys
import warnings
from typing import Annotated

import typer

import gradveil
from gradveil._version import __version__
from gradveil.cli import audit, data, report, train
from gradveil.cli import list as listing
from gradveil.cli._console import print_result, say, stderr
from gradveil.core.errors import GradveilError

app = typer.Typer(help=gradveil.__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        print_result(f"gradveil {__version__}")
        raise typer.Exit


@app.callback(help=gradveil.__doc__)
def _common(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version.", show_default=False
        ),
    ] = False,
) -> None: ...


app.command()(audit.audit)
app.command()(report.report)
app.command()(train.train)
app.command("list")(listing.list_methods)
app.add_typer(data.app, name="data")


def run() -> None:
    """Run the command line; errors meant for the user come without a traceback."""
    warnings.showwarning = lambda message, *_rest: say(f"note: {message}")
    try:
        app()
    except GradveilError as error:
        stderr.print("[red]error:[/]", end=" ")
        say(str(error))
        sys.exit(2)
