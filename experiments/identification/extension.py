"""Which of N candidates a client trained on: games of identification under every defense.

identification: games with one pool of candidates from the test split. If asked for, some epochs of SGD on the training
split come first (`trained`); these weights are kept in the folder `checkpoints`, for the other cases.
"""

from collections.abc import Callable
from pathlib import Path

import torch

import gradveil
from gradveil.audit import cases
from gradveil.audit.games import draw_games, play
from gradveil.audit.store import slug
from gradveil.core.randomness import derived_generator
from gradveil.core.storage import save_atomically
from gradveil.federation.job import as_batch, evaluate
from gradveil.metrics.identification import summary
from kinds import Row, Session, dataset_of, local_of, public_of


def identification(case: Row, session: Session) -> Row:
    """Play the games of a case."""
    dataset = dataset_of(case)
    norms = case.get("norms")
    task = cases.build_task(dataset, case["model"], seed=case["seed"], norms=norms)
    accuracy = None
    if case.get("trained"):
        weights = trained_weights(case, session, task)
        task = cases.build_task(dataset, case["model"], seed=case["seed"], norms=norms, weights=weights)
        accuracy = evaluate(task, dataset.test)[0]
    attack, defense = gradveil.attack(case["attack"]), gradveil.defense(case["defense"])
    prepared = cases.prepare(task, defense, attack, public=public_of(case, task), seed=case["seed"])
    sizes = {key: case[key] for key in ("games", "candidates", "batch_size", "inclusion", "distractors", "seed")}
    games = draw_games(dataset.test, **sizes)
    found = play(
        games,
        prepared,
        attack,
        adaptive=case["adaptive"],
        local=local_of(case),
        seed=case["seed"],
        progress=session.progress,
    )
    figures = summary(found.scores.cpu(), games.members)
    row: Row = {name: estimate.value for name, estimate in figures.items()}
    row |= {f"{name}_interval": [estimate.low, estimate.high] for name, estimate in figures.items()}
    return {**row, "attack_spec": str(attack), "attack_seconds": found.seconds, "model_accuracy": accuracy}


def trained_weights(case: Row, session: Session, task: gradveil.Task) -> Path:
    """A file of weights after some epochs of SGD; made by the first case that needs it."""
    settings = case["trained"]
    name = f"{case['dataset']} {case['model']} {case.get('norms')} {settings} seed {case['seed']}"
    path = session.folder / "checkpoints" / f"{slug(name)}.safetensors"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    model, split = task.copy_model(), dataset_of(case).train
    optimiser = torch.optim.SGD(model.parameters(), lr=settings["lr"])
    for epoch in range(settings["epochs"]):
        order = torch.randperm(len(split), generator=derived_generator(case["seed"], "epoch", epoch))
        for places in torch.split(order, settings["batch_size"]):
            inputs, targets = as_batch(task, split.batch(places))
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(task.normalised(inputs)), targets).backward()
            optimiser.step()
        session.progress(epoch + 1, settings["epochs"], 0.0)
    save_atomically(path, dict(model.state_dict()), {})
    return path


KINDS: dict[str, Callable[[Row, Session], Row]] = {"identification": identification}
