"""The plan of the house: what may import what, and which modules are private."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "gradveil"

# Each stage imports only from stages before it (or beside it, in the same set).
ORDER = (
    {"core", "_version"},
    {"modality"},
    {"data", "models", "metrics", "task"},
    {"update"},
    {"defenses"},
    {"theory"},
    {"attacks"},
    {"federation", "flower"},
    {"audit"},
    {"report"},
    {"cli", "__main__", "__init__"},
)
STAGE = {name: place for place, names in enumerate(ORDER) for name in names}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def imported(path):
    """The modules of the package that a file imports, by their parts below ``gradveil``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "gradveil" and rest:
                yield rest


def test_every_module_has_its_place():
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()} == STAGE.keys()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_stages_before_its_own(path):
    mine = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for parts in imported(path):
        # What is not a stage is a name that gradveil itself exports, the version for example.
        assert STAGE.get(parts[0], 0) <= STAGE[mine], f"{path} imports gradveil.{'.'.join(parts)}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_private_module_is_imported_by_its_own_package_only(path):
    mine = path.relative_to(PACKAGE).parts[:-1]
    for parts in imported(path):
        for depth, part in enumerate(parts):
            if part.startswith("_") and depth and (PACKAGE.joinpath(*parts[:depth]) / f"{part}.py").exists():
                assert mine[:depth] == tuple(parts[:depth]), f"{path} imports gradveil.{'.'.join(parts)}"
