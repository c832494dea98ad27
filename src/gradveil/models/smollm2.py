"""SmolLM2-135M, a small language model, and decoders of its kind of any size."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import DataError, ParameterError
from gradveil.core.tensors import first_mismatch
from gradveil.data import catalog
from gradveil.data.byte_pairs import SMOLLM2, SMOLLM2_PADDING
from gradveil.data.npz import read_arrays
from gradveil.data.places import find, missing
from gradveil.models.attention import AttentionBlock
from gradveil.models.base import REGISTRY
from gradveil.models.text_base import text_length

_REMEDY = f"get the right file: {catalog.entry(SMOLLM2).how}"


@dataclass(frozen=True)
class Size:
    """The figures of a decoder; the defaults are those of SmolLM2-135M, as its file states them.

    Args:
        vocabulary: number of tokens.
        width: length of the vectors between blocks.
        hidden: length of the vectors inside the feed-forward part.
        blocks: number of blocks.
        heads: number of query heads.
        groups: number of key and value heads, each shared by ``heads / groups`` query heads.
        base: the rotary positions turn by ``position * base^(-2 i / d)`` in a head of d values.
        epsilon: what the normalisation adds to the mean square.

    Example:
        >>> Size().width // Size().heads
        64
    """

    vocabulary: int = 49152
    width: int = 576
    hidden: int = 1536
    blocks: int = 30
    heads: int = 9
    groups: int = 3
    base: float = 100_000.0
    epsilon: float = 1e-5


class RootMeanSquareNorm(nn.Module):
    r"""Divides each vector by its root mean square: :math:`w \odot x / \sqrt{mean(x^2) + \epsilon}`.

    Args:
        width: length of a vector.
        epsilon: what is added to the mean square.

    Example:
        >>> RootMeanSquareNorm(2, 0.0)(torch.tensor([3.0, 3.0])).tolist()
        [1.0, 1.0]
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, vectors: Tensor) -> Tensor:
        """The normalised vectors."""
        return self.weight * vectors * (vectors.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()


class Attention(nn.Module):
    """Causal attention with rotary positions, whose key and value heads are shared by several query heads.

    Args:
        size: the figures of the decoder.

    Example:
        >>> Attention(Size(width=8, heads=4, groups=2))(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, self.length = size, size.width // size.heads
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, size.groups * self.length, bias=False)
        self.value = nn.Linear(size.width, size.groups * self.length, bias=False)
        self.output = nn.Linear(size.width, size.width, bias=False)

    def forward(self, vectors: Tensor, first: int = 0) -> Tensor:
        """What the positions from `first` on read from themselves and the positions before them."""
        positions = torch.arange(vectors.shape[1], device=vectors.device)
        shared = self.size.heads // self.size.groups
        query = self._rotated(self._heads(self.query(vectors[:, first:])), positions[first:])
        key = self._rotated(self._heads(self.key(vectors)), positions).repeat_interleave(shared, 1)
        value = self._heads(self.value(vectors)).repeat_interleave(shared, 1)
        later = positions > positions[first:, None]
        scores = (query @ key.transpose(-1, -2) / self.length**0.5).masked_fill(later, -torch.inf)
        read = scores.softmax(-1) @ value
        result: Tensor = self.output(read.transpose(1, 2).flatten(2))
        return result

    def _heads(self, values: Tensor) -> Tensor:
        """``[N, heads, L, length of a head]``."""
        return values.view(*values.shape[:2], -1, self.length).transpose(1, 2)

    def _rotated(self, values: Tensor, positions: Tensor) -> Tensor:
        """Turn each pair of neighbouring values by an angle that grows with the position."""
        pairs = torch.arange(0, self.length, 2, device=values.device, dtype=torch.float64)
        angles = positions[:, None] * self.size.base ** (-pairs / self.length)
        cos, sin = angles.cos().to(values), angles.sin().to(values)
        even, odd = values[..., 0::2], values[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class GatedHidden(nn.Module):
    r"""The feed-forward part of a block: :math:`down(silu(gate(x)) \odot up(x))` (SwiGLU).

    Args:
        size: the figures of the decoder.

    Example:
        >>> GatedHidden(Size(width=8, hidden=16))(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """The part's output, which the block adds to its input."""
        output: Tensor = self.down(F.silu(self.gate(vectors)) * self.up(vectors))
        return output


class DecoderBlock(nn.Module):
    """Attention and a feed-forward part, each after a normalisation and added to what it was given.

    Args:
        size: the figures of the decoder.

    Example:
        >>> DecoderBlock(Size(width=8, hidden=16, heads=2, groups=1))(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = RootMeanSquareNorm(size.width, size.epsilon)
        self.attention = Attention(size)
        self.hidden_norm = RootMeanSquareNorm(size.width, size.epsilon)
        self.hidden = GatedHidden(size)

    def forward(self, vectors: Tensor, first: int = 0) -> Tensor:
        """The block's output at the positions from `first` on."""
        between: Tensor = vectors[:, first:] + self.attention(self.attention_norm(vectors), first)
        output: Tensor = between + self.hidden(self.hidden_norm(between))
        return output


class Decoder(nn.Module):
    """A language model of the Llama kind: rotary positions, root-mean-square norms, gated hidden layers, tied head.

    Every position predicts the token that follows it; the embedding is also the matrix that turns the last vectors into
    logits. With `classes`, a linear layer on the last position of a text that is not padding classifies it instead.

    Args:
        size: its figures.
        classes: number of classes of texts; None: a language model.
        padding: the token that fills the places after a text.

    References:
        Touvron et al., LLaMA: Open and Efficient Foundation Language Models, 2023. https://arxiv.org/abs/2302.13971
        Ben Allal et al., SmolLM2: When Smol Goes Big, 2025. https://arxiv.org/abs/2502.02737

    Example:
        >>> decoder = Decoder(Size(vocabulary=10, width=8, hidden=16, blocks=2, heads=2, groups=1))
        >>> decoder(torch.tensor([[3, 4, 5]])).shape  # logits of every token at every position
        torch.Size([1, 10, 3])
    """

    def __init__(self, size: Size, classes: int | None = None, padding: int = SMOLLM2_PADDING) -> None:
        super().__init__()
        self.size, self.padding = size, padding
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(DecoderBlock(size) for _ in range(size.blocks))
        self.norm = RootMeanSquareNorm(size.width, size.epsilon)
        self.classifier = None if classes is None else nn.Linear(size.width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[N, vocabulary, L]`` of tokens ``[N, L]``, or ``[N, classes]``."""
        vectors = self.embedding(tokens)
        for block in self.blocks:
            vectors = block(vectors)
        vectors = self.norm(vectors)
        if self.classifier is None:
            return F.linear(vectors, self.embedding.weight).transpose(1, 2)
        last = (tokens != self.padding).sum(1).sub(1).clamp_min(0)
        logits: Tensor = self.classifier(vectors.gather(1, last[:, None, None].expand(-1, 1, vectors.shape[2]))[:, 0])
        return logits

    def attention_blocks(self) -> list[AttentionBlock]:
        """What `dager` must know about the first two blocks."""
        return [
            AttentionBlock(
                tuple(f"blocks.{number}.attention.{name}.weight" for name in ("query", "key", "value")),
                partial(self._entering, number),
                causal=True,
            )
            for number in range(min(2, len(self.blocks)))
        ]

    def _entering(self, number: int, vectors: Tensor, first: int) -> Tensor:
        vectors = self.blocks[0](vectors, first) if number else vectors[:, first:]
        block = self.blocks[number]
        assert isinstance(block, DecoderBlock)
        entering: Tensor = block.attention_norm(vectors)
        return entering


@REGISTRY.register(SMOLLM2)
class SmolLM2(Decoder):
    """Text: SmolLM2-135M, a pretrained decoder, with a linear classifier on a text's last token; needs its tokenizer.

    30 blocks of width 576 with 9 query and 3 key heads, as ``gradveil data get smollm2`` fetches them; the classifier
    is at random. Data must have its tokens: ``sst2:tokenizer=smollm2``.

    References:
        Ben Allal et al., SmolLM2: When Smol Goes Big, 2025. https://arxiv.org/abs/2502.02737

    Args:
        input_shape: the number of positions, ``(L,)``.
        classes: the number of logits.
        vocabulary: the number of tokens, which must be its own.
        padding: the token that fills the places after a text.

    Example:
        >>> SmolLM2((16,), 2, vocabulary=49152).classifier  # doctest: +SKIP
        Linear(in_features=576, out_features=2, bias=True)
    """

    name: ClassVar[str]
    paper = "Ben Allal et al., SmolLM2: When Smol Goes Big, arXiv 2025"

    def __init__(
        self, input_shape: Sequence[int], classes: int, vocabulary: int, padding: int = SMOLLM2_PADDING
    ) -> None:
        text_length(self.name, input_shape)
        if vocabulary != Size().vocabulary:
            raise ParameterError(
                f"{self.name}: needs texts in its own {Size().vocabulary:,} tokens, got a vocabulary of "
                f"{vocabulary:,}; write the data set with :tokenizer={self.name}"
            )
        super().__init__(Size(), classes, padding)
        load_weights(self)


def language_model(path: Path | None = None) -> Decoder:
    """SmolLM2-135M as a language model.

    Args:
        path: the npz file; None: what ``gradveil data get smollm2`` fetched.
    """
    with torch.device("meta"):
        decoder = Decoder(Size())
    return load_weights(decoder, path)


def load_weights(decoder: Decoder, path: Path | None = None) -> Decoder:
    """Give a decoder of SmolLM2's size its weights, all but those of a classifier; other tensors are refused.

    Args:
        decoder: the decoder, which is changed and returned.
        path: the npz file; None: what ``gradveil data get smollm2`` fetched.
    """
    path = path or find(SMOLLM2)
    if path is None:
        raise missing(SMOLLM2)
    expected = {name: value for name, value in decoder.state_dict().items() if not name.startswith("classifier.")}
    arrays = {name: array for name, array in read_arrays(path, expected).items() if array.dtype.kind == "f"}
    tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}
    if mismatch := first_mismatch(expected, tensors):
        name, wanted, got = mismatch
        raise DataError(f"{path}: expected {wanted} in {name!r}, got {got}; {_REMEDY}")
    for name, value in tensors.items():
        if not value.isfinite().all():
            raise DataError(f"{path}: expected finite numbers, got others in {name!r}; {_REMEDY}")
    decoder.load_state_dict(tensors, strict=False, assign=True)
    return decoder.requires_grad_(True)
