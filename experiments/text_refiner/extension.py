"""Refiner's table 13 in our form: sentences of SST-2 behind updates of a small transformer, and training.

sentences: an attack on the updates of single sentences or small batches under a defense.
sentences-blind: the most frequent words instead.
fine-tuning: federated training under a defense, of a new network on the trained model's frozen word vectors.

`weights` are "initial" or "trained": what scripts/train_text.py makes of the model. Refiner's evaluation networks are
what scripts/train_refiner_network.py makes for the word vectors of these weights. All of these files are made when they
are first needed, with fixed seeds, and kept in `checkpoints`.
"""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import gradveil
from gradveil import metrics
from gradveil.audit import cases
from gradveil.defenses import Defense
from gradveil.defenses.refiner import Refiner
from gradveil.federation import Training, train
from gradveil.federation.checkpoint import FILE as CHECKPOINT
from gradveil.modality import Text
from gradveil.modality.text import NOTHING
from gradveil.models.fitted_evaluation import embedding_digest
from gradveil.task import Gradients
from kinds import Row, Session, attack_seen, dataset_of
from made_files import kept_files, made, script

EPOCHS = 8
PROJECTED = 0.9999
"""A projected update is this share of epsilon away from the gradient, or more; the rest is rounding."""
WRITTEN = ("exact", "token_recall", "token_f1", "rouge_2", "rouge_l")


def task_of(case: Row, weights: str) -> gradveil.Task:
    """The model at its initial weights, or as trained centrally with its embedding."""
    dataset, model, seed = dataset_of(case), case["model"], case["seed"]

    def train_text(out: Path) -> None:
        save_file(script("train_text")["train"](dataset, model, EPOCHS, seed).state_dict(), out)

    path = made(Path("trained.safetensors"), train_text) if weights == "trained" else None
    return cases.build_task(dataset, model, seed=seed, weights=path)


def defense_of(case: Row, task: gradveil.Task, weights: str) -> Defense:
    """The defense of a case; Refiner with the evaluation network for the task's word vectors."""
    defense = gradveil.defense(case["defense"])
    if not isinstance(defense, Refiner):
        return defense
    text, stored, making = text_of(task), dataset_of(case).train.inputs, script("train_refiner_network")

    def train_evaluation(out: Path) -> None:
        making["write"](making["train"](text, stored), out, {"data": case["dataset"], "model": case["model"]})

    path = made(Path(f"evaluation-{weights}.safetensors"), train_evaluation)
    return replace(defense, network=str(path))


def text_of(task: gradveil.Task) -> Text:
    assert isinstance(task.modality, Text)
    return task.modality


def made_by(task: gradveil.Task, weights: str, defense: Defense) -> Row:
    """How the files behind a row were made."""
    row: Row = {"word_vectors": embedding_digest(text_of(task).vectors)}
    if weights == "trained":
        row["weights_made_by"] = f"scripts/train_text.py, {EPOCHS} epochs, seed 0"
    if isinstance(defense, Refiner):
        row["network_made_by"] = f"scripts/train_refiner_network.py for the {weights} word vectors, seed 0"
    return row


def sentences(case: Row, session: Session) -> Row:
    with kept_files(session):
        task, attack = task_of(case, case["weights"]), gradveil.attack(case["attack"])
        defense = defense_of(case, task, case["weights"])
        prepared = cases.prepare(task, defense, attack, public=None, seed=case["seed"])
        victims = victims_of(case, text_of(task))
        granted = {"adaptive": case["adaptive"], "labels": case.get("labels", "infer")}
        posed = cases.Case(prepared, attack, victims, seed=case["seed"], **granted)
        seen = cases.observe(posed)
        found = attack_seen(seen, session)
    text = text_of(task)
    row = {**made_by(task, case["weights"], defense), **scores(text, victims.inputs, found.inputs)}
    row["lengths"] = (text.compared(victims.inputs) != NOTHING).sum(-1).tolist()
    row |= distances(task, seen)
    row |= {"labels_right": int((found.labels.cpu() == victims.targets).sum()), "loss": found.loss.tolist()}
    if isinstance(defense, Refiner):
        robust = torch.stack([inputs for inputs in seen.trained_on if inputs is not None])
        row["robust_data"] = scores(text, victims.inputs, robust)
    if named := case["adaptive"]:
        forms = defense.adapt(task, batch_size=victims.batch_size)
        row["form"] = next(iter(forms)) if named is True else named
    return row


