"""What every defense implements and declares."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.core.errors import InputError, NotFiniteError, ParameterError
from gradveil.core.parameters import Strength, strength_of
from gradveil.core.randomness import Draws, Randomness, source_of
from gradveil.core.registry import Method, Registry
from gradveil.defenses.accounting import PrivacySpent, SampledGaussian
from gradveil.defenses.knowledge import Knowledge
from gradveil.task import Gradients, Task
from gradveil.update import Announced, ClientRound, ClientState, LocalSteps, Memory, Meta, ServerRound, Update

DEFENSES: Registry["Defense"] = Registry("defense", "gradveil.defenses")

Batch = tuple[Tensor, Tensor]

_CAPABILITY_FOR = {
    "make_announcement": "announces",
    "publish": "announces",
    "visible": "hides_updates",
    "combine": "aggregates",
    "adapt": "has_adaptive_attacker",
}
"""The capability that a defense must declare if it overrides the method."""
_HOOK_FOR = {
    "share": "make_update",
    "announce": "make_announcement",
    "perturb": "perturb_gradients",
    "aggregate": "combine",
    "take_back": "settle",
}
"""The method that users call, and the hook behind it that a defense overrides."""


class Prepared(NamedTuple):
    """What `Defense.prepare` returns.

    Args:
        defense: the defense together with what it measured; the original is left unchanged.
        task: the task that clients train from now on; another one if the defense changes the model.
    """

    defense: "Defense"
    task: Task


class Defense(Method, ABC):
    """What a client does to its update before anybody sees it, and what the server does with the updates.

    A new defense is one file: a frozen dataclass registered with ``@DEFENSES.register(name)`` whose fields are its
    parameters, declared with `gradveil.core.parameters`. A defense that needs only gradients derives from
    `Perturbation`; one that computes the gradient of every step from the client's data derives from `StepDefense`; any
    other one implements `make_update`.

    Users call `share`, `announce`, `perturb` and `aggregate`. A defense overrides the hooks behind them, each of which
    takes one object: `make_update`, `make_announcement`, `perturb_gradients` and `combine`. Whoever learns that an
    update was lost calls `take_back`, whose hook is `settle`.

    The attributes below declare what a defense can do and what it needs. Code that composes or runs defenses relies on
    them, never on which methods a class happens to have. `gradveil.defenses.composition` says how they compose.
    """

    factory = "gradveil.defense"

    gradient_only: bool = False
    """`perturb` works without the client's data."""
    batches_clients: bool = False
    """`perturb_clients` defends many clients at once, each as it would have been alone."""
    needs_preparing: bool = False
    """It does not work until `prepare` has measured public data or changed the model."""
    announces: bool = False
    """One client publishes something before the round."""
    hides_updates: bool = False
    """It stands for a protocol that hides individual updates from the server."""
    aggregates: bool = False
    """The server has to aggregate as the defense says; otherwise it may combine the updates in any way."""
    adds_noise: bool = True
    """How well it protects depends on the size of the update relative to its noise. True by default, to be on the safe
    side: a defense that forgets to declare this must not lose its protection to a large update."""
    keeps_zeros: bool = False
    """Coordinates that are zero in the gradient are zero in what it sends."""
    has_adaptive_attacker: bool = False
    """`adapt` says how an attacker uses knowledge of the defense; otherwise only the generic adaptive attacker exists,
    which averages over simulated draws."""
    removes_noise: bool = False
    """Its server removes noise, whose variance it knows only as long as the noise of every update is fresh."""
    explained_by_noise: bool = False
    """Apart from noise of known variance, it sends exactly what the first form of `adapt` expects."""

    def __init_subclass__(cls, *, composed: bool = False) -> None:
        """Refuse a class that overrides a method without declaring the capability: compositions would ignore it.

        Args:
            composed: whether the capabilities come from other defenses.
        """
        super().__init_subclass__()
        for method, hook in _HOOK_FOR.items():
            if method in vars(cls):
                raise TypeError(f"{cls.__name__} overrides {method}: override {hook} instead, which {method} calls")
        for method, capability in ({} if composed else _CAPABILITY_FOR).items():
            definer = next(base for base in cls.__mro__ if method in vars(base))
            if definer.__module__ != __name__ and not getattr(cls, capability):
                raise TypeError(f"{cls.__name__} overrides {method}: declare {capability} = True")

    # -- what users call ---------------------------------------------------------------------------------------------

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Prepared:
        """Measure or search on public data, once before training; neither the defense nor the task is changed.

        Args:
            task: the model as the server would send it.
            public: examples that are not private.
            generator: source of the search's randomness.
        """
        return Prepared(self, task)

    def share(
        self,
        task: Task,
        inputs: Tensor,
        targets: Tensor,
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        announced: Announced | None = None,
        local: LocalSteps | None = None,
    ) -> Update:
        """The update that leaves the client; for the arguments see `ClientRound`."""
        client = ClientRound(
            task=task,
            inputs=inputs,
            targets=targets,
            generator=generator,
            memory=memory,
            announced=announced,
            local=local,
        )
        return self.make_update(client)

    def repeated(self, times: int) -> "Defense | None":
        """A defense that makes so many updates of one batch at the same weights with less work than this one.

        Each by itself is distributed as this one's; together they may be less different. They need a memory of their
        own, and single steps. None, the default: there is no such defense.
        """
        return None

    def announce(
        self,
        task: Task,
        inputs: Tensor,
        targets: Tensor,
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        local: LocalSteps | None = None,
    ) -> Announced | None:
        """What one elected client publishes before the round; None for most defenses."""
        client = ClientRound(task=task, inputs=inputs, targets=targets, generator=generator, memory=memory, local=local)
        return self.make_announcement(client)

    def perturb(
        self,
        gradients: Mapping[str, Tensor],
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        announced: Announced | None = None,
    ) -> Update:
        """The defended gradients, for defenses that need only gradients; `gradients` is not changed."""
        return self.perturb_gradients(gradients, ClientState(generator=generator, memory=memory, announced=announced))

    def take_back(self, memory: Memory) -> None:
        """Say that the last update made with this memory was lost: what it carried is owed to the server again.

        Only error feedback owes anything; for any other defense this does nothing. Without this call an update is
        taken to have arrived.
        """
        self.settle(memory, arrived=False)

    def aggregate(
        self,
        updates: Sequence[Update],
        *,
        weights: Sequence[float] | None = None,
        memory: Memory | None = None,
        announced: Announced | None = None,
    ) -> Update:
        """The aggregate that the server computes from the updates of a round."""
        return self.combine(ServerRound(updates, weights, memory, announced))

    def visible(self, updates: Sequence[Update]) -> list[Update]:
        """What the server gets to see of the updates of a round."""
        return list(updates)

    # -- what defenses override --------------------------------------------------------------------------------------

    @abstractmethod
    def make_update(self, client: ClientRound) -> Update:
        """The update that leaves the client."""

    def make_announcement(self, client: ClientRound) -> Announced | None:
        """What the client publishes if it is elected, from its data."""
        return None

    def publish(self, gradients: Mapping[str, Tensor], memory: Memory | None = None) -> Announced | None:
        """What the client publishes if it is elected, from its gradients."""
        return None

    def check_announced(self, announced: Announced | None, parameters: Mapping[str, Tensor]) -> None:
        """Refuse (`InputError`) an announcement that does not fit the model; the server then elects another client."""

    def locations(self, announced: Announced | None) -> Announced | None:
        """The positions outside which all updates of the round are zero; both sides know them, which saves bytes."""
        return None

    def perturb_gradients(self, gradients: Mapping[str, Tensor], client: ClientState) -> Update:
        """The defended gradients of one client."""
        raise InputError(f"{self.name}: needs the client's data; call share(task, inputs, targets) instead of perturb")

    def combine(self, received: ServerRound) -> Update:
        """The aggregate of a round's updates: their weighted mean."""
        return received.mean()

    def residuals(self, memory: Memory) -> Iterator[Memory]:
        """The parts of a client's memory in which error feedback keeps what was not sent, layer by layer."""
        return iter(())

    def settle(self, memory: Memory, *, arrived: bool) -> None:
        """Learn whether the last update made with this memory reached the server; a second call changes nothing."""

    # -- what is known about the defense -----------------------------------------------------------------------------

    @property
    def strength(self) -> Strength | None:
        """The declared parameter that makes it stronger, or None if there is none."""
        return strength_of(self)

    def with_strength(self, value: float) -> "Defense":
        """The same defense, not prepared, at another value of its strength."""
        if self.strength is None:
            raise ParameterError(f"{self.name}: has no parameter that makes it stronger or weaker")
        return type(self)(**{**self.parameters, self.strength.parameter: value})

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """How an attacker uses knowledge of the defense and its parameters, though not of its draws: forms by name.

        The first form is the strongest known, and the one that ``ThreatModel(adaptive=True)`` selects. If there is
        none, attackers average over simulated draws of the defense.

        Args:
            task: the model as the client has it, after `prepare`.
            batch_size: number of examples behind an update.
            local: the client's local steps.
        """
        return {}

    def noise_variance(self, *, batch_size: int = 1) -> float | Mapping[str, Tensor] | None:
        """Variance of the normal noise on each value, if no data decides its level and every value has noise.

        The defense may clip before it adds the noise, since clipping only removes information. A value that it never
        sends has infinite variance. Otherwise None; then no reconstruction bound is known
        (`gradveil.theory.reconstruction_bound`).

        Args:
            batch_size: number of examples behind the update, over which a defense may average its noise.
        """
        return None

    def clipped(self, gradients: Gradients) -> Gradients:
        """The gradients before the noise is added; a coordinate that is clipped here no longer reacts to the input."""
        return gradients

    def privacy_spent(
        self, *, rounds: int, batch_size: int, examples: int, local: LocalSteps | None = None
    ) -> PrivacySpent | None:
        """The (epsilon, delta) of a client after a run, or None if the defense has no proven guarantee.

        Args:
            rounds: number of rounds the client took part in.
            batch_size: number of examples it drew in each round, without replacement.
            examples: number of examples it drew from.
            local: its local steps.
        """
        return None

    def sampled_gaussian(
        self, *, rounds: int, batch_size: int, examples: int, local: LocalSteps | None = None
    ) -> SampledGaussian | None:
        """The mechanism that a run is, if every example is clipped before normal noise is added; otherwise None.

        Whoever returns one promises that nothing else about the client's examples leaves the client; a certificate is
        computed from it (`gradveil.theory.certificate`). The arguments are those of `privacy_spent`.
        """
        return None


