"""Federated training in one process: what a defense costs in accuracy, time and bytes."""

import dataclasses
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from gradveil import wire
from gradveil.accounting import PrivacySpent
from gradveil.data import Dataset, Split, partition
from gradveil.defenses import Defense
from gradveil.errors import ParameterError
from gradveil.federation.checkpoint import MEMORIES, Checkpoints, State, identify, training_folder
from gradveil.federation.clients import Batch, Clients, Randomness, Shared
from gradveil.federation.faults import NOT_FINITE
from gradveil.federation.memory import RAM_BYTES, ClientMemories
from gradveil.federation.optimiser import ServerOptimiser
from gradveil.federation.protocol import OpenRound
from gradveil.federation.training import RoundRecord, Training, TrainingResult, choose_clients
from gradveil.randomness import derived_generator
from gradveil.task import Task
from gradveil.update import Announced, Update

__all__ = [
    "Training",
    "TrainingResult",
    "after_warming_up",
    "as_batch",
    "check_settings",
    "choose_clients",
    "deal",
    "draw",
    "evaluate",
    "has_grown",
    "mean_or_nan",
    "performance_maintenance",
    "privacy_spent",
    "split_public",
    "train",
    "training_loss",
]

PUBLIC_SAMPLES = 100
"""Training images set aside as the public set that `Defense.prepare` may look at; no client holds them."""

LOSS_IMAGES = 256
"""A round's training loss is taken on at most this many of the images that its clients drew."""

ENCODED_CLIENTS = 4
"""Of this many clients a round, the first drawn, the updates are encoded to learn their length."""

Transport = Callable[[int, int, bytes], Iterable[bytes]]
"""What becomes of a message on its way: (round, client, message) to the messages that arrive from that client."""

DIVERGED_FACTOR = 10.0
DIVERGED_ROUNDS = 5
"""A training is stopped when its loss was above this multiple of its first, or of a blind guess's if that is larger,
for so many rounds in a row."""


def train(
    task: Task,
    dataset: Dataset,
    defense: Defense,
    training: Training,
    *,
    progress: Callable[[int, int], None] | None = None,
    watch: Callable[[RoundRecord], None] | None = None,
    execution: str = "auto",
    transport: Transport | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
    ram_bytes: int = RAM_BYTES,
) -> TrainingResult:
    """Train `task` on `dataset` with every client under `defense`; the given task is not changed.

    The same task, data, defense, training and execution give the same weights to the bit on the same machine, also
    when the training was interrupted and resumed.

    Args:
        task: model and loss at the initial weights.
        dataset: training images are dealt out to the clients, test images measure accuracy.
        defense: what the clients do to their updates.
        training: rounds, clients, rates.
        progress: called with (rounds done, rounds in all).
        watch: called with what was measured of each round.
        execution: how the clients are worked on: ``"loop"``, ``"batch"``, ``"compile"`` or ``"auto"``, see
            `gradveil.federation.clients`.
        transport: what becomes of messages on their way to the server, for tests and experiments with faults. Only
            with it are updates encoded, carried and checked as a server must check those of strangers.
        checkpoint: folder for checkpoints; None: none are saved. One training at a time writes into it.
        resume: go on from the checkpoint in that folder; where there is none, or that of another training, refuse.
        ram_bytes: how much of the clients' memories stays in RAM; the rest goes to disk.
    """
    if checkpoint is None and resume:
        raise ParameterError("train: resume needs checkpoint, the folder to go on in; name it or leave resume out")
    with nullcontext() if checkpoint is None else training_folder(checkpoint, resume=resume):
        return _train(
            task, dataset, defense, training, progress, watch, execution, transport, checkpoint, resume, ram_bytes
        )


