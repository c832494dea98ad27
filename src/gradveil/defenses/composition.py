"""Defenses made of defenses, and the laws by which what they declare composes."""

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
from gradveil.defenses.accounting import PrivacySpent
from gradveil.defenses.base import Batch, Defense, Perturbation, Prepared, checked_gradients, meta_of
from gradveil.defenses.knowledge import Expect, Knowledge
from gradveil.task import Gradients, Task
from gradveil.update import Announced, ClientRound, ClientState, LocalSteps, Memory, ServerRound, Update

_LAWS: dict[str, Callable[[Sequence[Defense]], bool]] = {
    "gradient_only": lambda parts: all(part.gradient_only for part in parts),
    "needs_preparing": lambda parts: any(part.needs_preparing for part in parts),
    # Only the first part sees the client's own gradient, so only that one may announce.
    "announces": lambda parts: parts[0].announces,
    "hides_updates": lambda parts: any(part.hides_updates for part in parts),
    "aggregates": lambda parts: any(part.aggregates for part in parts),
    "adds_noise": lambda parts: any(part.adds_noise for part in parts),
    "keeps_zeros": lambda parts: all(part.keeps_zeros for part in parts),
    # The last part is read as it says; those before it must be explained by what they expect and by their noise.
    "has_adaptive_attacker": lambda parts: (
        all(part.has_adaptive_attacker for part in parts) and all(part.explained_by_noise for part in parts[:-1])
    ),
    "explained_by_noise": lambda parts: all(part.explained_by_noise for part in parts),
}
"""What holds of several defenses one after the other."""


class Composition(Defense, composed=True):
    """Several defenses one after the other; `parts` says which, in the order in which they act.

    Those behind the first see only what the first one sends, so they process what was already released: an (epsilon,
    delta) of the first part holds for all, and so does the reconstruction bound of its noise. The locations that the
    first one announced hold if all others keep zeros. At most one part has a server side of its own.
    """

    paper = "-"
    parts: tuple[Defense, ...]

    def __post_init__(self) -> None:
        """Derive what it declares."""
        check_declared(self)
        self.check()
        for capability, law in _LAWS.items():
            object.__setattr__(self, capability, law(self.parts))

    @abstractmethod
    def of(self, parts: Sequence[Defense]) -> "Composition":
        """The same composition of other parts."""

    @property
    def _server(self) -> Defense:
        sides = [part for part in self.parts if part.announces or part.hides_updates or part.aggregates]
        return sides[0] if sides else self.parts[0]

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Prepared:
        """Prepare every part in turn."""
        parts = []
        for part in self.parts:
            prepared, task = part.prepare(task, public=public, generator=generator)
            parts.append(prepared)
        return Prepared(self.of(parts), task)

    def check_announced(self, announced: Announced | None, parameters: Mapping[str, Tensor]) -> None:
        """As the first part says."""
        self.parts[0].check_announced(announced, parameters)

    def locations(self, announced: Announced | None) -> Announced | None:
        """Those of the first part, unless another one puts values elsewhere."""
        return self.parts[0].locations(announced) if all(part.keeps_zeros for part in self.parts[1:]) else None

    def visible(self, updates: Sequence[Update]) -> list[Update]:
        """As the part with a server side says."""
        return self._server.visible(updates)

    def combine(self, received: ServerRound) -> Update:
        """As the part with a server side says."""
        return self._server.combine(received)

    @property
    def strength(self) -> Strength | None:
        """That of the first part that has one."""
        return next((part.strength for part in self.parts if part.strength), None)

    def with_strength(self, value: float) -> Defense:
        """The same with that part at another strength."""
        parts = list(self.parts)
        place = next((place for place, part in enumerate(parts) if part.strength), 0)
        parts[place] = parts[place].with_strength(value)
        return self.of(parts)


