"""How much of a sentence came back: exactly, by its words, and by their order (ROUGE).

Sentences are rows of token ids ``[N, L]`` as `Text.compared` has them: `NOTHING` stands where there is no token.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradveil.metrics.record import metric
from gradveil.modality.text import NOTHING

_SHARE = {"better": "higher", "modalities": ("text",), "digits": 2, "low": 0, "high": 1}

Tokens = Sequence[int]


@metric("exact", "Exact", **_SHARE)
def exact(originals: Tensor, found: Tensor) -> Tensor:
    """1 for a sentence that is the original token for token, else 0.

    In words: The share of the sentences that were recovered word for word.

    >>> exact(torch.tensor([[3, 5, -1], [3, 5, -1]]), torch.tensor([[3, 5, -1], [5, 3, -1]]))
    tensor([1., 0.])
    """
    return _each(originals, found, lambda one, other: float(one == other))


@metric("token_recall", "Token recall", noticeable=0.05, **_SHARE)
def token_recall(originals: Tensor, found: Tensor) -> Tensor:
    r"""The share of the original's different tokens that the recovered sentence has: :math:`|A \cap B| / |A|`.

    In words: The share of the different words of a sentence that were recovered, in whatever order.

    >>> token_recall(torch.tensor([[3, 5, 5, 7]]), torch.tensor([[5, 5, 9, -1]]))
    tensor([0.3333])
    """
    return _each(originals, found, lambda one, other: len({*one} & {*other}) / len({*one}))


@metric("token_f1", "Token F1", noticeable=0.05, column=False, **_SHARE)
def token_f1(originals: Tensor, found: Tensor) -> Tensor:
    r"""The harmonic mean of recall and precision of the different tokens: :math:`2 |A \cap B| / (|A| + |B|)`.

    In words: Like token recall, but recovered words that the sentence does not have count against it.

    >>> token_f1(torch.tensor([[3, 5, 5, 7]]), torch.tensor([[5, 5, 9, -1]]))
    tensor([0.4000])
    """
    return _each(originals, found, lambda one, other: 2 * len({*one} & {*other}) / (len({*one}) + len({*other})))


@metric("rouge_1", "ROUGE-1", noticeable=0.05, **_SHARE)
def rouge_1(originals: Tensor, found: Tensor) -> Tensor:
    r"""The F1 of single tokens, each counted as often as both sentences have it.

    .. math:: 2 \sum_t min(a_t, b_t) / (\sum_t a_t + \sum_t b_t)

    In words: The overlap of two sentences in words (F1). 1 means the same words, in whatever order.

    References:
        Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004; F1 as `rouge-score` computes it.

    >>> rouge_1(torch.tensor([[3, 5, 5, 7]]), torch.tensor([[5, 5, 9, -1]]))
    tensor([0.5714])
    """
    return _each(originals, found, lambda one, other: _overlap(one, other, 1))


@metric("rouge_2", "ROUGE-2", noticeable=0.05, **_SHARE)
def rouge_2(originals: Tensor, found: Tensor) -> Tensor:
    """The same for pairs of neighbouring tokens; 0 if a sentence has no pair.

    In words: The overlap of two sentences in pairs of neighbouring words (F1).

    >>> rouge_2(torch.tensor([[3, 5, 5, 7]]), torch.tensor([[5, 5, 9, -1]]))
    tensor([0.4000])
    """
    return _each(originals, found, lambda one, other: _overlap(one, other, 2))


@metric("rouge_l", "ROUGE-L", noticeable=0.05, **_SHARE)
def rouge_l(originals: Tensor, found: Tensor) -> Tensor:
    """The F1 of the longest sequence of tokens that both sentences have in the same order.

    In words: The longest sequence of words that both sentences have in the same order, as F1. 1 means equal sentences.

    >>> rouge_l(torch.tensor([[3, 5, 7, 9]]), torch.tensor([[5, 3, 9, -1]]))
    tensor([0.5714])
    """
    return _each(originals, found, lambda one, other: 2 * _common_length(one, other) / (len(one) + len(other)))


def _each(originals: Tensor, found: Tensor, score: Callable[[Tokens, Tokens], float]) -> Tensor:
    """The score of each pair of sentences; 0 if one of them has no token."""
    pairs = [
        [[token for token in row if token != NOTHING] for row in pair]
        for pair in zip(originals.tolist(), found.tolist(), strict=True)
    ]
    return torch.tensor([score(one, other) if one and other else 0.0 for one, other in pairs])


def _overlap(one: Tokens, other: Tokens, size: int) -> float:
    """The F1 of runs of `size` tokens."""
    counts = [Counter(tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)) for tokens in (one, other)]
    total = counts[0].total() + counts[1].total()
    return 2 * (counts[0] & counts[1]).total() / total if total else 0.0


def _common_length(one: Tokens, other: Tokens) -> int:
    """The length of the longest common subsequence."""
    lengths = [0] * (len(other) + 1)
    for token in one:
        before = lengths
        lengths = [0]
        for place, candidate in enumerate(other):
            longest = before[place] + 1 if token == candidate else max(before[place + 1], lengths[place])
            lengths.append(longest)
    return lengths[-1]
