"""Count what the design limits: lines of code, and modules that assume that an input is an image.

    python scripts/count.py [ROOT] [--modules]

ROOT is a checkout, by default this one; to count another commit, use ``git worktree add /tmp/before COMMIT`` first.
``--modules`` also lists the modules, each with the evidence.

A **code line** holds at least one token that is neither a comment nor a docstring.

A module **assumes images** if its code, without comments and docstrings,

- names one of `WORDS` in an identifier, a parameter or a string (``image_psnr`` names two of them), or a torch function
  or module for two dimensions (``Conv2d``);
- scales by 255;
- assumes that a shape has three numbers: unpacks ``x.shape`` into three names, or compares ``ndim`` with 4 or the
  length of an ``input_shape`` with 3.

Naming the object `IMAGE` as the default of a parameter or field does not count, because another modality can be given.
Nor do, in audit/ and report/, the names of an audit's files and rows (`FILE_NAMES`): examples are shown there.
Modules that assume images are expected only in `PLACES`.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

WORDS = {
    *("image", "images", "pixel", "pixels", "channel", "channels", "psnr", "ssim", "lpips", "tv", "variation"),
}

FILE_NAMES = re.compile(r"image|image_digest|images(_missing)?|images/.*|a path images/.*")

PLACES = {
    "the image modality": ["modality/image.py", "modality/__init__.py"],
    "readers of image data": [
        f"data/{reader}.py"
        for reader in ("_arrays", "catalog", "fetcher", "formats", "_image_folder", "_limits", "loader")
    ],
    "models": ["models/*"],
    "image metrics": [
        *("metrics/__init__.py", "metrics/images.py", "metrics/noise_ratio.py", "metrics/perceptual_distance.py"),
        *("metrics/signal_to_noise.py", "metrics/squared_error.py", "metrics/structural_similarity.py"),
    ],
    "image attacks": [
        *("attacks/*imprint*", "attacks/loki*", "attacks/robbing*", "attacks/r_gap*", "attacks/inverting_gradients*"),
        *("attacks/grad_inversion*", "attacks/presets.py", "theory/rank.py", "models/inspection.py"),
    ],
    "image defenses": ["defenses/ats*", "defenses/refiner*", "defenses/_transforms.py", "defenses/_denoising.py"],
    "pictures in reports": ["report/_images.py", "report/_gallery.py", "report/_picture.py"],
}
"""Where assuming images is legitimate, as file patterns inside the package."""


def code_lines(path: Path) -> int:
    """The number of lines with code."""
    text = path.read_text(encoding="utf-8")
    docstring_lines = {
        line
        for docstring in docstrings(ast.parse(text))
        for line in range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)
    }
    not_code = {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in not_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines)


def docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """The docstrings of modules, classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and _is_text(first.value):
                yield first


def image_evidence(path: Path) -> str | None:
    """What in a module assumes images, with its line; None if nothing does."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    writes_pictures = path.parent.name in ("audit", "report")
    # A string on its own documents the name above it.
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and _is_text(node.value)}
    defaults = {id(node) for node in _defaults(tree)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if id(node) in prose or id(node) in defaults:
            continue
        for text in _names(node):
            if writes_pictures and FILE_NAMES.fullmatch(text):
                continue
            found = [word for word in _words(text) if word in WORDS or re.fullmatch(r"[a-z]+2d", word)]
            if found and not (isinstance(node, ast.alias) and text == "IMAGE"):
                return f"line {line}: {found[0]!r}"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div) and 255 in _numbers(node):
            return f"line {line}: scales by 255"
        if isinstance(node, ast.Call) and _attribute(node.func) in ("mul", "div") and 255 in _numbers(*node.args):
            return f"line {line}: scales by 255"
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            shape = _attribute(_unsubscripted(node.value)) in ("shape", "input_shape")
            if shape and len(node.targets[0].elts) == 3:
                return f"line {line}: unpacks a shape into three"
        if isinstance(node, ast.Compare) and (
            (_attribute(node.left) == "ndim" and 4 in _numbers(*node.comparators))
            or (_is_length_of_input_shape(node.left) and 3 in _numbers(*node.comparators))
        ):
            return f"line {line}: compares the number of axes with an image's"
    return None


def _defaults(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes where `IMAGE` is a default value."""
    for node in ast.walk(tree):
        values: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef):
            values = [*node.args.defaults, *node.args.kw_defaults]
        elif isinstance(node, ast.AnnAssign):
            values = [node.value]
        yield from (value for value in values if isinstance(value, ast.Name) and value.id == "IMAGE")


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.alias(name=text):
            yield text
        case ast.keyword(arg=str(text)) | ast.Constant(value=str(text)):
            yield text
        case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
            yield text


def _words(text: str) -> list[str]:
    """The words of an identifier or a sentence.

    >>> _words("imagePSNR_of two-pixels"), _words("Conv2d")
    (['image', 'psnr', 'of', 'two', 'pixels'], ['conv2d'])
    """
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+(?:\d+d)?", text)
    return [part.lower() for part in parts]


def _numbers(*nodes: ast.AST) -> set[object]:
    inside = [*nodes, *(child for node in nodes for child in ast.iter_child_nodes(node))]
    return {node.value for node in inside if isinstance(node, ast.Constant)}


def _attribute(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _unsubscripted(node: ast.AST) -> ast.AST:
    return node.value if isinstance(node, ast.Subscript) else node


def _is_length_of_input_shape(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and _attribute(node.func) == "len"
        and bool(node.args)
        and _attribute(node.args[0]) == "input_shape"
    )


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def place_of(module: str) -> str | None:
    """The place of a module that assumes images; None if it should not assume them."""
    for place, patterns in PLACES.items():
        if any(fnmatch(module, pattern) for pattern in patterns):
            return place
    return None


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--modules", action="store_true", help="list the modules that assume images")
    arguments = parser.parse_args()
    package = arguments.root / "src" / "gradveil"
    modules = sorted(package.rglob("*.py"))
    experiments = sorted((arguments.root / "experiments").rglob("*.py"))
    runners = [path for path in experiments if not path.stem.startswith(("plot", "report"))]
    evidence = {path.relative_to(package).as_posix(): image_evidence(path) for path in modules}
    assuming = {name: found for name, found in evidence.items() if found}
    rows = [
        ("code lines of src", sum(map(code_lines, modules))),
        ("code lines of experiments' runners", sum(map(code_lines, runners))),
        ("code lines of experiments' plots and reports", sum(code_lines(p) for p in experiments if p not in runners)),
        ("modules", len(modules)),
        ("modules that assume images", len(assuming)),
        *((f"  {place}", sum(place_of(name) == place for name in assuming)) for place in PLACES),
        ("  anywhere else", sum(place_of(name) is None for name in assuming)),
    ]
    width = max(len(label) for label, _ in rows)
    for label, count in rows:
        print(f"{label:<{width}}  {count:>7,}")
    if arguments.modules:
        for place in (*PLACES, None):
            print(f"\n{place or 'anywhere else'}")
            for name, found in assuming.items():
                if place_of(name) == place:
                    print(f"  {name}: {found}")


if __name__ == "__main__":
    main()
