"""Risk-sliced perturbation: noise on random slices of equal risk, and its removal from the aggregate."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from gradveil.core.errors import InputError
from gradveil.core.parameters import choice, flag, integer, number, state
from gradveil.core.randomness import Randomness, Source, source_of
from gradveil.core.tensors import Tensors, shapes_of
from gradveil.defenses._clipping import clipped_sum
from gradveil.defenses._selection import share_of
from gradveil.defenses.base import DEFENSES, Batch, Defense, Prepared, check_result, checked_gradients, meta_of
from gradveil.defenses.compensation import ASPECT, compensate
from gradveil.defenses.knowledge import NOTHING_TO_KNOW, Evidence, Knowledge, clip_to, each_round
from gradveil.task import Gradients, Task
from gradveil.update import ClientRound, ClientState, LocalSteps, ServerRound, Update

MAX_BLOCKS = 4096
"""Number of blocks that a model is cut into at most, unless so many slices need more (`BLOCKS_PER_SLICE`); with the
greatest common divisor alone there might be millions."""
BLOCKS_PER_SLICE = 4
"""Number of blocks per slice that a model is cut into at least, as far as it has that many values. With fewer, slices
could stay empty, and an update whose drawn slices are empty would leave without any noise."""
BALANCES = ("risk-share", "layer-risk", "size", "consecutive")
DIRECTIONS = 10
"""Number of random directions that estimate the risk of each public example."""


@DEFENSES.register("risk-slicing")
@dataclass(frozen=True, repr=False)
class RiskSlicing(Defense):
    r"""Add noise to a few random slices of equal risk; the server removes what noise it can from the aggregate.

    `prepare` runs once, on a public root set of about 100 examples. The risk of a layer is the mean over the examples
    of the Frobenius norm of :math:`\partial g_l / \partial x`; layers are cut into blocks, and the blocks are packed
    into `slices` slices that are balanced by `balance` and stay fixed. A model with fewer values than slices is cut
    into as many slices as it has values, so that no slice is empty. In each round each client draws
    :math:`k = \max(1, \lfloor slices \cdot ratio \rfloor)` slices without replacement and adds :math:`N(0, std^2)`
    to them; the other slices are sent unchanged. The server averages the updates and removes from the mean the
    directions that hold nothing but noise (`gradveil.compensate`), whose variance is

    .. math:: \frac{k}{slices} \sum_i w_i^2 \, std^2

    With `clip` each example's gradient is first scaled down to that norm, and the noise is ``std * clip``; this limits
    what a server gains by compensating the update of a single client. It needs the client's data.

    Without `clip` it acts once, on the finished update, also under FedAvg; with `clip`, examples are clipped in every
    local step and the noise is added once, to the finished update.

    `std` is in units of the gradient. Under FedAvg an update is (start - end) / lr, so noise of standard deviation s on
    the weights that a client sends back, which is what the paper means, is ``std = s / lr`` here: its variance of 1e-2
    at a learning rate of .01 is ``std=10``.

    With thousands of small blocks every one of ten slices gets about a tenth of every large layer, so it hardly matters
    what they are balanced by. The largest true risk of a slice relative to the mean, for a lenet with uniform weights
    on MNIST, is 1.00 by ``"risk-share"``, 1.17 by ``"layer-risk"``, 1.03 by ``"size"``, and 2.20 for ``"consecutive"``
    slices (docs/sensitivity.md).

    What it does not stop: the slices are public, so an attacker leaves out those that fit its candidate worst, and
    recovers single images from the others as well as from an undefended update (docs/findings.md).

    Args:
        slices: number of slices.
        ratio: share of the slices that get noise; .2 against DLG and .3 against Inverting Gradients in the paper.
        std: standard deviation of the noise, in units of `clip` if that is given; 0 adds none.
        clip: norm to which each example's gradient is clipped; None: no clipping.
        compensate: whether the server removes noise from the aggregate.
        aspect: number of rows per column of the matrix that compensation works on.
        balance: what the slices are balanced by. ``"risk-share"``: a block's risk is its layer's times its share of the
            layer's values. ``"layer-risk"``: a block's risk is its layer's; the paper's "leakage risk weighted with
            layer size" can mean either. ``"size"``: blocks count by their size alone. ``"consecutive"``: the values, in
            the order of the layers, are cut into slices of equal size. The last two ignore risk; the baseline of the
            paper's table III[A] can mean either.

    References:
        Wang et al., Protect Privacy from Gradient Leakage Attack in Federated Learning, INFOCOM 2022.
        **Corrections**: the variance is that of the noise in the mean (the paper's is that of a sum, m^2 times larger
        with equal weights). **Our choices**: risk is estimated with random input directions (`Task.sensitivity`); a
        block is never smaller than a 4096th of the model nor larger than a fourth of a slice; a block never spans two
        layers, so a layer's last block may be smaller; blocks are packed greedily, the riskiest first, always into the
        slice with the least risk.

    Example:
        >>> from gradveil import models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = Task(model, input_shape=(1, 4, 4), classes=3)
        >>> root = torch.rand(5, 1, 4, 4, generator=torch.manual_seed(0)), torch.tensor([0, 1, 2, 0, 1])
        >>> defense = RiskSlicing(slices=10, ratio=0.3, std=0.1)
        >>> defense, task = defense.prepare(task, public=root, generator=torch.manual_seed(0))
        >>> clean, sent = task.gradients(*root), defense.share(task, *root)
        >>> share = sum(int(((clean[n] - sent[n]).abs() > 1e-6).sum()) for n in sent) / task.size
        >>> bool(0.2 < share < 0.4)
        True
    """

    paper = "Wang et al., INFOCOM 2022"
    has_adaptive_attacker = True
    needs_preparing, aggregates = True, True

    slices: int = integer(10, low=1)
    ratio: float = number(0.2, above=0, high=1)
    std: float = number(0.1, low=0, strength=(1e-4, 10.0), log=True)
    clip: float | None = number(None, above=0)
    compensate: bool = flag(True)
    aspect: float = number(ASPECT, low=1)
    balance: str = choice("risk-share", BALANCES, quiet=True)
    slice_of: Tensors | None = state()  # the slice number of every coordinate, set by `prepare`

    @property
    def gradient_only(self) -> bool:  # type: ignore[override]
        """Whether it does not clip, which would need each example's gradient."""
        return self.clip is None

    @property
    def removes_noise(self) -> bool:  # type: ignore[override]
        """Whether the server compensates, and expects the noise of every update to be fresh."""
        return self.compensate

    @property
    def noisy_slices(self) -> int:
        """Number of slices that get noise in a round."""
        return max(1, share_of(self.ratio, self.slices, math.floor))

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in gradient units."""
        return self.std if self.clip is None else self.std * self.clip

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Prepared:
        """Measure the layers' risk on the public set and cut the slices."""
        if public is None:
            raise InputError(
                f"{self.name}: prepare needs public=(inputs, labels), about 100 examples that are not private"
            )
        risks = layer_risks(task, *public, directions=DIRECTIONS, generator=generator)
        count = min(self.slices, sum(value.numel() for value in task.parameters.values()))
        slice_of = cut_slices(task.parameters, risks, count, self.balance)
        return Prepared(replace(self, slices=count, slice_of=Tensors(slice_of)), task)

    def make_update(self, client: ClientRound) -> Update:
        """Compute the client's update, with clipping if requested, and add noise to random slices."""
        self._slices_for(client.task.parameters)
        update = client.update(Task.gradients if self.clip is None else self._clipped)
        return self._add_noise(checked_gradients(self.name, update), client.source)

    def perturb_gradients(self, gradients: Mapping[str, Tensor], client: ClientState) -> Update:
        """Add noise to random slices; possible only without `clip`, which needs each example's gradient."""
        if self.clip is not None:
            return super().perturb_gradients(gradients, client)
        return self._add_noise(checked_gradients(self.name, gradients), client.source)

    def combine(self, received: ServerRound) -> Update:
        """The weighted mean, with the noise removed as far as its spectrum distinguishes it."""
        mean = received.mean()
        if not self.compensate:
            return mean
        variance = self.aggregate_variance(received.weights or [1.0] * len(received.updates))
        return compensate(mean, variance, aspect=self.aspect)

    def aggregate_variance(self, weights: Sequence[float]) -> float:
        """Variance of the noise on one value of the weighted mean; the weights need not sum to 1."""
        squared_shares = sum(weight**2 for weight in weights) / sum(weights) ** 2
        return self.noisy_slices / self.slices * squared_shares * self.noise_std**2

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """Only a few slices have noise, each in all its coordinates: leave out those that fit a candidate worst.

        "compensate" is the abuse that the paper warns of: the server compensates the update of a single client.
        """
        if self.std == 0 and self.clip is None:
            return NOTHING_TO_KNOW
        slice_of = self._slices_for(task.parameters)
        expect = each_round(clip_to(self.clip)) if self.clip is not None and not local else None
        compensated = Knowledge("compensates the single update, then inverts it", before=self._denoise, expect=expect)
        if self.noisy_slices == self.slices or self.std == 0:  # all slices are alike, so there is none to leave out
            prior = Knowledge("weighs a prior by the noise", expect=expect, variance=self.noise_std**2)
            return {"prior": prior, "compensate": compensated}

        def read(expected: Gradients, update: Gradients) -> Evidence:
            squares = {name: (expected[name] - value).square() for name, value in update.items()}
            misfits = torch.stack(
                [
                    torch.stack([(value * (slice_of[name] == number)).sum() for name, value in squares.items()]).sum()
                    for number in range(self.slices)
                ]
            )
            worst = misfits.argsort(descending=True)[: self.noisy_slices]
            return Evidence(
                update,
                {
                    name: (slice_of[name].unsqueeze(-1) != worst).all(-1).to(value.dtype)
                    for name, value in update.items()
                },
            )

        left_out = f"leaves out the {self.noisy_slices} of {self.slices} slices that fit worst"
        return {"trimmed": Knowledge(left_out, expect=expect, read=read), "compensate": compensated}

    def _denoise(self, _task: Task, updates: Gradients, _generator: torch.Generator) -> Gradients:
        """Compensate every victim's update as if it were the aggregate."""
        variance = self.aggregate_variance([1.0])
        cleaned = [
            compensate({name: value[victim] for name, value in updates.items()}, variance, aspect=self.aspect)
            for victim in range(len(next(iter(updates.values()))))
        ]
        return {name: torch.stack([update[name] for update in cleaned]) for name in updates}

    def _slices_for(self, gradients: Mapping[str, Tensor]) -> Tensors:
        if self.slice_of is None:
            raise InputError(
                f"{self.name}: the slices are not cut yet; call prepare(task, public=(inputs, labels)) once first"
            )
        got, expected = shapes_of(gradients), shapes_of(self.slice_of)
        if got != expected:
            raise InputError(f"{self.name}: prepared for layers {expected}, got {got}; prepare it for this model")
        return self.slice_of

    def _add_noise(self, gradients: Mapping[str, Tensor], source: Source) -> Update:
        slice_of = self._slices_for(gradients)
        device = next(iter(slice_of.values())).device
        chosen = torch.zeros(self.slices, dtype=torch.bool, device=device)
        chosen[source.permutation(self.slices, device)[: self.noisy_slices]] = True
        result = {
            name: source.add_normal(value, self.noise_std, where=chosen[slice_of[name].long()])
            for name, value in gradients.items()
        }
        check_result(self, result)
        return Update(result, meta_of(gradients))

    def _clipped(self, task: Task, inputs: Tensor, labels: Tensor) -> Gradients:
        """The mean of the examples' gradients, each scaled down to norm `clip`."""
        assert self.clip is not None
        total = clipped_sum(task, inputs, labels, self.clip)
        return {name: value / len(inputs) for name, value in total.items()}


