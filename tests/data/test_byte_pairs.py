"""Byte-pair encoding: by hand, and there and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.core.errors import DataError, InputError
from gradveil.data.byte_pairs import BytePairs, SmolLM2Tokens, _alphabet, _words

BYTES = _alphabet()
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ Ġ", "1 1"]
TOKENIZER = BytePairs(["<end>", *BYTES, *(merge.replace(" ", "") for merge in MERGES)], MERGES, [0], 0)


def test_every_byte_is_written_by_a_character_of_its_own():
    assert len(set(BYTES)) == 256
    assert BYTES[ord(" ")] == "Ġ"
    assert BYTES[ord("\n")] == "Ċ"
    assert not any(character.isspace() for character in BYTES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("it's 2026, isn't it?", ["it", "'s", " ", "2", "0", "2", "6", ",", " isn", "'t", " it", "?"]),
        ("a  b", ["a", " ", " b"]),
        ("a  5", ["a", "  ", "5"]),
        ("a \n", ["a", " \n"]),
        (" Ärger²½ 漢字!!", [" Ärger", "²", "½", " 漢字", "!!"]),
        ("", []),
    ],
)
def test_words(text, words):
    assert list(_words(text)) == words


def test_the_first_merge_in_the_list_is_joined_first():
    written = [TOKENIZER.tokens[number] for number in TOKENIZER.encode("hello hello help  11")]
    assert written == ["hello", "Ġhello", "Ġ", "he", "l", "p", "ĠĠ", "1", "1"]


@given(st.text())
def test_decoding_gives_the_text_back(text):
    text = text.encode("utf-8", "ignore").decode()  # without halves of surrogate pairs
    ids = TOKENIZER.encode(text)
    pieces = TOKENIZER.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


def test_special_tokens_are_never_made_from_text():
    assert 0 not in TOKENIZER.encode("<end>")
    assert TOKENIZER.pieces([0]) == ["<end>"]


def test_a_byte_without_a_token_is_named():
    with pytest.raises(InputError, match="expected text whose bytes all have a token, got 'ab', in which 'b' has none"):
        BytePairs(["a"], [], [], 0).encode("ab")


def test_a_broken_file_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", other=np.zeros(3))
    with pytest.raises(DataError, match=r"x\.npz: expected a tokenizer"):
        SmolLM2Tokens(tmp_path / "x.npz")
