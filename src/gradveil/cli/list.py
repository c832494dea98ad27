"""``gradveil list``."""

import json
from typing import Annotated

import typer

from gradveil.cli._console import Json, Plugins, print_result, stdout
from gradveil.cli._index import LISTS, read_lists
from gradveil.core.errors import ParameterError


def list_methods(
    kind: Annotated[str | None, typer.Argument(help="One of the lists.", show_default="all")] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Print the lists of defenses, attacks, datasets, models and metrics, or one of them: source and parameters."""
    if kind is not None and kind not in LISTS:
        raise ParameterError(f"list: expected one of {', '.join(LISTS)}, got {kind!r}")
    chosen = {name: rows for name, rows in read_lists(plugin or ()).items() if kind in (None, name)}
    if as_json:
        stdout.print_json(json.dumps(chosen))
        return
    for title, rows in chosen.items():
        stdout.print(f"[bold]{title}[/]")
        width = max(len(row["name"]) for row in rows)
        for row in rows:
            parameters = ", ".join(f"{key}={value}" for key, value in row["parameters"].items())
            words = [row["summary"].rstrip("."), f"({parameters})" if parameters else "", f"[{row['source']}]"]
            print_result(f"  {row['name']:{width}}  {' '.join(filter(None, words))}")
