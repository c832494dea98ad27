"""Federated training in one process: what a defense costs in accuracy, time and bytes."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil import checks, wire
from gradveil.accounting import PrivacySpent
from gradveil.data import Dataset, Split, partition
from gradveil.defenses import Defense
from gradveil.errors import InputError, NotFiniteError, ParameterError
from gradveil.randomness import derived_generator
from gradveil.task import Task
from gradveil.update import LocalSteps

PUBLIC_SAMPLES = 100
"""Training images set aside as the public set that `Defense.prepare` may look at; no client holds them."""


@dataclass(frozen=True)
class Training:
    """How a federation trains: FedSGD, or FedAvg with `local` steps; the server takes momentum steps.

    Args:
        rounds: number of rounds.
        clients: number of clients that share the training images.
        clients_per_round: clients drawn each round; None: all of them.
        batch_size: images a client draws from its own each round.
        lr: the server's learning rate on the aggregated update.
        momentum: the server's momentum.
        scheme: how images are dealt out: ``"iid"``, ``"dirichlet"`` or ``"classes"``.
        alpha: concentration of ``"dirichlet"``.
        classes_per_client: classes of ``"classes"``.
        local: local steps (FedAvg); None: one gradient a round (FedSGD).
        evaluate_every: rounds between evaluations; None: only at the end.
        seed: everything random derives from it.

    Example:
        >>> Training(rounds=5, clients=4).clients_per_round is None
        True
    """

    rounds: int = 200
    clients: int = 10
    clients_per_round: int | None = None
    batch_size: int = 32
    lr: float = 0.015
    momentum: float = 0.9
    scheme: str = "iid"
    alpha: float = 0.5
    classes_per_client: int = 2
    local: LocalSteps | None = None
    evaluate_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer("train", "rounds", self.rounds, low=1)
        checks.integer("train", "clients", self.clients, low=1)
        checks.integer("train", "batch_size", self.batch_size, low=1)
        checks.number("train", "lr", self.lr, above=0)
        checks.number("train", "momentum", self.momentum, low=0, below=1)
        if self.clients_per_round is not None:
            checks.integer("train", "clients_per_round", self.clients_per_round, low=1, high=self.clients)
        if self.evaluate_every is not None:
            checks.integer("train", "evaluate_every", self.evaluate_every, low=1)


@dataclass(frozen=True)
class TrainingResult:
    """What came of a training.

    Args:
        task: the task at the trained weights.
        accuracy: on the test images, in [0, 1].
        loss: on the test images.
        round_seconds: mean time of a round: gradients, defense, aggregation; not encoding, not evaluation.
        upload_bytes: mean length of what one client encodes and sends: its update, and what it announces.
        download_bytes: mean length of what each client gets back: the aggregate, and what another one announced.
        history: (round, accuracy) at each evaluation.
        diverged: the round in which gradients or weights stopped being finite and the training ended; else None.
        privacy: the (epsilon, delta) of the client that spent most; None: the defense carries no such guarantee.

    Example:
        >>> TrainingResult.__dataclass_fields__["accuracy"].type
        <class 'float'>
    """

    task: Task
    accuracy: float
    loss: float
    round_seconds: float
    upload_bytes: float
    download_bytes: float
    history: list[tuple[int, float]]
    diverged: int | None = None
    privacy: PrivacySpent | None = None


def train(
    task: Task,
    dataset: Dataset,
    defense: Defense,
    training: Training,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> TrainingResult:
    """Train `task` on `dataset` with every client under `defense`; the given task is not changed.

    Args:
        task: model and loss at the initial weights.
        dataset: training images are dealt out to the clients, test images measure accuracy.
        defense: what the clients do to their updates.
        training: rounds, clients, rates.
        progress: called with (rounds done, rounds in all).
    """
    seed = training.seed
    public, private = split_public(dataset.train, seed)
    shares = [
        private[share]
        for share in partition(
            dataset.train.labels[private],
            clients=training.clients,
            scheme=training.scheme,
            alpha=training.alpha,
            classes_per_client=training.classes_per_client,
            seed=seed,
        )
    ]
    task = defense.prepare(
        task,
        public=as_batch(task, dataset.train.batch(public)),
        generator=derived_generator(seed, "prepare", device=task.device),
    )
    parameters, buffers = task.parameters, task.buffers
    velocity = {name: torch.zeros_like(value) for name, value in parameters.items()}
    memories: dict[int, dict[str, Tensor]] = defaultdict(dict)
    server_memory: dict[str, Tensor] = {}
    seconds, history = [], []
    uploads: list[float] = []
    downloads: list[float] = []
    rounds_of: Counter[int] = Counter()
    diverged = None

    for number in range(training.rounds):
        current = task.with_parameters(parameters, buffers)
        chosen = torch.randperm(training.clients, generator=derived_generator(seed, "clients", number))
        chosen = chosen[: training.clients_per_round]
        drawn = {client: _draw(shares[client], training.batch_size, seed, number, client) for client in chosen.tolist()}
        batches = {client: as_batch(task, dataset.train.batch(indices)) for client, indices in drawn.items()}
        started = time.perf_counter()

        def randomness(client: int, purpose: str, number: int = number) -> torch.Generator:
            return derived_generator(seed, purpose, number, client, device=task.device)

        try:
            announced = _announcement(defense, current, batches, randomness, memories, training.local)
            updates = [
                defense.share(
                    current,
                    *batch,
                    generator=randomness(client, "share"),
                    memory=memories[client],
                    public=announced,
                    local=training.local,
                )
                for client, batch in batches.items()
            ]
        except NotFiniteError:
            diverged = number
            break
        rounds_of.update(list(batches))  # a mapping would be read as counts
        weights = [update.meta.samples for update in updates]
        aggregate = defense.aggregate(updates, weights=weights, memory=server_memory, public=announced)
        for name, value in aggregate.items():
            velocity[name] = training.momentum * velocity[name] + value
        moved = {name: value - training.lr * velocity[name] for name, value in parameters.items()}
        if not all(torch.isfinite(value).all() for value in moved.values()):
            diverged = number
            break
        parameters, buffers = moved, {**buffers, **aggregate.meta.buffers}
        seconds.append(time.perf_counter() - started)

        known = defense.locations(announced)
        uploads += [len(wire.encode(update, locations=known)) for update in updates]
        downloads.append(len(wire.encode(aggregate, locations=known)))
        if known is not None:  # one client sends it up, all others have to fetch it
            announcement = len(wire.encode_locations(known))
            uploads[-1] += announcement
            downloads[-1] += announcement * (len(updates) - 1) / len(updates)
        done = number + 1
        if training.evaluate_every and done % training.evaluate_every == 0 and done < training.rounds:
            history.append((done, evaluate(task.with_parameters(parameters, buffers), dataset.test)[0]))
        if progress:
            progress(done, training.rounds)

    trained = task.with_parameters(parameters, buffers)
    accuracy, loss = evaluate(trained, dataset.test)
    history.append((len(seconds), accuracy))
    return TrainingResult(
        trained,
        accuracy,
        loss,
        _mean(seconds),
        _mean(uploads),
        _mean(downloads),
        history,
        diverged,
        _privacy_spent(defense, training, [len(share) for share in shares], rounds_of),
    )


def _privacy_spent(
    defense: Defense, training: Training, examples: Sequence[int], rounds_of: Counter[int]
) -> PrivacySpent | None:
    """What the client spent that spent most; which clients were drawn is the server's knowledge and no protection."""
    spent = [
        defense.privacy_spent(
            rounds=rounds,
            batch_size=min(training.batch_size, examples[client]),
            examples=examples[client],
            local=training.local,
        )
        for client, rounds in rounds_of.items()
    ]
    return max((one for one in spent if one is not None), key=lambda one: one.epsilon, default=None)


