"""``gradveil train``: what it does."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Table

from gradveil import data as datasets
from gradveil.audit import read_config
from gradveil.audit.cases import build_task
from gradveil.audit.folder import is_model_file
from gradveil.audit.store import CONFIG, slug
from gradveil.cli._console import INTERRUPTED, print_result, progress_bar, say, stderr, stdout
from gradveil.cli._shared import default_model, how_to_resume, numbers, refuse_other_plugins, untrusted, with_target
from gradveil.core import plugins
from gradveil.core.errors import DataError, GradveilError, OutputError, ParameterError
from gradveil.core.folders import locked, prepare_folder, write_json
from gradveil.core.registry import parse_spec
from gradveil.defenses import create as create_defense
from gradveil.federation import ENGINES, RoundRecord, Training, TrainingResult
from gradveil.federation.checkpoint import FILE as CHECKPOINT
from gradveil.federation.digests import json_digest, model_file_digest
from gradveil.federation.job import performance_maintenance
from gradveil.federation.local import check_settings
from gradveil.report.curves import Curve, lay_out, sparkline
from gradveil.report.curves import write as write_curves
from gradveil.task import Task
from gradveil.update import LocalSteps

PIPE_WIDTH = 160
ROOMY_WIDTH = 120
CHECKPOINTS = "checkpoints"
MODEL_FILE = "model_file_digest"
PLUGIN_FILES = "plugin_files"
CONFIG_DIGEST = "digest"

Figures = dict[str, Any]


def run(options: Mapping[str, Any]) -> None:
    """Run the command; most options have the name of a setting of `_TrainSettings`."""
    plugins.load_files(options["plugin"] or ())
    context, output, resume = options["context"], options["output"], options["resume"]
    settings = _TrainSettings(**{field.name: options[field.name] for field in dataclasses.fields(_TrainSettings)})
    given = {name for name in vars(settings) if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"}
    dataset = with_target("train", settings.dataset, options["target"])
    model = settings.model if "model" in given else default_model(dataset, settings.model)
    settings = dataclasses.replace(settings, dataset=dataset, model=model)
    if output is None and resume:
        raise ParameterError("train: --resume needs --out, the folder that holds the checkpoints")
    if output is not None and resume and not (output / CONFIG).is_file():
        _refuse_ignored(settings, given, resume)
        raise OutputError(
            f"train: expected a folder that holds a training run, got {output}, which "
            f"{'holds none' if output.is_dir() else 'does not exist'}; leave --resume out to begin one, or "
            "correct --out"
        )
    if output is not None:
        prepare_folder(output, "train")
    with nullcontext() if output is None else locked(output, "train", "training run"):
        _train(settings, given, output, resume, options["as_json"])


def _train(settings: "_TrainSettings", given: set[str], output: Path | None, resume: bool, as_json: bool) -> None:
    """The command `train` in a folder that no other one writes into."""
    if output is not None:
        settings = _as_saved(settings, given, output, resume)
    _refuse_ignored(settings, given, resume)
    defenses = [create_defense(spec) for spec in settings.specs]
    training, task, loaded = settings.training(), *settings.load()
    check_settings(task, loaded, defenses, training, settings.execution)
    files = {MODEL_FILE: model_file_digest(settings.model), PLUGIN_FILES: plugins.loaded_files()}
    began_with = {**vars(settings), **files}
    began_with[CONFIG_DIGEST] = json_digest(began_with)
    engine = ENGINES.create(settings.engine)
    # Without checkpoints, a folder holds a training run when there is a result.
    checkpoints = output / CHECKPOINTS if output is not None and engine.checkpoints else None
    if output is not None and checkpoints is not None:
        write_json(output / CONFIG, began_with)
    torch.set_num_threads(_choose_threads(task.size))
    results: dict[str, TrainingResult] = {}
    try:
        for number, chosen in enumerate(defenses, 1):
            name = str(chosen) if len(defenses) == 1 else f"{chosen} ({number} of {len(defenses)})"
            with _live_training(name, training.rounds) as watch:
                options: dict[str, Any] = {"execution": settings.execution} if engine.executions else {}
                if checkpoints is not None:
                    place = checkpoints / slug(str(chosen))
                    options |= {"checkpoint": place, "resume": resume and (place / CHECKPOINT).exists()}
                    if resume and not options["resume"]:
                        say(f"note: there is no checkpoint of the training under {chosen}; it begins with round 1")
                results[str(chosen)] = engine.train(task, loaded, chosen, training, watch=watch, **options)
    except KeyboardInterrupt:
        if checkpoints is not None:
            say(f"stopped. Resume with: {how_to_resume('train', checkpoints.parent, settings.model)}")
        else:
            why = "there was no --out" if output is None else f"{engine.title} keeps no checkpoints"
            say(f"stopped; nothing was kept, because {why}")
        raise typer.Exit(INTERRUPTED) from None
    except GradveilError:
        if output is not None and checkpoints is not None and not resume and not any(checkpoints.rglob(CHECKPOINT)):
            (output / CONFIG).unlink()  # nothing began, so the folder stays free for the next try
        raise
    described = [_described(spec, result, results, loaded.test) for spec, result in results.items()]
    whole: dict[str, Any] = {"dataset": settings.dataset, "model": settings.model}
    whole |= described[0] if len(described) == 1 else {"trainings": described}
    table = _training_rows(results, described)
    if output is not None:
        write_json(output / CONFIG, began_with)
        write_json(output / "training.json", whole)
        page = _write_curves(output, f"{settings.model} on {settings.dataset}", results, table)
        say(f"plot: {page}")
    if as_json:
        stdout.print_json(json.dumps(whole))
        return
    for spec, result in results.items():
        if result.diverged is not None:
            say(f"note: the training under {spec} diverged in round {result.diverged + 1} and was stopped; lower --lr")
        for kind, count in result.fault_counts.items():
            say(f"note: under {spec}, {count} updates were left out: {kind}")
    _print_training_table(f"training {settings.model} on {settings.dataset}", results, table)
    for spec, result in results.items():
        if result.privacy is not None:
            whose = "" if len(results) == 1 else f" of {spec}"
            print_result(f"differential privacy{whose}: {result.privacy}")


@dataclasses.dataclass(frozen=True)
class _TrainSettings:
    """All that decides what a training command trains: the options of `train`, by their names."""

    dataset: str
    model: str
    defense: str
    compare: list[str] | None
    rounds: int
    clients: int
    clients_per_round: int | None
    batch_size: int
    lr: float
    momentum: float
    optimiser: str
    schedule: str
    partition: str
    local_epochs: int | None
    local_lr: float
    local_batch: int | None
    local_momentum: float
    evaluate_every: int | None
    execution: str
    engine: str
    seed: int
    device: str
    weights: str | None
    norms: str | None
    dropout: str
    mean: str | None
    std: str | None

    @property
    def specs(self) -> list[str]:
        """The defenses, each once; the undefended training comes first where others are compared with it."""
        asked = [self.defense, *(self.compare or [])]
        wanted = ["none", *asked] if len(asked) > 1 else asked
        return list(dict.fromkeys(str(create_defense(spec)) for spec in wanted))

    def training(self) -> Training:
        scheme, shares = parse_spec(self.partition)
        known = {"dirichlet": {"alpha"}, "classes": {"classes_per_client"}}.get(scheme, set())
        if shares.keys() - known:
            takes = ", ".join(known) or "no parameters"
            raise ParameterError(f"train: partition {scheme} takes {takes}, got {self.partition}")
        local = None
        if self.local_epochs is not None:
            local = LocalSteps(self.local_epochs, self.local_batch, self.local_lr, self.local_momentum)
        same = {field.name for field in dataclasses.fields(Training)} & vars(self).keys()
        asked = {name: getattr(self, name) for name in same}
        if self.evaluate_every is None:
            asked["evaluate_every"] = max(1, self.rounds // 10)
        return Training(**asked, scheme=scheme, local=local, **shares)

    def load(self) -> tuple[Task, datasets.Dataset]:
        name, parameters = parse_spec(self.dataset)
        loaded = datasets.load(name, **parameters)
        task = build_task(
            loaded,
            self.model,
            seed=self.seed,
            weights=None if self.weights is None else Path(self.weights),
            norms=self.norms,
            dropout=self.dropout,
            mean=numbers("train", "mean", self.mean),
            std=numbers("train", "std", self.std),
            device=self.device,
        )
        return task, loaded


def _as_saved(settings: _TrainSettings, given: set[str], folder: Path, resume: bool) -> _TrainSettings:
    """The settings; on resuming those that the folder was begun with, but more defenses may be compared."""
    path = folder / CONFIG
    if not resume and path.exists():
        raise OutputError(
            f"train: {folder} already holds a training run; continue with --resume or choose another --out"
        )
    if not resume and any((folder / CHECKPOINTS).rglob(CHECKPOINT)):
        raise OutputError(
            f"train: {folder} holds checkpoints of a training run without its {CONFIG}; choose another --out"
        )
    if not resume:
        return settings
    saved, asked = read_config(path), vars(settings)
    unknown = {*asked, MODEL_FILE, PLUGIN_FILES, CONFIG_DIGEST} ^ saved.keys()
    if unknown:
        raise DataError(
            f"{path}: expected the settings of a training run; missing or unknown: {', '.join(sorted(unknown))}; "
            "start a new one with another --out"
        )
    if saved.pop(CONFIG_DIGEST) != json_digest(saved):
        raise DataError(
            f"{path}: expected the settings that the training began with, got others (their digest does not fit); "
            "restore them or start a new training run with another --out"
        )
    began_with = saved.pop(MODEL_FILE)
    refuse_other_plugins("train", folder, saved.pop(PLUGIN_FILES))
    for name in asked:
        if name in given - {"compare"} and asked[name] != saved[name]:
            change = f"{name} was {saved[name]}, is {asked[name]}"
            raise OutputError(f"train: {folder} holds another training run: {change}; choose another --out")
    if "model" not in given and is_model_file(saved["model"]):
        raise untrusted("train", folder, saved["model"])
    settings = _TrainSettings(**{**saved, "compare": [*(saved["compare"] or []), *(settings.compare or [])]})
    if model_file_digest(settings.model) != began_with:
        raise OutputError(
            f"train: {folder} holds another training run: the file of the model {settings.model} has changed since; "
            "choose another --out, or restore the file"
        )
    return settings


def _refuse_ignored(settings: _TrainSettings, given: set[str], resume: bool) -> None:
    """Refuse options that would change nothing."""
    engine = ENGINES.create(settings.engine)
    if resume and not engine.checkpoints:
        raise ParameterError(f"train: {engine.title} keeps no checkpoints; leave --resume out or use --engine local")
    if "execution" in given and not engine.executions:
        raise ParameterError(
            f"train: {engine.title} runs its clients in its own way; leave --execution out or use --engine local"
        )
    local = [f"--{name.replace('_', '-')}" for name in ("local_lr", "local_batch", "local_momentum") if name in given]
    if settings.local_epochs is None and local:
        raise ParameterError(
            f"train: expected --local-epochs with {', '.join(local)}, because without it clients take no local steps; "
            "add it or leave them out"
        )


def _described(spec: str, result: TrainingResult, results: dict[str, TrainingResult], test: datasets.Split) -> Figures:
    """A training run as JSON."""
    figures: Figures = {
        field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "task"
    }
    figures["privacy"] = result.privacy and str(result.privacy)
    figures["epsilon"] = result.privacy and result.privacy.epsilon
    figures["rounds"] = [_finite(dataclasses.asdict(record)) for record in result.rounds]
    figures["faults"] = [dataclasses.asdict(fault) for fault in result.faults]
    undefended = results.get("none")
    figures["pmm"] = undefended and performance_maintenance(result.accuracy, undefended.accuracy, test)
    return {"defense": spec, **_finite(figures)}


def _finite(figures: Figures) -> Figures:
    """JSON has no word for NaN and infinity."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}


