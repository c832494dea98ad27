r"""What imprint attacks share: bins, and images out of differences of neighbouring rows.

Row i of an imprint layer measures the brightness h of an image and is active when h exceeds the threshold c_i. All
rows of a copy reach the model through the same output direction v, so an image adds the same multiple of itself,
:math:`\delta = \langle \partial L / \partial \text{image}, v \rangle`, to the gradient of every row it activates: the
difference of rows i and i + 1 is a sum over the images with brightness between c_i and c_{i+1} alone,

.. math:: d_i = \sum_{t: c_i < h_t \le c_{i+1}} \delta_t x_t, \qquad \beta_i = \sum \delta_t,

and d_i / beta_i is the image if there is one. Every bin comes in two copies with different v: if there is one image,
both see multiples of it; two images mix in different proportions. So the attacker knows which bins hold one image.
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
# How strongly the block changes the images that the model gets to see, root mean square.
DISTURBANCE = 0.01
GREY = 0.5
# Public images whose gradients are measured: the scale needs no more.
MEASURED = 16


@dataclass(frozen=True)
class Bins:
    """What the rows of an imprint layer say, bin by bin; leading axes count victims (and clients).

    Args:
        images: ``[..., bins, values]``, the image of a bin that holds one, as the model was fed it.
        weights: ``[..., copies, bins]``, the factor delta of each copy; of a mixture, the sum of its factors.
        energy: ``[..., bins]``, squared size of the differences.
        occupied: ``[..., bins]``, whether that is more than noise and rounding.
        single: ``[..., bins]``, whether both copies see one and the same image.
        disagreement: ``[..., bins]``, the share of the weaker copy that the stronger one does not explain, in [0, 1].

    Example:
        >>> rows, marks = torch.zeros(2, 20, 2), torch.zeros(2, 20)  # two copies, twenty bins, images of two values
        >>> rows[:, 0], rows[:, 1] = torch.tensor([[3.0, 1.0], [6.0, 2.0]]), torch.tensor([[2.0, 0.0], [4.0, 0.0]])
        >>> marks[:, 0], marks[:, 1] = torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0])
        >>> bins = read(rows, marks)
        >>> bins.images[:2].tolist(), bins.single.nonzero().flatten().tolist()
        ([[1.0, 1.0], [2.0, 0.0]], [0, 1])
    """

    images: Tensor
    weights: Tensor
    energy: Tensor
    occupied: Tensor
    single: Tensor
    disagreement: Tensor


def thresholds(brightness: Tensor, bins: int, lowest: float) -> Tensor:
    """Where the bins begin: the lowest possible brightness, then quantiles of the measured ones.

    Quantiles of few values are noisy, and unequal bins collide more often: each value is blurred by a normal kernel of
    Silverman's width first.

    Args:
        brightness: of public images, ``[images]``.
        bins: how many.
        lowest: below any image.
    """
    values = brightness.double()
    spread = float(values.std()) if len(values) > 1 else 0.0
    if spread == 0:
        raise InputError(
            f"imprint: the public images must differ in brightness to place bins by, got {len(values)} alike"
        )
    kernel = torch.special.ndtri((torch.arange(32, dtype=values.dtype, device=values.device) + 0.5) / 32)
    blurred = (values[:, None] + 1.06 * spread * len(values) ** -0.2 * kernel).flatten()
    inner = torch.arange(1, bins, dtype=values.dtype, device=values.device) / bins
    return torch.cat([values.new_tensor([lowest]), torch.quantile(blurred, inner).clamp_min(lowest)])


@dataclass(frozen=True)
class Measurement:
    """What a server learns from public images and lays its block out by.

    Args:
        edges: ``[bins]``, where the bins begin.
        sums: ``[images]``, sum over the bins of how far an image's brightness exceeds their edges.
        directions: ``[copies, values]``, the output directions.
        typical: size of an image's factor delta for these directions, alone in its batch.
        squared_size: mean of ``|x|^2``.

    Example:
        >>> Measurement(torch.arange(3.0), torch.tensor([1.0, 2.0]), torch.ones(2, 4), 0.1, 2.0).bin_width
        1.0
    """

    edges: Tensor
    sums: Tensor
    directions: Tensor
    typical: float
    squared_size: float

    @property
    def bin_width(self) -> float:
        """Of the middle bins, in units of brightness."""
        return float(self.edges.diff().median())

    def slope(self, signal: float) -> float:
        """Factor from brightness to the input of a row: what keeps the images the model sees where they were."""
        return DISTURBANCE * self.typical / (signal * float(self.sums.std()) * math.sqrt(COPIES))

    def drift(self, signal: float) -> float:
        """Bin widths by which one step of learning rate 1 on one image shifts the bins."""
        return signal * self.squared_size / (self.slope(signal) * self.bin_width)


def measure(owner: str, task: Task, public: Batch | None, bins: int, generator: torch.Generator | None) -> Measurement:
    """Look at public images, through the model as it is."""
    if public is None:
        raise ThreatModelError(f"{owner}: needs public images to place its bins by; pass public=(images, labels)")
    if task.modality != IMAGE:
        raise ThreatModelError(f"{owner}: sorts images by their brightness, got a task on {task.modality.name} inputs")
    generator = generator or fresh_generator(task.device)
    images, labels = public[0].to(task.device, task.dtype), public[1].to(task.device)
    fed = task.normalised(images).flatten(1)
    brightness = fed.double().mean(1)
    black = task.normalised(torch.zeros_like(images[:1])).mean()
    edges = thresholds(brightness, bins, float(black) - float(brightness.std()))  # black images must be seen too
    directions = torch.randn(COPIES, fed.shape[1], generator=generator, dtype=task.dtype, device=task.device)
    return Measurement(
        edges=edges,
        sums=(brightness[:, None] - edges).clamp_min(0).sum(1),
        directions=directions,
        typical=_typical_factor(owner, task, images[:MEASURED], labels[:MEASURED], directions),
        squared_size=float(fed.square().sum(1).mean()),
    )


@torch.no_grad()
def set_decoder(decode: nn.Linear, measured: Measurement, signal: float) -> None:
    """Scale the decoder so that a typical image, alone in its batch, has a factor delta of size `signal`.

    Its bias keeps public images where they are on average.
    """
    gain, bins = signal / measured.typical, len(measured.edges)
    decode.weight.copy_(gain * measured.directions.repeat_interleave(bins, 0).T)
    added = gain * measured.slope(signal) * float(measured.sums.mean())
    decode.bias.copy_(-added * measured.directions.sum(0))


def _typical_factor(owner: str, task: Task, images: Tensor, labels: Tensor, directions: Tensor) -> float:
    """Root mean square of what a step of the images along the directions changes each image's own loss by."""
    one = task.denormalised(torch.ones_like(images)) - task.denormalised(torch.zeros_like(images))  # d image / d fed
    with torch.enable_grad():
        leaf = images.detach().requires_grad_()
        loss = len(images) * task.loss(task.parameters, leaf, labels)
        (slopes,) = torch.autograd.grad(loss, leaf)
    typical = float(((slopes * one).flatten(1) @ directions.T).square().mean().sqrt())
    if typical == 0:
        raise InputError(
            f"{owner}: the loss does not depend on the images, so no update tells of them; check the model"
        )
    return typical


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


