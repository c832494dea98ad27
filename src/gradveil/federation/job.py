"""A training run that is ready to begin, and what all engines do in the same way: drawing examples and measuring."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from gradveil.core.errors import ParameterError
from gradveil.core.randomness import derived_generator
from gradveil.data import Dataset, Split, partition
from gradveil.defenses import Defense
from gradveil.defenses.accounting import PrivacySpent
from gradveil.defenses.base import Batch
from gradveil.federation.training import RoundRecord, Training, TrainingResult, choose_clients, history_of
from gradveil.task import Task
from gradveil.update import ClientRound

PUBLIC_SAMPLES = 100
"""Training examples set aside as the public set that `Defense.prepare` may look at; no client holds them."""

LOSS_EXAMPLES = 256
"""A round's training loss is measured on at most this many of the examples that its clients drew."""

DIVERGED_FACTOR = 10.0
DIVERGED_ROUNDS = 5
"""Training is stopped when the loss was above `DIVERGED_FACTOR` times its first value, or times that of a blind guess
if that is larger, for `DIVERGED_ROUNDS` rounds in a row."""


@dataclass(frozen=True)
class Job:
    """A training run whose data is dealt out and whose defense is prepared; `Job.prepare` makes one.

    Args:
        task: model and loss at the initial weights, with any changes that the defense made.
        dataset: training examples are dealt out to the clients, test examples measure accuracy.
        defense: the prepared defense of the clients.
        training: rounds, clients, rates.
        shares: the indices of the training examples that each client holds.
        statistics: the names of the batch-norm statistics that travel with updates.

    Example:
        >>> Job.__dataclass_fields__["training"].type
        <class 'gradveil.federation.training.Training'>
    """

    task: Task
    dataset: Dataset
    defense: Defense
    training: Training
    shares: Sequence[Tensor]
    statistics: Sequence[str]

    @classmethod
    def prepare(cls, task: Task, dataset: Dataset, defense: Defense, training: Training) -> "Job":
        """Deal out the data and let the defense look at the public part of it."""
        dataset = dataset.bound(task.modality)
        public, shares = deal(dataset.train, training)
        known = as_batch(task, dataset.train.batch(public))
        generator = derived_generator(training.seed, "prepare", device=task.device)
        defense, task = defense.prepare(task, public=known, generator=generator)
        if task.classes is None:  # there is no accuracy to measure between rounds
            training = replace(training, evaluate_every=None)
        job = cls(task, dataset, defense, training, shares, list(task.updated_buffers(known[0][:2])))
        job._privacy_spent({0: 1})  # a package that is missing for it is missed now and not after the training
        return job

    def draw(self, task: Task, number: int, *clients: int) -> dict[int, Batch]:
        """The batch that each client draws from its own examples: these clients, or all clients of round `number`."""
        chosen = list(clients) or choose_clients(self.training, number)
        drawn = []
        for client in chosen:
            share = self.shares[client]
            order = torch.randperm(len(share), generator=derived_generator(self.training.seed, "batch", number, client))
            drawn.append(share[order[: self.training.batch_size]])
        sizes = [len(indices) for indices in drawn]
        batches = (torch.split(part, sizes) for part in as_batch(task, self.dataset.train.batch(torch.cat(drawn))))
        return dict(zip(chosen, zip(*batches, strict=True), strict=True))

    def client_round(
        self, task: Task, number: int, client: int, batch: Batch, purpose: str, **state: Any
    ) -> ClientRound:
        """What a client is given in round `number`; its generator is always in the same state.

        Args:
            task: the task at the weights of this round.
            number: the number of the round.
            client: the number of the client.
            batch: the examples that it drew.
            purpose: ``"share"`` or ``"announce"``; each has its own randomness.
            state: the client's memory, and what was announced.
        """
        generator = derived_generator(self.training.seed, purpose, number, client, device=task.device)
        inputs, targets = batch
        return ClientRound(
            task=task, inputs=inputs, targets=targets, generator=generator, local=self.training.local, **state
        )

    def accuracy(self, task: Task, done: int) -> float | None:
        """Accuracy on the test examples; None unless the training evaluates after `done` rounds."""
        return evaluate(task, self.dataset.test)[0] if self.training.evaluates_after(done) else None

    def has_diverged(self, records: Sequence[RoundRecord]) -> bool:
        """Whether the losses so far say that the training has diverged, see `DIVERGED_FACTOR`."""
        losses = [record.loss for record in records]
        limit = DIVERGED_FACTOR * max(losses[0], math.log(self.task.classes or 1))
        latest = losses[1:][-DIVERGED_ROUNDS:]
        return len(latest) == DIVERGED_ROUNDS and not any(loss <= limit for loss in latest)  # NaN counts as grown

    def result(
        self, task: Task, records: list[RoundRecord], rounds_of: Mapping[int, int], **others: Any
    ) -> TrainingResult:
        """The result of the training.

        Args:
            task: the task at the final weights.
            records: what was measured in each round.
            rounds_of: in how many rounds each client took part.
            others: the other fields of the result.
        """
        accuracy, loss = evaluate(task, self.dataset.test)
        sent = [record for record in records if record.clients]
        return TrainingResult(
            task=task,
            accuracy=accuracy,
            loss=loss,
            round_seconds=mean_or_nan(record.seconds for record in after_warming_up(records)),
            upload_bytes=mean_or_nan(record.upload_bytes for record in sent),
            download_bytes=mean_or_nan(record.download_bytes for record in sent),
            history=[*history_of(records), (len(records), accuracy)],
            privacy=self._privacy_spent(rounds_of),
            rounds=records,
            **others,
        )

    def _privacy_spent(self, rounds_of: Mapping[int, int]) -> PrivacySpent | None:
        """The privacy spent by the client that spent most.

        The server knows which clients were drawn, so drawing them adds no protection. The noise of a training run comes
        from seeds, so that it can be repeated; the figures hold for the mechanism that the training simulates.
        """
        held = {client: len(self.shares[client]) for client in rounds_of}
        spent = [
            self.defense.privacy_spent(
                rounds=rounds,
                batch_size=min(self.training.batch_size, held[client]),
                examples=held[client],
                local=self.training.local,
            )
            for client, rounds in rounds_of.items()
        ]
        highest = max((each for each in spent if each is not None), key=lambda each: each.epsilon, default=None)
        return None if highest is None else replace(highest, seeded=True)


