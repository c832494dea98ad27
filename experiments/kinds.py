"""What several experiments measure: an attack on a defense, a training under a defense, a guess without an update.

A kind takes a case (a flat JSON object, see run.py) and the `Session` it runs in, and returns what it measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import gradveil
from gradveil import data, metrics
from gradveil.attacks import Attack, Reconstruction
from gradveil.audit import cases
from gradveil.audit.cases import Observation, Victims
from gradveil.audit.store import slug
from gradveil.core.registry import parse_spec
from gradveil.federation import Training, TrainingResult, train
from gradveil.federation.checkpoint import FILE as CHECKPOINT
from gradveil.federation.job import as_batch, split_public
from gradveil.modality import IMAGE

Row = dict[str, Any]
load = cache(data.load)


@dataclass(frozen=True)
class Session:
    """What a case runs in.

    Args:
        folder: where the results are.
        progress: called with (steps done, steps in all, seconds left).
    """

    folder: Path
    progress: Callable[[int, int, float], None] = lambda *_: None

    def checkpoints(self, case: Row) -> Path:
        """Where the trainings of a case keep their checkpoints until its row is written."""
        return self.folder / "checkpoints" / slug(case["name"])


def dataset_of(case: Row) -> data.Dataset:
    """The data set, of which `train_examples` may name the first; with the logistic loss, even and odd classes."""
    dataset = load(case["dataset"])
    if count := case.get("train_examples"):
        kept = replace(dataset.train, inputs=dataset.train.inputs[:count], targets=dataset.train.targets[:count])
        dataset = replace(dataset, train=kept)
    if case.get("loss") == "logistic":
        train, test = (replace(split, targets=split.targets % 2) for split in (dataset.train, dataset.test))
        dataset = replace(dataset, classes=("even", "odd"), train=train, test=test)
    return dataset


def build(case: Row) -> gradveil.Task:
    dataset = dataset_of(case)
    scale = {key: dataset.train.input_shape[0] * [case[key]] for key in ("mean", "std") if key in case}
    return cases.build_task(dataset, case["model"], seed=case["seed"], loss=case.get("loss", "cross-entropy"), **scale)


def public_of(case: Row, task: gradveil.Task) -> cases.Batch:
    split = dataset_of(case).train
    return as_batch(task, split.batch(split_public(split, case["seed"])[0]))


def victims_of(case: Row) -> Victims:
    sizes = case["victims"], case.get("batch_size", 1)
    return cases.choose_victims(dataset_of(case).test, *sizes, clients=case.get("clients", 1), seed=case["seed"])


def local_of(case: Row) -> gradveil.LocalSteps | None:
    return gradveil.LocalSteps(**case["local"]) if "local" in case else None


def attack_of(case: Row) -> Attack:
    """The attack of a spec; with a `budget`, the preset for the data and the model."""
    if "budget" not in case:
        return gradveil.attack(case["attack"])
    model = parse_spec(case["model"])[0]
    return gradveil.preset(case["attack"], case["budget"], dataset=case["dataset"], model=model)


def attacked(case: Row, session: Session) -> tuple[Observation, Reconstruction]:
    """What is seen of the victims, and what the attack makes of it."""
    task, attack, defense = build(case), attack_of(case), gradveil.defense(case["defense"])
    stage = cases.prepare(task, defense, attack, public=public_of(case, task), seed=case["seed"])
    given = {key: case[key] for key in ("adaptive", "labels", "rounds", "server_lr") if key in case}
    known = cases.Case(stage, attack, victims_of(case), local=local_of(case), seed=case["seed"], **given)
    seen = cases.observe(cases.fit(known, progress=session.progress))
    found = cases.attack_on(seen, progress=session.progress)
    if found.interrupted:
        raise KeyboardInterrupt
    return seen, found


def in_order(victims: Victims, found: Tensor, *others: Tensor) -> list[Tensor]:
    """Reconstructions, and what else is known of each, in the order of the originals that they are nearest to."""
    repaired = IMAGE.repaired(found.reshape(victims.inputs.shape).float().cpu())
    orders = [metrics.match(*pair) for pair in zip(victims.inputs, repaired, strict=True)]
    shaped = [repaired, *(other.reshape(victims.targets.shape).cpu() for other in others)]
    return [torch.stack([one[order] for one, order in zip(all_, orders, strict=True)]) for all_ in shaped]


def figures(victims: Victims, found: Tensor, labels: Tensor, *, each: bool = False) -> Row:
    """All metrics as lists with one figure for each victim, or for `each` example of all victims."""
    tensors = [victims.inputs, *in_order(victims, found, labels), victims.targets]
    if each:
        tensors = [tensor.flatten(0, 1)[:, None] for tensor in tensors]
    score = metrics.Scorer(IMAGE).score
    scores = [score(x, y, label, guess, None) for x, y, guess, label in zip(*tensors, strict=True)]
    row: Row = {metric.name: [one[metric.name] for one in scores] for metric in metrics.of(IMAGE)}
    return {**row, "labels_right": sum(one["label_correct"] or 0 for one in scores)}


def described(case: Row, seen: Observation, found: Reconstruction) -> Row:
    """The figures of an attack; where the defense changed the inputs, against those that were used as well."""
    known, victims, each = seen.case, seen.case.victims, case.get("each", False)
    row = {"attack_spec": str(known.attack), **figures(victims, found.inputs, found.labels, each=each)}
    row |= {"loss": found.loss.tolist(), "execution": found.execution, "power": seen.power}
    # With local steps, a defense notes the inputs of the last step only.
    used = [] if known.local else [inputs for inputs in seen.trained_on if inputs is not None]
    if len(used) == len(victims):
        changed = Victims(torch.stack(used).float().cpu(), victims.targets, victims.clients)
        row["against_trained_on"] = figures(changed, found.inputs, found.labels, each=each)
        row["trained_on_itself"] = figures(victims, changed.inputs, victims.targets, each=each)
    if known.adaptive:
        forms = known.stage.defense.adapt(known.stage.task, batch_size=victims.batch_size, local=known.local)
        row["form"] = next(iter(forms), "expectation") if known.adaptive is True else known.adaptive
    return row


def attack(case: Row, session: Session) -> Row:
    """Attack the victims' updates under a defense."""
    return described(case, *attacked(case, session))


