"""What a client can find in a model that it was sent, before training it: blocks that collect images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

# GROUP or more rows of at least LONG values that are parallel up to a cosine of SIMILAR are suspicious. In few
# dimensions directions agree by chance, so shorter rows must agree more closely; those below SHORT values are ignored.
SIMILAR, SIMILAR_SHORT = 0.9, 0.99
LONG, SHORT = 64, 8
GROUP = 8
# Root mean square of a layer's weights times sqrt(inputs): torch's initial value is .58, and uniform(-.5, .5), the
# largest initialisation in the papers, gives 20 with 4,608 inputs.
LARGEST_SCALE, SMALLEST_SCALE = 100.0, 1e-3
# The most vectors compared with each other in one layer; of more, only every second, third, ... is used.
MAX_VECTORS = 4096
# A unit is certain to be silent if its bias outweighs any contribution of inputs of at most this size: images lie in
# [0, 1], and activations of hidden layers are seldom larger than ten.
LARGEST_INPUT, LARGEST_ACTIVATION = 1.0, 10.0
# Silent units are reported once this many weights have a gradient that is always zero: one unit with 256 inputs.
# Some 1,250 are enough to recover the state of a weak generator.
SILENT_WEIGHTS = 256
# From this share on, kernels (3x3 or larger) that are all zero or a single value are suspicious.
TRIVIAL_KERNELS = 0.5


@dataclass(frozen=True)
class Finding:
    """Something suspicious about a model.

    Args:
        layer: name of the module.
        kind: ``"parallel-rows"``, ``"parallel-columns"``, ``"extreme-scale"``, ``"trivial-kernels"``,
            ``"linear-before-convolution"``, ``"silent-units"`` or ``"unheard-units"``.
        detail: what was found and why it matters.

    Example:
        >>> str(Finding("imprint.encode", "parallel-rows", "256 of 256 rows are parallel"))
        'imprint.encode: 256 of 256 rows are parallel'
    """

    layer: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.detail}"


@torch.no_grad()
def inspect(model: nn.Module) -> list[Finding]:
    """Look for blocks that an active server plants in a model; empty if nothing is suspicious.

    The check uses weights and the order of the modules, never names, and needs no data. It reports:

    - rows (or columns) of a layer that are parallel: an imprint layer measures every image in the same direction,
      whatever the order of the rows and their scale;
    - layers with weights far larger or smaller than any initialisation: how a server lifts its signal above noise;
    - convolutions with mostly zero or single-value kernels: how LOKI keeps clients apart;
    - a linear layer before the first convolution;
    - units that a large negative bias keeps off for every image, and units whose outgoing weights are all zero: their
      gradient is zero, so a server can read the noise that a defense adds to it and, if that comes from a weak
      generator, predict the rest (docs/noise-recovery.md).

    It is a check for known patterns, not a proof. It misses blocks whose rows were perturbed enough (below a cosine
    of .9), which the attack survives if its bins are wide; groups of fewer than eight rows; blocks after layers that
    destroy no information; units that are silent on real images although their bias is not large enough to prove it,
    or that batch norm silences; and attacks that change nothing but ordinary weights. The figures are in
    experiments/analytic_attacks.

    Args:
        model: the model as it was received.

    Example:
        >>> from gradveil import models
        >>> inspect(models.create("lenet", input_shape=(3, 32, 32), classes=10))
        []
        >>> planted = nn.Linear(100, 20)
        >>> _ = planted.weight.data.copy_(torch.ones(20, 100))
        >>> [finding.kind for finding in inspect(nn.Sequential(nn.Flatten(), planted))]
        ['parallel-rows']
    """
    weighted = [(n, m) for n, m in model.named_modules() if isinstance(m, _Weighted)]
    findings = [*_silent_units(weighted), *_unheard_units(weighted)]
    convolutions = [index for index, (_, module) in enumerate(weighted) if not isinstance(module, nn.Linear)]
    for index, (name, module) in enumerate(weighted):
        weight = module.weight.detach().float()
        rows = weight.flatten(1)
        checks = [("parallel-rows", "rows", rows, SHORT)]
        if isinstance(module, nn.Linear):
            checks.append(("parallel-columns", "columns", rows.T, LONG))
            if convolutions and index < convolutions[0]:
                detail = "a linear layer that sees all pixels, before the first convolution; models do not need one"
                findings.append(Finding(name, "linear-before-convolution", detail))
        else:
            findings += _trivial_kernels(name, weight)
        for kind, unit, vectors, shortest in checks:
            count = _count_parallel(vectors, shortest)
            if count >= GROUP:
                detail = f"{count} of its {len(vectors)} {unit} are parallel to another one, as in an imprint layer"
                findings.append(Finding(name, kind, detail))
        scale = float(rows.square().mean().sqrt()) * rows.shape[1] ** 0.5
        if scale > LARGEST_SCALE or 0 < scale < SMALLEST_SCALE:
            detail = f"weights of size {scale:.2g} in units of 1 / sqrt(inputs); initialisation gives about .6"
            findings.append(Finding(name, "extreme-scale", detail))
    return findings


_Weighted = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def _silent_units(weighted: Sequence[tuple[str, _Weighted]]) -> Iterator[Finding]:
    """Units whose bias keeps them below zero, so that a ReLU after them always outputs zero."""
    for index, (name, module) in enumerate(weighted[:-1]):  # not the last layer, which is the classifier
        if module.bias is None:
            continue
        rows = module.weight.flatten(1)
        # Images have no negative values; activations may have.
        reach = rows.clamp_min(0).sum(1) * LARGEST_INPUT if index == 0 else rows.abs().sum(1) * LARGEST_ACTIVATION
        silent = int((module.bias < -reach).sum())
        if silent * rows.shape[1] >= SILENT_WEIGHTS:
            detail = (
                f"{silent} of its {len(rows)} units are off for every input because of their biases: the gradients of "
                f"{silent * (rows.shape[1] + 1):,} weights and biases are zero, and noise on them can be read"
            )
            yield Finding(name, "silent-units", detail)


def _unheard_units(weighted: Sequence[tuple[str, _Weighted]]) -> Iterator[Finding]:
    """Units whose outputs are not used: the next layer has only zero weights for them."""
    for (name, module), (_, following) in pairwise(weighted):
        # Flattening puts the pixels of a channel next to each other: a channel is used if any of them is.
        inputs_per_unit, remainder = divmod(following.weight.shape[1], len(module.weight))
        if remainder or (isinstance(following, nn.Linear) and isinstance(module, nn.Linear) and inputs_per_unit != 1):
            continue
        largest_weights = following.weight.reshape(len(following.weight), len(module.weight), -1).abs().amax((0, 2))
        unheard = int((largest_weights == 0).sum())
        if unheard * module.weight[0].numel() >= SILENT_WEIGHTS:
            detail = (
                f"the next layer has only zero weights for {unheard} of its {len(module.weight)} units: the gradients "
                f"of {unheard * module.weight[0].numel():,} weights are zero, and noise on them can be read"
            )
            yield Finding(name, "unheard-units", detail)


def _count_parallel(vectors: Tensor, shortest: int) -> int:
    """How many of the vectors are (nearly) parallel to another one."""
    vectors = vectors[:: -(-len(vectors) // MAX_VECTORS)]
    lengths = vectors.norm(dim=1)
    vectors = vectors[lengths > 0] / lengths[lengths > 0, None]
    if vectors.shape[1] < shortest or len(vectors) < GROUP:
        return 0
    similar = SIMILAR if vectors.shape[1] >= LONG else SIMILAR_SHORT
    count = 0
    for start in range(0, len(vectors), 1024):  # the full Gram matrix could be large
        cosines = (vectors[start : start + 1024] @ vectors.T).abs()
        cosines[torch.arange(len(cosines)), start + torch.arange(len(cosines))] = 0
        count += int((cosines.amax(1) > similar).sum())
    return count


def _trivial_kernels(name: str, weight: Tensor) -> list[Finding]:
    kernels = weight.flatten(2)
    if kernels.shape[2] == 1 or not kernels.any():
        return []
    values = (kernels.abs() > 1e-6 * kernels.abs().max()).sum(2)
    share = float((values <= 1).double().mean())
    if share < TRIVIAL_KERNELS:
        return []
    detail = f"{share:.0%} of the kernels are zero or a single value: they copy channels instead of filtering them"
    return [Finding(name, "trivial-kernels", detail)]
