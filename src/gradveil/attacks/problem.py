"""What an attack is given: everything the attacker sees and may know, but never the data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.core.tensors import first_mismatch
from gradveil.defenses.base import Batch
from gradveil.defenses.knowledge import Knowledge
from gradveil.modality import Modality
from gradveil.task import Gradients, Task
from gradveil.update import Rounds, Update

Progress = Callable[[int, int, float], None] | None
"""Called with (steps done, total steps, seconds left) after every step; None: no progress is reported."""

Observed = Mapping[str, Tensor] | Rounds | Sequence[Mapping[str, Tensor] | Rounds]
"""What the server saw of one victim or several: an update (a plain mapping of gradients will do), or rounds."""


@dataclass(frozen=True)
class Problem:
    """The updates to attack, and what else the attacker has.

    Args:
        rounds: for each observed round, the task at the weights the victims were sent, and the updates
            ``[victims, ...]`` by name; the victims and their order are the same in every round.
        labels: ``[victims, examples, ...]``, known or inferred; zeros for an attack that finds them itself.
        threat: what the attacker may know and use.
        generator: the attacker's randomness.
        knowledge: how an adaptive attacker uses its knowledge of the defense; None: the plain attack.
        ambiguous_labels: ``[victims]``, True if the inferred labels are ambiguous.
        progress: called with (steps done, total steps, seconds left).
        execution: how to evaluate the victims, see `matching.Objective`.
        candidates: inputs ``[N, *input_shape]`` and labels ``[N, ...]``, some of which may be the victims', for an
            attack that scores candidates; None: there are none.
        among: ``[victims, questions, N]``, True for the candidates that each question is about, see `Attack.identify`;
            None: there is one question, about all.

    Example:
        >>> task = Task(torch.nn.Linear(2, 2), input_shape=(2,), classes=2)
        >>> updates = {"weight": torch.zeros(3, 2, 2), "bias": torch.zeros(3, 2)}
        >>> problem = Problem([(task, updates)], torch.zeros(3, 1), ThreatModel(), torch.Generator())
        >>> problem.victims, problem.examples
        (3, 1)
    """

    rounds: Sequence[tuple[Task, Gradients]]
    labels: Tensor
    threat: ThreatModel
    generator: torch.Generator
    knowledge: Knowledge | None = None
    ambiguous_labels: Tensor | None = None
    progress: Progress = None
    execution: str = "auto"
    candidates: Batch | None = None
    among: Tensor | None = None

    @property
    def task(self) -> Task:
        """The model at the weights the victims were sent, in the first round if there are several."""
        return self.rounds[0][0]

    @property
    def updates(self) -> Gradients:
        """The updates of the first round, ``[victims, *parameter shape]`` by name."""
        return self.rounds[0][1]

    @property
    def modality(self) -> Modality:
        """The modality of the inputs."""
        return self.task.modality

    @property
    def public(self) -> Batch:
        """Inputs and labels that anybody may have; refused if the threat model does not grant them."""
        return granted_public("this attack", self.task, self.threat)

    @property
    def victims(self) -> int:
        """The number of victims."""
        return len(self.labels)

    @property
    def examples(self) -> int:
        """The number of examples behind each update."""
        return self.labels.shape[1]

    def start(self, *seeds: int, dtype: torch.dtype | None = None) -> Tensor:
        """Starting points for a search, ``[victims, *seeds, examples, *input_shape]``, drawn by the modality."""
        shape = (self.victims, *seeds, self.examples, *self.task.input_shape)
        start = self.modality.start(shape, self.generator, dtype=dtype or self.task.dtype, device=self.task.device)
        return self.modality.informed(start, self.updates)


def granted_public(owner: str, task: Task, threat: ThreatModel) -> Batch:
    """The public data, checked, on the task's device and in its precision; refused if none is granted."""
    if threat.public is None:
        raise ThreatModelError(
            f"{owner}: needs public data, which this threat model does not grant; "
            "use ThreatModel(public=(inputs, labels))"
        )
    inputs, labels = threat.public[0].to(task.device, task.dtype), threat.public[1].to(task.device)
    task.check(inputs, labels)
    return inputs, labels


def granted_attributes(owner: str, threat: ThreatModel) -> Tensor:
    """The attributes of the public examples, whole numbers from 0; refused if they are not granted or do not fit.

    Args:
        owner: the caller's name, for error messages.
        threat: what the attacker may know; its public data were granted.
    """
    attributes = threat.public_attributes
    assert threat.public is not None
    if attributes is None:
        raise ThreatModelError(
            f"{owner}: needs the attribute of every public example, which this threat model does not grant; use "
            "ThreatModel(public=(inputs, labels), public_attributes=attributes)"
        )
    count = len(threat.public[0])
    if attributes.shape != (count,) or attributes.dtype != torch.long or int(attributes.min()) < 0:
        raise InputError(
            f"{owner}: public_attributes must be {count} whole numbers from 0, one for each public example, got shape "
            f"{list(attributes.shape)} of {attributes.dtype}"
        )
    if len(torch.unique(attributes)) < 2:
        raise InputError(
            f"{owner}: expected public examples with two attributes or more, got only {int(attributes[0])}; there is "
            "nothing to infer"
        )
    return attributes.to(threat.public[0].device)