class Perturbation(Defense):
    """A defense that needs only gradients.

    Subclasses implement one function, `perturb_rows`, for one layer of many clients: row i belongs to client i. A
    single client is a batch of one, so there is no separate code for it. A method that looks at several layers
    together, or at the announcement, overrides `perturb_layers` instead.

    Under FedAvg it acts once, on the finished update.
    """

    gradient_only = True
    batches_clients = True

    @abstractmethod
    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Defend one layer: ``[clients, values]`` to ``[clients, values]``; `rows` must not be changed.

        Args:
            rows: a layer's gradients, one row per client, with at least one value each.
            draws: random tensors and noise; each row comes from its client's own source.
        """

    def perturb_layers(
        self, layers: Mapping[str, Tensor], draws: Draws, announced: Announced | None = None
    ) -> dict[str, Tensor]:
        """Defend all layers, each ``[clients, values]``; they must not be changed."""
        return {name: self.perturb_rows(rows, draws) if rows.numel() else rows.clone() for name, rows in layers.items()}

    def make_update(self, client: ClientRound) -> Update:
        """Compute the client's update and perturb it."""
        return self.perturb_gradients(client.update(), client)

    def make_announcement(self, client: ClientRound) -> Announced | None:
        """Publish what follows from the client's own update, which costs it a second gradient."""
        return self.publish(client.update(), client.memory) if self.announces else None

    def perturb_gradients(self, gradients: Mapping[str, Tensor], client: ClientState) -> Update:
        """The defended gradients of one client; `gradients` is not changed."""
        stacked = {name: value[None] for name, value in checked_gradients(self.name, gradients).items()}
        result = self._perturb_stacked(stacked, [client.source], client.announced)
        return Update({name: value[0] for name, value in result.items()}, meta_of(gradients))

    def perturb_clients(
        self,
        gradients: Mapping[str, Tensor],
        *,
        generators: Sequence[Randomness] | None = None,
        announced: Announced | None = None,
    ) -> dict[str, Tensor]:
        """The defended gradients of many clients at once: every tensor has a leading client dimension.

        Args:
            gradients: ``[clients, *parameter shape]`` by name.
            generators: one per client, for simulations, so that each client gets what it would have got alone; by
                default each client uses a cryptographic stream.
            announced: what the elected client published.
        """
        return self._perturb_stacked(checked_gradients(self.name, gradients), generators, announced)

    def _perturb_stacked(
        self,
        gradients: Mapping[str, Tensor],
        generators: Sequence[Randomness] | None,
        announced: Announced | None,
    ) -> dict[str, Tensor]:
        clients = len(next(iter(gradients.values())))
        sources = [source_of(generator) for generator in ([None] * clients if generators is None else generators)]
        if len(sources) != clients:
            raise InputError(f"{self.name}: expected one generator per client ({clients}), got {len(sources)}")
        self.check_announced(announced, {name: value[0] for name, value in gradients.items()})
        layers = {name: value.reshape(clients, math.prod(value.shape[1:])) for name, value in gradients.items()}
        result = {
            name: rows.reshape(gradients[name].shape)
            for name, rows in self.perturb_layers(layers, Draws(sources), announced).items()
        }
        check_result(self, result)
        return result