def _train(
    task: Task,
    dataset: Dataset,
    defense: Defense,
    training: Training,
    progress: Callable[[int, int], None] | None,
    watch: Callable[[RoundRecord], None] | None,
    execution: str,
    transport: Transport | None,
    checkpoint: Path | None,
    resume: bool,
    ram_bytes: int,
) -> TrainingResult:
    """`train` in a folder that is its own."""
    if task.classes is None:  # there is no accuracy to measure on the way
        training = dataclasses.replace(training, evaluate_every=None)
    seed = training.seed
    public, private = split_public(dataset.train, seed)
    shares = deal(dataset.train, private, training)
    initial = task
    defense, task = defense.prepare(
        task,
        public=as_batch(task, dataset.train.batch(public)),
        generator=derived_generator(seed, "prepare", device=task.device),
    )
    clients = Clients(task, defense, training, execution)
    state = State(
        task.parameters,
        task.buffers,
        ServerOptimiser(training, task.parameters),
        ClientMemories(None if checkpoint is None else checkpoint / MEMORIES, ram_bytes, task.device),
    )
    checkpoints = None
    if checkpoint is not None:
        identity = identify(initial, dataset, defense, training, clients.execution)
        checkpoints = Checkpoints(checkpoint, identity, training)
        if resume:
            checkpoints.load_into(state)
        else:
            state.memories.restore({})  # of a training that was stopped before its first checkpoint, files may be left
    federation = _Federation(task, dataset, defense, training, clients, shares, transport)

    while state.number < training.rounds and state.diverged is None:
        record = federation.round(state)
        if watch and record:
            watch(record)
        if progress and record:
            progress(state.number, training.rounds)
        ended = state.number == training.rounds or state.diverged is not None
        if checkpoints and (ended or state.number % training.checkpoint_every == 0):
            checkpoints.save(state)

    trained = task.with_parameters(state.parameters, state.buffers)
    accuracy, loss = evaluate(trained, dataset.test)
    records = state.records
    timed = after_warming_up(records)
    return TrainingResult(
        task=trained,
        accuracy=accuracy,
        loss=loss,
        round_seconds=mean_or_nan(record.seconds for record in timed),
        upload_bytes=mean_or_nan(record.upload_bytes for record in records if record.clients),
        download_bytes=mean_or_nan(record.download_bytes for record in records if record.clients),
        history=[*state.history, (len(records), accuracy)],
        diverged=state.diverged,
        privacy=privacy_spent(defense, training, [len(share) for share in shares], state.rounds_of),
        rounds=records,
        gradient_seconds=mean_or_nan(record.gradient_seconds for record in timed),
        defense_seconds=mean_or_nan(record.defense_seconds for record in timed),
        aggregation_seconds=mean_or_nan(record.aggregation_seconds for record in timed),
        faults=state.faults,
        execution=clients.execution,
    )


def check_settings(
    task: Task, dataset: Dataset, defenses: Iterable[Defense], training: Training, execution: str = "auto"
) -> None:
    """Raise what `train` would raise before it prepares a defense, which can take minutes; warn of what is clipped."""
    shares = deal(dataset.train, split_public(dataset.train, training.seed)[1], training)
    for defense in defenses:
        Clients(task, defense, training, execution)
    most = max(map(len, shares))
    if training.batch_size > most:
        warnings.warn(
            f"batches of {training.batch_size} images were asked for, but no client holds more than {most}; "
            "each uses all it has",
            stacklevel=2,
        )


def after_warming_up(records: Sequence[RoundRecord]) -> Sequence[RoundRecord]:
    """The rounds whose times count: not the first, in which programs are compiled and caches are cold."""
    return records[1:] or records


