"""Which layers a closed-form inversion can pass, from the rank of the equations that a gradient gives."""

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
"""Most values of a matrix whose rank is computed (1 GiB); for larger matrices, equations are only counted."""


@dataclass(frozen=True)
class Leaf:
    """A module without children, with its input and output in one run.

    Args:
        name: name of the module.
        module: the module itself, in double precision.
        inputs: its input, ``[1, ...]``.
        outputs: its output.
        follows: whether its input is exactly the output of the leaf before it (or the network's input).

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
    """How many values of a layer's input the gradient determines if everything behind the layer is known.

    Args:
        name: name of the layer.
        kind: class of its module.
        unknowns: number of values of its input.
        forward: number of equations from its output, one for each known output value.
        gradient: number of equations from its weight gradient.
        rank: rank of both sets together.
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
        """Whether a closed-form inversion can pass the layer."""
        return not self.reason


def recursion_ranks(task: Task, *, generator: torch.Generator | None = None) -> list[LayerRank]:
    r"""Which layers a recursive gradient attack (R-GAP) can pass, from the input to the classifier.

    A convolution with output z, error signal :math:`k = \partial L / \partial z` and input a gives two sets of linear
    equations,

    .. math:: W * a = z \quad (\text{where z is known}), \qquad a * k = \nabla W

    and recovery needs their joint rank to reach the number of values of a. z is known where the activation behind it
    can be undone: everywhere for LeakyReLU and sigmoid, only where it is positive for ReLU. The second set is the same
    for every input channel: at most out_channels x kernel area equations for height x width unknowns each, so the
    recursion is stopped by large inputs to layers with few channels. The gradient of a linear layer is ``k a^T``, which
    determines a by itself.

    Ranks are numerical: those of the actual equations at the task's weights, for one random image and a random error
    signal. A layer is judged as if all layers behind it had been passed. If a matrix would hold more than
    `LARGEST_MATRIX` values, what the convolution's output adds is counted instead, which bounds the rank from above.

    Args:
        task: the model, at the weights to judge.
        generator: draws the image and the error signals; by default a fixed one, so that the answer is reproducible.

    References:
        Zhu and Blaschko, R-GAP: Recursive Gradient Attack on Privacy, ICLR 2021, which counts the equations; the count
        is an upper bound on the rank that is computed here.

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
    for index, leaf in enumerate(leaves):
        kind, unknowns = type(leaf.module).__name__, leaf.inputs.numel()
        obstacle = why_impassable(leaf.module) if leaf.follows else _JUNCTION
        if obstacle:
            outputs = leaf.outputs.numel() if "Pool" in kind and leaf.follows else 0
            result.append(LayerRank(leaf.name, kind, unknowns, outputs, 0, outputs, obstacle))
        elif isinstance(leaf.module, nn.Linear):
            result.append(LayerRank(leaf.name, kind, unknowns, 0, unknowns, unknowns, ""))
        elif isinstance(leaf.module, nn.Conv2d):
            activation = leaves[index + 1].module if index + 1 < len(leaves) else nn.Identity()
            known, slope = _known_and_slope(activation, leaf.outputs)
            signal = slope * torch.randn(leaf.outputs.shape, generator=generator, dtype=torch.float64)
            result.append(judge_convolution(leaf, known, signal))
    return result


_JUNCTION = "its input is not just the output of the layer before it (a shortcut, or an operation outside any module)"


def trace(task: Task, image: Tensor) -> list[Leaf]:
    """The modules without children in the order they run on `image` ``[1, ...]``, in double precision."""
    model = task.to(torch.float64).copy_model()
    runs: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def recorder(name: str) -> Callable[..., None]:
        return lambda module, args, output: runs.append((name, module, args[0], output))

    network_input = task.normalised(image.double())
    for name, module in model.named_modules():
        if not any(module.children()):
            module.register_forward_hook(recorder(name))
    with torch.no_grad():
        model(network_input)
    previous_outputs: list[Tensor] = [network_input, *(output for *_, output in runs)]
    return [
        Leaf(name, module, inputs, output, follows=inputs is previous)
        for (name, module, inputs, output), previous in zip(runs, previous_outputs, strict=False)
    ]


def why_impassable(module: nn.Module) -> str:
    """Why no closed-form inversion can pass this module; empty if one can."""
    if isinstance(module, nn.Conv2d):
        if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
            return "only plain convolutions can be inverted: with one group, and padded by a fixed number of zeros"
        return ""
    if isinstance(module, PASSABLE):
        return ""
    kind = type(module).__name__
    if "Pool" in kind:
        return "a pool keeps fewer values than it is given, and has no weights whose gradient would reveal the rest"
    if "Norm" in kind:
        return "a normalisation divides by a statistic of its unknown input"
    return f"no equations are known for {kind}: it has no weights, and its output does not determine its input"


PASSABLE = (nn.Linear, nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.Flatten, nn.Identity)


def _known_and_slope(activation: nn.Module, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Where the activation behind a convolution can be undone, and its slope."""
    known = outputs > 0 if isinstance(activation, nn.ReLU) else torch.ones_like(outputs, dtype=torch.bool)
    if isinstance(activation, nn.LeakyReLU):
        return known, torch.where(outputs > 0, 1.0, activation.negative_slope).double()
    if isinstance(activation, nn.Sigmoid):
        return known, outputs.sigmoid() * (1 - outputs.sigmoid())
    return known, known.to(outputs.dtype)


