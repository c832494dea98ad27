"""Help, version and lists: at once, complete, and true."""

import json
import subprocess
import sys

import pytest
import typer

from gradveil._version import __version__
from gradveil.cli import _index
from gradveil.cli.app import app

COMMANDS = {"audit": [], "report": ["FOLDER"], "train": [], "list": [], "data list": [], "data get": ["NAME"]}
SLOW = {"torch", "numpy", "scipy", "PIL", "jinja2"}


@pytest.mark.parametrize(
    "words", ["--help", "--version", "list", "audit --help", "report --help", "train --help", "data --help"]
)
def test_nothing_slow_is_imported_to_answer(words):
    code = (
        "import sys\n"
        "from gradveil.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=True)
    assert done.stdout
    assert not SLOW & set(done.stderr.split())


def test_the_index_is_that_of_the_registries():
    """If it is not: make index"""
    assert _index.read_index() == json.loads(json.dumps(_index.build()))


def test_a_new_file_of_methods_is_listed_before_the_index_is_written(monkeypatch):
    stale = {name: [] for name in _index.LISTS} | {"files": ["defenses/base.py"]}
    monkeypatch.setattr(_index, "read_index", lambda: stale)
    assert {"top-k", "none"} <= {row["name"] for row in _index.read_lists()["defenses"]}


def test_the_version(gradveil_command):
    assert gradveil_command("--version") == (0, f"gradveil {__version__}\n", "")


def leaves(command, path=()):
    for name, sub in getattr(command, "commands", {}).items():
        yield from leaves(sub, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


LEAVES = dict(leaves(typer.main.get_command(app)))


def test_every_command_is_looked_at():
    assert LEAVES.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_shows_its_default(gradveil_command, name):
    _, out, _ = gradveil_command(*name.split(), "--help")
    shown = " ".join(out.replace("│", " ").split())
    for parameter in LEAVES[name].params:
        if parameter.name == "help" or (parameter.required and parameter.param_type_name == "argument"):
            continue
        label = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name
        assert label in shown
        assert parameter.show_default, label
        if parameter.default is None or parameter.default is False:
            assert f"[default: ({parameter.show_default})]" in shown, label
        else:
            assert f"[default: {parameter.default}]" in shown, label


def test_defaults_of_an_audit_are_its_config(gradveil_command):
    _, out, _ = gradveil_command("audit", "--help")
    shown = " ".join(out.replace("│", " ").split())
    for words in ("Updates attacked under each defense. [default: (8)]", "[default: (mnist)]", "[default: (0.015)]"):
        assert words in shown
