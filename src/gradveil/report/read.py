"""An audit as the report sees it, read from disk once: what was requested, measured and is still missing."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gradveil.audit.folder import metrics_of, modality_of, read_audit, read_rows, strengths
from gradveil.audit.rows import IdentificationRow, MatchRow, MethodId, ResultRow, UtilityRow
from gradveil.audit.schema import DIGEST
from gradveil.audit.store import BLIND_GUESS
from gradveil.metrics import METRICS, Metric
from gradveil.modality import Modality

UNDEFENDED = "none"


@dataclass(frozen=True)
class Audit:
    """Everything that an audit left on disk, finished or not.

    Args:
        folder: the audit's folder.
        config: the settings and facts of `config.json`.
        modality: what an input is.
        metrics: the metrics of the rows.
        defenses: their specs in the order requested, at the strengths that `--match` found, if it was used.
        attacks: the attacks as they ran, plain, adaptive or both.
        methods: the specs of the attacks.
        expected: the pairs of defense and attack that the audit is to run.
        generic: the defenses that have no adaptive attacker of their own, only the generic one.
        learned: the specs of the attacks that learned from public examples.
        simulating: the specs of the attacks whose adaptive form learned from simulated draws of the very defense.
        caveats: the specs of the methods that declare each caveat, by its text.
        victims: how many victims there are.
        examples: how many examples are behind each victim's update.
        attempts: the rows of the attacks.
        blind: the rows of the blind guess.
        identified: how well a client's example is found among candidates: rows by defense, plain before adaptive.
        utility: the cost of each defense, by spec.
        matches: the strengths that `--match` found.
        torn: the files whose last line was cut short.
        loaded: cache of the pictures read so far, by name.
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
    learned: tuple[str, ...]
    simulating: tuple[str, ...]
    caveats: Mapping[str, list[str]]
    victims: int
    examples: int
    attempts: tuple[ResultRow, ...]
    blind: tuple[ResultRow, ...]
    identified: Mapping[str, list[IdentificationRow]]
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
        by_pair: dict[tuple[str | None, MethodId], list[ResultRow]] = {}
        for row in self.attempts:
            by_pair.setdefault((row.defense_spec, row.method), []).append(row)
        return by_pair

    def rows_of(self, defense: str, attack: MethodId) -> list[ResultRow]:
        """The rows of one attack under one defense."""
        return self._by_pair.get((defense, attack), [])

    def without_defense(self, attack: MethodId) -> list[ResultRow]:
        """The undefended rows of `attack`, or of its plain form if it is adaptive and has none.

        Without a defense there is nothing to adapt to, so an audit may run only the plain form there.
        """
        return self.rows_of(UNDEFENDED, attack) or self.rows_of(UNDEFENDED, MethodId(attack.spec))

    def short_name(self, attack: MethodId) -> str:
        """The attack in words, without its parameters unless another attack of the audit has the same name."""
        shared = sum(MethodId(spec).name == attack.name for spec in self.methods) > 1
        return attack.title if shared else MethodId(attack.name, attack.adaptive).title

    def missing_attempts(self) -> list[tuple[str, MethodId, int]]:
        """(defense, attack, victim) of every row that is expected but missing."""
        done = {(row.defense_spec, row.method, row.victim) for row in self.attempts}
        expected = ((*pair, victim) for pair in self.expected for victim in range(self.victims))
        return [row for row in expected if row not in done]

    def missing_identifications(self) -> list[str]:
        """The defenses under which no attacker has looked for a client's example among candidates yet."""
        return [defense for defense in self.defenses if self.plays_games and defense not in self.identified]

    @property
    def plays_games(self) -> bool:
        """Whether the audit is about single clients and has identification games."""
        return bool(self.config["games"] and self.config["aggregated"] == 1)

    def most_identified(self, defense: str) -> IdentificationRow | None:
        """The games of the attacker who found the most examples under `defense`; None if none have been played."""
        return max(self.identified.get(defense, []), key=lambda row: (row.named, row.auc), default=None)

    def missing_utility(self) -> list[str]:
        """The defenses whose cost was not measured."""
        return [defense for defense in self.defenses if defense not in self.utility]


def read(folder: Path) -> Audit:
    """Read an audit folder, finished or not.

    If a killed run left an incomplete last line, that line is skipped and its file is named in `torn`. Anything else
    that is broken, or belongs to another audit, raises `DataError` with the file and the line. Nothing that the folder
    names is run.
    """
    folder = Path(folder)
    config = read_audit(folder)
    rows = read_rows(folder, config)
    attempts = tuple(row for row in rows.results if row.attack_spec != BLIND_GUESS)
    defenses = {requested: spec for spec, requested in strengths(config, rows.matches).items()}
    return Audit(
        folder=folder,
        config={key: value for key, value in config.items() if key != DIGEST},
        modality=modality_of(config),
        metrics=tuple(metrics_of(config)),
        defenses=tuple(defenses.values()),
        attacks=tuple(_variants(config["attacks"], {row.method for row in attempts})),
        methods=tuple(config["attacks"]),
        expected=tuple(_expected(config, defenses)),
        generic=frozenset(spec for requested, spec in defenses.items() if requested in config["generic"]),
        learned=tuple(config["learned"]),
        simulating=tuple(config["simulating"]),
        caveats=_caveats(config, defenses),
        victims=config["victims"],
        examples=config["batch_size"] * config["aggregated"],
        attempts=attempts,
        blind=tuple(row for row in rows.results if row.attack_spec == BLIND_GUESS),
        identified=_by_defense(rows.identifications),
        utility={row.defense_spec: row for row in rows.utility},
        matches=tuple(rows.matches),
        torn=rows.torn,
    )


def _by_defense(rows: Iterable[IdentificationRow]) -> dict[str, list[IdentificationRow]]:
    """The games under each defense, plain attackers before adaptive ones."""
    by_defense: dict[str, list[IdentificationRow]] = {}
    for row in sorted(rows, key=lambda row: row.adaptive):
        by_defense.setdefault(row.defense_spec, []).append(row)
    return by_defense


def title(defense: str) -> str:
    """The title of a defense's row of pictures."""
    return "no defense" if defense == UNDEFENDED else defense


def _variants(specs: Iterable[str], ran: set[MethodId]) -> Iterator[MethodId]:
    """Each attack in the forms that have rows, plain, adaptive or both; plain if it has no rows yet."""
    for plain, adaptive in ((MethodId(spec), MethodId(spec, adaptive=True)) for spec in specs):
        if plain in ran or adaptive not in ran:
            yield plain
        if adaptive in ran:
            yield adaptive


def _expected(config: Mapping[str, Any], defenses: Mapping[str, str]) -> Iterator[tuple[str, MethodId]]:
    """The pairs of defense and attack that the audit is to run."""
    adapted = {(defense, attack) for defense, attack in config["adapted"]}
    for requested, defense in defenses.items():
        for spec in config["attacks"]:
            if (requested, spec) not in adapted or not config["adaptive"]:
                yield defense, MethodId(spec)
            if (requested, spec) in adapted:
                yield defense, MethodId(spec, adaptive=True)


def _caveats(config: Mapping[str, Any], defenses: Mapping[str, str]) -> dict[str, list[str]]:
    """The methods by caveat, without those that `--match` left out."""
    by_caveat: dict[str, list[str]] = {}
    for requested, spec in [*defenses.items(), *((spec, spec) for spec in config["attacks"])]:
        for caveat in config["caveats"].get(requested, []):
            by_caveat.setdefault(caveat, []).append(spec)
    return by_caveat
