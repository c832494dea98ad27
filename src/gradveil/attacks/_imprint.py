r"""What imprint attacks share: sorting images into bins, and reading them off differences of neighbouring rows.

Row i of an imprint layer measures the brightness h of an image and is active when h exceeds the threshold c_i. All
rows of a copy reach the model through the same output direction v, so an image adds the same multiple of itself,
:math:`\delta = \langle \partial L / \partial \text{image}, v \rangle`, to the gradient of every row it activates. The
difference of the gradients of rows i and i + 1 is thus a sum over only the images of bin i, whose brightness lies
between c_i and c_{i+1},

.. math:: d_i = \sum_{t: c_i < h_t \le c_{i+1}} \delta_t x_t, \qquad \beta_i = \sum \delta_t,

and d_i / beta_i is the image if there is just one. Every bin comes in two copies with different v. If it holds one
image, both copies see multiples of it; two images mix in different proportions. So the attacker can tell which bins
hold one image.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import jvp

from gradveil.attacks.base import Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.problem import Problem
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.core.randomness import fresh_generator
from gradveil.defenses.base import Batch
from gradveil.modality import IMAGE
from gradveil.task import Gradients, Task

COPIES = 2
DECODE, DECODE_BIAS = "imprint.decode.weight", "imprint.decode.bias"
# Root mean square of the change that the block makes to the images before they reach the model.
DISTURBANCE = 0.01
GREY = 0.5
# Number of public images whose gradients are measured; the scale needs no more.
MEASURED_IMAGES = 16


@dataclass(frozen=True)
class Bins:
    """What the gradients of an imprint layer reveal, bin by bin; the leading axes are victims (and clients).

    Args:
        images: ``[..., bins, values]``, the normalised image of each bin; a mixture if the bin holds several.
        factors: ``[..., copies, bins]``, the factor delta in each copy; for a mixture, the sum of its factors.
        energy: ``[..., bins]``, squared length of the differences.
        occupied: ``[..., bins]``, whether the energy is more than noise and rounding.
        single: ``[..., bins]``, whether both copies see the same single image.
        disagreement: ``[..., bins]``, the share of the weaker copy that the stronger one does not explain, in [0, 1].

    Example:
        >>> rows, biases = torch.zeros(2, 20, 2), torch.zeros(2, 20)  # two copies, twenty bins, images of two values
        >>> rows[:, 0], rows[:, 1] = torch.tensor([[3.0, 1.0], [6.0, 2.0]]), torch.tensor([[2.0, 0.0], [4.0, 0.0]])
        >>> biases[:, 0], biases[:, 1] = torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0])
        >>> bins = read_bins(rows, biases)
        >>> bins.images[:2].tolist(), bins.single.nonzero().flatten().tolist()
        ([[1.0, 1.0], [2.0, 0.0]], [0, 1])
    """

    images: Tensor
    factors: Tensor
    energy: Tensor
    occupied: Tensor
    single: Tensor
    disagreement: Tensor


def thresholds(brightness: Tensor, bins: int, lowest: float) -> Tensor:
    """Where the bins begin: first at `lowest`, then at quantiles of the measured brightness.

    Quantiles of few values are noisy, and unequal bins cause more collisions, so each value is first blurred by a
    normal kernel of Silverman's width.

    Args:
        brightness: brightness of public images, ``[images]``.
        bins: number of bins.
        lowest: a brightness below that of any image.
    """
    values = brightness.double()
    spread = float(values.std()) if len(values) > 1 else 0.0
    if spread == 0:
        raise InputError(
            f"imprint: the public images must differ in brightness so that bins can be placed, got {len(values)} of "
            "the same brightness; use more or other images"
        )
    kernel = torch.special.ndtri((torch.arange(32, dtype=values.dtype, device=values.device) + 0.5) / 32)
    blurred = (values[:, None] + 1.06 * spread * len(values) ** -0.2 * kernel).flatten()
    fractions = torch.arange(1, bins, dtype=values.dtype, device=values.device) / bins
    return torch.cat([values.new_tensor([lowest]), torch.quantile(blurred, fractions).clamp_min(lowest)])


@dataclass(frozen=True)
class Measurement:
    """What a server measures on public images to design its block.

    Args:
        edges: ``[bins]``, where the bins begin.
        excess: ``[images]``, sum over the bins of how far an image's brightness exceeds the bin's edge.
        directions: ``[copies, values]``, the output directions.
        typical_factor: typical size of the factor delta for these directions, of an image alone in its batch.
        squared_size: mean of ``|x|^2``.

    Example:
        >>> Measurement(torch.arange(3.0), torch.tensor([1.0, 2.0]), torch.ones(2, 4), 0.1, 2.0).bin_width
        1.0
    """

    edges: Tensor
    excess: Tensor
    directions: Tensor
    typical_factor: float
    squared_size: float

    @property
    def bin_width(self) -> float:
        """The median width of the bins, in units of brightness."""
        return float(self.edges.diff().median())

    def slope(self, signal: float) -> float:
        """Factor from brightness to the input of a row, chosen so that the block changes images by `DISTURBANCE`."""
        return DISTURBANCE * self.typical_factor / (signal * float(self.excess.std()) * math.sqrt(COPIES))

    def drift(self, signal: float) -> float:
        """How far one step of learning rate 1 on one image shifts the bins, in bin widths."""
        return signal * self.squared_size / (self.slope(signal) * self.bin_width)


def measure(owner: str, task: Task, public: Batch | None, bins: int, generator: torch.Generator | None) -> Measurement:
    """Measure public images on the unmodified model."""
    if task.modality != IMAGE:
        raise ThreatModelError(f"{owner}: sorts images by their brightness, got a task on {task.modality.name} inputs")
    if public is None:
        raise ThreatModelError(f"{owner}: needs public images to place its bins; pass public=(images, labels)")
    generator = generator or fresh_generator(task.device)
    images, labels = public[0].to(task.device, task.dtype), public[1].to(task.device)
    normalised = task.normalised(images).flatten(1)
    brightness = normalised.double().mean(1)
    black = task.normalised(torch.zeros_like(images[:1])).mean()
    edges = thresholds(brightness, bins, float(black) - float(brightness.std()))  # so that black images have a bin too
    directions = torch.randn(COPIES, normalised.shape[1], generator=generator, dtype=task.dtype, device=task.device)
    return Measurement(
        edges=edges,
        excess=(brightness[:, None] - edges).clamp_min(0).sum(1),
        directions=directions,
        typical_factor=_typical_factor(owner, task, images[:MEASURED_IMAGES], labels[:MEASURED_IMAGES], directions),
        squared_size=float(normalised.square().sum(1).mean()),
    )


@torch.no_grad()
def set_decoder(decode: nn.Linear, measured: Measurement, signal: float) -> None:
    """Scale the decoder so that a typical image, alone in its batch, has a factor delta of size `signal`.

    The bias of the decoder cancels what the block adds to public images on average.
    """
    gain, bins = signal / measured.typical_factor, len(measured.edges)
    decode.weight.copy_(gain * measured.directions.repeat_interleave(bins, 0).T)
    added = gain * measured.slope(signal) * float(measured.excess.mean())
    decode.bias.copy_(-added * measured.directions.sum(0))


def _typical_factor(owner: str, task: Task, images: Tensor, labels: Tensor, directions: Tensor) -> float:
    """Root mean square of the derivative of each image's own loss along the directions."""
    # d image / d normalised image
    scale = task.denormalised(torch.ones_like(images)) - task.denormalised(torch.zeros_like(images))
    with torch.enable_grad():
        leaf = images.detach().requires_grad_()
        loss = len(images) * task.loss(task.parameters, leaf, labels)
        (slopes,) = torch.autograd.grad(loss, leaf)
    typical_factor = float(((slopes * scale).flatten(1) @ directions.T).square().mean().sqrt())
    if typical_factor == 0:
        raise InputError(
            f"{owner}: the loss does not depend on the images, so updates reveal nothing about them; check the model"
        )
    return typical_factor


