"""The contract of a defense, and defenses made of defenses."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from gradveil import checks
from gradveil.accounting import PrivacySpent
from gradveil.defenses.knowledge import Expect, Knowledge
from gradveil.errors import InputError, NotFiniteError, ParameterError
from gradveil.randomness import Draws, Randomness, Source, source_of
from gradveil.registry import Method, Registry, format_spec
from gradveil.task import Gradients, Task
from gradveil.update import LocalSteps, Meta, Update, compute_update, weighted_mean

DEFENSES: Registry["Defense"] = Registry("defense")

Memory = MutableMapping[str, Tensor]
"""What a client keeps from round to round. Put new tensors in; one that is changed in place may be lost, for memories
go to disk and into Flower's contexts when they are set."""
Public = Mapping[str, Tensor]
Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Strength:
    """The parameter by which a defense is made stronger, and between which values: more of it costs more.

    Fair comparisons turn it until all defenses cost the same.

    Args:
        parameter: its name.
        weak: the value at which the defense does least.
        strong: the value at which it does most.
        log: the values between are spaced by their ratio, not by their difference.
        whole: only whole numbers.

    Example:
        >>> keep = Strength("keep", 1.0, 1e-4, log=True)
        >>> keep.at(0), keep.at(0.5), keep.at(1)
        (1.0, 0.01, 0.0001)
    """

    parameter: str
    weak: float
    strong: float
    log: bool = False
    whole: bool = False

    def at(self, position: float) -> float | int:
        """The value at a position from 0 (weak) to 1 (strong), to four digits."""
        if self.log:
            value = self.weak * (self.strong / self.weak) ** position
        else:
            value = self.weak + (self.strong - self.weak) * position
        return round(value) if self.whole else float(f"{value:.4g}")


_DECLARED = {
    "announce": "announces",
    "publish": "announces",
    "visible": "hides_updates",
    "aggregate": "aggregates",
    "adapt": "has_adaptive_attacker",
}
"""Methods that a defense writes only if it has the capability."""


class Defense(Method, ABC):
    """What a client does to its update before anybody sees it, and what the server does with the updates.

    A new defense is one file: a dataclass registered with ``@DEFENSES.register(name)`` whose fields are its
    parameters, checked in ``__post_init__``. One that needs only gradients derives from `Perturbation`; one that
    needs the client's data overrides `share`.

    What a defense can do and needs is declared by the attributes below: whoever composes or carries defenses goes by
    these, never by which methods a class happens to have. `Chain` and `ErrorFeedback` derive theirs from their parts.
    """

    factory = "gradveil.defense"

    gradient_only: bool = False
    """`perturb` works without the client's data."""
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

    def __init_subclass__(cls) -> None:
        """Refuse a class that does what it does not declare: compositions would leave it out."""
        super().__init_subclass__()
        for method, capability in _DECLARED.items():
            writer = next(base for base in cls.__mro__ if method in vars(base))
            if writer.__module__ != __name__ and not getattr(cls, capability):
                raise TypeError(f"{cls.__name__} has a method {method} of its own: declare {capability} = True")

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Task:
        """Once, before training: measure or search on public data. Returns the task, changed if the model changes."""
        return task

    def announce(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        local: LocalSteps | None = None,
    ) -> Public | None:
        """What one elected client publishes before the round; most defenses need nothing."""
        return None

    def publish(self, gradients: Mapping[str, Tensor], memory: Memory | None = None) -> Public | None:
        """What the elected client announces, made from its gradients; most defenses need nothing."""
        return None

    def check_public(self, public: Public | None, parameters: Mapping[str, Tensor]) -> None:
        """Refuse (`InputError`) an announcement that does not fit the model; the server then elects another client."""

    def locations(self, public: Public | None) -> Public | None:
        """The positions that both sides know all updates of the round to lie in, so that bytes need not name them."""
        return None

    @abstractmethod
    def share(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        public: Public | None = None,
        local: LocalSteps | None = None,
    ) -> Update:
        """What leaves the client.

        Args:
            task: the model at the weights the server sent.
            inputs: the client's batch, images in [0, 1].
            labels: its labels.
            generator: the client's randomness. Leave it out in use: then all draws come from a cryptographic stream,
                and noise lies on a grid that shows nothing of the gradient (`gradveil.randomness`). A torch generator
                is for simulations: whoever sees some of its draws can compute the others.
            memory: the client's own state, the same mapping every round.
            public: what the elected client announced.
            local: local steps (FedAvg); None: a single gradient.
        """

    def perturb(
        self,
        gradients: Mapping[str, Tensor],
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        public: Public | None = None,
    ) -> Update:
        """The defended gradients, for defenses that need nothing else; `gradients` is not touched."""
        raise InputError(f"{self.name}: needs the client's data; call share(task, inputs, labels) instead of perturb")

    def visible(self, updates: Sequence[Update]) -> list[Update]:
        """What the server can read of the updates of a round."""
        return list(updates)

    def aggregate(
        self,
        updates: Sequence[Update],
        *,
        weights: Sequence[float] | None = None,
        memory: Memory | None = None,
        public: Public | None = None,
    ) -> Update:
        """What the server makes of the updates of a round: their weighted mean."""
        return weighted_mean(updates, weights)

    def residuals(self, memory: Memory) -> Iterator[Memory]:
        """The parts of a client's memory in which error feedback keeps what was not sent, layer by layer."""
        return iter(())

    @property
    def strength(self) -> Strength | None:
        """The parameter that makes it stronger, which methods state as a class attribute; None: there is none."""
        return None

    def with_strength(self, value: float) -> "Defense":
        """The same defense at another value of its strength, not prepared."""
        return type(self)(**{**self.parameters, _strength_of(self).parameter: value})

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """How an attacker who knows the defense and its parameters, though not its draws, uses that: by name.

        The first is the strongest known and what ``ThreatModel(adaptive=True)`` means. Empty: nobody has said; then
        attackers average over simulated draws of the defense.

        Args:
            task: the model as the client has it, after `prepare`.
            batch_size: images behind an update.
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
            batch_size: images it drew in each, without replacement.
            examples: images it drew them from.
            local: its local steps.
        """
        return None


