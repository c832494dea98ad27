"""The kinds of measurement that several experiments share: attacks on a defense, training under it, blind guesses.

A kind takes a case (a flat JSON object, see run.py) and the `Session` it runs in, and returns what it measured.
"""

import json
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
from gradveil.core.randomness import derived_generator
from gradveil.core.registry import parse_spec
from gradveil.federation import Training, TrainingResult, train
from gradveil.federation.checkpoint import FILE as CHECKPOINT
from gradveil.federation.job import as_batch, split_public
from gradveil.modality import IMAGE, Modality
from pinned import load
from presets import preset

Row = dict[str, Any]


@dataclass(frozen=True)
class Session:
    """Where a case keeps its files and how it reports progress.

    Args:
        folder: the folder of the results.
        progress: called with (steps done, steps in all, seconds left).
    """

    folder: Path
    progress: Callable[[int, int, float], None] = lambda *_: None

    def checkpoints(self, case: Row) -> Path:
        """Where the training runs of a case keep their checkpoints until its row is written."""
        return self.folder / "checkpoints" / slug(case["name"])


def dataset_of(case: Row) -> data.Dataset:
    """The data set, perhaps only its first `train_examples`; with the logistic loss, its classes are even and odd."""
    dataset = load(case["dataset"])
    if count := case.get("train_examples"):
        shortened = replace(dataset.train, inputs=dataset.train.inputs[:count], targets=dataset.train.targets[:count])
        dataset = replace(dataset, train=shortened)
    if case.get("loss") == "logistic":
        train, test = (replace(split, targets=split.targets % 2) for split in (dataset.train, dataset.test))
        dataset = replace(dataset, classes=("even", "odd"), train=train, test=test)
    return dataset


def build(case: Row) -> gradveil.Task:
    """The task of a case, at its initial weights or, if the case says how it was `trained`, after that."""
    dataset = dataset_of(case)
    scale = {key: dataset.train.input_shape[0] * [case[key]] for key in ("mean", "std") if case.get(key) is not None}
    loss = case.get("loss", "cross-entropy")
    task = cases.build_task(dataset, case["model"], seed=case["seed"], loss=loss, norms=case.get("norms"), **scale)
    if "precision" in case:
        task = task.to(getattr(torch, case["precision"]))
    if not case.get("trained"):
        return task
    deciding = ("dataset", "train_examples", "loss", "mean", "std", "precision", "model", "seed", "trained")
    return task.with_parameters(trained_weights(json.dumps({key: case[key] for key in deciding if key in case})))


@cache
def trained_weights(settings: str) -> dict[str, Tensor]:
    """The weights after `trained["epochs"]` passes of Adam over the training examples, in batches of 64.

    Args:
        settings: the settings that decide them, as JSON.
    """
    case = json.loads(settings)
    split, epochs, lr = dataset_of(case).train, case["trained"]["epochs"], case["trained"]["lr"]
    task = build({**case, "trained": None})
    weights = {name: value.clone() for name, value in task.parameters.items()}
    optimiser = torch.optim.Adam(weights.values(), lr=lr)
    order = derived_generator(case["seed"], "trained")
    for _ in range(epochs):
        for places in torch.randperm(len(split), generator=order).split(64):
            gradients = task.with_parameters(weights).gradients(*as_batch(task, split.batch(places)))
            for name, value in weights.items():
                value.grad = gradients[name]
            optimiser.step()
    return weights


def public_of(case: Row, task: gradveil.Task) -> cases.Batch:
    split = dataset_of(case).train
    return as_batch(task, split.batch(split_public(split, case["seed"])[0]))


def attacker_public_of(case: Row, task: gradveil.Task) -> cases.Batch:
    """What an attacker may learn from: the public examples and further training examples, `attacker_images` in all.

    A defense is prepared with the public examples only. Victims come from the test split.
    """
    split = dataset_of(case).train
    places = torch.cat(split_public(split, case["seed"]))[: case["attacker_images"]]
    return as_batch(task, split.batch(places))


