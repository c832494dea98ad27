"""An audit folder, whoever it comes from: its config and its rows, believed only after every check.

`read_audit` and `read_rows` are the only ways in, for an audit that goes on as for the report. Neither runs anything
that a folder names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gradveil.audit import schema
from gradveil.audit.schema import refuse, short
from gradveil.audit.store import BLIND_GUESS, CONFIG, MATCHES, RESULTS, UTILITY, JsonLines, Row, command_line
from gradveil.errors import DataError, OutputError
from gradveil.registry import parse_spec

LARGEST_CONFIG = 64 * 2**20
LARGEST_ROWS = 512 * 2**20
MOST_ROWS = 1_000_000


@dataclass(frozen=True)
class Rows:
    """The rows of an audit folder; `torn` names the files whose last line was cut short.

    Example:
        >>> Rows([], [], [], ("results.jsonl",)).torn
        ('results.jsonl',)
    """

    results: Sequence[Row]
    utility: Sequence[Row]
    matches: Sequence[Row]
    torn: tuple[str, ...]


class SealedLines(JsonLines):
    """Rows of one audit: each is appended with the identity of the audit and a digest of its own.

    Args:
        path: the file, which `read_rows` has checked; a last line that was cut short is dropped.
        audit: the identity, which is the digest of config.json.

    Example:
        >>> import tempfile
        >>> lines = SealedLines(Path(tempfile.mkdtemp()) / "rows.jsonl", "0123456789abcdef")
        >>> lines.append([{"victim": 0}])
        >>> sorted(lines.rows[0])
        ['audit', 'digest', 'victim']
    """

    def __init__(self, path: Path, audit: str) -> None:
        super().__init__(path)
        self.audit = audit

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows and wait until they are on disk."""
        super().append(schema.sealed({**row, "audit": self.audit}) for row in rows)


def is_model_file(model: str) -> bool:
    """Whether a model's spec names a Python file, which is run to build it.

    >>> is_model_file("mine.py@build:width=3"), is_model_file("lenet:init=uniform")
    (True, False)
    """
    name = parse_spec(model)[0]
    return "@" in name or name.endswith(".py")


def read_audit(folder: Path) -> Row:
    """What config.json says, each key of its type and in its range, all of them in agreement."""
    refuse_links(folder)
    path = folder / CONFIG
    if not path.is_file():
        raise DataError(f"{path}: no such file, so this is not an audit folder; `gradveil audit --out DIR` makes one")
    config = schema.parse(CONFIG, _content(path, LARGEST_CONFIG))
    check_config(config)
    return config


def check_config(config: Row) -> None:
    """Refuse a config.json that no audit can have written."""
    schema.check(CONFIG, config, schema.CONFIG_SCHEMA)
    _check_methods(config)
    _check_victims(config)
    if len(config["input_shape"]) != 3:
        refuse(CONFIG, "input_shape", "three whole numbers", short(config["input_shape"]))
    if is_model_file(config["model"]) != (config["model_file_digest"] is not None):
        expected = "the digest of the model's file, and null where the model is no file"
        refuse(CONFIG, "model_file_digest", expected, short(config["model_file_digest"]))
    if config["command"] != (expected := command_line(config)):
        refuse(CONFIG, "command", f"the command of these settings ({short(expected)})", short(config["command"]))
    schema.check_seal(CONFIG, config)


def read_rows(folder: Path, config: Row) -> Rows:
    """The rows of a folder, all of them of the audit that `config` describes.

    A last line that was cut short by a kill is left out and its file named in `torn`; anything else that is broken,
    or that says another audit, raises `DataError` with the file and the line.
    """
    torn: list[str] = []
    matches = _read(folder / MATCHES, schema.MATCH_SCHEMA, config, torn, lambda where, row: _match(where, row, config))
    attacked = strengths(config, matches)
    results = _read(
        folder / RESULTS, schema.RESULT_SCHEMA, config, torn, lambda where, row: _result(where, row, config, attacked)
    )
    utility = _read(
        folder / UTILITY, schema.UTILITY_SCHEMA, config, torn, lambda where, row: _utility(where, row, attacked)
    )
    _refuse_repeats(MATCHES, matches, "asked")
    _refuse_repeats(RESULTS, results, "defense_spec", "attack_spec", "adaptive", "victim")
    _refuse_repeats(UTILITY, utility, "defense_spec")
    return Rows(results, utility, matches, tuple(torn))


def strengths(config: Mapping[str, Any], matches: Sequence[Row]) -> dict[str, str]:
    """The defenses as they were asked for, by how they are attacked; those that a match left out are not there."""
    found = {row["asked"]: row["found"] for row in matches}
    attacked = {asked: found.get(asked, asked) for asked in config["defenses"]}
    return {spec: asked for asked, spec in attacked.items() if spec is not None}


def refuse_links(folder: Path) -> None:
    """Refuse a folder in which a file is a link, through which an audit would read or write somewhere else."""
    inside = [folder / name for name in (".lock", CONFIG, RESULTS, UTILITY, MATCHES, "images")]
    try:
        links = [path for path in inside if path.is_symlink()]
        if not links and (folder / "images").is_dir():
            links = [path for path in (folder / "images").iterdir() if path.is_symlink()]
    except OSError as error:
        raise DataError(f"{folder}: expected a readable folder, got {error.strerror}") from error
    if links:
        name = links[0].relative_to(folder)
        raise OutputError(
            f"{folder}: expected files, got {short(str(name))}, a link to somewhere else; remove the link"
        )


# -- checks of the config ----------------------------------------------------------------------------------------------


