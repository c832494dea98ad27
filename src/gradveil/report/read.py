"""The files of an audit folder as plain objects: what was asked, what was measured, what is still missing."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.errors import DataError

BLIND_GUESS = "blind-guess"
UNDEFENDED = "none"


@dataclass(frozen=True)
class Attempt:
    """One row of results.jsonl: one attack on one victim under one defense.

    `defense` and `attack` are the methods' full specs, as the config lists them; `method` is the attack's spec
    without the word that marks an adaptive attacker. The blind guess has no defense. `bound_mse` is the least mean
    squared error of any attacker on smoothed images under the defense; None: no bound is known.
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
class Audit:
    """All that an audit left on disk, finished or not.

    Defenses and attacks are labels, in the order in which they were asked for; `methods` are the attacks
    without their adaptive variants, of which only the rows tell. `torn` names the files whose last line was
    cut short.
    """

    folder: Path
    config: Mapping[str, Any]
    defenses: tuple[str, ...]
    attacks: tuple[str, ...]
    methods: tuple[str, ...]
    victims: int
    batch_size: int
    attempts: tuple[Attempt, ...]
    blind: tuple[Attempt, ...]
    utility: Mapping[str, Utility]
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
        return _adaptive(name) if attack.endswith(_adaptive("")) else name

    def missing_attempts(self) -> list[tuple[str, str, int]]:
        """(defense, attack, victim) of every row that was asked for and is not there."""
        done = {(row.defense, row.method, row.victim) for row in self.attempts}
        return [
            (defense, attack, victim)
            for defense in self.defenses
            for attack in self.methods
            for victim in range(self.victims)
            if (defense, attack, victim) not in done
        ]

    def missing_utility(self) -> list[str]:
        """The defenses whose cost was not measured."""
        return [defense for defense in self.defenses if defense not in self.utility]


def read(folder: Path) -> Audit:
    """Read an audit folder, finished or not.

    A last line that was cut short by a kill is left out and its file named in `torn`; anything else that is
    broken raises `DataError` with the file and the line.
    """
    folder = Path(folder)
    config = _read_config(folder / "config.json")
    torn: list[str] = []
    rows = [_attempt(fields) for fields in _read_lines(folder / "results.jsonl", torn)]
    utility = [_utility(fields) for fields in _read_lines(folder / "utility.jsonl", torn)]
    _refuse_repeats("results.jsonl", [(row.defense, row.attack, row.victim) for row in rows])
    _refuse_repeats("utility.jsonl", [(row.defense,) for row in utility])

    attempts = tuple(row for row in rows if row.attack != BLIND_GUESS)
    return Audit(
        folder=folder,
        config=config.values,
        defenses=tuple(config.texts("defenses")),
        attacks=tuple(_variants(config.texts("attacks"), attempts)),
        methods=tuple(config.texts("attacks")),
        victims=config.count("victims"),
        batch_size=config.count("batch_size"),
        attempts=attempts,
        blind=tuple(row for row in rows if row.attack == BLIND_GUESS),
        utility={row.defense: row for row in utility},
        torn=tuple(torn),
    )


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

    def _wrong(self, key: str, expected: str) -> DataError:
        got = _short(self.values[key]) if key in self.values else "nothing"
        return DataError(f"{self.where}: {key!r} must be {expected}, got {got}; {_REMEDY}")


_REMEDY = "mend or remove it, or run the audit again into another folder"


def _attempt(fields: _Fields) -> Attempt:
    method = fields.text("attack_spec")
    blind = method == BLIND_GUESS
    adaptive = not blind and fields.flag("adaptive")
    return Attempt(
        defense=None if blind else fields.text("defense_spec"),
        attack=_adaptive(method) if adaptive else method,
        method=method,
        adaptive=adaptive,
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


def _adaptive(method: str) -> str:
    return f"{method} (adaptive)"


def _variants(methods: Iterable[str], attempts: Sequence[Attempt]) -> Iterator[str]:
    """Each method as its rows have it: plain, adaptive or both; plain if it has no rows yet."""
    run = {row.attack for row in attempts}
    for method in methods:
        adaptive = _adaptive(method)
        if method in run or adaptive not in run:
            yield method
        if adaptive in run:
            yield adaptive


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