def victims_of(case: Row) -> Victims:
    dataset, sizes = dataset_of(case), (case["victims"], case.get("batch_size", 1))
    others = {"clients": case.get("clients", 1), "publishers": dataset.train}
    return cases.choose_victims(dataset.test, *sizes, seed=case["seed"], **others)


def local_of(case: Row) -> gradveil.LocalSteps | None:
    return gradveil.LocalSteps(**case["local"]) if "local" in case else None


def attack_of(case: Row) -> Attack:
    """The attack of a spec; with a `budget`, the preset for the data and the model."""
    if "budget" not in case:
        return gradveil.attack(case["attack"])
    model = parse_spec(case["model"])[0]
    return preset(case["attack"], case["budget"], dataset=case["dataset"], model=model)


def posed_case(case: Row) -> cases.Case:
    """The attack on a defense, both prepared; an attack that learns has not done so yet."""
    task, attack, defense = build(case), attack_of(case), gradveil.defense(case["defense"])
    prepared = cases.prepare(task, defense, attack, public=public_of(case, task), seed=case["seed"])
    known = ("adaptive", "labels", "rounds", "server_lr", "publisher", "local_known")
    settings = {key: case[key] for key in known if key in case}
    if "attacker_images" in case:
        settings["public"] = attacker_public_of(case, task)
    return cases.Case(prepared, attack, victims_of(case), local=local_of(case), seed=case["seed"], **settings)


def fitted_case(case: Row, session: Session) -> cases.Case:
    """The same; an attack that learns has done so."""
    return cases.fit(posed_case(case), progress=session.progress, cache=session.checkpoints(case))


def attack_seen(seen: Observation, session: Session) -> Reconstruction:
    """What the attacker reconstructs from what it sees."""
    found = cases.attack_on(seen, progress=session.progress)
    if found.interrupted:
        raise KeyboardInterrupt
    return found


def run_attack(case: Row, session: Session) -> tuple[Observation, Reconstruction]:
    """What the attacker sees of the victims, and what it reconstructs from that."""
    seen = cases.observe(fitted_case(case, session))
    return seen, attack_seen(seen, session)


def scores_of(case: Row, seen: Observation, found: Reconstruction) -> list[cases.Score]:
    """Each victim's scores and verdict, beside the blind guess: the mean of its class over all training images."""
    dataset, victims = dataset_of(case), seen.case.victims
    train = dataset.train
    guess = train.modality.blind(train.inputs, train.targets, victims.targets.flatten(), len(dataset.classes))
    scorer = metrics.Scorer(train.modality)
    guessed = scorer.blind_scores(victims.inputs.flatten(0, 1), guess)
    blind = {name: values.view(victims.targets.shape) for name, values in guessed.items()}
    return cases.score(seen, found, scorer, blind)


def matched_to_originals(victims: Victims, found: Tensor, *others: Tensor, modality: Modality = IMAGE) -> list[Tensor]:
    """Reconstructions, and other values for each of them, in the order of the originals that they are matched to."""
    repaired = modality.repaired(found.reshape(victims.inputs.shape).float().cpu())
    orders = [metrics.match(*pair, modality) for pair in zip(victims.inputs, repaired, strict=True)]
    shaped = [repaired, *(other.reshape(victims.targets.shape).cpu() for other in others)]
    return [torch.stack([each[order] for each, order in zip(tensor, orders, strict=True)]) for tensor in shaped]


