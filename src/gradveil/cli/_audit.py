"""``gradveil audit``: what it does."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.progress import TextColumn

import gradveil
from gradveil import report
from gradveil.attacks.presets import BUDGETS
from gradveil.audit import AuditConfig, Plan, Step, default_folder, make_plan
from gradveil.audit import run as run_audit
from gradveil.audit.folder import is_model_file, read_audit
from gradveil.audit.plan import LONG
from gradveil.audit.rows import SETTINGS
from gradveil.audit.store import CONFIG
from gradveil.cli import _report
from gradveil.cli._console import INTERRUPTED, ProgressLines, duration, print_result, progress_bar, say, stdout
from gradveil.cli._shared import default_model, how_to_resume, numbers, refuse_other_plugins, untrusted, with_target
from gradveil.core import checks, plugins
from gradveil.core.errors import OutputError, WorkerError
from gradveil.core.registry import parse_spec
from gradveil.data import is_text

ATTENTIVE = ("text-transformer", "smollm2")
"""The models in which `dager` finds attention blocks."""
TEXT_ATTACKS = ("idlg:iterations=150", "tag:iterations=400")
"""What an audit of texts runs if no attack is named: those by default are for images."""


def run(options: Mapping[str, Any]) -> None:
    """Run the command; most options have the name of a setting of `AuditConfig`."""
    output: Path | None = options["output"]
    stages = numbers("audit", "stage", options["stage"])
    if stages is not None and len(stages) > 1:
        codes = []
        for stage in stages:
            place = None if output is None else output / f"stage-{stage:g}"
            try:
                run({**options, "stage": str(stage), "output": place})
            except typer.Exit as refused:  # of a gate; the other stages are wanted all the same
                if refused.exit_code == INTERRUPTED:
                    raise
                codes.append(refused.exit_code)
        if codes:
            raise typer.Exit(max(codes))
        return
    plugins.load_files(options["plugin"] or ())
    if options["target"] is not None or options["dataset"] is not None:
        dataset = with_target("audit", options["dataset"] or AuditConfig().dataset, options["target"])
        begins = not (options["resume"] and output is not None)
        model = default_model(dataset, AuditConfig().model) if begins else None
        options = {**options, "dataset": dataset, "model": options["model"] or model}
        if begins and is_text(parse_spec(dataset)[0]) and not options["attack"]:
            options = {**options, "attack": _text_attacks(options)}
    resume: bool = options["resume"]
    fail_if: list[str] = options["fail_if"] or []
    for condition in fail_if:
        checks.choice("audit", "--fail-if", condition, report.CONDITIONS)
    asked = {name: options[name] for name in SETTINGS if name in options}
    attacks = options["attack"]
    asked |= {"defenses": tuple(options["defense"] or ()) or None, "attacks": tuple(attacks or ()) or None}
    asked["stage"] = None if stages is None else stages[0]
    asked |= {name: numbers("audit", name, options[name]) for name in ("mean", "std")}
    # On resuming, what is not said again stays as it was; only a model's code has to be asked for again.
    base = AuditConfig()
    if resume and output is not None and (output / CONFIG).exists():
        described = read_audit(output)
        refuse_other_plugins("audit", output, described["plugin_files"])
        base = AuditConfig.from_json(described)
        if options["model"] is None and is_model_file(base.model):
            raise untrusted("audit", output, base.model)
    if options["budget"] is not None:
        asked["attacks"] = _with_presets(attacks, options["budget"], options["dataset"], options["model"], base)
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    config = dataclasses.replace(base, **given)
    folder = output or default_folder(config)
    if resume and output is not None and not (output / CONFIG).exists():
        raise OutputError(
            f"audit: --resume continues the audit in {output}, which holds none; leave --resume out to begin one"
        )
    if options["dry_run"]:
        _print_plan(make_plan(config, folder, resume=resume, workers=options["workers"]), options["as_json"])
        return
    say(f"auditing {config.model} on {config.dataset} into {folder}")
    try:
        with progress_bar(TextColumn("{task.percentage:>3.0f} %")) as bar:
            line, lines = bar.add_task("starting", total=1.0), ProgressLines()

            def show(step: Step) -> None:
                words = f"{step.what} ({step.done} of {step.total} pieces done)"
                bar.update(line, description=words, completed=step.overall)
                if bar.disable:
                    lines.show(words, step.overall, step.left, ended=step.ended)

            run_audit(
                config,
                folder,
                resume=resume,
                progress=show,
                workers=options["workers"],
                ray=options["ray"],
                announce=_announce,
            )
    except KeyboardInterrupt:
        say(f"stopped; finished rows are kept. Resume with: {how_to_resume('audit', folder, config.model)}")
        raise typer.Exit(INTERRUPTED) from None
    except WorkerError as error:
        if not (folder / CONFIG).exists():
            raise
        raise WorkerError(f"{error}. Resume with: {how_to_resume('audit', folder, config.model)}") from None
    _report.show(folder, fail_if, as_json=options["as_json"])


def _text_attacks(options: Mapping[str, Any]) -> list[str]:
    """The attacks on texts if none is named; `dager` only where it can work."""
    name, parameters = parse_spec(options["model"])
    single = (options[setting] in (None, 1) for setting in ("batch_size", "aggregated"))
    one_step = options["local_epochs"] is None and options["observed_rounds"] in (None, 1)
    decoder = name == "smollm2" or parameters.get("causal") is True
    works = name in ATTENTIVE and one_step and (decoder or all(single))
    return [*(["dager"] if works else []), *TEXT_ATTACKS]


def _announce(plan: Plan) -> None:
    """Say how long the audit will take, and warn if that is hours."""
    if not plan.pieces:
        return
    say(f"{_amount(plan)}, estimated on this machine as it is now")
    if plan.duration > LONG:
        say(
            "note: hours lie ahead. Fewer --victims, --attack, --defense or --rounds, or --budget quick, take less; "
            "--dry-run lists the pieces; Ctrl-C stops, and --resume goes on later"
        )


def _amount(plan: Plan) -> str:
    pieces = f"{len(plan.pieces)} piece{'s' * (len(plan.pieces) != 1)}"
    processes = "one process" if plan.workers == 1 else f"{plan.workers} worker processes"
    return f"{pieces} in {processes}, about {duration(plan.duration)}"


def _print_plan(plan: Plan, as_json: bool) -> None:
    """Print the pieces, those with equal names together, and what all of them take."""
    times: dict[str, list[float]] = {}
    for piece, seconds in zip(plan.pieces, plan.seconds, strict=True):
        times.setdefault(piece.what, []).append(seconds)
    if as_json:
        pieces = [{"what": what, "pieces": len(each), "seconds": sum(each)} for what, each in times.items()]
        whole = {"pieces": pieces, "workers": plan.workers, "seconds": plan.duration, "memory_per_process": plan.memory}
        stdout.print_json(json.dumps(whole))
        return
    for what, each in times.items():
        count = f" in {len(each)} pieces" * (len(each) > 1)
        print_result(f"{duration(sum(each)):>12}  {what}{count}")
    memory = f"; each process takes {plan.memory / 1e9:.1f} GB or more" * (plan.memory > 0)
    print_result(f"{_amount(plan)}, estimated on this machine as it is now{memory}")


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