@dataclass(frozen=True, repr=False, init=False)
class Chain(Composition, composed=True):
    """Several defenses one after the other; all but the first must need only gradients.

    At most one of them may have a server side of its own (it announces, hides updates or aggregates). What a chain
    declares is what its parts guarantee.

    An attacker who knows the chain undoes the last part as that one's own attacker does; the parts before it must be
    explained by what they expect and by their noise (`Defense.explained_by_noise`). Otherwise only the generic
    adaptive attacker is there.

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
        """Refuse parts that cannot follow one another."""
        parts = self.parts
        if len(parts) < 2:
            raise ParameterError(f"chain: expected two or more defenses, got {len(parts)}")
        for part in parts[1:]:
            if not part.gradient_only:
                raise ParameterError(f"chain: {part.name} needs data and must come first")
        for part in parts[1:]:
            if part.announces:
                raise ParameterError(f"chain: {part.name} announces something before the round and must come first")
        sides = [part.name for part in parts if part.announces or part.hides_updates or part.aggregates]
        if len(sides) > 1:
            raise ParameterError(f"chain: at most one defense may have a server side, got {' and '.join(sides)}")

    @property
    def name(self) -> str:  # type: ignore[override]
        """The parts' names."""
        return "+".join(part.name for part in self.parts)

    def of(self, parts: Sequence[Defense]) -> "Chain":
        """A chain of other parts."""
        return Chain(*parts)

    def make_update(self, client: ClientRound) -> Update:
        """The first part makes the update, the others perturb."""
        return self._rest(self.parts[0].make_update(_of_part(client, 0)), client)

    def make_announcement(self, client: ClientRound) -> Announced | None:
        """What the first part announces."""
        return self.parts[0].make_announcement(_of_part(client, 0))

    def publish(self, gradients: Mapping[str, Tensor], memory: Memory | None = None) -> Announced | None:
        """As the first part says."""
        return self.parts[0].publish(gradients, scoped(memory, "0"))

    def perturb_gradients(self, gradients: Mapping[str, Tensor], client: ClientState) -> Update:
        """Every part perturbs in turn."""
        return self._rest(self.parts[0].perturb_gradients(gradients, _of_part(client, 0)), client)

    def _rest(self, update: Update, client: ClientState) -> Update:
        for place, part in enumerate(self.parts[1:], start=1):
            update = part.perturb_gradients(update, dataclasses.replace(_of_part(client, place), announced=None))
        return update

    def residuals(self, memory: Memory) -> Iterator[Memory]:
        """Those of all parts."""
        for place, part in enumerate(self.parts):
            yield from part.residuals(scoped(memory, str(place)))

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """As against the last part, on what those before it are expected to send, with their noise."""
        if not self.has_adaptive_attacker:
            return {}
        *before, last = (part.adapt(task, batch_size=batch_size, local=local) for part in self.parts)
        forms = dict(last)
        for known in reversed(before):
            forms = {name: _after(first, form) for first in list(known.values())[:1] for name, form in forms.items()}
        return forms

    def noise_variance(self) -> float | Mapping[str, Tensor] | None:
        """That of the first part: what is done to its noisy update can only take information away."""
        return self.parts[0].noise_variance()

    def privacy_spent(
        self, *, rounds: int, batch_size: int, examples: int, local: LocalSteps | None = None
    ) -> PrivacySpent | None:
        """What the first part spends: the others process what it released."""
        return self.parts[0].privacy_spent(rounds=rounds, batch_size=batch_size, examples=examples, local=local)

    @property
    def parameters(self) -> dict[str, Any]:
        """Each part's parameters under its place and name."""
        return {f"{place}.{part.name}": part.parameters for place, part in enumerate(self.parts)}

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))

    def __repr__(self) -> str:
        return f"gradveil.Chain({', '.join(map(repr, self.parts))})"


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Composition, composed=True):
    r"""What a defense held back is added to the next round's gradient (Karimireddy et al., ICML 2019).

    .. math:: P = g + e, \quad sent = D(P), \quad e \leftarrow P - sent

    The residual `e` lives in the client's `memory` under ``residual/<layer>``, so the same mapping must be passed
    every round. What was held back leaves the client later, as far as the inner defense ever lets it through; around
    additive noise the noise cancels over the rounds. It restores utility, not privacy: no (epsilon, delta), no
    reconstruction bound and no zeros of the inner defense hold for it.

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

    inner: Defense = component()
    decay: float = number(1.0, above=0, high=1)
    clip: float | None = number(None, above=0)

    def check(self) -> None:
        """Refuse a defense that needs data."""
        if not self.inner.gradient_only:
            raise ParameterError(
                f"error-feedback: the inner defense must need only gradients, got {self.inner.name}, which needs data"
            )

    def __post_init__(self) -> None:
        """What was held back of other rounds comes on top, so what the inner defense keeps zero need not be."""
        super().__post_init__()
        object.__setattr__(self, "keeps_zeros", False)
        object.__setattr__(self, "explained_by_noise", False)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The inner defense's with its own."""
        return f"{self.inner.name}+error-feedback"

    @property
    def parts(self) -> tuple[Defense, ...]:  # type: ignore[override]
        """The inner defense."""
        return (self.inner,)

    def of(self, parts: Sequence[Defense]) -> "ErrorFeedback":
        """The same around another defense."""
        return dataclasses.replace(self, inner=parts[0])

    make_update = Perturbation.make_update
    make_announcement = Perturbation.make_announcement

    def publish(self, gradients: Mapping[str, Tensor], memory: Memory | None = None) -> Announced | None:
        """What the inner defense publishes of gradient + residual, which is what it will send from."""
        if not self.announces:
            return None
        return self.inner.publish(self._wanted(gradients, memory), scoped(memory, "inner"))

    def residuals(self, memory: Memory) -> Iterator[Memory]:
        """Its own, then those of the inner defense."""
        yield scoped(memory, "residual")
        yield from self.inner.residuals(scoped(memory, "inner"))

    def perturb_gradients(self, gradients: Mapping[str, Tensor], client: ClientState) -> Update:
        """Defend gradient + residual, and keep what was not sent."""
        memory = client.memory
        wanted = Update(self._wanted(gradients, memory), meta_of(gradients))
        assert memory is not None
        sent = self.inner.perturb_gradients(wanted, _of_part(client, "inner"))
        for name, value in wanted.items():
            memory[f"residual/{name}"] = self._left((value - sent[name]).detach(), sent[name])
        return sent

    def _wanted(self, gradients: Mapping[str, Tensor], memory: Memory | None) -> dict[str, Tensor]:
        if memory is None:
            raise InputError(
                "error-feedback: needs memory=, a mapping that is the client's own and lives through all rounds"
            )
        checked_gradients(self.inner.name, gradients)
        return {name: _with_residual(name, value, memory.get(f"residual/{name}")) for name, value in gradients.items()}

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


