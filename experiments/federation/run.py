"""Accuracy by round under each defense: MNIST among 100 clients, CIFAR-10 among 1,000.

    GRADVEIL_DATA=/path/to/data python experiments/federation/run.py [SETTING]...   # goes on where it stopped
    python experiments/federation/run.py --smoke [SETTING]...    # two rounds of everything, nothing is kept
    python experiments/federation/run.py --page                  # curves.html from results.jsonl

Results are appended to results.jsonl, one line a training; nothing there is ever edited. A training that was
interrupted goes on from its checkpoint in checkpoints/, which is removed when its line is written.
"""

import argparse
import dataclasses
import json
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import gradveil
from gradveil import data, models
from gradveil.audit.store import JsonLines, slug
from gradveil.data import Dataset
from gradveil.federation import RoundRecord, Training, train
from gradveil.federation.checkpoint import FILE as CHECKPOINT
from gradveil.federation.job import performance_maintenance
from gradveil.registry import parse_spec
from gradveil.report import curves

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
CHECKPOINTS = HERE / "checkpoints"
CONFIG: dict[str, Any] = json.loads((HERE / "config.json").read_text())
SEED = CONFIG["seed"]
Row = dict[str, Any]


def rows() -> dict[tuple[str, str], Row]:
    """What is there already, by setting and defense."""
    return {(row["setting"], row["defense"]): row for row in JsonLines(RESULTS).rows}


def rounded(value: float, digits: int) -> float | None:
    """For JSON, which has no word for NaN."""
    return round(value, digits) if math.isfinite(value) else None


def build(settings: Row, dataset: Dataset) -> gradveil.Task:
    name, parameters = parse_spec(settings["model"])
    shape, classes = dataset.train.input_shape, len(dataset.classes)
    model = models.create(name, input_shape=shape, classes=classes, seed=SEED, **parameters)
    scale = {key: shape[0] * [settings[key]] for key in ("mean", "std") if key in settings}
    return gradveil.Task(model, input_shape=shape, classes=classes, **scale)


def run(setting: str, spec: str, dataset: Dataset, rounds: int | None, folder: Path) -> Row:
    settings = CONFIG["settings"][setting]
    training = Training(**settings["training"], evaluate_every=settings["evaluate_every"], seed=SEED)
    if rounds is not None:
        training = dataclasses.replace(training, rounds=rounds)
    started = time.perf_counter()

    def watch(record: RoundRecord) -> None:
        if record.accuracy is not None:
            taken = time.perf_counter() - started
            print(f"  round {record.round + 1}: accuracy {record.accuracy:.3f}, {taken:.0f} s", flush=True)

    task, defense, begun = build(settings, dataset), gradveil.defense(spec), (folder / CHECKPOINT).exists()
    result = train(task, dataset, defense, training, watch=watch, checkpoint=folder, resume=begun)
    return {
        "setting": setting,
        "defense": spec,
        "gradveil": gradveil.__version__,
        "model": settings["model"],
        "dataset": f"{dataset.name}, {len(dataset.train)} training and {len(dataset.test)} test images",
        "training": {**settings["training"], "seed": SEED},
        "accuracy": result.accuracy,
        "loss": rounded(result.loss, 4),
        "history": result.history,
        "losses": [rounded(record.loss, 4) for record in result.rounds],
        "execution": result.execution,
        "round_seconds": rounded(result.round_seconds, 4),
        "defense_share": rounded(result.defense_seconds / result.round_seconds, 4),
        "upload_bytes": rounded(result.upload_bytes, 0),
        "download_bytes": rounded(result.download_bytes, 0),
        "diverged": result.diverged,
        "faults": result.fault_counts,
        "privacy": None if result.privacy is None else str(result.privacy),
    }


def page() -> Path:
    """All curves, a chart for each setting, and a table with PMM."""
    done, charts, table = rows(), [], []
    for setting, settings in CONFIG["settings"].items():
        found = {spec: row for (of, spec), row in done.items() if of == setting}
        if not found:
            continue
        lines = [curves.Curve(spec, [tuple(point) for point in row["history"]]) for spec, row in found.items()]
        charts.append(curves.lay_out(f"{setting}: accuracy on the test images", lines, percent=True))
        test = data.load(settings["dataset"]).test
        for spec, row in found.items():
            baseline = found.get("none")
            pmm = baseline and performance_maintenance(row["accuracy"], baseline["accuracy"], test)
            figures = [
                f"{row['accuracy']:.1%}",
                "-" if pmm is None else f"{pmm:.3f}",
                f"{row['upload_bytes'] or 0:,.0f}",
            ]
            table.append([f"{setting}: {spec}", *figures])
    columns = ["training", "accuracy", "PMM", "bytes up"]
    return curves.write(HERE / "curves.html", "Federated training under each defense", charts, columns, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help=f"of {', '.join(CONFIG['settings'])}; default: all")
    parser.add_argument("--smoke", action="store_true", help="two rounds of everything; nothing is kept")
    parser.add_argument("--page", action="store_true", help="write curves.html and do nothing else")
    parser.add_argument("--defense", help="only this one")
    arguments = parser.parse_args()
    if arguments.page:
        print(page())
        return
    torch.set_num_threads(1)
    for setting in arguments.settings or CONFIG["settings"]:
        if setting not in CONFIG["settings"]:
            sys.exit(f"expected one of {', '.join(CONFIG['settings'])}, got {setting}")
        settings = CONFIG["settings"][setting]
        dataset = data.load(settings["dataset"])
        for spec in settings.get("defenses", CONFIG["defenses"]):
            if arguments.defense not in (None, spec) or (not arguments.smoke and (setting, spec) in rows()):
                continue
            print(f"{setting} under {spec}", flush=True)
            if arguments.smoke:
                with tempfile.TemporaryDirectory() as folder:
                    row = run(setting, spec, dataset, 2, Path(folder))
            else:
                folder = CHECKPOINTS / slug(f"{setting}-{spec}")
                row = run(setting, spec, dataset, None, folder)
                JsonLines(RESULTS).append([row])
                shutil.rmtree(folder)
            goal = f" (goal: {settings['goal']})" if "goal" in settings else ""
            print(f"  accuracy {row['accuracy']:.4f}{goal}, {row['round_seconds']} s a round", flush=True)


if __name__ == "__main__":
    main()
