"""The attacks among which `auto` chooses, what each costs, and how their results are compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks._learned import Learning
from gradveil.attacks._simulation import SimulatedClients, draw_seeds
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.matching import choose_execution
from gradveil.attacks.problem import Progress, granted_public
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ThreatModelError
from gradveil.core.parameters import declared
from gradveil.core.registry import parse_spec
from gradveil.core.work import nominal_seconds
from gradveil.defenses import create as create_defense
from gradveil.defenses.base import Batch
from gradveil.metrics import METRICS, Scorer
from gradveil.task import Gradients, Task

MOST_RESTARTS = 4
CLIENTS = 4
"""Simulated clients on which members are tried."""
FEWEST_PUBLIC = 500
"""Public examples below which an attack that learns is not tried."""


@dataclass(frozen=True)
class Member:
    """An attack of the portfolio.

    Args:
        spec: its name, with the parameters that are not decided by the budget.
        steps: the iterations after which it is better to start again; None: it takes none.
        unless: the spec of a member that is better wherever it applies; this one is tried only where it does not.

    Example:
        >>> Member("idlg", 1000).attack(40, 2).restarts, Member("idlg", 1000).attack(40).iterations
        (2, 40)
    """

    spec: str
    steps: int | None = None
    unless: str | None = None

    @property
    def is_closed_form(self) -> bool:
        """Whether it neither searches nor learns."""
        return self.steps is None and not self.attack().needs_public

    def attack(self, iterations: int = 1, restarts: int = 1) -> Attack:
        """The attack with so many iterations, and restarts if it has any."""
        attack = from_spec(self.spec)
        if self.steps is None:
            return attack
        spent: dict[str, Any] = {"iterations": iterations}
        if "restarts" in declared(attack):
            spent["restarts"] = restarts
        return replace(attack, **spent)  # type: ignore[type-var]

    def within(self, seconds: float, price: "Price", least: int) -> Attack:
        """The attack as a budget allows it.

        Args:
            seconds: nominal seconds for each victim.
            price: what it costs.
            least: the iterations that it takes at least, whatever they cost.
        """
        if self.steps is None:
            return self.attack()
        affordable = int((seconds - price.base) / price.step)
        if affordable < self.steps:
            return self.attack(max(least, affordable))
        return self.attack(self.steps, min(MOST_RESTARTS, int(seconds / (price.base + price.step * self.steps))))


def from_spec(spec: str) -> Attack:
    """The attack that a spec names."""
    name, parameters = parse_spec(spec)
    return ATTACKS.create(name, **parameters)


PORTFOLIO = (
    Member("first-layer"),
    Member("april"),
    Member("spear"),
    Member("dager"),
    Member("peel", 400),
    Member("idlg", 1000),
    Member("inverting-gradients:optimiser=lbfgs,tv=0.01", 500),
    Member("inverting-gradients:optimiser=lbfgs,tv=0.001", 500),
    Member("inverting-gradients:lr=0.1,tv=0.001", 4000),
    Member("inverting-gradients:optimiser=lbfgs,tv=0", 500, unless="inverting-gradients:optimiser=lbfgs,tv=0.01"),
    Member("tag", 1000, unless="inverting-gradients:optimiser=lbfgs,tv=0.01"),
    Member("dlg", 1000, unless="idlg"),
    Member("lti:directions=300,draws=8,hidden=512,epochs=40"),
)
"""Closed forms, gradient matching in forms that suit smooth, ReLU and deep networks, inputs with and without a prior,
and text, and learning. Attacks that need a generator or an active server are not among them."""


@dataclass(frozen=True)
class Price:
    """What a member costs for each victim, in nominal seconds (see `nominal_seconds`).

    Args:
        base: whatever the number of iterations.
        step: for each iteration; 0 if it takes none.

    Example:
        >>> idlg, price = Member("idlg", 1000), Price(base=1.0, step=0.01)
        >>> [idlg.within(seconds, price, least=20).iterations for seconds in (0.5, 3.0, 25.0)]
        [20, 200, 1000]
        >>> idlg.within(25.0, price, least=20).restarts
        2
    """

    base: float
    step: float

    @classmethod
    def of(cls, member: Member, run: Callable[[Attack], object]) -> "Price":
        """Count what a member that takes iterations does for one victim; `run` attacks it."""
        one = nominal_seconds(lambda: run(member.attack(1)))
        step = max((nominal_seconds(lambda: run(member.attack(3))) - one) / 2, 1e-6)
        return cls(max(0.0, one - step), step)


@dataclass(frozen=True, eq=False)
class Trial:
    """How a member did on the simulated clients.

    Args:
        member: the member.
        price: what it costs for each victim.
        attack: the attack as it was tried, fitted if it learns.
        closeness: how close it came to each client's examples by the modality's primary metric; higher is closer.
        distances: how far what it found is from each client's update, which can be computed for real victims too.

    Example:
        >>> member = Member("idlg", 1000)
        >>> Trial(member, Price(0.1, 0.01), member.attack(30), [12.0, 30.0, 31.0], [0.5, 0.1, 0.1]).median
        30.0
    """

    member: Member
    price: Price
    attack: Attack
    closeness: Sequence[float]
    distances: Sequence[float]

    @property
    def median(self) -> float:
        """The median of the closeness over the clients."""
        return median(self.closeness)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Clients that the attacker simulates, and so knows all about, to try attacks on.

    Args:
        task: the model that the victims will be sent.
        threat: what the attacker may know of these clients, with the rest of the public data.
        inputs: what the clients hold, ``[clients, examples, *input_shape]``.
        labels: their labels.
        updates: what they send, ``[clients, ...]`` by name.
        learning: the attacker's randomness, and where it keeps what it learned.
    """

    task: Task
    threat: ThreatModel
    inputs: Tensor
    labels: Tensor
    updates: Gradients
    learning: Learning

    @classmethod
    def of(cls, task: Task, threat: ThreatModel, learning: Learning) -> "Calibration":
        """Simulate clients with public data, or with imitations if there is too little of it."""
        needed = CLIENTS * threat.batch_size
        (inputs, labels), others = _divided(task, threat, needed, learning.generator)
        groups = torch.arange(needed, device=task.device).view(CLIENTS, -1)
        simulated = SimulatedClients.of(task, replace(threat, public=(inputs, labels)))
        updates = next(simulated.draws(groups, draw_seeds(1, CLIENTS, learning.generator)))
        known = labels[groups] if threat.labels == "known" else None
        threat = replace(threat, rounds=1, statistics=None, known_labels=known, public=others)
        return cls(task, threat, inputs[groups], labels[groups], updates, learning)

    def price(self, member: Member) -> Price:
        """What a member costs for each victim; it raises its own error if it cannot attack them."""
        attack = member.attack()
        attack.check_threat(self.task, as_seen_by(attack, self.threat))
        if member.steps is None:
            return Price(0.0, 0.0)  # it takes no iterations that a budget could buy
        return Price.of(member, lambda tried: self._attacked(tried, 1, None))

    def trial(self, member: Member, price: Price, attack: Attack, limit: float, progress: Progress) -> Trial:
        """Try an attack on the clients.

        Args:
            member: the member whose attack it is.
            price: what that costs.
            attack: the attack.
            limit: nominal seconds that it may learn for, if it learns.
            progress: called with (steps done, total steps, seconds left).
        """
        if attack.needs_public:
            attack = self.learned(attack, limit, progress)
            progress = None
        found = self._attacked(attack, CLIENTS, progress)
        metric, modality = METRICS.get(self.task.modality.primary), self.task.modality
        closeness = []
        for originals, reconstructed in zip(self.inputs, found.inputs, strict=True):
            matched = Scorer(modality).matched(originals, reconstructed)
            scores = metric.compute(modality.compared(originals), modality.compared(matched))
            assert scores is not None  # the primary metric can always be computed
            closeness.append(metric.closeness(scores.mean().item()))
        return Trial(member, price, attack, closeness, distances(self.task, self.updates, found, self.threat).tolist())

    def _attacked(self, attack: Attack, clients: int, progress: Progress) -> Reconstruction:
        threat = as_seen_by(attack, self.threat)
        if threat.known_labels is not None:
            threat = replace(threat, known_labels=threat.known_labels[:clients])
        updates = [{name: value[client] for name, value in self.updates.items()} for client in range(clients)]
        execution = choose_execution(self.task, threat.batch_size)
        return attack.reconstruct(
            self.task, updates, threat, generator=self.learning.generator, progress=progress, execution=execution
        )

    def learned(self, attack: Attack, limit: float, progress: Progress) -> Attack:
        """The attack, fitted to as much of the public data as it can simulate clients with in `limit`."""
        public = granted_public(attack.name, self.task, self.threat)
        clients = SimulatedClients.of(self.task, self.threat)
        group = torch.arange(self.threat.batch_size, device=self.task.device)[None]
        seed = torch.zeros(1, 1, dtype=torch.long)
        cost = nominal_seconds(lambda: next(clients.draws(group, seed)))
        draws = int(attack.parameters["draws"]) if clients.are_random(group) else 1
        affordable = limit / cost
        if affordable < draws * len(public[0]):
            draws = max(1, min(draws, int(affordable / FEWEST_PUBLIC)))
        examples = min(len(public[0]), int(affordable / draws))
        if examples < min(FEWEST_PUBLIC, len(public[0])):
            raise ThreatModelError(
                f"{attack.name}: simulating {FEWEST_PUBLIC} clients takes {cost * FEWEST_PUBLIC:.0f} nominal seconds, "
                f"and the budget allows {limit:.0f}; raise seconds"
            )
        attack = replace(attack, draws=draws)  # type: ignore[type-var]
        threat = replace(self.threat, public=(public[0][:examples], public[1][:examples]))
        attack.check_threat(self.task, threat)
        return attack.learn(self.task, threat, replace(self.learning, progress=progress))


