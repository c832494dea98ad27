"""A client that only defends: what it imports, and what it is told of the rest."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Hides every package that only an extra brings, as if it were not installed.
WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {"scipy", "PIL", "jinja2", "typer", "click", "rich", "platformdirs", "dp_accounting", "flwr", "ray", "opacus"}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def run(code, *arguments, check=True):
    command = [sys.executable, "-c", WITHOUT_EXTRAS + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check)


def test_few_packages_are_needed():
    assert len(PROJECT["dependencies"]) <= 2 + 3  # torch, numpy and at most three more


def test_a_client_defends_encodes_and_keeps_its_memory(tmp_path):
    code = """
from pathlib import Path
import torch
import gradveil
from gradveil.federation import ClientMemories

model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1024, 4))
task = gradveil.Task(model, input_shape=(1, 32, 32), classes=4)
inputs, labels = torch.rand(3, 1, 32, 32), torch.tensor([0, 3, 1])
memories = ClientMemories(folder=Path(sys.argv[1]), ram_bytes=0)
NOT_HERE = {"ats"}  # needs Pillow
for name in sorted(set(gradveil.list_defenses()) - NOT_HERE):
    defense, its_task = gradveil.defense(name).prepare(task, public=(inputs, labels))
    announced = defense.announce(its_task, inputs, labels) if defense.announces else None
    update = defense.share(its_task, inputs, labels, memory=memories[0], announced=announced)
    message = gradveil.wire.encode(update)
    assert gradveil.wire.decode(message).keys() == update.keys()
    print(name, len(message))
"""
    done = run(code, str(tmp_path))
    assert "dual-pruning" in done.stdout


def test_what_is_missing_is_said():
    code = """
import gradveil

def spend():
    gradveil.defense("dp-sgd").privacy_spent(rounds=1, batch_size=2, examples=9)

for use in (lambda: gradveil.audit, lambda: gradveil.report, lambda: gradveil.flower, spend):
    try:
        use()
    except gradveil.errors.MissingPackageError as error:
        print(error)
"""
    assert run(code).stdout.splitlines() == [
        "gradveil.audit needs scipy: pip install 'gradveil[audit]'",
        "gradveil.audit needs scipy: pip install 'gradveil[audit]'",
        "gradveil.flower needs Flower, which is not installed: pip install 'gradveil[flower]'",
        "the epsilon of dp-sgd needs dp_accounting: pip install 'gradveil[audit]'",
    ]


@pytest.mark.parametrize("words", ["audit", "list", "--help"])
def test_the_command_line_says_in_one_line_what_to_install(words):
    done = run("from gradveil.cli import main\nmain()", words, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: the command line needs typer: pip install 'gradveil[audit]'\n"
