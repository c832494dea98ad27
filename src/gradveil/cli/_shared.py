"""What commands share: options that are lists of numbers, how to resume a folder, and whose code that runs."""

from collections.abc import Mapping
from pathlib import Path

from gradveil.audit.folder import is_model_file
from gradveil.audit.store import resume_command
from gradveil.core import plugins
from gradveil.core.errors import OutputError, ParameterError
from gradveil.core.registry import format_spec, parse_spec
from gradveil.data import is_table, is_text

TABLE_MODEL = "mlp"
TEXT_MODEL = "text-transformer"
"""The model for tables if none is named."""


def numbers(command: str, name: str, text: str | None) -> tuple[float, ...] | None:
    """Numbers with commas between them.

    >>> numbers("audit", "mean", "0.5,0.25")
    (0.5, 0.25)
    """
    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise ParameterError(f"{command}: --{name} must be numbers with commas between them, got {text!r}") from None


def with_target(command: str, dataset: str, target: str | None) -> str:
    """The spec of a data set with the column to predict.

    >>> with_target("audit", "people.csv", "income")
    'people.csv:target=income'
    """
    if target is None:
        return dataset
    if not target.strip() or "," in target:
        raise ParameterError(f"{command}: --target must be the name of a column, without commas, got {target!r}")
    name, parameters = parse_spec(dataset)
    return format_spec(name, {**parameters, "target": target})


def default_model(dataset: str, default: str) -> str:
    """The model for a data set if none is named.

    >>> default_model("people.csv:target=income", "lenet"), default_model("mnist", "lenet")
    ('mlp', 'lenet')
    >>> default_model("sst2:length=16", "lenet")
    'text-transformer'
    """
    name, _ = parse_spec(dataset)
    if is_text(name):
        return TEXT_MODEL
    return TABLE_MODEL if is_table(name) else default


def how_to_resume(command: str, folder: Path, model: str) -> str:
    """The command that resumes what was stopped."""
    return resume_command(folder, model if is_model_file(model) else None, command, list(plugins.loaded_files()))


def untrusted(command: str, folder: Path, model: str) -> OutputError:
    """The error for a folder whose model is a file, which is run only if the user names it."""
    return OutputError(
        f"{command}: {folder} was begun with the model {model}, a file whose code would run, but --resume runs no code "
        f"that was not named; if you trust that file: {how_to_resume(command, folder, model)}"
    )


def refuse_other_plugins(command: str, folder: Path, began_with: Mapping[str, str]) -> None:
    """Refuse to resume without the plugin files that a folder was begun with, or with others."""
    loaded = plugins.loaded_files()
    if absent := [path for path in began_with if path not in loaded]:
        raise OutputError(
            f"{command}: {folder} was begun with the plugin {absent[0]}, a file whose code would run, but --resume "
            f"runs no code that was not named; if you trust that file, add --plugin {absent[0]}"
        )
    if loaded != began_with:
        changed = next(path for path in loaded if loaded[path] != began_with.get(path))
        state = "has changed since" if changed in began_with else "was not part of it"
        raise OutputError(
            f"{command}: {folder} was begun with other plugins: {changed} {state}; restore what it was begun with, "
            "or choose another --out"
        )
