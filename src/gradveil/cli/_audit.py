"""``gradveil audit``: what it does."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.progress import TextColumn

import gradveil
from gradveil import report
from gradveil.attacks.presets import BUDGETS
from gradveil.audit import AuditConfig, Step, default_folder
from gradveil.audit import run as run_audit
from gradveil.audit.folder import is_model_file, read_audit
from gradveil.audit.rows import SETTINGS
from gradveil.audit.store import CONFIG
from gradveil.cli import _report
from gradveil.cli._console import INTERRUPTED, NOTHING_TO_RESUME, progress_bar, say
from gradveil.cli._shared import how_to_resume, refuse_other_plugins, untrusted
from gradveil.core import checks, plugins
from gradveil.core.errors import ParameterError
from gradveil.core.registry import parse_spec


def run(options: Mapping[str, Any]) -> None:
    """Run the command; most options have the name of a setting of `AuditConfig`."""
    plugins.load_files(options["plugin"] or ())
    output: Path | None = options["output"]
    resume: bool = options["resume"]
    fail_if: list[str] = options["fail_if"] or []
    for condition in fail_if:
        checks.choice("audit", "--fail-if", condition, report.CONDITIONS)
    asked = {name: options[name] for name in SETTINGS if name in options}
    attacks = options["attack"]
    asked |= {"defenses": tuple(options["defense"] or ()) or None, "attacks": tuple(attacks or ()) or None}
    asked |= {name: _numbers(name, options[name]) for name in ("mean", "std")}
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
        say(NOTHING_TO_RESUME.format(output))
    say(f"auditing {config.model} on {config.dataset} into {folder}")
    try:
        with progress_bar(TextColumn("{task.percentage:>3.0f} %")) as bar:
            line = bar.add_task("starting", total=1.0)

            def show(step: Step) -> None:
                words = f"{step.what} ({step.done + 1} of {step.total})"
                bar.update(line, description=words, completed=step.overall)

            run_audit(config, folder, resume=resume, progress=show)
    except KeyboardInterrupt:
        say(f"stopped; finished rows are kept. Resume with: {how_to_resume('audit', folder, config.model)}")
        raise typer.Exit(INTERRUPTED) from None
    _report.show(folder, fail_if, as_json=options["as_json"])


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
