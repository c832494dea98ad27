"""Who was in the training, and what else the updates say about them: membership and attributes under defenses.

membership: some clients train together by federated SGD, each on examples of its own, of which it draws a part for
every round. The attacker sees their updates in the last rounds and scores candidates: members of each client against
examples that nobody trained on. It knows the membership of a few others.

attribute: the task is whether a digit is even or odd, the attribute is the digit. The attacker learns from public
images, with their digits; the victims are single images.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import gradveil
from gradveil import data
from gradveil.attacks.membership import FORMS
from gradveil.audit import cases
from gradveil.core.randomness import derived_generator
from gradveil.defenses import Defense
from gradveil.defenses.recup import RecUP
from gradveil.federation.job import as_batch, evaluate
from gradveil.metrics import attribute_summary
from gradveil.metrics.identification import Estimate, auc, over_games, true_positive_rate
from kinds import Row, Session, dataset_of, public_of


def membership(case: Row, session: Session) -> Row:
    """Train under a defense and score members of every client, by all forms of the attack."""
    dataset = dataset_of(case)
    task = cases.build_task(dataset, case["model"], seed=case["seed"])
    generator = derived_generator(case["seed"], "prepare", device=task.device)
    defense, task = gradveil.defense(case["defense"]).prepare(task, public=public_of(case, task), generator=generator)
    clients, size, known = (
        case["clients"],
        case["candidates_per_client"] + case["known_per_client"],
        clients_known(case),
    )
    held = torch.randperm(len(dataset.test), generator=derived_generator(case["seed"], "clients"))
    own, outside = held[: clients * size].view(clients, size), held[clients * size :]
    seen, trained = train(case, session, defense, task, dataset, own)
    strangers = outside[: case["outsiders"]], outside[case["outsiders"] : case["outsiders"] + known]

    def batch(places: Tensor) -> tuple[Tensor, Tensor]:
        return as_batch(task, dataset.test.batch(places))

    first = case["candidates_per_client"]
    shown = torch.cat([own[:, :first].flatten(), strangers[0]])
    told = torch.cat([own[:, first:].flatten(), strangers[1]])
    mask = torch.stack([torch.isin(told, places) for places in own])
    threat = gradveil.ThreatModel(
        batch_size=case["batch_size"],
        rounds=case["observed"],
        adaptive=case["adaptive"],
        defense=defense,
        known_members=(*batch(told), mask),
    )
    row: Row = {"accuracy": evaluate(trained, dataset.test)[0], "attack_seconds": {}}
    for form in FORMS:
        attack = gradveil.attack("membership", form=form, simulate=case["simulate"], coordinates=case["coordinates"])
        found = attack.find_members(seen[0][0][0], seen, batch(shown), threat, generator=generator)
        games = [
            scores[torch.isin(shown, torch.cat([places, strangers[0]]))]
            for scores, places in zip(found.scores, own, strict=True)
        ]
        scores = torch.stack(games).cpu()
        members = torch.arange(scores.shape[1]).expand_as(scores) < first
        row |= figures(f"{form}_auc", over_games(auc, scores, members))
        row |= figures(f"{form}_tpr", over_games(true_positive_rate, scores, members))
        row["attack_seconds"][form] = found.seconds
    return row


def clients_known(case: Row) -> int:
    """As many others are known as members."""
    return case["clients"] * case["known_per_client"]


def train(
    case: Row, session: Session, defense: Defense, task: gradveil.Task, dataset: data.Dataset, own: Tensor
) -> tuple[list[gradveil.Rounds], gradveil.Task]:
    """What the server saw of each client in the last rounds, and the model after them."""
    seen: list[list[tuple[gradveil.Task, gradveil.Update]]] = [[] for _ in own]
    memories: list[dict[str, Tensor]] = [{} for _ in own]
    for number in range(case["rounds"]):
        updates = []
        for client, places in enumerate(own):
            generator = derived_generator(case["seed"], "share", case["defense"], number, client)
            drawn = torch.randperm(len(places), generator=derived_generator(case["seed"], "batch", number, client))
            batch = as_batch(task, dataset.test.batch(places[drawn[: case["batch_size"]]]))
            updates.append(defense.share(task, *batch, generator=generator, memory=memories[client]))
        if number >= case["rounds"] - case["observed"]:
            for rounds, update in zip(seen, updates, strict=True):
                rounds.append((task, update))
        step = defense.aggregate(updates)
        task = task.with_parameters({name: value - case["lr"] * step[name] for name, value in task.parameters.items()})
        session.progress(number + 1, case["rounds"], 0.0)
    return [gradveil.Rounds(rounds) for rounds in seen], task


def attribute(case: Row, session: Session) -> Row:
    """Fit the attack on simulated clients and infer the digit of every victim from its update and its parity."""
    digits = dataset_of(case)
    train_split, test = (replace(split, targets=split.targets % 2) for split in (digits.train, digits.test))
    dataset = replace(digits, classes=("even", "odd"), train=train_split, test=test)
    task = cases.build_task(dataset, case["model"], seed=case["seed"])
    order = torch.randperm(len(train_split), generator=derived_generator(case["seed"], "public"))
    granted, prepared_with = order[: case["attacker_images"]], order[: case["defender_images"]]
    defense = gradveil.defense(case["defense"])
    if isinstance(defense, RecUP):
        defense = defense.for_attributes(digits.train.targets[prepared_with])
    generator = derived_generator(case["seed"], "prepare", device=task.device)
    public = as_batch(task, train_split.batch(prepared_with))
    defense, task = defense.prepare(task, public=public, generator=generator)
    victims = torch.randperm(len(test), generator=derived_generator(case["seed"], "victims"))[: case["victims"]]
    inputs, labels = as_batch(task, test.batch(victims))
    updates = [
        defense.share(
            task,
            inputs[place : place + 1],
            labels[place : place + 1],
            generator=derived_generator(case["seed"], "share", case["defense"], place),
            memory={},
        )
        for place in range(len(victims))
    ]
    threat = gradveil.ThreatModel(
        labels="known",
        known_labels=labels[:, None],
        adaptive=case["adaptive"],
        defense=defense,
        public=as_batch(task, train_split.batch(granted)),
        public_attributes=digits.train.targets[granted],
    )
    attack = gradveil.attack(case["attack"])
    attack = attack.fit(
        task,
        threat,
        generator=derived_generator(case["seed"], "attack", device=task.device),
        progress=session.progress,
        cache=session.checkpoints(case),
    )
    found = attack.infer(task, updates, threat)
    row: Row = {}
    for name, estimate in attribute_summary(found.scores, found.baseline, digits.test.targets[victims]).items():
        row |= figures(name, estimate)
    return row


def figures(name: str, estimate: Estimate) -> Row:
    """A figure and the ends of its interval."""
    return {name: estimate.value, f"{name}_interval": [estimate.low, estimate.high]}


KINDS: dict[str, Callable[[Row, Session], Row]] = {"membership": membership, "attribute": attribute}
