"""The command line: audit, train, list, data."""

import dataclasses
import inspect
import json
import math
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import gradveil
from gradveil import data as datasets
from gradveil import models, report
from gradveil.attacks import ATTACKS
from gradveil.audit import AuditConfig, Step, default_folder, read_config
from gradveil.audit import run as run_audit
from gradveil.audit.run import choose_threads
from gradveil.defenses import DEFENSES
from gradveil.defenses import create as create_defense
from gradveil.errors import GradveilError, ParameterError
from gradveil.federation import Training, TrainingResult
from gradveil.federation import train as run_training
from gradveil.registry import Registry, parse_spec
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
    model: Annotated[str | None, typer.Option(help="E.g. lenet:init=uniform, or your own: FILE.py@FUNCTION.")] = None,
    defense: Annotated[
        list[str] | None, typer.Option(help="NAME[:k=v,...], repeatable; + chains, +error-feedback wraps.")
    ] = None,
    attack: Annotated[list[str] | None, typer.Option(help="NAME[:k=v,...], repeatable.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="quick, standard or thorough: presets for attacks named without parameters.")
    ] = None,
    victims: Annotated[int | None, typer.Option(help="Updates attacked under each defense.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images behind each update.")] = None,
    labels: Annotated[str | None, typer.Option(help="infer: the attacker finds them; known: it is given them.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Victims attacked together.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Training rounds behind accuracy, time and bytes.")] = None,
    clients: Annotated[int | None, typer.Option(help="Clients in that training.")] = None,
    client_batch: Annotated[int | None, typer.Option(help="Images a client trains on in a round.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of that training.")] = None,
    seed: Annotated[int | None, typer.Option(help="Everything random derives from it.")] = None,
    output: Annotated[Path | None, typer.Option("--out", help="Folder for the results.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an audit: only what is missing runs.")] = False,
    as_json: Json = False,
) -> None:
    """Attack every defense on the same victims, train under every defense, and write a report."""
    asked = {
        "dataset": dataset,
        "model": model,
        "defenses": tuple(defense) if defense else None,
        "attacks": tuple(attack) if attack else None,
        "victims": victims,
        "batch_size": batch_size,
        "labels": labels,
        "chunk": chunk,
        "rounds": rounds,
        "clients": clients,
        "client_batch": client_batch,
        "lr": lr,
        "seed": seed,
    }
    if budget is not None:
        asked["attacks"] = _with_presets(attack or ["idlg", "inverting-gradients"], budget, dataset, model)
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    saved = output / "config.json" if output else None
    if resume and saved and saved.exists():
        # What is not said again stays as it was.
        config = dataclasses.replace(AuditConfig.from_json(read_config(saved)), **given)
    else:
        config = AuditConfig(**given)
    folder = output or default_folder(config)
    say(f"auditing {config.model} on {config.dataset} into {folder}")
    try:
        with _progress_bar() as show:
            run_audit(config, folder, resume=resume, progress=lambda step: show(_words(step), step.overall))
    except KeyboardInterrupt:
        command = shlex.join(["gradveil", "audit", "--resume", "--out", str(folder)])
        say(f"stopped; finished rows are kept. Go on with: {command}")
        raise typer.Exit(INTERRUPTED) from None
    page = report.write(folder)
    verdict = report.verdict(folder)
    for sentence in verdict:
        say(sentence)
    if as_json:
        out.print_json(json.dumps({"report": str(page), "folder": str(folder), "verdict": verdict}))
    else:
        out.print(f"report: {page}", markup=False, soft_wrap=True)


def _with_presets(attacks: list[str], budget: str, dataset: str | None, model: str | None) -> tuple[str, ...]:
    """The attacks, those without parameters of their own with the preset for this data and model."""
    names = [
        parse_spec(given or default)[0]
        for given, default in ((dataset, AuditConfig.dataset), (model, AuditConfig.model))
    ]
    return tuple(
        spec if ":" in spec else str(gradveil.preset(spec, budget, dataset=names[0], model=names[1]))
        for spec in attacks
    )


def _words(step: Step) -> str:
    return f"{step.what} ({step.done + 1} of {step.total})"


# -- train -----------------------------------------------------------------------------------------------------------