def _strength_of(defense: Defense) -> Strength:
    if defense.strength is None:
        raise ParameterError(f"{defense.name}: has no parameter that makes it stronger or weaker")
    return defense.strength


class Perturbation(Defense):
    """A defense that needs only gradients.

    Subclasses write one function, `perturb_rows`, for one layer of many clients: row i belongs to client i. A single
    client is a batch of one, so batch and loop are the same code. A method that looks at several layers together, or
    at what was announced, overrides `perturb_layers` instead.

    Under FedAvg it acts once, on the finished update.
    """

    gradient_only = True

    @abstractmethod
    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Defend one layer: ``[clients, values]`` to ``[clients, values]``; `rows` must not be changed.

        Args:
            rows: a layer's gradients, one client a row, at least one value.
            draws: random tensors and noise, each row from its client's own source.
        """

    def perturb_layers(
        self, layers: Mapping[str, Tensor], draws: Draws, public: Public | None = None
    ) -> dict[str, Tensor]:
        """Defend all layers, each ``[clients, values]``, which must not be changed."""
        return {name: self.perturb_rows(rows, draws) if rows.numel() else rows.clone() for name, rows in layers.items()}

    def announce(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        local: LocalSteps | None = None,
    ) -> Public | None:
        """Publish what the client's own update says; costs it a second gradient."""
        if not self.announces:
            return None
        return self.publish(compute_update(task, inputs, labels, local=local, generator=generator), memory)

    def perturb(
        self,
        gradients: Mapping[str, Tensor],
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        public: Public | None = None,
    ) -> Update:
        """The defended gradients of one client; `gradients` is not touched."""
        check_gradients(self.name, gradients)
        stacked = {name: value[None] for name, value in gradients.items()}
        result = self._perturb_stacked(stacked, None if generator is None else [generator], public)
        return Update({name: value[0] for name, value in result.items()}, meta_of(gradients))

    def perturb_clients(
        self,
        gradients: Mapping[str, Tensor],
        *,
        generators: Sequence[Randomness] | None = None,
        public: Public | None = None,
    ) -> dict[str, Tensor]:
        """The defended gradients of many clients at once: every tensor has a leading client dimension.

        Args:
            gradients: ``[clients, *parameter shape]`` by name.
            generators: one per client, so that each gets what it would have got alone, for simulations; default: a
                cryptographic stream each.
            public: what the elected client announced.
        """
        check_gradients(self.name, gradients)
        return self._perturb_stacked(gradients, generators, public)

    def _perturb_stacked(
        self,
        gradients: Mapping[str, Tensor],
        generators: Sequence[Randomness] | None,
        public: Public | None,
    ) -> dict[str, Tensor]:
        clients = len(next(iter(gradients.values())))
        sources = [source_of(one) for one in ([None] * clients if generators is None else generators)]
        if len(sources) != clients:
            raise InputError(f"{self.name}: expected one generator per client ({clients}), got {len(sources)}")
        self.check_public(public, {name: value[0] for name, value in gradients.items()})
        layers = {name: value.reshape(clients, math.prod(value.shape[1:])) for name, value in gradients.items()}
        result = {
            name: rows.reshape(gradients[name].shape)
            for name, rows in self.perturb_layers(layers, Draws(sources), public).items()
        }
        check_result(self, result)
        return result

    def share(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        public: Public | None = None,
        local: LocalSteps | None = None,
    ) -> Update:
        """Compute the client's update and perturb it."""
        update = compute_update(task, inputs, labels, local=local, generator=generator)
        return self.perturb(update, generator=generator, memory=memory, public=public)


