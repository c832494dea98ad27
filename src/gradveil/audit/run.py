"""Run an audit: attack every defense on the same victims, then train under every defense."""

import dataclasses
import hashlib
import math
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

import gradveil
from gradveil import data, metrics
from gradveil.attacks import Attack
from gradveil.attacks import create as create_attack
from gradveil.attacks.matching import choose_execution
from gradveil.audit import cases, games
from gradveil.audit.cases import Batch, Case, PreparedDefense, Score, Victims, finite
from gradveil.audit.config import AuditConfig
from gradveil.audit.folder import Rows, SealedLines, check_config, read_audit, read_rows, refuse_links
from gradveil.audit.match import Costs, Price, match
from gradveil.audit.pieces import Finished, Piece
from gradveil.audit.plan import Plan, estimated, pace_of
from gradveil.audit.rows import VERSION, IdentificationRow, MatchRow, ResultRow, UtilityRow
from gradveil.audit.schema import DIGEST, Json, sealed
from gradveil.audit.store import BLIND_GUESS, CONFIG, IDENTIFICATIONS, MATCHES, RESULTS, UTILITY, command_line, slug
from gradveil.audit.workers import Crew, Processes, RayCluster
from gradveil.core import checks, plugins
from gradveil.core.digests import bytes_digest
from gradveil.core.errors import OutputError, ThreatModelError
from gradveil.core.folders import locked, prepare_folder, write_json, writing
from gradveil.core.registry import Method, parse_spec
from gradveil.data.places import cache_folder
from gradveil.defenses import Defense
from gradveil.defenses import create as create_defense
from gradveil.federation import Training, train
from gradveil.federation.digests import data_digest, model_file_digest, weights_digest
from gradveil.federation.job import as_batch, evaluate, performance_maintenance, split_public
from gradveil.federation.local import check_settings
from gradveil.metrics import METRICS, identification
from gradveil.modality import Drawn
from gradveil.task import Task

IDENTIFIER = create_attack("identification")
"""The attacker who looks for a client's example among candidates."""
PUBLIC_ROWS = 800
"""Public examples that stand for the rest of a batch in its regression; more cost time and change little."""
KEPT = 8
"""Prepared defenses that a process keeps: its pieces are not in the order of the defenses."""

JUDGED = 2000
"""Test examples, at most, that the accuracy of the attacked model is measured on."""

ReportStep = Callable[..., None]  # (steps done, steps in all)


@dataclass(frozen=True)
class Step:
    """The progress of an audit: the piece that moved last, and how much of the whole is done.

    Args:
        what: a description of the piece.
        done: pieces finished.
        total: pieces in all.
        overall: how much of the whole audit is done, in [0, 1]; a piece counts as much as it is estimated to take.
        left: seconds left, from the time that what is done took; None: nothing is done yet.
        ended: whether the piece has just been finished.

    Example:
        >>> Step("idlg against none", done=2, total=10, overall=0.25, left=90.0).ended
        False
    """

    what: str
    done: int
    total: int
    overall: float
    left: float | None = None
    ended: bool = False


def default_folder(config: AuditConfig) -> Path:
    """The folder that an audit is written to by default; different configs have different folders."""
    stem = "-".join(slug(Path(parse_spec(spec)[0]).name) for spec in (config.dataset, config.model))
    return Path("audits") / f"{stem}-{config.digest}"


def run(
    config: AuditConfig,
    folder: Path,
    *,
    resume: bool = False,
    progress: Callable[[Step], None] | None = None,
    workers: int | None = 1,
    ray: str | None = None,
    announce: Callable[[Plan], None] | None = None,
) -> None:
    """Run whatever an audit is still missing.

    Every finished row is written to disk immediately. After a crash or an interrupt, the same call with ``resume=True``
    continues; the rows are the same as those of an uninterrupted run, whatever the number of workers.

    Args:
        config: what to audit. A model ``FILE.py@FUNCTION`` in it is code that will run.
        folder: where results go. A folder that is resumed may come from anybody: its files are checked before anything
            else happens, and the digest of the model's file before that file runs.
        resume: continue in a folder that holds results of the same config.
        progress: called as the work proceeds.
        workers: processes that share the work; 1: this process does it; None: one per core, if that is worth their
            start.
        ray: address of a Ray cluster whose processes share the work, by default one per CPU that it has.
        announce: called with the plan before anything runs.
    """
    if workers is not None:
        checks.integer("audit", "workers", workers, low=1)
    prepare_folder(folder, "audit")
    refuse_links(folder)
    with locked(folder, "audit", "audit"):
        _run(config, folder, resume, progress, workers, ray, announce)


