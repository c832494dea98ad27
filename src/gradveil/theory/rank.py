"""Which layers let a closed-form inversion pass: the equations a gradient gives, counted before anything is run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.randomness import derived_generator
from gradveil.task import Task

# A singular value below this share of the largest counts as zero.
TOLERANCE = 1e-6
LARGEST_MATRIX = 1 << 27
"""Values of a matrix whose rank is still computed (1 GiB); of larger ones the equations are only counted."""


@dataclass(frozen=True)
class Leaf:
    """A module without children, as it ran.

    Args:
        name: of the module.
        module: the module itself, in double precision.
        inputs: what went in, ``[1, ...]``.
        outputs: what came out.
        follows: whether its input is the output of the leaf before it (or the network's input), and nothing else.

    Example:
        >>> Leaf("0", nn.Flatten(), torch.ones(1, 2, 2), torch.ones(1, 4), follows=True).name
        '0'
    """

    name: str
    module: nn.Module
    inputs: Tensor
    outputs: Tensor
    follows: bool


@dataclass(frozen=True)
class LayerRank:
    """How many values of a layer's input the gradient determines, if all behind the layer is known.

    Args:
        name: of the layer.
        kind: class of its module.
        unknowns: values of its input.
        forward: equations its output gives: those whose value is known.
        gradient: equations its weight gradient gives.
        rank: of both together.
        reason: why the input is not determined; empty if it is.

    Example:
        >>> LayerRank("conv", "Conv2d", unknowns=64, forward=16, gradient=27, rank=43, reason="too few").recoverable
        False
    """

    name: str
    kind: str
    unknowns: int
    forward: int
    gradient: int
    rank: int
    reason: str

    @property
    def recoverable(self) -> bool:
        """Whether the layer lets a closed-form inversion pass."""
        return not self.reason


def recursion_ranks(task: Task, *, generator: torch.Generator | None = None) -> list[LayerRank]:
    r"""Which layers a recursive gradient attack (R-GAP) can pass, from the input to the classifier.

    Behind a convolution with output z, error signal :math:`k = \partial L / \partial z` and input a there are two sets
    of linear equations,

    .. math:: W * a = z \quad (\text{where z is known}), \qquad a * k = \nabla W

    and recovery needs their joint rank to reach the number of values of a. z is known where the activation behind it
    can be undone: everywhere for LeakyReLU and sigmoid, only where a ReLU lets pass. The second set is the same for
    every input channel: at most out_channels x kernel area equations for height x width unknowns each, so large maps
    in front of few channels are what stops the recursion. A linear layer gives ``k a^T``, which determines a alone.

    Ranks are numerical: those of the real equations at the task's weights, one random image, and a random error signal.
    A layer is judged as if all layers behind it had been passed. Where a matrix would hold more than `LARGEST_MATRIX`
    values, what the convolution's output adds is counted instead, which bounds the rank from above.

    Args:
        task: the model at the weights to judge.
        generator: draws image and error signals; default: a fixed one, so that the answer repeats.

    References:
        Zhu and Blaschko, R-GAP: Recursive Gradient Attack on Privacy, ICLR 2021, which counts the equations; the count
        is an upper bound of the rank that is measured here.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))
        >>> ranks = recursion_ranks(Task(model, input_shape=(1, 8, 8), classes=3))
        >>> [(r.name, r.unknowns, r.gradient, r.recoverable) for r in ranks]
        [('0', 64, 18, False), ('3', 18, 18, True)]
    """
    generator = generator or derived_generator(0, "recursion-ranks")
    shape = (1, *task.input_shape)
    start = task.modality.start(shape, generator, dtype=torch.float64, device=generator.device)
    leaves = trace(task, start)
    result = []
    for place, leaf in enumerate(leaves):
        kind, unknowns = type(leaf.module).__name__, leaf.inputs.numel()
        obstacle = why_impassable(leaf.module) if leaf.follows else _JUNCTION
        if obstacle:
            outputs = leaf.outputs.numel() if "Pool" in kind and leaf.follows else 0
            result.append(LayerRank(leaf.name, kind, unknowns, outputs, 0, outputs, obstacle))
        elif isinstance(leaf.module, nn.Linear):
            result.append(LayerRank(leaf.name, kind, unknowns, 0, unknowns, unknowns, ""))
        elif isinstance(leaf.module, nn.Conv2d):
            behind = leaves[place + 1].module if place + 1 < len(leaves) else nn.Identity()
            known, slope = _known_and_slope(behind, leaf.outputs)
            signal = slope * torch.randn(leaf.outputs.shape, generator=generator, dtype=torch.float64)
            result.append(_judge_convolution(leaf, known, signal))
    return result


_JUNCTION = "its input is not just the output of the layer before it (a shortcut, or an operation outside any module)"


def trace(task: Task, image: Tensor) -> list[Leaf]:
    """The modules without children in the order they run on `image` ``[1, ...]``, in double precision."""
    model = task.to(torch.float64).copy_model()
    runs: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def watch(name: str) -> Callable[..., None]:
        return lambda module, args, output: runs.append((name, module, args[0], output))

    fed = task.normalised(image.double())
    for name, module in model.named_modules():
        if not any(module.children()):
            module.register_forward_hook(watch(name))
    with torch.no_grad():
        model(fed)
    # Views share what they show: a flattened tensor follows the one it was made of.
    before: list[Tensor] = [fed, *(output for *_, output in runs)]
    return [
        Leaf(name, module, inputs, output, follows=inputs is previous)
        for (name, module, inputs, output), previous in zip(runs, before, strict=False)
    ]


def why_impassable(module: nn.Module) -> str:
    """Why no closed-form inversion passes this module; empty if one does."""
    if isinstance(module, nn.Conv2d):
        if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
            return "only plain convolutions can be inverted: one group, padding by a number of zeros"
        return ""
    if isinstance(module, PASSABLE):
        return ""
    kind = type(module).__name__
    if "Pool" in kind:
        return "a pool keeps fewer values than it is given, and has no weights whose gradient would tell the rest"
    if "Norm" in kind:
        return "a normalisation divides by a statistic of its unknown input"
    return f"no equations are known for {kind}: it has no weights, and its output does not determine its input"


PASSABLE = (nn.Linear, nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.Flatten, nn.Identity)


def _known_and_slope(behind: nn.Module, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Where the activation behind a convolution can be undone, and its slope."""
    known = outputs > 0 if isinstance(behind, nn.ReLU) else torch.ones_like(outputs, dtype=torch.bool)
    if isinstance(behind, nn.LeakyReLU):
        return known, torch.where(outputs > 0, 1.0, behind.negative_slope).double()
    if isinstance(behind, nn.Sigmoid):
        return known, outputs.sigmoid() * (1 - outputs.sigmoid())
    return known, known.to(outputs.dtype)


