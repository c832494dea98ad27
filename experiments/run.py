"""Run an experiment: every case of its config that has no row yet, one after the other.

    GRADVEIL_DATA=/path/to/data python experiments/run.py NAME [--only TEXT]    # goes on where it was
    python experiments/run.py NAME --list      # what is finished and what is missing
    python experiments/run.py NAME --table     # tables of the rows; runs nothing
    python experiments/run.py NAME --plot      # pictures of the rows; runs nothing
    python experiments/run.py NAME --set '{"victims": 2, "training": {"rounds": 2}}' --results /tmp/trial.jsonl

NAME is a folder beside this file. Its config.json holds `settings` of every case and `groups` of cases: every
combination of the values in a group's `grid` is a case. A value that is an object brings several settings, "@NAME"
stands for one of `lists`, and a text may name other settings in braces. A case is a flat object with a `name` of its
own and a `kind`, which kinds.py or the folder's extension.py measures. A finished case is a line of results.jsonl, or
of the file that its setting `results` names; no line is ever edited. `older` says how rows are named that are older
than this runner, `gone` which rows are of cases that are no longer in the config. `tables` and `plots`: see tables.py.
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
from gradveil.audit.store import JsonLines
from gradveil.core.errors import DataError, GradveilError, ParameterError
from gradveil.data.loader import EMBEDDED_SOURCE
from kinds import KINDS, Row, Session, load
from tables import View, plot, table

HERE = Path(__file__).resolve().parent
PROGRESS_SECONDS = 10.0


class Experiment:
    """A folder's config, its cases by name, and the rows that are there.

    Args:
        folder: of the experiment.
        results: a file for the rows of a trial; None: the folder's own.
        changes: settings of a trial, in place of those that cases have.
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
            having = [case for case in self.cases.values() if key in case]
            if not having:
                raise ParameterError(f"{folder.name}: expected a setting that some case has, got {key!r}")
            for case in having:
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
        """Where the row of a case is or will be."""
        return self.results or self.folder / case.get("results", "results.jsonl")

    def name_of(self, row: Row) -> str:
        """The case of a row."""
        if "name" in row:
            return row["name"]
        if isinstance(row.get("case"), dict):
            return _name(row["part"], row["case"])
        return self.config["older"].format_map(row)

    @cached_property
    def views(self) -> dict[str, View]:
        """What tables show, in the order of the config: the rows, with the settings of their cases in today's words."""
        found = {}
        for name in [name for name in (*self.cases, *self.config.get("gone", [])) if name in self.rows]:
            view = View.of({**self.rows[name], **self.cases.get(name, {"name": name})})
            found[name] = View({**view, **self.extension.get("derive", dict)(view)})
        for other in self.config.get("with", []):
            found |= Experiment(HERE / other).views
        return found

    def listing(self) -> Iterator[str]:
        """What is finished, missing and gone."""
        states = {name: "finished" if name in self.rows else "missing" for name in self.cases}
        yield from (f"{state:8}  {name}" for name, state in states.items())
        yield from (f"gone      {name}" for name in self.rows if name not in states)
        yield f"{list(states.values()).count('missing')} of {len(states)} missing"

    def run(self, only: str = "") -> int:
        """Run what is missing; how many cases were refused."""
        kinds = {**KINDS, **self.extension.get("KINDS", {})}
        missing = [case for case in self.cases.values() if case["name"] not in self.rows and only in case["name"]]
        refused, first = 0, time.perf_counter()
        for number, case in enumerate(missing, start=1):
            print(f"[{number} of {len(missing)}] {case['name']}", flush=True)
            path, started = self.file_of(case), time.perf_counter()
            session = Session(path.parent, _teller(started))
            about = {"gradveil": gradveil.__version__, "torch": torch.__version__}
            try:
                if "dataset" in case:
                    about["data"] = repr(load(case["dataset"]))
                    if self.results is None and EMBEDDED_SOURCE in about["data"]:
                        raise DataError("the rows are of more data than the embedded digits; set GRADVEIL_DATA")
                result = kinds[case["kind"]](case, session)
            except GradveilError as error:  # no row, so that a later version tries again
                refused += 1
                print(f"  refused: {error}", flush=True)
                continue
            now = time.perf_counter()
            row = plain({**case, **about, **result, "seconds": round(now - started, 1)})
            JsonLines(path, finite=False).append([row])
            self.rows[case["name"]] = row
            shutil.rmtree(session.checkpoints(case), ignore_errors=True)
            left = (now - first) / number * (len(missing) - number)
            names = [name for name in ("accuracy", "median_psnr", "seconds") if name.removeprefix("median_") in row]
            told = [f"{name} {View(row)[name]:.4g}" for name in names]
            print(f"  {', '.join(told)}; about {left / 60:.0f} min left", flush=True)
        return refused


def plain(row: Row) -> Row:
    """As JSON takes it: six significant digits, null in place of NaN and infinity."""
    digits = {"parse_float": lambda text: float(f"{float(text):.6g}"), "parse_constant": lambda _: None}
    return json.loads(json.dumps(row), **digits)


@cache
def _extension(path: Path) -> Mapping[str, Any]:
    return runpy.run_path(str(path), run_name=path.parent.name) if path.exists() else {}


def _name(kind: str, settings: Row) -> str:
    return ", ".join([kind, *(f"{key} {value}" for key, value in settings.items())])


def _teller(started: float) -> Callable[..., None]:
    told = [started]

    def tell(done: int, steps: int, *_: float) -> None:
        now = time.perf_counter()
        if done and now - told[-1] > PROGRESS_SECONDS:
            told.append(now)
            print(f"  {done} of {steps}, {(now - started) / done * (steps - done):.0f} s left", file=sys.stderr)

    return tell


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(path.parent.name for path in HERE.glob("*/config.json")))
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this text in their names")
    for what in ("list", "table", "plot"):
        parser.add_argument(f"--{what}", action="store_true")
    parser.add_argument("--set", type=json.loads, default={}, metavar="JSON", help="other settings, for a trial")
    parser.add_argument("--results", type=Path, metavar="FILE", help="where the rows of a trial go")
    given = parser.parse_args(words)
    if given.results and HERE in given.results.resolve().parents:
        parser.error(f"rows in {HERE} are of the cases of the configs; give --results a file somewhere else")
    if given.set and not given.results:
        parser.error("a trial with other settings must not go into the kept rows; give --results FILE")
    torch.set_num_threads(1)
    try:
        experiment = Experiment(HERE / given.name, given.results, given.set)
    except GradveilError as error:
        parser.error(str(error))
    config = experiment.config
    if given.list:
        print("\n".join(experiment.listing()))
    elif given.table:
        tables = [line for spec in config["tables"] for line in table(spec, experiment.views)]
        print("\n".join([*config.get("heading", []), *tables]).rstrip())
    elif given.plot:
        print("\n".join(str(plot(spec, experiment.views, HERE.parent)) for spec in config.get("plots", [])))
    elif experiment.run(given.only):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