def _check_methods(config: Row) -> None:
    for key in ("defenses", "attacks"):
        repeated = [spec for spec in config[key] if config[key].count(spec) > 1]
        if repeated or not config[key]:
            expected = "a list of at least one text, none of them twice"
            refuse(CONFIG, key, expected, f"{short(repeated[0])} twice" if repeated else "none")
    known = {(defense, attack) for defense in config["defenses"] for attack in config["attacks"]}
    for pair in config["adapted"]:
        if tuple(pair) not in known:
            refuse(CONFIG, "adapted", "a list of pairs of a defense and an attack of this audit", short(pair))
    for spec in config["generic"]:
        if spec not in config["defenses"]:
            refuse(CONFIG, "generic", "a list of defenses of this audit", short(spec))
    rows = len(known) * config["victims"]
    if rows > MOST_ROWS:
        refuse(CONFIG, "victims", f"few enough for {MOST_ROWS:,} rows", f"{rows:,} rows")


def _check_victims(config: Row) -> None:
    labels, images = config["victim_labels"], config["batch_size"] * config["aggregated"]
    if len(labels) != config["victims"] or any(len(one) != images for one in labels):
        refuse(CONFIG, "victim_labels", f"{config['victims']} lists of {images} labels", short(labels))
    outside = [label for one in labels for label in one if label >= len(config["classes"])]
    if outside:
        refuse(CONFIG, "victim_labels", f"labels below {len(config['classes'])}, the classes", short(outside[0]))


# -- checks of the rows ------------------------------------------------------------------------------------------------


def _read(
    path: Path, kinds: schema.Schema, config: Row, torn: list[str], check: Callable[[str, Row], None]
) -> list[Row]:
    if not path.exists():
        return []
    *lines, rest = _content(path, LARGEST_ROWS).split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path.name} line {number}"
            rows.append(_checked(where, schema.parse(where, line), kinds, config, check))
    if rest.strip():
        where = f"{path.name} line {len(lines) + 1}"
        try:
            last = schema.parse(where, rest)
        except DataError:
            torn.append(path.name)  # a kill can cut only the last line short, which then has no line end
        else:
            rows.append(_checked(where, last, kinds, config, check))
    return rows


def _checked(where: str, row: Row, kinds: schema.Schema, config: Row, check: Callable[[str, Row], None]) -> Row:
    schema.check(where, row, kinds)
    for key in ("dataset", "model", "seed", "batch_size", "aggregated"):
        if key in row and row[key] != config[key]:
            _refuse_another(where, key, short(config[key]), short(row[key]))
    check(where, row)
    if row["audit"] != config[schema.DIGEST]:
        _refuse_another(where, "audit", config[schema.DIGEST], row["audit"])
    schema.check_seal(where, row)
    return row


def _refuse_another(where: str, key: str, expected: str, got: str) -> NoReturn:
    refuse(where, key, f"{expected}, as {CONFIG} has it", f"{got}, a row of another audit")


def _result(where: str, row: Row, config: Row, attacked: Mapping[str, str]) -> None:
    if row["victim"] >= config["victims"]:
        refuse(where, "victim", f"a number below {config['victims']}, the victims of the audit", str(row["victim"]))
    if row["attack_spec"] == BLIND_GUESS:
        if row["defense_spec"] is not None or row["adaptive"]:
            refuse(where, "defense_spec", "null for the blind guess", short(row["defense_spec"]))
        return
    asked = _asked(where, row, attacked)
    if row["attack_spec"] not in config["attacks"]:
        refuse(where, "attack_spec", "an attack of the audit", short(row["attack_spec"]))
    adapted = [asked, row["attack_spec"]] in config["adapted"]
    if row["adaptive"] != adapted and (row["adaptive"] or config["adaptive"]):
        refuse(where, "adaptive", f"{adapted}, as {CONFIG} has it", str(row["adaptive"]))


def _utility(where: str, row: Row, attacked: Mapping[str, str]) -> None:
    _asked(where, row, attacked)


def _match(where: str, row: Row, config: Row) -> None:
    if row["asked"] not in config["defenses"]:
        refuse(where, "asked", "a defense of the audit", short(row["asked"]))
    if config["match"] != (price := f"{row['kind']}={row['target']:g}"):
        refuse(where, "target", f"the price of the audit ({config['match'] or 'none'})", price)
    if row["found"] is not None and row["found"].partition(":")[0] != row["asked"].partition(":")[0]:
        refuse(where, "found", f"{short(row['asked'])} at some strength", short(row["found"]))


def _asked(where: str, row: Row, attacked: Mapping[str, str]) -> str:
    if row["defense_spec"] not in attacked:
        refuse(where, "defense_spec", "a defense of the audit", short(row["defense_spec"]))
    return attacked[row["defense_spec"]]


def _refuse_repeats(file: str, rows: Sequence[Row], *keys: str) -> None:
    seen = set()
    for row in rows:
        key = tuple(row[name] for name in keys)
        if key in seen:
            words = ", ".join(str(part) for part in key)
            raise DataError(f"{file}: two rows for ({words}) would be counted twice; remove one of them")
        seen.add(key)


def _content(path: Path, most: int) -> bytes:
    try:
        if not path.is_file():
            raise DataError(f"{path.name}: expected a file, got something else; remove it or choose another folder")
        if (size := path.stat().st_size) > most:
            raise DataError(f"{path.name}: expected at most {most:,} bytes, got {size:,}; this is no file of an audit")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path.name}: expected a file that can be read, got {error.strerror}") from error