def _judge_convolution(leaf: Leaf, known: Tensor, signal: Tensor) -> LayerRank:
    conv = leaf.module
    assert isinstance(conv, nn.Conv2d)
    channels, height, width = leaf.inputs.shape[1:]
    forward, pixels = int(known.sum()), height * width
    by_gradient = gradient_equations(conv, (height, width), signal)
    values, vectors = torch.linalg.eigh(by_gradient.T @ by_gradient)  # [pixels]: the same for every input channel
    told = values > TOLERANCE**2 * values[-1].clamp_min(torch.finfo(values.dtype).tiny)
    rank, unknowns = channels * int(told.sum()), channels * pixels
    left = unknowns - rank
    counted = left * max(known.numel(), left) > LARGEST_MATRIX
    if counted:
        rank += min(left, forward)
    elif left:
        # What the gradient leaves open in each channel, seen through the convolution.
        hidden = vectors[:, ~told].T.reshape(-1, 1, height, width)
        count, columns = len(hidden), []
        for channel in range(channels):
            probe = hidden.new_zeros(count, channels, height, width)
            probe[:, channel] = hidden[:, 0]
            seen = F.conv2d(probe, conv.weight, **geometry(conv))
            columns.append((seen * known).flatten(1))
        stacked = torch.cat(columns)  # [channels * count, outputs]
        values = torch.linalg.eigvalsh(stacked @ stacked.T if len(stacked) <= stacked.shape[1] else stacked.T @ stacked)
        rank += int((values > TOLERANCE**2 * conv.weight.square().sum()).sum())
    gradient = channels * len(by_gradient)
    reason = ""
    if counted and rank == unknowns:
        reason = f"undecided: {rank} equations for as many input values, too many to compute their rank"
    elif rank < unknowns:
        least = "at least " if counted else ""
        reason = (
            f"{least}{unknowns - rank} of {unknowns} input values stay undetermined: {forward} of {known.numel()} "
            f"outputs are known, and the weight gradient tells {channels} x {int(told.sum())} of {channels} x {pixels}"
        )
    return LayerRank(leaf.name, type(conv).__name__, unknowns, forward, gradient, rank, reason)


def geometry(conv: nn.Conv2d) -> dict[str, Any]:
    """Stride, padding and dilation of a convolution, as torch's functions take them."""
    return {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}


def gradient_equations(conv: nn.Conv2d, size: tuple[int, int], signal: Tensor) -> Tensor:
    """The linear map from one input channel to its weight gradient, ``[out_channels * kernel area, height * width]``.

    Args:
        conv: the convolution.
        size: height and width of its input.
        signal: the error signal at its output, ``[1, out_channels, ...]``.
    """
    pixels = math.prod(size)
    each = torch.eye(pixels, dtype=signal.dtype, device=signal.device).view(pixels, 1, *size)
    patches = F.unfold(each, conv.kernel_size, **geometry(conv))  # [pixels, kernel area, places]
    return torch.einsum("pkl,ol->okp", patches, signal[0].flatten(1)).flatten(0, 1)