class StepDefense(Defense):
    """A defense that works on the client's data: it makes the gradient of every step.

    Subclasses write one function, `step`. Under FedAvg it acts in every local step.
    """

    @abstractmethod
    def step(self, task: Task, inputs: Tensor, labels: Tensor, *, source: Source, memory: Memory | None) -> Gradients:
        """The defended gradients of one step.

        Args:
            task: the model at the weights of this step.
            inputs: the step's batch.
            labels: its labels.
            source: the client's randomness.
            memory: the client's own state, if it has one.
        """

    def share(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        public: Public | None = None,
        local: LocalSteps | None = None,
    ) -> Update:
        """Compute the client's update from defended steps."""
        source = source_of(generator)

        def step(stepping: Task, images: Tensor, targets: Tensor) -> Gradients:
            return self.step(stepping, images, targets, source=source, memory=memory)

        return compute_update(task, inputs, labels, local=local, generator=source, gradients=step)


class ErrorFeedback(Defense):
    r"""What a defense held back is added to the next round's gradient (Karimireddy et al., ICML 2019).

    .. math:: P = g + e, \quad sent = D(P), \quad e \leftarrow P - sent

    The residual `e` lives in the client's `memory` under ``residual/<layer>``, so the same mapping must be passed
    every round. What was held back leaves the client later, as far as the inner defense ever lets it through; around
    additive noise the noise cancels over the rounds. It restores utility, not privacy.

    Around dual pruning the plain form starves the largest coordinates: they are held back, so their residual grows,
    so they stay the largest. Two remedies bound the residual: `decay` forgets a share of it every round, `clip` cuts
    it, in each layer and round, to a multiple of the largest magnitude sent, so that what was held back at the top
    comes back into the band. Either way something is lost: sent + residual no longer add up to the gradients, and
    training may suffer more from that than from the starvation (docs/pruning-and-dropout.md has the figures).

    Args:
        inner: a gradient-only defense.
        decay: share of the residual that is kept; 1: all of it, as published.
        clip: largest residual, in units of the layer's largest sent magnitude; None: no limit, as published.

    Example:
        >>> import gradveil
        >>> defense = ErrorFeedback(gradveil.defense("top-k", keep=0.5))
        >>> memory = {}
        >>> defense.perturb({"w": torch.tensor([1.0, 3.0])}, memory=memory)["w"].tolist()
        [0.0, 3.0]
        >>> defense.perturb({"w": torch.tensor([2.5, 3.0])}, memory=memory)["w"].tolist()
        [3.5, 0.0]
    """

    paper = "Karimireddy et al., ICML 2019"
    caveat = (
        "attacked in a client's first round, before error feedback has sent anything that was held back; later rounds "
        "send of it what the defense lets through."
    )
    gradient_only = True

    def __init__(self, inner: Defense, decay: float = 1.0, clip: float | None = None) -> None:
        if not inner.gradient_only:
            raise ParameterError(
                f"error-feedback: the inner defense must need only gradients, got {inner.name}, which needs data"
            )
        self.inner, self.parts = inner, (inner,)
        self.decay = checks.number("error-feedback", "decay", decay, above=0, high=1)
        self.clip = None if clip is None else checks.number("error-feedback", "clip", clip, above=0)
        self.name = f"{inner.name}+error-feedback"  # type: ignore[misc]
        self.needs_preparing, self.announces = inner.needs_preparing, inner.announces
        self.hides_updates, self.aggregates = inner.hides_updates, inner.aggregates
        self.adds_noise, self.has_adaptive_attacker = inner.adds_noise, inner.has_adaptive_attacker

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Task:
        """Prepare the inner defense."""
        return self.inner.prepare(task, public=public, generator=generator)

    announce = Perturbation.announce

    def publish(self, gradients: Mapping[str, Tensor], memory: Memory | None = None) -> Public | None:
        """What the inner defense publishes of gradient + residual, which is what it will send from."""
        if not self.announces:
            return None
        return self.inner.publish(self._wanted(gradients, memory), scoped(memory, "inner"))

    def residuals(self, memory: Memory) -> Iterator[Memory]:
        """Its own, then those of the inner defense."""
        yield scoped(memory, "residual")
        yield from self.inner.residuals(scoped(memory, "inner"))

    def check_public(self, public: Public | None, parameters: Mapping[str, Tensor]) -> None:
        """As the inner defense says."""
        self.inner.check_public(public, parameters)

    def locations(self, public: Public | None) -> Public | None:
        """As the inner defense says."""
        return self.inner.locations(public)

    def perturb(
        self,
        gradients: Mapping[str, Tensor],
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        public: Public | None = None,
    ) -> Update:
        """Defend gradient + residual, and keep what was not sent."""
        wanted = Update(self._wanted(gradients, memory), meta_of(gradients))
        assert memory is not None
        sent = self.inner.perturb(wanted, generator=generator, memory=scoped(memory, "inner"), public=public)
        for name, value in wanted.items():
            memory[f"residual/{name}"] = self._left((value - sent[name]).detach(), sent[name])
        return sent

    def _wanted(self, gradients: Mapping[str, Tensor], memory: Memory | None) -> dict[str, Tensor]:
        if memory is None:
            raise InputError(
                "error-feedback: needs memory=, a mapping that is the client's own and lives through all rounds"
            )
        check_gradients(self.inner.name, gradients)
        return {name: _with_residual(name, value, memory.get(f"residual/{name}")) for name, value in gradients.items()}

    @property
    def strength(self) -> Strength | None:
        """As the inner defense says."""
        return self.inner.strength

    def with_strength(self, value: float) -> "ErrorFeedback":
        """Around the inner defense at another strength."""
        return ErrorFeedback(self.inner.with_strength(value), self.decay, self.clip)

    share = Perturbation.share

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """As against the inner defense, on gradient + residual.

        The residual is no secret: whoever supposes a gradient knows it too, round by round, from what was sent.
        The first observed round is taken to be the client's first.
        """
        forms = self.inner.adapt(task, batch_size=batch_size, local=local)
        return {
            name: dataclasses.replace(form, expect=self._expect(form)) if form.changes_matching else form
            for name, form in forms.items()
        }

    def _expect(self, inner: Knowledge) -> Expect:
        def unsent(wanted: Tensor, sent: Tensor) -> Tensor:
            return torch.where(sent != 0, 0, wanted) if inner.sends_values else wanted - sent

        def expect(gradients: Sequence[Gradients], updates: Sequence[Gradients]) -> list[Gradients]:
            wanted: list[Gradients] = []
            for values, before in zip(gradients, [None, *updates[:-1]], strict=True):
                if before is not None:
                    left = {name: self._left(unsent(wanted[-1][name], sent), sent) for name, sent in before.items()}
                    values = {name: value + left[name] for name, value in values.items()}
                wanted.append(values)
            return inner.expect(wanted, updates) if inner.expect else wanted

        return expect

    def _left(self, unsent: Tensor, sent: Tensor) -> Tensor:
        """What is kept of what was not sent."""
        residual = self.decay * unsent if self.decay < 1 else unsent
        if self.clip is not None and sent.numel():
            limit = self.clip * sent.abs().max()
            residual = residual.clamp(-limit, limit)
        return residual

    def visible(self, updates: Sequence[Update]) -> list[Update]:
        """As the inner defense says."""
        return self.inner.visible(updates)

    def aggregate(
        self,
        updates: Sequence[Update],
        *,
        weights: Sequence[float] | None = None,
        memory: Memory | None = None,
        public: Public | None = None,
    ) -> Update:
        """As the inner defense says."""
        return self.inner.aggregate(updates, weights=weights, memory=memory, public=public)

    @property
    def parameters(self) -> dict[str, Any]:
        """The inner defense's parameters, and what differs from the published form."""
        return {**self.inner.parameters, **{f"error_feedback_{name}": value for name, value in self._own().items()}}

    def _own(self) -> dict[str, Any]:
        own = {"decay": None if self.decay == 1 else self.decay, "clip": self.clip}
        return {name: value for name, value in own.items() if value is not None}

    def __str__(self) -> str:
        return f"{self.inner}+{format_spec('error-feedback', self._own())}"

    def __repr__(self) -> str:
        own = "".join(f", {name}={value!r}" for name, value in self._own().items())
        return f"gradveil.ErrorFeedback({self.inner!r}{own})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ErrorFeedback) and (self.inner, self._own()) == (other.inner, other._own())

    __hash__ = None  # type: ignore[assignment]


