"""Going backwards through a network, layer by layer: the input of a layer from its output and its weight gradient."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ThreatModelError
from gradveil.task import Gradients, Task
from gradveil.theory.rank import Leaf, geometry, trace

_SIGMOID_MARGIN = 1e-15  # inverting a sigmoid needs its output strictly inside (0, 1)
_ROUNDING_MARGIN = 3.0  # zeros are at most this many times as far above zero as the lowest of them is below
_CONVERGED = 1e-13  # a least-squares problem has converged when its gradient has shrunk by this factor


def check_invertible(owner: str, task: Task, threat: ThreatModel) -> None:
    """Refuse local steps, and losses whose gradient cannot be read backwards."""
    if threat.local is not None:
        raise ThreatModelError(
            f"{owner}: inverts the gradient of one step, got local={threat.local}; use no local steps"
        )
    if task.loss_name is None:
        raise ThreatModelError(
            f"{owner}: must know how to invert the loss, got a custom loss; use cross-entropy or logistic"
        )


def invert_leaf(
    leaf: Leaf, values: Tensor, signal: Tensor, known: Tensor, gradients: Gradients, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Go from a leaf's output to its input: the values, the error signal there, and which values are known.

    The examples of a victim share its gradients, so they are solved for together.

    Args:
        leaf: a leaf that can be passed.
        values: its outputs, ``[victims, examples, ...]``.
        signal: the gradient of the loss with respect to them.
        known: which of the outputs are known; those of a silent ReLU are not, on its far side.
        gradients: the shared gradients, ``[victims, ...]`` by name, in double precision.
        steps: maximum number of CGLS steps of a convolution.
    """
    module = leaf.module
    shape = (*values.shape[:2], *leaf.inputs.shape[1:])
    everywhere = torch.ones(shape, dtype=torch.bool, device=values.device)
    if isinstance(module, nn.Linear):
        if values.shape[1] == 1 and f"{leaf.name}.bias" in gradients:
            signal = gradients[f"{leaf.name}.bias"][:, None]
        return _from_products(gradients[f"{leaf.name}.weight"], signal), signal @ module.weight, everywhere
    if isinstance(module, nn.Conv2d):
        weight_gradient = gradients[f"{leaf.name}.weight"]
        return *_invert_convolution(module, shape, values, signal, known, weight_gradient, steps), everywhere
    if isinstance(module, nn.Sigmoid):
        inside = values.clamp(_SIGMOID_MARGIN, 1 - _SIGMOID_MARGIN)
        return inside.logit(), signal * inside * (1 - inside), everywhere
    if isinstance(module, nn.ReLU | nn.LeakyReLU):
        slope = module.negative_slope if isinstance(module, nn.LeakyReLU) else 0.0
        axes = tuple(range(2, values.ndim))
        # A zero that was solved for is only zero up to rounding; how large that is shows below zero, where a ReLU gives
        # nothing.
        rounding = 1e-9 * values.abs().amax(axes, keepdim=True)
        if not slope:
            rounding = rounding.maximum(_ROUNDING_MARGIN * -values.amin(axes, keepdim=True))
        active = values > rounding
        inverted = torch.where(active, values, values / slope if slope else torch.zeros_like(values))
        signal = torch.where(active, signal, slope * signal)
        return inverted, signal, everywhere if slope else active
    return values.reshape(shape), signal.reshape(shape), known.reshape(shape)  # a flattening or an identity


