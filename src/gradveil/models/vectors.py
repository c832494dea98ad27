"""Small classifiers of vectors: what attackers read a property of an update with, and clients who expect that."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

_BATCH = 128
_LR = 1e-3
_DECAY = 0.01
_PATIENCE = 10
"""Epochs without a better result on the held-out vectors after which training ends."""


@dataclass(frozen=True, eq=False)
class VectorClassifier:
    r"""A perceptron with GELUs on standardised vectors; without hidden layers, multinomial logistic regression.

    Args:
        tensors: the mean and the deviation of each value, then the weight ``[out, in]`` and the bias of each layer.

    Example:
        >>> features = torch.tensor([[-1.0], [-0.5], [0.5], [1.0]])
        >>> targets = functional.one_hot(torch.tensor([0, 0, 1, 1])).float()
        >>> fit_logistic(features, targets, penalty=1e-3)(torch.tensor([[-2.0], [3.0]])).argmax(1)
        tensor([0, 1])
    """

    tensors: tuple[Tensor, ...]

    def __call__(self, vectors: Tensor) -> Tensor:
        """The logits ``[N, classes]`` of vectors ``[N, values]``; differentiable."""
        mean, scale, *layers = self.tensors
        values = (vectors - mean) / scale
        for weight, bias in zip(layers[:-2:2], layers[1:-2:2], strict=True):
            values = functional.gelu(functional.linear(values, weight, bias))
        return functional.linear(values, layers[-2], layers[-1])

    def cross_entropy(self, vectors: Tensor, targets: Tensor) -> float:
        """The mean cross-entropy on vectors whose targets are ``[N, classes]``, each a distribution over classes."""
        with torch.no_grad():
            return float(functional.cross_entropy(self(vectors), targets))


def standardisation(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the deviation of each value; a value that never changes has a deviation of 1."""
    deviation = vectors.std(0, correction=0)
    return vectors.mean(0), torch.where(deviation > 0, deviation, 1.0)


def fit_logistic(vectors: Tensor, targets: Tensor, *, penalty: float) -> VectorClassifier:
    r"""Multinomial logistic regression: the minimum of the mean cross-entropy plus :math:`penalty / 2 \cdot |W|^2`.

    Args:
        vectors: ``[N, values]``.
        targets: ``[N, classes]``, each a distribution over classes.
        penalty: weight of the squared weights; the biases are free.
    """
    mean, scale = standardisation(vectors)
    values = (vectors - mean) / scale
    weight = vectors.new_zeros(targets.shape[1], vectors.shape[1], requires_grad=True)
    bias = vectors.new_zeros(targets.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def cost() -> Tensor:
        optimiser.zero_grad()
        loss = functional.cross_entropy(functional.linear(values, weight, bias), targets)
        loss = loss + penalty / 2 * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimiser.step(cost)  # type: ignore[no-untyped-call]
    return VectorClassifier((mean, scale, weight.detach(), bias.detach()))


def fit_perceptron(
    vectors: Tensor,
    targets: Tensor,
    *,
    hidden: Sequence[int],
    epochs: int,
    generator: torch.Generator,
    held_out: tuple[Tensor, Tensor] | None = None,
) -> VectorClassifier:
    """A perceptron, trained with AdamW in mini-batches of 128.

    Args:
        vectors: ``[N, values]``.
        targets: ``[N, classes]``, each a distribution over classes.
        hidden: the widths of the hidden layers.
        epochs: the most passes over the vectors.
        generator: draws the first weights and the order of the vectors.
        held_out: vectors and targets; the epoch that is best on them is returned. None: the last epoch is.
    """
    mean, scale = standardisation(vectors)
    widths = [vectors.shape[1], *hidden, targets.shape[1]]
    layers: list[Tensor] = []
    for inside, outside in pairwise(widths):
        drawn = torch.randn(outside, inside, generator=generator, device=generator.device).to(vectors)
        layers += [(drawn / inside**0.5).requires_grad_(), vectors.new_zeros(outside, requires_grad=True)]
    classifier = VectorClassifier((mean, scale, *layers))
    optimiser = torch.optim.AdamW(layers, lr=_LR, weight_decay=_DECAY)
    best, waited = (classifier.cross_entropy(*held_out) if held_out else 0.0), 0
    kept = _detached(classifier)
    for _ in range(epochs):
        order = torch.randperm(len(vectors), generator=generator, device=generator.device).to(vectors.device)
        for places in torch.split(order, _BATCH):
            optimiser.zero_grad()
            with torch.enable_grad():
                functional.cross_entropy(classifier(vectors[places]), targets[places]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        if held_out is None:
            continue
        waited += 1
        if (error := classifier.cross_entropy(*held_out)) < best:
            best, waited, kept = error, 0, _detached(classifier)
        if waited == _PATIENCE:
            break
    return kept if held_out else _detached(classifier)


def _detached(classifier: VectorClassifier) -> VectorClassifier:
    return VectorClassifier(tuple(tensor.detach().clone() for tensor in classifier.tensors))
