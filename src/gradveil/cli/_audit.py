"""``gradveil audit``: what it does."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.progress import TextColumn

from gradveil import report
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
from gradveil.core.errors import OutputError, ParameterError, WorkerError
from gradveil.core.registry import parse_spec

BUDGETS = {"quick": 1.0, "standard": 5.0, "thorough": 30.0}
"""Nominal seconds for each victim that `auto` gets, by the name of the budget."""
LEAST_SECONDS = 0.5
"""The smallest budget that --minutes chooses."""
SAFETY = 0.8
"""The share of --minutes that an audit is planned for: an estimate may be wrong, and other programs may run."""


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
        asked["attacks"] = _with_budget(attacks or base.attacks, options["budget"])
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    config = dataclasses.replace(base, **given)
    if options["minutes"] is not None:
        if options["budget"] is not None or resume:
            raise ParameterError(
                "audit: --minutes chooses the budget when an audit begins; leave --budget and --resume out, or it"
            )
        config = _within(config, output or default_folder(config), options["minutes"], options["workers"])
        say(f"{duration(60 * options['minutes'])}: {config.attacks[0]}")
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


def _with_budget(attacks: Sequence[str], budget: str) -> tuple[str, ...]:
    """The attacks, with `auto` at another budget."""
    seconds = BUDGETS[checks.choice("audit", "budget", budget, BUDGETS)]
    _require_auto("--budget", attacks)
    return tuple(_auto(seconds) if _is_auto(spec) else spec for spec in attacks)


def _is_auto(spec: str) -> bool:
    """Whether a spec is that of `auto`, with any budget."""
    return parse_spec(spec)[0] == "auto"


def _require_auto(option: str, attacks: Sequence[str]) -> None:
    if not any(map(_is_auto, attacks)):
        raise ParameterError(
            f"audit: {option} is the budget of auto, got attacks {', '.join(attacks)}; add --attack auto, or leave "
            f"{option} out"
        )


def _auto(seconds: float) -> str:
    return f"auto:seconds={seconds:g}"


def _within(config: AuditConfig, folder: Path, minutes: float, workers: int | None) -> AuditConfig:
    """The same audit with as large a budget of `auto` as fits into so many minutes."""
    _require_auto("--minutes", config.attacks)

    def duration_with(seconds: float) -> float:
        return make_plan(_at(config, seconds), folder, workers=workers).duration

    # The time is a constant, for trainings and games, plus a multiple of the budget.
    few, many = BUDGETS["quick"], BUDGETS["standard"]
    shorter, longer = duration_with(few), duration_with(many)
    slope = max(longer - shorter, 1e-3) / (many - few)
    seconds = few + (SAFETY * 60 * minutes - shorter) / slope
    if seconds < LEAST_SECONDS:
        needed = (shorter - (few - LEAST_SECONDS) * slope) / 60 / SAFETY
        raise ParameterError(
            f"audit: expected at least {math.ceil(needed)} minutes for this audit on this machine, got {minutes:g}; "
            "give more, or ask for fewer --victims, --defense or --rounds"
        )
    # Two digits: the estimate is no better, and the same audit is then found again by its name.
    return _at(config, float(f"{seconds:.2g}"))


def _at(config: AuditConfig, seconds: float) -> AuditConfig:
    attacks = tuple(_auto(seconds) if _is_auto(spec) else spec for spec in config.attacks)
    return dataclasses.replace(config, attacks=attacks)
