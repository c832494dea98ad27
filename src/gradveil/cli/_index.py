"""What ``gradveil list`` prints and what ``gradveil audit --help`` says of defaults, without importing torch.

Both are kept in ``index.json``, which ``python -m gradveil.cli._index`` writes; a test compares it with the
registries. If there are plugins, or a file of methods has come or gone since, the registries are read instead.
"""

import inspect
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from gradveil.core import plugins

FILE = Path(__file__).with_name("index.json")
LISTS = ("defenses", "attacks", "datasets", "models", "metrics")

_FOLDERS = ("defenses", "attacks", "models", "metrics")

Row = dict[str, Any]


@cache
def read_index() -> dict[str, Any]:
    """The file: a list for each of `LISTS`, the settings of an audit with their defaults, and the files of methods."""
    index: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return index


def read_lists(files: Iterable[str] = ()) -> dict[str, list[Row]]:
    """The rows of every list; those of plugins, from `files` or installed packages, are among them."""
    plugins.load_files(files)
    index = read_index()
    has_plugins = plugins.loaded_files() or any(map(plugins.installed, plugins.GROUPS))
    current = build() if has_plugins or index["files"] != _method_files() else index
    return {name: current[name] for name in LISTS}


def _method_files() -> list[str]:
    package = FILE.parents[1]
    return sorted(f"{folder}/{path.name}" for folder in _FOLDERS for path in (package / folder).glob("*.py"))


def build() -> dict[str, Any]:
    """What the file should hold, from the registries."""
    from gradveil import models
    from gradveil.attacks import ATTACKS
    from gradveil.audit import AuditConfig
    from gradveil.data.catalog import DATASETS
    from gradveil.data.loader import SOURCES
    from gradveil.defenses import DEFENSES
    from gradveil.metrics import METRICS

    return {
        "defenses": [*(_method(DEFENSES.create(name)) for name in DEFENSES.names()), _error_feedback()],
        "attacks": [_method(ATTACKS.create(name)) for name in ATTACKS.names()],
        "datasets": [
            *(_row(entry.name, entry.summary, entry.licence, {}) for entry in DATASETS),
            *(_row(name, _summary(SOURCES.get(name)), "-", {}) for name in SOURCES.names()),
        ],
        "models": [_row(name, *models.describe(name)) for name in models.names()],
        "metrics": [_metric(METRICS.get(name)) for name in METRICS.names()],
        "audit": AuditConfig().to_json(),
        "files": _method_files(),
    }


def _method(method: Any) -> Row:
    from gradveil.core.parameters import meanings

    row = _row(method.name, _summary(method), getattr(method, "paper", "-"), method.parameters)
    return row | {"meanings": meanings(type(method))}


def _summary(method: Any) -> str:
    """The first line of a docstring, without the marks of Markdown."""
    return re.sub(r"[*`]", "", (inspect.getdoc(method) or "").partition("\n")[0])


def _error_feedback() -> Row:
    """Error feedback wraps a defense, so it is not in the registry."""
    from gradveil.defenses import DEFENSES, ErrorFeedback

    wrapper = ErrorFeedback(DEFENSES.create("none"))
    parameters = {"decay": wrapper.decay, "clip": wrapper.clip}
    return _row("error-feedback", f"{_summary(wrapper)} Written NAME+error-feedback", wrapper.paper, parameters)


def _metric(metric: Any) -> Row:
    return _row(metric.name, metric.summary, f"for {', '.join(metric.modalities)}", {})


def _row(name: str, summary: str, source: str, parameters: Row) -> Row:
    return {"name": name, "summary": summary, "source": source, "parameters": parameters}


if __name__ == "__main__":
    FILE.write_text(json.dumps(build(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(FILE)