def best_policy(trials: Sequence[Trial], noticeable: float) -> list[Trial]:
    """The one or two members that would have done best on the simulated clients, the better one first.

    Of two members, each client gets the result that is nearer to its update. A second member must raise the median by a
    noticeable amount, as it costs half of the budget.

    Args:
        trials: how the members did.
        noticeable: the smallest difference of closeness that is worth it.
    """

    def outcome(policy: tuple[Trial, ...]) -> tuple[float, float]:
        taken = closeness_of(policy)
        return median(taken) - noticeable * (len(policy) - 1), fmean(taken)

    ranked = sorted(trials, key=lambda trial: outcome((trial,)), reverse=True)
    policies: list[tuple[Trial, ...]] = [*combinations(ranked, 1), *combinations(ranked, 2)]
    best = max(policies, key=outcome)
    return list(best)


def closeness_of(policy: Sequence[Trial]) -> list[float]:
    """How close a policy came to each simulated client: each gets the result that is nearest to its update.

    >>> member, price = Member("idlg", 1000), Price(0.1, 0.01)
    >>> sharp = Trial(member, price, member.attack(30), [30.0, 9.0], [0.1, 0.9])
    >>> blurred = Trial(member, price, member.attack(30), [15.0, 15.0], [0.8, 0.8])
    >>> closeness_of([sharp, blurred])
    [30.0, 15.0]
    """
    taken = []
    for client in range(len(policy[0].closeness)):
        _, place = min((trial.distances[client], place) for place, trial in enumerate(policy))
        taken.append(policy[place].closeness[client])
    return taken


