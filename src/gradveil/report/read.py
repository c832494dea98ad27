"""An audit as the report sees it: what was asked, what was measured, what is still missing; read from disk once."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gradveil.audit.folder import metrics_of, modality_of, read_audit, read_rows, strengths
from gradveil.audit.rows import MatchRow, MethodId, ResultRow, UtilityRow
from gradveil.audit.schema import DIGEST
from gradveil.audit.store import BLIND_GUESS
from gradveil.metrics import METRICS, Metric
from gradveil.modality import Modality

UNDEFENDED = "none"


@dataclass(frozen=True)
class Audit:
    """All that an audit left on disk, finished or not.

    Defenses are specs, in the order in which they were asked for, at the strength that a match found; `methods` are
    the specs of the attacks, `attacks` are these as they ran. `expected` are the pairs of defense and attack that were
    to run. `generic` are the defenses for which nobody has written an adaptive attacker; `caveats` are the methods of
    which something must be said, by what that is. `examples` are those behind each victim. `torn` names the files
    whose last line was cut short; `loaded` holds what else was read, by name.
    """

    folder: Path
    config: Mapping[str, Any]
    modality: Modality
    metrics: tuple[Metric, ...]
    defenses: tuple[str, ...]
    attacks: tuple[MethodId, ...]
    methods: tuple[str, ...]
    expected: tuple[tuple[str, MethodId], ...]
    generic: frozenset[str]
    caveats: Mapping[str, list[str]]
    victims: int
    examples: int
    attempts: tuple[ResultRow, ...]
    blind: tuple[ResultRow, ...]
    utility: Mapping[str, UtilityRow]
    matches: tuple[MatchRow, ...]
    torn: tuple[str, ...]
    loaded: dict[str, bytes | None] = field(default_factory=dict, compare=False, repr=False)

    @property
    def primary(self) -> Metric:
        """The metric by which attacks are ranked."""
        return METRICS.get(self.modality.primary)

    @property
    def real_defenses(self) -> tuple[str, ...]:
        """Every defense but `none`."""
        return tuple(defense for defense in self.defenses if defense != UNDEFENDED)

    @cached_property
    def _by_pair(self) -> dict[tuple[str | None, MethodId], list[ResultRow]]:
        found: dict[tuple[str | None, MethodId], list[ResultRow]] = {}
        for row in self.attempts:
            found.setdefault((row.defense_spec, row.method), []).append(row)
        return found

    def of(self, defense: str, attack: MethodId) -> list[ResultRow]:
        """The rows of one attack under one defense."""
        return self._by_pair.get((defense, attack), [])

    def without_defense(self, attack: MethodId) -> list[ResultRow]:
        """What `attack` reaches undefended; of an adaptive attack with no such rows, its plain form's.

        Without a defense there is nothing to adapt to, so an audit may run only the plain form there.
        """
        return self.of(UNDEFENDED, attack) or self.of(UNDEFENDED, MethodId(attack.spec))

    def short(self, attack: MethodId) -> str:
        """The attack in words, without parameters where no other attack of the audit shares its name."""
        shared = sum(MethodId(spec).name == attack.name for spec in self.methods) > 1
        return attack.words if shared else MethodId(attack.name, attack.adaptive).words

    def missing_attempts(self) -> list[tuple[str, MethodId, int]]:
        """(defense, attack, victim) of every row that was asked for and is not there."""
        done = {(row.defense_spec, row.method, row.victim) for row in self.attempts}
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
    attempts = tuple(row for row in found.results if row.attack_spec != BLIND_GUESS)
    defenses = {asked: spec for spec, asked in strengths(config, found.matches).items()}
    return Audit(
        folder=folder,
        config={key: value for key, value in config.items() if key != DIGEST},
        modality=modality_of(config),
        metrics=tuple(metrics_of(config)),
        defenses=tuple(defenses.values()),
        attacks=tuple(_variants(config["attacks"], {row.method for row in attempts})),
        methods=tuple(config["attacks"]),
        expected=tuple(_expected(config, defenses)),
        generic=frozenset(spec for asked, spec in defenses.items() if asked in config["generic"]),
        caveats=_caveats(config, defenses),
        victims=config["victims"],
        examples=config["batch_size"] * config["aggregated"],
        attempts=attempts,
        blind=tuple(row for row in found.results if row.attack_spec == BLIND_GUESS),
        utility={row.defense_spec: row for row in found.utility},
        matches=tuple(found.matches),
        torn=found.torn,
    )


def title(defense: str) -> str:
    """A defense's label as the title of a row of pictures."""
    return "no defense" if defense == UNDEFENDED else defense


def _variants(specs: Iterable[str], ran: set[MethodId]) -> Iterator[MethodId]:
    """Each attack as its rows have it: plain, adaptive or both; plain if it has no rows yet."""
    for plain, adaptive in ((MethodId(spec), MethodId(spec, adaptive=True)) for spec in specs):
        if plain in ran or adaptive not in ran:
            yield plain
        if adaptive in ran:
            yield adaptive


def _expected(config: Mapping[str, Any], defenses: Mapping[str, str]) -> Iterator[tuple[str, MethodId]]:
    """The pairs of defense and attack that were to run."""
    adapted = {(defense, attack) for defense, attack in config["adapted"]}
    for asked, defense in defenses.items():
        for spec in config["attacks"]:
            if (asked, spec) not in adapted or not config["adaptive"]:
                yield defense, MethodId(spec)
            if (asked, spec) in adapted:
                yield defense, MethodId(spec, adaptive=True)


def _caveats(config: Mapping[str, Any], defenses: Mapping[str, str]) -> dict[str, list[str]]:
    """The methods by what must be said of them; those that a match left out are not there."""
    found: dict[str, list[str]] = {}
    for asked, spec in [*defenses.items(), *((spec, spec) for spec in config["attacks"])]:
        for caveat in config["caveats"].get(asked, []):
            found.setdefault(caveat, []).append(spec)
    return found
