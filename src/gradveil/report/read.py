"""The files of an audit folder as plain objects: what was asked, what was measured, what is still missing."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.audit.store import BLIND_GUESS, CONFIG, MATCHES, RESULTS, UTILITY
from gradveil.errors import DataError

UNDEFENDED = "none"
ADAPTIVE = " (adaptive)"


@dataclass(frozen=True)
class Attempt:
    """One row of results.jsonl: one attack on one victim under one defense.

    `defense` and `attack` are the methods' full specs, as the config lists them; `method` is the attack's spec
    without the word that marks an adaptive attacker. The blind guess has no defense. `bound_mse` is the least mean
    squared error of any attacker on smoothed images under the defense; None: no bound is known. `power` is how much of
    the update the defense changed. The losses are the attacker's own: when the search began, after nine tenths of it,
    at its end, and at the end of each restart. Older audits have none of these.
    """

    defense: str | None
    attack: str
    method: str
    adaptive: bool
    victim: int
    psnr: float
    ssim: float
    lpips: float | None
    noise_ratio: float | None
    label_correct: float | None
    leaked: bool
    seconds: float | None
    image: str | None
    mse: float | None = None
    bound_mse: float | None = None
    power: float | None = None
    loss: float | None = None
    loss_start: float | None = None
    loss_late: float | None = None
    loss_restarts: tuple[float, ...] = ()


@dataclass(frozen=True)
class Utility:
    """One row of utility.jsonl: what training under one defense costs."""

    defense: str
    accuracy: float
    baseline_accuracy: float | None
    pmm: float | None
    loss: float | None
    round_seconds: float | None
    upload_bytes: float | None
    download_bytes: float | None
    history: tuple[float, ...]
    diverged: bool
    privacy: str | None
    epsilon: float | None


@dataclass(frozen=True)
class Matched:
    """One row of match.jsonl: the strength at which a defense costs the price, or why there is none (`found` is None).

    `kind` is accuracy, power or bytes, `target` and `tolerance` are the price, `cost` is what was reached.
    """

    asked: str
    found: str | None
    kind: str
    target: float
    tolerance: float
    cost: float | None
    tries: int
    reason: str | None


@dataclass(frozen=True)
class Audit:
    """All that an audit left on disk, finished or not.

    Defenses and attacks are labels, in the order in which they were asked for, the defenses at the strength that a
    match found; `methods` are the attacks without their adaptive variants. `expected` are the pairs of defense and
    attack that were to run. `images` are those behind each victim. `torn` names the files whose last line was cut
    short.
    """

    folder: Path
    config: Mapping[str, Any]
    defenses: tuple[str, ...]
    attacks: tuple[str, ...]
    methods: tuple[str, ...]
    expected: tuple[tuple[str, str], ...]
    victims: int
    images: int
    attempts: tuple[Attempt, ...]
    blind: tuple[Attempt, ...]
    utility: Mapping[str, Utility]
    matches: tuple[Matched, ...]
    torn: tuple[str, ...]

    @property
    def undefended(self) -> str | None:
        """The label of the undefended run, if the audit has one."""
        return UNDEFENDED if UNDEFENDED in self.defenses else None

    @property
    def real_defenses(self) -> tuple[str, ...]:
        """Every defense but `none`."""
        return tuple(defense for defense in self.defenses if defense != UNDEFENDED)

    def of(self, defense: str, attack: str) -> list[Attempt]:
        """The rows of one attack under one defense."""
        return [row for row in self.attempts if row.defense == defense and row.attack == attack]

    def without_defense(self, attack: str) -> list[Attempt]:
        """What `attack` reaches undefended; of an adaptive attack with no such rows, its plain form's.

        Without a defense there is nothing to adapt to, so an audit may run only the plain form there.
        """
        rows = self.of(UNDEFENDED, attack)
        if rows:
            return rows
        methods = {row.method for row in self.attempts if row.attack == attack}
        return [row for row in self.attempts if row.defense == UNDEFENDED and row.method in methods]

    def short(self, attack: str) -> str:
        """The attack's name without parameters, where no other attack of the audit shares it."""
        name, _, rest = attack.partition(":")
        if not rest or sum(method.partition(":")[0] == name for method in self.methods) > 1:
            return attack
        return adaptive(name) if attack.endswith(ADAPTIVE) else name

    def plain(self, attack: str) -> str:
        """The attack without the word that marks an adaptive attacker."""
        return attack.removesuffix(ADAPTIVE)

    def missing_attempts(self) -> list[tuple[str, str, int]]:
        """(defense, attack, victim) of every row that was asked for and is not there."""
        done = {(row.defense, row.attack, row.victim) for row in self.attempts}
        wanted = ((*pair, victim) for pair in self.expected for victim in range(self.victims))
        return [row for row in wanted if row not in done]

    def missing_utility(self) -> list[str]:
        """The defenses whose cost was not measured."""
        return [defense for defense in self.defenses if defense not in self.utility]


