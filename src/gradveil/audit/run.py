"""Run an audit: attack every defense on the same victims, then train under every defense."""

import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradveil
from gradveil import data, metrics
from gradveil.attacks import Attack
from gradveil.attacks import create as create_attack
from gradveil.audit import cases, games
from gradveil.audit.cases import Batch, Case, PreparedDefense, Score, Victims, finite
from gradveil.audit.config import AuditConfig
from gradveil.audit.folder import SealedLines, check_config, read_audit, read_rows, refuse_links
from gradveil.audit.match import Costs, Price, match
from gradveil.audit.rows import VERSION, IdentificationRow, MatchRow, ResultRow, UtilityRow
from gradveil.audit.schema import DIGEST, Json, sealed
from gradveil.audit.store import BLIND_GUESS, CONFIG, IDENTIFICATIONS, MATCHES, RESULTS, UTILITY, command_line, slug
from gradveil.core import plugins
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
from gradveil.task import Task

IDENTIFIER = create_attack("identification")
"""The attacker who looks for a client's example among candidates."""
PUBLIC_ROWS = 800
"""Public examples that stand for the rest of a batch in its regression; more cost time and change little."""

ReportStep = Callable[..., None]  # (steps done, steps in all)
WorkItem = tuple[str, Callable[[ReportStep], None]]  # a piece of work: its description, and the function that does it


@dataclass(frozen=True)
class Step:
    """The progress of an audit: the current piece of work, and how much of it and of the whole is done.

    Args:
        what: a description of the piece of work.
        share: how much of it is done, in [0, 1].
        done: work items finished, not counting this one.
        total: work items in all.

    Example:
        >>> Step("idlg against none", 0.5, 2, 10).overall
        0.25
    """

    what: str
    share: float
    done: int
    total: int

    @property
    def overall(self) -> float:
        """How much of the whole audit is done, in [0, 1]; every piece counts the same."""
        return (self.done + self.share) / self.total


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
) -> None:
    """Run whatever an audit is still missing.

    Every finished row is written to disk immediately. After a crash or an interrupt, the same call with ``resume=True``
    continues; the rows are the same as those of an uninterrupted run.

    Args:
        config: what to audit. A model ``FILE.py@FUNCTION`` in it is code that will run.
        folder: where results go. A folder that is resumed may come from anybody: its files are checked before anything
            else happens, and the digest of the model's file before that file runs.
        resume: continue in a folder that holds results of the same config.
        progress: called as the work proceeds.
    """
    prepare_folder(folder, "audit")
    refuse_links(folder)
    with locked(folder, "audit", "audit"):
        _run(config, folder, resume, progress)


def _run(config: AuditConfig, folder: Path, resume: bool, progress: Callable[[Step], None] | None) -> None:
    before = _earlier_run(config, folder, resume)
    subject = Subject.of(config)
    subject.check_attacks()
    now = sealed(subject.describe())
    if before is None:
        check_config(now)  # what is written must be readable again
        write_json(folder / CONFIG, now)
    else:
        # Equal configs do not guarantee equal rows: data, model or version may have changed under the same name.
        decisive = {name: value for name, value in now.items() if name not in ("platform", DIGEST)}
        _refuse_changes(folder, before, decisive, _RESTORE)
    files = _Files(folder, before or now)
    work_items = list(_Work(subject, files).work_items())
    for done, (what, work) in enumerate(work_items):

        def report_step(step: int, steps: int, _left: float = 0.0, done: int = done, what: str = what) -> None:
            if progress:
                progress(Step(what, step / steps, done, len(work_items)))

        report_step(0, 1)
        work(report_step)
    shutil.rmtree(files.learned, ignore_errors=True)  # needed only to resume


def plays_games(config: AuditConfig) -> bool:
    """Whether there are identification games: they are about single clients, not about groups of them."""
    return config.games > 0 and config.aggregated == 1


