"""Fair comparisons: set every defense to the strength at which it costs a given price, and only then compare."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import torch

from gradveil.core.errors import ParameterError
from gradveil.core.randomness import derived_generator
from gradveil.core.registry import suggest
from gradveil.data import Dataset
from gradveil.defenses import Defense
from gradveil.defenses import create as create_defense
from gradveil.federation import Training, train
from gradveil.federation.job import as_batch, performance_maintenance, split_public
from gradveil.metrics import relative_power
from gradveil.task import Task
from gradveil.update import compute_update, wire

TRIES = 12
PROBED_CLIENTS = 4


@dataclass(frozen=True)
class Price:
    """The price that every defense is to cost.

    Args:
        kind: ``"accuracy"``: the share of the undefended accuracy that is kept (PMM); ``"power"``: |u - g|^2 / |g|^2 at
            the initial weights; ``"bytes"``: upload as a share of the undefended one; ``"named"``: the share of the
            identification games in which the adaptive server names the right candidate.
        target: the value wanted.
        tolerance: how far from it a defense may be.

    Example:
        >>> str(Price.parse("power")), str(Price.parse("accuracy=.9"))
        ('power=0.5', 'accuracy=0.9')
        >>> Price.parse("bytes=0.5").holds(0.52)
        True
    """

    kind: str
    target: float
    tolerance: float

    @classmethod
    def parse(cls, text: str) -> "Price":
        """Read ``KIND`` or ``KIND=TARGET``."""
        kind, equals, value = text.partition("=")
        if kind not in _PRICES:
            raise ParameterError(f"audit: match must be KIND or KIND=TARGET, got {text!r}; {suggest(kind, _PRICES)}")
        target, low, high, tolerance = _PRICES[kind]
        if equals:
            try:
                target = float(value)
            except ValueError:
                target = low  # outside the open interval, so refused below
        if not low < target < high:
            raise ParameterError(f"audit: {kind} can be matched between {low:g} and {high:g}, got {value!r}")
        return cls(kind, target, tolerance if kind == "accuracy" else tolerance * target)

    def holds(self, cost: float) -> bool:
        """Whether the cost equals the price within the tolerance."""
        return abs(cost - self.target) <= self.tolerance

    def exceeded_by(self, cost: float) -> bool:
        """Whether a defense at this cost is too strong."""
        return cost > self.target if self.kind == "power" else cost < self.target

    def __str__(self) -> str:
        return f"{self.kind}={self.target:g}"


# Default target, the open interval it may lie in, tolerance: in points for accuracy, relative for the others.
_PRICES = {
    "accuracy": (0.95, 0.0, 1.0, 0.01),
    "power": (0.5, 0.0, 1e6, 0.1),
    "bytes": (0.2, 0.0, 1.0, 0.05),
    "named": (0.1, 0.0, 1.0, 0.2),
}


@dataclass(frozen=True)
class Match:
    """How the search for a defense's strength ended.

    Args:
        found: the defense at the strength that costs the price; None: there is none, see `reason`.
        cost: what it costs, or what the nearest try cost.
        tries: number of strengths that were tried.
        reason: why no strength costs the price.

    Example:
        >>> Match(None, 1.0, 2, "top-k: ...").found is None
        True
    """

    found: Defense | None
    cost: float | None
    tries: int
    reason: str | None = None


def match(
    defense: Defense,
    price: Price,
    cost: Callable[[Defense], float],
    progress: Callable[[int, int], None] | None = None,
) -> Match:
    """Find by bisection the strength at which a defense costs the price.

    Args:
        defense: the defense at any strength; its other parameters are kept.
        price: what it is to cost.
        cost: measures what a defense costs: a value of the price's kind, monotone in the strength.
        progress: called with (tries done, tries at most).
    """
    strength = defense.strength
    if strength is None:
        return Match(None, None, 0, f"{defense.name} has no parameter that makes it stronger or weaker")
    costs: dict[float, float] = {}  # by value of the strength parameter

    def attempt(position: float) -> float:
        value = strength.at(position)
        costs[value] = cost(defense.with_strength(value))
        if progress:
            progress(len(costs), TRIES)
        return costs[value]

    def nearest() -> float:
        return min(costs, key=lambda value: abs(costs[value] - price.target))

    weak, strong = 0.0, 1.0
    cost_weakest, cost_strongest = attempt(weak), attempt(strong)
    reachable = price.exceeded_by(cost_strongest) and not price.exceeded_by(cost_weakest)
    while reachable and not price.holds(costs[nearest()]) and len(costs) < TRIES:
        middle = (weak + strong) / 2
        if strength.at(middle) in costs:  # there is no other value in between
            break
        weak, strong = (weak, middle) if price.exceeded_by(attempt(middle)) else (middle, strong)
    value = nearest()
    if price.holds(costs[value]):
        return Match(defense.with_strength(value), costs[value], len(costs))
    name = strength.parameter
    if reachable:
        reason = f"comes no nearer to {price} than {costs[value]:.3g}, at {name}={value:g}, in {len(costs)} tries"
    else:
        reason = (
            f"does not cost {price} at any strength: {price.kind} goes from {cost_weakest:.3g} at "
            f"{name}={strength.at(0):g} to {cost_strongest:.3g} at {name}={strength.at(1):g}"
        )
    return Match(None, costs[value], len(costs), f"{defense.name} {reason}")


class Costs:
    """Measures what defenses cost, each kind relative to the undefended run.

    Accuracy comes from the same training as an audit's utility rows, so the report shows the value that was matched.
    Power and bytes come from one round of a few clients at the initial weights, the share of right names from games.

    Args:
        task: the model at the weights at which trainings begin.
        dataset: the data.
        training: the training that accuracies come from.
        named: plays the identification games under a defense, and returns the share of right names.
    """

    def __init__(self, task: Task, dataset: Dataset, training: Training, named: Callable[[Defense], float]) -> None:
        self._task, self._dataset, self._training, self._named = task, dataset, training, named

    def of(self, kind: str) -> Callable[[Defense], float]:
        """The function that measures one kind of cost."""
        return {"accuracy": self._accuracy, "power": self._power, "bytes": self._bytes, "named": self._named}[kind]

    def _accuracy(self, defense: Defense) -> float:
        kept = performance_maintenance(self._trained(defense), self._baseline_accuracy, self._dataset.test)
        if kept is None:
            raise ParameterError(
                f"audit: the undefended model is near chance ({self._baseline_accuracy:.0%}) after "
                f"{self._training.rounds} rounds, so no accuracy can be matched; train longer (--rounds)"
            )
        return kept

    def _trained(self, defense: Defense) -> float:
        return train(self._task, self._dataset, defense, replace(self._training, evaluate_every=None)).accuracy

    @cached_property
    def _baseline_accuracy(self) -> float:
        return self._trained(create_defense("none"))

    def _power(self, defense: Defense) -> float:
        return self._probe(defense)[0]

    def _bytes(self, defense: Defense) -> float:
        return self._probe(defense)[1] / self._baseline_bytes

    @cached_property
    def _baseline_bytes(self) -> float:
        return self._probe(create_defense("none"))[1]

    def _probe(self, defense: Defense) -> tuple[float, float]:
        """Mean power and bytes of the updates that clients share in one round."""
        seed, device = self._training.seed, self._task.device
        public, private = split_public(self._dataset.train, seed)
        defense, task = defense.prepare(
            self._task,
            public=as_batch(self._task, self._dataset.train.batch(public)),
            generator=derived_generator(seed, "prepare", device=device),
        )
        size = self._training.batch_size
        shares = torch.split(private[: PROBED_CLIENTS * size], size)
        batches = [as_batch(task, self._dataset.train.batch(indices)) for indices in shares]
        announced = defense.announce(
            task, *batches[0], generator=derived_generator(seed, "announce", device=device), memory={}
        )
        locations = defense.locations(announced)
        powers, sizes = [], [0 if locations is None else len(wire.encode_locations(locations)) / len(batches)]
        for number, batch in enumerate(batches):

            def randomness(number: int = number) -> torch.Generator:
                return derived_generator(seed, "share", number, device=device)

            update = defense.share(task, *batch, generator=randomness(), memory={}, announced=announced)
            # From the same state, so that dropout masks are the same.
            powers.append(relative_power(compute_update(task, *batch, generator=randomness()), update))
            sizes.append(len(wire.encode(update, locations=locations)) / len(batches))
        return fmean(powers), sum(sizes)
