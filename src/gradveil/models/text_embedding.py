"""A classifier of the mean of a text's word vectors."""

from collections.abc import Sequence

from torch import Tensor, nn

from gradveil.core import checks
from gradveil.models.base import REGISTRY, activation_layer
from gradveil.models.text_base import TextClassifier, mean_of_real


@REGISTRY.register("text-embedding")
class TextEmbedding(TextClassifier):
    """Text: the mean of the word vectors and a hidden layer, a deep averaging network; it ignores their order.

    References:
        Iyyer, Manjunatha, Boyd-Graber & Daumé, Deep Unordered Composition Rivals Syntactic Methods for Text
        Classification, ACL 2015.

    Args:
        input_shape: the number of positions, ``(L,)``.
        classes: the number of logits.
        vocabulary: the number of tokens.
        padding: the token that fills the places after a text.
        width: the length of the token vectors.
        hidden: the units of the hidden layer.
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".

    Example:
        >>> TextEmbedding((16,), 2, vocabulary=100).classifier
        Linear(in_features=64, out_features=2, bias=True)
    """

    paper = "Iyyer et al., Deep Unordered Composition Rivals Syntactic Methods for Text Classification, ACL 2015"

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        vocabulary: int,
        padding: int = 0,
        *,
        width: int = 64,
        hidden: int = 64,
        activation: str = "gelu",
    ) -> None:
        checks.integer(self.name, "hidden", hidden, low=1)
        super().__init__(input_shape, classes, vocabulary=vocabulary, padding=padding, width=width, represented=hidden)
        self.hidden = nn.Sequential(nn.Linear(width, hidden), activation_layer(self.name, activation))

    def features(self, vectors: Tensor, real: Tensor) -> Tensor:
        """The hidden layer for the mean vector."""
        hidden: Tensor = self.hidden(mean_of_real(vectors, real))
        return hidden
