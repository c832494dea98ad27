"""How the command line talks: words for people on stderr, results on stdout."""

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

# Words for people go to stderr, results to stdout, so that `--json` can be piped.
talk = Console(stderr=True, highlight=False)
out = Console(highlight=False)

INTERRUPTED = 130
NOTHING_TO_RESUME = "note: there is nothing to go on with in {}; this is a new run"

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.", show_default="off")]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="A Python file that registers methods of your own, repeatable; it runs with all your rights. "
        "With --resume it has to be named again.",
        show_default="none",
    ),
]


def say(words: str) -> None:
    """Words for a person; data in them is neither read as markup nor broken into lines, so it can be copied."""
    talk.print(words, markup=False, soft_wrap=True)


def print_result(words: str) -> None:
    """A line of the result, likewise."""
    out.print(words, markup=False, soft_wrap=True)


def progress_bar(*figures: TextColumn | MofNCompleteColumn) -> Progress:
    """A bar with figures and the time left; nothing is drawn when stderr is not a terminal."""
    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), words, BarColumn(), *figures, TimeRemainingColumn())
    return Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal)
