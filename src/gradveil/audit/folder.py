"""Reads an audit folder, whoever it comes from: its config and rows are used only after they pass every check.

All reading goes through `read_audit` and `read_rows`, for a resumed audit as for the report. Neither runs anything that
a folder names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from gradveil.audit import schema, store
from gradveil.audit.rows import CONFIG_SCHEMA, STAMPS, VERSION, IdentificationRow, MatchRow, ResultRow, Row, UtilityRow
from gradveil.audit.schema import DIGEST, Json, refuse, short
from gradveil.audit.store import BLIND_GUESS, CONFIG, IDENTIFICATIONS, MATCHES, RESULTS, UTILITY, JsonLines, read_lines
from gradveil.core.errors import DataError, OutputError, UnknownNameError
from gradveil.core.registry import parse_spec
from gradveil.metrics import METRICS, Metric
from gradveil.modality import MODALITIES, Modality

MAX_ROWS = 1_000_000
R = TypeVar("R", bound=Row)
T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """The rows of an audit folder; `torn` names the files whose last line was cut short.

    Example:
        >>> Rows([], [], [], [], ("results.jsonl",)).torn
        ('results.jsonl',)
    """

    results: Sequence[ResultRow]
    identifications: Sequence[IdentificationRow]
    utility: Sequence[UtilityRow]
    matches: Sequence[MatchRow]
    torn: tuple[str, ...]


class SealedLines(Generic[R]):
    """Rows of one audit on disk: each is checked, then appended with the identity of the audit and its own digest.

    Args:
        path: the file, which `read_rows` has checked; a last line that was cut short is dropped.
        kind: the type of its rows.
        config: the content of the audit's config.json.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "match.jsonl"
        >>> lines = SealedLines(path, MatchRow, {"digest": "0123456789abcdef", "metrics": {}})
        >>> price = {"kind": "power", "target": 0.5, "tolerance": 0.05, "cost": 0.48, "tries": 4, "reason": None}
        >>> lines.append([MatchRow(asked="top-k", found="top-k:keep=0.1", **price)])
        >>> lines.rows[0].found, sorted(JsonLines(path).rows[0])[1:4]
        ('top-k:keep=0.1', ['audit', 'cost', 'digest'])
    """

    def __init__(self, path: Path, kind: type[R], config: Json) -> None:
        self._lines = JsonLines(path)
        self._audit = config[DIGEST]
        self._schema = {**kind.schema(metrics_of(config)), **STAMPS}
        self.rows = [kind.from_json(values) for values in self._lines.rows]

    def append(self, rows: Iterable[R]) -> None:
        """Add rows and wait until they are on disk."""
        rows = list(rows)
        sealed = [schema.sealed({**row.to_json(), "audit": self._audit}) for row in rows]
        for values in sealed:
            schema.check(f"a row for {self._lines.path.name}", values, self._schema, "fix the code that computes it")
        self._lines.append(sealed)
        self.rows += rows


def is_model_file(model: str) -> bool:
    """Whether a model's spec names a Python file, which is run to build it.

    >>> is_model_file("mine.py@build:width=3"), is_model_file("lenet:init=uniform")
    (True, False)
    """
    name = parse_spec(model)[0]
    return "@" in name or name.endswith(".py")


def modality_of(config: Mapping[str, Any]) -> Modality:
    """The modality of an audit."""
    return _known(MODALITIES.create, config["modality"], config)


def metrics_of(config: Mapping[str, Any]) -> list[Metric]:
    """The metrics of an audit, in the order of the report's tables."""
    return [_known(METRICS.get, name, config) for name in config["metrics"]]


def _known(get: Callable[[str], T], name: str, config: Mapping[str, Any]) -> T:
    """What `get` has of that name; if that is nothing, the error says which plugins the audit was made with."""
    try:
        return get(name)
    except UnknownNameError as error:
        sources = [f"--plugin {path}" for path in config["plugin_files"]]
        sources += [f"the package {package} {version}" for package, version in config["plugin_packages"].items()]
        if not sources:
            raise
        raise UnknownNameError(f"{error}; the audit was made with {', '.join(sources)}") from None


def read_audit(folder: Path) -> Json:
    """Read config.json and check it: every key has its type and range, and all of them agree with each other."""
    refuse_links(folder)
    path = folder / CONFIG
    if not path.is_file():
        raise DataError(f"{path}: no such file, so this is not an audit folder; `gradveil audit --out DIR` makes one")
    config = store.read_json(path)
    check_config(config)
    return config