def trained(case: Row, session: Session, part: str = "") -> TrainingResult:
    """A federated training, perhaps only a `part` of the case, that goes on from its checkpoint, if there is one."""
    folder, defense = session.checkpoints(case) / slug(part), gradveil.defense(case.get("trained_as", case["defense"]))
    training = Training(**{**case["training"], "local": local_of(case["training"]), "seed": case["seed"]})
    kept = {"checkpoint": folder, "resume": (folder / CHECKPOINT).exists()}
    return train(
        build(case), dataset_of(case), defense, training, progress=lambda *at: session.progress(*at, 0), **kept
    )


def training(case: Row, session: Session) -> Row:
    """Train under a defense; the accuracy is that of the last evaluation, or the mean of the last `averaged` ones."""
    result = trained(case, session)
    names = ("loss", "history", "execution", "round_seconds", "upload_bytes", "download_bytes", "diverged")
    return {name: getattr(result, name) for name in names} | {
        "accuracy": fmean(accuracy for _, accuracy in result.history[-case.get("averaged", 1) :]),
        "losses": [record.loss for record in result.rounds],
        "defense_share": result.defense_seconds / result.round_seconds,
        "faults": result.fault_counts,
        "privacy": None if result.privacy is None else str(result.privacy),
    }


def blind(case: Row, _session: Session) -> Row:
    """What the mean input of the class scores, of all training examples or the `public` ones: no update is needed."""
    dataset, victims = dataset_of(case), victims_of(case)
    places = split_public(dataset.train, case["seed"])[0] if case.get("public") else slice(None)
    inputs, targets = dataset.train.inputs[places], dataset.train.targets[places]
    guess = dataset.train.modality.blind(inputs, targets, victims.targets.flatten(), len(dataset.classes))
    return figures(victims, guess, victims.targets, each=case.get("each", False))


KINDS: dict[str, Callable[[Row, Session], Row]] = {"attack": attack, "training": training, "blind guess": blind}