def choose_threads(parameters: int) -> int:
    """Torch threads for a model: small networks run up to ten times slower on several threads than on one."""
    return 1 if parameters < 1_000_000 else os.cpu_count() or 1


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
        public: training examples, those of `root` first, which attackers who learn may learn from.
        computed: whether each metric can be computed here.
        blind: the blind guess at each victim's examples.
        blind_scores: its scores by the primary metric, ``[victims, examples]``.
    """

    config: AuditConfig
    dataset: data.Dataset
    untrained: Task
    task: Task
    victims: Victims
    root: Batch
    public: Batch
    computed: Mapping[str, bool]
    blind: Tensor
    blind_scores: Tensor

    @classmethod
    def of(cls, config: AuditConfig) -> "Subject":
        """Load and build what a config names; its settings are checked before anything runs."""
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
        cases.check_attackable(task)
        check_settings(task, dataset, map(create_defense, config.defenses), _training(config))
        torch.set_num_threads(choose_threads(task.size))
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
        computed = {metric.name: metric.compute(one, one) is not None for metric in METRICS.of(modality)}
        for name, here in computed.items():
            if not here:
                metric = METRICS.get(name)
                warnings.warn(
                    f"{metric.title} is left out (null): its weights are not here; get them with: {metric.remedy}",
                    stacklevel=3,
                )
        guess = modality.blind(
            train_split.inputs, train_split.targets, victims.targets.flatten(0, 1), len(dataset.classes)
        )
        blind_scores = METRICS.get(modality.primary).compute(victims.inputs.flatten(0, 1), guess)
        assert blind_scores is not None  # the primary metric can always be computed
        root, others = split_public(train_split, config.seed)
        public = torch.cat([root, others])[: config.public]
        return cls(
            config,
            dataset,
            untrained,
            task,
            victims,
            as_batch(task, train_split.batch(root)),
            as_batch(task, train_split.batch(public)),
            computed,
            guess.view_as(victims.inputs),
            blind_scores.view(victims.inputs.shape[:2]),
        )

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
            public=self.public,
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
            "learned": [spec for spec in config.attacks if create_attack(spec).needs_public],
            "public_examples": len(self.public[0]),
            "public_overlap": _overlap(self.victims.inputs.flatten(0, 1), self.public[0].cpu()),
            "generic": [spec for spec in config.defenses if not create_defense(spec).has_adaptive_attacker],
            "caveats": {spec: sentences for spec, sentences in caveats.items() if sentences},
            "dataset_source": self.dataset.source,
            "data_digest": data_digest(self.dataset),
            "modality": self.task.modality.name,
            "metrics": dict(self.computed),
            "input_shape": list(self.task.input_shape),
            "classes": list(self.dataset.classes),
            "parameters": self.task.size,
            "dropout_rates": self.task.dropout_rates,
            "weights_accuracy": finite(evaluate(self.task, self.dataset.test)[0]),
            "weights_digest": weights_digest(self.task),
            "model_file_digest": model_file_digest(config.model),
            "plugin_files": plugins.loaded_files(),
            "plugin_packages": plugins.loaded_packages(),
            "victim_labels": self.victims.targets.tolist(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        }


def _overlap(victims: Tensor, public: Tensor) -> int:
    """How many of the victims' examples are among the public ones, to the bit."""
    known = {example.numpy().tobytes() for example in public.float()}
    return sum(example.numpy().tobytes() in known for example in victims.float())


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
    """The rows and pictures of an audit on disk."""

    def __init__(self, folder: Path, described: Json) -> None:
        self.folder = folder
        self.results = SealedLines(folder / RESULTS, ResultRow, described)
        self.identifications = SealedLines(folder / IDENTIFICATIONS, IdentificationRow, described)
        self.utility = SealedLines(folder / UTILITY, UtilityRow, described)
        self.matches = SealedLines(folder / MATCHES, MatchRow, described)
        # Not in the audit's own folder, which may come from anybody when it is resumed.
        self.learned = cache_folder() / "learned" / described[DIGEST]

    def save_picture(self, stem: str, victim: int, content: bytes) -> tuple[str, str]:
        """Write a picture, and return its path in the folder and its digest."""
        path = f"images/{stem}-v{victim}.png"
        with writing(self.folder / path):
            (self.folder / path).parent.mkdir(exist_ok=True)
            (self.folder / path).write_bytes(content)
        return path, bytes_digest(content)


