"""Run an audit: attack every defense on the same victims, then train under every defense."""

import math
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import gradveil
from gradveil import data, metrics, models, theory
from gradveil.attacks import Attack, Reconstruction, ThreatModel
from gradveil.attacks import create as create_attack
from gradveil.audit.config import AuditConfig
from gradveil.audit.folder import SealedLines, check_config, read_audit, read_rows, refuse_links
from gradveil.audit.match import Costs, Price, match
from gradveil.audit.schema import DIGEST, sealed
from gradveil.audit.store import (
    BLIND_GUESS,
    CONFIG,
    MATCHES,
    RESULTS,
    UTILITY,
    Row,
    file_digest,
    slug,
)
from gradveil.defenses import Defense
from gradveil.defenses import create as create_defense
from gradveil.errors import OutputError, ParameterError, ThreatModelError
from gradveil.federation import Training, train
from gradveil.federation.digests import data_digest, model_file_digest, weights_digest
from gradveil.federation.job import as_batch, performance_maintenance, split_public
from gradveil.federation.local import check_settings
from gradveil.folders import locked, prepare_folder, write_json
from gradveil.randomness import derived_generator
from gradveil.registry import parse_spec
from gradveil.task import Task
from gradveil.update import Update

Batch = tuple[Tensor, Tensor]
Tell = Callable[..., None]  # (steps done, steps in all)


@dataclass(frozen=True)
class Step:
    """Where an audit is: one piece of work, how far it is, and how much of the whole is done.

    Args:
        what: the piece of work in words.
        share: how much of it is done, in [0, 1].
        done: pieces finished, this one not counted.
        total: pieces in all.

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
        """How much of the whole audit is done, in [0, 1], every piece counting alike."""
        return (self.done + self.share) / self.total


def default_folder(config: AuditConfig) -> Path:
    """Where an audit goes unless told otherwise; different configs go to different folders."""
    stem = "-".join(slug(Path(parse_spec(spec)[0]).name) for spec in (config.dataset, config.model))
    return Path("audits") / f"{stem}-{config.digest}"


def run(
    config: AuditConfig,
    folder: Path,
    *,
    resume: bool = False,
    progress: Callable[[Step], None] | None = None,
) -> None:
    """Run what is missing of an audit.

    Every finished row is on disk at once. After a crash or an interrupt, the same call with ``resume=True`` goes on;
    the rows are the same as those of an uninterrupted run.

    Args:
        config: what to audit. A model ``FILE.py@FUNCTION`` in it is code that runs.
        folder: where results go. One that is resumed may come from anybody: its files are checked before anything
            else happens, and the digest of the model's file before that file runs.
        resume: go on in a folder that holds results of the same config.
        progress: called as the work proceeds.
    """
    prepare_folder(folder, "audit")
    refuse_links(folder)
    with locked(folder, "audit", "audit"):
        _run(config, folder, resume, progress)


def _run(config: AuditConfig, folder: Path, resume: bool, progress: Callable[[Step], None] | None) -> None:
    before = _earlier(config, folder, resume)
    bench = _Bench(config, folder)
    now = sealed(bench.description())
    if before is None:
        check_config(now)  # what is written must be what can be read
        write_json(folder / CONFIG, now)
    else:
        _refuse_other_circumstances(folder, before, now)
    bench.open_rows((before or now)[DIGEST])
    pieces = list(bench.pieces())
    for done, piece in enumerate(pieces):

        def tell(step: int, steps: int, _left: float = 0.0, done: int = done, what: str = piece.what) -> None:
            if progress:
                progress(Step(what, step / steps, done, len(pieces)))

        tell(0, 1)
        piece.work(tell)


def choose_threads(parameters: int) -> int:
    """Torch threads for a model: small networks run up to ten times slower on several threads than on one."""
    return 1 if parameters < 1_000_000 else os.cpu_count() or 1


def choose_execution(task: Task, batch_size: int) -> str:
    """Loop or batch, by size and not by timing: they round differently, and an audit must repeat itself to the bit.

    Measured on two cores: one vmapped program for all victims is three times faster on lenet (30,000 values) and
    slower on convnet and resnet18 (millions).
    """
    return "batch" if batch_size * task.activations + task.size < 300_000 else "loop"


def _earlier(config: AuditConfig, folder: Path, resume: bool) -> dict[str, Any] | None:
    """What config.json says of an earlier run of this very config; None if the folder holds no audit."""
    path = folder / CONFIG
    if not path.exists():
        for name in (RESULTS, UTILITY, MATCHES):
            if (folder / name).exists():
                raise OutputError(
                    f"audit: {folder} holds {name} but no {CONFIG} that tells what it is; choose another --out"
                )
        return None
    if not resume:
        raise OutputError(f"audit: {folder} holds an audit already; go on with --resume or choose another --out")
    described = read_audit(folder)
    before = AuditConfig.from_json(described)
    _refuse_changes(folder, before.to_json(), config.to_json(), "or resume that one by naming nothing but its --out")
    read_rows(folder, described)
    # Before the file is run, which building the model does.
    _refuse_changes(
        folder,
        {_MODEL_FILE: described[_MODEL_FILE]},
        {_MODEL_FILE: model_file_digest(config.model)},
        _BRING_BACK,
    )
    return described


_MODEL_FILE = "model_file_digest"
_BRING_BACK = "or bring back what it ran with"


def _refuse_other_circumstances(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """The config may be the same and the rows not: other data or another model of the same name, another version."""
    decisive = now.keys() - {"platform", DIGEST}
    _refuse_changes(
        folder,
        {name: before[name] for name in before if name in decisive},
        {name: now[name] for name in now if name in decisive},
        _BRING_BACK,
    )


def _refuse_changes(folder: Path, before: dict[str, Any], now: dict[str, Any], remedy: str) -> None:
    changed = [f"{name} was {before[name]!r}, now {now[name]!r}" for name in now if before[name] != now[name]]
    if changed:
        raise OutputError(
            f"audit: {folder} holds another audit ({'; '.join(changed)}), and rows of both would be mixed; "
            f"choose another --out, {remedy}"
        )


@dataclass(frozen=True)
class _Piece:
    what: str
    work: Callable[[Tell], None]


@dataclass(frozen=True)
class _Stage:
    """A prepared defense: the model the server sent, what the defense made of it, and the reconstruction bound."""

    defense: Defense
    sent: Task
    task: Task
    bound: float | None


@dataclass(frozen=True)
class _Shared:
    """What the server sees of a victim's clients, the images they truly used, and how much of it is not seen."""

    visible: list[Update]
    trained_on: Tensor | None
    power: float | None


