"""Defenses made of defenses, and the laws by which their declared capabilities compose."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from gradveil.core.errors import InputError, ParameterError
from gradveil.core.parameters import Strength, check_declared, component, number
from gradveil.core.registry import format_spec
from gradveil.defenses.accounting import PrivacySpent, SampledGaussian
from gradveil.defenses.base import Batch, Defense, Perturbation, Prepared, checked_gradients, meta_of
from gradveil.defenses.knowledge import Expect, Knowledge
from gradveil.task import Gradients, Task
from gradveil.update import Announced, ClientRound, ClientState, LocalSteps, Memory, ServerRound, Update

_LAWS: dict[str, Callable[[Sequence[Defense]], bool]] = {
    "gradient_only": lambda parts: all(part.gradient_only for part in parts),
    "needs_preparing": lambda parts: any(part.needs_preparing for part in parts),
    # Only the first part sees the client's own gradient, so only the first may announce.
    "announces": lambda parts: parts[0].announces,
    "hides_updates": lambda parts: any(part.hides_updates for part in parts),
    "aggregates": lambda parts: any(part.aggregates for part in parts),
    "adds_noise": lambda parts: any(part.adds_noise for part in parts),
    "keeps_zeros": lambda parts: all(part.keeps_zeros for part in parts),
    "removes_noise": lambda parts: any(part.removes_noise for part in parts),
    # The attacker reads the update as the last part says; what the parts before it send must be explained by noise.
    "has_adaptive_attacker": lambda parts: (
        all(part.has_adaptive_attacker for part in parts) and all(part.explained_by_noise for part in parts[:-1])
    ),
    "explained_by_noise": lambda parts: all(part.explained_by_noise for part in parts),
}
"""How each capability of defenses that act one after the other follows from those of the parts."""


class Composition(Defense, composed=True):
    """Several defenses that act one after the other, in the order of `parts`.

    The later parts see only what the first one sends, so they only post-process it: an (epsilon, delta) of the first
    part holds for the whole, and so does the reconstruction bound of its noise. The locations that the first part
    announced hold if all others keep zeros. At most one part has a server side of its own.
    """

    paper = "-"
    parts: tuple[Defense, ...]

    def __post_init__(self) -> None:
        """Derive the capabilities from those of the parts."""
        check_declared(self)
        self.check()
        for capability, law in _LAWS.items():
            object.__setattr__(self, capability, law(self.parts))

    @abstractmethod
    def with_parts(self, parts: Sequence[Defense]) -> "Composition":
        """The same composition of other parts."""

    @property
    def _server_part(self) -> Defense:
        return next((part for part in self.parts if _has_server_side(part)), self.parts[0])

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Prepared:
        """Prepare every part in turn."""
        parts = []
        for part in self.parts:
            prepared, task = part.prepare(task, public=public, generator=generator)
            parts.append(prepared)
        return Prepared(self.with_parts(parts), task)

    def check_announced(self, announced: Announced | None, parameters: Mapping[str, Tensor]) -> None:
        """Check it as the first part does."""
        self.parts[0].check_announced(announced, parameters)

    def locations(self, announced: Announced | None) -> Announced | None:
        """The locations of the first part, unless another part puts values elsewhere."""
        return self.parts[0].locations(announced) if all(part.keeps_zeros for part in self.parts[1:]) else None

    def visible(self, updates: Sequence[Update]) -> list[Update]:
        """What the part with a server side lets the server see."""
        return self._server_part.visible(updates)

    def combine(self, received: ServerRound) -> Update:
        """The aggregate of the part with a server side."""
        return self._server_part.combine(received)

    @property
    def strength(self) -> Strength | None:
        """The strength of the first part that has one."""
        return next((part.strength for part in self.parts if part.strength), None)

    def with_strength(self, value: float) -> Defense:
        """The same composition with that part at another strength."""
        parts = list(self.parts)
        index = next((index for index, part in enumerate(parts) if part.strength), 0)
        parts[index] = parts[index].with_strength(value)
        return self.with_parts(parts)


@dataclass(frozen=True, repr=False, init=False)
class Chain(Composition, composed=True):
    """Several defenses that act one after the other; all but the first must need only gradients.

    At most one of them may have a server side of its own (it announces, hides updates or aggregates). A chain declares
    what its parts guarantee.

    An attacker who knows the chain undoes the last part as the adaptive attacker of that part does, provided that all
    parts before it are `explained_by_noise`. Otherwise there is only the generic adaptive attacker.

    Args:
        parts: two or more defenses, in the order in which they act.

    Example:
        >>> import gradveil
        >>> chain = Chain(gradveil.defense("top-k", keep=0.1), gradveil.defense("gaussian-noise", std=0.01))
        >>> str(chain)
        'top-k:keep=0.1+gaussian-noise:std=0.01'
    """

    parts: tuple[Defense, ...] = component()

    def __init__(self, *parts: Defense) -> None:
        object.__setattr__(self, "parts", parts)
        self.__post_init__()

    def check(self) -> None:
        """Refuse parts that cannot act one after the other."""
        parts = self.parts
        if len(parts) < 2:
            raise ParameterError(f"chain: expected two or more defenses, got {len(parts)}")
        for part in parts[1:]:
            if not part.gradient_only:
                raise ParameterError(f"chain: {part.name} needs data and must come first")
        for part in parts[1:]:
            if part.announces:
                raise ParameterError(f"chain: {part.name} announces something before the round and must come first")
        server_sides = [part.name for part in parts if _has_server_side(part)]
        if len(server_sides) > 1:
            raise ParameterError(f"chain: at most one defense may have a server side, got {' and '.join(server_sides)}")

    @property
    def name(self) -> str:  # type: ignore[override]
        """The names of the parts, joined by ``+``."""
        return "+".join(part.name for part in self.parts)

    def with_parts(self, parts: Sequence[Defense]) -> "Chain":
        """A chain of other parts."""
        return Chain(*parts)

    def make_update(self, client: ClientRound) -> Update:
        """Let the first part make the update and the others perturb it."""
        return self._perturb_by_later_parts(self.parts[0].make_update(_for_part(client, 0)), client)

    def make_announcement(self, client: ClientRound) -> Announced | None:
        """What the first part announces."""
        return self.parts[0].make_announcement(_for_part(client, 0))

    def publish(self, gradients: Mapping[str, Tensor], memory: Memory | None = None) -> Announced | None:
        """What the first part publishes."""
        return self.parts[0].publish(gradients, scoped(memory, "0"))

    def perturb_gradients(self, gradients: Mapping[str, Tensor], client: ClientState) -> Update:
        """Let every part perturb in turn."""
        update = self.parts[0].perturb_gradients(gradients, _for_part(client, 0))
        return self._perturb_by_later_parts(update, client)

    def _perturb_by_later_parts(self, update: Update, client: ClientState) -> Update:
        for index, part in enumerate(self.parts[1:], start=1):
            update = part.perturb_gradients(update, dataclasses.replace(_for_part(client, index), announced=None))
        return update

    def residuals(self, memory: Memory) -> Iterator[Memory]:
        """The residuals of all parts."""
        for index, part in enumerate(self.parts):
            yield from part.residuals(scoped(memory, str(index)))

    def settle(self, memory: Memory, *, arrived: bool) -> None:
        """The last part with error feedback takes back what it was given; the parts before it delivered it that far."""
        for index, part in reversed(list(enumerate(self.parts))):
            own = scoped(memory, str(index))
            part.settle(own, arrived=arrived)
            arrived = arrived or any(True for _ in part.residuals(own))

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """Read the update as against the last part, given what the parts before it are expected to send."""
        if not self.has_adaptive_attacker:
            return {}
        *earlier, last = (part.adapt(task, batch_size=batch_size, local=local) for part in self.parts)
        forms = dict(last)
        for part_forms in reversed(earlier):
            strongest = next(iter(part_forms.values()), None)
            forms = {name: _chained(strongest, form) for name, form in forms.items()} if strongest else {}
        return forms

    def noise_variance(self, *, batch_size: int = 1) -> float | Mapping[str, Tensor] | None:
        """The noise of the first part: processing its noisy update further can only remove information."""
        return self.parts[0].noise_variance(batch_size=batch_size)

    def clipped(self, gradients: Gradients) -> Gradients:
        """What the first part clips before it adds its noise."""
        return self.parts[0].clipped(gradients)

    def privacy_spent(
        self, *, rounds: int, batch_size: int, examples: int, local: LocalSteps | None = None
    ) -> PrivacySpent | None:
        """What the first part spends, since the others only post-process what it releases."""
        return self.parts[0].privacy_spent(rounds=rounds, batch_size=batch_size, examples=examples, local=local)

    def sampled_gaussian(
        self, *, rounds: int, batch_size: int, examples: int, local: LocalSteps | None = None
    ) -> SampledGaussian | None:
        """That of the first part, since the others only post-process what it releases."""
        return self.parts[0].sampled_gaussian(rounds=rounds, batch_size=batch_size, examples=examples, local=local)

    @property
    def parameters(self) -> dict[str, Any]:
        """Each part's parameters under its index and name."""
        return {f"{index}.{part.name}": part.parameters for index, part in enumerate(self.parts)}

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))

    def __repr__(self) -> str:
        return f"gradveil.Chain({', '.join(map(repr, self.parts))})"


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Composition, composed=True):
    r"""Add what a defense held back to the next round's gradient (Karimireddy et al., ICML 2019).

    .. math:: P = g + e, \quad sent = D(P), \quad e \leftarrow P - sent

    The residual `e` lives in the client's `memory` under ``residual/<layer>``, so the same mapping must be passed
    every round. What was held back leaves the client later, as far as the inner defense ever lets it through; if the
    inner defense adds noise, the noise cancels over the rounds. Error feedback restores utility, not privacy: the inner
    defense's (epsilon, delta), reconstruction bound and zeros no longer hold.

    A message that is lost takes nothing from the residual: after ``defense.take_back(memory)`` it is P, everything that
    was held back or sent in that round. For this, what of P is not in the new residual (what was sent, and what `decay`
    or `clip` forgot) is kept under ``pending/<layer>`` until the next round, or until somebody says that the update
    arrived (`settle`). That doubles the memory for so long; on disk it is as sparse as what was sent. The engines and
    the Flower mod make these calls themselves.

    A defense whose server removes noise (`risk-slicing` with ``compensate``) is refused. With fresh noise :math:`z_t`
    on a share q of the values, a client whose last update arrived sends :math:`g_t + z_t - decay \cdot z_{t-1}`, whose
    noise has variance :math:`q \, std^2 (1 + decay^2)`; that of a client without a residual has :math:`q \, std^2`, and
    with `clip` it depends on the data. A server cannot tell from an update which of these it is, so there is no
    variance that it could rightly assume.

    Around dual pruning the plain form starves the largest coordinates: they are held back, so their residual grows,
    so they stay the largest. Two remedies bound the residual: `decay` forgets a share of it every round, and `clip`
    limits it, in each layer and round, to a multiple of the largest magnitude sent, so that what was held back at the
    top comes back into the band that is sent. Either way something is lost: sent + residual no longer add up to the
    gradients, and training may suffer more from that than from the starvation (see docs/pruning-and-dropout.md).

    Args:
        inner: a gradient-only defense.
        decay: share of the residual that is kept; 1 keeps all of it, as published.
        clip: largest residual, in units of the layer's largest sent magnitude; None sets no limit, as published.

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
        "send as much of it as the defense lets through."
    )

    inner: Defense = component()
    decay: float = number(1.0, above=0, high=1)
    clip: float | None = number(None, above=0)

    def check(self) -> None:
        """Refuse a defense that needs data, and one whose server removes noise that it takes to be fresh."""
        if not self.inner.gradient_only:
            raise ParameterError(
                f"error-feedback: the inner defense must need only gradients, got {self.inner.name}, which needs data"
            )
        if self.inner.removes_noise:
            raise ParameterError(
                f"error-feedback: the server of {self.inner.name} removes noise and expects it to be fresh, but error "
                "feedback sends the noise of earlier rounds again with opposite sign; use compensate=false"
            )

    def __post_init__(self) -> None:
        """Residuals are added to the gradient, so what the inner defense says of zeros and noise no longer holds."""
        super().__post_init__()
        object.__setattr__(self, "keeps_zeros", False)
        object.__setattr__(self, "explained_by_noise", False)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The inner defense's name and its own."""
        return f"{self.inner.name}+error-feedback"

    @property
    def parts(self) -> tuple[Defense, ...]:  # type: ignore[override]
        """The inner defense."""
        return (self.inner,)

    def with_parts(self, parts: Sequence[Defense]) -> "ErrorFeedback":
        """The same wrapper around another defense."""
        return dataclasses.replace(self, inner=parts[0])

    make_update = Perturbation.make_update
    make_announcement = Perturbation.make_announcement

    def publish(self, gradients: Mapping[str, Tensor], memory: Memory | None = None) -> Announced | None:
        """What the inner defense publishes for gradient + residual, which is what it will defend."""
        if not self.announces:
            return None
        return self.inner.publish(self._add_residuals(gradients, memory), scoped(memory, "inner"))

    def residuals(self, memory: Memory) -> Iterator[Memory]:
        """Its own residuals, then those of the inner defense."""
        yield scoped(memory, "residual")
        yield from self.inner.residuals(scoped(memory, "inner"))

    def perturb_gradients(self, gradients: Mapping[str, Tensor], client: ClientState) -> Update:
        """Defend gradient + residual, and keep what was not sent."""
        memory = client.memory
        corrected = Update(self._add_residuals(gradients, memory), meta_of(gradients))
        assert memory is not None
        sent = self.inner.perturb_gradients(corrected, _for_part(client, "inner"))
        for name, value in corrected.items():
            kept = self._residual((value - sent[name]).detach(), sent[name])
            memory[f"residual/{name}"], memory[f"pending/{name}"] = kept, value.detach() - kept
        return sent

    def settle(self, memory: Memory, *, arrived: bool) -> None:
        """Drop what is pending, or give it back to the residual, which is then gradient + residual of that round.

        Error feedback inside this one has delivered to it, whether or not the update arrived.
        """
        residual, pending = scoped(memory, "residual"), scoped(memory, "pending")
        for name in list(pending):
            value = pending.pop(name)
            if not arrived:
                residual[name] = residual[name] + value
        self.inner.settle(scoped(memory, "inner"), arrived=True)

    def _add_residuals(self, gradients: Mapping[str, Tensor], memory: Memory | None) -> dict[str, Tensor]:
        if memory is None:
            raise InputError(
                "error-feedback: needs memory=, a mapping that belongs to the client and is kept through all rounds"
            )
        checked_gradients(self.inner.name, gradients)
        return {name: _add_residual(name, value, memory.get(f"residual/{name}")) for name, value in gradients.items()}

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """Read the update as against the inner defense, but expect gradient + residual.

        The residual is no secret: given candidate gradients, it follows round by round from what was sent. The first
        observed round is assumed to be the client's first.
        """
        forms = self.inner.adapt(task, batch_size=batch_size, local=local)
        return {
            name: dataclasses.replace(form, expect=self._expect(form)) if form.changes_matching else form
            for name, form in forms.items()
        }

    def _expect(self, inner: Knowledge) -> Expect:
        def unsent(corrected: Tensor, sent: Tensor) -> Tensor:
            return torch.where(sent != 0, 0, corrected) if inner.sends_values else corrected - sent

        def expect(gradients: Sequence[Gradients], updates: Sequence[Gradients]) -> list[Gradients]:
            corrected: list[Gradients] = []
            for values, previous in zip(gradients, [None, *updates[:-1]], strict=True):
                if previous is not None:
                    values = {
                        name: value + self._residual(unsent(corrected[-1][name], previous[name]), previous[name])
                        for name, value in values.items()
                    }
                corrected.append(values)
            return inner.expect(corrected, updates) if inner.expect else corrected

        return expect

    def _residual(self, unsent: Tensor, sent: Tensor) -> Tensor:
        """What is kept for the next round of what was not sent."""
        residual = self.decay * unsent if self.decay < 1 else unsent
        if self.clip is not None and sent.numel():
            limit = self.clip * sent.abs().max()
            residual = residual.clamp(-limit, limit)
        return residual

    @property
    def parameters(self) -> dict[str, Any]:
        """The inner defense's parameters, and those of its own that differ from the published form."""
        own = {f"error_feedback_{name}": value for name, value in self._own_parameters().items()}
        return {**self.inner.parameters, **own}

    def _own_parameters(self) -> dict[str, Any]:
        own = {"decay": None if self.decay == 1 else self.decay, "clip": self.clip}
        return {name: value for name, value in own.items() if value is not None}

    def __str__(self) -> str:
        return f"{self.inner}+{format_spec('error-feedback', self._own_parameters())}"

    def __repr__(self) -> str:
        own = "".join(f", {name}={value!r}" for name, value in self._own_parameters().items())
        return f"gradveil.ErrorFeedback({self.inner!r}{own})"