def read(folder: Path) -> Audit:
    """Read an audit folder, finished or not.

    A last line that was cut short by a kill is left out and its file named in `torn`; anything else that is
    broken raises `DataError` with the file and the line.
    """
    folder = Path(folder)
    config = _read_config(folder / CONFIG)
    torn: list[str] = []
    rows = [_attempt(fields) for fields in _read_lines(folder / RESULTS, torn)]
    utility = [_utility(fields) for fields in _read_lines(folder / UTILITY, torn)]
    matches = [_matched(fields) for fields in _read_lines(folder / MATCHES, torn)]
    _refuse_repeats(RESULTS, [(row.defense, row.attack, row.victim) for row in rows])
    _refuse_repeats(UTILITY, [(row.defense,) for row in utility])
    _refuse_repeats(MATCHES, [(row.asked,) for row in matches])

    attempts = tuple(row for row in rows if row.attack != BLIND_GUESS)
    methods = config.texts("attacks")
    chosen = {row.asked: row.found for row in matches}
    at_strength = [(asked, chosen.get(asked, asked)) for asked in config.texts("defenses")]
    defenses = {asked: found for asked, found in at_strength if found is not None}
    return Audit(
        folder=folder,
        config=config.values,
        defenses=tuple(defenses.values()),
        attacks=tuple(_variants(methods, attempts)),
        methods=tuple(methods),
        expected=tuple(_expected(config, defenses, methods, attempts)),
        victims=config.count("victims"),
        images=config.count("batch_size") * (config.count("aggregated") if "aggregated" in config.values else 1),
        attempts=attempts,
        blind=tuple(row for row in rows if row.attack == BLIND_GUESS),
        utility={row.defense: row for row in utility},
        matches=tuple(matches),
        torn=tuple(torn),
    )


def adaptive(method: str) -> str:
    """The label of an attack whose attacker knows the defense."""
    return f"{method}{ADAPTIVE}"


def title(defense: str) -> str:
    """A defense's label as the title of a row of images."""
    return "no defense" if defense == UNDEFENDED else defense


