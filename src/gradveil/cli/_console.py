"""How the command line talks: messages for people on stderr, results on stdout."""

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

# Separate, so that the output of `--json` can be piped.
stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)

INTERRUPTED = 130
NOTHING_TO_RESUME = "note: there is nothing to resume in {}; this is a new run"

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.", show_default="off")]
FailIf = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if",
        metavar="WHAT",
        help="leaked, identified or labels, repeatable: exit with code 3 if that happens under any defense, and with 4 "
        "if it does not but protection is not shown or the audit is not complete.",
        show_default="never",
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="A Python file that registers methods of your own, repeatable; it runs with your full privileges. "
        "A run that is resumed needs it again.",
        show_default="none",
    ),
]


def say(words: str) -> None:
    """Print a message for people; it is neither parsed as markup nor wrapped, so that it can be copied."""
    stderr.print(words, markup=False, soft_wrap=True)


def print_result(words: str) -> None:
    """Print a line of the result, in the same way."""
    stdout.print(words, markup=False, soft_wrap=True)


def progress_bar(*figures: TextColumn | MofNCompleteColumn) -> Progress:
    """A bar with figures and the time left; nothing is drawn when stderr is not a terminal."""
    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), words, BarColumn(), *figures, TimeRemainingColumn())
    return Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