class Chain(Defense):
    """Several defenses one after the other; all but the first must need only gradients.

    At most one of them may have a server side of its own (it announces, hides updates or aggregates).

    What a chain declares is what its parts guarantee. Those behind the first see only what the first one sends, so they
    process what was already released: an (epsilon, delta) of the first part holds for the chain, and so does the
    reconstruction bound of its noise. The locations that the first one announced hold if all others keep zeros.

    Args:
        parts: two or more defenses, in the order in which they act.

    Example:
        >>> import gradveil
        >>> chain = Chain(gradveil.defense("top-k", keep=0.1), gradveil.defense("gaussian-noise", std=0.01))
        >>> str(chain)
        'top-k:keep=0.1+gaussian-noise:std=0.01'
    """

    paper = "-"
    parts: tuple[Defense, ...]

    def __init__(self, *parts: Defense) -> None:
        if len(parts) < 2:
            raise ParameterError(f"chain: expected two or more defenses, got {len(parts)}")
        for part in parts[1:]:
            if not part.gradient_only:
                raise ParameterError(f"chain: {part.name} needs data and must come first")
        for part in parts[1:]:
            if part.announces:
                raise ParameterError(f"chain: {part.name} announces something before the round and must come first")
        with_server_side = [part for part in parts if part.announces or part.hides_updates or part.aggregates]
        if len(with_server_side) > 1:
            raise ParameterError(
                "chain: at most one defense may have a server side, got "
                + " and ".join(part.name for part in with_server_side)
            )
        self.parts = parts
        self.name = "+".join(part.name for part in parts)  # type: ignore[misc]
        self.gradient_only = all(part.gradient_only for part in parts)
        self.needs_preparing = any(part.needs_preparing for part in parts)
        self.announces = parts[0].announces
        self.hides_updates = any(part.hides_updates for part in parts)
        self.aggregates = any(part.aggregates for part in parts)
        self.adds_noise = any(part.adds_noise for part in parts)
        self.keeps_zeros = all(part.keeps_zeros for part in parts)
        self._server = with_server_side[0] if with_server_side else parts[0]

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Task:
        """Prepare every part in turn."""
        for part in self.parts:
            task = part.prepare(task, public=public, generator=generator)
        return task

    def announce(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        local: LocalSteps | None = None,
    ) -> Public | None:
        """What the first part announces."""
        return self.parts[0].announce(
            task, inputs, labels, generator=generator, memory=scoped(memory, "0"), local=local
        )

    def publish(self, gradients: Mapping[str, Tensor], memory: Memory | None = None) -> Public | None:
        """As the first part says."""
        return self.parts[0].publish(gradients, scoped(memory, "0"))

    def locations(self, public: Public | None) -> Public | None:
        """Those of the first part, unless another one puts values elsewhere."""
        return self.parts[0].locations(public) if all(part.keeps_zeros for part in self.parts[1:]) else None

    def residuals(self, memory: Memory) -> Iterator[Memory]:
        """Those of all parts."""
        for index, part in enumerate(self.parts):
            yield from part.residuals(scoped(memory, str(index)))

    def noise_variance(self) -> float | Mapping[str, Tensor] | None:
        """That of the first part: what is done to its noisy update can only take information away."""
        return self.parts[0].noise_variance()

    def privacy_spent(
        self, *, rounds: int, batch_size: int, examples: int, local: LocalSteps | None = None
    ) -> PrivacySpent | None:
        """What the first part spends: the others process what it released."""
        return self.parts[0].privacy_spent(rounds=rounds, batch_size=batch_size, examples=examples, local=local)

    def check_public(self, public: Public | None, parameters: Mapping[str, Tensor]) -> None:
        """As the first part says."""
        self.parts[0].check_public(public, parameters)

    def share(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        public: Public | None = None,
        local: LocalSteps | None = None,
    ) -> Update:
        """The first part shares, the others perturb."""
        update = self.parts[0].share(
            task, inputs, labels, generator=generator, memory=scoped(memory, "0"), public=public, local=local
        )
        return self._perturb_from(1, update, generator, memory)

    def perturb(
        self,
        gradients: Mapping[str, Tensor],
        *,
        generator: Randomness | None = None,
        memory: Memory | None = None,
        public: Public | None = None,
    ) -> Update:
        """Every part perturbs in turn."""
        first = self.parts[0].perturb(gradients, generator=generator, memory=scoped(memory, "0"), public=public)
        return self._perturb_from(1, first, generator, memory)

    def _perturb_from(self, first: int, update: Update, generator: Randomness | None, memory: Memory | None) -> Update:
        for index, part in enumerate(self.parts[first:], start=first):
            update = part.perturb(update, generator=generator, memory=scoped(memory, str(index)))
        return update

    @property
    def strength(self) -> Strength | None:
        """That of the first part that has one."""
        return next((part.strength for part in self.parts if part.strength), None)

    def with_strength(self, value: float) -> "Chain":
        """The chain with that part at another strength."""
        parts = list(self.parts)
        place = next((place for place, part in enumerate(parts) if part.strength), 0)
        parts[place] = parts[place].with_strength(value)
        return Chain(*parts)

    def visible(self, updates: Sequence[Update]) -> list[Update]:
        """As the part with a server side says."""
        return self._server.visible(updates)

    def aggregate(
        self,
        updates: Sequence[Update],
        *,
        weights: Sequence[float] | None = None,
        memory: Memory | None = None,
        public: Public | None = None,
    ) -> Update:
        """As the part with a server side says."""
        return self._server.aggregate(updates, weights=weights, memory=memory, public=public)

    @property
    def parameters(self) -> dict[str, Any]:
        """Each part's parameters under its place and name."""
        return {f"{index}.{part.name}": part.parameters for index, part in enumerate(self.parts)}

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))

    def __repr__(self) -> str:
        return f"gradveil.Chain({', '.join(map(repr, self.parts))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.parts == other.parts

    __hash__ = None  # type: ignore[assignment]


