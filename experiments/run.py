"""Run an experiment: every case of its config that has no row yet, one after the other.

    GRADVEIL_DATA=/path/to/data python experiments/run.py NAME [--only TEXT]     # goes on where it was
    python experiments/run.py NAME --list                                        # what is finished and what is missing
    python experiments/run.py NAME --table                                       # tables of the rows; runs nothing
    python experiments/run.py NAME --plot                                        # pictures of the rows; runs nothing
    python experiments/run.py NAME --set victims=2 --results /tmp/trial.jsonl    # a trial with other settings

NAME is a folder beside this file. Its config.json holds `settings` of every case and `groups` of cases: every combination
of the values in a group's `grid` is a case (a value that is an object brings several settings; "@NAME" stands for one of
`lists`). A case is a flat object with a `name` of its own and a `kind`, which kinds.py or the folder's extension.py
measures. A finished case is a line of results.jsonl, or of the file that its setting `results` names; no line is ever
edited. `older` says how rows are named that are older than this runner, `gone` which rows are of cases that are no
longer in the config. `tables` and `plots` are explained in tables.py.
"""

import argparse
import json
import math
import runpy
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from kinds import KINDS, Row, Session, load
from tables import View, plot, table

import gradveil
from gradveil.audit.store import JsonLines
from gradveil.data.embedded import SOURCE as EMBEDDED
from gradveil.errors import GradveilError, ParameterError

HERE = Path(__file__).parent
PROGRESS_SECONDS = 10.0


class Experiment:
    """A folder's config, its cases by name, and the rows that are there.

    Args:
        folder: of the experiment.
        results: a file for all rows of a trial; None: the folder's own.
        changes: settings of a trial, in place of those of the config.
    """

    def __init__(self, folder: Path, results: Path | None = None, changes: Mapping[str, Any] | None = None) -> None:
        self.folder, self.results = folder, results
        self.config = json.loads((folder / "config.json").read_text())
        extension = folder / "extension.py"
        self.extension = runpy.run_path(str(extension), run_name=folder.name) if extension.exists() else {}
        self.cases: dict[str, Row] = {}
        for case in self._expanded():
            if self.cases.setdefault(case["name"], case) != case:
                raise ParameterError(f"{folder.name}: expected names of their own, got two cases {case['name']!r}")
        for key, value in (changes or {}).items():
            self._change(key, value)
        files = dict.fromkeys(map(self.file_of, self.cases.values()))
        self.rows = {self.name_of(row): row for path in files for row in JsonLines(path).rows}

    def _expanded(self) -> Iterator[Row]:
        for group in self.config["groups"]:
            axes = [
                [value if isinstance(value, dict) else {axis: value} for value in self._listed(values)]
                for axis, values in group.get("grid", {}).items()
            ]
            for values in product(*axes):
                own = {key: value for part in values for key, value in part.items()}
                case = {**self.config["settings"], **group, **own}
                case.pop("grid", None)
                case["name"] = case["name"].format_map(case) if "name" in case else _name(case["kind"], own)
                yield case

    def _listed(self, values: Any) -> list[Any]:
        return self.config["lists"][values[1:]] if isinstance(values, str) else values

    def _change(self, key: str, value: Any) -> None:
        *path, last = key.split(".")
        found = False
        for name, case in self.cases.items():
            self.cases[name] = changed = json.loads(json.dumps(case))
            for step in path:
                changed = changed.get(step, {})
            if last in changed:
                changed[last], found = value, True
        if not found:
            raise ParameterError(f"{self.folder.name}: expected a setting that some case has, got {key!r}")

    def file_of(self, case: Row) -> Path:
        """Where the row of a case is or will be."""
        return self.results or self.folder / case.get("results", "results.jsonl")

    def name_of(self, row: Row) -> str:
        """The case of a row."""
        if "name" in row:
            return row["name"]
        if isinstance(row.get("case"), dict):
            return _name(row["part"], row["case"])
        return self.config["older"].format_map(row)

    @property
    def views(self) -> dict[str, View]:
        """What tables show, in the order of the config: rows, with the settings of their case in today's words."""
        found = {name: View.of({**self.rows[name], **case}) for name, case in self.cases.items() if name in self.rows}
        for view in found.values() if "derive" in self.extension else ():
            view.update(self.extension["derive"](view))
        return found

    def run(self, only: str = "") -> int:
        """Run what is missing; how many cases were refused."""
        missing = [case for case in self.cases.values() if case["name"] not in self.rows and only in json.dumps(case)]
        kinds = {**KINDS, **self.extension.get("KINDS", {})}
        refused, first = 0, time.perf_counter()
        for number, case in enumerate(missing):
            print(f"[{number + 1} of {len(missing)}] {case['name']}", flush=True)
            path, started = self.file_of(case), time.perf_counter()
            session = Session(self.rows, path.parent, _teller(started))
            try:
                if self.results is None and "dataset" in case and load(case["dataset"]).source == EMBEDDED:
                    raise GradveilError("only the embedded digits are there; set GRADVEIL_DATA, or give --results")
                result = kinds[case["kind"]](case, session)
            except GradveilError as error:  # no row, so that a later version tries again
                refused += 1
                print(f"  refused: {error}", flush=True)
                continue
            now = time.perf_counter()
            versions = {"gradveil": gradveil.__version__, "torch": torch.__version__}
            row = plain({**case, **versions, **result, "seconds": round(now - started, 1)})
            JsonLines(path).append([row])
            self.rows[case["name"]] = row
            shutil.rmtree(session.checkpoints(case), ignore_errors=True)
            left = (now - first) / (number + 1) * (len(missing) - number - 1)
            told = [f"{key} {row[key]}" for key in ("accuracy", "psnr", "seconds") if key in row]
            print(f"  {', '.join(told)}; about {left / 60:.0f} min left", flush=True)
        return refused


