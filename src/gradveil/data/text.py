"""Labelled texts: JSON lines, or lines of a label, a tab and a text; both in UTF-8."""

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradveil.core import checks
from gradveil.core.errors import DataError, UnknownNameError
from gradveil.data import byte_pairs  # noqa: F401  (registers a tokenizer)
from gradveil.data._arrays import hold_out, open_regular, reading
from gradveil.data._limits import largest
from gradveil.data.dataset import Dataset, Split
from gradveil.modality import Text, Tokenizer
from gradveil.modality.words import TOKENIZERS

JSON_LINES, PLAIN = (".jsonl", ".ndjson"), (".txt", ".tsv")
ENDINGS = (*JSON_LINES, *PLAIN)
"""The endings of files that are read as labelled texts."""

LENGTH = 32
_SPLITS = {"train": "train", "test": "test", "dev": "dev", "validation": "dev", "valid": "dev", "val": "dev"}

Label = str | int


@dataclass(frozen=True)
class LabelledText:
    """One text of a file.

    Args:
        text: the text.
        label: its label as the file has it.
        split: "train", "dev" or "test"; None if the file does not say.

    Example:
        >>> parse_json_line('{"text": "a good film", "label": 1}')
        LabelledText(text='a good film', label=1, split=None)
    """

    text: str
    label: Label
    split: str | None = None


def load_texts(
    name: str,
    path: Path,
    known_classes: Sequence[str],
    *,
    length: int = LENGTH,
    tokenizer: str = "words",
    **others: object,
) -> Dataset:
    """A data set of labelled texts. Texts with more than `length` tokens are left out, with a warning that says so.

    Args:
        name: the name or path that the data set was asked for by.
        path: the file.
        known_classes: the names of the classes, for a file with numbers; empty: the labels are the names.
        length: the positions of an input.
        tokenizer: a name in `gradveil.modality.words.TOKENIZERS`; "words" builds the vocabulary of the training texts.
        others: parameters that texts do not take, which are refused.
    """
    if others:
        raise UnknownNameError(f"{name}: unknown parameter {next(iter(others))!r}; it takes: length, tokenizer")
    checks.integer(name, "length", length, low=1)
    checks.choice(name, "tokenizer", tokenizer, TOKENIZERS.names())
    source = path.name
    texts = read_texts(path)
    labels = _sorted_labels(texts)
    if len(labels) < 2:
        raise DataError(
            f"{source}: expected texts of at least two classes, got only the label {labels[0]!r}; add texts of another"
        )
    numbers = {label: number for number, label in enumerate(labels)}
    train, test = _split(source, texts, numbers)
    made: Tokenizer = TOKENIZERS.get(tokenizer).of(text.text for text in train)  # type: ignore[attr-defined]
    modality, left_out = Text(made), 0
    splits = []
    for part, members in (("train", train), ("test", test)):
        encoded = [(made.encode(member.text), numbers[member.label]) for member in members]
        kept = [(ids, label) for ids, label in encoded if 0 < len(ids) <= length]
        left_out += len(encoded) - len(kept)
        if not kept:
            shortest = min(len(ids) for ids, _ in encoded)
            raise DataError(
                f"{source}: expected {part} texts of at most {length} tokens, got none: all {len(encoded):,} are too "
                f"long, the shortest has {shortest:,}; write {name}:length={shortest} or more"
            )
        padded = torch.full((len(kept), length), made.padding, dtype=torch.int32)
        for row, (ids, _) in zip(padded, kept, strict=True):
            row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        splits.append(Split(padded, torch.tensor([label for _, label in kept]), modality))
    if left_out:
        total = len(train) + len(test)
        warnings.warn(
            f"{name}: {left_out:,} of {total:,} texts have more than {length} tokens and are left out; for longer ones "
            f"write {name}:length=N",
            stacklevel=3,
        )
    names = tuple(known_classes) if len(known_classes) == len(labels) else tuple(map(str, labels))
    return Dataset(name, names, source, *splits)


def read_texts(path: Path) -> list[LabelledText]:
    """The texts of a file; `DataError` if it is empty, not UTF-8 or has a line without a text or a label."""
    with reading(path, "labelled texts"):
        if (size := path.stat().st_size) > (most := largest()):
            raise ValueError(f"it has {size:,} bytes, more than the {most:,} allowed on this machine")
        with open_regular(path) as file:
            content = file.read()
    try:
        decoded = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path.name}: expected text in UTF-8, got the byte 0x{content[error.start]:02x} at position "
            f"{error.start:,}; convert it, for example with iconv -f ISO-8859-1 -t UTF-8"
        ) from error
    parse = parse_json_line if path.suffix in JSON_LINES else parse_plain_line
    texts = []
    # Not splitlines, which also splits at characters that may stand inside a text.
    for number, line in enumerate(decoded.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            texts.append(parse(line.rstrip("\r")))
        except ValueError as error:
            raise DataError(f"{path.name}, line {number}: {error}; correct or remove that line") from error
    if not texts:
        raise DataError(f"{path.name}: expected labelled texts, one per line, got an empty file")
    return texts


def parse_json_line(line: str) -> LabelledText:
    """The text in a JSON object with "text", "label" and, if it says so, "split"."""
    try:
        described: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, got something else ({error})") from error
    if not isinstance(described, dict):
        raise ValueError(f'expected a JSON object {{"text": ..., "label": ...}}, got {type(described).__name__}')
    text, label, split = (described.get(key) for key in ("text", "label", "split"))
    if not isinstance(text, str) or not text.strip():
        raise ValueError('expected a text under "text", got none')
    if isinstance(label, bool) or not isinstance(label, str | int):
        got = "none" if label is None else repr(label)
        raise ValueError(f'expected a label, a name or a whole number, under "label", got {got}')
    if split is not None and split not in _SPLITS:
        raise ValueError(f'expected train, dev or test under "split", got {split!r}')
    return LabelledText(text, label, None if split is None else _SPLITS[split])


def parse_plain_line(line: str) -> LabelledText:
    """The text in a line of a label, a tab and the text.

    >>> parse_plain_line("positive\\ta good film")
    LabelledText(text='a good film', label='positive', split=None)
    """
    label, tab, text = line.partition("\t")
    if not tab or not label.strip():
        raise ValueError(f"expected a label, a tab and a text, got no label in {line[:40]!r}")
    if not text.strip():
        raise ValueError("expected a text after the label and the tab, got none")
    return LabelledText(text, label.strip())


def _sorted_labels(texts: Iterable[LabelledText]) -> list[Label]:
    """All labels, whole numbers by size, before names."""
    return sorted({text.label for text in texts}, key=lambda label: (isinstance(label, str), label))


def _split(
    source: str,
    texts: Sequence[LabelledText],
    numbers: dict[Label, int],
) -> tuple[list[LabelledText], list[LabelledText]]:
    """The training and the test texts: as the file says (dev texts are the test texts if it has no others)."""
    if all(text.split is None for text in texts):
        chosen = hold_out(source, np.array([numbers[text.label] for text in texts]), "text")
        return [texts[place] for place in chosen[0]], [texts[place] for place in chosen[1]]
    by_split = {split: [text for text in texts if text.split == split] for split in ("train", "dev", "test", None)}
    test = by_split["test"] or by_split["dev"]
    if by_split[None] or not by_split["train"] or not test:
        found = ", ".join(f"{len(members):,} of {split or 'none'}" for split, members in by_split.items() if members)
        raise DataError(
            f"{source}: expected every line to name its split, with texts of train and of test, got {found}; "
            'name the "split" in all lines or in none'
        )
    return by_split["train"], test