def read(rows: Tensor, marks: Tensor) -> Bins:
    """Turn the gradients of an imprint layer into images.

    Args:
        rows: weight gradients ``[..., copies, bins, values]``.
        marks: bias gradients ``[..., copies, bins]``.
    """
    whole = torch.cat([rows, marks[..., None]], dim=-1)
    differences = whole - torch.cat([whole[..., 1:, :], torch.zeros_like(whole[..., :1, :])], dim=-2)
    energies = differences.square().sum(-1)  # [..., copies, bins]
    # Most bins are empty: what is in the emptier tenth of them is noise. Rounding is the least there can be.
    rounding = (8 * torch.finfo(rows.dtype).eps) ** 2 * whole.square().sum(-1).amax((-2, -1))
    noise = torch.quantile(energies.mean(-2), 0.1, dim=-1)
    noise = torch.maximum(noise, rounding)[..., None]
    first, second = differences.unbind(-3)
    swap = (energies[..., 1, :] > energies[..., 0, :])[..., None]
    strong, weak = torch.where(swap, second, first), torch.where(swap, first, second)
    tiny = torch.finfo(rows.dtype).tiny
    share = (strong * weak).sum(-1) / strong.square().sum(-1).clamp_min(tiny)
    unexplained = (weak - share[..., None] * strong).square().sum(-1)
    weights = differences[..., -1]
    images = (weights[..., None] * differences[..., :-1]).sum(-3) / weights.square().sum(-2).clamp_min(tiny)[..., None]
    occupied = energies.amax(-2) > 4 * noise
    return Bins(
        images=images,
        weights=weights,
        energy=energies.sum(-2),
        occupied=occupied,
        single=occupied & (unexplained <= 3 * noise),
        disagreement=(unexplained / energies.amin(-2).clamp_min(tiny)).clamp(max=1).sqrt(),
    )


@dataclass(frozen=True)
class Pick:
    """The images an attacker settles on, by its own evidence.

    Args:
        images: ``[victims, count, values]``.
        weights: ``[victims, count, copies]``.
        certain: ``[victims, count]``, whether the bin holds one image.
        loss: ``[victims]``, mean disagreement; an image that was not found counts 1.
        source: ``[victims, count]``, the bin, counted through all clients; -1: not found, the image is grey.

    Example:
        >>> rows, marks = torch.zeros(2, 20, 2), torch.zeros(2, 20)
        >>> rows[:, 0], rows[:, 1] = torch.tensor([[3.0, 1.0], [6.0, 2.0]]), torch.tensor([[2.0, 0.0], [4.0, 0.0]])
        >>> marks[:, 0], marks[:, 1] = torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0])
        >>> pick(read(rows[None], marks[None]), count=3).source.tolist()  # the strongest first
        [[1, 0, -1]]
    """

    images: Tensor
    weights: Tensor
    certain: Tensor
    loss: Tensor
    source: Tensor


