"""The search of `dager`: tokens in the span of the first block, sentences in that of the second."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gradveil.attacks._span import RowSpace
from gradveil.models.attention import AttentionBlock

_AT_ONCE = 2**24  # values of candidate sentences that are computed together
_QUANTILE = 0.9
# Wrong tokens are hardly ever nearer to the span than this share of the distance within which 90 % of them lie; if the
# noise was estimated, than the median by this often the distance from there to the quantile.
_NEAR, _TIMES = 0.4, 2.0
_ATTEMPTS = 8  # for each sentence of an encoder's batch, to find it from random tokens
_MOST_TRIED = 2**17  # sentences of an encoder, all attempts together
_MOST_BEGINNINGS = 128  # that are continued at once, of all first tokens together
_MOST_CONTINUED = 2**14  # beginnings times tokens that may continue them; coarse rounding leaves a thousand tokens
_REPETITIONS = 3  # of a sentence's first token, which leave no trace by themselves
_NEW = 1e-6  # of a dimension that a sentence must add to those already explained
# Under noise: what a token that fits is worth, the most that one that does not may cost (some directions drown, and
# with them a true token now and then), and how far a beginning may fall below its best before it is given up.
_WORTH, _DEAREST, _PATIENCE = 6.0, 12.0, 30.0
_MARGIN = 18.0  # how far a beginning may fall behind the best with the same first token
_CANDOUR = 0.25  # of the surprise, because spans are estimated less well than the theory of large matrices says


@dataclass(frozen=True)
class Sentence:
    """A sentence or the beginning of one.

    Args:
        tokens: its tokens.
        values: how much each of them speaks for the sentence; negative if against it.
        distances: the distances of their vectors from the second span.

    Example:
        >>> Sentence((7, 8, 9), (1.0, 2.0, -1.0), (0.0, 0.0, 0.5)).ended().tokens
        (7, 8)
    """

    tokens: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    distances: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        """The sum of the values."""
        return sum(self.values)

    @property
    def repeats_its_first(self) -> bool:
        """Whether it is one token, more than once."""
        return len(self.tokens) > 1 and len(set(self.tokens)) == 1

    def continued(self, token: int, value: float, distance: float) -> "Sentence":
        """The sentence with one more token."""
        return Sentence((*self.tokens, token), (*self.values, value), (*self.distances, distance))

    def ended(self) -> "Sentence":
        """The beginning whose value is largest."""
        sums = list(accumulate(self.values))
        length = 1 + max(range(len(sums)), key=sums.__getitem__)
        return Sentence(self.tokens[:length], self.values[:length], self.distances[:length])


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
        noise: on the gradients: ``"none"``, of ``"known"`` variance, or of an ``"estimated"`` one.
        beam: the most beginnings with the same first token that are continued.
    """

    table: Tensor
    padding: int
    length: int
    blocks: tuple[AttentionBlock, AttentionBlock]
    spaces: tuple[RowSpace, RowSpace]
    tolerance: float
    noise: str
    beam: int

    @property
    def is_hopeless(self) -> bool:
        """Whether a span is empty or everything, so that it says nothing about tokens."""
        return any(space.is_everything or not len(space.basis) for space in self.spaces)

    def tokens(self) -> list[Tensor]:
        """For each position the tokens near the first span, nearest first; one list if the block adds no positions."""
        probe = self.table[:8, None].expand(-1, self.length, -1)
        entering = self.blocks[0].inputs(probe, 0)
        positions = 1 if torch.allclose(entering, entering[:, :1]) else self.length
        parts = []
        for rows in torch.split(self.table, max(1, _AT_ONCE // (positions * self.table.shape[1]))):
            entering = self.blocks[0].inputs(rows[:, None].expand(-1, positions, -1), 0)
            parts.append(self.spaces[0].distances(entering.flatten(0, 1)).view(-1, positions))
        distances = torch.cat(parts)
        distances[self.padding] = torch.inf
        near = self.tolerance
        if self.noise != "none":
            middle, upper = distances[distances.isfinite()].quantile(distances.new_tensor([0.5, _QUANTILE])).tolist()
            near = max(near, _NEAR * upper if self.noise == "known" else middle - _TIMES * (upper - middle))
        # There are at most as many different vectors as the span has dimensions, of which noise may add or hide some.
        most, counts = 2 * len(self.spaces[0].basis), (distances <= near).sum(0).tolist()
        if self.noise == "none" and max(counts) > most:
            return [self.table.new_zeros(0).long()]  # it is the span of noise, which holds any token
        return [column.argsort()[: min(most, count)] for column, count in zip(distances.T, counts, strict=True)]

    def by_position(self, allowed: Sequence[Tensor], count: int, generator: torch.Generator) -> list[Sentence]:
        """The sentences of an encoder's batch, in which every vector depends on all tokens of its sentence.

        The first block says which tokens stand at each position. For each length, random choices of them are improved
        by exchanging one token at a time, until all vectors lie in the second span.

        Args:
            allowed: for each position, the tokens near the first span.
            count: how many sentences there are.
            generator: draws the choices.
        """
        allowed = [allowed[position % len(allowed)] for position in range(self.length)]
        sizes = [len(tokens) for tokens in allowed] + [0]
        longest = sizes.index(0)
        # Where tokens become fewer a sentence ends, most likely: two may have the same token there.
        lengths = sorted(range(longest, 0, -1), key=lambda length: sizes[length] >= sizes[length - 1])
        found: dict[tuple[int, ...], Sentence] = {}
        done = 0
        for length in lengths:
            for _ in range(1 if set(sizes[:length]) == {1} else _ATTEMPTS * count):
                if len(found) == count or done > _MOST_TRIED:
                    return list(found.values())
                sentence, tried = self._improved(allowed[:length], generator)
                done += tried
                if sentence is not None:
                    found[sentence.tokens] = sentence
        return list(found.values())

    def _improved(self, allowed: Sequence[Tensor], generator: torch.Generator) -> tuple[Sentence | None, int]:
        """A sentence of these tokens whose vectors all lie in the second span, or None; and how many were tried."""
        drawn = [int(torch.randint(len(tokens), (), generator=generator)) for tokens in allowed]
        tokens = torch.stack([choices[place] for choices, place in zip(allowed, drawn, strict=True)])
        least, done = torch.inf, 0
        while True:
            swaps = [(place, token) for place, choices in enumerate(allowed) for token in choices.tolist()]
            tried = tokens.repeat(len(swaps), 1)
            tried[torch.arange(len(swaps)), torch.tensor([place for place, _ in swaps])] = torch.tensor(
                [token for _, token in swaps], device=tokens.device
            )
            values, distances = self._judge(self.blocks[1].inputs(self.table[tried], 0).flatten(0, 1))
            distances, done = distances.view(len(swaps), -1), done + len(swaps)
            best = int(distances.square().sum(1).argmin())
            tokens, cost = tried[best], float(distances[best].square().sum())
            if bool((chosen := values.view(len(swaps), -1)[best]).isfinite().all()):
                return Sentence(tuple(tokens.tolist()), tuple(chosen.tolist()), tuple(distances[best].tolist())), done
            if not cost < least:
                return None, done
            least = cost

    def by_prefix(self, allowed: Sequence[Tensor]) -> list[Sentence]:
        """The sentences of a causal model's batch, found token by token.

        Beginnings are continued until nothing continues them or, under noise, until they lose too much; a sentence ends
        where its value is largest.
        """
        found: list[Sentence] = []
        beginnings = [Sentence()]
        for position in range(self.length):
            tokens = allowed[position % len(allowed)]
            groups: dict[int, list[Sentence]] = {}
            for beginning, longer in zip(beginnings, self._continuations(beginnings, tokens), strict=True):
                for sentence in longer:
                    groups.setdefault(sentence.tokens[0], []).append(sentence)
                # Under noise, what continues a whole sentence speaks against it, but may also be a token that drowned.
                if beginning.tokens and all(s.values[-1] < 0 or s.repeats_its_first for s in longer):
                    found.append(beginning)
            kept = [sentence for group in groups.values() for sentence in self._best(group)]
            following = len(allowed[(position + 1) % len(allowed)])
            most = min(_MOST_BEGINNINGS, max(1, _MOST_CONTINUED // max(1, following)))
            beginnings = sorted(kept, key=_value, reverse=True)[:most]
            given_up = [s for s in beginnings if s.value < s.ended().value - _PATIENCE]
            found += given_up
            beginnings = [s for s in beginnings if s not in given_up]
            if not beginnings:
                break
        ended = {sentence.tokens: sentence for sentence in (each.ended() for each in found + beginnings)}
        return [sentence for sentence in ended.values() if not sentence.repeats_its_first]

    def chosen(self, sentences: Sequence[Sentence], count: int) -> list[Sentence]:
        """At most `count` sentences, each with the largest value of what the ones before it do not explain."""
        vectors = [self._entering(sentence) for sentence in sentences]
        values = [torch.tensor(sentence.values).to(rows) for sentence, rows in zip(sentences, vectors, strict=True)]
        explained = self.spaces[1].basis[:0]
        taken: list[Sentence] = []
        while len(taken) < min(count, len(sentences)):
            rest = [rows - rows @ explained.T @ explained for rows in vectors]
            gains = torch.stack(
                [(each.square().sum(1) * value).sum() for each, value in zip(rest, values, strict=True)]
            )
            best = int(gains.argmax())
            if float(gains[best]) < _NEW:
                break
            taken.append(sentences[best])
            _, sizes, directions = torch.linalg.svd(rest[best], full_matrices=False)
            explained = torch.cat([explained, directions[sizes.square() > _NEW]])
        return taken

    def _best(self, group: Sequence[Sentence]) -> list[Sentence]:
        """The beginnings that are worth continuing, of those with the same first token."""
        ordered = sorted(group, key=_value, reverse=True)[: self.beam]
        return [sentence for sentence in ordered if sentence.value > ordered[0].value - _MARGIN]

    def _entering(self, sentence: Sentence) -> Tensor:
        entering = self.blocks[1].inputs(self.table[list(sentence.tokens)][None], 0)[0].to(self.spaces[1].basis)
        return torch.nn.functional.normalize(entering, dim=1)

    def _continuations(self, beginnings: Sequence[Sentence], tokens: Tensor) -> list[list[Sentence]]:
        """For each beginning, of equal lengths, what it may be continued to by one token; the best, best first."""
        if not len(tokens):
            return [[] for _ in beginnings]
        position, known = len(beginnings[0].tokens), torch.tensor([sentence.tokens for sentence in beginnings])
        pairs = torch.cartesian_prod(torch.arange(len(beginnings)), torch.arange(len(tokens)))
        at_once = max(1, _AT_ONCE // ((position + 1) * self.table.shape[1]))
        judged = []
        for part in torch.split(pairs, at_once):
            sequences = torch.cat([known[part[:, 0]].to(tokens), tokens[part[:, 1], None]], dim=1)
            judged.append(self._judge(self.blocks[1].inputs(self.table[sequences], position)[:, 0], position))
        values, distances = (torch.cat(parts).view(len(beginnings), -1).cpu() for parts in zip(*judged, strict=True))
        longer = []
        for beginning, row, far in zip(beginnings, values, distances, strict=True):
            best = row.topk(min(len(row), self.beam)).indices
            longer.append(
                [
                    sentence
                    for place in best[row[best].isfinite()].tolist()
                    if not (
                        sentence := beginning.continued(int(tokens[place]), float(row[place]), float(far[place]))
                    ).repeats_its_first
                    or len(sentence.tokens) <= _REPETITIONS
                ]
            )
        return longer

    def _judge(self, entering: Tensor, position: int = 0) -> tuple[Tensor, Tensor]:
        r"""How much each vector speaks for its token, minus infinity if it is impossible; and its distance.

        Of a vector of the true space, noise leaves the squared distance :math:`z e^2`, where :math:`e^2` is expected
        and n z is chi-squared with n degrees of freedom, the dimensions outside; so the surprise is
        :math:`n (z - 1 - \log z) / 2`. Nearer than expected is no reason to doubt.
        """
        space = self.spaces[1]
        distances = space.distances(entering)
        if self.noise == "none":
            return torch.where(distances <= self.tolerance, 1 - distances / self.tolerance / 2, -torch.inf), distances
        ratio = distances.square() / (space.expected(entering).square() + self.tolerance**2)
        outside, excess = space.basis.shape[1] - space.basis.shape[0], ratio.clamp_min(1)
        surprise = _CANDOUR * outside / 2 * (excess - 1 - excess.log())
        if position == 0:  # vectors of first tokens are far from all others, so that a surprising one is wrong
            return torch.where(surprise < _DEAREST, _WORTH - surprise, -torch.inf), distances
        return _WORTH - surprise.clamp_max(_DEAREST) - (surprise - _DEAREST).clamp_min(0).log1p(), distances


def _value(sentence: Sentence) -> float:
    return sentence.value
