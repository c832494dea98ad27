"""Aligned Dual Gradient Pruning: all clients of a round send inside one published set of locations."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.errors import InputError
from gradveil.core.parameters import number
from gradveil.core.randomness import Draws
from gradveil.defenses._selection import keep_ranks, largest, share_of
from gradveil.defenses.base import DEFENSES, Perturbation, checked_gradients
from gradveil.defenses.knowledge import Knowledge, read_arrived
from gradveil.task import Task
from gradveil.update import Announced, LocalSteps, Memory, ServerRound, Update


@DEFENSES.register("aligned-dual-pruning")
@dataclass(frozen=True, repr=False)
class AlignedDualPruning(Perturbation):
    r"""Aligned DGP (ADGP): dual pruning inside a location set that one client publishes for the round.

    The protocol of a round, with n values in a layer:

    1. An elected client publishes the set I of its ``ceil(2 keep n)`` largest values (`announce`).
    2. Every client zeroes its own ``ceil(k1 n)`` largest values, then sends the ``ceil(keep n)`` largest of what is
       left inside I, or all of it if less is left (`share`).
    3. The server averages and returns the values inside I, nothing else (`aggregate`). Since both sides know I, the
       aggregate needs no positions at all, and the updates only say which part of I they fill.

    An announcement that does not fit the model, or marks more or fewer locations than step 1 says, is refused, and
    another client is elected; if all are refused, every client uses its own set, as it does without an announcement
    (``announced=None``). A well-formed lie cannot be told from the truth: a client that publishes the locations of its
    *smallest* values makes everyone's update nearly useless for that round (a limitation that the paper names; error
    feedback brings the values back in honest rounds). The announcement also tells the server where the publisher's
    largest values lie, including those that pruning withholds: the publisher pays for the others' smaller download.
    Audits attack ordinary clients inside the set of another, honest client; ``--publisher lying`` has a liar publish,
    ``--publisher victim`` the victim itself.

    Ties are broken by position.

    Args:
        k1: share of the largest values that every client withholds.
        keep: share of values that are sent. k1 = 0 and keep = 1 is the identity.

    References:
        Xue et al., Revisiting Gradient Pruning: A Dual Realization for Defending against Gradient Attacks, AAAI 2024,
        section on download cost and appendix D.

    Example:
        >>> defense = AlignedDualPruning(k1=0.2, keep=0.4)
        >>> first, second = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]), torch.tensor([1.0, 2.0, 9.0, 4.0, 5.0])
        >>> announced = defense.publish({"w": first})
        >>> announced["w"].tolist()
        [True, True, True, True, False]
        >>> defense.perturb({"w": second}, announced=announced)["w"].tolist()
        [0.0, 2.0, 0.0, 4.0, 0.0]
    """

    paper = "Xue et al., AAAI 2024"
    has_adaptive_attacker = True
    announces, aggregates, adds_noise, keeps_zeros = True, True, False, True

    k1: float = number(0.05, low=0, below=1)
    keep: float = number(0.2, above=0, high=1, strength=(1.0, 1e-4), log=True)

    def publish(self, gradients: Mapping[str, Tensor], memory: Memory | None = None) -> Announced:
        """The location set I, as one mask per layer."""
        checked_gradients(self.name, gradients)
        return {name: self._own_set(value.reshape(1, -1)).reshape(value.shape) for name, value in gradients.items()}

    def check_announced(self, announced: Announced | None, parameters: Mapping[str, Tensor]) -> None:
        """Refuse a set with other layers, shapes or types, or of another size than `publish` makes."""
        if announced is None:
            return
        if not isinstance(announced, Mapping):
            raise InputError(f"{self.name}: expected a location set by layer, got {type(announced).__name__}")
        if announced.keys() != parameters.keys():
            differing = sorted(map(str, announced.keys() ^ parameters.keys()))
            raise InputError(
                f"{self.name}: expected a location set for each layer of the model, but it differs in {differing}"
            )
        for name, mask in announced.items():
            expected = parameters[name]
            if not _is_mask(mask) or mask.shape != expected.shape:
                raise InputError(
                    f"{self.name}: expected for {name!r} a mask (torch.bool) of shape {list(expected.shape)}, "
                    f"got {_described(mask)}"
                )
            size, marked = self._set_size(expected.numel()), int(mask.sum())
            if marked != size:
                raise InputError(f"{self.name}: the set of {name!r} must mark {size} locations, got {marked}")

    def locations(self, announced: Announced | None) -> Announced | None:
        """The announced set: all updates and the aggregate are zero outside it."""
        return announced

    def perturb_layers(
        self, layers: Mapping[str, Tensor], draws: Draws, announced: Announced | None = None
    ) -> dict[str, Tensor]:
        """Prune each client's layers inside the announced set."""
        if announced is None:
            return super().perturb_layers(layers, draws)
        return {name: self._prune_inside(rows, announced[name].flatten()) for name, rows in layers.items()}

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Without an announcement, prune each client's row inside its own set."""
        return torch.cat([self._prune_inside(row, self._own_set(row).flatten()) for row in torch.split(rows, 1)])

    def combine(self, received: ServerRound) -> Update:
        """The weighted mean inside the set; anything that a client sent outside it is ignored."""
        mean, announced = received.mean(), received.announced
        self.check_announced(announced, mean)
        if announced is None:
            return mean
        return Update({name: value.where(announced[name], 0) for name, value in mean.items()}, mean.meta)

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """What arrived is the gradient. Nothing bounds the rest, which may just lie outside another client's set."""
        return {"arrived": Knowledge("matches what arrived", read=read_arrived, sends_values=True)}

    def _set_size(self, values: int) -> int:
        return min(values, share_of(2 * self.keep, values, math.ceil))

    def _own_set(self, rows: Tensor) -> Tensor:
        return largest(rows, self._set_size(rows.shape[1]))

    def _prune_inside(self, rows: Tensor, marked: Tensor) -> Tensor:
        values = rows.shape[1]
        top = share_of(self.k1, values, math.ceil)
        without_top = keep_ranks(rows, top, values)
        inside = keep_ranks(without_top[:, marked], 0, share_of(self.keep, values, math.ceil))
        sent = torch.zeros_like(rows)
        sent[:, marked] = inside
        return sent


def _is_mask(value: object) -> bool:
    """Whether it is a mask that values can be chosen with; a sparse or nested one, or one without values, cannot."""
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.bool
        and value.layout == torch.strided
        and not value.is_meta
        and not value.is_nested
    )


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested or value.layout != torch.strided or value.is_meta:
        return f"a tensor that is nested, sparse or without values ({value.layout} on {value.device})"
    return f"{value.dtype} of shape {list(value.shape)}"
