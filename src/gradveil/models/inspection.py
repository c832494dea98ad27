"""What a client can see of a model that was sent to it: blocks that collect images, before it trains them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

# Rows of at least LONG values that point the same way up to a cosine of SIMILAR are suspicious when GROUP of them do.
# In few dimensions directions meet by chance, so shorter rows must agree more closely, and the shortest are left out.
SIMILAR, SIMILAR_SHORT = 0.9, 0.99
LONG, SHORT = 64, 8
GROUP = 8
# Root mean square of a layer's weights times sqrt(inputs): torch's initial value is .58, and uniform(-.5, .5), the
# largest initialisation in the papers, gives 20 with 4,608 inputs.
LARGEST_SCALE, SMALLEST_SCALE = 100.0, 1e-3
# Vectors compared with each other in one layer; of more, every second, third, ...
MOST = 4096
# A unit is silent for certain if its bias outweighs whatever its inputs, of at most this size, can bring: images lie in
# [0, 1], and what the layers in between pass on is seldom larger than ten.
LARGEST_INPUT, LARGEST_ACTIVATION = 1.0, 10.0
# Weights whose gradient is zero, whatever the image, before silent units count: as many as a unit with 256 inputs has.
# Some 1,250 give a weak generator away.
SILENT_WEIGHTS = 256
# The share of 3x3 (or larger) kernels that may be all zero or a single value.
TRIVIAL_KERNELS = 0.5


@dataclass(frozen=True)
class Finding:
    """Something suspicious about a model.

    Args:
        layer: name of the module.
        kind: ``"parallel-rows"``, ``"parallel-columns"``, ``"extreme-scale"``, ``"trivial-kernels"``,
            ``"linear-before-convolution"``, ``"silent-units"`` or ``"unheard-units"``.
        detail: what was seen and why it matters.

    Example:
        >>> str(Finding("imprint.encode", "parallel-rows", "256 of 256 rows point the same way"))
        'imprint.encode: 256 of 256 rows point the same way'
    """

    layer: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.detail}"


@torch.no_grad()
def inspect(model: nn.Module) -> list[Finding]:
    """Look for what an active server plants in a model; empty if nothing is suspicious.

    It looks at weights and at the order of the modules, never at names, and needs no data:

    - rows (or columns) of a layer that all point the same way: an imprint layer measures every image in the same
      direction, whatever the order of the rows and whatever their scale;
    - layers far larger or smaller than any initialisation makes them: how a server lifts its signal above noise;
    - convolutions most of whose kernels are zero or a single value: how LOKI keeps clients apart;
    - a linear layer before the first convolution;
    - units that a large negative bias keeps off whatever the image, and units whose outgoing weights are all zero:
      their gradient is zero, so whatever a defense adds to it stands there alone, to be read and, if it comes from a
      weak generator, continued (docs/noise-recovery.md).

    It is a check for known patterns, not a proof. It misses blocks whose rows were drawn apart far enough (below a
    cosine of .9), which the attack survives when its bins are wide; rows hidden among fewer than eight; blocks behind
    layers that destroy no information; units that are silent on real images though their bias is not large enough to
    prove it, or by batch norm; and attacks that change nothing but ordinary weights. The figures are in
    experiments/analytic_attacks.

    Args:
        model: as it was received.

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
    convolutions = [place for place, (_, module) in enumerate(weighted) if not isinstance(module, nn.Linear)]
    for place, (name, module) in enumerate(weighted):
        weight = module.weight.detach().float()
        rows = weight.flatten(1)
        looks = [("parallel-rows", "rows", rows, SHORT)]
        if isinstance(module, nn.Linear):
            looks.append(("parallel-columns", "columns", rows.T, LONG))
            if convolutions and place < convolutions[0]:
                detail = (
                    "a linear layer that sees all pixels, in front of the first convolution; models do not need one"
                )
                findings.append(Finding(name, "linear-before-convolution", detail))
        else:
            findings += _trivial_kernels(name, weight)
        for kind, word, vectors, shortest in looks:
            count = _parallel(vectors, shortest)
            if count >= GROUP:
                detail = (
                    f"{count} of its {len(vectors)} {word} point the same way as another one, as in an imprint layer"
                )
                findings.append(Finding(name, kind, detail))
        scale = float(rows.square().mean().sqrt()) * rows.shape[1] ** 0.5
        if scale > LARGEST_SCALE or 0 < scale < SMALLEST_SCALE:
            detail = f"weights of size {scale:.2g} in units of 1 / sqrt(inputs); initialisation gives about .6"
            findings.append(Finding(name, "extreme-scale", detail))
    return findings


_Weighted = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def _silent_units(weighted: Sequence[tuple[str, _Weighted]]) -> Iterator[Finding]:
    """Units whose bias keeps them below zero, so that a ReLU behind them never opens."""
    for place, (name, module) in enumerate(weighted[:-1]):  # the last layer is the classifier, nothing is behind it
        if module.bias is None:
            continue
        rows = module.weight.flatten(1)
        # An image has no negative values; what layers pass on may have.
        reach = rows.clamp_min(0).sum(1) * LARGEST_INPUT if place == 0 else rows.abs().sum(1) * LARGEST_ACTIVATION
        silent = int((module.bias < -reach).sum())
        if silent * rows.shape[1] >= SILENT_WEIGHTS:
            detail = (
                f"{silent} of its {len(rows)} units are off whatever the input, by their biases: the gradients of "
                f"{silent * (rows.shape[1] + 1):,} weights and biases are zero, and noise on them can be read"
            )
            yield Finding(name, "silent-units", detail)


def _unheard_units(weighted: Sequence[tuple[str, _Weighted]]) -> Iterator[Finding]:
    """Units that nothing listens to: the next layer has only zeros for them."""
    for (name, module), (_, following) in pairwise(weighted):
        # Flattening puts the pixels of a channel side by side: a channel is heard if any of them is.
        spread, left = divmod(following.weight.shape[1], len(module.weight))
        if left or (isinstance(following, nn.Linear) and isinstance(module, nn.Linear) and spread != 1):
            continue
        heard = following.weight.reshape(len(following.weight), len(module.weight), -1).abs().amax((0, 2))
        unheard = int((heard == 0).sum())
        if unheard * module.weight[0].numel() >= SILENT_WEIGHTS:
            detail = (
                f"the next layer has only zeros for {unheard} of its {len(module.weight)} units: the gradients of "
                f"{unheard * module.weight[0].numel():,} weights are zero, and noise on them can be read"
            )
            yield Finding(name, "unheard-units", detail)


def _parallel(vectors: Tensor, shortest: int) -> int:
    """How many of the vectors are (nearly) a multiple of another one."""
    vectors = vectors[:: -(-len(vectors) // MOST)]
    lengths = vectors.norm(dim=1)
    vectors = vectors[lengths > 0] / lengths[lengths > 0, None]
    if vectors.shape[1] < shortest or len(vectors) < GROUP:
        return 0
    similar = SIMILAR if vectors.shape[1] >= LONG else SIMILAR_SHORT
    count = 0
    for at in range(0, len(vectors), 1024):  # a Gram matrix of all at once could be large
        cosines = (vectors[at : at + 1024] @ vectors.T).abs()
        cosines[torch.arange(len(cosines)), at + torch.arange(len(cosines))] = 0
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