def make_plan(config: AuditConfig, folder: Path, *, resume: bool = False, workers: int | None = None) -> Plan:
    """What `run` would do, with an estimate of the time that is measured here; nothing is written.

    Args:
        config: what to audit. A model ``FILE.py@FUNCTION`` in it is code that will run.
        folder: where results would go.
        resume: count only what the audit in the folder is still missing.
        workers: see `run`.
    """
    before = _earlier_run(config, folder, resume)
    subject = Subject.of(config)
    rows = Rows([], [], [], [], ()) if before is None else read_rows(folder, before)
    return _planned(subject, _missing(subject, rows), workers, seconds=1.0)


def _planned(subject: "Subject", pieces: Sequence[Piece], workers: int | None, *, seconds: float = 0.3) -> Plan:
    """A plan for these pieces; a nominal second is timed on the gradient of a batch of public examples."""
    batch = [part[: subject.config.batch_size] for part in subject.root]
    pace = partial(pace_of, partial(subject.task.without_dropout().gradients, *batch))
    device = subject.config.device
    return estimated(pieces, _Work(subject).perform, workers, device=device, seconds=seconds, pace=pace)


def _run(
    config: AuditConfig,
    folder: Path,
    resume: bool,
    progress: Callable[[Step], None] | None,
    workers: int | None,
    ray: str | None,
    announce: Callable[[Plan], None] | None,
) -> None:
    before = _earlier_run(config, folder, resume)
    subject = Subject.of(config)
    subject.check_attacks()
    now = sealed(subject.describe())
    if before is None:
        check_config(now)  # what is written must be readable again
        write_json(folder / CONFIG, now)
    else:
        # Equal configs do not guarantee equal rows: data, model or version may have changed under the same name.
        decisive = {name: value for name, value in now.items() if name not in ("platform", "weights_accuracy", DIGEST)}
        _refuse_changes(folder, before, decisive, _RESTORE)
    described = before or now
    files = _Files(folder, described, subject)
    work = _Work(subject, files.learned)
    files.save(_guess_blindly(work, files.rows))
    pieces = _missing(subject, files.rows)
    if workers == 1 and ray is None and announce is None:
        planned = Plan(pieces, [1.0] * len(pieces), 1, 0)
    else:
        planned = _planned(subject, pieces, workers)
    if announce:
        announce(planned)
    tracker = Tracker(planned, progress)
    if ray is not None:
        with RayCluster(ray, described, workers) as crew:
            _share_out(crew, planned, files, tracker)
    elif planned.workers > 1 and len(pieces) > 1:
        with Processes(planned.workers, described, subject.dataset) as crew:
            _share_out(crew, planned, files, tracker)
    else:
        for piece in pieces:
            tracker.moved(piece, 0, 1)
            strength = files.strengths[piece.defense] if piece.kind != "match" else piece.defense
            if strength is not None:
                files.save(work.perform(piece, strength, lambda *step, piece=piece: tracker.moved(piece, *step)))
            tracker.finished(piece)
    shutil.rmtree(files.learned, ignore_errors=True)  # needed only to resume


def _share_out(crew: Crew, planned: Plan, files: "_Files", tracker: "Tracker") -> None:
    """Let a crew perform all pieces, the longest first, and write what comes back."""
    longest_first = sorted(zip(planned.pieces, planned.seconds, strict=True), key=lambda pair: -pair[1])
    waiting = [piece for piece, _ in longest_first]
    # The other trainings are measured against that without a defense, and their rows wait for it.
    waiting.sort(key=lambda piece: (piece.kind != "match", (piece.kind, piece.defense) != ("training", "none")))
    running: dict[int, Piece] = {}
    learned: set[tuple[str, str | None]] = set()

    def ready(piece: Piece) -> bool:
        """Not while its defense is still to be matched, or another worker learns what it needs."""
        matched = piece.kind == "match" or piece.defense in files.strengths
        learning = {other.learns for other in running.values()} - learned
        return matched and (piece.learns is None or piece.learns not in learning)

    while waiting or running:
        for worker in range(crew.size):
            piece = next(filter(ready, waiting), None) if worker not in running else None
            if piece is None:
                continue
            waiting.remove(piece)
            strength = piece.defense if piece.kind == "match" else files.strengths[piece.defense]
            if strength is None:
                tracker.finished(piece)  # the match left this defense out
                continue
            running[worker] = piece
            crew.begin(worker, piece, strength)
            tracker.moved(piece, 0, 1)
        if not running:
            continue
        message = crew.next()
        piece = running[message.worker]
        if message.finished is None:
            tracker.moved(piece, *message.step)
            continue
        files.save(message.finished)
        del running[message.worker]
        if piece.learns is not None:
            learned.add(piece.learns)
        tracker.finished(piece)