def _training_rows(results: dict[str, TrainingResult], described: list[Figures]) -> list[dict[str, str]]:
    """The cells of the table, by heading."""
    return [
        {
            "defense": spec,
            "accuracy": f"{result.accuracy:.1%}",
            "PMM": "-" if row["pmm"] is None else f"{row['pmm']:.3f}",
            "loss": f"{result.loss:.3f}",
            "seconds a round": f"{result.round_seconds:.3f}",
            "defense's share": f"{result.defense_seconds / result.round_seconds:.0%}"
            if result.defense_seconds >= 0
            else "-",
            "bytes up": f"{result.upload_bytes:,.0f}",
            "bytes down": f"{result.download_bytes:,.0f}",
        }
        for (spec, result), row in zip(results.items(), described, strict=True)
    ]


def _print_training_table(title: str, results: dict[str, TrainingResult], rows: list[dict[str, str]]) -> None:
    table = Table(title=title)
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "defense" else "right", overflow="fold")
    # A file or another program has no width of its own.
    console = stdout if stdout.is_terminal else Console(file=stdout.file, highlight=False, width=PIPE_WIDTH)
    roomy = console.width >= ROOMY_WIDTH
    if roomy:
        table.add_column("accuracy by round")
    for row, result in zip(rows, results.values(), strict=True):
        table.add_row(*row.values(), *([sparkline([accuracy for _, accuracy in result.history])] if roomy else []))
    console.print(table)