def victims_of(case: Row, text: Text) -> cases.Victims:
    test = dataset_of(case).bound(text).test
    return cases.choose_victims(test, case["victims"], case.get("batch_size", 1), seed=case["seed"])


def scores(text: Text, inputs: Tensor, found: Tensor) -> Row:
    """The metrics of every sentence, each victim's in the order that matches best."""
    values: dict[str, list[float]] = {name: [] for name in WRITTEN}
    scorer = metrics.Scorer(text)
    for originals, others in zip(inputs, found, strict=True):
        computed = scorer.compute(originals, scorer.matched(originals, others))
        for name in WRITTEN:
            value = computed[name]
            assert value is not None
            values[name] += value.tolist()
    return dict(values)


def distances(task: gradveil.Task, seen: cases.Observation) -> Row:
    """The norm of each victim's gradient, and how far from it the update is."""
    victims, norms, apart = seen.case.victims, [], []
    for inputs, labels, rounds in zip(victims.inputs, victims.targets, seen.seen, strict=True):
        own = task.gradients(inputs, labels)
        ((_, update),) = rounds
        norms.append(norm(own))
        apart.append(norm({name: update[name] - value for name, value in own.items()}))
    return {"norm": norms, "distance": apart}


def norm(gradients: Gradients) -> float:
    return float(torch.cat([value.flatten() for value in gradients.values()]).norm())


def blind(case: Row, session: Session) -> Row:
    with kept_files(session):
        task = task_of(case, case["weights"])
    text, inputs = text_of(task), victims_of(case, text_of(task)).inputs
    return scores(text, inputs, text.typical(dataset_of(case).train.inputs).expand_as(inputs))


def fine_tuning(case: Row, session: Session) -> Row:
    dataset, checkpoint = dataset_of(case), session.checkpoints(case).resolve()
    with kept_files(session):
        task = task_of(case, "trained")
        task = task.with_parameters(task_of(case, "initial").parameters)  # the embedding is a constant of the task
        defense = defense_of(case, task, "trained")
        training = Training(**case["training"], seed=case["seed"])
        result = train(
            task,
            dataset,
            defense,
            training,
            progress=lambda *at: session.progress(*at, 0),
            checkpoint=checkpoint,
            resume=(checkpoint / CHECKPOINT).exists(),
        )
    row = {name: getattr(result, name) for name in ("loss", "history", "execution", "round_seconds", "diverged")}
    _, accuracy = result.history[-1]
    majority = float(dataset.test.targets.bincount().max() / len(dataset.test))
    losses = [record.loss for record in result.rounds]
    return {**made_by(task, "trained", defense), **row, "accuracy": accuracy, "chance": majority, "losses": losses}


def derive(view: Row) -> Row:
    """For tables: Refiner's victims by whether their update was projected, and the accuracy in per cent."""
    shown: Row = {}
    if "robust_data" in view:
        shown["robust_recall"] = view["robust_data"]["token_recall"]
        defense = gradveil.defense(view["defense"])
        assert isinstance(defense, Refiner)
        for distance, exact in zip(view["distance"], view["exact"], strict=True):
            where = "projected" if distance >= PROJECTED * defense.epsilon else "free"
            shown.setdefault(f"exact_{where}", []).append(exact)
    if "accuracy" in view:
        shown["accuracy_percent"] = 100 * view["accuracy"]
    return shown


KINDS = {"sentences": sentences, "sentences-blind": blind, "fine-tuning": fine_tuning}