def locate(owner: str, tensors: Gradients, *names: str) -> list[str]:
    """The full names of an imprint block's parameters, wherever the block is in the model."""
    found = [
        [full for full in tensors if full.split(".")[-len(name.split(".")) :] == name.split(".")] for name in names
    ]
    if any(len(matches) != 1 for matches in found):
        raise InputError(
            f"{owner}: expected a model with one imprint block, got one without; attack the task that "
            "modify(task, public=...) returns"
        )
    return [matches[0] for matches in found]


def read_bins(rows: Tensor, biases: Tensor) -> Bins:
    """Turn the gradients of an imprint layer into images.

    Args:
        rows: weight gradients ``[..., copies, bins, values]``.
        biases: bias gradients ``[..., copies, bins]``.
    """
    joined = torch.cat([rows, biases[..., None]], dim=-1)
    differences = joined - torch.cat([joined[..., 1:, :], torch.zeros_like(joined[..., :1, :])], dim=-2)
    energies = differences.square().sum(-1)  # [..., copies, bins]
    # Most bins are empty, so the energy of the emptiest tenth is noise; it is at least the rounding error.
    rounding = (8 * torch.finfo(rows.dtype).eps) ** 2 * joined.square().sum(-1).amax((-2, -1))
    noise = torch.quantile(energies.mean(-2), 0.1, dim=-1)
    noise = torch.maximum(noise, rounding)[..., None]
    first, second = differences.unbind(-3)
    swap = (energies[..., 1, :] > energies[..., 0, :])[..., None]
    strong, weak = torch.where(swap, second, first), torch.where(swap, first, second)
    tiny = torch.finfo(rows.dtype).tiny
    share = (strong * weak).sum(-1) / strong.square().sum(-1).clamp_min(tiny)
    unexplained = (weak - share[..., None] * strong).square().sum(-1)
    factors = differences[..., -1]
    images = (factors[..., None] * differences[..., :-1]).sum(-3) / factors.square().sum(-2).clamp_min(tiny)[..., None]
    occupied = energies.amax(-2) > 4 * noise
    return Bins(
        images=images,
        factors=factors,
        energy=energies.sum(-2),
        occupied=occupied,
        single=occupied & (unexplained <= 3 * noise),
        disagreement=(unexplained / energies.amin(-2).clamp_min(tiny)).clamp(max=1).sqrt(),
    )


