"""What a model declares about its first attention blocks, for attackers who read their gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class AttentionBlock:
    """The query, key and value projections of a block, and what enters them.

    Args:
        projections: the names of their weights, ``[outputs, width]``.
        inputs: ``(vectors, first)``: what enters them at the positions from `first` on, ``[N, L - first, width]``, if
            the model's embedding gives `vectors` ``[N, L, d]``, of which none is padding.
        causal: whether what enters them at a position depends only on the vectors up to that position.

    Example:
        >>> block = AttentionBlock(("query.weight",), lambda vectors, first: vectors[:, first:], causal=True)
        >>> block.causal
        True
    """

    projections: tuple[str, ...]
    inputs: Callable[[Tensor, int], Tensor]
    causal: bool


@runtime_checkable
class DeclaresAttention(Protocol):
    """A model of token ids that declares its attention blocks."""

    def attention_blocks(self) -> list[AttentionBlock]:
        """The first two blocks, or all if there are fewer; parameters are named as the model names them."""
