"""The contract of an attack: what it is given, what it may know, what it returns."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil import checks
from gradveil.attacks.adaptive import find_knowledge
from gradveil.attacks.engine import Course, Progress, Solution
from gradveil.attacks.labels import check_inferable, infer_labels
from gradveil.defenses import Defense
from gradveil.defenses.knowledge import Knowledge
from gradveil.errors import InputError, ParameterError, ThreatModelError
from gradveil.randomness import fresh_generator
from gradveil.registry import Method, Registry
from gradveil.task import Gradients, Task
from gradveil.update import LocalSteps, Rounds, Update

ATTACKS: Registry["Attack"] = Registry("attack")


@dataclass(frozen=True)
class ThreatModel:
    """What the attacker knows besides the model and the updates.

    Args:
        labels: ``"infer"``: the attacker must find the labels; ``"known"``: they are given in `known_labels`.
        batch_size: images behind each update.
        adaptive: the attacker knows which defense is used and with which parameters, but not its random draws; the name
            of a form (see `Defense.adapt`) asks for that one in place of the strongest.
        defense: the defense in use.
        local: the clients' local steps (FedAvg); None: each update is a single gradient.
        server: ``"passive"``: an honest but curious server; ``"active"``: it may change the model.
        known_labels: ``[victims, batch_size]``, only with ``labels="known"``.
        statistics: batch-norm buffers after the victims' step, ``[victims, ...]`` by name, if the attacker sees them
            (they travel in ``update.meta.buffers``); None: it does not.
        rounds: how many rounds of each victim, on the same data, the attacker saw (see `gradveil.Rounds`).

    Example:
        >>> ThreatModel(labels="known", known_labels=torch.tensor([[7], [2]])).batch_size
        1
    """

    labels: str = "infer"
    batch_size: int = 1
    adaptive: bool | str = False
    defense: Defense | None = None
    local: LocalSteps | None = None
    server: str = "passive"
    known_labels: Tensor | None = None
    statistics: dict[str, Tensor] | None = None
    rounds: int = 1

    def __post_init__(self) -> None:
        checks.choice("ThreatModel", "labels", self.labels, ["infer", "known"])
        checks.choice("ThreatModel", "server", self.server, ["passive", "active"])
        checks.integer("ThreatModel", "batch_size", self.batch_size, low=1)
        checks.integer("ThreatModel", "rounds", self.rounds, low=1)
        if not isinstance(self.adaptive, str):
            checks.flag("ThreatModel", "adaptive", self.adaptive)
        if (self.labels == "known") != (self.known_labels is not None):
            raise ParameterError(
                f"ThreatModel: known_labels must be given exactly when labels='known', got labels={self.labels!r} "
                f"and {'no' if self.known_labels is None else 'some'} known_labels"
            )


@dataclass(frozen=True)
class Reconstruction:
    """What an attack got out of updates.

    Args:
        inputs: ``[victims, images, *input_shape]`` in the attacker's own scale (it may leave [0, 1]).
        labels: ``[victims, images]``, inferred or known.
        loss: ``[victims]``, the attacker's own objective, by which it chose this result.
        iterations: ``[victims]``, steps taken.
        seconds: wall time of the whole call.
        execution: how the victims were evaluated: ``"loop"``, ``"batch"`` or ``"compile"``.
        interrupted: True if Ctrl-C ended the search; then this is the best so far.
        ambiguous_labels: ``[victims]``, True where the inferred label counts were not clear; False where labels were
            known, or found by the attack itself.
        certain: ``[victims, images]``, True where the attacker itself knows that it has one image and not a mixture;
            None if the attack cannot tell.
        course: how the search went; None: there was none.

    Example:
        >>> empty = torch.zeros(2, 1, 3, 8, 8)
        >>> Reconstruction(empty, torch.zeros(2, 1), torch.zeros(2), torch.zeros(2), 0.0).inputs.shape
        torch.Size([2, 1, 3, 8, 8])
    """

    inputs: Tensor
    labels: Tensor
    loss: Tensor
    iterations: Tensor
    seconds: float
    execution: str = "loop"
    interrupted: bool = False
    ambiguous_labels: Tensor | None = None
    certain: Tensor | None = None
    course: Course | None = None


@dataclass(frozen=True)
class Found:
    """What `Attack.run` returns.

    Args:
        inputs: ``[victims, images, *input_shape]``.
        solution: losses and iterations of the optimiser.
        execution: how the victims were evaluated.
        labels: ``[victims, images]`` in the order of the inputs.
        certain: ``[victims, images]``, where the attack can tell one image from a mixture.
    """

    inputs: Tensor
    solution: Solution
    execution: str
    labels: Tensor
    certain: Tensor | None = None


class Attack(Method, ABC):
    """Recovers training data from updates.

    A new attack is one file: a dataclass registered with ``@ATTACKS.register(name)`` whose fields are its parameters,
    checked in ``__post_init__``, and which implements `run`. It gets the task, the updates, the labels and the threat
    model: never the data.
    """

    factory = "gradveil.attack"
    server: ClassVar[str] = "passive"  # "active": the attack changes the model, see `modify`
    adapts: ClassVar[bool] = False  # True: uses several rounds and knowledge of the defense, see `Targets`
    finds_labels: ClassVar[bool] = False  # True: `run` finds the labels itself and is given zeros

    def modify(
        self, task: Task, *, public: tuple[Tensor, Tensor] | None = None, generator: torch.Generator | None = None
    ) -> Task:
        """What an active server makes of the model before it sends it out; honest clients then train that task.

        Args:
            task: the model as it should be.
            public: images and labels the server may look at; none of them is a client's.
            generator: the server's randomness; default: fresh entropy.
        """
        return task

    def for_client(self, task: Task, client: int) -> Task:
        """The modified task with the weights that client number `client` is sent; most attacks treat all alike."""
        return task

    def reconstruct(
        self,
        task: Task,
        updates: Mapping[str, Tensor] | Rounds | Sequence[Mapping[str, Tensor] | Rounds],
        threat: ThreatModel,
        *,
        generator: torch.Generator | None = None,
        progress: Progress | None = None,
        execution: str = "auto",
    ) -> Reconstruction:
        """Attack one update, or a list of independent victims together.

        Args:
            task: the model at the weights the victims saw, in the first round if there are several.
            updates: what the server saw of each victim: an update (a plain mapping of gradients is one too), or
                several rounds of it.
            threat: what the attacker may know and use.
            generator: the attacker's randomness (starting points); default: fresh entropy.
            progress: called with (steps done, steps in all, seconds left).
            execution: ``"loop"``, ``"batch"``, ``"compile-loop"``, ``"compile"``, or ``"auto"``: whichever is faster,
                found by timing.
        """
        started = time.perf_counter()
        rounds = _by_round(self.name, task, updates, threat)
        for stage, seen in rounds:
            for update in seen:
                _check_update(self.name, stage, update, threat)
        self.check_threat(task, threat)
        knowledge = find_knowledge(self.name, threat.defense, threat.adaptive, task, threat.batch_size, threat.local)
        # What secure aggregation shows is a sum; of m batches, it is m times the gradient of all their images.
        rounds = [(stage, [_mean_of(update) for update in seen]) for stage, seen in rounds]
        victims = rounds[0][1]
        ambiguous = torch.zeros(len(victims), dtype=torch.bool)
        if self.finds_labels and threat.known_labels is None:
            labels = torch.zeros(len(victims), threat.batch_size, dtype=torch.long, device=task.device)
        elif threat.known_labels is None:
            guesses = [infer_labels(task, update, threat.batch_size, threat.local) for update in victims]
            labels = torch.stack([guess.labels for guess in guesses])
            ambiguous = torch.tensor([guess.ambiguous for guess in guesses])
        else:
            labels = threat.known_labels.to(task.device)
            if labels.shape != (len(victims), threat.batch_size):
                raise InputError(
                    f"{self.name}: known_labels must have shape [{len(victims)}, {threat.batch_size}] "
                    f"(victims, batch size), got {list(labels.shape)}"
                )
            classes = task.single_classes(self.name)
            if labels.min() < 0 or labels.max() >= classes:
                raise InputError(
                    f"{self.name}: known_labels must lie in 0 to {classes - 1}, got {int(labels.min())} to "
                    f"{int(labels.max())}"
                )
        generator = generator or fresh_generator(task.device)
        stacked = [
            (stage, {name: torch.stack([update[name] for update in seen]) for name in task.parameters})
            for stage, seen in rounds
        ]
        if knowledge and knowledge.before:
            stacked = [(stage, knowledge.before(stage, seen, generator)) for stage, seen in stacked]
        targets = Targets(stacked, knowledge if knowledge and knowledge.changes_matching else None)
        if targets.knowledge and targets.knowledge.draw:
            execution = "loop"  # a defense's own code cannot be vmapped
        found = self.run(task, targets, labels, threat, generator, progress, execution)
        inputs = found.inputs.to(task.dtype)
        if knowledge and knowledge.after:
            inputs = knowledge.after(inputs.flatten(0, 1)).view_as(inputs)
        return Reconstruction(
            inputs=inputs,
            labels=found.labels,
            ambiguous_labels=ambiguous,
            loss=found.solution.losses,
            iterations=found.solution.iterations,
            seconds=time.perf_counter() - started,
            execution=found.execution,
            interrupted=found.solution.interrupted,
            certain=found.certain,
            course=found.solution.course,
        )

    @abstractmethod
    def run(
        self,
        task: Task,
        targets: "Targets",
        labels: Tensor,
        threat: ThreatModel,
        generator: torch.Generator,
        progress: Progress | None,
        execution: str,
    ) -> Found:
        """Search for the inputs behind the updates.

        Args:
            task: the model at the weights the victims saw.
            targets: the updates, ``[victims, *parameter shape]`` by name; with the further rounds and the knowledge of
                the defense, if there are any, which `matching.match` makes use of.
            labels: ``[victims, images]``.
            threat: what the attacker may know and use.
            generator: the attacker's randomness.
            progress: called with (steps done, steps in all, seconds left).
            execution: how to evaluate the victims, see `engine.Objective`.
        """

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Refuse what this attack cannot do or needs but is not granted."""
        if not self.adapts and (threat.adaptive or threat.rounds > 1):
            raise ThreatModelError(
                f"{self.name}: uses neither knowledge of the defense nor several rounds, got "
                f"adaptive={threat.adaptive} and rounds={threat.rounds}; use ThreatModel(adaptive=False, rounds=1) "
                "or a gradient-matching attack"
            )
        if self.server == "active" and threat.server != "active":
            raise ThreatModelError(
                f"{self.name}: changes the model, which a passive server does not; use ThreatModel(server='active')"
            )
        if threat.labels == "infer" and not self.finds_labels:
            check_inferable(self.name, task)