@dataclass(frozen=True)
class Selection:
    """The images that an attacker selects by its own evidence.

    Args:
        images: ``[victims, count, values]``; NaN if no image was found.
        factors: ``[victims, count, copies]``.
        certain: ``[victims, count]``, whether the bin holds one image.
        loss: ``[victims]``, mean disagreement; an image that was not found counts as 1.
        source: ``[victims, count]``, the number of the bin, counting through all clients; -1: no image was found.

    Example:
        >>> rows, biases = torch.zeros(2, 20, 2), torch.zeros(2, 20)
        >>> rows[:, 0], rows[:, 1] = torch.tensor([[3.0, 1.0], [6.0, 2.0]]), torch.tensor([[2.0, 0.0], [4.0, 0.0]])
        >>> biases[:, 0], biases[:, 1] = torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0])
        >>> select_images(read_bins(rows[None], biases[None]), count=3).source.tolist()  # the strongest first
        [[1, 0, -1]]
    """

    images: Tensor
    factors: Tensor
    certain: Tensor
    loss: Tensor
    source: Tensor


def select_images(bins: Bins, count: int) -> Selection:
    """The images of each victim's `count` best bins: single images before mixtures, then the strongest first."""
    victims, total = bins.energy.shape
    # Energy over its sum is at most 1, so a strong mixture never comes before a weak single image.
    score = bins.energy / bins.energy.sum(1, keepdim=True).clamp_min(torch.finfo(bins.energy.dtype).tiny)
    score = torch.where(bins.occupied, score + 2.0 * bins.single, -1.0)
    scores, chosen = score.topk(min(count, total), dim=1)
    found, victim = scores >= 0, torch.arange(victims, device=chosen.device)[:, None]

    def select(values: Tensor, missing: float) -> Tensor:
        """The values ``[victims, bins, ...]`` of the chosen bins, and `missing` if there are too few bins."""
        result = values.new_full((victims, count, *values.shape[2:]), missing)
        result[:, : chosen.shape[1]][found] = values[victim, chosen][found]
        return result

    return Selection(
        images=select(bins.images, torch.nan),
        factors=select(bins.factors.transpose(1, 2), 0),
        certain=select(bins.single, False),
        loss=select(bins.disagreement, 1).mean(1),
        source=select(torch.arange(total, device=chosen.device).expand(victims, -1), -1),
    )