def _after(first: Knowledge, then: Knowledge) -> Knowledge:
    """What is known of an update that `then` describes if it was made from one that `first` explains by its noise."""

    def expect(gradients: Sequence[Gradients], updates: Sequence[Gradients]) -> list[Gradients]:
        values = first.expect(gradients, updates) if first.expect else list(gradients)
        return then.expect(values, updates) if then.expect else values

    return dataclasses.replace(
        then,
        summary=f"{first.summary}; {then.summary}",
        expect=expect if first.expect or then.expect else None,
        variance=_added(first.variance, then.variance),
    )


_Variance = float | Callable[[Gradients], Tensor]


def _added(first: _Variance, second: _Variance) -> _Variance:
    if not callable(first) and not callable(second):
        return first + second
    parts = [first, second]

    def variance(update: Gradients) -> Tensor:
        values = [part(update) if callable(part) else next(iter(update.values())).new_tensor(part) for part in parts]
        return values[0] + values[1]

    return variance


def _with_residual(name: str, value: Tensor, residual: Tensor | None) -> Tensor:
    if residual is None:
        return value
    if residual.shape != value.shape:
        raise InputError(
            f"error-feedback: the memory holds a residual of shape {list(residual.shape)} for {name!r}, whose "
            f"gradient has shape {list(value.shape)}; give every client and every model a memory of its own"
        )
    return value + residual


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


_Client = TypeVar("_Client", bound=ClientState)


def _of_part(client: _Client, part: int | str) -> _Client:
    """The client as one part sees it, with a memory of its own."""
    return dataclasses.replace(client, memory=scoped(client.memory, str(part)))