class Targets(dict[str, Tensor]):
    """The updates to match, ``[victims, ...]`` by name, and what else an attacker may have.

    As a dict it holds the first round, which is all that most attacks look at.

    Args:
        rounds: each round's task and its updates; the same victims in the same order.
        knowledge: how candidates are judged by someone who knows the defense; None: by the plain attack.

    Example:
        >>> task = Task(torch.nn.Linear(2, 2), input_shape=(2,), classes=2)
        >>> list(Targets([(task, {"weight": torch.zeros(1, 2, 2)})]))
        ['weight']
    """

    def __init__(self, rounds: Sequence[tuple[Task, Gradients]], knowledge: Knowledge | None = None) -> None:
        super().__init__(rounds[0][1])
        self.rounds, self.knowledge = list(rounds), knowledge


def _by_round(
    owner: str,
    task: Task,
    updates: Mapping[str, Tensor] | Rounds | Sequence[Mapping[str, Tensor] | Rounds],
    threat: ThreatModel,
) -> list[tuple[Task, list[Update]]]:
    """Each round's task and its updates, one a victim."""
    victims = [updates] if isinstance(updates, Mapping | Rounds) else list(updates)
    if not victims:
        raise InputError(f"{owner}: expected at least one update, got none")
    seen = [victim if isinstance(victim, Rounds) else Rounds([(task, victim)]) for victim in victims]
    if any(len(rounds) != threat.rounds for rounds in seen):
        raise ThreatModelError(
            f"{owner}: the threat model says that {threat.rounds} rounds of each victim were seen, got "
            f"{sorted({len(rounds) for rounds in seen})}; make them agree"
        )
    tasks = [task, *(stage for stage, _ in seen[0][1:])]
    for rounds in seen:
        for number, ((stage, _), expected) in enumerate(zip(rounds, tasks, strict=True)):
            if not _same_weights(stage, expected):
                raise InputError(
                    f"{owner}: all victims must have been sent the same weights in round {number}, and in the first "
                    "those of `task`; attack victims with other weights one by one"
                )
    return [(stage, [rounds[number][1] for rounds in seen]) for number, stage in enumerate(tasks)]


