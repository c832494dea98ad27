"""The plan of the house: what may import what, and which modules are private."""

import ast
from pathlib import Path

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


def test_a_module_imports_only_from_stages_before_its_own():
    against = [
        (str(path.relative_to(PACKAGE)), ".".join(parts))
        for path in modules()
        for parts in imported(path)
        # What is not a stage is a name that gradveil itself exports, the version for example.
        if STAGE.get(parts[0], 0) > STAGE[path.relative_to(PACKAGE).parts[0].removesuffix(".py")]
    ]
    assert against == []


def is_private(package, name):
    return name.startswith("_") and (PACKAGE.joinpath(*package) / f"{name}.py").exists()


def test_a_private_module_is_imported_by_its_own_package_only():
    against = [
        (str(path.relative_to(PACKAGE)), ".".join(parts))
        for path in modules()
        for parts in imported(path)
        for depth in range(1, len(parts))
        if is_private(parts[:depth], parts[depth])
        and path.relative_to(PACKAGE).parts[:-1][:depth] != tuple(parts[:depth])
    ]
    assert against == []
