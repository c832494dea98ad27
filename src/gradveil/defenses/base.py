"""The contract of a defense."""

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
from gradveil.defenses.accounting import PrivacySpent
from gradveil.defenses.knowledge import Knowledge
from gradveil.task import Gradients, Task
from gradveil.update import Announced, ClientRound, ClientState, LocalSteps, Memory, Meta, ServerRound, Update

DEFENSES: Registry["Defense"] = Registry("defense", "gradveil.defenses")

Batch = tuple[Tensor, Tensor]

_DECLARED = {
    "make_announcement": "announces",
    "publish": "announces",
    "visible": "hides_updates",
    "combine": "aggregates",
    "adapt": "has_adaptive_attacker",
}
"""Methods that a defense writes only if it has the capability."""
_THIN = {
    "share": "make_update",
    "announce": "make_announcement",
    "perturb": "perturb_gradients",
    "aggregate": "combine",
}
"""What users call, and what a defense writes instead."""


class Prepared(NamedTuple):
    """What `Defense.prepare` returns.

    Args:
        defense: the defense with what it measured; the one that was asked is as before.
        task: the task that clients are to train, changed if the defense changes the model.
    """

    defense: "Defense"
    task: Task


class Defense(Method, ABC):
    """What a client does to its update before anybody sees it, and what the server does with the updates.

    A new defense is one file: a frozen dataclass registered with ``@DEFENSES.register(name)`` whose fields are its
    parameters, declared by `gradveil.core.parameters`. One that needs only gradients derives from `Perturbation`, one
    that makes the gradient of every step from the client's data from `StepDefense`; any other writes `make_update`.

    `share`, `announce`, `perturb` and `aggregate` are what users call. A defense writes the methods behind them, which
    take one object: `make_update`, `make_announcement`, `perturb_gradients` and `combine`.

    What a defense can do and needs is declared by the attributes below: whoever composes or carries defenses goes by
    these, never by which methods a class happens to have. How they compose is said in `gradveil.defenses.composition`.
    """

    factory = "gradveil.defense"

    gradient_only: bool = False
    """`perturb` works without the client's data."""
    batches_clients: bool = False
    """`perturb_clients` defends many clients at once, each as it would have been alone."""
    needs_preparing: bool = False
    """It cannot work before `prepare` has looked at public data, or has changed the model."""
    announces: bool = False
    """One client publishes something before the round."""
    hides_updates: bool = False
    """It stands for a protocol that keeps single updates from the server."""
    aggregates: bool = False
    """The server has to aggregate as the defense says; else any way of combining updates goes with it."""
    adds_noise: bool = True
    """How well it protects depends on the size of the update beside its noise. True unless a defense says otherwise:
    one that was not thought of must not lose its protection to a large update."""
    keeps_zeros: bool = False
    """What is zero in the gradient is zero in what it sends."""
    has_adaptive_attacker: bool = False
    """`adapt` says how an attacker who knows the defense uses that; else only the generic one is there, which averages
    over simulated draws."""
    explained_by_noise: bool = False
    """Apart from noise of known variance, what it sends is what the first form of `adapt` expects."""

    def __init_subclass__(cls, *, composed: bool = False) -> None:
        """Refuse a class that does what it does not declare: compositions would leave it out.

        Args:
            composed: the capabilities come from other defenses.
        """
        super().__init_subclass__()
        for method, hook in _THIN.items():
            if method in vars(cls):
                raise TypeError(f"{cls.__name__} has a method {method} of its own: write {hook}, which is behind it")
        for method, capability in ({} if composed else _DECLARED).items():
            writer = next(base for base in cls.__mro__ if method in vars(base))
            if writer.__module__ != __name__ and not getattr(cls, capability):
                raise TypeError(f"{cls.__name__} has a method {method} of its own: declare {capability} = True")

    # -- what users call ---------------------------------------------------------------------------------------------

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Prepared:
        """Once, before training: measure or search on public data. Nothing is changed in place.

        Args:
            task: the model as the server would send it.
            public: examples that nobody must hide.
            generator: randomness of the search.
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
        """What leaves the client; the arguments are those of `ClientRound`."""
        given = ClientRound(
            task=task,
            inputs=inputs,
            targets=targets,
            generator=generator,
            memory=memory,
            announced=announced,
            local=local,
        )
        return self.make_update(given)

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
        """What one elected client publishes before the round; most defenses need nothing."""
        given = ClientRound(task=task, inputs=inputs, targets=targets, generator=generator, memory=memory, local=local)
        return self.make_announcement(given)

    def perturb(
        self,
        gradients: Mapping[str, Tensor],
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        announced: Announced | None = None,
    ) -> Update:
        """The defended gradients, for defenses that need nothing else; `gradients` is not touched."""
        return self.perturb_gradients(gradients, ClientState(generator=generator, memory=memory, announced=announced))

    def aggregate(
        self,
        updates: Sequence[Update],
        *,
        weights: Sequence[float] | None = None,
        memory: Memory | None = None,
        announced: Announced | None = None,
    ) -> Update:
        """What the server makes of the updates of a round."""
        return self.combine(ServerRound(updates, weights, memory, announced))

    def visible(self, updates: Sequence[Update]) -> list[Update]:
        """What the server can read of the updates of a round."""
        return list(updates)

    # -- what defenses write -----------------------------------------------------------------------------------------

    @abstractmethod
    def make_update(self, client: ClientRound) -> Update:
        """What leaves the client."""

    def make_announcement(self, client: ClientRound) -> Announced | None:
        """What the client publishes if it is elected."""
        return None

    def publish(self, gradients: Mapping[str, Tensor], memory: Memory | None = None) -> Announced | None:
        """What the elected client announces, made from its gradients."""
        return None

    def check_announced(self, announced: Announced | None, parameters: Mapping[str, Tensor]) -> None:
        """Refuse (`InputError`) an announcement that does not fit the model; the server then elects another client."""

    def locations(self, announced: Announced | None) -> Announced | None:
        """The positions that both sides know all updates of the round to lie in, so that bytes need not name them."""
        return None

    def perturb_gradients(self, gradients: Mapping[str, Tensor], client: ClientState) -> Update:
        """The defended gradients of one client."""
        raise InputError(f"{self.name}: needs the client's data; call share(task, inputs, targets) instead of perturb")

    def combine(self, received: ServerRound) -> Update:
        """What the server makes of the updates of a round: their weighted mean."""
        return received.mean()

    def residuals(self, memory: Memory) -> Iterator[Memory]:
        """The parts of a client's memory in which error feedback keeps what was not sent, layer by layer."""
        return iter(())

    # -- what is known of it -----------------------------------------------------------------------------------------

    @property
    def strength(self) -> Strength | None:
        """The parameter that makes it stronger, as it is declared; None: there is none."""
        return strength_of(self)

    def with_strength(self, value: float) -> "Defense":
        """The same defense at another value of its strength, not prepared."""
        if self.strength is None:
            raise ParameterError(f"{self.name}: has no parameter that makes it stronger or weaker")
        return type(self)(**{**self.parameters, self.strength.parameter: value})

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """How an attacker who knows the defense and its parameters, though not its draws, uses that: by name.

        The first is the strongest known and what ``ThreatModel(adaptive=True)`` means. Empty: nobody has said; then
        attackers average over simulated draws of the defense.

        Args:
            task: the model as the client has it, after `prepare`.
            batch_size: examples behind an update.
            local: the client's local steps.
        """
        return {}

    def noise_variance(self) -> float | Mapping[str, Tensor] | None:
        """Variance of the normal noise on each value, if that is all the defense does and no data decides its level.

        None where that is not so; then no reconstruction bound is known (`gradveil.theory.reconstruction_bound`).
        """
        return None

    def privacy_spent(
        self, *, rounds: int, batch_size: int, examples: int, local: LocalSteps | None = None
    ) -> PrivacySpent | None:
        """The (epsilon, delta) of a client after a run, for defenses that carry a proof; None: no guarantee.

        Args:
            rounds: rounds the client took part in.
            batch_size: examples it drew in each, without replacement.
            examples: examples it drew them from.
            local: its local steps.
        """
        return None


