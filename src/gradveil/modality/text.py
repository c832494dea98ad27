"""Text: token ids whose embedding vectors are the inputs, judged by the words that come back."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from gradveil.core.errors import DataError, InputError
from gradveil.core.randomness import Source
from gradveil.modality.base import MODALITIES, Written
from gradveil.modality.embedded import EmbeddedInput, nearest_rows
from gradveil.modality.words import TOKENIZERS, Tokenizer
from gradveil.modality.written import Fragment

_NEAREST = 32  # tokens around a blend of two words among which both are looked for
NOTHING = -1
"""What stands for padding in the ids that metrics compare."""

LENGTH_GAP = math.log(2)

LEAK_SHARE = 0.5
LEAK_MARGIN = 0.25  # above the blind guess


@MODALITIES.register("text")
@dataclass(frozen=True)
class Text(Written):
    """Sentences, stored as token ids ``[L]`` padded at the end; the inputs are their embedding vectors ``[L, d]``.

    The task is split at the embedding: attacks search vectors, and the nearest row of the table is the token that they
    found. A position is padding if its vector *equals* the padding row. A data set carries the modality unbound; `bind`
    gives it the table of a model.

    Args:
        tokenizer: turns text into ids and back; None in a report, which only shows what an audit has written.
        table: the embedding vectors ``[V, d]`` of all tokens; None: not bound to a model yet.
        positions: the name of the model's trained parameter with a row for each position, whose gradient tells how long
            sentences are; None: it has none.
        shared: the name of the embedding's parameter if its gradient is part of updates; None: it is withheld.

    Example:
        >>> from gradveil.modality.words import Words
        >>> text = Text(Words(("good", "film")))
        >>> model, bound = text.bind(nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(6, 2)), (2,))
        >>> inputs = bound.inputs_of(torch.tensor([[2, 3], [3, 0]]))
        >>> inputs.shape, bound.sentences(1.001 * inputs[:1]) + bound.sentences(inputs[1:])
        (torch.Size([2, 2, 3]), ['good film', 'film'])
    """

    tokenizer: Tokenizer | None = None
    table: Tensor | None = field(default=None, compare=False, repr=False)
    positions: str | None = field(default=None, compare=False, repr=False)
    shared: str | None = field(default=None, compare=False, repr=False)

    unit = "sentence"
    primary = "rouge_1"
    dimensions = 2
    guess = "the most frequent public words of the class"
    rule = (
        f"token recall or ROUGE-L of at least {LEAK_SHARE:g} that is {LEAK_MARGIN:g} above the blind guess "
        '(rules "words" and "order"), or is recovered word for word although the blind guess is not (rule "sentence")'
    )
    threshold = LEAK_SHARE
    margin = f"{LEAK_MARGIN:g} above"
    withheld = 'updates with the gradient of the embedding, which tells the words and was withheld (`--shared "*"`)'

    # -- the vocabulary ---------------------------------------------------------------------------------------------

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self._known_tokenizer.size

    @property
    def padding(self) -> int:
        """The id of padding."""
        return self._known_tokenizer.padding

    @property
    def _known_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError("text: needs a tokenizer, got none; use Text(Words.of(texts))")
        return self.tokenizer

    @property
    def vectors(self) -> Tensor:
        """The table; refused as long as no model is known."""
        if self.table is None:
            raise InputError(
                "text: token ids become inputs by the embedding of a model, and no model is known yet; use "
                "model, modality = modality.bind(model, stored_shape)"
            )
        return self.table

    @property
    def settings(self) -> Mapping[str, Any]:
        """The tokenizer, by the name of its kind."""
        if self.tokenizer is None:
            return {}
        return {"tokenizer": self.tokenizer.name, **self.tokenizer.settings}

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Text with the tokenizer that `settings` describe."""
        given = dict(settings)
        kind = given.pop("tokenizer", None)
        return replace(self, tokenizer=None if kind is None else TOKENIZERS.get(kind)(**given))

    # -- inputs -----------------------------------------------------------------------------------------------------

    def input_shape(self, stored_shape: Sequence[int]) -> tuple[int, ...]:
        """``(L, d)``; ``(L,)`` before the modality is bound."""
        return tuple(stored_shape) if self.table is None else (*stored_shape, self.table.shape[1])

    def model_arguments(self, stored_shape: Sequence[int]) -> dict[str, Any]:
        """The number of positions, the size of the vocabulary and the id of padding."""
        return {"input_shape": tuple(stored_shape), "vocabulary": self.vocabulary, "padding": self.padding}

    def bind(self, model: nn.Module, stored_shape: Sequence[int], *, withhold: bool = True) -> tuple[nn.Module, "Text"]:
        """The model as a function of embedding vectors, see `EmbeddedInput`, and this modality with its table."""
        (length,) = stored_shape
        embedded = EmbeddedInput(
            model, length=length, vocabulary=self.vocabulary, padding=self.padding, shared=not withhold
        )
        table = embedded.table_now.float().cpu().clone()
        shared = embedded.embedding_weight if embedded.shared else None
        return embedded, replace(self, table=table, positions=embedded.positions_weight, shared=shared)

    @property
    def disclosed(self) -> tuple[str, ...]:
        """That a shared embedding gives the words away."""
        if self.shared is None:
            return ()
        return (
            f"The gradient of the embedding `{self.shared}` is part of the updates. Only the rows of the words that a "
            "client used are not zero, so the server reads off the bag of words without any attack, and a defense that "
            "leaves zeros in place does not change that.",
        )

    def check_stored(self, where: str, stored: Tensor) -> None:
        """Refuse anything but ids ``[N, L]`` of the vocabulary, with padding only at the end."""
        kind = f"got {str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}"
        if stored.dtype not in (torch.int32, torch.int64) or stored.ndim != 2:
            raise DataError(f"{where} sentences must be token ids [N, L], int32 or int64, {kind}")
        if stored.numel() and not 0 <= int(stored.min()) <= int(stored.max()) < self.vocabulary:
            raise DataError(
                f"{where} token ids must lie from 0 to {self.vocabulary - 1}, "
                f"got {int(stored.min())} to {int(stored.max())}"
            )
        padded = stored == self.padding
        if bool(padded[:, :1].any()) or bool((padded[:, :-1] & ~padded[:, 1:]).any()):
            raise DataError(f"{where} sentences must have padding only at the end and at least one token each")

    def inputs_of(self, stored: Tensor) -> Tensor:
        """Look the embedding vectors up."""
        table = self.vectors
        inputs = table[stored.long()]
        twins = (inputs == table[self.padding]).all(-1) & (stored != self.padding)
        if bool(twins.any()):
            raise InputError(
                f"text: expected a padding row that no other token has, got the same row for token "
                f"{int(stored[twins][0])}, which would count as padding; give token {self.padding} a row of its own"
            )
        return inputs

    def tokens_of(self, inputs: Tensor) -> Tensor:
        """The ids ``[..., L]`` of the tokens whose vectors are nearest to ``[..., L, d]``."""
        return nearest_rows(inputs, self.vectors.to(inputs.device), self.padding)

    def sentences(self, inputs: Tensor) -> list[str]:
        """The texts of a batch ``[N, L, d]``."""
        return ["".join(pieces) for pieces in self.pieces(inputs)]

    def pieces(self, inputs: Tensor) -> list[list[str]]:
        """The text of each token of a batch ``[N, L, d]``, without padding."""
        rows = self.tokens_of(inputs).tolist()
        return [self._known_tokenizer.pieces([token for token in row if token != self.padding]) for row in rows]

    def start(
        self, shape: Sequence[int], generator: torch.Generator, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Normal vectors with the mean and the spread of the table."""
        table = self.vectors.to(device, dtype)
        rows = torch.cat([table[: self.padding], table[self.padding + 1 :]])
        drawn = torch.randn(tuple(shape), generator=generator, dtype=dtype, device=device)
        return rows.mean(0) + rows.std(0, correction=0) * drawn

    def informed(self, start: Tensor, updates: Mapping[str, Tensor]) -> Tensor:
        """The starting points with padding where no sentence of the batch has a word, see `lengths_of`.

        Nothing flows through padding, so a search that follows slopes leaves it there.
        """
        if self.positions is None or self.positions not in updates:
            return start
        lengths = lengths_of(updates[self.positions])
        places = torch.arange(start.shape[-2], device=start.device)
        padded = places >= lengths.to(start.device).view(-1, *[1] * (start.ndim - 2))
        return torch.where(padded[..., None], self.vectors.to(start)[self.padding], start)

    def noise(self, inputs: Tensor, source: Source) -> Tensor:
        """The vectors of random words, with padding where these inputs have padding."""
        table = self.vectors.to(inputs)
        real = self.tokens_of(inputs) != self.padding
        words = torch.tensor(source.integers(self.vocabulary - 1, int(real.sum())), device=inputs.device)
        found = table[self.padding].expand_as(inputs).clone()
        found[real] = table[words + (words >= self.padding)]
        return found

    @property
    def scale(self) -> float:
        """The spread of the table."""
        return float(self.vectors.std(correction=0))

    def project(self, inputs: Tensor) -> Tensor:
        """Any vector may be tried."""
        return inputs

    def unblended(self, blends: Tensor, most: float, deviation: float) -> Tensor:
        r"""The likeliest vectors x behind blends ``(1 - r) x + r v`` with random words v, as `noise` draws them.

        Of all pairs (i, j) of the tokens nearest to a blend y, the one with the largest value of

        .. math:: -\frac{d}{2} \log\Big( \frac{1}{d} \min_{0 \le r \le most} |y - (1 - r) e_i - r e_j|^2
            + deviation^2 \Big) - \log(1 + i)

        tells the word i. The last term is its frequency by Zipf's law, as vocabularies list frequent tokens first;
        random words are equally likely. At ``r = 1/2`` it decides alone which word of a pair is the client's.

        Args:
            blends: vectors ``[N, L, d]``, padding included.
            most: the largest r; at most 1/2, where x and v are confused.
            deviation: of the errors in the values of a blend, in units of `scale`.

        >>> from gradveil.modality.words import Words
        >>> table = torch.randn(40, 16, generator=torch.manual_seed(0))
        >>> text = Text(Words(tuple(map(str, range(38)))), table)
        >>> blends = torch.lerp(table[[2, 3, 9]], table[[30, 21, 25]], torch.tensor([[0.5], [0.5], [0.3]]))
        >>> text.tokens_of(text.unblended(blends[None], 0.5, 0.1)).tolist()
        [[2, 3, 9]]
        """
        table = self.vectors.to(blends.device).double()
        least, found = (deviation * self.scale) ** 2, blends.clone()
        for sentence, tokens, words in zip(blends, self.tokens_of(blends), found, strict=True):
            real = tokens != self.padding
            apart = torch.cdist(sentence[real].double(), table)
            apart[:, self.padding] = torch.inf
            near = apart.topk(min(_NEAREST, len(table) - 1), largest=False).indices
            offsets = sentence[real, None].double() - table[near]
            products = offsets @ offsets.mT
            own = products.diagonal(dim1=1, dim2=2)
            along, lengths = own[:, :, None] - products, own[:, :, None] + own[:, None] - 2 * products
            share = (along / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)).clamp(0, min(most, 0.5))
            error = (own[:, :, None] - 2 * share * along + share.square() * lengths).clamp_min(0) / table.shape[1]
            fits = -table.shape[1] / 2 * (error + least).log() - near[:, :, None].double().log1p()
            chosen = near.gather(1, fits.amax(2).argmax(1, keepdim=True)).squeeze(1)
            words[real] = table[chosen].to(words)
        return found

    def decode(self, found: Tensor) -> Tensor:
        """The vectors of the nearest tokens."""
        return self.vectors.to(found)[self.tokens_of(found)]

    def repaired(self, found: Tensor) -> Tensor:
        """The vectors of the nearest tokens, with 0 for what is not finite."""
        return self.decode(found.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))

    def compared(self, inputs: Tensor) -> Tensor:
        """The ids, with `NOTHING` where there is padding."""
        tokens = self.tokens_of(inputs)
        return torch.where(tokens == self.padding, NOTHING, tokens)

    def distances(self, originals: Tensor, found: Tensor) -> Tensor:
        """The number of tokens that two sentences do not share; the squared distance decides between equals."""
        bags = [[Counter(row) for row in self.compared(inputs).tolist()] for inputs in (originals, found)]
        length = originals.shape[1]
        apart = [[length - (one & other).total() for other in bags[1]] for one in bags[0]]
        square = super().distances(originals, found)
        return torch.tensor(apart, dtype=square.dtype, device=square.device) + square / (1 + square.sum())

    def typical(self, stored: Tensor) -> Tensor:
        """The most frequent tokens, each once, as many as a sentence of median length has."""
        real = stored != self.padding
        counts = stored[real].long().bincount(minlength=self.vocabulary)
        length = int(real.sum(1).median())
        # A stable sort: of tokens that are equally frequent, the one with the lower id comes first.
        order = counts.sort(descending=True, stable=True).indices[: min(length, int((counts > 0).sum()))]
        tokens = torch.full(stored.shape[1:], self.padding, device=stored.device)
        tokens[: len(order)] = order
        return self.inputs_of(tokens)

    # -- judgement --------------------------------------------------------------------------------------------------

    def leak_rule(self, scores: Mapping[str, float | None], blind: Mapping[str, float | None] | None) -> str | None:
        """Whether a sentence came back word for word, in good part in order, or by its words.

        - "sentence": ``exact = 1`` where the blind guess's is 0;
        - "order": ``ROUGE-L >= max(.5, blind + .25)``;
        - "words": ``token recall >= max(.5, blind + .25)``; half the words, in whatever order, tell what it was about.
        """

        def gained(name: str, margin: float, least: float) -> bool:
            value, guess = scores[name], None if blind is None else blind[name]
            return value is not None and value >= max(least, -1.0 if guess is None else guess + margin)

        if gained("exact", 1.0, 1.0):
            return "sentence"
        if gained("rouge_l", LEAK_MARGIN, LEAK_SHARE):
            return "order"
        return "words" if gained("token_recall", LEAK_MARGIN, LEAK_SHARE) else None

    def write(self, examples: Tensor, originals: Tensor | None) -> list[list[Fragment]]:
        """The tokens of each sentence; one that the original also has, as often as that, was recovered."""
        pieces, tokens = self.pieces(examples), self.compared(examples).tolist()
        if originals is None:
            return [[Fragment(piece) for piece in sentence] for sentence in pieces]
        left = [Counter(row) for row in self.compared(originals).tolist()]
        written = []
        for sentence, row, counts in zip(pieces, tokens, left, strict=True):
            found = [token for token in row if token != NOTHING]
            fragments = []
            for piece, token in zip(sentence, found, strict=True):
                fragments.append(Fragment(piece, counts[token] > 0))
                counts[token] -= 1
            written.append(fragments)
        return written


def lengths_of(position_gradients: Tensor) -> Tensor:
    """How many positions are in use, ``[victims]``, by the gradients ``[victims, L, d]`` of learned positions.

    The rows behind the end of the longest sentence of a batch are zero, or all noise of one size if a defense added
    some. The end is where the logarithms of the rows' norms fall into two parts that differ least within themselves;
    the norms of both parts must differ by a factor of two on average, else all positions are in use.

    >>> lengths_of(torch.tensor([[[3.0], [2.0], [0.0], [0.0]], [[3.0], [2.0], [2.0], [2.5]]]))
    tensor([2, 4])
    """
    norms = position_gradients.flatten(2).double().norm(dim=2)
    least = 1e-6 * norms.amax(1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)
    logs = norms.maximum(least).log()
    ends = []
    for row in logs:
        best, end = float(row.var(correction=0)) * len(row), len(row)
        for cut in range(1, len(row)):
            parts = row[:cut], row[cut:]
            within = sum(float((part - part.mean()).square().sum()) for part in parts)
            if within < best and float(parts[0].mean() - parts[1].mean()) > LENGTH_GAP:
                best, end = within, cut
        ends.append(end)
    return torch.tensor(ends)
