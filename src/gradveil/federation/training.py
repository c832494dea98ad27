"""The settings of a federated training, and its results."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from gradveil.core import checks
from gradveil.core.randomness import derived_generator
from gradveil.defenses.accounting import PrivacySpent
from gradveil.federation.faults import Fault
from gradveil.task import Task
from gradveil.update import LocalSteps

OPTIMISERS = ("sgd", "adam")
SCHEDULES = ("constant", "step", "cosine")
MILESTONES = (0.5, 0.75)
"""After each of these shares of the rounds, ``schedule="step"`` divides the learning rate by ten."""


@dataclass(frozen=True)
class Training:
    """How a federation trains: FedSGD, or FedAvg with `local` steps, and a server that optimises with what arrives.

    Args:
        rounds: number of rounds.
        clients: number of clients that share the training images.
        clients_per_round: clients drawn each round; None: all of them.
        batch_size: images that a client draws from its own each round; its local steps go over these.
        lr: the server's learning rate on the aggregated update.
        momentum: the server's momentum; Adam's first decay rate.
        optimiser: the server's optimiser: ``"sgd"`` or ``"adam"``.
        schedule: how the server's learning rate changes: ``"constant"``; ``"step"``, a tenth after each of
            `MILESTONES`; ``"cosine"``, down to 0 after the last round.
        scheme: how images are dealt out: ``"iid"``, ``"dirichlet"`` or ``"classes"``.
        alpha: concentration of ``"dirichlet"``.
        classes_per_client: how many classes each client holds under ``"classes"``.
        local: local steps (FedAvg); None: one gradient per round (FedSGD).
        evaluate_every: rounds between evaluations; None: only at the end.
        checkpoint_every: rounds between checkpoints, if a folder for them is given.
        seed: everything random derives from it.

    Example:
        >>> training = Training(rounds=4, clients=4, lr=0.1, schedule="cosine")
        >>> [round(training.learning_rate(number), 3) for number in range(4)]
        [0.1, 0.085, 0.05, 0.015]
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
    optimiser: str = "sgd"
    schedule: str = "constant"
    checkpoint_every: int = 10

    def __post_init__(self) -> None:
        for name in ("rounds", "clients", "batch_size", "checkpoint_every"):
            checks.integer("train", name, getattr(self, name), low=1)
        checks.number("train", "lr", self.lr, above=0)
        checks.number("train", "momentum", self.momentum, low=0, below=1)
        if self.clients_per_round is not None:
            checks.integer("train", "clients_per_round", self.clients_per_round, low=1, high=self.clients)
        if self.evaluate_every is not None:
            checks.integer("train", "evaluate_every", self.evaluate_every, low=1)
        checks.choice("train", "optimiser", self.optimiser, OPTIMISERS)
        checks.choice("train", "schedule", self.schedule, SCHEDULES)

    @property
    def drawn_clients(self) -> int:
        """Clients drawn each round."""
        return self.clients if self.clients_per_round is None else self.clients_per_round

    def evaluates_after(self, done: int) -> bool:
        """Whether accuracy is measured after `done` rounds; after the last one it always is, separately."""
        return self.evaluate_every is not None and done % self.evaluate_every == 0 and done < self.rounds

    def learning_rate(self, number: int) -> float:
        """The server's learning rate in round `number`, counted from 0."""
        done = number / self.rounds
        if self.schedule == "step":
            return self.lr * 0.1 ** sum(done >= milestone for milestone in MILESTONES)
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * done)) / 2
        return self.lr


def choose_clients(training: Training, number: int) -> list[int]:
    """The clients of round `number`, in the order in which they are asked."""
    order = torch.randperm(training.clients, generator=derived_generator(training.seed, "clients", number))
    chosen: list[int] = order[: training.clients_per_round].tolist()
    return chosen


@dataclass(frozen=True)
class RoundRecord:
    """What was measured in one round.

    Args:
        round: its number, from 0.
        clients: how many clients' updates were averaged.
        loss: mean training loss on examples that the clients drew (at most `job.LOSS_EXAMPLES`), before the step.
        accuracy: on the test images after the step, if the round was evaluated.
        gradient_seconds: time for the clients' gradients or local steps. If the defense computes the gradients of every
            step itself, it is the time that undefended clients would have taken.
        defense_seconds: time that the defense added.
        aggregation_seconds: time on the server: aggregation and step.
        upload_bytes: mean bytes that a client sent.
        download_bytes: mean bytes that a client got back.

    Example:
        >>> RoundRecord(0, 10, 2.3, None, 0.2, 0.01, 0.01, 80_000.0, 80_000.0).seconds
        0.22
    """

    round: int
    clients: int
    loss: float
    accuracy: float | None
    gradient_seconds: float
    defense_seconds: float
    aggregation_seconds: float
    upload_bytes: float
    download_bytes: float

    @property
    def seconds(self) -> float:
        """Time of the round without encoding, evaluation and checkpoints."""
        return round(self.gradient_seconds + self.defense_seconds + self.aggregation_seconds, 9)


TIMES = ("gradient_seconds", "defense_seconds", "aggregation_seconds")
"""The parts of a round's time."""


def history_of(records: Iterable[RoundRecord]) -> list[tuple[int, float]]:
    """(rounds done, accuracy) at each evaluation.

    >>> history_of([RoundRecord(0, 10, 2.3, None, 0, 0, 0, 0, 0), RoundRecord(1, 10, 2.0, 0.5, 0, 0, 0, 0, 0)])
    [(2, 0.5)]
    """
    return [(record.round + 1, record.accuracy) for record in records if record.accuracy is not None]


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training run.

    Args:
        task: the task at the trained weights.
        accuracy: on the test images, in [0, 1]; NaN for a task without classes.
        loss: on the test images.
        round_seconds: mean time of a round after the first: gradients, defense, aggregation; not encoding, not
            evaluation.
        upload_bytes: mean encoded bytes that a client sends: its update, and what it announces.
        download_bytes: mean encoded bytes that a client gets back: the aggregate, and what another client announced.
        history: (rounds done, accuracy) at each evaluation.
        diverged: the round in which the training was stopped, because no client's gradients were finite, or the new
            weights were not, or because the loss had grown; else None.
        privacy: the (epsilon, delta) of the client that spent most; None: the defense carries no such guarantee.
        rounds: what was measured in each round.
        gradient_seconds, defense_seconds, aggregation_seconds: means over the same rounds, see `RoundRecord`.
        faults: everything that clients did wrong; none of it was averaged.
        execution: how the clients' updates were computed, see `gradveil.federation._clients`.

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
    rounds: list[RoundRecord] = field(default_factory=list)
    gradient_seconds: float = math.nan
    defense_seconds: float = math.nan
    aggregation_seconds: float = math.nan
    faults: list[Fault] = field(default_factory=list)
    execution: str = "loop"

    @property
    def fault_counts(self) -> dict[str, int]:
        """How often each kind of fault happened."""
        return dict(Counter(fault.kind for fault in self.faults))