def _write_curves(folder: Path, title: str, results: dict[str, TrainingResult], rows: list[dict[str, str]]) -> Path:
    accuracy = [Curve(spec, result.history) for spec, result in results.items()]
    loss = [Curve(spec, [(r.round, r.loss) for r in result.rounds]) for spec, result in results.items()]
    charts = [
        lay_out("accuracy on the test examples", accuracy, percent=True),
        lay_out("training loss", loss, percent=False),
    ]
    cells = [list(row.values()) for row in rows]
    return write_curves(folder / "training.html", f"Training {title}", charts, list(rows[0]), cells)


@contextmanager
def _live_training(name: str, rounds: int) -> Iterator[Callable[[RoundRecord], None]]:
    """What a training run is doing: a bar on a terminal, else a line now and then."""
    started, first = time.perf_counter(), None
    accuracy = "not evaluated yet"
    with progress_bar(MofNCompleteColumn(), TextColumn("{task.fields[figures]}")) as bar:
        line = bar.add_task(name, total=rounds, figures="")

        def watch(record: RoundRecord) -> None:
            nonlocal accuracy, first
            first = record.round if first is None else first  # not 0 where a training run is resumed
            if record.accuracy is not None:
                accuracy = f"accuracy {record.accuracy:.1%}"
            done = record.round + 1
            pace = (done - first) / (time.perf_counter() - started)
            # After the last round the table says it; the one before is not its accuracy.
            shown = f"{accuracy}, " if done < rounds else ""
            figures = f"loss {record.loss:.3f}, {shown}{pace:.2g} rounds/s"
            bar.update(line, completed=done, figures=figures)
            if not stderr.is_terminal and (done == rounds or done * 10 // rounds > record.round * 10 // rounds):
                say(f"{name}: round {done} of {rounds}, {figures}")

        yield watch


def _choose_threads(parameters: int) -> int:
    """Torch threads for a training: small networks run up to ten times slower on several threads than on one."""
    return 1 if parameters < 1_000_000 else os.cpu_count() or 1
