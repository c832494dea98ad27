"""``gradveil audit``: its options."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gradveil.cli._console import FailIf, Json, Plugins
from gradveil.cli._index import read_index

_DEFAULTS = read_index()["audit"]


def _setting(name: str, help: str, default: str | None = None, flags: str | None = None) -> Any:
    """The option of a setting, with the default that `AuditConfig` has; `default` says in words what None means."""
    known = _DEFAULTS.get(name)
    shown = "; ".join(known).replace(",", ", ") if isinstance(known, list) else str(known)  # so that lines can break
    return typer.Option(*filter(None, [flags]), help=help, show_default=default or shown)


def audit(
    dataset: Annotated[
        str | None, _setting("dataset", "Name or path of the data, e.g. cifar10, faces-orl:size=64 or people.csv.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The column of a table that the model predicts.", show_default="that of the data")
    ] = None,
    model: Annotated[
        str | None,
        _setting(
            "model",
            "E.g. lenet:init=uniform, or your own: FILE.py@FUNCTION, which runs FILE.py with your full "
            "privileges. With --resume such a file must be named again. For tables, the default is mlp.",
        ),
    ] = None,
    defense: Annotated[
        list[str] | None,
        _setting("defenses", "NAME[:k=v,...], repeatable; + chains, +error-feedback wraps."),
    ] = None,
    attack: Annotated[list[str] | None, _setting("attacks", "NAME[:k=v,...], repeatable.")] = None,
    budget: Annotated[
        str | None,
        _setting(
            "budget",
            "quick, standard or thorough: how much work `auto` spends on each victim.",
            "the attacks as given or listed above",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        _setting("minutes", "The largest budget of `auto` that fits into this time, by an estimate.", "no limit"),
    ] = None,
    victims: Annotated[int | None, _setting("victims", "Updates attacked under each defense.")] = None,
    batch_size: Annotated[int | None, _setting("batch_size", "Examples behind each update.")] = None,
    victim_classes: Annotated[
        int | None,
        _setting("victim_classes", "Classes of a victim's examples, so that labels repeat within a batch.", "any"),
    ] = None,
    labels: Annotated[
        str | None, _setting("labels", "infer: the attacker finds them; known: the attacker is given them.")
    ] = None,
    adaptive: Annotated[
        bool | None,
        _setting(
            "adaptive", "Only attackers that know the defense, or only those that do not.", "both", "--adaptive/--plain"
        ),
    ] = None,
    aggregated: Annotated[
        int | None,
        _setting("aggregated", "Clients in each victim; under secure aggregation the attacker sees only their sum."),
    ] = None,
    match: Annotated[
        str | None,
        _setting(
            "match",
            "accuracy, power, bytes or named (how often the server names the right candidate), with =TARGET or a "
            "default target: choose every defense's strength so that all are equal in that. Accuracy takes up to a "
            "dozen training runs per defense.",
            "the strengths as given",
        ),
    ] = None,
    chunk: Annotated[int | None, _setting("chunk", "Victims per batch; lower it if memory runs out.")] = None,
    rounds: Annotated[int | None, _setting("rounds", "Training rounds behind accuracy, time and bytes.")] = None,
    clients: Annotated[int | None, _setting("clients", "Clients in that training.")] = None,
    client_batch: Annotated[
        int | None, _setting("client_batch", "Examples that a client trains on in each round.")
    ] = None,
    lr: Annotated[float | None, _setting("lr", "Learning rate of that training.")] = None,
    seed: Annotated[int | None, _setting("seed", "Everything random derives from it.")] = None,
    local_epochs: Annotated[
        int | None,
        _setting("local_epochs", "FedAvg: clients' local passes over their examples.", "none: a single gradient"),
    ] = None,
    local_batch: Annotated[int | None, _setting("local_batch", "FedAvg: examples per local step.", "all")] = None,
    local_lr: Annotated[float | None, _setting("local_lr", "FedAvg: learning rate of the local steps.")] = None,
    local_momentum: Annotated[float | None, _setting("local_momentum", "FedAvg: momentum of the local steps.")] = None,
    local_known: Annotated[
        str | None,
        _setting(
            "local_known",
            "FedAvg: what attackers know of the local steps. full: all but the order of examples; part: epochs and "
            "learning rate; none: they take the update for one gradient.",
        ),
    ] = None,
    observed_rounds: Annotated[
        int | None, _setting("observed_rounds", "Rounds of each victim, on the same data, that the attacker sees.")
    ] = None,
    publisher: Annotated[
        str | None,
        _setting(
            "publisher",
            "Who announces under aligned-dual-pruning. honest: another client; lying: another client, the locations of "
            "its smallest values; victim: the client that is attacked.",
        ),
    ] = None,
    public: Annotated[
        int | None,
        _setting("public", "Training examples, at most, that attackers who learn may learn from."),
    ] = None,
    candidates: Annotated[
        int | None,
        _setting("candidates", "Test examples, at most, among which the server is to find the client's."),
    ] = None,
    games: Annotated[
        int | None, _setting("games", "How often it has to, each time from another client's update; 0: not at all.")
    ] = None,
    weights: Annotated[
        str | None, _setting("weights", "Your own weights, a .safetensors file.", "the model's initial weights")
    ] = None,
    stage: Annotated[
        str | None,
        _setting(
            "stage",
            "Attack after this share of an undefended training, e.g. 0.25; several with commas, 0,0.25,1, give an "
            "audit each, in folders stage-0, stage-0.25, ... of --out.",
        ),
    ] = None,
    shared: Annotated[
        str | None,
        _setting(
            "shared", 'Only parameters of these names leave the client, e.g. "layer1*,*.bias".', "all but embeddings"
        ),
    ] = None,
    norms: Annotated[
        str | None, _setting("norms", "Batch norm in train or inference mode.", "as the model comes")
    ] = None,
    dropout: Annotated[
        str | None,
        _setting("dropout", "train: clients draw dropout masks, which attackers search for; inference: it is off."),
    ] = None,
    mean: Annotated[
        str | None,
        _setting("mean", "The model's normalisation, one number per channel: 0.49,0.48,0.45.", "no normalisation"),
    ] = None,
    std: Annotated[str | None, _setting("std", "The same, given together with --mean.", "no normalisation")] = None,
    device: Annotated[str | None, _setting("device", "Where to compute: cpu, cuda, cuda:1, mps.")] = None,
    plugin: Plugins = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for the results.",
            show_default="audits/DATASET-MODEL-DIGEST, one folder per configuration",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the audit in --out: only what is missing runs. Without --out, one that is not there begins.",
            show_default="off",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that share the work, with the same rows whatever their number; 1: none beside this one.",
            show_default="one per core if the audit takes more than half a minute",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Share the work on a Ray cluster, HOST:PORT or auto; --workers then says how many of its CPUs.",
            show_default="this machine",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only print the pieces of the audit and how long they will take.", show_default="off"
        ),
    ] = False,
    fail_if: FailIf = None,
    as_json: Json = False,
) -> None:
    """Attack every defense on the same victims, train under every defense, and write a report."""
    options = dict(locals())
    from gradveil.cli import _audit

    _audit.run(options)