class _Scoped(MutableMapping[str, Tensor]):
    """The part of a memory under a prefix, so that parts of a chain do not see each other's state."""

    def __init__(self, memory: Memory, prefix: str) -> None:
        self._memory, self._prefix = memory, f"{prefix}/"

    def __getitem__(self, key: str) -> Tensor:
        return self._memory[self._prefix + key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self._memory[self._prefix + key] = value

    def __delitem__(self, key: str) -> None:
        del self._memory[self._prefix + key]

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self._prefix) for key in self._memory if key.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@overload
def scoped(memory: Memory, prefix: str) -> Memory: ...
@overload
def scoped(memory: None, prefix: str) -> None: ...
def scoped(memory: Memory | None, prefix: str) -> Memory | None:
    """A view of `memory` in which every key stands under `prefix`."""
    return None if memory is None else _Scoped(memory, prefix)


def meta_of(gradients: Mapping[str, Tensor]) -> Meta | None:
    """How the gradients came about, for the update that a defense makes of them: its bytes and values are new."""
    return dataclasses.replace(gradients.meta, bytes=None, grids={}) if isinstance(gradients, Update) else None


def _with_residual(name: str, value: Tensor, residual: Tensor | None) -> Tensor:
    if residual is None:
        return value
    if residual.shape != value.shape:
        raise InputError(
            f"error-feedback: the memory holds a residual of shape {list(residual.shape)} for {name!r}, whose "
            f"gradient has shape {list(value.shape)}; give every client and every model a memory of its own"
        )
    return value + residual


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


def check_gradients(owner: str, gradients: Mapping[str, Tensor]) -> None:
    """Refuse anything but finite floating-point tensors by name."""
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
