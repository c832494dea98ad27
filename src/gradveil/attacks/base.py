"""The interface of an attack: it takes a problem and returns findings."""

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from gradveil.attacks._adaptive import find_knowledge
from gradveil.attacks._labels import check_inferable, find_labels
from gradveil.attacks._learned import Learning, learned_once
from gradveil.attacks._restarts import best_of
from gradveil.attacks.findings import Attributes, Findings, Identification, Membership, Reconstruction
from gradveil.attacks.problem import (
    Observed,
    Problem,
    Progress,
    checked_candidates,
    checked_questions,
    granted_public,
    observed_rounds,
)
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ThreatModelError
from gradveil.core.parameters import has_all_state, state_fields
from gradveil.core.randomness import fresh_generator
from gradveil.core.registry import Method, Registry
from gradveil.core.timing import timed
from gradveil.defenses.base import Batch
from gradveil.task import Task

ATTACKS: Registry["Attack"] = Registry("attack", "gradveil.attacks")

F = TypeVar("F", bound=Findings)

_CALLS: dict[type[Findings], str] = {
    Reconstruction: "reconstruct(task, updates, threat)",
    Identification: "identify(task, updates, candidates, threat)",
    Membership: "find_members(task, updates, candidates, threat)",
    Attributes: "infer(task, updates, threat)",
}
"""How users call an attack, by what it finds."""


