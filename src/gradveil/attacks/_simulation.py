"""Clients that an attacker simulates with public data, to learn how a defense's updates depend on the inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Self

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.attacks.problem import Progress
from gradveil.attacks.threat import ThreatModel
from gradveil.core.digests import bytes_digest
from gradveil.core.errors import ThreatModelError
from gradveil.defenses import Defense, Perturbation
from gradveil.defenses import create as create_defense
from gradveil.defenses.base import Batch
from gradveil.task import Gradients, Task
from gradveil.task.sensitivity import chunk_size
from gradveil.update import Announced, LocalSteps, Memory

HELD_OUT = 0.1
"""The share of the public inputs of each class on which choices are made, and which nothing is fitted to."""

SUBSET = 1000
"""Simulated clients from which principal directions are computed."""
MEMORY_VALUES = 1 << 27
"""How many values any one table of rows or features may hold: 512 MiB in single precision."""

_CHUNK_BYTES = 1 << 28
_PROBED = 4


@dataclass(frozen=True, eq=False)
class SimulatedClients:
    """What clients with public data would send: the attacker runs the defense itself.

    A defense that needs only gradients gets those of many clients from one vmapped program; any other one is run client
    by client (`Defense.share`). Both give the same updates, because every draw of a client has a seed of its own. A
    client is in its first round, with an empty memory. If the defense announces, another simulated client does so
    honestly in every draw.

    Args:
        task: the model that the victims were sent.
        defense: the defense that the clients use, prepared.
        public: inputs and labels.
        local: local steps; None: a single gradient.

    Example:
        >>> task = Task(torch.nn.Linear(2, 2), input_shape=(2,), classes=2)
        >>> public = torch.rand(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
        >>> clients = SimulatedClients(task, create_defense("gaussian-noise"), public)
        >>> first, second = clients.draws(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 2], [3, 4]]))
        >>> first["weight"].shape, torch.equal(first["weight"], second["weight"])
        (torch.Size([2, 2, 2]), False)
    """

    task: Task
    defense: Defense
    public: Batch
    local: LocalSteps | None = None

    @classmethod
    def of(cls, task: Task, threat: ThreatModel) -> "SimulatedClients":
        """The clients of a threat model that grants public data; undefended unless the attacker knows the defense."""
        assert threat.public is not None
        defense = threat.defense if threat.adaptive and threat.defense else create_defense("none")
        return cls(task, defense, threat.public, threat.local)

    @property
    def together(self) -> bool:
        """Whether gradients are computed for many clients at once."""
        exact = self.local is None and not self.task.has_batch_statistics and not self.task.has_dropout
        return exact and self.defense.gradient_only and not self.defense.announces

    def chunk(self, batch_size: int) -> int:
        """How many clients are simulated at once, so that they need no more than a quarter of a GiB."""
        return min(256, chunk_size(self.task, batch_size, _CHUNK_BYTES))

    def are_random(self, groups: Tensor) -> bool:
        """Whether two draws of the same client differ, tried on the first few clients."""
        tried = groups[:_PROBED]
        seeds = torch.arange(2 * len(tried)).view(2, -1)
        one, other = self.draws(tried, seeds)
        return any(not torch.equal(value, other[name]) for name, value in one.items())

    def draws(self, groups: Tensor, seeds: Tensor) -> Iterator[Gradients]:
        """Several independent draws of the updates of the same clients, each ``[clients, *parameter shape]`` by name.

        Args:
            groups: ``[clients, batch size]``, the places of each client's examples in the public data.
            seeds: ``[draws, clients]``.
        """
        inputs, labels = (part[groups] for part in self.public)
        if not self.together:
            # Updates of local steps start at the same weights, but do not stay there.
            repeated = self.defense.repeated(len(seeds)) if self.local is None and len(seeds) > 1 else None
            simulated = replace(self, defense=repeated or self.defense)
            memories: list[Memory] = [{} for _ in groups]
            for row in seeds.tolist():
                memories = memories if repeated else [{} for _ in groups]
                together = zip(groups, inputs, labels, row, memories, strict=True)
                shared = [simulated._share(*client) for client in together]
                yield {name: torch.stack([update[name] for update in shared]) for name in self.task.parameters}
            return
        parameters = self.task.parameters
        gradients: Gradients = vmap(lambda x, y: self.task.gradient(parameters, x, y))(inputs, labels)
        device = self.task.device
        for row in seeds.tolist():
            generators = [torch.Generator(device).manual_seed(seed) for seed in row]
            if self.defense.batches_clients:
                assert isinstance(self.defense, Perturbation)
                yield self.defense.perturb_clients(gradients, generators=generators)
            else:
                perturbed = [
                    self.defense.perturb(
                        {name: value[place] for name, value in gradients.items()}, generator=generator, memory={}
                    )
                    for place, generator in enumerate(generators)
                ]
                yield {name: torch.stack([update[name] for update in perturbed]) for name in parameters}

    def undefended(self, groups: Tensor, seeds: Tensor) -> Gradients:
        """What the same clients would send without the defense, in one draw of their local steps."""
        return next(replace(self, defense=create_defense("none")).draws(groups, seeds))

    def _share(self, group: Tensor, inputs: Tensor, labels: Tensor, seed: int, memory: Memory) -> Gradients:
        generator = torch.Generator(self.task.device).manual_seed(seed)
        announced = self._announcement(group, generator) if self.defense.announces else None
        return self.defense.share(
            self.task, inputs, labels, generator=generator, memory=memory, announced=announced, local=self.local
        )

    def _announcement(self, group: Tensor, generator: torch.Generator) -> Announced | None:
        inputs, labels = self.public
        order = torch.randperm(len(inputs), generator=generator, device=generator.device).to(group.device)
        others = order[~torch.isin(order, group)][: len(group)]
        return self.defense.announce(
            self.task, inputs[others], labels[others], generator=generator, memory={}, local=self.local
        )


def kinds_of(task: Task, labels: Tensor, dims: int) -> tuple[Tensor, int]:
    """The class of every example, by which is centred, and how many there are; one for all if labels are not classes.

    Args:
        task: says what labels are.
        labels: ``[..., *label shape]``.
        dims: how many leading dimensions number examples.
    """
    if task.classes is None or labels.ndim > dims or labels.is_floating_point():
        return labels.new_zeros(labels.shape[:dims], dtype=torch.long), 1
    return labels, task.classes


def hold_out(owner: str, kinds: Tensor, classes: int, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """The places of the public inputs to learn from and of those that are held out, a tenth of every class.

    If there is only one input of a class, it is not held out.

    Args:
        owner: the attack's name, for error messages.
        kinds: the class of each public input.
        classes: how many classes there are.
        batch_size: examples behind an update; either part must have as many.
        generator: the attacker's randomness.
    """
    learning, held = [], []
    for label in range(classes):
        places = (kinds == label).nonzero().flatten()
        order = torch.randperm(len(places), generator=generator, device=generator.device).to(places.device)
        # Rounded up, so that some of every class are held out.
        first = 0 if len(places) == 1 else -(-len(places) // round(1 / HELD_OUT))
        held.append(places[order[:first]])
        learning.append(places[order[first:]])
    parts = [torch.cat(learning), torch.cat(held)]
    if min(map(len, parts)) < batch_size:
        raise ThreatModelError(
            f"{owner}: updates of {batch_size} examples need at least as many public inputs to learn from and as many "
            f"to hold out, got {len(parts[0])} and {len(parts[1])} of {len(kinds)}; grant more of them in "
            "ThreatModel(public=...)"
        )
    return parts


def grouped(members: Tensor, kinds: Tensor, inputs: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
    """Clients ``[clients, batch_size]`` with these public inputs; each input is in `batch_size` of them.

    A client's examples are ordered by class and, within a class, by their mean value, so that the place of an example
    in the batch means something; the update says nothing about the order.

    Args:
        members: places of the inputs.
        kinds: the class of each public input.
        inputs: all public inputs.
        batch_size: examples of a client.
        generator: the attacker's randomness.
    """
    groups = []
    for _ in range(batch_size):
        order = torch.randperm(len(members), generator=generator, device=generator.device).to(members.device)
        groups.append(members[order[: len(members) // batch_size * batch_size]].view(-1, batch_size))
    together = torch.cat(groups)
    rank = inputs.flatten(1).mean(1).argsort().argsort() / len(inputs)
    return together.gather(1, (kinds + rank.double())[together].argsort(1))


@dataclass(frozen=True, eq=False)
class Cohort:
    """Simulated clients to learn from, and others, with other examples, on which choices are made.

    Args:
        clients: who they are.
        parts: the places of the public inputs to learn from and of those that are held out.
        kinds: the class of each public input.
        classes: how many classes there are.
        taught: ``[clients, batch size]``, the examples of those to learn from.
        held: the same for the others.
        draws: how many draws of the defense to simulate of each client: one if it draws nothing.
    """

    clients: SimulatedClients
    parts: Sequence[Tensor]
    kinds: Tensor
    classes: int
    taught: Tensor
    held: Tensor
    draws: int

    @classmethod
    def of(
        cls, owner: str, task: Task, threat: ThreatModel, generator: torch.Generator, *, width: int, draws: int
    ) -> Self:
        """The clients that the public inputs of a threat model make up.

        Args:
            owner: the attack's name, for error messages.
            task: the model that the victims were sent.
            threat: grants the public inputs.
            generator: the attacker's randomness.
            width: how many features each client will have, in one table for all.
            draws: how many draws of the defense to simulate, if it draws.
        """
        assert threat.public is not None
        inputs, labels = threat.public
        kinds, classes = kinds_of(task, labels, 1)
        clients = SimulatedClients.of(task, threat)
        parts = hold_out(owner, kinds, classes, threat.batch_size, generator)
        taught, held = (grouped(part, kinds, inputs, threat.batch_size, generator) for part in parts)
        taught = taught[: MEMORY_VALUES // width]
        return cls(clients, parts, kinds, classes, taught, held, draws if clients.are_random(taught) else 1)

    def shares(self, groups: Tensor) -> Tensor:
        """The share of each class among the examples of clients, ``[clients, classes]``."""
        return shares_of(self.kinds[groups], self.classes)

    def kept_draws(self, width: int) -> int:
        """How many draws of all clients that are learned from fit into a table of this many features."""
        return max(1, min(self.draws, MEMORY_VALUES // (width * len(self.taught))))

    def some(self, values: int) -> Tensor:
        """The first of the clients to learn from: as many as directions are computed from, and as two tables hold."""
        return self.taught[: min(SUBSET, max(1, MEMORY_VALUES // (2 * values)))]


def check_simulation(owner: str, threat: ThreatModel) -> None:
    """Refuse knowledge of a defense in any form but its simulation.

    Args:
        owner: the attack's name, for error messages.
        threat: what the attacker may know.
    """
    if isinstance(threat.adaptive, str):
        raise ThreatModelError(
            f"{owner}: has no adaptive form {threat.adaptive!r}: it simulates the defense; use "
            "ThreatModel(adaptive=True)"
        )
    if threat.adaptive and threat.defense is None:
        raise ThreatModelError(f"{owner}: has no adaptive form without a defense; use ThreatModel(adaptive=False)")


def setting_of(task: Task, threat: ThreatModel) -> str:
    """What anything learned from simulated clients depends on, in words."""
    defense = threat.defense if threat.adaptive else "no known defense"
    weights = b"".join(value.cpu().numpy().tobytes() for value in task.parameters.values())
    local = threat.local or "no local steps"
    return f"batches of {threat.batch_size}, {local}, {defense}, weights {bytes_digest(weights)}"


def shares_of(kinds: Tensor, classes: int) -> Tensor:
    """The share of each class among the examples of a client, ``[clients, classes]``.

    >>> shares_of(torch.tensor([[0, 1], [1, 1]]), 2)
    tensor([[0.5000, 0.5000],
            [0.0000, 1.0000]])
    """
    return torch.nn.functional.one_hot(kinds, classes).float().mean(1)


def draw_seeds(draws: int, clients: int, generator: torch.Generator) -> Tensor:
    """A seed for every draw of every client."""
    return torch.randint(1 << 32, (draws, clients), generator=generator, device=generator.device)


class Steps:
    """Counts steps and reports them, with the seconds that are left if all steps take equally long.

    Args:
        progress: called with (steps done, total steps, seconds left).
        total: how many steps there will be.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done, self.begun = progress, total, 0, perf_counter()

    def add(self, count: int) -> None:
        """Report `count` more steps."""
        self.done += count
        if self.progress:
            elapsed = perf_counter() - self.begun
            self.progress(self.done, self.total, elapsed / self.done * (self.total - self.done))

    def finish(self) -> None:
        """Report the steps that were not needed as done."""
        if self.progress and self.done < self.total:
            self.progress(self.total, self.total, 0.0)