def check_config(config: Json) -> None:
    """Refuse a config.json that no audit can have written."""
    if (version := config.get("version", "none")) != VERSION:
        raise DataError(
            f"{CONFIG}: expected an audit folder of version {VERSION}, got {short(version)}; run the audit again into "
            "another folder, or read this one with the gradveil that wrote it"
        )
    schema.check(CONFIG, config, CONFIG_SCHEMA)
    _check_methods(config)
    _check_metrics(config)
    _check_victims(config)
    if is_model_file(config["model"]) != (config["model_file_digest"] is not None):
        expected = "the digest of the model's file, or null if the model is not a file"
        refuse(CONFIG, "model_file_digest", expected, short(config["model_file_digest"]))
    if config["command"] != (expected := store.command_line(config)):
        refuse(CONFIG, "command", f"the command of these settings ({short(expected)})", short(config["command"]))
    schema.check_seal(CONFIG, config)


def read_rows(folder: Path, config: Json) -> Rows:
    """Read the rows of a folder, which must all belong to the audit that `config` describes.

    If the process was killed and the last line is cut short, that line is left out and its file named in `torn`;
    anything else that is broken, or belongs to another audit, raises `DataError` with the file and the line.

    The rows are in the order of the config's defenses, attacks and victims; in the files they are in that in which they
    were finished, which with several workers is never the same.
    """
    torn: list[str] = []
    matches = _read(folder / MATCHES, MatchRow, config, torn, partial(_check_match, config=config))
    attacked = strengths(config, matches)
    check_result = partial(_check_result, config=config, attacked=attacked)
    results = _read(folder / RESULTS, ResultRow, config, torn, check_result)
    check_games = partial(_check_identification, config=config, attacked=attacked)
    identifications = _read(folder / IDENTIFICATIONS, IdentificationRow, config, torn, check_games)
    utility = _read(folder / UTILITY, UtilityRow, config, torn, partial(_asked, attacked=attacked))
    place = {spec: number for number, spec in enumerate([None, *attacked, BLIND_GUESS, *config["attacks"]])}
    matches.sort(key=lambda row: list(config["defenses"]).index(row.asked))
    results.sort(key=lambda row: (place[row.defense_spec], place[row.attack_spec], row.adaptive, row.victim))
    identifications.sort(key=lambda row: (place[row.defense_spec], row.adaptive))
    utility.sort(key=lambda row: place[row.defense_spec])
    return Rows(results, identifications, utility, matches, tuple(torn))


def strengths(config: Mapping[str, Any], matches: Sequence[MatchRow]) -> dict[str, str]:
    """Map each defense as it is attacked to the spec that was asked for; defenses that a match left out are missing."""
    found = {row.asked: row.found for row in matches}
    attacked = {asked: found.get(asked, asked) for asked in config["defenses"]}
    return {spec: asked for asked, spec in attacked.items() if spec is not None}


def refuse_links(folder: Path) -> None:
    """Raise if a file of the folder is a link, through which an audit would read or write somewhere else."""
    paths = [folder / name for name in (".lock", CONFIG, RESULTS, IDENTIFICATIONS, UTILITY, MATCHES, "images")]
    try:
        links = [path for path in paths if path.is_symlink()]
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


def _check_methods(config: Json) -> None:
    for key in ("defenses", "attacks"):
        repeated = [spec for spec in config[key] if config[key].count(spec) > 1]
        if repeated or not config[key]:
            expected = "a list of at least one text, none of them twice"
            refuse(CONFIG, key, expected, f"{short(repeated[0])} twice" if repeated else "none")
    pairs = {(defense, attack) for defense in config["defenses"] for attack in config["attacks"]}
    for pair in config["adapted"]:
        if tuple(pair) not in pairs:
            refuse(CONFIG, "adapted", "a list of pairs of a defense and an attack of this audit", short(pair))
    for key, methods in (("generic", "defenses"), ("learned", "attacks"), ("simulating", "attacks")):
        for spec in config[key]:
            if spec not in config[methods]:
                refuse(CONFIG, key, f"a list of {methods} of this audit", short(spec))
    for spec in config["caveats"]:
        if spec not in [*config["defenses"], *config["attacks"]]:
            refuse(CONFIG, "caveats", "an object of defenses and attacks of this audit", short(spec))
    rows = len(pairs) * config["victims"]
    if rows > MAX_ROWS:
        refuse(CONFIG, "victims", f"few enough for {MAX_ROWS:,} rows", f"{rows:,} rows")


def _check_metrics(config: Json) -> None:
    try:
        modality, metrics = modality_of(config), metrics_of(config)
    except UnknownNameError as error:
        raise DataError(f"{CONFIG}: {error}; if a package of your own adds it, import that first") from error
    foreign = any(modality.name not in metric.modalities for metric in metrics)
    if foreign or not config["metrics"].get(modality.primary):
        expected = f"metrics for {modality.name}, {modality.primary} among them"
        refuse(CONFIG, "metrics", expected, short([*config["metrics"]]))
    if modality.dimensions not in (None, len(config["input_shape"])):
        refuse(CONFIG, "input_shape", f"{modality.dimensions} whole numbers", short(config["input_shape"]))