def judge_convolution(leaf: Leaf, known: Tensor, signal: Tensor, tolerance: float = TOLERANCE) -> LayerRank:
    """How many values of a convolution's inputs its equations determine.

    Args:
        leaf: the convolution, as `trace` found it.
        known: which of its outputs are known, ``[examples, ...]``; the examples share one gradient.
        signal: the error signal at its outputs.
        tolerance: singular values below this share of the largest count as zero.
    """
    conv = leaf.module
    assert isinstance(conv, nn.Conv2d)
    examples, (channels, height, width) = len(known), leaf.inputs.shape[1:]
    forward, pixels = int(known.sum()), examples * height * width
    equations = gradient_equations(conv, (height, width), signal)
    values, vectors = torch.linalg.eigh(equations.T @ equations)  # [pixels]: the same for every input channel
    determined = values > tolerance**2 * values[-1].clamp_min(torch.finfo(values.dtype).tiny)
    rank, unknowns = channels * int(determined.sum()), channels * pixels
    undetermined = unknowns - rank
    counted = undetermined * max(known.numel(), undetermined) > LARGEST_MATRIX
    if counted:
        rank += min(undetermined, forward)
    elif undetermined:
        # The directions that the gradient leaves undetermined in each channel, as the convolution maps them.
        directions = vectors[:, ~determined].T.reshape(-1, examples, height, width)
        count, responses = len(directions), []
        for channel in range(channels):
            probe = directions.new_zeros(count, examples, channels, height, width)
            probe[:, :, channel] = directions
            outputs = F.conv2d(probe.flatten(0, 1), conv.weight, **geometry(conv)).view(count, *known.shape)
            responses.append((outputs * known).flatten(1))
        stacked = torch.cat(responses)  # [channels * count, outputs]
        values = torch.linalg.eigvalsh(stacked @ stacked.T if len(stacked) <= stacked.shape[1] else stacked.T @ stacked)
        rank += int((values > tolerance**2 * conv.weight.square().sum()).sum())
    gradient = channels * len(equations)
    reason = ""
    if counted and rank == unknowns:
        reason = f"undecided: {rank} equations for as many input values, too many to compute their rank"
    elif rank < unknowns:
        prefix = "at least " if counted else ""
        reason = (
            f"{prefix}{unknowns - rank} of {unknowns} input values stay undetermined: {forward} of {known.numel()} "
            "outputs are known, and the weight gradient determines "
            f"{channels} x {int(determined.sum())} of {channels} x {pixels}"
        )
    return LayerRank(leaf.name, type(conv).__name__, unknowns, forward, gradient, rank, reason)


def geometry(conv: nn.Conv2d) -> dict[str, Any]:
    """Stride, padding and dilation of a convolution, as torch's functions take them."""
    return {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}


def gradient_equations(conv: nn.Conv2d, size: tuple[int, int], signal: Tensor) -> Tensor:
    """The linear map from one channel of all inputs to its weight gradient.

    Args:
        conv: the convolution.
        size: height and width of its inputs.
        signal: the error signal at its outputs, ``[examples, out_channels, ...]``.

    Returns:
        ``[out_channels * kernel area, examples * height * width]``.
    """
    pixels = math.prod(size)
    unit_images = torch.eye(pixels, dtype=signal.dtype, device=signal.device).view(pixels, 1, *size)
    patches = F.unfold(unit_images, conv.kernel_size, **geometry(conv))  # [pixels, kernel area, output positions]
    return torch.einsum("pkl,eol->okep", patches, signal.flatten(2)).flatten(2).flatten(0, 1)
