"""``gradveil data``: list and get."""

import dataclasses
import json
from typing import Annotated

import typer

from gradveil.cli._console import Json, print_result, stderr, stdout

app = typer.Typer(
    help="Data sets and metric weights: what is available here, and how to get the rest.", no_args_is_help=True
)


@app.command("list")
def data_list(as_json: Json = False) -> None:
    """What is here, where it was found, and how to get the rest."""
    from gradveil import data as datasets

    rows = [
        dataclasses.asdict(status) | {"found": str(status.found) if status.found else None}
        for status in datasets.status()
    ]
    if as_json:
        stdout.print_json(json.dumps(rows))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        state = f"found: {row['found']}" if row["found"] else row["how"]
        print_result(f"{row['name']:{width}}  {row['summary']} [{row['licence']}]")
        print_result(f"{'':{width}}  {state}")


@app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="Name of a data set or of weights.")]) -> None:
    """Fetch, check, convert and cache a data set or metric weights."""
    from gradveil import data as datasets

    with stderr.status(f"fetching {name}") as status:
        path = datasets.fetch(name, progress=lambda words: status.update(f"{name}: {words}"))
    print_result(str(path))
