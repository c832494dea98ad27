"""``gradveil train``: its options."""

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli._console import Json, Plugins


def train(
    context: typer.Context,
    dataset: Annotated[str, typer.Option(help="Name or path of the data.")] = "mnist",
    target: Annotated[
        str | None, typer.Option(help="The column of a table that the model predicts.", show_default="that of the data")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="E.g. lenet:activation=relu, or FILE.py@FUNCTION, which runs FILE.py; others for tables and text."
        ),
    ] = "mnist-cnn",
    defense: Annotated[str, typer.Option(help="NAME[:k=v,...]; + chains, +error-feedback wraps.")] = "none",
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Train under this defense and none too, with the same seeds; repeatable.", show_default="none"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 100,
    clients: Annotated[int, typer.Option(help="Clients that share the training examples.")] = 10,
    clients_per_round: Annotated[int | None, typer.Option(help="Clients drawn each round.", show_default="all")] = None,
    batch_size: Annotated[int, typer.Option(help="Examples a client draws each round.")] = 32,
    lr: Annotated[float, typer.Option(help="The server's learning rate.")] = 0.05,
    momentum: Annotated[float, typer.Option(help="The server's momentum.")] = 0.9,
    optimiser: Annotated[str, typer.Option(help="The server's optimiser: sgd or adam.")] = "sgd",
    schedule: Annotated[str, typer.Option(help="Learning-rate schedule: constant, step or cosine.")] = "constant",
    partition: Annotated[str, typer.Option(help="iid, dirichlet:alpha=0.5 or classes:classes_per_client=2.")] = "iid",
    local_epochs: Annotated[
        int | None, typer.Option(help="FedAvg: local passes over the drawn examples.", show_default="none: FedSGD")
    ] = None,
    local_lr: Annotated[float, typer.Option(help="FedAvg: learning rate of the local steps.")] = 0.05,
    local_batch: Annotated[
        int | None, typer.Option(help="FedAvg: examples per local step.", show_default="all drawn")
    ] = None,
    local_momentum: Annotated[float, typer.Option(help="FedAvg: momentum of the local steps.")] = 0.0,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Rounds between evaluations.", show_default="a tenth of all")
    ] = None,
    execution: Annotated[str, typer.Option(help="How clients are computed: loop, batch, compile or auto.")] = "auto",
    engine: Annotated[
        str, typer.Option(help="local: in this process; flower: on Flower's simulation (needs gradveil\\[flower]).")
    ] = "local",
    seed: Annotated[int, typer.Option(help="Everything random derives from it.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps.")] = "cpu",
    weights: Annotated[
        str | None,
        typer.Option(help="Your own weights, a .safetensors file.", show_default="the model's initial weights"),
    ] = None,
    norms: Annotated[
        str | None, typer.Option(help="Batch norm in train or inference mode.", show_default="as the model comes")
    ] = None,
    dropout: Annotated[
        str, typer.Option(help="train: clients draw dropout masks in every step; inference: it is off.")
    ] = "train",
    mean: Annotated[
        str | None,
        typer.Option(
            help="The model's normalisation, one number per channel: 0.49,0.48,0.45.", show_default="no normalisation"
        ),
    ] = None,
    std: Annotated[
        str | None, typer.Option(help="The same, given together with --mean.", show_default="no normalisation")
    ] = None,
    plugin: Plugins = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder for checkpoints, training.json and the plot, training.html.", show_default="none"
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the checkpoints in --out.", show_default="off")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run federated training under one or several defenses: accuracy, loss, time, bytes; a table and a plot."""
    options = dict(locals())
    from gradveil.cli import _train

    _train.run(options)
