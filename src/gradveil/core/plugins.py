"""Methods from outside the package: from a file (``--plugin FILE``), or by entry points of installed packages.

Either way the code registers what it brings as the package's own files do, ``@DEFENSES.register("mine")``. A package
names each of its methods in its ``pyproject.toml``, so that gradveil finds it without importing the others::

    [project.entry-points."gradveil.defenses"]
    mine = "my_package.my_module"
"""

import ast
import os
import sys
import traceback
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from gradveil.core.digests import bytes_digest
from gradveil.core.errors import PluginError

GROUPS = ("gradveil.defenses", "gradveil.attacks", "gradveil.metrics", "gradveil.modalities")

_files: dict[str, str] = {}  # digests by path
_packages: dict[str, str] = {}  # versions by name
_tried: dict[EntryPoint, PluginError | None] = {}


def load_files(paths: Iterable[str]) -> None:
    """Run the files of plugins, with all that they may do; content that has been run already is not run again.

    Args:
        paths: Python files that register methods when they are run.
    """
    for path in paths:
        _load_file(path)


def _load_file(path: str) -> None:
    path = os.path.normpath(path)  # so that ./mine.py is mine.py
    file = Path(path)
    if not file.is_file():
        raise PluginError(f"plugin {path}: no such file")
    content = file.read_bytes()
    digest = bytes_digest(content)
    try:
        if digest not in _files.values():
            run_code(content, file, f"gradveil_plugin_{digest}")
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise PluginError(f"plugin {where}: {type(error).__name__}: {error}; fix it, or leave it out") from error
    _files[path] = digest


def run_code(content: bytes, path: Path, name: str) -> ModuleType:
    """Run the content of a Python file as a module called `name`."""
    module = ModuleType(name)
    module.__file__ = str(path.resolve())
    sys.modules[name] = module  # where dataclasses look up annotations
    try:
        # Not by a loader, which would run a compiled copy that lies in __pycache__: digests are of the file itself.
        exec(compile(content, path, "exec"), module.__dict__)
    finally:
        del sys.modules[name]  # Ray then sends its classes whole to processes that could not import it
    return module


class _FromSource(SourceFileLoader):
    """Loads a module from its source only, never from a compiled copy that lies in ``__pycache__``."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True)


class _Neighbours(MetaPathFinder):
    """Finds modules and packages in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for place in [self.folder] if path is None else map(Path, path):
            if place != self.folder and self.folder not in place.parents:
                continue
            stem = place / fullname.rpartition(".")[2]
            for file, inside in ((stem / "__init__.py", [str(stem)]), (stem.with_suffix(".py"), None)):
                if file.is_file():
                    loader = _FromSource(fullname, str(file))
                    return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=inside)
        return None


@contextmanager
def neighbours(path: Path) -> Iterator[None]:
    """Inside the context, code may import the modules next to the file `path`; afterwards they are forgotten."""
    finder, before = _Neighbours(path.resolve().parent), set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            # Another file may have neighbours of the same names.
            if finder.folder in Path(getattr(sys.modules[name], "__file__", None) or "").parents:
                del sys.modules[name]


def imported_files(path: Path) -> list[Path]:
    """The file `path` and the files next to it that it imports, also by way of each other; nothing is run.

    A package counts with all of its files.
    """
    found, waiting = list[Path](), [path]
    while waiting:
        file = waiting.pop(0)
        if file in found:
            continue
        found.append(file)
        try:
            nodes = list(ast.walk(ast.parse(file.read_bytes())))
        except SyntaxError:
            continue  # running it will say so
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        for name in names:
            stem = path.parent / name.partition(".")[0]
            waiting += [stem.with_suffix(".py")] if stem.with_suffix(".py").is_file() else []
            waiting += sorted(stem.rglob("*.py")) if (stem / "__init__.py").is_file() else []
    return found


def place_of(error: BaseException) -> str:
    """Where in the user's own code an error arose, as ``FILE, line N``; empty if it arose elsewhere."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    ours = str(Path(__file__).resolve().parents[1])
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, "<", sys.prefix, sys.base_prefix))
    ]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


def load_installed(group: str, registered: Container[str], name: str | None = None) -> None:
    """Import what installed packages bring of one kind, so that it registers itself.

    Args:
        group: the kind, one of `GROUPS`.
        registered: the names that the registry holds, now and after the import.
        name: import only what is called so, and raise if it is broken; None: import everything, and warn of what is.
    """
    for entry in installed(group):
        if name not in (None, entry.name):
            continue
        if entry not in _tried:
            _tried[entry] = _import(entry, registered)
            if name is None and (broken := _tried[entry]):
                warnings.warn(str(broken), stacklevel=3)
        if name is not None and (broken := _tried[entry]):
            raise broken


def _import(entry: EntryPoint, registered: Container[str]) -> PluginError | None:
    """Import an entry point's module; return what was wrong with it, if anything."""
    package = entry.dist.name if entry.dist else "?"
    version = entry.dist.version if entry.dist else "?"
    source = f"plugin {entry.name} of the package {package} {version} ({entry.value})"
    try:
        entry.load()
    except (Exception, SystemExit) as error:
        return PluginError(f"{source}: {type(error).__name__}: {error}; fix the package, or uninstall it")
    if entry.name not in registered:
        kind = entry.group.rpartition(".")[2]
        return PluginError(f"{source}: expected it to register {entry.name!r} among the {kind}, but it did not")
    _packages[package] = version
    return None


def loaded_files() -> dict[str, str]:
    """The digests of the plugin files that were run, by their paths."""
    return dict(_files)


def loaded_packages() -> dict[str, str]:
    """The versions of the packages that something was imported from, by their names."""
    return dict(_packages)


@cache
def installed(group: str) -> list[EntryPoint]:
    """What installed packages bring of one kind."""
    return list(entry_points(group=group))