def pick(bins: Bins, count: int) -> Pick:
    """The `count` best bins of each victim: single images first, the strongest first; NaN where there are no more."""
    victims, total = bins.energy.shape
    # Energy over its sum is below 1, so that no strong mixture comes before a weak single image.
    score = bins.energy / bins.energy.sum(1, keepdim=True).clamp_min(torch.finfo(bins.energy.dtype).tiny)
    score = torch.where(bins.occupied, score + 2.0 * bins.single, -1.0)
    best, place = score.topk(min(count, total), dim=1)
    index = torch.arange(victims, device=place.device)[:, None]

    def picked(values: Tensor, otherwise: float) -> Tensor:
        """The values ``[victims, bins, ...]`` of the best bins, and something else where there is none."""
        result = values.new_full((victims, count, *values.shape[2:]), otherwise)
        result[:, : place.shape[1]][best >= 0] = values[index, place][best >= 0]
        return result

    return Pick(
        images=picked(bins.images, torch.nan),
        weights=picked(bins.weights.transpose(1, 2), 0),
        certain=picked(bins.single, False),
        loss=picked(bins.disagreement, 1).mean(1),
        source=picked(torch.arange(total, device=place.device).expand(victims, -1), -1),
    )


def as_images(task: Task, picked: Tensor) -> Tensor:
    """Images in [0, 1] scale; those that were not found are grey."""
    return task.denormalised(picked.view(*picked.shape[:-1], *task.input_shape)).nan_to_num(nan=GREY)


@torch.no_grad()
def labels_of(task: Task, images: Tensor, weights: Tensor, decode_weight: str, decode_bias: str) -> Tensor:
    """The label of each image: the one whose error signal would have given the factors that were seen.

    With cross-entropy, an image with label y has ``delta = (p - e_y) J v`` in each copy, J the derivative of logits.
    One forward-mode derivative along v gives all labels' factors; the nearest in direction is taken, so that neither
    the batch size nor the number of clients matters. Batch norm on batch statistics couples the images, which
    this leaves aside. Other losses: 0.

    Args:
        task: the modified task.
        images: ``[images, *input_shape]``.
        weights: the factors seen, ``[images, copies]``.
        decode_weight, decode_bias: names of the decoder's parameters.
    """
    if task.loss_name != "cross-entropy":
        return torch.zeros(len(images), dtype=torch.long, device=images.device)
    parameters = task.parameters
    decoder = parameters[decode_weight]
    rows = decoder.shape[1] // COPIES

    def answers(bias: Tensor) -> Tensor:
        """The logits when the decoder adds `bias` to every image."""
        return task.outputs({**parameters, decode_bias: bias}, images)

    predicted = []
    for copy in range(COPIES):
        direction = decoder[:, copy * rows].contiguous()
        logits, slopes = jvp(answers, (parameters[decode_bias],), (direction,))[:2]
        predicted.append((logits.softmax(1) * slopes).sum(1, keepdim=True) - slopes)  # [images, classes]
    factors = torch.stack(predicted, dim=-1)  # [images, classes, copies]
    tiny = torch.finfo(factors.dtype).tiny
    factors = factors / factors.norm(dim=-1, keepdim=True).clamp_min(tiny)
    matches: Tensor = (factors * weights[:, None]).sum(-1)
    return matches.argmax(1)


class ImprintAttack(Attack):
    """An attack by an imprint block in front of the model; a subclass puts it there and reads its bins."""

    server = "active"
    finds_labels = True

    @abstractmethod
    def read(self, task: Task, targets: dict[str, Tensor]) -> Bins:
        """What each bin holds, ``[victims, bins]``: its image, and whether it is one.

        Args:
            task: the modified task.
            targets: the updates, ``[victims, *parameter shape]`` by name.
        """

    def run(self, problem: Problem) -> Reconstruction:
        """Read all bins of all victims at once; the best are the images."""
        task, picked = problem.task, pick(self.read(problem.task, problem.updates), problem.examples)
        images = as_images(task, picked.images)
        names = locate(self.name, task.parameters, DECODE, DECODE_BIAS)
        labels = torch.stack([labels_of(task, *victim, *names) for victim in zip(images, picked.weights, strict=True)])
        none = torch.zeros(len(images), dtype=torch.long)
        return Reconstruction(images, labels, picked.loss, none, certain=picked.certain, execution="batch")
