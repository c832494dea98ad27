"""Run an experiment: every case of its config that has no row yet, one after another.

    GRADVEIL_DATA=/path/to/data python experiments/run.py NAME [--only TEXT]    # continues where it stopped
    python experiments/run.py NAME --list      # shows what is finished and what is missing
    python experiments/run.py NAME --table     # prints tables of the rows; runs nothing
    python experiments/run.py NAME --plot      # draws plots of the rows; runs nothing
    python experiments/run.py NAME --set '{"victims": 2, "training": {"rounds": 2}}' --results /tmp/trial.jsonl

NAME is a folder next to this file. Its config.json holds the `settings` shared by all cases and `groups` of cases:
every combination of the values in a group's `grid` is a case. A value that is an object sets several settings, "@NAME"
stands for an entry of `lists`, and a string may refer to other settings in braces. A case is a flat object with a
unique `name` and a `kind`, which kinds.py or the folder's extension.py measures. A finished case is a line of
results.jsonl, or of the file that its setting `results` names; no line is ever edited. `older` gives the names of rows
that are older than this runner, and `gone` lists the rows of cases that are no longer in the config. `tables` and
`plots` are described in tables.py. Kept rows come from the data that data.json pins; see pinned.py.
"""

import argparse
import json
import runpy
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch

import gradveil
import pinned
from gradveil.audit.store import JsonLines
from gradveil.core.errors import GradveilError, ParameterError
from kinds import KINDS, Row, Session
from tables import View, plot, table

HERE = Path(__file__).resolve().parent
PROGRESS_SECONDS = 10.0


class Experiment:
    """An experiment's config, its cases by name and its finished rows.

    Args:
        folder: the folder of the experiment.
        results: a file for the rows of a trial, or None to use the folder's own files.
        changes: settings of a trial, which replace those of the cases that have them.
    """

    def __init__(self, folder: Path, results: Path | None = None, changes: Mapping[str, Any] | None = None) -> None:
        self.folder, self.results = folder, results
        self.config = json.loads((folder / "config.json").read_text())
        self.extension = _extension(folder / "extension.py")
        self.cases: dict[str, Row] = {}
        for case in self._expanded():
            if self.cases.setdefault(case["name"], case) != case:
                raise ParameterError(
                    f"{folder.name}: two cases are called {case['name']!r}; give each a name of its own"
                )
        for key, value in (changes or {}).items():
            affected = [case for case in self.cases.values() if key in case]
            if not affected:
                raise ParameterError(f"{folder.name}: expected a setting that some case has, got {key!r}")
            for case in affected:
                case[key] = {**case[key], **value} if isinstance(value, dict) else value
        files = dict.fromkeys(map(self.file_of, self.cases.values()))
        self.rows = {self.name_of(row): row for path in files for row in JsonLines(path, finite=False).rows}

    def _expanded(self) -> Iterator[Row]:
        for group in self.config["groups"]:
            axes = []
            for key, values in group.get("grid", {}).items():
                listed = self.config["lists"][values[1:]] if isinstance(values, str) else values
                axes.append([value if isinstance(value, dict) else {key: value} for value in listed])
            for values in product(*axes):
                own = {key: value for part in values for key, value in part.items()}
                case = {"name": "", **self.config["settings"], **group, **own}
                case.pop("grid", None)
                case = {key: text.format_map(case) if isinstance(text, str) else text for key, text in case.items()}
                yield {**case, "name": case["name"] or _name(case["kind"], own)}

    def file_of(self, case: Row) -> Path:
        """The file that holds, or will hold, the row of a case."""
        return self.results or self.folder / case.get("results", "results.jsonl")

    def name_of(self, row: Row) -> str:
        """The name of the case that a row belongs to."""
        if "name" in row:
            return row["name"]
        if isinstance(row.get("case"), dict):
            return _name(row["part"], row["case"])
        return self.config["older"].format_map(row)

    @cached_property
    def views(self) -> dict[str, View]:
        """The rows that tables show, in the order of the config, with the current settings of their cases."""
        views = {}
        for name in [name for name in (*self.cases, *self.config.get("gone", [])) if name in self.rows]:
            view = View.of({**self.rows[name], **self.cases.get(name, {"name": name})})
            views[name] = View({**view, **self.extension.get("derive", dict)(view)})
        for other in self.config.get("with", []):
            views |= Experiment(HERE / other).views
        return views

    def listing(self) -> Iterator[str]:
        """Lines that say which cases are finished, missing or gone."""
        states = {name: "finished" if name in self.rows else "missing" for name in self.cases}
        yield from (f"{state:8}  {name}" for name, state in states.items())
        yield from (f"gone      {name}" for name in self.rows if name not in states)
        yield f"{list(states.values()).count('missing')} of {len(states)} missing"

    def run(self, only: str = "") -> int:
        """Run the missing cases and return how many of them were refused."""
        kinds = {**KINDS, **self.extension.get("KINDS", {})}
        missing = [case for case in self.cases.values() if case["name"] not in self.rows and only in case["name"]]
        refused, begun = 0, time.perf_counter()
        for number, case in enumerate(missing, start=1):
            print(f"[{number} of {len(missing)}] {case['name']}", flush=True)
            path, started = self.file_of(case), time.perf_counter()
            session = Session(path.parent, _progress_printer(started))
            provenance = {"gradveil": gradveil.__version__, "torch": torch.__version__}
            try:
                if "dataset" in case:
                    provenance["data"] = repr(pinned.load(case["dataset"]))
                    if self.results is None:
                        pinned.check(case["dataset"])
                result = kinds[case["kind"]](case, session)
            except GradveilError as error:  # write no row, so that a later version tries again
                refused += 1
                print(f"  refused: {error}", flush=True)
                continue
            now = time.perf_counter()
            row = json_ready({**case, **provenance, **result, "seconds": round(now - started, 1)})
            JsonLines(path, finite=False).append([row])
            self.rows[case["name"]] = row
            shutil.rmtree(session.checkpoints(case), ignore_errors=True)
            seconds_left = (now - begun) / number * (len(missing) - number)
            names = [name for name in ("accuracy", "median_psnr", "seconds") if name.removeprefix("median_") in row]
            summary = [f"{name} {View(row)[name]:.4g}" for name in names]
            print(f"  {', '.join(summary)}; about {seconds_left / 60:.0f} min left", flush=True)
        return refused


