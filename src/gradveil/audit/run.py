"""Run an audit: attack every defense on the same victims, then train under every defense."""

import math
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from PIL import Image
from torch import Tensor

import gradveil
from gradveil import data, metrics, models, theory
from gradveil.attacks import Attack, ThreatModel
from gradveil.attacks import create as create_attack
from gradveil.audit.config import AuditConfig, read_config
from gradveil.audit.store import JsonLines, Row, prepare_folder, write_json
from gradveil.defenses import Defense
from gradveil.defenses import create as create_defense
from gradveil.errors import OutputError, ParameterError
from gradveil.federation import Training, train
from gradveil.federation.local import as_batch, performance_maintenance, split_public
from gradveil.randomness import derived_generator
from gradveil.registry import parse_spec
from gradveil.task import Task
from gradveil.update import Update

BLIND_GUESS = "blind-guess"
RESULTS, UTILITY = "results.jsonl", "utility.jsonl"

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
    stem = "-".join(_slug(Path(parse_spec(spec)[0]).name) for spec in (config.dataset, config.model))
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
        config: what to audit.
        folder: where results go.
        resume: go on in a folder that holds results of the same config.
        progress: called as the work proceeds.
    """
    prepare_folder(folder)
    try:
        with FileLock(folder / ".lock", blocking=False):
            _run(config, folder, resume, progress)
    except Timeout as error:
        raise OutputError(
            f"audit: another audit is writing into {folder}; wait for it or choose another --out"
        ) from error


def _run(config: AuditConfig, folder: Path, resume: bool, progress: Callable[[Step], None] | None) -> None:
    before = _earlier(config, folder, resume)
    bench = _Bench(config, folder)
    if before is None:
        write_json(folder / "config.json", bench.description())
    else:
        _refuse_other_circumstances(folder, before, bench.description())
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
    path = folder / "config.json"
    if not path.exists():
        for name in (RESULTS, UTILITY):
            if (folder / name).exists():
                raise OutputError(
                    f"audit: {folder} holds {name} but no config.json that tells what it is; choose another --out"
                )
        return None
    if not resume:
        raise OutputError(f"audit: {folder} holds an audit already; go on with --resume or choose another --out")
    described = read_config(path)
    before = AuditConfig.from_json(described)
    _refuse_changes(folder, before.to_json(), config.to_json(), "or resume that one by naming nothing but its --out")
    return described


def _refuse_other_circumstances(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """The config may be the same and the rows not: other data of the same name, another version, new weights."""
    decisive = ("gradveil", "torch", "dataset_source", "victim_labels", "input_shape", "parameters", "threads", "lpips")
    _refuse_changes(
        folder,
        {name: before.get(name) for name in decisive},
        {name: now[name] for name in decisive},
        "or bring back what it ran with",
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


class _Bench:
    """The victims, the model and the files of one audit, and the pieces of work that are still to do."""

    def __init__(self, config: AuditConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        name, parameters = parse_spec(config.dataset)
        self.dataset = data.load(name, **parameters)
        self.input_shape = self.dataset.train.input_shape
        self.task = self._build_task()
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
        self.results = JsonLines(folder / RESULTS)
        self.utility = JsonLines(folder / UTILITY)

    def _build_task(self) -> Task:
        name, parameters = parse_spec(self.config.model)
        classes = len(self.dataset.classes)
        model = models.create(name, input_shape=self.input_shape, classes=classes, seed=self.config.seed, **parameters)
        return Task(model, input_shape=self.input_shape, classes=classes)

    def _choose_victims(self) -> tuple[Tensor, Tensor]:
        """Test images ``[victims, batch, C, H, W]`` and their labels ``[victims, batch]``."""
        config = self.config
        wanted = config.victims * config.batch_size
        if wanted > len(self.dataset.test):
            raise ParameterError(
                f"audit: {config.victims} victims of {config.batch_size} images need {wanted} test images, "
                f"{self.dataset.name} has {len(self.dataset.test)}; ask for fewer victims or a smaller batch"
            )
        order = torch.randperm(len(self.dataset.test), generator=derived_generator(config.seed, "victims"))
        images, labels = self.dataset.test.batch(order[:wanted])
        shape = (config.victims, config.batch_size)
        return images.view(*shape, *self.input_shape), labels.view(shape)

    def _guess_blindly(self) -> tuple[Tensor, Tensor]:
        """The class means of the training images for each victim, and their PSNR ``[victims, batch]``."""
        public = self.dataset.train
        guess = metrics.blind_guess(
            public.images, public.labels, self.labels.flatten(), classes=len(self.dataset.classes)
        )
        psnr = metrics.psnr(self.images.flatten(0, 1), guess).view(self.labels.shape)
        return guess.view_as(self.images), psnr

    def description(self) -> dict[str, object]:
        """What config.json holds: the config and the facts of this run."""
        return {
            "gradveil": gradveil.__version__,
            "command": self.config.command,
            **self.config.to_json(),
            "dataset_source": self.dataset.source,
            "input_shape": list(self.input_shape),
            "classes": list(self.dataset.classes),
            "parameters": self.task.size,
            "victim_labels": self.labels.tolist(),
            "lpips": self.scorer.lpips is not None,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        }

    # -- the work ----------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[_Piece]:
        """All pieces of work whose rows are not on disk yet, in their order."""
        finished = {(row.get("defense_spec"), row.get("attack_spec"), row.get("victim")) for row in self.results.rows}
        victims = range(self.config.victims)
        if any((None, BLIND_GUESS, victim) not in finished for victim in victims):
            yield _Piece("blind guess", partial(self._score_blind_guess, finished))
        for defense in map(create_defense, self.config.defenses):
            for attack in map(create_attack, self.config.attacks):
                for first in range(0, len(victims), self.config.chunk):
                    chunk = victims[first : first + self.config.chunk]
                    missing = {v for v in chunk if (str(defense), str(attack), v) not in finished}
                    if missing:
                        work = partial(self._attack, defense, attack, chunk, missing)
                        yield _Piece(f"{attack.name} against {defense.name}", work)
        trained = {row.get("defense_spec") for row in self.utility.rows}
        for defense in map(create_defense, self.config.defenses):
            if str(defense) not in trained:
                yield _Piece(f"training under {defense.name}", partial(self._train, defense))

    def _score_blind_guess(self, finished: set[tuple[Any, Any, Any]], tell: Tell) -> None:
        for victim in range(self.config.victims):
            self._save_image("original", victim, self.images[victim])
        self.results.append(
            self._row(
                None,
                None,
                victim,
                self.blind[victim],
                self.labels[victim],
                loss=None,
                iterations=0,
                seconds=0.0,
            )
            for victim in range(self.config.victims)
            if (None, BLIND_GUESS, victim) not in finished
        )

    def _attack(
        self,
        defense: Defense,
        attack: Attack,
        chunk: range,
        missing: set[int],
        tell: Tell,
    ) -> None:
        """Attack a whole chunk, so that each row is what it would be in any other run; keep what is missing."""
        seed, device = self.config.seed, self.task.device

        def randomness(*path: object) -> torch.Generator:
            return derived_generator(seed, *path, device=device)

        places, _ = split_public(self.dataset.train, seed)
        public = as_batch(self.task, self.dataset.train.batch(places))
        # An active server changes the model first; honest clients run the defense on what they are sent.
        sent = attack.modify(self.task, public=public, generator=randomness("modify", str(attack)))
        task = defense.prepare(sent, public=public, generator=randomness("prepare", str(defense)))
        bound = theory.reconstruction_bound(
            task,
            [as_batch(task, batch) for batch in zip(self.images, self.labels, strict=True)],
            defense,
            generator=randomness("bound", str(defense)),
        )
        shares = (self._share(defense, attack.for_client(task, victim), victim, randomness) for victim in chunk)
        updates, memories = zip(*shares, strict=True)
        known = self.labels[chunk.start : chunk.stop] if self.config.labels == "known" else None
        found = attack.reconstruct(
            task,
            [defense.visible([update])[0] for update in updates],
            ThreatModel(
                labels=self.config.labels,
                batch_size=self.config.batch_size,
                defense=defense,
                server=attack.server,
                known_labels=known,
            ),
            generator=randomness("attack", str(attack), chunk.start),
            progress=tell,
            execution=choose_execution(task, self.config.batch_size),
        )
        if found.interrupted:
            raise KeyboardInterrupt
        self.results.append(
            self._row(
                defense,
                attack,
                victim,
                found.inputs[place],
                found.labels[place],
                loss=float(found.loss[place]),
                iterations=int(found.iterations[place]),
                seconds=found.seconds / len(chunk),
                bound=None if bound is None else bound.mse,
                trained_on=_trained_on(memories[place]),
            )
            for place, victim in enumerate(chunk)
            if victim in missing
        )

    def _share(
        self, defense: Defense, task: Task, victim: int, randomness: Callable[..., torch.Generator]
    ) -> tuple[Update, dict[str, Tensor]]:
        """What the victim shares in its first round, alone in it, and what it remembers of it."""
        batch = as_batch(task, (self.images[victim], self.labels[victim]))
        memory: dict[str, Tensor] = {}
        announced = defense.announce(
            task, *batch, generator=randomness("announce", str(defense), victim), memory=memory
        )
        update = defense.share(
            task, *batch, generator=randomness("share", str(defense), victim), memory=memory, public=announced
        )
        return update, memory

    def _row(
        self,
        defense: Defense | None,
        attack: Attack | None,
        victim: int,
        images: Tensor,
        labels: Tensor,
        *,
        loss: float | None,
        iterations: int,
        seconds: float,
        bound: float | None = None,
        trained_on: Tensor | None = None,
    ) -> Row:
        guess = (images.float().cpu(), self.labels[victim], labels.cpu(), self.blind_psnr[victim])
        score = self.scorer.score(self.images[victim], *guess)
        against = None if trained_on is None else self.scorer.score(trained_on.float().cpu(), *guess)
        stem = _slug(f"{defense}-{attack}") if attack else BLIND_GUESS
        return {
            "defense": defense.name if defense else None,
            "defense_params": defense.parameters if defense else {},
            "defense_spec": str(defense) if defense else None,
            "attack": attack.name if attack else BLIND_GUESS,
            "attack_params": attack.parameters if attack else {},
            "attack_spec": str(attack) if attack else BLIND_GUESS,
            "adaptive": False,
            "server": attack.server if attack else "passive",
            "dataset": self.config.dataset,
            "model": self.config.model,
            "seed": self.config.seed,
            "victim": victim,
            "batch_size": self.config.batch_size,
            **score,
            "bound_mse": bound,
            # Against the images the client truly used, where the defense changed them.
            "trained_on": against and {metric: against[metric] for metric in ("mse", "psnr", "ssim", "lpips")},
            "loss": None if loss is None else _finite(loss),
            "iterations": iterations,
            "seconds": round(seconds, 3),
            "image": self._save_image(stem, victim, images),
        }

    def _save_image(self, stem: str, victim: int, images: Tensor) -> str:
        """Write a batch as one horizontal strip; returns the path relative to the audit's folder."""
        path = self.folder / "images" / f"{stem}-v{victim}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = images.nan_to_num(nan=metrics.NAN_GREY).clamp(0, 1).mul(255).round().byte()
        strip = torch.cat(list(pixels), dim=-1).permute(1, 2, 0)
        Image.fromarray(strip.squeeze(-1).cpu().numpy()).save(path)
        return path.relative_to(self.folder).as_posix()

    def _train(self, defense: Defense, tell: Tell) -> None:
        config = self.config
        training = Training(
            rounds=config.rounds,
            clients=config.clients,
            batch_size=config.client_batch,
            lr=config.lr,
            evaluate_every=max(1, config.rounds // 10),
            seed=config.seed,
        )
        result = train(self.task, self.dataset, defense, training, progress=tell)
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


def _trained_on(memory: dict[str, Tensor]) -> Tensor | None:
    """The inputs truly used, as a defense noted them, be it alone or the first of a chain."""
    return memory.get("trained_on", memory.get("0/trained_on"))


def _finite(value: float) -> float | None:
    """JSON has no word for NaN and infinity."""
    return value if math.isfinite(value) else None


def _slug(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9.=]+", "-", text).strip("-")