@app.command()
def train(
    dataset: Annotated[str, typer.Option(help="Name or path of the data.")] = "mnist",
    model: Annotated[str, typer.Option(help="Model, e.g. lenet:activation=relu.")] = "mnist-cnn",
    defense: Annotated[str, typer.Option(help="NAME[:k=v,...]; + chains, +error-feedback wraps.")] = "none",
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 100,
    clients: Annotated[int, typer.Option(help="Clients that share the training images.")] = 10,
    clients_per_round: Annotated[int | None, typer.Option(help="Clients drawn each round; default: all.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images a client draws each round.")] = 32,
    lr: Annotated[float, typer.Option(help="The server's learning rate.")] = 0.05,
    momentum: Annotated[float, typer.Option(help="The server's momentum.")] = 0.9,
    partition: Annotated[str, typer.Option(help="iid, dirichlet:alpha=0.5 or classes:classes_per_client=2.")] = "iid",
    local_epochs: Annotated[
        int | None, typer.Option(help="FedAvg: local passes over the drawn images; default: FedSGD.")
    ] = None,
    local_lr: Annotated[float, typer.Option(help="FedAvg: learning rate of the local steps.")] = 0.05,
    local_batch: Annotated[int | None, typer.Option(help="FedAvg: images a local step; default: all drawn.")] = None,
    seed: Annotated[int, typer.Option(help="Everything random derives from it.")] = 0,
    as_json: Json = False,
) -> None:
    """Train one model federatedly under one defense: accuracy, loss, round time, bytes."""
    chosen = create_defense(defense)
    scheme, shares = parse_spec(partition)
    known = {"dirichlet": {"alpha"}, "classes": {"classes_per_client"}}.get(scheme, set())
    if shares.keys() - known:
        raise ParameterError(f"train: partition {scheme} takes {', '.join(known) or 'no parameters'}, got {partition}")
    local = None if local_epochs is None else LocalSteps(local_epochs, local_batch, local_lr)
    training = Training(
        rounds=rounds,
        clients=clients,
        clients_per_round=clients_per_round,
        batch_size=batch_size,
        lr=lr,
        momentum=momentum,
        scheme=scheme,
        local=local,
        evaluate_every=max(1, rounds // 10),
        seed=seed,
        **shares,
    )
    name, parameters = parse_spec(dataset)
    loaded = datasets.load(name, **parameters)
    shape, classes = loaded.train.input_shape, len(loaded.classes)
    model_name, model_parameters = parse_spec(model)
    net = models.create(model_name, input_shape=shape, classes=classes, seed=seed, **model_parameters)
    task = Task(net, input_shape=shape, classes=classes)
    torch.set_num_threads(choose_threads(task.size))
    with _progress_bar() as show:
        result = run_training(
            task,
            loaded,
            chosen,
            training,
            progress=lambda done, total: show(f"round {done} of {total}", done / total),
        )
    if as_json:
        figures = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "task"}
        figures["privacy"] = result.privacy and str(result.privacy)
        figures["epsilon"] = result.privacy and result.privacy.epsilon
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
        out.print_json(json.dumps({"defense": str(chosen), "dataset": dataset, "model": model, **finite}))
        return
    if result.diverged is not None:
        say(f"note: the training diverged in round {result.diverged + 1} and was stopped; lower --lr")
    out.print(_training_table(str(chosen), result))
    if result.privacy is not None:
        out.print(f"differential privacy: {result.privacy}", markup=False, soft_wrap=True)


def _training_table(defense: str, result: TrainingResult) -> Table:
    table = Table(title=f"training under {defense}")
    for heading in ("accuracy", "loss", "seconds a round", "bytes up", "bytes down"):
        table.add_column(heading, justify="right")
    table.add_row(
        f"{result.accuracy:.1%}",
        f"{result.loss:.3f}",
        f"{result.round_seconds:.3f}",
        f"{result.upload_bytes:,.0f}",
        f"{result.download_bytes:,.0f}",
    )
    return table


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
            {"name": s.name, "summary": s.summary, "source": s.licence, "parameters": {}}
            for s in datasets.status()
            if s.name in datasets.names()
        ],
        "models": lambda: [
            {"name": name, "summary": d.summary, "source": d.paper, "parameters": d.parameters}
            for name in models.names()
            for d in [models.describe(name)]
        ],
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
    methods = [registry.create(name) for name in registry.names()]
    return [
        {
            "name": method.name,
            "summary": (inspect.getdoc(method) or "").splitlines()[0],
            "source": method.paper,
            "parameters": method.parameters,
        }
        for method in methods
    ]


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
def data_get(name: Annotated[str, typer.Argument(help="Name of a data set, or lpips-alex.")]) -> None:
    """Fetch, check, convert and cache a data set or metric weights."""
    with talk.status(f"fetching {name}") as status:
        path = datasets.fetch(name, progress=lambda words: status.update(f"{name}: {words}"))
    out.print(str(path), markup=False, soft_wrap=True)


# -- shared ----------------------------------------------------------------------------------------------------------


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar with the time left; nothing is drawn when stderr is not a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as bar:
        line = bar.add_task("starting", total=1.0)
        yield lambda words, share: bar.update(line, description=words, completed=share)