def as_images(task: Task, normalised: Tensor) -> Tensor:
    """The images in [0, 1] scale; those that were not found are grey."""
    return task.denormalised(normalised.view(*normalised.shape[:-1], *task.input_shape)).nan_to_num(nan=GREY)


@torch.no_grad()
def labels_of(task: Task, images: Tensor, factors: Tensor, decode_weight: str, decode_bias: str) -> Tensor:
    """The label of each image: the one whose error signal best explains the observed factors.

    With cross-entropy, an image with label y has ``delta = (p - e_y) J v`` in each copy, where J is the derivative of
    the logits. One forward-mode derivative along v gives the factors for all labels; the nearest in direction is taken,
    so that neither the batch size nor the number of clients matters. That batch norm on batch statistics couples the
    images is ignored. For other losses the labels are 0.

    Args:
        task: the modified task.
        images: ``[images, *input_shape]``.
        factors: the observed factors, ``[images, copies]``.
        decode_weight, decode_bias: names of the decoder's parameters.
    """
    if task.loss_name != "cross-entropy":
        return torch.zeros(len(images), dtype=torch.long, device=images.device)
    parameters = task.parameters
    decoder = parameters[decode_weight]
    rows = decoder.shape[1] // COPIES

    def logits_for(bias: Tensor) -> Tensor:
        """The logits when the decoder has this bias."""
        return task.outputs({**parameters, decode_bias: bias}, images)

    by_copy = []
    for copy in range(COPIES):
        direction = decoder[:, copy * rows].contiguous()
        logits, slopes = jvp(logits_for, (parameters[decode_bias],), (direction,))[:2]
        by_copy.append((logits.softmax(1) * slopes).sum(1, keepdim=True) - slopes)  # [images, classes]
    predicted = torch.stack(by_copy, dim=-1)  # [images, classes, copies]
    tiny = torch.finfo(predicted.dtype).tiny
    predicted = predicted / predicted.norm(dim=-1, keepdim=True).clamp_min(tiny)
    agreement: Tensor = (predicted * factors[:, None]).sum(-1)
    return agreement.argmax(1)


class ImprintAttack(Attack):
    """An attack with an imprint block in front of the model; a subclass installs the block and reads its bins."""

    server = "active"
    finds_labels = True

    @abstractmethod
    def read(self, task: Task, targets: dict[str, Tensor]) -> Bins:
        """What each bin holds, with axes ``[victims, bins]``: its image, and whether that is a single one.

        Args:
            task: the modified task.
            targets: the updates, ``[victims, *parameter shape]`` by name.
        """

    def run(self, problem: Problem) -> Reconstruction:
        """Read all bins of all victims at once and return the images of the best."""
        task, selection = problem.task, select_images(self.read(problem.task, problem.updates), problem.examples)
        images = as_images(task, selection.images)
        names = locate(self.name, task.parameters, DECODE, DECODE_BIAS)
        victims = zip(images, selection.factors, strict=True)
        labels = torch.stack([labels_of(task, *victim, *names) for victim in victims])
        iterations = torch.zeros(len(images), dtype=torch.long)
        return Reconstruction(images, labels, selection.loss, iterations, certain=selection.certain, execution="batch")
