"""A small transformer for text."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from gradveil.core import checks
from gradveil.core.errors import ParameterError
from gradveil.models.attention import AttentionBlock
from gradveil.models.base import REGISTRY, activation_layer
from gradveil.models.text_base import TextClassifier, mean_of_real


@REGISTRY.register("text-transformer")
class TextTransformer(TextClassifier):
    """Text: a small transformer with learned positions and normalisation before each part, averaged over the words.

    References:
        Vaswani et al., Attention Is All You Need, NeurIPS 2017. https://arxiv.org/abs/1706.03762
        Xiong et al., On Layer Normalization in the Transformer Architecture, ICML 2020 (normalisation first).

    Args:
        input_shape: the number of positions, ``(L,)``.
        classes: the number of logits.
        vocabulary: the number of tokens.
        padding: the token that fills the places after a text; nothing attends to it.
        width: the length of the token vectors.
        depth: the number of blocks.
        heads: the number of attention heads.
        causal: whether a position attends only to itself and to those before it, as in a decoder.
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".

    Example:
        >>> model = TextTransformer((16,), 2, vocabulary=100)
        >>> model.blocks[0].attention.query
        Linear(in_features=64, out_features=64, bias=True)
    """

    paper = "Vaswani et al., Attention Is All You Need, NeurIPS 2017"

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        vocabulary: int,
        padding: int = 0,
        *,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        causal: bool = False,
        activation: str = "gelu",
    ) -> None:
        super().__init__(input_shape, classes, vocabulary=vocabulary, padding=padding, width=width, represented=width)
        checks.integer(self.name, "depth", depth, low=1)
        if width % checks.integer(self.name, "heads", heads, low=1):
            raise ParameterError(f"{self.name}: width must be a multiple of heads, got width={width}, heads={heads}")
        self.causal = causal
        self.positions = nn.Embedding(self.length, width)
        self.blocks = nn.ModuleList(_Block(width, heads, activation_layer(self.name, activation)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def features(self, vectors: Tensor, real: Tensor) -> Tensor:
        """The mean over the real positions of what the last block gives out."""
        vectors, seen = self.positioned(vectors), self.visible(real)
        for block in self.blocks:
            vectors = block(vectors, seen)
        return mean_of_real(self.norm(vectors), real)

    def positioned(self, vectors: Tensor) -> Tensor:
        """The token vectors with those of their positions added: what the first block is given."""
        placed: Tensor = vectors + self.positions(torch.arange(vectors.shape[1], device=vectors.device))
        return placed

    def attention_blocks(self) -> list[AttentionBlock]:
        """What `dager` must know about the first two blocks."""
        return [
            AttentionBlock(
                tuple(f"blocks.{number}.attention.{part}.weight" for part in ("query", "key", "value")),
                partial(self._entering, number),
                self.causal,
            )
            for number in range(min(2, len(self.blocks)))
        ]

    def _entering(self, number: int, vectors: Tensor, first: int) -> Tensor:
        placed, block = self.positioned(vectors), self.blocks[number]
        if number:
            placed = self.blocks[0](placed, self.visible(torch.ones_like(vectors[..., 0], dtype=torch.bool)))
        assert isinstance(block, _Block)
        entering: Tensor = block.attention_norm(placed[:, first:])
        return entering

    def visible(self, real: Tensor) -> Tensor:
        """Which positions each position attends to, ``[N, 1, L, L]``."""
        seen = real[:, None, None, :].expand(-1, 1, real.shape[1], -1)
        if not self.causal:
            return seen
        places = torch.arange(real.shape[1], device=real.device)
        return seen & (places <= places[:, None])


class _Block(nn.Module):
    """Attention, then a hidden layer applied to each position; each is added to its input."""

    def __init__(self, width: int, heads: int, activation: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.hidden_norm = nn.LayerNorm(width)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))

    def forward(self, vectors: Tensor, seen: Tensor) -> Tensor:
        vectors = vectors + self.attention(self.attention_norm(vectors), seen)
        outputs: Tensor = vectors + self.hidden(self.hidden_norm(vectors))
        return outputs


class _Attention(nn.Module):
    """Multi-head attention, written out: torch's fused kernels lack the second derivatives we need."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, vectors: Tensor, seen: Tensor) -> Tensor:
        # [N, L, width] -> [N, heads, L, width / heads]
        query, key, value = (
            part(vectors).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        # The lowest number and not -inf: padding of a causal model may see nothing at all, and 0 / 0 is NaN.
        weights = torch.where(seen, scores, torch.finfo(scores.dtype).min).softmax(-1)
        outputs: Tensor = self.output((weights @ value).transpose(1, 2).flatten(2))
        return outputs