def _announcement(
    defense: Defense,
    task: Task,
    batches: Mapping[int, tuple[Tensor, Tensor]],
    randomness: Callable[[int, str], torch.Generator],
    memories: Mapping[int, dict[str, Tensor]],
    local: LocalSteps | None,
) -> Mapping[str, Tensor] | None:
    """What the elected client, the first of the round, announces; if the server has to refuse it, the next one's."""
    for client, batch in batches.items():
        announced = defense.announce(
            task, *batch, generator=randomness(client, "announce"), memory=memories[client], local=local
        )
        try:
            defense.check_public(announced, task.parameters)
        except InputError:
            continue
        return announced
    return None


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def split_public(train_split: Split, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the public images, and of those that are left for the clients."""
    if len(train_split) <= PUBLIC_SAMPLES:
        raise ParameterError(
            f"train: expected more than {PUBLIC_SAMPLES} training images ({PUBLIC_SAMPLES} are the public set), "
            f"got {len(train_split)}"
        )
    shuffled = torch.randperm(len(train_split), generator=derived_generator(seed, "public"))
    return shuffled[:PUBLIC_SAMPLES], shuffled[PUBLIC_SAMPLES:]


def evaluate(task: Task, split: Split) -> tuple[float, float]:
    """Accuracy in [0, 1] and mean cross-entropy on a split."""
    correct, total_loss = 0, 0.0
    for indices in torch.split(torch.arange(len(split)), 512):
        images, labels = as_batch(task, split.batch(indices))
        logits = task.predict(images)
        correct += int((logits.argmax(1) == labels).sum())
        total_loss += float(F.cross_entropy(logits, labels, reduction="sum"))
    return correct / len(split), total_loss / len(split)


def performance_maintenance(accuracy: float, baseline: float, test: Split) -> float | None:
    """PMM, accuracy with defense / without; None when the undefended model is near chance and the ratio means nothing.

    Near chance: less than a quarter of the way from always naming the commonest class to being always right.
    """
    chance = float(test.labels.bincount().max()) / len(test)
    return None if baseline < chance + 0.25 * (1 - chance) else accuracy / baseline


def _draw(share: Tensor, batch_size: int, seed: int, number: int, client: int) -> Tensor:
    order = torch.randperm(len(share), generator=derived_generator(seed, "batch", number, client))
    return share[order[:batch_size]]


def as_batch(task: Task, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Images and labels in the task's precision and on its device."""
    images, labels = batch
    return images.to(task.device, task.dtype), labels.to(task.device)