def _invert_convolution(
    conv: nn.Conv2d,
    shape: tuple[int, ...],
    outputs: Tensor,
    signal: Tensor,
    known: Tensor,
    gradient: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """The inputs, of this shape, and the error signal there."""
    options = geometry(conv)
    if conv.bias is not None:
        outputs = outputs - conv.bias[:, None, None]
    size = signal.flatten(1).norm(dim=1).clamp_min(torch.finfo(signal.dtype).tiny)
    unit = signal.flatten(3) / size[:, None, None, None]  # [victims, examples, out channels, places]

    def apply(inputs: Tensor) -> tuple[Tensor, Tensor]:
        flat = inputs.flatten(0, 1)
        forward = F.conv2d(flat, conv.weight, **options).view_as(known)
        patches = F.unfold(flat, conv.kernel_size, **options)
        return forward * known, (unit @ patches.view(*shape[:2], *patches.shape[1:]).mT).sum(1)

    def transpose(forward: Tensor, weights: Tensor) -> Tensor:
        folded = F.fold((weights[:, None].mT @ unit).flatten(0, 1), shape[3:], conv.kernel_size, **options)
        return _transposed(conv, shape, forward * known) + folded.view(shape)

    target = (outputs * known, gradient.flatten(2) / size[:, None, None])
    values = least_squares(apply, transpose, target, shape, steps)
    return values, _transposed(conv, shape, signal)


def least_squares(
    apply: Callable[[Tensor], tuple[Tensor, Tensor]],
    transpose: Callable[[Tensor, Tensor], Tensor],
    target: tuple[Tensor, Tensor],
    shape: tuple[int, ...],
    steps: int,
) -> Tensor:
    """Solve many independent least-squares problems by CGLS; if a solution is not unique, find the smallest.

    Args:
        apply: the linear map, which gives two tensors; the first axis counts the problems.
        transpose: its transpose.
        target: what the map should give.
        shape: shape of the solution.
        steps: maximum number of steps; a problem has converged when its gradient has shrunk by `_CONVERGED`.
    """

    def squared_norm(*tensors: Tensor) -> Tensor:
        return torch.stack([tensor.flatten(1).square().sum(1) for tensor in tensors]).sum(0)

    def broadcast(scalars: Tensor, like: Tensor) -> Tensor:
        return scalars.view(-1, *[1] * (like.ndim - 1))

    tiny = torch.finfo(target[0].dtype).tiny
    residual = target
    solution = target[0].new_zeros(shape)
    slope = transpose(*residual)
    direction, energy = slope, squared_norm(slope)
    final_energy = _CONVERGED**2 * energy
    for _ in range(steps):
        active = energy > final_energy
        if not active.any():
            break
        mapped = apply(direction)
        length = torch.where(active, energy / squared_norm(*mapped).clamp_min(tiny), 0)
        solution = solution + broadcast(length, direction) * direction
        residual = (
            residual[0] - broadcast(length, mapped[0]) * mapped[0],
            residual[1] - broadcast(length, mapped[1]) * mapped[1],
        )
        slope = transpose(*residual)
        new_energy = torch.where(active, squared_norm(slope), energy)
        direction = slope + broadcast(new_energy / energy.clamp_min(tiny), direction) * direction
        energy = new_energy
    return solution


def chain_of(task: Task) -> list[Leaf]:
    """The modules without children in the order they run, on a constant input."""
    return trace(task, torch.full((1, *task.input_shape), 0.5, dtype=torch.float64, device=task.device))


def _transposed(conv: nn.Conv2d, shape: tuple[int, ...], signal: Tensor) -> Tensor:
    """Propagate error signals from a convolution's outputs to its inputs, which have this shape."""
    flat = (shape[0] * shape[1], *shape[2:])
    result: Tensor = conv2d_input(flat, conv.weight, signal.flatten(0, 1), **geometry(conv))  # type: ignore[no-untyped-call]
    return result.view(shape)


def weight_of(leaf: Leaf) -> Tensor:
    """The weight of a linear leaf."""
    assert isinstance(leaf.module, nn.Linear)
    return leaf.module.weight


def _from_products(product: Tensor, left: Tensor) -> Tensor:
    """Solve ``product = left^T a`` for a ``[victims, examples, ...]`` by least squares; 0 where `left` is."""
    tiny = torch.finfo(left.dtype).tiny * torch.eye(left.shape[1], dtype=left.dtype, device=left.device)
    solved: Tensor = torch.linalg.solve_ex(left @ left.mT + tiny, left @ product).result
    return solved


class Hypotheses(NamedTuple):
    """Hypotheses about the classifier, ``[victims, hypotheses]`` each; one that is not `distinct` repeats another."""

    signal: Tensor  # [..., logits]
    values: Tensor  # [..., features]
    labels: Tensor
    distinct: Tensor


def invert_head(task: Task, head: Leaf, gradients: Gradients, known_labels: Tensor | None) -> Hypotheses:
    """Invert the classifier: its input and the error signal at the logits; without a bias, up to some hypotheses."""
    assert isinstance(head.module, nn.Linear)
    product = gradients[f"{head.name}.weight"]  # [victims, logits, features]
    logistic = task.loss_name == "logistic"
    if f"{head.name}.bias" in gradients:
        signal = gradients[f"{head.name}.bias"]
        label = (signal[:, 0] < 0).long() if logistic else signal.argmin(1)
        distinct = torch.ones_like(label[:, None], dtype=torch.bool)
        return Hypotheses(signal[:, None], _from_products(product, signal[:, None]), label[:, None], distinct)

    left, sizes, right = torch.linalg.svd(product, full_matrices=False)
    unit, features = left[:, :, 0], sizes[:, :1] * right[:, 0]  # product = unit features^T
    if known_labels is not None:
        labels = known_labels[:, None]
    elif logistic or task.classes == 2:
        labels = torch.tensor([0, 1], device=unit.device).expand(len(unit), 2)
    else:
        labels = unit.abs().argmax(1, keepdim=True)  # |k_y| is the sum of all the others
    # The signal at the label is below zero (for one logit: above, if the label is 0).
    label_entry = unit[:, :1].expand_as(labels) if logistic else unit.gather(1, labels)
    sign = torch.where((label_entry > 0) == (labels == 0) if logistic else label_entry < 0, 1.0, -1.0).to(unit)
    # Room for two roots.
    labels, sign, label_entry = (value.repeat_interleave(2, 1) for value in (labels, sign, label_entry))
    unit_logits = features @ head.module.weight.T  # for a factor of 1
    frozen_bias = 0 if head.module.bias is None else head.module.bias

    def mismatch(factor: Tensor) -> Tensor:
        """Predicted minus assumed error signal at the label, for factors ``[victims, hypotheses, ...]``."""

        def broadcast(tensor: Tensor) -> Tensor:
            return tensor.view(*tensor.shape, *[1] * (factor.ndim - 2))

        scale = (broadcast(sign) / factor)[..., None]
        logits = unit_logits.view(len(unit_logits), *[1] * (factor.ndim - 1), -1) * scale + frozen_bias
        label = broadcast(labels).expand(factor.shape)
        predicted = logits[..., 0].sigmoid() if logistic else logits.softmax(-1).gather(-1, label[..., None])[..., 0]
        difference: Tensor = predicted - (label if logistic else 1) - factor * broadcast(sign * label_entry)
        return difference

    factor, distinct = _two_roots(mismatch, labels.shape, unit)
    signal = (factor * sign)[..., None] * unit[:, None]
    return Hypotheses(signal, (sign / factor)[..., None] * features[:, None], labels, distinct)


def _two_roots(mismatch: Callable[[Tensor], Tensor], shape: torch.Size, like: Tensor) -> tuple[Tensor, Tensor]:
    """The factor of each hypothesis, and whether it is distinct: even ones get the first root, odd ones the second."""
    # |k| is at most sqrt(2). Below 1e-6 the model has memorised the image and the gradient reveals nothing.
    grid = torch.logspace(-6, math.log10(math.sqrt(2)), 2000, dtype=like.dtype, device=like.device)
    values = mismatch(grid.expand(*shape, -1))
    crossing = (values[..., :-1] * values[..., 1:] <= 0).long()
    crossings = crossing.cumsum(-1)
    number = torch.arange(shape[1], device=like.device) % 2 + 1
    root = torch.minimum(number.expand(shape), crossings[..., -1])
    cell = ((crossings == root[..., None]) & (crossing == 1)).long().argmax(-1)
    # Defended updates may have no root; the grid point with the smallest mismatch is taken then.
    no_root = crossings[..., -1] == 0
    cell = torch.where(no_root, values[..., :-1].abs().argmin(-1), cell)
    low, high = grid[cell], torch.where(no_root, grid[cell], grid[cell + 1])
    low_value = mismatch(low)
    for _ in range(60):  # bisection
        middle = (low + high) / 2
        same_side = mismatch(middle) * low_value > 0
        low, high = torch.where(same_side, middle, low), torch.where(same_side, high, middle)
    return (low + high) / 2, (number == 1) | (crossings[..., -1] >= number)


def distances(task: Task, inputs: Tensor, labels: Tensor, gradients: Gradients) -> Tensor:
    """Relative distance of the gradients of what was found from the shared ones, ``[victims]``, in double precision.

    Args:
        task: the model.
        inputs: what was found, ``[victims, examples, *input_shape]``.
        labels: its labels, ``[victims, examples, ...]``.
        gradients: the shared gradients, ``[victims, ...]`` by name.

    Returns:
        ``|g(x) - g| / |g|`` over all layers; infinite if it cannot be computed.
    """
    task, losses = task.to(torch.float64), []
    for index, (examples, targets) in enumerate(zip(inputs.double(), labels, strict=True)):
        with torch.enable_grad():
            simulated = task.gradient(task.parameters, examples, targets)
        error = sum(float((simulated[name] - value[index]).square().sum()) for name, value in gradients.items())
        size = sum(float(value[index].double().square().sum()) for value in gradients.values())
        losses.append(math.sqrt(error / size) if math.isfinite(error) and size > 0 else math.inf)
    return torch.tensor(losses, dtype=torch.float64, device=inputs.device)