class Perturbation(Defense):
    """A defense that needs only gradients.

    Subclasses write one function, `perturb_rows`, for one layer of many clients: row i belongs to client i. A single
    client is a batch of one, so batch and loop are the same code. A method that looks at several layers together, or
    at what was announced, overrides `perturb_layers` instead.

    Under FedAvg it acts once, on the finished update.
    """

    gradient_only = True
    batches_clients = True

    @abstractmethod
    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Defend one layer: ``[clients, values]`` to ``[clients, values]``; `rows` must not be changed.

        Args:
            rows: a layer's gradients, one row per client, at least one value.
            draws: random tensors and noise, each row from its client's own source.
        """

    def perturb_layers(
        self, layers: Mapping[str, Tensor], draws: Draws, announced: Announced | None = None
    ) -> dict[str, Tensor]:
        """Defend all layers, each ``[clients, values]``, which must not be changed."""
        return {name: self.perturb_rows(rows, draws) if rows.numel() else rows.clone() for name, rows in layers.items()}

    def make_update(self, client: ClientRound) -> Update:
        """Compute the client's update and perturb it."""
        return self.perturb_gradients(client.update(), client)

    def make_announcement(self, client: ClientRound) -> Announced | None:
        """Publish what the client's own update says; costs it a second gradient."""
        return self.publish(client.update(), client.memory) if self.announces else None

    def perturb_gradients(self, gradients: Mapping[str, Tensor], client: ClientState) -> Update:
        """The defended gradients of one client; `gradients` is not touched."""
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
            generators: one per client, so that each gets what it would have got alone, for simulations; default: a
                cryptographic stream each.
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
        sources = [source_of(one) for one in ([None] * clients if generators is None else generators)]
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
    """A defense that works on the client's data: it makes the gradient of every step.

    Subclasses write one function, `step`. Under FedAvg it acts in every local step.
    """

    @abstractmethod
    def step(self, client: ClientRound) -> Gradients:
        """The defended gradients of one step; `client` has the weights and the batch of that step."""

    def make_update(self, client: ClientRound) -> Update:
        """Compute the client's update from defended steps."""
        return client.update(
            lambda task, inputs, targets: self.step(
                dataclasses.replace(client, task=task, inputs=inputs, targets=targets)
            )
        )


def meta_of(gradients: Mapping[str, Tensor]) -> Meta | None:
    """How the gradients came about, for the update that a defense makes of them: its bytes and values are new."""
    return dataclasses.replace(gradients.meta, bytes=None, grids={}) if isinstance(gradients, Update) else None


def _is_finite(value: Tensor) -> bool:
    # The extremes are NaN or infinite when any value is; a tenth of the time of `isfinite(value).all()`.
    return not value.numel() or all(math.isfinite(extreme) for extreme in value.detach().aminmax())


def check_result(defense: Defense, result: Mapping[str, Tensor]) -> None:
    """Refuse to send what is not finite any more; after noise, that tells nothing of the gradient."""
    for name, value in result.items():
        if not _is_finite(value):
            raise NotFiniteError(
                f"{defense.name}: the result overflows {value.dtype} in {name!r}; use a weaker {defense!r}"
            )


def checked_gradients(owner: str, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The gradients, if they are finite floating-point tensors by name."""
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