class Tracker:
    """How far the work has come."""

    def __init__(self, planned: Plan, progress: Callable[[Step], None] | None) -> None:
        self._cost = dict(zip(planned.pieces, planned.seconds, strict=True))
        self._total = math.fsum(planned.seconds) or 1.0  # exact sums: their order must not keep the whole below 1
        self._progress, self._done = progress, 0
        self._shares: dict[Piece, float] = {}
        self._began = time.monotonic()

    def moved(self, piece: Piece, step: float, steps: float, _left: float = 0.0) -> None:
        """Note that a piece has come to this step; one that starts a second part does not go back."""
        self._note(piece, max(self._shares.get(piece, 0.0), step / steps))

    def finished(self, piece: Piece) -> None:
        """Note that a piece is finished."""
        self._done += 1
        self._note(piece, 1.0, ended=True)

    def _note(self, piece: Piece, share: float, ended: bool = False) -> None:
        self._shares[piece] = share
        if self._progress is None:
            return
        overall = min(1.0, math.fsum(self._cost[one] * done for one, done in self._shares.items()) / self._total)
        left = (time.monotonic() - self._began) * (1 - overall) / overall if overall else None
        self._progress(Step(piece.what, self._done, len(self._cost), overall, left, ended))


def plays_games(config: AuditConfig) -> bool:
    """Whether there are identification games: they are about single clients, not about groups of them."""
    return config.games > 0 and config.aggregated == 1


def _earlier_run(config: AuditConfig, folder: Path, resume: bool) -> dict[str, Any] | None:
    """The config.json of an earlier run with this same config; None if the folder holds no audit."""
    path = folder / CONFIG
    if not path.exists():
        for name in (RESULTS, IDENTIFICATIONS, UTILITY, MATCHES):
            if (folder / name).exists():
                raise OutputError(
                    f"audit: {folder} holds {name} but no {CONFIG} that describes it; choose another --out"
                )
        return None
    if not resume:
        raise OutputError(f"audit: {folder} holds an audit already; continue it with --resume or choose another --out")
    described = read_audit(folder)
    before = AuditConfig.from_json(described)
    _refuse_changes(folder, before.to_json(), config.to_json(), "or resume that one by naming nothing but its --out")
    read_rows(folder, described)
    # This comes before the model is built, which runs the file.
    _refuse_changes(folder, described, {"model_file_digest": model_file_digest(config.model)}, _RESTORE)
    return described


_RESTORE = "or restore what it ran with"


def _refuse_changes(folder: Path, before: dict[str, Any], now: dict[str, Any], remedy: str) -> None:
    """Refuse to continue if one of the values of `now` was different before."""
    changed = [f"{name} was {before[name]!r}, now {now[name]!r}" for name in now if before[name] != now[name]]
    if changed:
        raise OutputError(
            f"audit: {folder} holds another audit ({'; '.join(changed)}), and rows of both would be mixed; "
            f"choose another --out, {remedy}"
        )