def _check_victims(config: Json) -> None:
    labels, examples = config["victim_labels"], config["batch_size"] * config["aggregated"]
    if len(labels) != config["victims"] or any(len(one) != examples for one in labels):
        refuse(CONFIG, "victim_labels", f"{config['victims']} lists of {examples} labels", short(labels))
    if classes := len(config["classes"]):
        outside = [label for one in labels for label in one if not schema.integer(0, classes - 1).accepts(label)]
        if outside:
            refuse(CONFIG, "victim_labels", f"labels below {classes}, the classes", short(outside[0]))


# -- checks of the rows ------------------------------------------------------------------------------------------------


def _read(path: Path, kind: type[R], config: Json, torn: list[str], check: Callable[[str, R], object]) -> list[R]:
    found = read_lines(path)
    if found.torn:
        torn.append(path.name)
    kinds = {**kind.schema(metrics_of(config)), **STAMPS}
    rows: dict[tuple[Any, ...], R] = {}
    for where, values in found.rows:
        schema.check(where, values, kinds)
        for key in ("dataset", "model", "seed", "batch_size", "aggregated"):
            if key in values and values[key] != config[key]:
                _refuse_other_audit(where, key, short(config[key]), short(values[key]))
        row = kind.from_json(values)
        check(where, row)
        if values["audit"] != config[DIGEST]:
            _refuse_other_audit(where, "audit", config[DIGEST], values["audit"])
        schema.check_seal(where, values)
        if row.key in rows:
            key = ", ".join(map(str, row.key))
            raise DataError(f"{path.name}: two rows for ({key}) would be counted twice; remove one of them")
        rows[row.key] = row
    return list(rows.values())


def _refuse_other_audit(where: str, key: str, expected: str, got: str) -> NoReturn:
    refuse(where, key, f"{expected}, as {CONFIG} has it", f"{got}, a row of another audit")


def _check_result(where: str, row: ResultRow, config: Json, attacked: Mapping[str, str]) -> None:
    if row.victim >= config["victims"]:
        refuse(where, "victim", f"a number below {config['victims']}, the victims of the audit", str(row.victim))
    if row.leaked != (row.leak_rule is not None):
        refuse(where, "leak_rule", "a rule if the victim leaked, and null if not", short(row.leak_rule))
    if row.attack_spec == BLIND_GUESS:
        if row.defense_spec is not None or row.adaptive:
            refuse(where, "defense_spec", "null for the blind guess", short(row.defense_spec))
        return
    asked = _asked(where, row, attacked)
    if row.attack_spec not in config["attacks"]:
        refuse(where, "attack_spec", "an attack of the audit", short(row.attack_spec))
    adapted = [asked, row.attack_spec] in config["adapted"]
    if row.adaptive != adapted and (row.adaptive or config["adaptive"]):
        refuse(where, "adaptive", f"{adapted}, as {CONFIG} has it", str(row.adaptive))


def _check_identification(where: str, row: IdentificationRow, config: Json, attacked: Mapping[str, str]) -> None:
    _asked(where, row, attacked)
    if row.games != config["games"] or row.candidates > config["candidates"]:
        expected = f"{config['games']} games with at most {config['candidates']} candidates"
        refuse(where, "games", expected, f"{row.games} with {row.candidates}")
    low, high = row.named_low, row.named_high
    if row.named > row.games or not low <= row.share <= high:
        refuse(where, "named", f"at most {row.games}, inside its interval", f"{row.named} in {low} to {high}")


def _check_match(where: str, row: MatchRow, config: Json) -> None:
    if row.asked not in config["defenses"]:
        refuse(where, "asked", "a defense of the audit", short(row.asked))
    if config["match"] != (price := f"{row.kind}={row.target:g}"):
        refuse(where, "target", f"the price of the audit ({config['match'] or 'none'})", price)
    if row.found is not None and row.found.partition(":")[0] != row.asked.partition(":")[0]:
        refuse(where, "found", f"{short(row.asked)} at some strength", short(row.found))


def _asked(where: str, row: ResultRow | UtilityRow | IdentificationRow, attacked: Mapping[str, str]) -> str:
    """The spec of the row's defense as it was asked for; raise if the audit has no such defense."""
    if row.defense_spec is None or row.defense_spec not in attacked:
        refuse(where, "defense_spec", "a defense of the audit", short(row.defense_spec))
    return attacked[row.defense_spec]