def known_members(owner: str, task: Task, threat: ThreatModel, victims: int) -> tuple[Tensor, Tensor, Tensor]:
    """Examples whose membership the attacker knows, on the task's device; refused if there are none or they do not fit.

    Args:
        owner: the caller's name, for error messages.
        task: the model and its loss.
        threat: what the attacker may know.
        victims: how many victims are attacked.
    """
    if threat.known_members is None:
        raise ThreatModelError(
            f"{owner}: learns from examples whose membership is known, which this threat model does not grant; use "
            "ThreatModel(known_members=(inputs, labels, members)) or another form"
        )
    inputs, labels, members = (part.to(task.device) for part in threat.known_members)
    inputs = inputs.to(task.dtype)
    try:
        task.check(inputs, labels)
    except InputError as error:
        raise InputError(f"{owner}: the known members do not fit the model: {error}") from error
    if members.shape != (victims, len(inputs)) or members.dtype != torch.bool:
        raise InputError(
            f"{owner}: the mask of known members must have shape {[victims, len(inputs)]} and be boolean, got "
            f"{list(members.shape)} of {members.dtype}"
        )
    if not members.any() or members.all():
        raise InputError(
            f"{owner}: expected known members and known others, got {int(members.sum())} members of {members.numel()}"
        )
    return inputs, labels, members


def checked_candidates(owner: str, task: Task, candidates: Batch, batch_size: int) -> Batch:
    """The candidates on the task's device and in its precision; refused if they do not fit the task or are too few.

    Args:
        owner: the caller's name, for error messages.
        task: the model and its loss.
        candidates: inputs and labels.
        batch_size: examples behind each update.
    """
    inputs, labels = candidates[0].to(task.device, task.dtype), candidates[1].to(task.device)
    if inputs.ndim and len(inputs) < max(2, batch_size):
        raise InputError(
            f"{owner}: expected at least {max(2, batch_size)} candidates for updates of {batch_size} "
            f"{task.modality.unit}s, got {len(inputs)}; add some that are not the victims'"
        )
    try:
        task.check(inputs, labels)
    except InputError as error:
        raise InputError(f"{owner}: the candidates do not fit the model: {error}") from error
    return inputs, labels


def checked_questions(owner: str, among: Tensor, victims: int, candidates: int) -> Tensor:
    """The candidates that each question about each victim is about; refused if they do not fit, or are too few.

    Args:
        owner: the caller's name, for error messages.
        among: see `Problem`.
        victims: how many victims there are.
        candidates: how many candidates there are.
    """
    if among.dtype != torch.bool or among.ndim != 3 or among.shape[::2] != (victims, candidates) or not among.shape[1]:
        raise InputError(
            f"{owner}: expected among=[victims, questions, candidates] of booleans for {victims} victims and "
            f"{candidates} candidates, got shape {list(among.shape)} of {among.dtype}"
        )
    if (fewest := int(among.sum(2).min())) < 2:
        raise InputError(f"{owner}: expected questions about at least two candidates, got one about {fewest}")
    return among


def observed_rounds(owner: str, task: Task, updates: Observed, threat: ThreatModel) -> list[tuple[Task, list[Update]]]:
    """Each round's task and its updates, one per victim; refused if they do not fit each other or the threat model.

    Args:
        owner: the caller's name, for error messages.
        task: the model at the weights the victims were sent, in the first round if there are several.
        updates: those of one victim or of several.
        threat: what the attacker may know.
    """
    victims = [updates] if isinstance(updates, Mapping | Rounds) else list(updates)
    if not victims:
        raise InputError(f"{owner}: expected at least one update, got none")
    by_victim = [victim if isinstance(victim, Rounds) else Rounds([(task, victim)]) for victim in victims]
    if any(len(rounds) != threat.rounds for rounds in by_victim):
        raise ThreatModelError(
            f"{owner}: the threat model says that {threat.rounds} rounds of each victim were seen, got "
            f"{sorted({len(rounds) for rounds in by_victim})}; make them agree"
        )
    tasks = [task, *(later_task for later_task, _ in by_victim[0][1:])]
    for rounds in by_victim:
        for number, ((sent, update), expected) in enumerate(zip(rounds, tasks, strict=True)):
            if not _same_weights(sent, expected):
                raise InputError(
                    f"{owner}: all victims must have been sent the same weights in round {number}, and in the first "
                    "round those of `task`; attack victims with other weights one by one"
                )
            _check_update(owner, expected, update, threat)
    # Secure aggregation shows a sum. The sum of m clients' gradients is m times the gradient over all their examples.
    return [
        (round_task, [_mean_of(rounds[number][1]) for rounds in by_victim]) for number, round_task in enumerate(tasks)
    ]


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
            f"{owner}: the update comes from {update.meta.samples} {task.modality.unit}s and local steps "
            f"{update.meta.local}, but the threat model says {threat.batch_size} and {threat.local}; make them agree"
        )
    if mismatch := first_mismatch(task.parameters, update):
        layer, expected, got = mismatch
        raise InputError(
            f"{owner}: the update does not fit the model: layer {layer!r} should have shape {expected}, got {got}"
        )
    for name, value in update.items():
        if not torch.isfinite(value).all():
            raise InputError(f"{owner}: the update must be finite, got NaN or Inf in {name!r}")