class _Federation:
    """The clients with their data, and the server: one `round` at a time."""

    def __init__(
        self,
        task: Task,
        dataset: Dataset,
        defense: Defense,
        training: Training,
        clients: Clients,
        shares: Sequence[Tensor],
        transport: Transport | None,
    ) -> None:
        self._task, self._dataset, self._defense, self._training = task, dataset, defense, training
        self._clients, self._shares, self._transport = clients, shares, transport
        self._device = task.device

    def round(self, state: State) -> RoundRecord | None:
        """One round, from the drawing of clients to the step; None if the training has diverged before the step."""
        number, training = state.number, self._training
        current = self._task.with_parameters(state.parameters, state.buffers)
        batches = draw(current, self._dataset.train, self._shares, training, number)
        loss = training_loss(current, batches)

        images, _ = next(iter(batches.values()))
        server: OpenRound[Update] = OpenRound(
            number,
            list(batches),
            state.faults.append,
            self._defense,
            state.parameters,
            statistics=current.updated_buffers(images) if self._transport else None,
            most_samples=training.batch_size,
            local=training.local,
        )
        randomness = self._randomness(number)

        def announce(client: int) -> Announced | None:
            generator, memory = randomness(client, "announce"), state.memories[client]
            return self._defense.announce(
                current, *batches[client], generator=generator, memory=memory, local=training.local
            )

        started = time.perf_counter()
        server.elect(announce)
        announcing = time.perf_counter() - started
        shared = self._clients.share(current, batches, randomness, state.memories, server.announced)
        state.rounds_of.update(list(shared.updates))  # a mapping would be read as counts
        for client, reason in shared.failed.items():
            server.fail(client, NOT_FINITE, reason)
        if not shared.updates:
            state.diverged = number
            return None
        updates = self._arrived(server, shared)

        started = time.perf_counter()
        if updates:
            sent = list(updates.values())
            aggregate = server.aggregate(sent, [update.meta.samples for update in sent], state.server_memory)
            moved = state.optimiser.step(state.parameters, aggregate, number)
            if not all(torch.isfinite(value).all() for value in moved.values()):
                state.diverged = number
                return None
            state.parameters, state.buffers = moved, {**state.buffers, **aggregate.meta.buffers}
        aggregating = time.perf_counter() - started

        state.number += 1
        upload, download = _bytes(sent, aggregate, server.locations) if updates else (math.nan, math.nan)
        record = RoundRecord(
            round=number,
            clients=len(updates),
            loss=loss,
            accuracy=self._accuracy(state),
            gradient_seconds=shared.gradient_seconds,
            defense_seconds=shared.defense_seconds + announcing,
            aggregation_seconds=aggregating,
            upload_bytes=upload,
            download_bytes=download,
        )
        state.records.append(record)
        if has_grown([record.loss for record in state.records], self._task.classes):
            state.diverged = number
        return record

    def _randomness(self, number: int) -> Randomness:
        return lambda client, purpose: derived_generator(
            self._training.seed, purpose, number, client, device=self._device
        )

    def _arrived(self, server: OpenRound[Update], shared: Shared) -> dict[int, Update]:
        """The updates that the server accepts; what it misses or refuses is noted."""
        for update in shared.updates.values():
            update.meta.round = server.number
        if self._transport is None:
            return shared.updates
        for client, update in shared.updates.items():
            sent = wire.encode(update, locations=server.locations)
            for message in self._transport(server.number, client, sent):
                server.receive(client, partial(server.read, message))
        return server.close()

    def _accuracy(self, state: State) -> float | None:
        """At every so many rounds; after the last one it is measured anyway."""
        every, done = self._training.evaluate_every, state.number
        if not every or done % every or done == self._training.rounds:
            return None
        accuracy, _ = evaluate(self._task.with_parameters(state.parameters, state.buffers), self._dataset.test)
        state.history.append((done, accuracy))
        return accuracy


def _bytes(updates: Sequence[Update], aggregate: Update, known: Announced | None) -> tuple[float, float]:
    """What a client sends and gets back, on average."""
    upload = fmean(len(wire.encode(update, locations=known)) for update in updates[:ENCODED_CLIENTS])
    download = float(len(wire.encode(aggregate, locations=known)))
    if known is not None:  # one client sends it up, all others have to fetch it
        announcement = len(wire.encode_locations(known))
        upload += announcement / len(updates)
        download += announcement * (len(updates) - 1) / len(updates)
    return upload, download


