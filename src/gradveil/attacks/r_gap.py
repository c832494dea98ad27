"""R-GAP: invert the network layer by layer, from the classifier to the image."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.core.parameters import integer
from gradveil.task import Task
from gradveil.theory.rank import Leaf, geometry, trace, why_impassable

_SIGMOID_MARGIN = 1e-15  # inverting a sigmoid needs its output strictly inside (0, 1)
_CONVERGED = 1e-13  # a least-squares problem has converged when its gradient has shrunk by this factor


@ATTACKS.register("r-gap")
@dataclass(frozen=True, repr=False)
class RGap(Attack):
    r"""Solve for the input of each layer in turn, with linear algebra only.

    For a layer with input a, output z and error signal :math:`k = \partial L / \partial z` it solves, by least squares,

    .. math:: W a = z, \qquad \nabla W = k a^T \; (\text{a convolution: } a * k),

    inverts the activation in front of the layer and continues with
    :math:`k' = (W^T k) \cdot \sigma'`. A linear layer is solved by the second set alone.
    `gradveil.theory.recursion_ranks` says beforehand which networks can be inverted. Networks that are not a plain
    chain of convolutions, linear layers and (leaky) ReLUs or sigmoids are refused. If there are too few equations, the
    smallest solution is taken.

    At the classifier ``∇W = k a^T`` fixes k and a up to one factor. With a bias, k is the bias gradient. Without one,
    the factor is a root of a scalar equation, ``k(z) = softmax(z) - e_y`` (or ``sigmoid(z) - y`` for one logit) with
    ``z = W a``. There can be two roots and, for one logit, two labels: all are followed to the image, and the one whose
    gradient comes nearest to the shared one is returned.

    Where the paper leaves room: it treats one logit with a logistic loss; ten logits need nothing more, because the
    label is the largest entry of k and ten equations fix the one factor. Both sets of equations have equal weight, the
    second with k scaled to norm 1. The least-squares problem is solved for all victims at once by conjugate gradients
    (CGLS) on the convolutions themselves, not by a dense inverse, and always in double precision.

    Args:
        steps: maximum number of CGLS steps per layer; the solver stops as soon as every victim has converged.

    References:
        Zhu and Blaschko, R-GAP: Recursive Gradient Attack on Privacy, ICLR 2021.

    Example:
        >>> import gradveil
        >>> from gradveil import metrics, models
        >>> model = models.create("cnn6", input_shape=(1, 8, 8), classes=1)
        >>> task = gradveil.Task(model, "logistic", input_shape=(1, 8, 8), classes=2)
        >>> image, label = torch.rand(1, 1, 8, 8, generator=torch.manual_seed(1)), torch.tensor([1])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> found = RGap().reconstruct(task, update, ThreatModel())
        >>> found.labels.tolist(), bool(metrics.psnr(image, found.inputs[0].clamp(0, 1)) > 60)
        ([[1]], True)
    """

    paper = "Zhu & Blaschko, ICLR 2021"
    finds_labels = True

    steps: int = integer(1000, low=1)

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse batches, local steps, and networks that cannot be inverted layer by layer."""
        super().check_threat(task, threat)
        if threat.batch_size != 1 or threat.local is not None:
            raise ThreatModelError(
                f"{self.name}: inverts the gradient of one image, got batch_size={threat.batch_size} and "
                f"local={threat.local}; use a batch of one and no local steps"
            )
        if task.loss_name is None:
            raise ThreatModelError(
                f"{self.name}: must know how to invert the loss, got a custom loss; use cross-entropy or logistic"
            )
        if threat.known_labels is not None and threat.known_labels.is_floating_point():
            raise ThreatModelError(f"{self.name}: known_labels must be class numbers, got probabilities")
        chain = _chain(task)
        if task.classifier is None or not isinstance(chain[-1].module, nn.Linear):
            raise InputError(f"{self.name}: the model must end in a linear classifier, got {chain[-1].name!r}")
        names = [leaf.name for leaf in chain]
        for leaf in chain:
            obstacle = why_impassable(leaf.module)
            if not leaf.follows:
                obstacle = "it is not fed by the layer before it alone"
            elif isinstance(leaf.module, nn.Linear | nn.Conv2d) and f"{leaf.name}.weight" not in task.parameters:
                obstacle = "its weights are not trained, or shared with another layer, so it has no gradient of its own"
            elif names.count(leaf.name) > 1 and any(True for _ in leaf.module.parameters()):
                obstacle = "it runs more than once, so its gradient is a sum"
            if obstacle:
                raise InputError(
                    f"{self.name}: cannot pass {leaf.name!r} ({type(leaf.module).__name__}): {obstacle}; use a plain "
                    "chain such as cnn6, lenet or mlp"
                )

    @torch.no_grad()
    def run(self, problem: Problem) -> Reconstruction:
        """Go through the chain backwards, with all victims and all hypotheses about the classifier together."""
        task = problem.task
        chain = _chain(task)
        targets = {name: value.double() for name, value in problem.updates.items()}
        known_labels = problem.labels[:, 0] if problem.threat.labels == "known" else None
        head = chain[-1]
        hypotheses = _invert_head(task, head, targets, known_labels)
        victim, number = hypotheses.distinct.nonzero(as_tuple=True)
        repeated = {name: value[victim] for name, value in targets.items()}
        signal, values = hypotheses.signal[victim, number] @ _weight(head), hypotheses.values[victim, number]
        labels = hypotheses.labels[victim, number]
        known = torch.ones_like(values, dtype=torch.bool)
        for done, leaf in enumerate(reversed(chain[:-1]), start=1):
            values, signal, known = self._invert_leaf(leaf, values, signal, known, repeated)
            if problem.progress:
                problem.progress(done, len(chain), 0.0)
        images = task.denormalised(values.view(-1, *task.input_shape))
        losses = torch.full(hypotheses.distinct.shape, torch.inf, dtype=torch.float64, device=values.device)
        losses[hypotheses.distinct] = _distances(task.to(torch.float64), images, labels, repeated)
        best = losses.argmin(1)
        index = torch.zeros_like(hypotheses.labels)  # of each distinct hypothesis among the images
        index[hypotheses.distinct] = torch.arange(len(victim), device=index.device)
        victims = torch.arange(len(best), device=index.device)
        chosen = index[victims, best]
        return Reconstruction(
            inputs=images[chosen][:, None],
            labels=labels[chosen][:, None],
            loss=losses[victims, best],
            iterations=torch.zeros(len(best), dtype=torch.long),
            execution="batch",
        )

    def _invert_leaf(
        self, leaf: Leaf, values: Tensor, signal: Tensor, known: Tensor, gradients: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Go from a leaf's output to its input: the values, the error signal there, and which values are known."""
        module = leaf.module
        shape = (len(values), *leaf.inputs.shape[1:])
        everywhere = torch.ones(shape, dtype=torch.bool, device=values.device)
        if isinstance(module, nn.Linear):
            signal = gradients.get(f"{leaf.name}.bias", signal)
            values = _from_outer_product(gradients[f"{leaf.name}.weight"], signal)
            return values, signal @ module.weight, everywhere
        if isinstance(module, nn.Conv2d):
            weight_gradient = gradients[f"{leaf.name}.weight"]
            return *self._invert_convolution(leaf, module, values, signal, known, weight_gradient), everywhere
        if isinstance(module, nn.Sigmoid):
            inside = values.clamp(_SIGMOID_MARGIN, 1 - _SIGMOID_MARGIN)
            return inside.logit(), signal * inside * (1 - inside), everywhere
        if isinstance(module, nn.ReLU | nn.LeakyReLU):
            slope = module.negative_slope if isinstance(module, nn.LeakyReLU) else 0.0
            # A zero that was solved for is only zero up to rounding.
            active = values > 1e-9 * values.abs().amax(tuple(range(1, values.ndim)), keepdim=True)
            inverted = torch.where(active, values, values / slope if slope else torch.zeros_like(values))
            signal = torch.where(active, signal, slope * signal)
            return inverted, signal, everywhere if slope else active
        return values.reshape(shape), signal.reshape(shape), known.reshape(shape)  # a flattening or an identity

    def _invert_convolution(
        self, leaf: Leaf, conv: nn.Conv2d, outputs: Tensor, signal: Tensor, known: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor]:
        shape = (len(outputs), *leaf.inputs.shape[1:])
        options = geometry(conv)
        if conv.bias is not None:
            outputs = outputs - conv.bias[:, None, None]
        size = signal.flatten(1).norm(dim=1).clamp_min(torch.finfo(signal.dtype).tiny)
        unit = signal.flatten(2) / size[:, None, None]  # [victims, out channels, places]

        def apply(inputs: Tensor) -> tuple[Tensor, Tensor]:
            forward = F.conv2d(inputs, conv.weight, **options)
            patches = F.unfold(inputs, conv.kernel_size, **options)
            return forward * known, unit @ patches.transpose(1, 2)

        def transpose(forward: Tensor, weights: Tensor) -> Tensor:
            return _transposed(conv, shape, forward * known) + F.fold(
                weights.transpose(1, 2) @ unit, shape[2:], conv.kernel_size, **options
            )

        target = (outputs * known, gradient.flatten(2) / size[:, None, None])
        values = least_squares(apply, transpose, target, shape, self.steps)
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


def _chain(task: Task) -> list[Leaf]:
    return trace(task, torch.full((1, *task.input_shape), 0.5, dtype=torch.float64, device=task.device))


def _transposed(conv: nn.Conv2d, shape: tuple[int, ...], signal: Tensor) -> Tensor:
    """Propagate an error signal from a convolution's output to its input, which has this shape."""
    result: Tensor = conv2d_input(shape, conv.weight, signal, **geometry(conv))  # type: ignore[no-untyped-call]
    return result


def _weight(leaf: Leaf) -> Tensor:
    assert isinstance(leaf.module, nn.Linear)
    return leaf.module.weight


def _from_outer_product(product: Tensor, left: Tensor) -> Tensor:
    """Solve ``product = left a^T`` for a by least squares."""
    tiny = torch.finfo(left.dtype).tiny
    return (left[:, None] @ product)[:, 0] / left.square().sum(1, keepdim=True).clamp_min(tiny)


class _Hypotheses(NamedTuple):
    """Hypotheses about the classifier, ``[victims, hypotheses]`` each; one that is not `distinct` repeats another."""

    signal: Tensor  # [..., logits]
    values: Tensor  # [..., features]
    labels: Tensor
    distinct: Tensor


def _invert_head(task: Task, head: Leaf, gradients: dict[str, Tensor], known_labels: Tensor | None) -> _Hypotheses:
    assert isinstance(head.module, nn.Linear)
    product = gradients[f"{head.name}.weight"]  # [victims, logits, features]
    logistic = task.loss_name == "logistic"
    if f"{head.name}.bias" in gradients:
        signal = gradients[f"{head.name}.bias"]
        label = (signal[:, 0] < 0).long() if logistic else signal.argmin(1)
        distinct = torch.ones_like(label[:, None], dtype=torch.bool)
        return _Hypotheses(signal[:, None], _from_outer_product(product, signal)[:, None], label[:, None], distinct)

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
    return _Hypotheses(signal, (sign / factor)[..., None] * features[:, None], labels, distinct)


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


def _distances(task: Task, images: Tensor, labels: Tensor, gradients: dict[str, Tensor]) -> Tensor:
    """Relative distance of the images' gradients from the shared ones; infinite if it cannot be computed."""
    losses = []
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        with torch.enable_grad():
            simulated = task.gradient(task.parameters, image[None], label[None])
        error = sum(float((simulated[name] - value[index]).square().sum()) for name, value in gradients.items())
        size = sum(float(value[index].square().sum()) for value in gradients.values())
        losses.append(math.sqrt(error / size) if math.isfinite(error) and size > 0 else math.inf)
    return torch.tensor(losses, dtype=torch.float64, device=images.device)
