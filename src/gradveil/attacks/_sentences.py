"""The search of `dager`: tokens in the span of the first block, sentences in that of the second."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks._span import RowSpace
from gradveil.models.attention import AttentionBlock

_AT_ONCE = 2**24  # values of candidate sentences that are computed together
_QUANTILE, _NEAR = 0.9, 0.4  # wrong tokens are hardly ever nearer than 0.4 of the distance that 90 % of them keep
_REPETITIONS = 3  # of a sentence's first token, which leave no trace by themselves
_NEW = 1e-6  # of a dimension that a sentence must add to those already explained


@dataclass(frozen=True)
class Sentence:
    """A sentence or the beginning of one.

    Args:
        tokens: its tokens.
        misfit: the sum over them of how unlikely their distances from the second span are.
        distance: the sum of these distances.

    Example:
        >>> Sentence((5, 5)).repeats_its_first, Sentence((5,)).repeats_its_first
        (True, False)
    """

    tokens: tuple[int, ...] = ()
    misfit: float = 0.0
    distance: float = 0.0

    @property
    def repeats_its_first(self) -> bool:
        """Whether it is one token, more than once."""
        return len(self.tokens) > 1 and len(set(self.tokens)) == 1


@dataclass(frozen=True)
class Search:
    """What is known about one victim's sentences.

    Args:
        table: the embedding ``[V, d]``.
        padding: the token that is never part of a sentence.
        length: the most tokens of a sentence.
        blocks: the first two attention blocks.
        spaces: the spans of their gradients.
        tolerance: distance from a span that rounding explains.
        slack: how much larger than noise explains a squared distance may be; None: the spans are exact.
        beam: the most beginnings with the same first token that are continued.
    """

    table: Tensor
    padding: int
    length: int
    blocks: tuple[AttentionBlock, AttentionBlock]
    spaces: tuple[RowSpace, RowSpace]
    tolerance: float
    slack: float | None
    beam: int

    @property
    def is_hopeless(self) -> bool:
        """Whether a span is empty or everything, so that it says nothing about tokens."""
        return any(space.is_everything or not len(space.basis) for space in self.spaces)

    def tokens(self) -> list[Tensor]:
        """The tokens near the first span, for each position; one list for all if the block adds no positions."""
        probe = self.table[:8, None].expand(-1, self.length, -1)
        entering = self.blocks[0].inputs(probe, 0)
        positions = 1 if torch.allclose(entering, entering[:, :1]) else self.length
        chunks = self.table.split(max(1, _AT_ONCE // (positions * self.table.shape[1])))
        distances = torch.cat(
            [
                self.spaces[0]
                .distances(self.blocks[0].inputs(rows[:, None].expand(-1, positions, -1), 0).flatten(0, 1))
                .view(-1, positions)
                for rows in chunks
            ]
        )
        distances[self.padding] = torch.inf
        near = self.tolerance
        if self.slack is not None:
            near = max(near, _NEAR * float(distances[distances.isfinite()].quantile(_QUANTILE)))
        return [column.le(near).nonzero()[:, 0] for column in distances.T]

    def by_position(self, allowed: Sequence[Tensor]) -> list[Sentence]:
        """The one sentence of an encoder's batch, if exactly one token is near the span at each of its positions."""
        counts = [len(tokens) for tokens in allowed]
        length = counts.index(0) if 0 in counts else len(counts)
        if not length or set(counts[:length]) != {1} or any(counts[length:]):
            return []
        tokens = torch.cat(list(allowed[:length]))
        misfits, distances = self._judge(self.blocks[1].inputs(self.table[tokens][None], 0)[0])
        return [Sentence(tuple(tokens.tolist()), float(misfits.sum()), float(distances.sum()))]

    def by_prefix(self, allowed: Sequence[Tensor]) -> list[Sentence]:
        """The sentences of a causal model's batch: prefixes that tokens near the second span continue no further."""
        whole: list[Sentence] = []
        beginnings = [Sentence()]
        for position in range(self.length):
            tokens = allowed[position % len(allowed)]
            continued: dict[int, list[Sentence]] = {}
            for beginning, longer in zip(beginnings, self._continuations(beginnings, tokens), strict=True):
                for sentence in longer:
                    continued.setdefault(sentence.tokens[0], []).append(sentence)
                ends = all(sentence.repeats_its_first for sentence in longer)
                if beginning.tokens and ends and not beginning.repeats_its_first:
                    whole.append(beginning)
            beginnings = [s for group in continued.values() for s in sorted(group, key=_by_misfit)[: self.beam]]
            if not beginnings:
                return whole
        return whole + [sentence for sentence in beginnings if not sentence.repeats_its_first]

    def chosen(self, sentences: Sequence[Sentence], count: int) -> list[Sentence]:
        """At most `count` sentences that together explain most of the second span, each something new."""
        vectors = [self._entering(sentence) for sentence in sentences]
        likely = torch.tensor([sentence.misfit / len(sentence.tokens) for sentence in sentences])
        explained = self.table.new_zeros(0, self.spaces[1].basis.shape[1], dtype=torch.float64)
        taken: list[Sentence] = []
        while len(taken) < count and len(taken) < len(sentences):
            gains = torch.stack([(each - each @ explained.T @ explained).square().sum() for each in vectors])
            if float(gains.max()) < _NEW:
                break
            best = int((gains / (1 + likely.to(gains))).argmax())
            taken.append(sentences[best])
            rest = vectors[best] - vectors[best] @ explained.T @ explained
            _, values, directions = torch.linalg.svd(rest, full_matrices=False)
            explained = torch.cat([explained, directions[values.square() > _NEW]])
        return taken

    def _entering(self, sentence: Sentence) -> Tensor:
        entering = self.blocks[1].inputs(self.table[list(sentence.tokens)][None], 0)[0].double()
        return entering / entering.norm(dim=1, keepdim=True)

    def _continuations(self, beginnings: Sequence[Sentence], tokens: Tensor) -> list[list[Sentence]]:
        """For each beginning, of equal lengths, what it may be continued to by one token."""
        pairs = [(number, token) for number in range(len(beginnings)) for token in tokens.tolist()]
        longer: list[list[Sentence]] = [[] for _ in beginnings]
        position = len(beginnings[0].tokens)
        at_once = max(1, _AT_ONCE // ((position + 1) * self.table.shape[1]))
        for start in range(0, len(pairs), at_once):
            part = [(*beginnings[number].tokens, token) for number, token in pairs[start : start + at_once]]
            entering = self.blocks[1].inputs(self.table[torch.tensor(part)], position)[:, 0]
            misfits, distances = self._judge(entering)
            for place in misfits.isfinite().nonzero()[:, 0].tolist():
                number, token = pairs[start + place]
                old = beginnings[number]
                new = Sentence(
                    (*old.tokens, token), old.misfit + float(misfits[place]), old.distance + float(distances[place])
                )
                if not (new.repeats_its_first and len(new.tokens) > _REPETITIONS):
                    longer[number].append(new)
        return longer

    def _judge(self, entering: Tensor) -> tuple[Tensor, Tensor]:
        r"""How unlikely the distance of each vector from the second span is, infinite if too far; and the distance.

        Of a vector of the true space, the noise leaves :math:`z e^2`, where :math:`e^2` is what is expected and n z is
        chi-squared with n degrees of freedom, the dimensions outside; so :math:`-2 \log p = n (z - 1 - \log z)`.
        """
        space = self.spaces[1]
        distances = space.distances(entering)
        if self.slack is None:
            return torch.where(distances <= self.tolerance, distances / self.tolerance, torch.inf), distances
        ratio = distances.square() / (space.expected(entering).square() + self.tolerance**2)
        outside = space.basis.shape[1] - space.basis.shape[0]
        excess = ratio.clamp_min(1)  # nearer than expected is no reason to doubt
        return torch.where(ratio <= self.slack, outside / 2 * (excess - 1 - excess.log()), torch.inf), distances


def _by_misfit(sentence: Sentence) -> float:
    return sentence.misfit
