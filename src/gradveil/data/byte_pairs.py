"""Byte-level byte-pair encoding: the tokenizer of GPT-2, with each digit a token of its own, as SmolLM2 uses it."""

import codecs
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Self

from gradveil.core.errors import InputError
from gradveil.data._arrays import reading
from gradveil.data.npz import read_arrays
from gradveil.data.places import find, missing
from gradveil.modality.words import TOKENIZERS

SMOLLM2 = "smollm2"
"""The name of SmolLM2's weights and tokenizer in the catalogue."""
SMOLLM2_PADDING = 2
"""Its token ``<|im_end|>``, which ends a text and fills the places after it."""

# GPT-2's split into words, for texts in which every character beyond ASCII was replaced by one of its kind.
_DIGIT = re.compile("([0-9])")
_WORD = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
_ALIKE = {"L": "a", "N": "0", "Z": "\t"}
_CACHED_WORDS = 2**16


def _alphabet() -> list[str]:
    """The character that stands for each byte in the written form of a token: printable, and never a space."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class BytePairs:
    r"""Turns text into token numbers and back; decoding what was encoded gives the same text.

    A text is split into words (a word begins with the space before it), each word into its UTF-8 bytes; then the pair
    of neighbours that comes first in `merges` is joined, until no pair of neighbours is in the list. Special tokens are
    never made from text, so data cannot pass for them.

    Args:
        tokens: the written form of each token, in which one character stands for each byte (``Ġ`` for a space).
        merges: the pairs to join, best first, each written with a space between its parts.
        special: the numbers of the tokens that are no text, such as the end of a text.
        padding: the token that fills up short texts, one of the special ones.

    References:
        Sennrich, Haddow & Birch, Neural Machine Translation of Rare Words with Subword Units, ACL 2016; Radford et al.,
        Language Models are Unsupervised Multitask Learners, 2019, for bytes.

    Example:
        >>> tokenizer = BytePairs(["<end>", "a", "b", "Ġ", "ab", "Ġab"], ["a b", "Ġ ab"], special=[0], padding=0)
        >>> tokenizer.encode("ab ab"), tokenizer.pieces([4, 5])
        ([4, 5], ['ab', ' ab'])
    """

    def __init__(self, tokens: Sequence[str], merges: Iterable[str], special: Iterable[int], padding: int) -> None:
        self.tokens, self.special, self.padding = tuple(tokens), frozenset(special), padding
        self._numbers = {token: number for number, token in enumerate(tokens) if number not in self.special}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._written = _alphabet()
        self._bytes = {character: byte for byte, character in enumerate(self._written)}
        self._encode_word = lru_cache(_CACHED_WORDS)(self._joined)

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """The token numbers of a text."""
        return [number for word in _words(text) for number in self._encode_word(word)]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; a character whose bytes lie in several tokens is part of the last of them.

        Bytes that are not UTF-8 become replacement characters.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last = len(ids) - 1
        return [decoder.decode(self._content(number), final=place == last) for place, number in enumerate(ids)]

    def __repr__(self) -> str:
        return f"BytePairs({self.size:,} tokens)"

    def _content(self, number: int) -> bytes:
        token = self.tokens[number]
        return token.encode() if number in self.special else bytes(self._bytes[character] for character in token)

    def _joined(self, word: str) -> tuple[int, ...]:
        parts = [self._written[byte] for byte in word.encode("utf-8", errors="surrogatepass")]
        while pairs := [(self._ranks[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in self._ranks]:
            _, at = min(pairs)
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        if unknown := [part for part in parts if part not in self._numbers]:
            raise InputError(
                f"tokenizer: expected text whose bytes all have a token, got {word!r}, in which {unknown[0]!r} has "
                "none; remove or replace such characters"
            )
        return tuple(self._numbers[part] for part in parts)


def _words(text: str) -> Iterable[str]:
    alike = "".join(
        character if character.isascii() else _ALIKE.get(unicodedata.category(character)[0], "!") for character in text
    )
    start = 0
    for piece in _DIGIT.split(alike):
        yield from (text[start + match.start() : start + match.end()] for match in _WORD.finditer(piece))
        start += len(piece)


@TOKENIZERS.register("smollm2")
class SmolLM2Tokens(BytePairs):
    """The tokenizer of SmolLM2, which ``gradveil data get smollm2`` fetches with the weights.

    Args:
        path: the npz file; None: the fetched one. ``tokenizer.tokens`` and ``.merges`` are lines of UTF-8 in it.

    Example:
        >>> SmolLM2Tokens().pieces(SmolLM2Tokens().encode("a film"))  # doctest: +SKIP
        ['a', ' film']
    """

    name: ClassVar[str]

    def __init__(self, path: Path | None = None) -> None:
        path = path or find(SMOLLM2)
        if path is None:
            raise missing(SMOLLM2)
        with reading(path, "a tokenizer"):
            arrays = read_arrays(path, [f"tokenizer.{part}" for part in ("tokens", "merges", "special")])
            tokens, merges = (
                arrays[f"tokenizer.{part}"].tobytes().decode().split("\n") for part in ("tokens", "merges")
            )
            super().__init__(tokens, merges, arrays["tokenizer.special"].tolist(), SMOLLM2_PADDING)

    @classmethod
    def of(cls, _texts: Iterable[str]) -> Self:
        """The same tokenizer for all texts."""
        return cls()

    @property
    def settings(self) -> dict[str, str]:
        """None: another process reads the same file."""
        return {}
