"""What an attacker who has read a defense's code can infer from its updates, in terms that attacks understand.

A defense says this in its own file (`Defense.adapt`); the attacks turn it into a cost (`gradveil.attacks.matching`).
So every matching attack can adapt to every defense, and neither needs to know the other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.task import Gradients, Task


@dataclass(frozen=True)
class Evidence:
    """What an update says about the gradient behind it, coordinate by coordinate.

    Args:
        values: the coordinates of the gradient as far as the update determines them; if it leaves a range, the value in
            it that is nearest to the candidate's.
        weights: how much each coordinate counts; one of weight 0 counts only through `allowed`. None: all count alike.
        allowed: for coordinates of weight 0, the value nearest to the candidate's that the defense would have held
            back. None: any value.

    Example:
        >>> Evidence({"w": torch.tensor([0.5, 0.0])}, weights={"w": torch.tensor([1.0, 0.0])}).allowed is None
        True
    """

    values: Gradients
    weights: Gradients | None = None
    allowed: Gradients | None = None


Expect = Callable[[Sequence[Gradients], Sequence[Gradients]], list[Gradients]]
Draw = Callable[[Task, Gradients, Tensor, Tensor], list[Gradients]]


@dataclass(frozen=True)
class Knowledge:
    """One way to use knowledge of a defense. Every field but the summary is optional; without any, nothing is known.

    The functions below see one victim and must be pure and compatible with vmap, unless noted otherwise.

    Args:
        summary: what the attacker does, in words.
        before: ``(task, updates, generator)``: turns the updates, ``[victims, ...]`` by name, into the ones to invert.
            Not vmapped.
        task: ``(task, update)``: the task whose gradients the client computed, if the update reveals more about it.
        expect: ``(gradients, updates)``, one entry per round: what the defense turns a candidate's gradients into,
            apart from its randomness and from what `read` undoes.
        draw: ``(task, gradients, inputs, labels)``: several simulated updates of a candidate, over which the cost is
            averaged. Not vmapped, so attacks treat the victims one by one.
        read: ``(expected, update)``: what the update says about the gradient.
        sends_values: whether every nonzero value that is sent is exact, so that error feedback keeps no residual of it.
        variance: variance of the noise on a coordinate of weight 1, or a function of the update if it depends on the
            update. The larger it is, the more the attacker trusts the modality's prior.
        after: turns the inputs ``[N, *input_shape]`` that the inversion found into the ones to return. Not vmapped.
        single_gradient: whether it applies only to updates of a single gradient (no local steps).

    Example:
        >>> Knowledge("nothing to know").changes_matching
        False
    """

    summary: str
    before: Callable[[Task, Gradients, torch.Generator], Gradients] | None = None
    task: Callable[[Task, Gradients], Task] | None = None
    expect: Expect | None = None
    draw: Draw | None = None
    read: Callable[[Gradients, Gradients], Evidence] | None = None
    sends_values: bool = False
    variance: float | Callable[[Gradients], Tensor] = 0.0
    after: Callable[[Tensor], Tensor] | None = None
    single_gradient: bool = False

    @property
    def changes_matching(self) -> bool:
        """Whether candidates are judged differently than by the plain attack."""
        return bool(self.task or self.expect or self.draw or self.read or self.variance)


def each_round(change: Callable[[Gradients], Gradients]) -> Expect:
    """An `expect` that applies `change` to every round's gradient."""
    return lambda gradients, _updates: [change(values) for values in gradients]


def clip_to(limit: float) -> Callable[[Gradients], Gradients]:
    """A function that scales a gradient down to a norm of at most `limit`, over all layers together.

    >>> clip_to(1.0)({"w": torch.tensor([3.0, 4.0])})["w"].tolist()
    [0.6000000238418579, 0.800000011920929]
    """

    def clip(gradients: Gradients) -> Gradients:
        squared = torch.stack([value.square().sum() for value in gradients.values()]).sum()
        scale = limit / squared.clamp_min(limit**2).sqrt()
        return {name: scale * value for name, value in gradients.items()}

    return clip