def layer_risks(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    *,
    directions: int | None = DIRECTIONS,
    generator: Randomness | None = None,
) -> dict[str, float]:
    """The risk of each layer: the mean over single examples of the Frobenius norm of its gradient's input Jacobian.

    Args:
        task: the model.
        inputs: the public examples.
        labels: their labels.
        directions: number of random directions per example; None: exact.
        generator: source of the directions.
    """
    source, task = source_of(generator), task.without_dropout()
    total = dict.fromkeys(task.parameters, 0.0)
    for example, label in zip(inputs, labels, strict=True):
        squared = task.sensitivity(example[None], label[None], directions, generator=source)
        for name, value in squared.items():
            total[name] += float(value.sum(dtype=torch.float64).sqrt())
    return {name: value / len(inputs) for name, value in total.items()}


def cut_slices(
    layers: Mapping[str, Tensor], risks: Mapping[str, float], slices: int, balance: str = "risk-share"
) -> dict[str, Tensor]:
    """The slice number of every coordinate, shaped like the layers; no slice is empty unless there are too few values.

    Args:
        layers: tensors by name, of which only the shapes matter.
        risks: the risk of each layer.
        slices: number of slices.
        balance: what the slices are balanced by, see `RiskSlicing`.
    """
    sizes = {name: value.numel() for name, value in layers.items() if value.numel()}
    total = sum(sizes.values())
    block = max(math.gcd(*sizes.values()), math.ceil(total / MAX_BLOCKS))
    block = max(1, min(block, total // (BLOCKS_PER_SLICE * slices)))
    blocks = [
        (name, first, min(first + block, size) - first)
        for name, size in sizes.items()
        for first in range(0, size, block)
    ]
    numbers = (
        _consecutive(blocks, slices) if balance == "consecutive" else _packed(blocks, sizes, risks, slices, balance)
    )
    slice_of = {
        name: torch.zeros(value.numel(), dtype=torch.int32, device=value.device) for name, value in layers.items()
    }
    for (name, first, size), slice_number in zip(blocks, numbers, strict=True):
        slice_of[name][first : first + size] = slice_number
    return {name: slice_of[name].view(value.shape) for name, value in layers.items()}


_Block = tuple[str, int, int]  # layer, first coordinate, size


def _consecutive(blocks: Sequence[_Block], slices: int) -> list[int]:
    """The slice number of each block, if the slices follow one another."""
    *starts, total = accumulate((size for _, _, size in blocks), initial=0)
    return [start * slices // total for start in starts]


def _packed(
    blocks: Sequence[_Block], sizes: Mapping[str, int], risks: Mapping[str, float], slices: int, balance: str
) -> list[int]:
    """The slice number of each block: the heaviest block first, always into the lightest slice."""
    weigh: dict[str, Callable[[str, int], float]] = {
        "risk-share": lambda name, size: risks[name] * size / sizes[name],
        "layer-risk": lambda name, _size: risks[name],
        "size": lambda _name, size: size,
    }
    weights = [weigh[balance](name, size) for name, _, size in blocks]
    numbers = [0] * len(blocks)
    heap = [(0.0, 0, number) for number in range(slices)]  # weight, number of blocks (to spread ties), slice number
    for index in sorted(range(len(blocks)), key=weights.__getitem__, reverse=True):
        slice_weight, count, numbers[index] = heap[0]
        heapq.heapreplace(heap, (slice_weight + weights[index], count + 1, numbers[index]))
    return numbers