def json_ready(row: Row) -> Row:
    """The row as it is written: six significant digits, null instead of NaN and infinity."""
    digits = {"parse_float": lambda text: float(f"{float(text):.6g}"), "parse_constant": lambda _: None}
    return json.loads(json.dumps(row), **digits)


@cache
def _extension(path: Path) -> Mapping[str, Any]:
    return runpy.run_path(str(path), run_name=path.parent.name) if path.exists() else {}


def _name(kind: str, settings: Row) -> str:
    return ", ".join([kind, *(f"{key} {value}" for key, value in settings.items())])


def _progress_printer(started: float) -> Callable[..., None]:
    last_printed = started

    def print_progress(done: int, steps: int, *_: float) -> None:
        nonlocal last_printed
        now = time.perf_counter()
        if done and now - last_printed > PROGRESS_SECONDS:
            last_printed = now
            print(f"  {done} of {steps}, {(now - started) / done * (steps - done):.0f} s left", file=sys.stderr)

    return print_progress


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(path.parent.name for path in HERE.glob("*/config.json")))
    parser.add_argument("--only", default="", metavar="TEXT", help="run only cases with this text in their names")
    for action in ("list", "table", "plot"):
        parser.add_argument(f"--{action}", action="store_true")
    parser.add_argument("--set", type=json.loads, default={}, metavar="JSON", help="settings to change for a trial")
    parser.add_argument("--results", type=Path, metavar="FILE", help="file for the rows of a trial")
    arguments = parser.parse_args(argv)
    if arguments.results and HERE in arguments.results.resolve().parents:
        parser.error(f"files in {HERE} hold only the rows of configured cases; give --results a file somewhere else")
    if arguments.set and not arguments.results:
        parser.error("a trial with other settings must not go into the kept rows; give --results FILE")
    torch.set_num_threads(1)
    try:
        experiment = Experiment(HERE / arguments.name, arguments.results, arguments.set)
    except GradveilError as error:
        parser.error(str(error))
    config = experiment.config
    if arguments.list:
        print("\n".join(experiment.listing()))
    elif arguments.table:
        tables = [line for spec in config["tables"] for line in table(spec, experiment.views)]
        print("\n".join([*config.get("heading", []), *tables]).rstrip())
    elif arguments.plot:
        print("\n".join(str(plot(spec, experiment.views, HERE.parent)) for spec in config.get("plots", [])))
    elif experiment.run(arguments.only):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