class Attack(Method, ABC):
    """Recovers training data from updates.

    A new attack is one file: a frozen dataclass registered with ``@ATTACKS.register(name)``. Its fields are its
    parameters, declared with `gradveil.core.parameters`, and it implements `run`, which gets a `Problem` but never
    the data.
    """

    factory = "gradveil.attack"
    server: ClassVar[str] = "passive"  # "active": the attack changes the model, see `modify`
    adapts: ClassVar[bool] = False  # True: uses several rounds and knowledge of the defense
    finds_labels: ClassVar[bool] = False  # True: `run` finds the labels itself, so `Problem.labels` holds zeros
    needs_public: ClassVar[bool] = False  # True: refused unless the threat model grants public data
    uses_public: ClassVar[bool] = False  # True: does better with public data, but works without
    learning_victims: ClassVar[float] = 150  # roughly: learning takes as long as attacking so many; audits plan with it
    finds: ClassVar[type[Findings]] = Reconstruction  # what `run` returns, which decides how it is called
    takes_questions: ClassVar[bool] = False  # True: answers questions about some of the candidates, `Problem.among`
    simulates: ClassVar[bool] = False  # True: learned from simulated updates, so it sees raw ones and no `Knowledge`
    restarts: int = 1  # number of starting points; an attack may declare a parameter of this name

    @property
    def takes_public(self) -> bool:
        """Whether it learns from public data if the threat model grants any."""
        return self.needs_public or self.uses_public

    def budgeted(self, victims: int) -> tuple[float, float] | None:
        """Nominal seconds that learning, and attacking so many victims, take; None if it does not budget its work."""
        return None

    @abstractmethod
    def run(self, problem: Problem) -> Findings:
        """Recover what the updates give away."""

    def fit(
        self,
        task: Task,
        threat: ThreatModel,
        *,
        generator: torch.Generator | None = None,
        progress: Progress = None,
        cache: Path | None = None,
    ) -> Self:
        """Return a copy of the attack that has learned what it needs; most attacks have nothing to learn.

        Args:
            task: the model that the victims will be sent.
            threat: what the attacker may know, including the public data it may learn from.
            generator: the attacker's randomness; default: fresh entropy.
            progress: called with (steps done, total steps, seconds left).
            cache: a folder of the user's own in which what is learned is kept and found again, also what an interrupted
                attempt has learned so far; None: nothing is kept.
        """
        threat = threat.as_known()
        self.check_threat(task, threat)
        if threat.public is not None:
            threat = replace(threat, public=granted_public(self.name, task, threat))
        learning = Learning(generator or fresh_generator(task.device), progress)
        learn = partial(self.learn, task, threat)
        if cache is None or threat.public is None or not state_fields(self):
            return learn(learning)
        return learned_once(self, task, threat, learning, cache, learn)

    def learn(self, task: Task, threat: ThreatModel, learning: Learning) -> Self:
        """Do the learning for `fit`: return a copy whose `parameters.state` fields hold what was learned."""
        return self

    def modify(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Task:
        """Modify the model as an active server does before sending it out; honest clients then train the result.

        Args:
            task: the unmodified model.
            public: inputs and labels the server may use; none of them is a client's.
            generator: the server's randomness; default: fresh entropy.
        """
        return task

    def for_client(self, task: Task, client: int) -> Task:
        """The modified task with the weights sent to client number `client`; most attacks send everyone the same."""
        return task

    def reconstruct(
        self,
        task: Task,
        updates: Observed,
        threat: ThreatModel,
        *,
        generator: torch.Generator | None = None,
        progress: Progress = None,
        execution: str = "auto",
    ) -> Reconstruction:
        """Attack one update, or several independent victims together.

        Args:
            task: the model at the weights the victims were sent, in the first round if there are several.
            updates: what the server saw of each victim: an update (a plain mapping of gradients will do), or several
                rounds of updates.
            threat: what the attacker may know and use.
            generator: the attacker's randomness (starting points); default: fresh entropy.
            progress: called with (steps done, total steps, seconds left).
            execution: ``"loop"``, ``"batch"``, ``"compile-loop"``, ``"compile"``, or ``"auto"``: whichever is fastest
                when timed.
        """
        self._check_finds(Reconstruction)
        with timed(task.device) as took:
            problem = self.pose(task, updates, threat, generator or fresh_generator(task.device))
            knowledge = problem.knowledge
            if knowledge and knowledge.draw:
                execution = "loop"  # a defense's own code cannot be vmapped
            found = best_of(
                self.restarts,
                partial(self._found, Reconstruction),
                replace(problem, progress=progress, execution=execution),
            )
            inputs = found.inputs.to(task.dtype)
            if knowledge and knowledge.after:
                inputs = knowledge.after(inputs.flatten(0, 1)).view_as(inputs)
            inputs = problem.modality.decode(inputs)
        return replace(found, inputs=inputs, ambiguous_labels=problem.ambiguous_labels, seconds=took.seconds)

    def identify(
        self,
        task: Task,
        updates: Observed,
        candidates: Batch,
        threat: ThreatModel,
        *,
        among: Tensor | None = None,
        generator: torch.Generator | None = None,
        progress: Progress = None,
    ) -> Identification:
        """Say how likely each candidate is to be among the examples behind an update, or behind each of several.

        Several questions about the same updates cost less than as many calls: candidates' gradients serve all.

        Args:
            task: the model at the weights the victims were sent, in the first round if there are several.
            updates: what the server saw of each victim, as for `reconstruct`.
            candidates: inputs ``[N, *input_shape]`` and labels ``[N, ...]``, the same for all victims.
            threat: what the attacker may know and use.
            among: ``[victims, questions, N]``, True for the candidates that each question is about; it is answered as
                if there were no others. None: one question, about all of them.
            generator: the attacker's randomness; default: fresh entropy.
            progress: called with (steps done, total steps, seconds left).
        """
        if among is not None and not self.takes_questions:
            raise ThreatModelError(f"{self.name}: takes no questions about some of the candidates; leave out among=")
        return self._score(Identification, task, updates, candidates, threat, generator, progress, among)

    def find_members(
        self,
        task: Task,
        updates: Observed,
        candidates: Batch,
        threat: ThreatModel,
        *,
        generator: torch.Generator | None = None,
        progress: Progress = None,
    ) -> Membership:
        """Say how likely each candidate is to be in the data that a client trained on, in any of the observed rounds.

        Args:
            task: the model at the weights the victims were sent, in the first round if there are several.
            updates: what the server saw of each victim, as for `reconstruct`; usually several rounds of each.
            candidates: inputs ``[N, *input_shape]`` and labels ``[N, ...]``, the same for all victims.
            threat: what the attacker may know and use.
            generator: the attacker's randomness; default: fresh entropy.
            progress: called with (steps done, total steps, seconds left).
        """
        return self._score(Membership, task, updates, candidates, threat, generator, progress)

    def infer(
        self,
        task: Task,
        updates: Observed,
        threat: ThreatModel,
        *,
        generator: torch.Generator | None = None,
        progress: Progress = None,
    ) -> Attributes:
        """Say which attribute, a property that is not the label, the examples behind each update have.

        Args:
            task: the model at the weights the victims were sent.
            updates: what the server saw of each victim, as for `reconstruct`.
            threat: what the attacker may know and use, with which the attack was fitted.
            generator: the attacker's randomness; default: fresh entropy.
            progress: called with (steps done, total steps, seconds left).
        """
        self._check_finds(Attributes)
        with timed(task.device) as took:
            problem = self.pose(task, updates, threat, generator or fresh_generator(task.device))
            found = self._found(Attributes, replace(problem, progress=progress))
        return replace(found, seconds=took.seconds)

    def _score(
        self,
        kind: type[F],
        task: Task,
        updates: Observed,
        candidates: Batch,
        threat: ThreatModel,
        generator: torch.Generator | None,
        progress: Progress,
        among: Tensor | None = None,
    ) -> F:
        self._check_finds(kind)
        with timed(task.device) as took:
            problem = self.pose(task, updates, threat, generator or fresh_generator(task.device))
            checked = checked_candidates(self.name, task, candidates, threat.batch_size)
            asked = among if among is None else checked_questions(self.name, among, problem.victims, len(checked[0]))
            found = self._found(kind, replace(problem, candidates=checked, among=asked, progress=progress))
        return replace(found, seconds=took.seconds)

    def _check_finds(self, kind: type[Findings]) -> None:
        if self.finds is not kind:
            raise ThreatModelError(
                f"{self.name}: has no {kind.__name__.lower()} to return, it finds {self.finds.__name__.lower()}; use "
                f"{_CALLS[self.finds]}, or another attack"
            )

    def _found(self, kind: type[F], problem: Problem) -> F:
        found = self.run(problem)
        if not isinstance(found, kind):
            method, _, _ = _CALLS[kind].partition("(")
            raise ThreatModelError(
                f"{self.name}: {method} expects a {kind.__name__}, got {type(found).__name__}; call run(problem)"
            )
        return found

    def pose(self, task: Task, updates: Observed, threat: ThreatModel, generator: torch.Generator) -> Problem:
        """Build the problem for `run`, with only what the threat model grants; arguments as for `reconstruct`."""
        rounds = observed_rounds(self.name, task, updates, threat)
        threat = threat.as_known()
        self.check_threat(task, threat)
        if not has_all_state(self):
            raise ThreatModelError(f"{self.name}: must be fitted first; use attack = attack.fit(task, threat)")
        knowledge = None if self.simulates else find_knowledge(self.name, task, threat)
        labels, ambiguous = find_labels(self.name, task, rounds[0][1], threat, inferred=not self.finds_labels)
        stacked = [
            (round_task, {name: torch.stack([update[name] for update in round_updates]) for name in task.parameters})
            for round_task, round_updates in rounds
        ]
        if knowledge and knowledge.before:
            stacked = [
                (round_task, knowledge.before(round_task, round_updates, generator))
                for round_task, round_updates in stacked
            ]
        return Problem(stacked, labels, threat, generator, knowledge, ambiguous)

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Refuse a task or threat model that this attack cannot handle, or that does not grant what it needs."""
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
        if self.needs_public:
            granted_public(self.name, task, threat)
        if threat.labels == "infer" and not self.finds_labels:
            check_inferable(self.name, task)
