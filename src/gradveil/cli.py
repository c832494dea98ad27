"""The command line: audit, train, list, data."""

import dataclasses
import inspect
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import gradveil
from gradveil import data as datasets
from gradveil import models, report
from gradveil.attacks import ATTACKS
from gradveil.attacks.presets import BUDGETS
from gradveil.audit import AuditConfig, Step, default_folder, read_config
from gradveil.audit import run as run_audit
from gradveil.audit.cases import build_task
from gradveil.audit.folder import is_model_file, read_audit
from gradveil.audit.rows import SETTINGS
from gradveil.audit.run import choose_threads
from gradveil.audit.store import CONFIG, resume_command, slug
from gradveil.core import checks
from gradveil.core.errors import DataError, GradveilError, OutputError, ParameterError
from gradveil.core.folders import locked, prepare_folder, write_json
from gradveil.core.parameters import meanings
from gradveil.core.registry import Registry, parse_spec
from gradveil.defenses import DEFENSES
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

app = typer.Typer(help=gradveil.__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
data_app = typer.Typer(
    help="Data sets and metric weights: what is here, and how to get the rest.", no_args_is_help=True
)
app.add_typer(data_app, name="data")

# Words for people go to stderr, results to stdout, so that `--json` can be piped.
talk = Console(stderr=True, highlight=False)
out = Console(highlight=False)

INTERRUPTED = 130
PIPE_WIDTH = 160
ROOMY_WIDTH = 120
CHECKPOINTS = "checkpoints"
MODEL_FILE = "model_file_digest"
CONFIG_DIGEST = "digest"
NOTHING_TO_RESUME = "note: there is nothing to go on with in {}; this is a new run"

Figures = dict[str, Any]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def main() -> None:
    """Run the command line; errors meant for the user come without a traceback."""
    warnings.showwarning = lambda message, *_rest: say(f"note: {message}")
    try:
        app()
    except GradveilError as error:
        talk.print("[red]error:[/]", end=" ")
        say(str(error))
        sys.exit(2)


def say(words: str) -> None:
    """Words for a person; data in them is neither read as markup nor broken into lines, so it can be copied."""
    talk.print(words, markup=False, soft_wrap=True)


# -- audit -----------------------------------------------------------------------------------------------------------


@app.command()
def audit(
    dataset: Annotated[
        str | None, typer.Option(help="Name or path of the data, e.g. cifar10 or faces-orl:size=64.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="E.g. lenet:init=uniform, or your own: FILE.py@FUNCTION, which runs the code in FILE.py with all your "
            "rights. With --resume such a file has to be named again."
        ),
    ] = None,
    defense: Annotated[
        list[str] | None, typer.Option(help="NAME[:k=v,...], repeatable; + chains, +error-feedback wraps.")
    ] = None,
    attack: Annotated[list[str] | None, typer.Option(help="NAME[:k=v,...], repeatable.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="quick, standard or thorough: presets for attacks named without parameters.")
    ] = None,
    victims: Annotated[int | None, typer.Option(help="Updates attacked under each defense.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples behind each update.")] = None,
    labels: Annotated[str | None, typer.Option(help="infer: the attacker finds them; known: it is given them.")] = None,
    adaptive: Annotated[
        bool | None,
        typer.Option("--adaptive/--plain", help="Attackers that know the defense, or that do not; default: both."),
    ] = None,
    aggregated: Annotated[
        int | None, typer.Option(help="Clients behind each victim, whom secure aggregation hides in a sum.")
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(
            help="accuracy, power or bytes, with =TARGET or a default: choose every defense's strength so that all "
            "cost the same. Accuracy takes up to a dozen trainings a defense."
        ),
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Victims attacked together.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Training rounds behind accuracy, time and bytes.")] = None,
    clients: Annotated[int | None, typer.Option(help="Clients in that training.")] = None,
    client_batch: Annotated[int | None, typer.Option(help="Examples a client trains on in a round.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of that training.")] = None,
    seed: Annotated[int | None, typer.Option(help="Everything random derives from it.")] = None,
    local_epochs: Annotated[
        int | None, typer.Option(help="FedAvg: clients' local passes over their examples; default: one gradient.")
    ] = None,
    local_batch: Annotated[int | None, typer.Option(help="FedAvg: examples per local step; default: all.")] = None,
    local_lr: Annotated[float | None, typer.Option(help="FedAvg: learning rate of the local steps.")] = None,
    observed_rounds: Annotated[
        int | None, typer.Option(help="Rounds of each victim, on the same data, that the attacker sees.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Your own weights, a .safetensors file; default: initial ones.")
    ] = None,
    norms: Annotated[
        str | None, typer.Option(help="Batch norm in train or inference mode; default: as the model comes.")
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="The model's normalisation, one number for each: 0.49,0.48,0.45.")
    ] = None,
    std: Annotated[str | None, typer.Option(help="The model's normalisation, with --mean.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps.")] = None,
    output: Annotated[Path | None, typer.Option("--out", help="Folder for the results.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the audit in --out: only what is missing runs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Attack every defense on the same victims, train under every defense, and write a report."""
    options = dict(locals())  # each but those of the command itself has the name of a setting
    asked = {name: options[name] for name in SETTINGS if name in options}
    asked |= {"defenses": tuple(defense) if defense else None, "attacks": tuple(attack) if attack else None}
    asked |= {name: _numbers(name, options[name]) for name in ("mean", "std")}
    # On resuming, what is not said again stays as it was; only a model's code has to be asked for again.
    base = AuditConfig()
    if resume and output is not None and (output / CONFIG).exists():
        base = AuditConfig.from_json(read_audit(output))
        if model is None and is_model_file(base.model):
            raise _untrusted("audit", output, base.model)
    if budget is not None:
        asked["attacks"] = _with_presets(attack, budget, dataset, model, base)
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    config = dataclasses.replace(base, **given)
    folder = output or default_folder(config)
    if resume and output is not None and not (output / CONFIG).exists():
        say(NOTHING_TO_RESUME.format(output))
    say(f"auditing {config.model} on {config.dataset} into {folder}")
    try:
        with _progress_bar(TextColumn("{task.percentage:>3.0f} %")) as bar:
            line = bar.add_task("starting", total=1.0)

            def show(step: Step) -> None:
                words = f"{step.what} ({step.done + 1} of {step.total})"
                bar.update(line, description=words, completed=step.overall)

            run_audit(config, folder, resume=resume, progress=show)
    except KeyboardInterrupt:
        say(f"stopped; finished rows are kept. Go on with: {_go_on('audit', folder, config.model)}")
        raise typer.Exit(INTERRUPTED) from None
    finished = report.read(folder)
    page = report.write(finished)
    verdict = report.verdict(finished)
    for sentence in verdict:
        say(sentence)
    if as_json:
        flags = [found.flag.name for found in report.raised_flags(finished)]
        out.print_json(json.dumps({"report": str(page), "folder": str(folder), "flags": flags, "verdict": verdict}))
    else:
        out.print(f"report: {page}", markup=False, soft_wrap=True)


def _with_presets(
    attacks: list[str] | None, budget: str, dataset: str | None, model: str | None, base: AuditConfig
) -> tuple[str, ...]:
    """The attacks, those without parameters of their own with the preset for this data and model."""
    checks.choice("audit", "budget", budget, BUDGETS)
    data_name, model_name = parse_spec(dataset or base.dataset)[0], parse_spec(model or base.model)[0]
    return tuple(
        spec if ":" in spec else str(gradveil.preset(spec, budget, dataset=data_name, model=model_name))
        for spec in attacks or [parse_spec(spec)[0] for spec in base.attacks]
    )


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    """Numbers with commas between them."""
    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise ParameterError(f"audit: --{name} must be numbers with commas between them, got {text!r}") from None


# -- train -----------------------------------------------------------------------------------------------------------


@app.command()
def train(
    context: typer.Context,
    dataset: Annotated[str, typer.Option(help="Name or path of the data.")] = "mnist",
    model: Annotated[
        str, typer.Option(help="E.g. lenet:activation=relu, or FILE.py@FUNCTION, which runs the code in FILE.py.")
    ] = "mnist-cnn",
    defense: Annotated[str, typer.Option(help="NAME[:k=v,...]; + chains, +error-feedback wraps.")] = "none",
    compare: Annotated[
        list[str] | None, typer.Option(help="Train under this defense too, with the same seeds; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 100,
    clients: Annotated[int, typer.Option(help="Clients that share the training examples.")] = 10,
    clients_per_round: Annotated[int | None, typer.Option(help="Clients drawn each round; default: all.")] = None,
    batch_size: Annotated[int, typer.Option(help="Examples a client draws each round.")] = 32,
    lr: Annotated[float, typer.Option(help="The server's learning rate.")] = 0.05,
    momentum: Annotated[float, typer.Option(help="The server's momentum.")] = 0.9,
    optimiser: Annotated[str, typer.Option(help="The server's: sgd or adam.")] = "sgd",
    schedule: Annotated[str, typer.Option(help="Of the learning rate: constant, step or cosine.")] = "constant",
    partition: Annotated[str, typer.Option(help="iid, dirichlet:alpha=0.5 or classes:classes_per_client=2.")] = "iid",
    local_epochs: Annotated[
        int | None, typer.Option(help="FedAvg: local passes over the drawn examples; default: FedSGD.")
    ] = None,
    local_lr: Annotated[float, typer.Option(help="FedAvg: learning rate of the local steps.")] = 0.05,
    local_batch: Annotated[
        int | None, typer.Option(help="FedAvg: examples per local step; default: all drawn.")
    ] = None,
    local_momentum: Annotated[float, typer.Option(help="FedAvg: momentum of the local steps.")] = 0.0,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Rounds between evaluations; default: a tenth of all.")
    ] = None,
    execution: Annotated[str, typer.Option(help="Clients in a loop, batch, compile; auto: by size.")] = "auto",
    engine: Annotated[
        str, typer.Option(help="local: in this process; flower: on Flower's simulation (gradveil\\[flower]).")
    ] = "local",
    seed: Annotated[int, typer.Option(help="Everything random derives from it.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps.")] = "cpu",
    output: Annotated[
        Path | None, typer.Option("--out", help="Folder for checkpoints, training.json and the plot, training.html.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoints in --out.")] = False,
    as_json: Json = False,
) -> None:
    """Train federatedly under one or several defenses: accuracy, loss, time, bytes; a table and a plot."""
    options = dict(locals())
    settings = _TrainSettings(**{field.name: options[field.name] for field in dataclasses.fields(_TrainSettings)})
    given = {name for name in vars(settings) if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"}
    if output is None and resume:
        raise ParameterError("train: --resume needs --out, the folder that holds the checkpoints")
    if output is not None and resume and not (output / CONFIG).is_file():
        _refuse_ignored(settings, given, resume)
        raise OutputError(
            f"train: expected a folder that holds a training, got {output}, which "
            f"{'holds none' if output.is_dir() else 'is not there'}; leave --resume out to begin one, or mend --out"
        )
    if output is not None:
        prepare_folder(output, "train")
    with nullcontext() if output is None else locked(output, "train", "training"):
        _train(settings, given, output, resume, as_json)


def _train(settings: "_TrainSettings", given: set[str], output: Path | None, resume: bool, as_json: bool) -> None:
    """The command `train` in a folder that no other one writes into."""
    if output is not None:
        settings = _as_saved(settings, given, output, resume)
    _refuse_ignored(settings, given, resume)
    defenses = [create_defense(spec) for spec in settings.specs]
    training, task, loaded = settings.training(), *settings.load()
    check_settings(task, loaded, defenses, training, settings.execution)
    began_with = {**vars(settings), MODEL_FILE: model_file_digest(settings.model)}
    began_with[CONFIG_DIGEST] = json_digest(began_with)
    engine = ENGINES.create(settings.engine)
    # Without checkpoints, a folder holds a training when there is a result.
    checkpoints = output / CHECKPOINTS if output is not None and engine.checkpoints else None
    if output is not None and checkpoints is not None:
        write_json(output / CONFIG, began_with)
    torch.set_num_threads(choose_threads(task.size))
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
            say(f"stopped. Go on with: {_go_on('train', checkpoints.parent, settings.model)}")
        else:
            why = "there was no --out" if output is None else f"{engine.words} keeps no checkpoints"
            say(f"stopped; nothing was kept, for {why}")
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
        out.print_json(json.dumps(whole))
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
            out.print(f"differential privacy{whose}: {result.privacy}", markup=False, soft_wrap=True)


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
        return build_task(loaded, self.model, seed=self.seed, device=self.device), loaded


def _as_saved(settings: _TrainSettings, given: set[str], folder: Path, resume: bool) -> _TrainSettings:
    """The settings; on resuming those that the folder was begun with, but more defenses may be compared."""
    path = folder / CONFIG
    if not resume and path.exists():
        raise OutputError(f"train: {folder} holds a training already; go on with --resume or choose another --out")
    if not resume and any((folder / CHECKPOINTS).rglob(CHECKPOINT)):
        raise OutputError(f"train: {folder} holds checkpoints of a training without its {CONFIG}; choose another --out")
    if not resume:
        return settings
    saved, asked = read_config(path), vars(settings)
    unknown = {*asked, MODEL_FILE, CONFIG_DIGEST} ^ saved.keys()
    if unknown:
        raise DataError(
            f"{path}: expected the settings of a training, differs in {', '.join(sorted(unknown))}; "
            "start a new one with another --out"
        )
    if saved.pop(CONFIG_DIGEST) != json_digest(saved):
        raise DataError(
            f"{path}: expected the settings as the training began with, got others (their digest does not fit); bring "
            "them back or start a new training with another --out"
        )
    began_with = saved.pop(MODEL_FILE)
    for name in asked:
        if name in given - {"compare"} and asked[name] != saved[name]:
            change = f"{name} was {saved[name]}, is {asked[name]}"
            raise OutputError(f"train: {folder} holds another training: {change}; choose another --out")
    if "model" not in given and is_model_file(saved["model"]):
        raise _untrusted("train", folder, saved["model"])
    settings = _TrainSettings(**{**saved, "compare": [*(saved["compare"] or []), *(settings.compare or [])]})
    if model_file_digest(settings.model) != began_with:
        raise OutputError(
            f"train: {folder} holds another training: the file of the model {settings.model} has changed since; "
            "choose another --out, or bring the file back"
        )
    return settings


def _refuse_ignored(settings: _TrainSettings, given: set[str], resume: bool) -> None:
    """Refuse options that would change nothing."""
    engine = ENGINES.create(settings.engine)
    if resume and not engine.checkpoints:
        raise ParameterError(f"train: {engine.words} keeps no checkpoints; leave --resume out or use --engine local")
    if "execution" in given and not engine.executions:
        raise ParameterError(
            f"train: {engine.words} runs its clients in its own way; leave --execution out or use --engine local"
        )
    local = [f"--{name.replace('_', '-')}" for name in ("local_lr", "local_batch", "local_momentum") if name in given]
    if settings.local_epochs is None and local:
        raise ParameterError(
            f"train: expected --local-epochs with {', '.join(local)}, for without it clients take no local steps; "
            "add it or leave them out"
        )


def _described(spec: str, result: TrainingResult, results: dict[str, TrainingResult], test: datasets.Split) -> Figures:
    """A training as JSON."""
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
    console = out if out.is_terminal else Console(file=out.file, highlight=False, width=PIPE_WIDTH)
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
    """What a training is doing: a bar on a terminal, else a line now and then."""
    started, first = time.perf_counter(), None
    accuracy = "not evaluated yet"
    with _progress_bar(MofNCompleteColumn(), TextColumn("{task.fields[figures]}")) as bar:
        line = bar.add_task(name, total=rounds, figures="")

        def watch(record: RoundRecord) -> None:
            nonlocal accuracy, first
            first = record.round if first is None else first  # not 0 where a training is resumed
            if record.accuracy is not None:
                accuracy = f"accuracy {record.accuracy:.1%}"
            done = record.round + 1
            pace = (done - first) / (time.perf_counter() - started)
            # After the last round the table says it; the one before is not its accuracy.
            shown = f"{accuracy}, " if done < rounds else ""
            figures = f"loss {record.loss:.3f}, {shown}{pace:.2g} rounds/s"
            bar.update(line, completed=done, figures=figures)
            if not talk.is_terminal and (done == rounds or done * 10 // rounds > record.round * 10 // rounds):
                say(f"{name}: round {done} of {rounds}, {figures}")

        yield watch


# -- list ------------------------------------------------------------------------------------------------------------


@app.command("list")
def list_all(
    kind: Annotated[str | None, typer.Argument(help="defenses, attacks, datasets or models; default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Defenses, attacks, datasets, models: one line each with the paper and the parameters."""
    listings: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "defenses": lambda: _methods(DEFENSES),
        "attacks": lambda: _methods(ATTACKS),
        "datasets": lambda: [
            _entry(one.name, one.summary, one.licence, {}) for one in datasets.status() if one.name in datasets.names()
        ],
        "models": lambda: [_entry(name, *models.describe(name)) for name in models.names()],
    }
    if kind is not None and kind not in listings:
        raise ParameterError(f"list: expected one of {', '.join(listings)}, got {kind!r}")
    chosen = {name: listing() for name, listing in listings.items() if kind in (None, name)}
    if as_json:
        out.print_json(json.dumps(chosen))
        return
    for title, rows in chosen.items():
        out.print(f"[bold]{title}[/]")
        width = max(len(row["name"]) for row in rows)
        for row in rows:
            parameters = ", ".join(f"{key}={value}" for key, value in row["parameters"].items())
            words = [row["summary"].rstrip("."), f"({parameters})" if parameters else "", f"[{row['source']}]"]
            out.print(f"  {row['name']:{width}}  {' '.join(filter(None, words))}", markup=False, soft_wrap=True)


def _methods(registry: Registry[Any]) -> list[dict[str, Any]]:
    return [
        _entry(method.name, (inspect.getdoc(method) or "").splitlines()[0], method.paper, method.parameters)
        | {"meanings": meanings(type(method))}
        for method in map(registry.create, registry.names())
    ]


def _entry(name: str, summary: str, source: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "summary": summary, "source": source, "parameters": parameters}


# -- data ------------------------------------------------------------------------------------------------------------


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """What is here, where it was found, and how to get the rest."""
    rows = [
        dataclasses.asdict(status) | {"found": str(status.found) if status.found else None}
        for status in datasets.status()
    ]
    if as_json:
        out.print_json(json.dumps(rows))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        state = f"found: {row['found']}" if row["found"] else row["how"]
        out.print(f"{row['name']:{width}}  {row['summary']} [{row['licence']}]", markup=False, soft_wrap=True)
        out.print(f"{'':{width}}  {state}", markup=False, soft_wrap=True)


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="Name of a data set or of weights.")]) -> None:
    """Fetch, check, convert and cache a data set or metric weights."""
    with talk.status(f"fetching {name}") as status:
        path = datasets.fetch(name, progress=lambda words: status.update(f"{name}: {words}"))
    out.print(str(path), markup=False, soft_wrap=True)


# -- shared ----------------------------------------------------------------------------------------------------------


def _go_on(command: str, folder: Path, model: str) -> str:
    """The command that goes on with what was stopped."""
    return resume_command(folder, model if is_model_file(model) else None, command)


def _untrusted(command: str, folder: Path, model: str) -> OutputError:
    """Why a folder's model, a file, is not run until somebody names it."""
    return OutputError(
        f"{command}: {folder} was begun with the model {model}, a file whose code would run, and --resume runs no code "
        f"that was not named; if you trust that file: {_go_on(command, folder, model)}"
    )


def _progress_bar(*figures: TextColumn | MofNCompleteColumn) -> Progress:
    """A bar with figures and the time left; nothing is drawn when stderr is not a terminal."""
    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), words, BarColumn(), *figures, TimeRemainingColumn())
    return Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal)