def read_arrived(_expected: Gradients, update: Gradients) -> Evidence:
    """A `read` that ignores coordinates that are zero, because they were held back."""
    return Evidence(update, {name: (value != 0).to(value.dtype) for name, value in update.items()})


def read_ranked(withheld_top: bool, over_all_layers: bool = False) -> Callable[[Gradients, Gradients], Evidence]:
    """A `read` for updates from which each layer's smallest values were held back, and its largest if `withheld_top`.

    Every coordinate that did not arrive is then at most as large as the smallest that did, or, with `withheld_top`, at
    least as large as the largest. With `over_all_layers` the smallest and the largest are those of the whole update.

    >>> sent, candidate = {"w": torch.tensor([0.0, 2.0, 3.0])}, {"w": torch.tensor([2.6, 2.0, 3.0])}
    >>> read_ranked(withheld_top=False)(candidate, sent).allowed["w"][0].item()
    2.0
    >>> read_ranked(withheld_top=True)(candidate, sent).allowed["w"][0].item()
    3.0
    """

    def read(expected: Gradients, update: Gradients) -> Evidence:
        arrived = read_arrived(expected, update)
        assert arrived.weights is not None
        everything = torch.cat([value.flatten() for value in update.values()]) if over_all_layers else None
        allowed = {}
        for name, value in update.items():
            candidate, sent = expected[name], (value if everything is None else everything).abs()
            if not sent.numel():
                allowed[name] = candidate
                continue
            size = candidate.abs()
            smallest, largest = torch.where(sent > 0, sent, torch.inf).amin(), sent.amax()
            nearest = size.minimum(smallest)
            if withheld_top:
                nearest = torch.where(size - smallest < largest - size, nearest, size.maximum(largest))
            allowed[name] = nearest.copysign(candidate)
        return Evidence(update, arrived.weights, allowed)

    return read


def read_trimmed(keep: float, scale: float) -> Callable[[Gradients, Gradients], Evidence]:
    """A `read` for updates whose coordinates are `scale` times the gradient with probability `keep`, else a decoy.

    The attacker believes the coordinates that fit a candidate best, as many as are almost surely genuine: the expected
    number of genuine ones minus three standard deviations.

    >>> sent, candidate = {"w": torch.tensor(19 * [2.0] + [9.0])}, {"w": torch.ones(20)}
    >>> read_trimmed(0.95, 2.0)(candidate, sent).weights["w"][-2:].tolist()
    [1.0, 0.0]
    """

    def read(expected: Gradients, update: Gradients) -> Evidence:
        values = {name: value / scale for name, value in update.items()}
        misfit = {name: (expected[name] - value).abs() for name, value in values.items()}
        misfits = torch.cat([value.flatten() for value in misfit.values()])
        genuine = keep * len(misfits) - 3 * math.sqrt(keep * (1 - keep) * len(misfits))
        limit = misfits.detach().kthvalue(max(1, math.floor(genuine))).values
        return Evidence(values, {name: (value <= limit).to(value.dtype) for name, value in misfit.items()})

    return read


def read_weighted(variance: Gradients) -> Callable[[Gradients, Gradients], Evidence]:
    """A `read` for updates with independent noise of known `variance`: the less noise, the more a coordinate counts.

    A coordinate with the `typical_variance` has weight 1.
    """
    typical = typical_variance(variance)
    # No coordinate counts more than a hundred typical ones; otherwise the few without noise make the cost too stiff.
    weights = {name: typical / value.double().clamp_min(typical / 100) for name, value in variance.items()}
    return lambda _expected, update: Evidence(
        update, {name: weights[name].to(value.device, value.dtype) for name, value in update.items()}
    )


def typical_variance(variance: Gradients) -> float:
    """The median of the nonzero variances; 0 if all are zero."""
    flat = torch.cat([value.double().flatten() for value in variance.values()])
    noisy = flat[flat > 0]
    return float(noisy.median()) if noisy.numel() else 0.0


NOTHING_TO_KNOW = {"plain": Knowledge("nothing to know: the plain attack")}