class _Work:
    """The work of an audit that is still to do."""

    def __init__(self, subject: Subject, files: _Files) -> None:
        self.subject, self.files, self.config = subject, files, subject.config
        self.scorer = metrics.Scorer(subject.task.modality)
        self.costs = Costs(subject.untrained, subject.dataset, _training(self.config))
        self._prepared: dict[tuple[str, str | None], tuple[PreparedDefense, float | None]] = {}

    def work_items(self) -> Iterator[WorkItem]:
        """All work items whose rows are not on disk yet, in order."""
        config, done = self.config, {row.key for row in self.files.results.rows}
        victims = range(config.victims)
        if any((None, BLIND_GUESS, False, victim) not in done for victim in victims):
            yield "blind guess", partial(self._guess_blindly, done)
        found = self._matched()
        for spec in config.defenses:
            if spec not in found:
                yield f"matching {create_defense(spec).name}", partial(self._match, spec)
        # A defense that is still to be matched has no rows yet, so all of its work is missing.
        defenses = [(spec, found.get(spec, spec)) for spec in config.defenses if found.get(spec, spec) is not None]
        played = {row.key for row in self.files.identifications.rows}
        for spec, chosen in defenses:
            defense = create_defense(spec)
            for attack in map(create_attack, config.attacks):
                for adaptive in self.subject.attackers(defense, attack):
                    for first in range(0, len(victims), config.chunk):
                        chunk = victims[first : first + config.chunk]
                        missing = {v for v in chunk if (chosen, str(attack), adaptive, v) not in done}
                        if missing:
                            what = f"{attack.name} against {defense.name}{', adaptive' if adaptive else ''}"
                            yield what, partial(self._attack, spec, attack, adaptive, chunk, missing)
            for adaptive in self.subject.attackers(defense, IDENTIFIER) if plays_games(config) else []:
                if (chosen, adaptive) not in played:
                    what = f"identification under {defense.name}{', adaptive' if adaptive else ''}"
                    yield what, partial(self._identify, spec, adaptive)
        trained = {row.defense_spec for row in self.files.utility.rows}
        for spec, chosen in defenses:
            if chosen not in trained:
                yield f"training under {create_defense(spec).name}", partial(self._train, spec)

    def _matched(self) -> dict[str, str | None]:
        """Map each defense asked for to the one that is attacked; None: left out, as no strength fits the price."""
        if self.config.match is None:
            return {spec: spec for spec in self.config.defenses}
        return {"none": "none", **{row.asked: row.found for row in self.files.matches.rows}}

    def _match(self, spec: str, report_step: ReportStep) -> None:
        assert self.config.match is not None
        price = Price.parse(self.config.match)
        ended = match(create_defense(spec), price, self.costs.of(price.kind), report_step)
        if ended.reason:
            warnings.warn(f"{ended.reason}; it is left out", stacklevel=2)
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
        self.files.matches.append([row])

    def _guess_blindly(self, done: set[tuple[Any, ...]], report_step: ReportStep) -> None:
        subject = self.subject
        rows = []
        for victim, guess in enumerate(subject.blind):
            if (None, BLIND_GUESS, False, victim) in done:
                continue
            inputs, targets = subject.victims.inputs[victim], subject.victims.targets[victim]
            scored = self.scorer.score(inputs, guess, targets, targets, subject.blind_scores[victim])
            original = self.files.save_picture("original", victim, subject.task.modality.render(inputs))[1]
            score = Score(guess, scored, trained_on=None, loss=None, losses=cases.NO_LOSSES, iterations=0, seconds=0.0)
            rows.append(self._row(None, None, False, victim, score, original_digest=original))
        self.files.results.append(rows)

    def _attack(
        self, spec: str, attack: Attack, adaptive: bool, chunk: range, missing: set[int], report_step: ReportStep
    ) -> None:
        """Attack a whole chunk, so that each row is the same in every run; keep only the missing rows."""
        prepared_and_bound = self._prepare(spec, attack)
        if prepared_and_bound is None:
            return  # the match left this defense out
        prepared, bound_mse = prepared_and_bound
        case = self.subject.case(prepared, attack, adaptive, self.subject.victims.part(chunk))
        seen = cases.observe(cases.fit(case, progress=report_step, cache=self.files.learned))
        found = cases.attack_on(seen, progress=report_step)
        if found.interrupted:
            raise KeyboardInterrupt
        scores = cases.score(seen, found, self.scorer, self.subject.blind_scores[chunk.start : chunk.stop])
        self.files.results.append(
            self._row(
                prepared.defense, attack, adaptive, victim, scores[place], power=seen.power[place], bound_mse=bound_mse
            )
            for place, victim in enumerate(chunk)
            if victim in missing
        )

    def _identify(self, spec: str, adaptive: bool, report_step: ReportStep) -> None:
        """Play identification games against a defense."""
        prepared_and_bound = self._prepare(spec, IDENTIFIER)
        if prepared_and_bound is None:
            return  # the match left this defense out
        prepared, subject, config = prepared_and_bound[0], self.subject, self.config
        drawn = subject.games
        # Single examples need no others to be told apart from.
        inputs, targets = (part[:PUBLIC_ROWS] for part in subject.public)
        public = (inputs, targets) if config.batch_size > 1 and len(inputs) else None
        found = games.play(
            drawn,
            prepared,
            IDENTIFIER,
            adaptive=adaptive,
            local=config.local,
            local_known=config.local_known,
            seed=config.seed,
            public=public,
            progress=report_step,
        )
        figures = identification.summary(found.scores.double().cpu(), drawn.members)
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
            seconds=round(found.seconds, 3),
        )
        self.files.identifications.append([row])

    def _prepare(self, spec: str, attack: Attack) -> tuple[PreparedDefense, float | None] | None:
        """The defense prepared for the model that the server sends, and the bound; None if the match left it out.

        It is made once for all attacks that do not change the model, and once for each attack that does.
        """
        chosen = self._matched()[spec]
        if chosen is None:
            return None
        key = chosen, str(attack) if attack.server == "active" else None
        if key not in self._prepared:
            # Defenses are processed one after the other, so earlier ones are not needed again.
            self._prepared = {other: prepared for other, prepared in self._prepared.items() if other[0] == chosen}
            subject = self.subject
            prepared = cases.prepare(
                subject.task, create_defense(chosen), attack, public=subject.root, seed=self.config.seed
            )
            self._prepared[key] = prepared, cases.bound(subject.case(prepared, attack, adaptive=False))
        return self._prepared[key]

    def _row(
        self,
        defense: Defense | None,
        attack: Attack | None,
        adaptive: bool,
        victim: int,
        score: Score,
        *,
        power: float | None = None,
        bound_mse: float | None = None,
        original_digest: str | None = None,
    ) -> ResultRow:
        config, known = self.config, METRICS.of(self.subject.task.modality)
        methods = [slug(str(defense)), slug(str(attack)), *(["adaptive"] if adaptive else [])]
        picture = self.subject.task.modality.render(score.inputs)
        image, image_digest = self.files.save_picture("-".join(methods) if attack else BLIND_GUESS, victim, picture)
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
            power=power,
            bound_mse=bound_mse,
            trained_on=score.trained_on
            and {metric.name: score.trained_on[metric.name] for metric in known if metric.compares},
            loss=score.loss,
            **score.losses,
            iterations=score.iterations,
            seconds=round(score.seconds, 3),
            image=image,
            image_digest=image_digest,
            original_digest=original_digest,
        )

    def _train(self, spec: str, report_step: ReportStep) -> None:
        chosen = self._matched()[spec]
        if chosen is None:
            return  # the match left this defense out
        defense, subject = create_defense(chosen), self.subject
        result = train(subject.untrained, subject.dataset, defense, _training(self.config), progress=report_step)
        undefended = [row.accuracy for row in self.files.utility.rows if row.defense_spec == "none"]
        baseline = undefended[0] if undefended else result.accuracy  # "none" comes first, see AuditConfig
        row = UtilityRow(
            **_named("defense", defense, absent=None),
            accuracy=result.accuracy,
            baseline_accuracy=baseline,
            pmm=performance_maintenance(result.accuracy, baseline, subject.dataset.test),
            loss=finite(result.loss),
            round_seconds=finite(result.round_seconds),
            upload_bytes=finite(result.upload_bytes),
            download_bytes=finite(result.download_bytes),
            history=tuple(accuracy for _, accuracy in result.history),
            diverged=result.diverged,
            privacy=None if result.privacy is None else str(result.privacy),
            epsilon=None if result.privacy is None else finite(result.privacy.epsilon),
        )
        self.files.utility.append([row])


def _with_interval(name: str, estimate: identification.Estimate) -> dict[str, Any]:
    """The keys of a row that hold a figure with its interval."""
    return {name: estimate.value, f"{name}_low": finite(estimate.low), f"{name}_high": finite(estimate.high)}


def _named(kind: str, method: Method | None, *, absent: str | None) -> dict[str, Any]:
    """The keys of a row that name a method."""
    name, spec = (method.name, str(method)) if method else (absent, absent)
    return {kind: name, f"{kind}_params": method.parameters if method else {}, f"{kind}_spec": spec}
