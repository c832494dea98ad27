"""The files of an audit folder as plain objects: what was asked, what was measured, what is still missing."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.audit.folder import read_audit, read_rows, strengths
from gradveil.audit.schema import DIGEST
from gradveil.audit.store import BLIND_GUESS, Row
from gradveil.report import images

UNDEFENDED = "none"
ADAPTIVE = " (adaptive)"


@dataclass(frozen=True)
class Attempt:
    """One row of results.jsonl: one attack on one victim under one defense.

    `defense` and `attack` are the methods' full specs, as the config lists them; `method` is the attack's spec
    without the word that marks an adaptive attacker. The blind guess has no defense. `bound_mse` is the least mean
    squared error of any attacker on smoothed images under the defense; None: no bound is known. `power` is how much of
    the update the defense changed. The losses are the attacker's own: when the search began, after nine tenths of it,
    at its end, and at the end of each restart. `image_digest` and `original_digest` are those of the image and, for the
    blind guess, of the victim's own, as they were written.
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
    image_digest: str | None = None
    original_digest: str | None = None


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
    attack that were to run. `generic` are the defenses for which nobody has written an adaptive attacker. `images` are
    those behind each victim. `torn` names the files whose last line was cut short.
    """

    folder: Path
    config: Mapping[str, Any]
    defenses: tuple[str, ...]
    attacks: tuple[str, ...]
    methods: tuple[str, ...]
    expected: tuple[tuple[str, str], ...]
    generic: frozenset[str]
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

    def original(self, victim: int) -> bytes | None:
        """The victim's own image as a PNG; None if there is none."""
        digest = next((row.original_digest for row in self.blind if row.victim == victim), None)
        return None if digest is None else self._image(f"images/original-v{victim}.png", digest)

    def picture(self, row: Attempt) -> bytes | None:
        """What an attack made of a victim, as a PNG; None if there is none."""
        return None if row.image is None else self._image(row.image, row.image_digest)

    def _image(self, name: str, digest: str | None) -> bytes | None:
        _, height, width = self.config["input_shape"]
        return images.load(self.folder, name, digest, (width * self.images, height))

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
    broken, or belongs to another audit, raises `DataError` with the file and the line. Nothing that the folder names
    is run.
    """
    folder = Path(folder)
    config = read_audit(folder)
    found = read_rows(folder, config)
    rows = [_attempt(row) for row in found.results]
    attempts = tuple(row for row in rows if row.attack != BLIND_GUESS)
    methods = config["attacks"]
    defenses = {asked: spec for spec, asked in strengths(config, found.matches).items()}
    return Audit(
        folder=folder,
        config={key: value for key, value in config.items() if key != DIGEST},
        defenses=tuple(defenses.values()),
        attacks=tuple(_variants(methods, attempts)),
        methods=tuple(methods),
        expected=tuple(_expected(config, defenses)),
        generic=frozenset(spec for asked, spec in defenses.items() if asked in config["generic"]),
        victims=config["victims"],
        images=config["batch_size"] * config["aggregated"],
        attempts=attempts,
        blind=tuple(row for row in rows if row.attack == BLIND_GUESS),
        utility={row.defense: row for row in map(_utility, found.utility)},
        matches=tuple(map(_matched, found.matches)),
        torn=found.torn,
    )


def adaptive(method: str) -> str:
    """The label of an attack whose attacker knows the defense."""
    return f"{method}{ADAPTIVE}"


def title(defense: str) -> str:
    """A defense's label as the title of a row of images."""
    return "no defense" if defense == UNDEFENDED else defense


def _attempt(row: Row) -> Attempt:
    method = row["attack_spec"]
    return Attempt(
        defense=row["defense_spec"],
        attack=adaptive(method) if row["adaptive"] else method,
        method=method,
        loss_restarts=tuple(row["loss_restarts"] or ()),
        **{name: row[name] for name in _SAME_IN_ATTEMPT},
    )


def _utility(row: Row) -> Utility:
    return Utility(
        defense=row["defense_spec"],
        history=tuple(row["history"]),
        diverged=row["diverged"] is not None,
        **{name: row[name] for name in _SAME_IN_UTILITY},
    )


def _matched(row: Row) -> Matched:
    return Matched(**{field.name: row[field.name] for field in dataclasses.fields(Matched)})


# What a row and its object call by one name.
_SAME_IN_ATTEMPT = {field.name for field in dataclasses.fields(Attempt)} - {
    "defense",
    "attack",
    "method",
    "loss_restarts",
}
_SAME_IN_UTILITY = {field.name for field in dataclasses.fields(Utility)} - {"defense", "history", "diverged"}


def _variants(methods: Iterable[str], attempts: Sequence[Attempt]) -> Iterator[str]:
    """Each method as its rows have it: plain, adaptive or both; plain if it has no rows yet."""
    run = {row.attack for row in attempts}
    for method in methods:
        if method in run or adaptive(method) not in run:
            yield method
        if adaptive(method) in run:
            yield adaptive(method)


def _expected(config: Row, defenses: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The pairs of defense and attack that were to run."""
    adapted = {(defense, attack) for defense, attack in config["adapted"]}
    for asked, defense in defenses.items():
        for method in config["attacks"]:
            both = (defense, method), (defense, adaptive(method))
            if (asked, method) not in adapted:
                yield both[0]
            else:
                yield from both[1:] if config["adaptive"] else both