class StepDefense(Defense):
    """A defense that works on the client's data: it computes the gradient of every step.

    Subclasses implement one function, `step_gradients`. Under FedAvg it acts in every local step.
    """

    @abstractmethod
    def step_gradients(self, client: ClientRound) -> Gradients:
        """The defended gradients of one step; `client` has the weights and the batch of that step."""

    def make_update(self, client: ClientRound) -> Update:
        """Compute the client's update from defended steps."""
        return client.update(
            lambda task, inputs, targets: self.step_gradients(
                dataclasses.replace(client, task=task, inputs=inputs, targets=targets)
            )
        )


def meta_of(gradients: Mapping[str, Tensor]) -> Meta | None:
    """The gradients' `Meta` for an update made from them, without encoded bytes and grids, which no longer apply."""
    return dataclasses.replace(gradients.meta, bytes=None, grids={}) if isinstance(gradients, Update) else None


def _is_finite(value: Tensor) -> bool:
    # The extremes are NaN or infinite if any value is; this takes a tenth of the time of `isfinite(value).all()`.
    return not value.numel() or all(math.isfinite(extreme) for extreme in value.detach().aminmax())


def check_result(defense: Defense, result: Mapping[str, Tensor]) -> None:
    """Refuse a result that is not finite; after noise, the refusal reveals nothing about the gradient."""
    for name, value in result.items():
        if not _is_finite(value):
            raise NotFiniteError(
                f"{defense.name}: the result overflows {value.dtype} in {name!r}; use a weaker {defense!r}"
            )


def checked_gradients(owner: str, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The gradients; refused unless they are finite floating-point tensors by name."""
    if not gradients:
        raise InputError(f"{owner}: expected gradients by parameter name, got none")
    for name, value in gradients.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"{owner}: gradients must be floating-point tensors, got {got} for {name!r}; leave out parameters "
                "that are not trained"
            )
        if not _is_finite(value):
            raise NotFiniteError(
                f"{owner}: gradients must be finite, got NaN or Inf in {name!r}; "
                "lower the learning rate or check the data"
            )
    return gradients
