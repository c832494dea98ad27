"""What the text models share: a table of token vectors, a mask for padding and a linear classifier."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.core import checks
from gradveil.core.errors import ParameterError


class TextClassifier(nn.Module, ABC):
    """An embedding of the tokens, features of its vectors, and a linear layer from these to the logits.

    A model is a registered subclass that names its `paper` and implements `features`.

    Args:
        input_shape: the number of positions, ``(L,)``.
        classes: the number of logits.
        vocabulary: the number of tokens.
        padding: the token that fills the places after a text; its vector is zero.
        width: the length of the token vectors.
        represented: the length of the features.

    Example:
        >>> class Mean(TextClassifier):
        ...     name = "mean"
        ...     def features(self, vectors, real):
        ...         return mean_of_real(vectors, real)
        >>> Mean((3,), 2, vocabulary=5, padding=0, width=4, represented=4)(torch.tensor([[2, 4, 0]])).shape
        torch.Size([1, 2])
    """

    name: ClassVar[str]
    paper: ClassVar[str]

    def __init__(
        self, input_shape: Sequence[int], classes: int, *, vocabulary: int, padding: int, width: int, represented: int
    ) -> None:
        super().__init__()
        self.length = text_length(self.name, input_shape)
        checks.integer(self.name, "classes", classes, low=1)
        checks.integer(self.name, "vocabulary", vocabulary, low=2)
        self.padding = checks.integer(self.name, "padding", padding, low=0, high=vocabulary - 1)
        checks.integer(self.name, "width", width, low=1)
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=padding)
        self.classifier = nn.Linear(represented, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits ``[N, classes]`` of tokens ``[N, L]``."""
        logits: Tensor = self.classifier(self.features(self.embedding(tokens), tokens != self.padding))
        return logits

    @abstractmethod
    def features(self, vectors: Tensor, real: Tensor) -> Tensor:
        """The features ``[N, represented]`` of token vectors ``[N, L, width]``, of which only the `real` ones count."""


def mean_of_real(vectors: Tensor, real: Tensor) -> Tensor:
    """The mean over the positions that are not padding, ``[N, width]``; zero if all are."""
    kept = torch.where(real[..., None], vectors, 0.0)
    return kept.sum(1) / real.sum(1, keepdim=True).clamp_min(1)


def text_length(owner: str, input_shape: Sequence[int]) -> int:
    """The number of positions if `input_shape` is that of text."""
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str) or len(input_shape) != 1:
        raise ParameterError(f"{owner}: input_shape must be the number of tokens such as (32,), got {input_shape!r}")
    return checks.integer(owner, "input_shape[0]", input_shape[0], low=1)