def plain(value: Any) -> Any:
    """As JSON takes it: six significant digits, no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _name(kind: str, settings: Row) -> str:
    return ", ".join([kind, *(f"{key} {value}" for key, value in settings.items())])


def _teller(started: float) -> Any:
    last = started

    def tell(done: int, steps: int, *_: float) -> None:
        nonlocal last
        now = time.perf_counter()
        if done and now - last > PROGRESS_SECONDS:
            last = now
            print(f"  {done} of {steps}, {(now - started) / done * (steps - done):.0f} s left", file=sys.stderr)

    return tell


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(path.parent.name for path in HERE.glob("*/config.json")))
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose JSON holds this text")
    parser.add_argument("--list", action="store_true", help="say what is finished and what is missing")
    parser.add_argument("--table", action="store_true", help="print the tables of the rows that are there")
    parser.add_argument("--plot", action="store_true", help="draw the pictures of the rows that are there")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting, for a trial")
    parser.add_argument("--results", type=Path, metavar="FILE", help="where the rows of a trial go")
    given = parser.parse_args(words)
    if given.results and HERE in given.results.resolve().parents:
        parser.error(f"rows in {HERE} are of the cases of the configs; give --results a file somewhere else")
    if given.set and not given.results:
        parser.error("a trial with other settings must not go into the kept rows; give --results FILE")
    torch.set_num_threads(1)
    try:
        experiment = Experiment(HERE / given.name, given.results, dict(map(_setting, given.set)))
        if given.list:
            say = [f"{'finished' if name in experiment.rows else 'missing'}  {name}" for name in experiment.cases]
            say += [f"gone      {name}" for name in experiment.rows if name not in experiment.cases]
            print(
                "\n".join([*say, f"{sum(one.startswith('missing') for one in say)} of {len(experiment.cases)} missing"])
            )
        elif given.table:
            tables = [table(spec, experiment.views) for spec in experiment.config.get("tables", [])]
            print(
                "\n".join([*experiment.config.get("heading", []), *(line for one in tables for line in one)]).rstrip()
            )
        elif given.plot:
            for spec in experiment.config.get("plots", []):
                print(plot(spec, experiment.views, HERE.parent))
        else:
            return 1 if experiment.run(given.only) else 0
    except GradveilError as error:
        parser.error(str(error))
    return 0


def _setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


if __name__ == "__main__":
    sys.exit(main())
