"""R-GAP: undo the network layer by layer, from the classifier to the image."""

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

# Inverting a sigmoid needs its output strictly inside (0, 1).
_EDGE = 1e-15
_CONVERGED = 1e-13  # of the gradient of a least-squares problem: the share of the first one that is left


@ATTACKS.register("r-gap")
@dataclass(frozen=True, repr=False)
class RGap(Attack):
    r"""Solve for the input of each layer in turn, with linear algebra only.

    For a layer with input a, output z and error signal :math:`k = \partial L / \partial z` it solves, by least squares,

    .. math:: W a = z, \qquad \nabla W = k a^T \; (\text{a convolution: } a * k),

    undoes the activation in front of the layer and goes on with
    :math:`k' = (W^T k) \cdot \sigma'`. A linear layer is solved by the second set alone. Which networks this can pass
    is told beforehand by `gradveil.theory.recursion_ranks`; networks that are no plain chain of convolutions, linear
    layers and (leaky) ReLUs or sigmoids are refused. Where the equations are too few, the smallest solution is taken.

    At the classifier ``∇W = k a^T`` fixes k and a up to one factor. With a bias k is its gradient. Without one, the
    factor is a root of a scalar equation, ``k(z) = softmax(z) - e_y`` (or ``sigmoid(z) - y`` for one logit) with
    ``z = W a``. There can be two roots and, for one logit, two labels: all are followed to the image, and the one whose
    gradient comes nearest to the shared one is returned.

    What the paper leaves open: it states one logit with a logistic loss; ten logits need nothing more, since the
    label is the largest entry of k and the one factor has ten equations. Both sets of equations count alike, the
    second with k scaled to norm 1. The least-squares problem is solved for all victims at once by conjugate gradients
    (CGLS) on the convolutions themselves, not by a dense inverse; in double precision whatever the update's.

    Args:
        steps: at most that many steps of CGLS a layer; it ends as soon as every victim has converged.

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
        """Refuse batches, local steps, and networks that no recursion passes."""
        super().check_threat(task, threat)
        if threat.batch_size != 1 or threat.local is not None:
            raise ThreatModelError(
                f"{self.name}: inverts the gradient of one image, got batch_size={threat.batch_size} and "
                f"local={threat.local}; use a batch of one and no local steps"
            )
        if task.loss_name is None:
            raise ThreatModelError(f"{self.name}: must know how the loss is inverted: use cross-entropy or logistic")
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
        """Go through the chain backwards, all victims and all hypotheses about the classifier together."""
        task = problem.task
        chain = _chain(task)
        targets = {name: value.double() for name, value in problem.updates.items()}
        known_labels = problem.labels[:, 0] if problem.threat.labels == "known" else None
        head = chain[-1]
        heads = _invert_head(task, head, targets, known_labels)
        victim, hypothesis = heads.real.nonzero(as_tuple=True)
        repeated = {name: value[victim] for name, value in targets.items()}
        signal, values = heads.signal[victim, hypothesis] @ _weight(head), heads.values[victim, hypothesis]
        guesses = heads.labels[victim, hypothesis]
        known = torch.ones_like(values, dtype=torch.bool)
        for done, leaf in enumerate(reversed(chain[:-1]), start=1):
            values, signal, known = self._pass(leaf, values, signal, known, repeated)
            if problem.progress:
                problem.progress(done, len(chain), 0.0)
        images = task.denormalised(values.view(-1, *task.input_shape))
        losses = torch.full(heads.real.shape, torch.inf, dtype=torch.float64, device=values.device)
        losses[heads.real] = _distances(task.to(torch.float64), images, guesses, repeated)
        best = losses.argmin(1)
        place = torch.zeros_like(heads.labels)
        place[heads.real] = torch.arange(len(victim), device=place.device)
        rows = torch.arange(len(best), device=place.device)
        chosen = place[rows, best]
        return Reconstruction(
            inputs=images[chosen][:, None],
            labels=guesses[chosen][:, None],
            loss=losses[rows, best],
            iterations=torch.zeros(len(best), dtype=torch.long),
            execution="batch",
        )

    def _pass(
        self, leaf: Leaf, values: Tensor, signal: Tensor, known: Tensor, gradients: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From a leaf's output to its input: its values, the error signal there, and where the values are known."""
        module = leaf.module
        shape = (len(values), *leaf.inputs.shape[1:])
        everywhere = torch.ones(shape, dtype=torch.bool, device=values.device)
        if isinstance(module, nn.Linear):
            signal = gradients.get(f"{leaf.name}.bias", signal)
            values = _from_outer_product(gradients[f"{leaf.name}.weight"], signal)
            return values, signal @ module.weight, everywhere
        if isinstance(module, nn.Conv2d):
            return *self._solve(leaf, module, values, signal, known, gradients[f"{leaf.name}.weight"]), everywhere
        if isinstance(module, nn.Sigmoid):
            inside = values.clamp(_EDGE, 1 - _EDGE)
            return inside.logit(), signal * inside * (1 - inside), everywhere
        if isinstance(module, nn.ReLU | nn.LeakyReLU):
            slope = module.negative_slope if isinstance(module, nn.LeakyReLU) else 0.0
            # A solved zero is a rounded one.
            passes = values > 1e-9 * values.abs().amax(tuple(range(1, values.ndim)), keepdim=True)
            undone = torch.where(passes, values, values / slope if slope else torch.zeros_like(values))
            signal = torch.where(passes, signal, slope * signal)
            return undone, signal, everywhere if slope else passes
        return values.reshape(shape), signal.reshape(shape), known.reshape(shape)  # flattened, or left alone

    def _solve(
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

        wanted = (outputs * known, gradient.flatten(2) / size[:, None, None])
        values = least_squares(apply, transpose, wanted, shape, self.steps)
        return values, _transposed(conv, shape, signal)


def least_squares(
    apply: Callable[[Tensor], tuple[Tensor, Tensor]],
    transpose: Callable[[Tensor, Tensor], Tensor],
    wanted: tuple[Tensor, Tensor],
    shape: tuple[int, ...],
    steps: int,
) -> Tensor:
    """Solve many independent least-squares problems by CGLS; where the solution is not unique, the smallest one.

    Args:
        apply: the linear map, to two tensors; the first axis counts the problems.
        transpose: its transpose.
        wanted: what the map should give.
        shape: of the solution.
        steps: at most that many; a problem has converged when its gradient has shrunk by `_CONVERGED`.
    """

    def square(*tensors: Tensor) -> Tensor:
        return torch.stack([tensor.flatten(1).square().sum(1) for tensor in tensors]).sum(0)

    def spread(scalars: Tensor, like: Tensor) -> Tensor:
        return scalars.view(-1, *[1] * (like.ndim - 1))

    tiny = torch.finfo(wanted[0].dtype).tiny
    residual = wanted
    solution = wanted[0].new_zeros(shape)
    slope = transpose(*residual)
    direction, energy = slope, square(slope)
    target = _CONVERGED**2 * energy
    for _ in range(steps):
        active = energy > target
        if not active.any():
            break
        image = apply(direction)
        length = torch.where(active, energy / square(*image).clamp_min(tiny), 0)
        solution = solution + spread(length, direction) * direction
        residual = (
            residual[0] - spread(length, image[0]) * image[0],
            residual[1] - spread(length, image[1]) * image[1],
        )
        slope = transpose(*residual)
        fresh = torch.where(active, square(slope), energy)
        direction = slope + spread(fresh / energy.clamp_min(tiny), direction) * direction
        energy = fresh
    return solution


def _chain(task: Task) -> list[Leaf]:
    return trace(task, torch.full((1, *task.input_shape), 0.5, dtype=torch.float64, device=task.device))


def _transposed(conv: nn.Conv2d, shape: tuple[int, ...], signal: Tensor) -> Tensor:
    """From an error signal at a convolution's output to the one at its input of that shape."""
    result: Tensor = conv2d_input(shape, conv.weight, signal, **geometry(conv))  # type: ignore[no-untyped-call]
    return result


def _weight(leaf: Leaf) -> Tensor:
    assert isinstance(leaf.module, nn.Linear)
    return leaf.module.weight


def _from_outer_product(product: Tensor, left: Tensor) -> Tensor:
    """a of ``left a^T``, by least squares."""
    tiny = torch.finfo(left.dtype).tiny
    return (left[:, None] @ product)[:, 0] / left.square().sum(1, keepdim=True).clamp_min(tiny)


class _Heads(NamedTuple):
    """Hypotheses about the classifier, ``[victims, hypotheses]`` each; those that are not `real` repeat another one."""

    signal: Tensor  # [..., logits]
    values: Tensor  # [..., features]
    labels: Tensor
    real: Tensor


def _invert_head(task: Task, head: Leaf, gradients: dict[str, Tensor], known_labels: Tensor | None) -> _Heads:
    assert isinstance(head.module, nn.Linear)
    product = gradients[f"{head.name}.weight"]  # [victims, logits, features]
    logistic = task.loss_name == "logistic"
    if f"{head.name}.bias" in gradients:
        signal = gradients[f"{head.name}.bias"]
        label = (signal[:, 0] < 0).long() if logistic else signal.argmin(1)
        only = torch.ones_like(label[:, None], dtype=torch.bool)
        return _Heads(signal[:, None], _from_outer_product(product, signal)[:, None], label[:, None], only)

    left, sizes, right = torch.linalg.svd(product, full_matrices=False)
    unit, features = left[:, :, 0], sizes[:, :1] * right[:, 0]  # product = unit features^T
    if known_labels is not None:
        labels = known_labels[:, None]
    elif logistic or task.classes == 2:
        labels = torch.tensor([0, 1], device=unit.device).expand(len(unit), 2)
    else:
        labels = unit.abs().argmax(1, keepdim=True)  # |k_y| = sum of all the others
    # The signal at the label is below zero (for one logit: above, if the label is 0).
    at = unit[:, :1].expand_as(labels) if logistic else unit.gather(1, labels)
    sign = torch.where((at > 0) == (labels == 0) if logistic else at < 0, 1.0, -1.0).to(unit)
    labels, sign, at = (value.repeat_interleave(2, 1) for value in (labels, sign, at))  # room for two roots
    logits = features @ head.module.weight.T  # at factor 1
    shift = 0 if head.module.bias is None else head.module.bias  # of a bias that is not trained

    def mismatch(factor: Tensor) -> Tensor:
        """How far the label's error signal is from the supposed one, for factors ``[victims, hypotheses, ...]``."""

        def spread(tensor: Tensor) -> Tensor:
            return tensor.view(*tensor.shape, *[1] * (factor.ndim - 2))

        every = logits.view(len(logits), *[1] * (factor.ndim - 1), -1) * (spread(sign) / factor)[..., None] + shift
        label = spread(labels).expand(factor.shape)
        predicted = every[..., 0].sigmoid() if logistic else every.softmax(-1).gather(-1, label[..., None])[..., 0]
        missing: Tensor = predicted - (label if logistic else 1) - factor * spread(sign * at)
        return missing

    factor, real = _two_roots(mismatch, labels.shape, unit)
    signal = (factor * sign)[..., None] * unit[:, None]
    return _Heads(signal, (sign / factor)[..., None] * features[:, None], labels, real)


def _two_roots(mismatch: Callable[[Tensor], Tensor], shape: torch.Size, like: Tensor) -> tuple[Tensor, Tensor]:
    """The factor of every hypothesis: even ones get the first root, odd ones the second; and whether there is one."""
    # |k| is at most sqrt(2); below 1e-6 the image has been learnt by heart and the gradient says nothing.
    grid = torch.logspace(-6, math.log10(math.sqrt(2)), 2000, dtype=like.dtype, device=like.device)
    heights = mismatch(grid.expand(*shape, -1))
    crossing = (heights[..., :-1] * heights[..., 1:] <= 0).long()
    order = crossing.cumsum(-1)
    number = torch.arange(shape[1], device=like.device) % 2 + 1
    wanted = torch.minimum(number.expand(shape), order[..., -1])
    place = ((order == wanted[..., None]) & (crossing == 1)).long().argmax(-1)
    # No root, as in a defended update: the nearest miss.
    missed = order[..., -1] == 0
    place = torch.where(missed, heights[..., :-1].abs().argmin(-1), place)
    low, high = grid[place], torch.where(missed, grid[place], grid[place + 1])
    below = mismatch(low)
    for _ in range(60):
        middle = (low + high) / 2
        same = mismatch(middle) * below > 0
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return (low + high) / 2, (number == 1) | (order[..., -1] >= number)


def _distances(task: Task, images: Tensor, labels: Tensor, gradients: dict[str, Tensor]) -> Tensor:
    """Relative distance of the images' gradients from the shared ones; what is not finite is infinitely far."""
    losses = []
    for place, (image, label) in enumerate(zip(images, labels, strict=True)):
        with torch.enable_grad():
            own = task.gradient(task.parameters, image[None], label[None])
        miss = sum(float((own[name] - value[place]).square().sum()) for name, value in gradients.items())
        size = sum(float(value[place].square().sum()) for value in gradients.values())
        losses.append(math.sqrt(miss / size) if math.isfinite(miss) and size > 0 else math.inf)
    return torch.tensor(losses, dtype=torch.float64, device=images.device)
