"""Sentences of SST-2 behind updates of SmolLM2-135M, a language model that clients train on next tokens.

dager: one client's batch under a defense, attacked by dager in its plain and in its adaptive form. Every parameter is
trained and shared but the embedding, which is also the head (106 million of 135 million values). blind: the most
frequent tokens instead.
"""

import time
from functools import cache

import torch
from torch import Tensor

import gradveil
from gradveil import metrics
from gradveil.attacks.dager import Dager
from gradveil.core.randomness import derived_generator
from gradveil.data import Dataset, load
from gradveil.modality import Text
from gradveil.models.smollm2 import language_model
from gradveil.task import NextToken
from kinds import Row, Session

# A special token that no text contains.
LOSS = NextToken(ignored=0)
NAMES = ("exact", "rouge_2", "rouge_l", "token_recall")


@cache
def setting() -> tuple[gradveil.Task, Text, Dataset]:
    dataset = load("sst2", tokenizer="smollm2")
    shape = dataset.train.stored_shape
    model, text = dataset.train.modality.bind(language_model(), shape)
    classes = text.vocabulary
    task = gradveil.Task(model, LOSS, input_shape=text.input_shape(shape), classes=classes, modality=text)
    return task, text, dataset


@cache
def batch(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, inputs and labels of the first `count` of the test sentences in a random order."""
    _, text, dataset = setting()
    order = torch.randperm(len(dataset.test), generator=derived_generator(seed, "victims"))
    tokens = dataset.test.inputs[order[:count]].long()
    return tokens, text.inputs_of(tokens), LOSS.labels(tokens, text.padding)


@cache
def gradients(count: int, seed: int) -> tuple[dict[str, Tensor], float]:
    """The gradient of a batch, and the root mean square of its values."""
    task, _, _ = setting()
    found = task.gradients(*batch(count, seed)[1:])
    total = sum(float(value.square().sum(dtype=torch.float64)) for value in found.values())
    return found, (total / task.size) ** 0.5


def scores(tokens: Tensor, found: Tensor) -> Row:
    """The metrics of each sentence, in the order that matches best."""
    _, text, _ = setting()
    inputs = text.inputs_of(found)
    order = metrics.match(text.inputs_of(tokens), inputs, text)
    values = metrics.Scorer(text).compute(text.inputs_of(tokens), inputs[order])
    return {name: [round(value, 4) for value in values[name].tolist()] for name in NAMES}


def attacked(case: Row, _session: Session) -> Row:
    task, text, _ = setting()
    tokens, inputs, labels = batch(case["batch"], case["seed"])
    defense, (gradient, size) = gradveil.defense(case["defense"]), gradients(case["batch"], case["seed"])
    generator = derived_generator(case["seed"], "client")
    if defense.gradient_only:
        update = defense.perturb(gradient, generator=generator)
    else:
        update = defense.share(task, inputs, labels, generator=generator)
    row: Row = {"lengths": (tokens != text.padding).sum(1).tolist(), "root_mean_square": size}
    row["shared"], row["in_model"] = task.size, sum(value.numel() for value in task.copy_model().parameters())
    for form in ("plain", "adaptive"):
        if form == "adaptive" and case["defense"] == "none":
            continue
        threat = gradveil.ThreatModel(batch_size=case["batch"], defense=defense, adaptive=form == "adaptive")
        started, worked = time.perf_counter(), time.process_time()
        found = Dager().reconstruct(task, update, threat, generator=derived_generator(case["seed"], "attack"))
        took = {"attack_seconds": time.perf_counter() - started, "processor_seconds": time.process_time() - worked}
        recovered = text.tokens_of(found.inputs[0])
        row[form] = {
            **scores(tokens, recovered),
            "certain": found.certain[0].tolist() if found.certain is not None else None,
            "loss": found.loss.tolist(),
            **{name: round(seconds, 1) for name, seconds in took.items()},
            "first_sentence": text.sentences(found.inputs[0])[0],
        }
    return row


def blind(case: Row, _session: Session) -> Row:
    _, text, dataset = setting()
    tokens, _, _ = batch(case["batch"], case["seed"])
    guess = text.tokens_of(text.typical(dataset.train.inputs)[None]).expand(len(tokens), -1)
    return {"plain": scores(tokens, guess)}


def derive(view: Row) -> Row:
    """The means of a row's scores, by the form of the attacker, for tables."""
    shown: Row = {}
    for form in ("plain", "adaptive"):
        for name in NAMES:
            values = (view.get(form) or {}).get(name)
            shown[f"{form}_{name}"] = None if values is None else sum(values) / len(values)
        shown[f"{form}_seconds"] = (view.get(form) or {}).get("processor_seconds")
    return shown


KINDS = {"dager": attacked, "dager-blind": blind}