def privacy_spent(
    defense: Defense, training: Training, examples: Sequence[int], rounds_of: Counter[int]
) -> PrivacySpent | None:
    """What the client spent that spent most; which clients were drawn is the server's knowledge and no protection.

    A training repeats itself, so its noise comes from seeds: what is spent is said of the mechanism that it simulates.
    """
    spent = [
        defense.privacy_spent(
            rounds=rounds,
            batch_size=min(training.batch_size, examples[client]),
            examples=examples[client],
            local=training.local,
        )
        for client, rounds in rounds_of.items()
    ]
    most = max((one for one in spent if one is not None), key=lambda one: one.epsilon, default=None)
    return None if most is None else dataclasses.replace(most, seeded=True)


def mean_or_nan(values: Iterable[float]) -> float:
    """The mean; of nothing, NaN."""
    values = list(values)
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


def deal(train_split: Split, private: Tensor, training: Training) -> list[Tensor]:
    """The indices of the images that each client holds."""
    shares = partition(
        train_split.targets[private],
        clients=training.clients,
        scheme=training.scheme,
        alpha=training.alpha,
        classes_per_client=training.classes_per_client,
        seed=training.seed,
    )
    return [private[share] for share in shares]


def draw(
    task: Task, train_split: Split, shares: Sequence[Tensor], training: Training, number: int, *clients: int
) -> dict[int, Batch]:
    """The images and labels that each of these clients, or of all that round `number` asks, draws from its own."""
    chosen = list(clients) or choose_clients(training, number)
    drawn = []
    for client in chosen:
        generator = derived_generator(training.seed, "batch", number, client)
        order = torch.randperm(len(shares[client]), generator=generator)
        drawn.append(shares[client][order[: training.batch_size]])
    images, labels = as_batch(task, train_split.batch(torch.cat(drawn)))
    sizes = [len(indices) for indices in drawn]
    return dict(zip(chosen, zip(torch.split(images, sizes), torch.split(labels, sizes), strict=True), strict=True))


@torch.no_grad()
def training_loss(task: Task, batches: Mapping[int, Batch]) -> float:
    """The task's loss on some of the images that the clients of a round drew."""
    images = torch.cat([images for images, _ in batches.values()])[:LOSS_IMAGES]
    labels = torch.cat([labels for _, labels in batches.values()])[:LOSS_IMAGES]
    return float(task.loss_of(task.predict(images), labels))


def has_grown(losses: Sequence[float], classes: int | None) -> bool:
    """Whether the loss says that a training has diverged, see `DIVERGED_FACTOR`."""
    limit = DIVERGED_FACTOR * max(losses[0], math.log(classes or 1))
    latest = losses[1:][-DIVERGED_ROUNDS:]
    return len(latest) == DIVERGED_ROUNDS and not any(loss <= limit for loss in latest)  # NaN has grown, too


def evaluate(task: Task, split: Split) -> tuple[float, float]:
    """Accuracy in [0, 1] (NaN for a task without classes) and the task's mean loss on a split.

    Where every position of an input has a class, the accuracy is the share of positions that are right.
    """
    correct, judged, total_loss = 0, 0, 0.0
    for indices in torch.split(torch.arange(len(split)), 512):
        images, labels = as_batch(task, split.batch(indices))
        outputs = task.predict(images)
        if task.classes is not None:
            right = task.classes_of(outputs) == (labels.argmax(1) if labels.is_floating_point() else labels)
            correct, judged = correct + int(right.sum()), judged + right.numel()
        total_loss += float(task.loss_of(outputs, labels)) * len(indices)
    return correct / judged if judged else math.nan, total_loss / len(split)


def performance_maintenance(accuracy: float, baseline: float, test: Split) -> float | None:
    """PMM, accuracy with defense / without; None when there is none, or when it is near chance and means nothing.

    Near chance: less than a quarter of the way from always naming the commonest class to being always right.
    """
    if math.isnan(baseline):
        return None
    chance = float(test.targets.flatten().bincount().max()) / test.targets.numel()
    return None if baseline < chance + 0.25 * (1 - chance) else accuracy / baseline


def as_batch(task: Task, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs and targets on the task's device, and in its precision unless they are class numbers."""
    inputs, targets = batch
    precision = task.dtype if targets.is_floating_point() else targets.dtype
    return inputs.to(task.device, task.dtype), targets.to(task.device, precision)