# -- what is audited -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Subject:
    """What an audit is about: data, model, victims, and a blind guess at them.

    Args:
        config: the config of the audit.
        dataset: its training split is public except for what clients hold in the training; victims are drawn from the
            test split.
        untrained: the model at the weights at which trainings begin.
        task: the model as the server has it when victims are attacked.
        victims: the victims that are attacked.
        root: a few training examples that no client holds, which defenses and active servers are prepared with.
        public_examples: the numbers of training examples, those of `root` first, which attackers who learn may learn
            from.
        computed: whether each metric can be computed here.
        blind: the blind guess at each victim's examples.
        blind_scores: its scores by each metric that can be computed here, ``[victims, examples]``.
    """

    config: AuditConfig
    dataset: data.Dataset
    untrained: Task
    task: Task
    victims: Victims
    root: Batch
    public_examples: Tensor
    computed: Mapping[str, bool]
    blind: Tensor
    blind_scores: Mapping[str, Tensor]

    @classmethod
    def of(cls, config: AuditConfig, dataset: data.Dataset | None = None) -> "Subject":
        """Load and build what a config names; its settings are checked before anything runs.

        Args:
            config: the config of the audit.
            dataset: what it names, if that is loaded already.
        """
        if dataset is None:
            name, parameters = parse_spec(config.dataset)
            dataset = data.load(name, **parameters)
        task = cases.build_task(
            dataset,
            config.model,
            seed=config.seed,
            weights=None if config.weights is None else Path(config.weights),
            shared=config.shared,
            norms=config.norms,
            dropout=config.dropout,
            mean=config.mean,
            std=config.std,
            device=config.device,
        )
        dataset = dataset.bound(task.modality)
        cases.check_attackable(task)
        check_settings(task, dataset, map(create_defense, config.defenses), _training(config))
        # Workers use the cores. More threads for fewer workers would round differently, and rows must not.
        torch.set_num_threads(1)
        untrained, task = task, cases.at_stage(task, dataset, _training(config), config.stage)
        victims = cases.choose_victims(
            dataset.test,
            config.victims,
            config.batch_size,
            clients=config.aggregated,
            seed=config.seed,
            classes=config.victim_classes,
            publishers=dataset.train if any(create_defense(spec).announces for spec in config.defenses) else None,
        )
        modality, train_split = task.modality, dataset.train
        one = victims.inputs[0, :1]
        scorer = metrics.Scorer(modality)
        computed = {name: value is not None for name, value in scorer.compute(one, one).items()}
        for name, here in computed.items():
            metric = METRICS.get(name)
            if not here and metric.remedy:
                warnings.warn(
                    f"{metric.title} is left out (null): its weights are not here; get them with: {metric.remedy}",
                    stacklevel=3,
                )
        guess = modality.blind(
            train_split.inputs, train_split.targets, victims.targets.flatten(0, 1), len(dataset.classes)
        )
        blind_scores = cases.blind_scores(scorer, train_split, victims, guess.view_as(victims.inputs), seed=config.seed)
        root, others = split_public(train_split, config.seed)
        return cls(
            config,
            dataset,
            untrained,
            task,
            victims,
            as_batch(task, train_split.batch(root)),
            torch.cat([root, others])[: config.public],
            computed,
            guess.view_as(victims.inputs),
            blind_scores,
        )

    @cached_property
    def public(self) -> Batch:
        """The public examples as inputs: four times the size of the bytes of images, so only if an attacker learns."""
        return as_batch(self.task, self.dataset.train.batch(self.public_examples))

    @cached_property
    def games(self) -> games.Games:
        """The identification games, with one example of a batch among as many candidates as there are, and may be."""
        config, split = self.config, self.dataset.test
        most = len(split) - config.batch_size + 1
        # An announcement comes from examples that are not in the game.
        if any(create_defense(spec).announces for spec in config.defenses):
            most -= config.batch_size
        return games.draw_games(
            split,
            games=config.games,
            candidates=min(config.candidates, most),
            batch_size=config.batch_size,
            inclusion="one",
            seed=config.seed,
        )

    def chunk(self, attack: Attack) -> int:
        """Victims that are attacked together: one, where that costs no time, so that a kill costs only that one."""
        config = self.config
        alone = choose_execution(self.task, config.batch_size * config.aggregated) == "loop"
        return 1 if alone and config.observed_rounds == 1 and not attack.takes_public else config.chunk

    def case(self, prepared: PreparedDefense, attack: Attack, adaptive: bool, victims: Victims | None = None) -> Case:
        """The case of some of the victims, by default all."""
        config = self.config
        return Case(
            prepared,
            attack,
            victims or self.victims,
            adaptive=adaptive,
            labels=config.labels,
            local=config.local,
            local_known=config.local_known,
            rounds=config.observed_rounds,
            publisher=config.publisher,
            server_lr=config.lr,
            seed=config.seed,
            public=self.public if attack.needs_public or (attack.uses_public and len(self.public_examples)) else None,
        )

    def check_attacks(self) -> None:
        """Refuse attacks that cannot run on this task, before anything runs."""
        undefended = PreparedDefense(create_defense("none"), self.task, self.task)
        for attack in map(create_attack, self.config.attacks):
            case = self.case(undefended, attack, adaptive=False)
            attack.check_threat(self.task, case.threat(self.config.batch_size, self.victims.targets).as_known())

    def attackers(self, defense: Defense, attack: Attack) -> list[bool]:
        """Which attackers a defense meets: plain (False), adaptive (True) or both; "none" leaves nothing to know."""
        wanted = self.config.adaptive
        if wanted is False or defense.name == "none":
            return [False]
        case = self.case(PreparedDefense(defense, self.task, self.task), attack, adaptive=True)
        try:
            attack.check_threat(self.task, case.threat(self.config.batch_size, self.victims.targets))
        except ThreatModelError:
            return [False]
        return [True] if wanted else [False, True]

    def describe(self) -> Json:
        """What config.json holds: the config and the facts of this run."""
        config = self.config
        methods = [*map(create_defense, config.defenses), *map(create_attack, config.attacks)]
        caveats = {str(method): list(method.caveats) for method in methods}
        for defense in map(create_defense, config.defenses):
            if defense.announces:
                caveats[str(defense)].append(cases.PUBLISHED_BY[config.publisher])
        return {
            "gradveil": gradveil.__version__,
            "version": VERSION,
            "command": command_line({**config.to_json(), "plugin_files": plugins.loaded_files()}),
            **config.to_json(),
            "adapted": [
                [spec, str(attack)]
                for spec in config.defenses
                for attack in map(create_attack, config.attacks)
                if True in self.attackers(create_defense(spec), attack)
            ],
            "learned": [spec for spec in config.attacks if create_attack(spec).takes_public],
            "simulating": [
                spec for spec in config.attacks if (attack := create_attack(spec)).simulates and attack.needs_public
            ],
            "public_examples": len(self.public_examples),
            "public_overlap": _overlap(self.victims.inputs.flatten(0, 1), self.dataset.train, self.public_examples),
            "generic": [spec for spec in config.defenses if not create_defense(spec).has_adaptive_attacker],
            "caveats": {spec: sentences for spec, sentences in caveats.items() if sentences},
            "dataset_source": self.dataset.source,
            "data_digest": data_digest(self.dataset),
            "modality": self.task.modality.name,
            "metrics": dict(self.computed),
            "disclosed": list(self.task.modality.disclosed),
            "input_shape": list(self.task.input_shape),
            "classes": list(self.dataset.classes),
            "largest_class": _largest_class(self.dataset),
            "parameters": self.task.size,
            "dropout_rates": self.task.dropout_rates,
            "weights_accuracy": _accuracy(self.task, self.dataset.test),
            "modes": _modes(self.task),
            "weights_digest": weights_digest(self.task),
            "model_file_digest": model_file_digest(config.model),
            "plugin_files": plugins.loaded_files(),
            "plugin_packages": plugins.loaded_packages(),
            "victim_labels": self.victims.targets.tolist(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        }


def _overlap(victims: Tensor, split: data.Split, public: Tensor) -> int:
    """How many of the victims' examples are among the public ones, to the bit."""
    known = {_digest(split.batch(place[None])[0][0]) for place in public}
    return sum(_digest(example) in known for example in victims)


def _digest(example: Tensor) -> bytes:
    return hashlib.sha256(example.float().contiguous().numpy().data).digest()


def _largest_class(dataset: data.Dataset) -> float | None:
    """The share of the training examples that have the most frequent label, which a guess at labels gets right."""
    labels = dataset.train.targets
    return float(labels.flatten().bincount().max()) / labels.numel() if dataset.classes else None


def _accuracy(task: Task, test: data.Split) -> float | None:
    """The attacked model's accuracy on test examples; None for a task without classes."""
    few = data.Split(test.inputs[:JUDGED], test.targets[:JUDGED], test.modality)
    return finite(evaluate(task, few)[0])


def _modes(task: Task) -> dict[str, str]:
    """The mode of the model's batch norms and of its dropout, if it has any: train, inference or some of both."""
    modules = list(task.copy_model().modules())
    kinds = {"batch norm": _BatchNorm, "dropout": _DropoutNd}
    training = {
        name: {module.training for module in modules if isinstance(module, kind)} for name, kind in kinds.items()
    }
    words = {True: "train", False: "inference"}
    return {name: words[found.pop()] if len(found) == 1 else "mixed" for name, found in training.items() if found}


def _training(config: AuditConfig) -> Training:
    return Training(
        rounds=config.rounds,
        clients=config.clients,
        batch_size=config.client_batch,
        lr=config.lr,
        local=config.local,
        evaluate_every=max(1, config.rounds // 10),
        seed=config.seed,
    )


# -- the work --------------------------------------------------------------------------------------------------------


class _Files:
    """The rows and pictures of an audit on disk, which this process alone writes."""

    def __init__(self, folder: Path, described: Json, subject: Subject) -> None:
        self.folder, self.subject = folder, subject
        self.results = SealedLines(folder / RESULTS, ResultRow, described)
        self.identifications = SealedLines(folder / IDENTIFICATIONS, IdentificationRow, described)
        self.utility = SealedLines(folder / UTILITY, UtilityRow, described)
        self.matches = SealedLines(folder / MATCHES, MatchRow, described)
        self.learned = learned_folder(described)
        self._held_back: list[UtilityRow] = []

    @property
    def rows(self) -> Rows:
        """All rows."""
        return Rows(self.results.rows, self.identifications.rows, self.utility.rows, self.matches.rows, ())

    @property
    def strengths(self) -> dict[str, str | None]:
        """See `_strengths`."""
        return _strengths(self.subject.config, self.matches.rows)

    def save(self, finished: Finished) -> None:
        """Write what a piece leaves, the pictures before the rows that name them, and wait until it is on disk."""
        for path, content in finished.pictures.items():
            with writing(self.folder / path):
                (self.folder / path).parent.mkdir(exist_ok=True)
                (self.folder / path).write_bytes(content)
        self.results.append(row for row in finished.rows if isinstance(row, ResultRow))
        self.identifications.append(row for row in finished.rows if isinstance(row, IdentificationRow))
        self.matches.append(row for row in finished.rows if isinstance(row, MatchRow))
        for row in finished.rows:
            if isinstance(row, MatchRow) and row.reason:
                warnings.warn(f"{row.reason}; it is left out", stacklevel=2)
        self._held_back += [row for row in finished.rows if isinstance(row, UtilityRow)]
        undefended = [row for row in (*self.utility.rows, *self._held_back) if row.defense_spec == "none"]
        if undefended and self._held_back:
            baseline = undefended[0].accuracy
            ready = sorted(self._held_back, key=lambda row: row.defense_spec != "none")
            self.utility.append(
                dataclasses.replace(
                    row,
                    baseline_accuracy=baseline,
                    pmm=performance_maintenance(row.accuracy, baseline, self.subject.dataset.test),
                )
                for row in ready
            )
            self._held_back = []


def learned_folder(described: Json) -> Path:
    """Where what attacks have learned is kept: not in the audit's own folder, which may come from anybody."""
    return cache_folder() / "learned" / str(described[DIGEST])


def _strengths(config: AuditConfig, matches: Sequence[MatchRow]) -> dict[str, str | None]:
    """Map each defense asked for to the one that is attacked; None: left out, as no strength fits the price.

    A defense that is still to be matched is not there.
    """
    if config.match is None:
        return {spec: spec for spec in config.defenses}
    return {"none": "none", **{row.asked: row.found for row in matches}}


def _missing(subject: Subject, rows: Rows) -> list[Piece]:
    """All pieces whose rows are not there yet, in order."""
    return list(_pieces(subject, rows))


def _pieces(subject: Subject, rows: Rows) -> Iterator[Piece]:
    config, done = subject.config, {row.key for row in rows.results}
    found = _strengths(config, rows.matches)
    for spec in config.defenses:
        if spec not in found:
            yield Piece("match", spec)
    # A defense that is still to be matched has no rows yet, so all of its work is missing.
    defenses = [(spec, found.get(spec, spec)) for spec in config.defenses if found.get(spec, spec) is not None]
    played = {row.key for row in rows.identifications}
    for spec, chosen in defenses:
        defense = create_defense(spec)
        for attack in map(create_attack, config.attacks):
            for adaptive in subject.attackers(defense, attack):
                size = subject.chunk(attack)
                for first in range(0, config.victims, size):
                    chunk = range(first, min(first + size, config.victims))
                    missing = tuple(v for v in chunk if (chosen, str(attack), adaptive, v) not in done)
                    if missing:
                        yield Piece("attack", spec, str(attack), adaptive, chunk.start, chunk.stop, missing)
        for adaptive in subject.attackers(defense, IDENTIFIER) if plays_games(config) else []:
            if (chosen, adaptive) not in played:
                yield Piece("games", spec, adaptive=adaptive)
    trained = {row.defense_spec for row in rows.utility}
    for spec, chosen in defenses:
        if chosen not in trained:
            yield Piece("training", spec)


def _guess_blindly(work: "_Work", rows: Rows) -> Finished:
    """The rows of the blind guess that are missing; they take no time worth sharing."""
    subject, modality, done = work.subject, work.subject.task.modality, {row.key for row in rows.results}
    found: list[ResultRow] = []
    pictures: dict[str, bytes] = {}
    for victim, guess in enumerate(subject.blind):
        if (None, BLIND_GUESS, False, victim) in done:
            continue
        inputs, targets = subject.victims.inputs[victim], subject.victims.targets[victim]
        blind = {name: scores[victim] for name, scores in subject.blind_scores.items()}
        scored = work.scorer.score(inputs, guess, targets, targets, blind)
        content, ending = modality.show(inputs, None), modality.shown_as
        _, original = _picture("original", victim, content, ending, pictures)
        score = Score(guess, scored, trained_on=None, loss=None, losses=cases.NO_LOSSES, iterations=0, seconds=0.0)
        found.append(work.row(None, None, False, victim, score, pictures, original_digest=original))
    return Finished(found, pictures)


def _picture(stem: str, victim: int, content: bytes, ending: str, pictures: dict[str, bytes]) -> tuple[str, str]:
    """Add a picture, and return its path in the folder and its digest."""
    path = f"images/{stem}-v{victim}.{ending}"
    pictures[path] = content
    return path, bytes_digest(content)


class _Work:
    """Performs the pieces of an audit, in any process; it writes nothing but what attacks have learned.

    Args:
        subject: what is audited.
        learned: where what attacks have learned is kept; None: nowhere.
    """

    def __init__(self, subject: Subject, learned: Path | None = None) -> None:
        self.subject, self.learned, self.config = subject, learned, subject.config
        self.scorer = metrics.Scorer(subject.task.modality)
        self.costs = Costs(subject.untrained, subject.dataset, _training(self.config), self._share_named)
        self._prepared: dict[tuple[str, str | None], tuple[PreparedDefense, float | None]] = {}

    def perform(self, piece: Piece, strength: str, report_step: ReportStep) -> Finished:
        """Perform a piece.

        Args:
            piece: the piece.
            strength: its defense as it is attacked, at the strength that was matched.
            report_step: called with (steps done, steps in all).
        """
        if piece.kind == "match":
            return self._match(piece.defense, report_step)
        if piece.kind == "games":
            return self._identify(strength, piece.adaptive, report_step)
        if piece.kind == "training":
            return self._train(strength, report_step)
        assert piece.attack is not None
        chunk = range(piece.first, piece.stop)
        return self._attack(
            strength, create_attack(piece.attack), piece.adaptive, chunk, set(piece.missing), report_step
        )

    def _match(self, spec: str, report_step: ReportStep) -> Finished:
        assert self.config.match is not None
        price = Price.parse(self.config.match)
        ended = match(create_defense(spec), price, self.costs.of(price.kind), report_step)
        row = MatchRow(
            asked=spec,
            found=None if ended.found is None else str(ended.found),
            kind=price.kind,
            target=price.target,
            tolerance=price.tolerance,
            cost=None if ended.cost is None else finite(ended.cost),
            tries=ended.tries,
            reason=ended.reason,
        )
        return Finished([row])

    def _attack(
        self, spec: str, attack: Attack, adaptive: bool, chunk: range, missing: set[int], report_step: ReportStep
    ) -> Finished:
        """Attack a whole chunk, so that each row is the same in every run; keep only the missing rows."""
        prepared, bound_mse = self._prepare(spec, attack)
        case = self.subject.case(prepared, attack, adaptive, self.subject.victims.part(chunk))
        seen = cases.observe(cases.fit(case, progress=report_step, cache=self.learned))
        found = cases.attack_on(seen, progress=report_step)
        if found.interrupted:
            raise KeyboardInterrupt
        blind = {name: part[chunk.start : chunk.stop] for name, part in self.subject.blind_scores.items()}
        scores = cases.score(seen, found, self.scorer, blind)
        pictures: dict[str, bytes] = {}
        rows = [
            self.row(
                prepared.defense,
                attack,
                adaptive,
                victim,
                scores[place],
                pictures,
                power=seen.power[place],
                bound_mse=bound_mse,
            )
            for place, victim in enumerate(chunk)
            if victim in missing
        ]
        return Finished(rows, pictures)

    def _identify(self, spec: str, adaptive: bool, report_step: ReportStep) -> Finished:
        """Play identification games against a defense."""
        prepared, drawn = self._prepare(spec, IDENTIFIER)[0], self.subject.games
        figures, seconds = self._play(prepared, adaptive, report_step)
        named = figures["rank_one"]
        row = IdentificationRow(
            **_named("defense", prepared.defense, absent=None),
            attack_spec=str(IDENTIFIER),
            adaptive=adaptive,
            candidates=drawn.members.shape[1],
            games=len(drawn.members),
            named=round(named.value * len(drawn.members)),
            named_low=named.low,
            named_high=named.high,
            **_with_interval("auc", figures["auc"]),
            **_with_interval("tpr", figures["tpr_at_1_percent"]),
            bits=figures["bits"].value,
            bits_low=figures["bits"].low,
            class_mix=drawn.class_mix,
            seconds=round(seconds, 3),
        )
        return Finished([row])

    def _share_named(self, defense: Defense) -> float:
        """How often the strongest server names the right candidate under a defense."""
        prepared = self._prepare(str(defense), IDENTIFIER)[0]
        attackers = self.subject.attackers(defense, IDENTIFIER)
        return max(self._play(prepared, adaptive)[0]["rank_one"].value for adaptive in attackers)

    def _play(
        self, prepared: PreparedDefense, adaptive: bool, report_step: ReportStep | None = None
    ) -> tuple[dict[str, identification.Estimate], float]:
        """Play the identification games; returns the figures, and how long the attacker took."""
        subject, config = self.subject, self.config
        # Single examples need no others to be told apart from.
        chosen = subject.public_examples[:PUBLIC_ROWS]
        needed = config.batch_size > 1 and len(chosen) > 0
        found = games.play(
            subject.games,
            prepared,
            IDENTIFIER,
            adaptive=adaptive,
            local=config.local,
            local_known=config.local_known,
            seed=config.seed,
            public=as_batch(subject.task, subject.dataset.train.batch(chosen)) if needed else None,
            progress=report_step,
        )
        return identification.summary(found.scores.double().cpu(), subject.games.members), found.seconds

    def _prepare(self, chosen: str, attack: Attack) -> tuple[PreparedDefense, float | None]:
        """The defense prepared for the model that the server sends, and the bound.

        It is made once for all attacks that do not change the model, and once for each attack that does.
        """
        key = chosen, str(attack) if attack.server == "active" else None
        if key not in self._prepared:
            if len(self._prepared) == KEPT:
                del self._prepared[next(iter(self._prepared))]
            subject = self.subject
            prepared = cases.prepare(
                subject.task, create_defense(chosen), attack, public=subject.root, seed=self.config.seed
            )
            self._prepared[key] = prepared, cases.bound(subject.case(prepared, attack, adaptive=False))
        return self._prepared[key]

    def row(
        self,
        defense: Defense | None,
        attack: Attack | None,
        adaptive: bool,
        victim: int,
        score: Score,
        pictures: dict[str, bytes],
        *,
        power: float | None = None,
        bound_mse: float | None = None,
        original_digest: str | None = None,
    ) -> ResultRow:
        """The row of a victim, whose picture is added to `pictures`."""
        config, modality = self.config, self.subject.task.modality
        known = METRICS.of(modality)
        methods = [slug(str(defense)), slug(str(attack)), *(["adaptive"] if adaptive else [])]
        stem = "-".join(methods) if attack else BLIND_GUESS
        image, image_digest = _picture(stem, victim, self._shown(victim, score), modality.shown_as, pictures)
        return ResultRow(
            **_named("defense", defense, absent=None),
            **_named("attack", attack, absent=BLIND_GUESS),
            adaptive=adaptive,
            server=attack.server if attack else "passive",
            dataset=config.dataset,
            model=config.model,
            seed=config.seed,
            victim=victim,
            batch_size=config.batch_size,
            aggregated=config.aggregated,
            scores={metric.name: score.metrics[metric.name] for metric in known},
            label_correct=score.metrics["label_correct"],
            leaked=bool(score.metrics["leaked"]),
            leak_rule=score.metrics["leak_rule"],
            power=power,
            bound_mse=bound_mse,
            trained_on=score.trained_on
            and {metric.name: score.trained_on[metric.name] for metric in known if metric.compares},
            loss=score.loss,
            **score.losses,
            iterations=score.iterations,
            seconds=round(score.seconds, 3),
            found_by=score.found_by,
            image=image,
            image_digest=image_digest,
            original_digest=original_digest,
        )

    def _shown(self, victim: int, score: Score) -> bytes:
        """The file that shows what was recovered: pictures in the attack's order, text beside its originals."""
        modality, originals = self.subject.task.modality, self.subject.victims.inputs[victim]
        in_attack_order = isinstance(modality, Drawn)
        return modality.show(
            score.inputs if in_attack_order else self.scorer.matched(originals, score.inputs), originals
        )

    def _train(self, spec: str, report_step: ReportStep) -> Finished:
        """Train under a defense; what that is worth without it (`baseline_accuracy`, `pmm`) the writer fills in."""
        defense, subject = create_defense(spec), self.subject
        result = train(subject.untrained, subject.dataset, defense, _training(self.config), progress=report_step)
        row = UtilityRow(
            **_named("defense", defense, absent=None),
            accuracy=result.accuracy,
            baseline_accuracy=result.accuracy,
            pmm=None,
            loss=finite(result.loss),
            round_seconds=finite(result.round_seconds),
            upload_bytes=finite(result.upload_bytes),
            download_bytes=finite(result.download_bytes),
            history=tuple(accuracy for _, accuracy in result.history),
            diverged=result.diverged,
            privacy=None if result.privacy is None else str(result.privacy),
            epsilon=None if result.privacy is None else finite(result.privacy.epsilon),
        )
        return Finished([row])


def _with_interval(name: str, estimate: identification.Estimate) -> dict[str, Any]:
    """The keys of a row that hold a figure with its interval."""
    return {name: estimate.value, f"{name}_low": finite(estimate.low), f"{name}_high": finite(estimate.high)}


def _named(kind: str, method: Method | None, *, absent: str | None) -> dict[str, Any]:
    """The keys of a row that name a method."""
    name, spec = (method.name, str(method)) if method else (absent, absent)
    return {kind: name, f"{kind}_params": method.parameters if method else {}, f"{kind}_spec": spec}
