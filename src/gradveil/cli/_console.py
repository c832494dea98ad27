"""How the command line talks: messages for people on stderr, results on stdout."""

import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

# Separate, so that the output of `--json` can be piped.
stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)

INTERRUPTED = 130

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


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(42.3), duration(600), duration(9000)
    ('42 s', '10 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class ProgressLines:
    """Progress for log files: a line when a piece ends, and between that one every half minute.

    Args:
        say: prints a line.
        every: seconds between lines while no piece ends.
        apart: seconds between lines at least, so that many short pieces do not fill a log.
        clock: tells the time in seconds.

    Example:
        >>> lines = ProgressLines(print, clock=iter([0.0, 1.0, 40.0]).__next__)
        >>> lines.show("idlg against none", 0.1, None)
        >>> lines.show("idlg against none", 0.5, 39.5)
         50 %, about 40 s left: idlg against none
    """

    def __init__(
        self,
        say: Callable[[str], None] = say,
        *,
        every: float = 30.0,
        apart: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._every, self._apart, self._clock = say, every, apart, clock
        self._last = clock()

    def show(self, words: str, share: float, left: float | None, *, ended: bool = False) -> None:
        """Print a line, if it is time for one.

        Args:
            words: what is being done.
            share: how much of the whole is done, in [0, 1].
            left: seconds left; None: not known yet.
            ended: whether a piece has just ended.
        """
        now = self._clock()
        if now - self._last >= (self._apart if ended else self._every):
            self._last = now
            remaining = "" if left is None else f", about {duration(left)} left"
            self._say(f"{share:4.0%}".replace("%", " %") + f"{remaining}: {words}")


def progress_bar(*figures: TextColumn | MofNCompleteColumn) -> Progress:
    """A bar with figures and the time left; nothing is drawn when stderr is not a terminal."""
    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), words, BarColumn(), *figures, TimeRemainingColumn())
    return Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