def second_opinions(policy: Sequence[Trial], others: Sequence[Trial], noticeable: float) -> list[Trial]:
    """The others that may be tried where a policy explains a victim's update badly: those that did no harm beside it.

    A search always comes nearer to an update than learning does, though what it finds may look like nothing. So where
    the distance would have preferred worse results on the simulated clients, it must not decide about victims.

    Args:
        policy: what attacks the victims.
        others: how other members did.
        noticeable: the smallest difference of closeness that counts.
    """
    least = fmean(closeness_of(policy)) - noticeable
    return [trial for trial in others if fmean(closeness_of([*policy, trial])) >= least]


def distances(task: Task, updates: Gradients, found: Reconstruction, threat: ThreatModel) -> Tensor:
    """How far what clients with the examples found would send, undefended, is from what was seen: ``|u - g| / |u|``.

    Args:
        task: the model that the victims were sent.
        updates: what was seen, ``[victims, ...]`` by name.
        found: the examples.
        threat: says which local steps the clients took.

    Returns:
        One distance for each victim; infinite where it cannot be computed.
    """
    task, undefended = task.without_dropout(), create_defense("none")
    relative = []
    for victim, (inputs, labels) in enumerate(zip(found.inputs, found.labels, strict=True)):
        generator = torch.Generator(task.device).manual_seed(0)
        inputs = task.modality.repaired(inputs.detach()).to(task.dtype)
        sent = undefended.share(task, inputs, labels, generator=generator, local=threat.local)
        pairs = [(sent[name].double(), value[victim].double()) for name, value in updates.items()]
        error = torch.stack([(one - other).square().sum() for one, other in pairs]).sum()
        size = torch.stack([seen.square().sum() for _, seen in pairs]).sum()
        relative.append((error / size).sqrt().nan_to_num(torch.inf, torch.inf))
    return torch.stack(relative)


def as_seen_by(attack: Attack, threat: ThreatModel) -> ThreatModel:
    """What of a threat model an attack can use: one that does not adapt takes the first round for undefended."""
    return threat if attack.adapts else replace(threat, adaptive=False, rounds=1)


def _divided(task: Task, threat: ThreatModel, needed: int, generator: torch.Generator) -> tuple[Batch, Batch | None]:
    """Examples for the simulated clients, and the rest of the public data, from which other attacks may learn."""
    if threat.public is None or len(threat.public[0]) < 2 * needed:
        if task.classes is None:
            raise ThreatModelError(
                f"auto: expected at least {2 * needed} public examples to try attacks on, as labels that are not "
                "classes cannot be made up; grant them in ThreatModel(public=...)"
            )
        inputs = task.modality.imitations(needed, task.input_shape, generator, dtype=task.dtype)
        return (inputs.to(task.device), task.random_labels(needed, generator)), threat.public
    inputs, labels = granted_public("auto", task, threat)
    order = torch.randperm(len(inputs), generator=generator, device=generator.device).to(inputs.device)
    mine, others = order[:needed], order[needed:]
    return (inputs[mine], labels[mine]), (inputs[others], labels[others])