class _Fields:
    """One JSON object with checked access; every complaint names the file and the line."""

    def __init__(self, where: str, values: object) -> None:
        if not isinstance(values, dict):
            raise DataError(f"{where}: expected a JSON object, got {_short(values)}; {_REMEDY}")
        self.where = where
        self.values: dict[str, Any] = values

    def number(self, key: str) -> float:
        value = self.optional_number(key)
        if value is None:
            raise self._wrong(key, "a number")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return float(value)

    def count(self, key: str) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(key, "a whole number of at least 0")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self.optional_text(key)
        if value is None:
            raise self._wrong(key, "a text")
        return value

    def optional_text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def choice(self, key: str, known: Sequence[str]) -> str:
        value = self.text(key)
        if value not in known:
            raise self._wrong(key, f"one of {', '.join(known)}")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers; none where the key is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self._wrong(key, "a list of numbers")
        return tuple(float(item) for item in value)

    def pairs(self, key: str) -> set[tuple[str, str]] | None:
        """A list of pairs of texts; None where the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, list) and len(item) == 2 for item in value):
            raise self._wrong(key, "a list of pairs")
        return {(str(first), str(second)) for first, second in value}

    def _wrong(self, key: str, expected: str) -> DataError:
        got = _short(self.values[key]) if key in self.values else "nothing"
        return DataError(f"{self.where}: {key!r} must be {expected}, got {got}; {_REMEDY}")


_REMEDY = "mend or remove it, or run the audit again into another folder"


def _attempt(fields: _Fields) -> Attempt:
    method = fields.text("attack_spec")
    blind = method == BLIND_GUESS
    knows = not blind and fields.flag("adaptive")
    return Attempt(
        defense=None if blind else fields.text("defense_spec"),
        attack=adaptive(method) if knows else method,
        method=method,
        adaptive=knows,
        victim=fields.count("victim"),
        psnr=fields.number("psnr"),
        ssim=fields.number("ssim"),
        lpips=fields.optional_number("lpips"),
        noise_ratio=fields.optional_number("noise_ratio"),
        label_correct=fields.optional_number("label_correct"),
        leaked=fields.flag("leaked"),
        seconds=fields.optional_number("seconds"),
        image=fields.optional_text("image"),
        mse=fields.optional_number("mse"),
        bound_mse=fields.optional_number("bound_mse"),
        power=fields.optional_number("power"),
        loss=fields.optional_number("loss"),
        loss_start=fields.optional_number("loss_start"),
        loss_late=fields.optional_number("loss_late"),
        loss_restarts=fields.numbers("loss_restarts"),
    )


def _utility(fields: _Fields) -> Utility:
    return Utility(
        defense=fields.text("defense_spec"),
        accuracy=fields.number("accuracy"),
        baseline_accuracy=fields.optional_number("baseline_accuracy"),
        pmm=fields.optional_number("pmm"),
        loss=fields.optional_number("loss"),
        round_seconds=fields.optional_number("round_seconds"),
        upload_bytes=fields.optional_number("upload_bytes"),
        download_bytes=fields.optional_number("download_bytes"),
        history=fields.numbers("history"),
        diverged=fields.values.get("diverged") is not None,
        privacy=fields.optional_text("privacy"),
        epsilon=fields.optional_number("epsilon"),
    )


def _matched(fields: _Fields) -> Matched:
    return Matched(
        asked=fields.text("asked"),
        found=fields.optional_text("found"),
        kind=fields.choice("kind", ("accuracy", "power", "bytes")),
        target=fields.number("target"),
        tolerance=fields.number("tolerance"),
        cost=fields.optional_number("cost"),
        tries=fields.count("tries"),
        reason=fields.optional_text("reason"),
    )


def _variants(methods: Iterable[str], attempts: Sequence[Attempt]) -> Iterator[str]:
    """Each method as its rows have it: plain, adaptive or both; plain if it has no rows yet."""
    run = {row.attack for row in attempts}
    for method in methods:
        if method in run or adaptive(method) not in run:
            yield method
        if adaptive(method) in run:
            yield adaptive(method)


def _expected(
    config: _Fields, defenses: Mapping[str, str], methods: Sequence[str], attempts: Sequence[Attempt]
) -> Iterator[tuple[str, str]]:
    """The pairs of defense and attack that were to run; where the config does not say, those that have rows."""
    pairs = config.pairs("adapted")
    run = {(row.defense, row.attack) for row in attempts}
    for asked, defense in defenses.items():
        for method in methods:
            both = (defense, method), (defense, adaptive(method))
            if pairs is None:
                yield from [pair for pair in both if pair in run] or both[:1]
            elif (asked, method) not in pairs:
                yield both[0]
            else:
                yield from both[1:] if config.values.get("adaptive") else both


def _read_config(path: Path) -> _Fields:
    if not path.is_file():
        raise DataError(f"{path}: no such file, so this is not an audit folder; `gradveil audit --out DIR` makes one")
    return _Fields(path.name, _parse(path.name, path.read_bytes()))


def _read_lines(path: Path, torn: list[str]) -> list[_Fields]:
    """The objects of a jsonl file, none if it does not exist.

    A kill can cut only the last line short, which then has no line end: that one is left out and its file
    noted in `torn`.
    """
    if not path.is_file():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    rows = [
        _Fields(where, _parse(where, line))
        for where, line in ((f"{path.name} line {number}", line) for number, line in enumerate(lines, 1))
        if line.strip()
    ]
    if rest.strip():
        where = f"{path.name} line {len(lines) + 1}"
        try:
            rows.append(_Fields(where, _parse(where, rest)))
        except DataError:
            torn.append(path.name)
    return rows


def _parse(where: str, text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError as error:  # covers bad JSON and bad UTF-8
        raise DataError(f"{where}: expected JSON, got {_short(text)} ({error}); {_REMEDY}") from error


def _refuse_repeats(file: str, keys: Sequence[tuple[object, ...]]) -> None:
    seen: set[tuple[object, ...]] = set()
    for key in keys:
        if key in seen:
            words = ", ".join(str(part) for part in key)
            raise DataError(f"{file}: two rows for ({words}) would be counted twice; remove one of them")
        seen.add(key)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
