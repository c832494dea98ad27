"""Tokenizers: how text becomes token ids and back."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self

from gradveil.core.registry import Registry

PADDING, UNKNOWN = "<pad>", "<unk>"


class Tokenizer(Protocol):
    """What `Text` needs to know about a vocabulary; `Words` is one, and a pretrained model brings its own.

    Its class is registered in `TOKENIZERS`, so that other processes can build the same one from its `settings`.
    """

    name: ClassVar[str]
    """The name under which its class is registered."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """The tokenizer for a data set with these training texts; a pretrained one does not look at them."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The arguments that build it again, as JSON."""

    @property
    def size(self) -> int:
        """How many tokens there are; ids lie from 0 to size - 1."""

    @property
    def padding(self) -> int:
        """The id that fills up short sentences."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without padding."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, with the blank before it if there is one: joined, they are the text."""


TOKENIZERS: Registry[Tokenizer] = Registry("tokenizer")


@TOKENIZERS.register("words")
@dataclass(frozen=True)
class Words:
    """A vocabulary of whole words, which are what stands between blanks; ids 0 and 1 are padding and unknown words.

    Args:
        words: all words, of which the first has id 2.

    Example:
        >>> words = Words.of(["a film", "a good film"])
        >>> words.encode("a bad film"), words.size
        ([2, 1, 3], 5)
        >>> "".join(words.pieces([2, 4, 3]))
        'a good film'
    """

    name: ClassVar[str]

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        """Take a list too, as JSON has it."""
        object.__setattr__(self, "words", tuple(self.words))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The words."""
        return {"words": list(self.words)}

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """The vocabulary of some texts, the most frequent words first."""
        counts = Counter(word for text in texts for word in text.split())
        order = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(tuple(order))

    @property
    def size(self) -> int:
        """Words, padding and unknown words."""
        return len(self.words) + 2

    @property
    def padding(self) -> int:
        """0."""
        return 0

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, start=2)}

    def encode(self, text: str) -> list[int]:
        """The ids of a text's words."""
        return [self._ids.get(word, 1) for word in text.split()]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The words, each but the first after a blank."""
        names = (PADDING, UNKNOWN, *self.words)
        return [f"{' ' if place else ''}{names[number]}" for place, number in enumerate(ids)]

    def __repr__(self) -> str:
        return f"Words({len(self.words):,} words)"