def figures(victims: Victims, found: Tensor, labels: Tensor, *, each: bool = False, modality: Modality = IMAGE) -> Row:
    """All metrics as lists with one figure per victim, or with `each`, one per example of every victim."""
    tensors = [victims.inputs, *matched_to_originals(victims, found, labels, modality=modality), victims.targets]
    if each:
        tensors = [tensor.flatten(0, 1)[:, None] for tensor in tensors]
    score = metrics.Scorer(modality).score
    scores = [score(x, y, label, guess, None) for x, y, guess, label in zip(*tensors, strict=True)]
    row: Row = {metric.name: [entry[metric.name] for entry in scores] for metric in metrics.of(modality)}
    return {**row, "labels_right": sum(entry["label_correct"] or 0 for entry in scores)}


def attack_row(case: Row, seen: Observation, found: Reconstruction) -> Row:
    """The figures of an attack; if the defense changed the inputs, also against the inputs that were used."""
    attack_case, victims = seen.case, seen.case.victims
    how = {"each": case.get("each", False), "modality": attack_case.prepared.task.modality}
    row = {"attack_spec": str(attack_case.attack), **figures(victims, found.inputs, found.labels, **how)}
    row |= {"loss": found.loss.tolist(), "execution": found.execution, "power": seen.power}
    # With local steps, a defense records only the inputs of the last step.
    used = [] if attack_case.local else [inputs for inputs in seen.trained_on if inputs is not None]
    if len(used) == len(victims):
        changed = Victims(torch.stack(used).float().cpu(), victims.targets, victims.clients)
        row["against_trained_on"] = figures(changed, found.inputs, found.labels, **how)
        row["trained_on_itself"] = figures(victims, changed.inputs, victims.targets, **how)
    if attack_case.adaptive and not attack_case.attack.simulates:
        prepared, local = attack_case.prepared, attack_case.local
        forms = prepared.defense.adapt(prepared.task, batch_size=victims.batch_size, local=local)
        row["form"] = next(iter(forms), "expectation") if attack_case.adaptive is True else attack_case.adaptive
    return row


def attack(case: Row, session: Session) -> Row:
    """Attack the victims' updates under a defense."""
    return attack_row(case, *run_attack(case, session))


def run_training(case: Row, session: Session, part: str = "") -> TrainingResult:
    """Run the federated training of a case, or a `part` of it, from its checkpoint if there is one."""
    folder, defense = session.checkpoints(case) / slug(part), gradveil.defense(case.get("trained_as", case["defense"]))
    training = Training(**{**case["training"], "local": local_of(case["training"]), "seed": case["seed"]})
    checkpoint = {"checkpoint": folder, "resume": (folder / CHECKPOINT).exists()}
    return train(
        build(case), dataset_of(case), defense, training, progress=lambda *at: session.progress(*at, 0), **checkpoint
    )


def training(case: Row, session: Session) -> Row:
    """Train under a defense; the accuracy is the mean of the last `averaged` evaluations, by default the last one."""
    result = run_training(case, session)
    names = ("loss", "history", "execution", "round_seconds", "upload_bytes", "download_bytes", "diverged")
    return {name: getattr(result, name) for name in names} | {
        "accuracy": fmean(accuracy for _, accuracy in result.history[-case.get("averaged", 1) :]),
        "losses": [record.loss for record in result.rounds],
        "defense_share": result.defense_seconds / result.round_seconds,
        "faults": result.fault_counts,
        "privacy": None if result.privacy is None else str(result.privacy),
    }


def blind(case: Row, _session: Session) -> Row:
    """Score the blind guess: the mean input of each class, over all training examples or only the `public` ones."""
    dataset, victims = dataset_of(case), victims_of(case)
    examples = split_public(dataset.train, case["seed"])[0] if case.get("public") else slice(None)
    inputs, targets = dataset.train.inputs[examples], dataset.train.targets[examples]
    guess = dataset.train.modality.blind(inputs, targets, victims.targets.flatten(), len(dataset.classes))
    how = {"each": case.get("each", False), "modality": dataset.train.modality}
    return figures(victims, guess, victims.targets, **how)


KINDS: dict[str, Callable[[Row, Session], Row]] = {"attack": attack, "training": training, "blind guess": blind}