def _has_server_side(defense: Defense) -> bool:
    return defense.announces or defense.hides_updates or defense.aggregates


def _chained(first: Knowledge, second: Knowledge) -> Knowledge:
    """Knowledge of two defenses of which the second acts on what the first sends."""

    def expect(gradients: Sequence[Gradients], updates: Sequence[Gradients]) -> list[Gradients]:
        values = first.expect(gradients, updates) if first.expect else list(gradients)
        return second.expect(values, updates) if second.expect else values

    return dataclasses.replace(
        second,
        summary=f"{first.summary}; {second.summary}",
        expect=expect if first.expect or second.expect else None,
        variance=_sum_of_variances(first.variance, second.variance),
    )


_Variance = float | Callable[[Gradients], Tensor]


def _sum_of_variances(first: _Variance, second: _Variance) -> _Variance:
    if not callable(first) and not callable(second):
        return first + second
    parts = [first, second]

    def variance(update: Gradients) -> Tensor:
        values = [part(update) if callable(part) else next(iter(update.values())).new_tensor(part) for part in parts]
        return values[0] + values[1]

    return variance


def _add_residual(name: str, value: Tensor, residual: Tensor | None) -> Tensor:
    if residual is None:
        return value
    if residual.shape != value.shape:
        raise InputError(
            f"error-feedback: the memory holds a residual of shape {list(residual.shape)} for {name!r}, whose "
            f"gradient has shape {list(value.shape)}; give every client and every model a memory of its own"
        )
    return value + residual


class _Scoped(MutableMapping[str, Tensor]):
    """The part of a memory under a prefix, so that the parts of a chain do not see each other's state."""

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
    """A view of the part of `memory` whose keys begin with `prefix`."""
    return None if memory is None else _Scoped(memory, prefix)


_Client = TypeVar("_Client", bound=ClientState)


def _for_part(client: _Client, part: int | str) -> _Client:
    """The client as one part sees it, with a separate memory."""
    return dataclasses.replace(client, memory=scoped(client.memory, str(part)))