class _Bench:
    """The victims, the model and the files of one audit, and the pieces of work that are still to do."""

    def __init__(self, config: AuditConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        name, parameters = parse_spec(config.dataset)
        self.dataset = data.load(name, **parameters)
        self.input_shape = self.dataset.train.input_shape
        self.task = self._build_task()
        check_settings(self.task, self.dataset, map(create_defense, self.config.defenses), self._training)
        torch.set_num_threads(choose_threads(self.task.size))
        self.images, self.labels = self._choose_victims()
        weights = data.find("lpips-alex")
        if weights is None:
            warnings.warn(
                "LPIPS is left out (null): its weights are not here; get them with: gradveil data get lpips-alex",
                stacklevel=3,
            )
        self.scorer = metrics.Scorer(None if weights is None else metrics.Lpips.load(weights))
        self.blind, self.blind_psnr = self._guess_blindly()
        self.costs = Costs(self.task, self.dataset, self._training)
        self._stages: dict[tuple[str, str | None], _Stage] = {}

    def open_rows(self, audit: str) -> None:
        """Go on with the rows on disk; `audit` is the identity that new ones are written with."""
        self.results, self.utility, self.matches = (
            SealedLines(self.folder / name, audit) for name in (RESULTS, UTILITY, MATCHES)
        )

    def _build_task(self) -> Task:
        name, parameters = parse_spec(self.config.model)
        classes = len(self.dataset.classes)
        model = models.create(name, input_shape=self.input_shape, classes=classes, seed=self.config.seed, **parameters)
        modality = self.dataset.train.modality
        return Task(model, input_shape=self.input_shape, classes=classes, modality=modality)

    def _choose_victims(self) -> tuple[Tensor, Tensor]:
        """Test images ``[victims, images, C, H, W]`` and their labels ``[victims, images]``, client after client."""
        config = self.config
        shape = (config.victims, config.aggregated * config.batch_size)
        wanted = math.prod(shape)
        if wanted > len(self.dataset.test):
            raise ParameterError(
                f"audit: {config.victims} victims of {shape[1]} images need {wanted} test images, "
                f"{self.dataset.name} has {len(self.dataset.test)}; ask for fewer victims or a smaller batch"
            )
        order = torch.randperm(len(self.dataset.test), generator=derived_generator(config.seed, "victims"))
        images, labels = self.dataset.test.batch(order[:wanted])
        return images.view(*shape, *self.input_shape), labels.view(shape)

    def _guess_blindly(self) -> tuple[Tensor, Tensor]:
        """The class means of the training images for each victim, and their PSNR ``[victims, images]``."""
        public = self.dataset.train
        guess = public.modality.blind(public.inputs, public.targets, self.labels.flatten(), len(self.dataset.classes))
        psnr = metrics.psnr(self.images.flatten(0, 1), guess).view(self.labels.shape)
        return guess.view_as(self.images), psnr

    def description(self) -> dict[str, object]:
        """What config.json holds: the config and the facts of this run."""
        return {
            "gradveil": gradveil.__version__,
            "command": self.config.command,
            **self.config.to_json(),
            "adapted": [
                [spec, str(attack)]
                for spec in self.config.defenses
                for attack in map(create_attack, self.config.attacks)
                if True in self._knowledge(create_defense(spec), attack)
            ],
            "generic": [s for s in self.config.defenses if not create_defense(s).has_adaptive_attacker],
            "dataset_source": self.dataset.source,
            "data_digest": data_digest(self.dataset),
            "input_shape": list(self.input_shape),
            "classes": list(self.dataset.classes),
            "parameters": self.task.size,
            "weights_digest": weights_digest(self.task),
            "model_file_digest": model_file_digest(self.config.model),
            "victim_labels": self.labels.tolist(),
            "lpips": self.scorer.lpips is not None,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        }

    # -- the work ----------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[_Piece]:
        """All pieces of work whose rows are not on disk yet, in their order."""
        done = {
            (row.get("defense_spec"), row.get("attack_spec"), row.get("adaptive"), row.get("victim"))
            for row in self.results.rows
        }
        victims = range(self.config.victims)
        if any((None, BLIND_GUESS, False, victim) not in done for victim in victims):
            yield _Piece("blind guess", partial(self._score_blind_guess, done))
        found = self._matched()
        for spec in self.config.defenses:
            if spec not in found:
                yield _Piece(f"matching {create_defense(spec).name}", partial(self._match, spec))
        # What a match is yet to choose has no rows and all of its work to do.
        defenses = [(spec, found.get(spec, spec)) for spec in self.config.defenses if found.get(spec, spec) is not None]
        for spec, chosen in defenses:
            defense = create_defense(spec)
            for attack in map(create_attack, self.config.attacks):
                for adaptive in self._knowledge(defense, attack):
                    for first in range(0, len(victims), self.config.chunk):
                        chunk = victims[first : first + self.config.chunk]
                        missing = {v for v in chunk if (chosen, str(attack), adaptive, v) not in done}
                        if missing:
                            what = f"{attack.name} against {defense.name}{', adaptive' if adaptive else ''}"
                            yield _Piece(what, partial(self._attack, spec, attack, adaptive, chunk, missing))
        trained = {row.get("defense_spec") for row in self.utility.rows}
        for spec, chosen in defenses:
            if chosen not in trained:
                yield _Piece(f"training under {create_defense(spec).name}", partial(self._train, spec))

    def _knowledge(self, defense: Defense, attack: Attack) -> list[bool]:
        """Which attackers a defense meets: plain, adaptive or both; without a defense there is nothing to know."""
        wanted = self.config.adaptive
        if wanted is False or defense.name == "none" or not self._adapts(defense, attack):
            return [False]
        return [True] if wanted else [False, True]

    def _adapts(self, defense: Defense, attack: Attack) -> bool:
        """Whether an attack has an adaptive form against a defense."""
        try:
            attack.check_threat(self.task, self._threat(defense, attack, True, self.config.batch_size, self.labels))
        except ThreatModelError:
            return False
        return True

    def _threat(self, defense: Defense, attack: Attack, adaptive: bool, batch_size: int, labels: Tensor) -> ThreatModel:
        return ThreatModel(
            labels=self.config.labels,
            batch_size=batch_size,
            adaptive=adaptive,
            defense=defense,
            server=attack.server,
            known_labels=labels if self.config.labels == "known" else None,
        )

    # -- matching ----------------------------------------------------------------------------------------------------

    def _matched(self) -> dict[str, str | None]:
        """The defenses as they are attacked, by how they were asked for; None: left out, at no strength it fits."""
        if self.config.match is None:
            return {spec: spec for spec in self.config.defenses}
        return {"none": "none", **{row["asked"]: row["found"] for row in self.matches.rows}}

    def _match(self, spec: str, tell: Tell) -> None:
        assert self.config.match is not None
        price = Price.parse(self.config.match)
        ended = match(create_defense(spec), price, self.costs.of(price.kind), tell)
        if ended.reason:
            warnings.warn(f"{ended.reason}; it is left out", stacklevel=2)
        row = {
            "asked": spec,
            "found": ended.found and str(ended.found),
            "kind": price.kind,
            "target": price.target,
            "tolerance": price.tolerance,
            "cost": None if ended.cost is None else _finite(ended.cost),
            "tries": ended.tries,
            "reason": ended.reason,
        }
        self.matches.append([row])

    # -- attacks -----------------------------------------------------------------------------------------------------

    def _score_blind_guess(self, done: set[tuple[Any, ...]], tell: Tell) -> None:
        self.results.append(
            {
                **self._row(
                    None,
                    None,
                    victim,
                    self.blind[victim],
                    self.labels[victim],
                    loss=None,
                    iterations=0,
                    seconds=0.0,
                ),
                "original_digest": file_digest(self._save_image("original", victim, self.images[victim])),
            }
            for victim in range(self.config.victims)
            if (None, BLIND_GUESS, False, victim) not in done
        )

    def _attack(self, spec: str, attack: Attack, adaptive: bool, chunk: range, missing: set[int], tell: Tell) -> None:
        """Attack a whole chunk, so that each row is what it would be in any other run; keep what is missing."""
        stage = self._stage(spec, attack)
        if stage is None:
            return  # the match left it out
        rounds = [self._share(stage, attack, victim) for victim in chunk]
        seen = [update for round_ in rounds for update in round_.visible]
        labels = self.labels[chunk.start : chunk.stop].reshape(len(seen), -1)
        found = attack.reconstruct(
            stage.task,
            seen,
            self._threat(stage.defense, attack, adaptive, labels.shape[1], labels),
            generator=self._randomness("attack", str(attack), chunk.start),
            progress=tell,
            execution=choose_execution(stage.task, labels.shape[1]),
        )
        if found.interrupted:
            raise KeyboardInterrupt
        # A victim whose clients are seen one by one has an attack for each of them.
        inputs = found.inputs.reshape(len(chunk), -1, *self.input_shape)
        guesses, losses, steps = (
            tensor.reshape(len(chunk), -1) for tensor in (found.labels, found.loss, found.iterations)
        )
        self.results.append(
            self._row(
                stage.defense,
                attack,
                victim,
                inputs[place],
                guesses[place],
                adaptive=adaptive,
                loss=float(losses[place].mean()),
                iterations=int(steps[place].max()),
                seconds=found.seconds / len(chunk),
                bound=stage.bound,
                trained_on=rounds[place].trained_on,
                power=rounds[place].power,
                history=_loss_history(found, place, len(chunk)),
            )
            for place, victim in enumerate(chunk)
            if victim in missing
        )

    def _randomness(self, *path: object) -> torch.Generator:
        return derived_generator(self.config.seed, *path, device=self.task.device)

    def _stage(self, spec: str, attack: Attack) -> "_Stage | None":
        """The prepared defense on the model that the server sends; None if the match left the defense out.

        Made once for all attackers that leave the model alone, and once for each that does not.
        """
        chosen = self._matched()[spec]
        if chosen is None:
            return None
        key = chosen, str(attack) if attack.server == "active" else None
        if key not in self._stages:
            # Defenses come one after the other; nobody asks for an earlier one again.
            self._stages = {other: stage for other, stage in self._stages.items() if other[0] == chosen}
            self._stages[key] = self._prepare(create_defense(chosen), attack)
        return self._stages[key]

    def _prepare(self, defense: Defense, attack: Attack) -> "_Stage":
        places, _ = split_public(self.dataset.train, self.config.seed)
        public = as_batch(self.task, self.dataset.train.batch(places))
        # An active server changes the model first; honest clients run the defense on what they are sent.
        sent = attack.modify(self.task, public=public, generator=self._randomness("modify", str(attack)))
        defense, task = defense.prepare(sent, public=public, generator=self._randomness("prepare", str(defense)))
        images, labels = (
            tensor.view(-1, self.config.batch_size, *tensor.shape[2:]) for tensor in (self.images, self.labels)
        )
        bound = theory.reconstruction_bound(
            task,
            [as_batch(task, batch) for batch in zip(images, labels, strict=True)],
            defense,
            generator=self._randomness("bound", str(defense)),
        )
        return _Stage(defense, sent, task, None if bound is None else bound.mse)

    def _share(self, stage: "_Stage", attack: Attack, victim: int) -> "_Shared":
        """What the victim's clients share in their first round, alone in it, and what the server sees of that."""
        defense, clients = stage.defense, self.config.aggregated
        images, labels = self.images[victim].chunk(clients), self.labels[victim].chunk(clients)
        numbers = [victim * clients + place for place in range(clients)]
        tasks = [attack.for_client(stage.task, number) for number in numbers]
        batches = [as_batch(stage.task, batch) for batch in zip(images, labels, strict=True)]
        memories: list[dict[str, Tensor]] = [{} for _ in numbers]
        announced = defense.announce(
            tasks[0],
            *batches[0],
            generator=self._randomness("announce", str(defense), numbers[0]),
            memory=memories[0],
        )
        updates = [
            defense.share(
                task,
                *batch,
                generator=self._randomness("share", str(defense), number),
                memory=memory,
                announced=announced,
            )
            for task, batch, number, memory in zip(tasks, batches, numbers, memories, strict=True)
        ]
        visible = defense.visible(updates)
        used = [_trained_on(memory) for memory in memories]
        return _Shared(
            visible,
            torch.cat([image for image in used if image is not None]) if None not in used else None,
            self._power(stage, tasks, batches, visible),
        )

    def _power(
        self, stage: "_Stage", tasks: Sequence[Task], batches: Sequence[Batch], visible: Sequence[Update]
    ) -> float | None:
        """How much of what the clients computed cannot be seen; None where the defense changed the model itself."""
        if {name: v.shape for name, v in stage.task.parameters.items()} != {
            name: v.shape for name, v in stage.sent.parameters.items()
        }:
            return None
        powers = []
        for place, (task, batch) in enumerate(zip(tasks, batches, strict=True)):
            seen = visible[place * len(visible) // len(batches)]
            mean = {name: value / seen.meta.clients for name, value in seen.items()}
            powers.append(metrics.relative_power(task.gradients(*batch), mean))
        return _finite(fmean(powers))

    def _row(
        self,
        defense: Defense | None,
        attack: Attack | None,
        victim: int,
        images: Tensor,
        labels: Tensor,
        *,
        adaptive: bool = False,
        loss: float | None,
        iterations: int,
        seconds: float,
        bound: float | None = None,
        trained_on: Tensor | None = None,
        power: float | None = None,
        history: Row | None = None,
    ) -> Row:
        guess = (images.float().cpu(), self.labels[victim], labels.cpu(), self.blind_psnr[victim])
        score = self.scorer.score(self.images[victim], *guess)
        against = None if trained_on is None else self.scorer.score(trained_on.float().cpu(), *guess)
        methods = [slug(str(defense)), slug(str(attack)), *(["adaptive"] if adaptive else [])]
        image = self._save_image("-".join(methods) if attack else BLIND_GUESS, victim, images)
        return {
            "defense": defense.name if defense else None,
            "defense_params": defense.parameters if defense else {},
            "defense_spec": str(defense) if defense else None,
            "attack": attack.name if attack else BLIND_GUESS,
            "attack_params": attack.parameters if attack else {},
            "attack_spec": str(attack) if attack else BLIND_GUESS,
            "adaptive": adaptive,
            "server": attack.server if attack else "passive",
            "dataset": self.config.dataset,
            "model": self.config.model,
            "seed": self.config.seed,
            "victim": victim,
            "batch_size": self.config.batch_size,
            "aggregated": self.config.aggregated,
            **score,
            "power": power,
            "bound_mse": bound,
            # Against the images the client truly used, where the defense changed them.
            "trained_on": against and {metric: against[metric] for metric in ("mse", "psnr", "ssim", "lpips")},
            "loss": None if loss is None else _finite(loss),
            **(history or {"loss_start": None, "loss_late": None, "loss_restarts": None}),
            "iterations": iterations,
            "seconds": round(seconds, 3),
            "image": image.relative_to(self.folder).as_posix(),
            "image_digest": file_digest(image),
            "original_digest": None,  # the blind guess has it
        }

    def _save_image(self, stem: str, victim: int, images: Tensor) -> Path:
        """Write a batch as one picture; returns the path."""
        path = self.folder / "images" / f"{stem}-v{victim}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(self.task.modality.render(images))
        return path

    @property
    def _training(self) -> Training:
        config = self.config
        return Training(
            rounds=config.rounds,
            clients=config.clients,
            batch_size=config.client_batch,
            lr=config.lr,
            evaluate_every=max(1, config.rounds // 10),
            seed=config.seed,
        )

    def _train(self, spec: str, tell: Tell) -> None:
        chosen = self._matched()[spec]
        if chosen is None:
            return  # the match left it out
        defense = create_defense(chosen)
        result = train(self.task, self.dataset, defense, self._training, progress=tell)
        undefended = [row["accuracy"] for row in self.utility.rows if row["defense_spec"] == "none"]
        baseline = undefended[0] if undefended else result.accuracy  # "none" comes first, see AuditConfig
        self.utility.append(
            [
                {
                    "defense": defense.name,
                    "defense_params": defense.parameters,
                    "defense_spec": str(defense),
                    "accuracy": result.accuracy,
                    "baseline_accuracy": baseline,
                    "pmm": performance_maintenance(result.accuracy, baseline, self.dataset.test),
                    "loss": _finite(result.loss),
                    "round_seconds": _finite(result.round_seconds),
                    "upload_bytes": _finite(result.upload_bytes),
                    "download_bytes": _finite(result.download_bytes),
                    "history": [accuracy for _, accuracy in result.history],
                    "diverged": result.diverged,
                    "privacy": None if result.privacy is None else str(result.privacy),
                    "epsilon": None if result.privacy is None else _finite(result.privacy.epsilon),
                }
            ]
        )


def _loss_history(found: Reconstruction, place: int, victims: int) -> Row | None:
    """How the search for one victim went, in the mean over its clients where they were attacked one by one."""
    history = found.history
    if history is None:
        return None
    start, late = (float(losses.view(victims, -1)[place].mean()) for losses in (history.start, history.late))
    restarts = history.restarts.view(victims, -1, history.restarts.shape[-1])[place].mean(0).tolist()
    if not all(map(math.isfinite, [start, late, *restarts])):
        return None
    return {"loss_start": start, "loss_late": late, "loss_restarts": restarts}


def _trained_on(memory: dict[str, Tensor]) -> Tensor | None:
    """The inputs truly used, as a defense noted them, be it alone or the first of a chain."""
    return memory.get("trained_on", memory.get("0/trained_on"))


def _finite(value: float) -> float | None:
    """JSON has no word for NaN and infinity."""
    return value if math.isfinite(value) else None