def _same_weights(one: Task, other: Task) -> bool:
    return one is other or (
        one.parameters.keys() == other.parameters.keys()
        and all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())
    )


def _mean_of(update: Update) -> Update:
    if update.meta.clients == 1:
        return update
    return Update({name: value / update.meta.clients for name, value in update.items()}, update.meta)


def _check_update(owner: str, task: Task, update: Update, threat: ThreatModel) -> None:
    if update.meta.samples and (update.meta.samples, update.meta.local) != (threat.batch_size, threat.local):
        raise ThreatModelError(
            f"{owner}: the update comes from {update.meta.samples} images and local steps {update.meta.local}, but the "
            f"threat model says {threat.batch_size} and {threat.local}; make them agree"
        )
    expected = {name: tuple(value.shape) for name, value in task.parameters.items()}
    got = {name: tuple(value.shape) for name, value in update.items()}
    if got != expected:
        wrong = next(name for name in {**expected, **got} if expected.get(name) != got.get(name))
        raise InputError(
            f"{owner}: the update does not fit the model: layer {wrong!r} should have shape {expected.get(wrong)}, "
            f"got {got.get(wrong)}"
        )
    for name, value in update.items():
        if not torch.isfinite(value).all():
            raise InputError(f"{owner}: the update must be finite, got NaN or Inf in {name!r}")