def after_warming_up(records: Sequence[RoundRecord]) -> Sequence[RoundRecord]:
    """The rounds whose times count: all but the first, in which programs are compiled and caches are cold."""
    return records[1:] or records


def mean_or_nan(values: Iterable[float]) -> float:
    """The mean, or NaN if there are no values."""
    values = list(values)
    return fmean(values) if values else math.nan


def split_public(train_split: Split, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the public examples, and of those that remain for the clients."""
    if len(train_split) <= PUBLIC_SAMPLES:
        raise ParameterError(
            f"train: expected more than {PUBLIC_SAMPLES} training examples, because {PUBLIC_SAMPLES} are set aside as "
            f"public ones that no client holds, got {len(train_split)}; add examples, or use another data set"
        )
    shuffled = torch.randperm(len(train_split), generator=derived_generator(seed, "public"))
    return shuffled[:PUBLIC_SAMPLES], shuffled[PUBLIC_SAMPLES:]


def deal(train_split: Split, training: Training) -> tuple[Tensor, list[Tensor]]:
    """Indices of the public examples, and of those that each client holds."""
    public, private = split_public(train_split, training.seed)
    if training.clients > len(private):
        raise ParameterError(
            f"train: expected at least one training example for each of {training.clients} clients besides the "
            f"{len(public)} public ones, got {len(private)}; lower --clients to at most {len(private)}, or add examples"
        )
    shares = partition(
        train_split.targets[private],
        clients=training.clients,
        scheme=training.scheme,
        alpha=training.alpha,
        classes_per_client=training.classes_per_client,
        seed=training.seed,
    )
    return public, [private[share] for share in shares]


@torch.no_grad()
def training_loss(task: Task, batches: Mapping[int, Batch]) -> float:
    """The task's loss on some of the examples that the clients of a round drew."""
    inputs, targets = (torch.cat(part)[:LOSS_EXAMPLES] for part in zip(*batches.values(), strict=True))
    return float(task.loss_of(task.predict(inputs), targets))


_EVALUATED_VALUES = 1 << 22
"""Input values of a batch that is evaluated at once: large images become floats a few at a time."""


def evaluate(task: Task, split: Split) -> tuple[float, float]:
    """Accuracy in [0, 1] (NaN for a task without classes) and the task's mean loss on a split.

    If every position of an input has a class, the accuracy is the share of correct positions.
    """
    correct, judged, total_loss = 0, 0, 0.0
    size = max(1, min(512, _EVALUATED_VALUES // math.prod(task.input_shape)))
    for indices in torch.split(torch.arange(len(split)), size):
        inputs, targets = as_batch(task, split.batch(indices))
        outputs = task.predict(inputs)
        if task.classes is not None:
            right = task.classes_of(outputs) == (targets.argmax(1) if targets.is_floating_point() else targets)
            correct, judged = correct + int(right.sum()), judged + right.numel()
        total_loss += float(task.loss_of(outputs, targets)) * len(indices)
    return correct / judged if judged else math.nan, total_loss / len(split)


def performance_maintenance(accuracy: float, baseline: float, test: Split) -> float | None:
    """PMM: accuracy with the defense / without; None if the `baseline` is NaN, or near chance, where PMM means nothing.

    Near chance: less than a quarter of the way from always naming the most common class to always being right.
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
