"""Labelled texts: the formats, the splits, and one clear line for every file that is none."""

import json

import pytest
import torch

from gradveil import data
from gradveil.core.errors import DataError, ParameterError, UnknownNameError

FILMS = [("a good film", "good"), ("a bad film", "bad"), ("so good", "good"), ("bad , so bad", "bad"), ("fine", "good")]


def json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def films(times=1, split=None):
    extra = {} if split is None else {"split": split}
    return [{"text": text, "label": label, **extra} for text, label in FILMS * times]


def words(split, row):
    modality = split.modality
    kept = [number for number in split.inputs[row].tolist() if number != modality.padding]
    return "".join(modality.tokenizer.pieces(kept))


def test_json_lines(tmp_path):
    path = json_lines(tmp_path / "films.jsonl", films(split="train") + films(split="test")[:2])
    found = data.load(path, length=6)
    assert found.classes == ("bad", "good")
    assert (len(found.train), len(found.test), found.source) == (5, 2, "films.jsonl")
    assert found.train.inputs.shape == (5, 6)
    assert [words(found.train, row) for row in range(5)] == [text for text, _ in FILMS]
    assert found.train.targets.tolist() == [1, 0, 1, 0, 1]
    assert found.train.modality == found.test.modality
    assert found.train.modality.vocabulary == 2 + len({word for text, _ in FILMS for word in text.split()})


def test_plain_lines_are_split_by_class_in_the_same_way_every_time(tmp_path):
    path = tmp_path / "films.tsv"
    path.write_text("".join(f"{label}\t{text}\r\n" for text, label in FILMS * 5), encoding="utf-8-sig")
    found, again = data.load(path), data.load(path)
    assert (len(found.train), len(found.test)) == (20, 5)
    assert found.test.targets.bincount().tolist() == [2, 3]
    assert torch.equal(found.train.inputs, again.train.inputs)


def test_words_that_training_does_not_have_are_unknown(tmp_path):
    rows = [*films(split="train"), {"text": "a great film", "label": "good", "split": "test"}]
    rows += [{"text": "unseen dev", "label": "bad", "split": "dev"}]
    found = data.load(json_lines(tmp_path / "films.jsonl", rows))
    assert len(found.test) == 1  # dev counts only where there is no test
    assert words(found.test, 0) == "a <unk> film"
    found = data.load(json_lines(tmp_path / "films.jsonl", [row for row in rows if row["split"] != "test"]))
    assert words(found.test, 0) == "<unk> <unk>"


def test_numbered_labels_are_ordered_as_numbers(tmp_path):
    rows = [{"text": f"text {label}", "label": label} for label in (10, 2, 1) for _ in range(5)]
    assert data.load(json_lines(tmp_path / "rows.jsonl", rows)).classes == ("1", "2", "10")


def test_texts_that_are_too_long_are_left_out_with_a_warning(tmp_path):
    path = json_lines(tmp_path / "films.jsonl", films(split="train") + films(split="test"))
    with pytest.warns(UserWarning, match=r"films.jsonl: 2 of 10 texts have more than 3 tokens and are left out; .*=N"):
        assert len(data.load(path, length=3).train) == 4


def test_a_line_may_hold_any_character_but_a_newline(tmp_path):
    rows = [{"text": f"one\u2028two\x85 <b>{number}</b>", "label": number % 2} for number in range(10)]
    found = data.load(json_lines(tmp_path / "odd.jsonl", rows))
    assert len(found.train) + len(found.test) == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "films.jsonl: expected labelled texts, one per line, got an empty file"),
        (b" \n\n", "got an empty file"),
        (
            '{"text": "é", "label": 1}'.encode("latin-1"),
            "expected text in UTF-8, got the byte 0xe9 at position 10; con",
        ),
        (b'{"text": "a", "label": 1}\n{"text": "b"}', 'films.jsonl, line 2: expected a label, .*"label", got none'),
        (b'{"text": "a", "label": null}', "line 1: expected a label"),
        (b'{"text": "a", "label": 0.5}', "line 1: expected a label, a name or a whole number, .*got 0.5"),
        (b'{"text": "a", "label": true}', "line 1: expected a label, .*got True"),
        (b'{"text": " ", "label": 1}', "line 1: expected a text"),
        (b'{"label": 1}', "line 1: expected a text"),
        (b"[1]", "line 1: expected a JSON object .*, got list"),
        (b"{", "line 1: expected a JSON object, got something else"),
        (b"[" * 100_000, "line 1: expected a JSON object, got something else"),
        (b'{"text": "a", "label": 1, "split": "all"}', "expected train, dev or test under \"split\", got 'all'"),
        (b'{"text": "a", "label": 1}\n' * 3, "at least two classes, got only the label 1"),
        (
            b'{"text": "a", "label": 1, "split": "train"}\n{"text": "b", "label": 0}',
            "every line to name its split, .* got 1 of train, 1 of none",
        ),
        (
            b'{"text": "a b c", "label": 1}\n{"text": "a b c d", "label": 0}\n' * 3,
            r"train texts of at most 2 tokens, got none: all 4 are too long, the shortest has 3; write .*:length=3",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "films.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        data.load(path, length=2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [("a good film", "line 1: expected a label, a tab and a text, got no label"), ("good\t ", "expected a text after")],
)
def test_plain_lines_without_label_or_text_are_refused(tmp_path, content, message):
    path = tmp_path / "films.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        data.load(path)


def test_wrong_parameters_are_refused(tmp_path):
    path = json_lines(tmp_path / "films.jsonl", films(times=3))
    with pytest.raises(UnknownNameError, match="unknown parameter 'size'; it takes: length, tokenizer"):
        data.load(path, size=32)
    with pytest.raises(ParameterError, match="length must be a whole number of at least 1, got 0"):
        data.load(path, length=0)
    with pytest.raises(ParameterError, match="tokenizer must be one of .*words"):
        data.load(path, tokenizer="letters")


def test_sst2_by_name(user_folder):
    with pytest.raises(DataError, match=r"sst2: expected one of sst2.jsonl in .*; put sst2.jsonl"):
        data.load("sst2")
    rows = [
        {"text": text, "label": int(label == "good"), "split": split}
        for split in ("train", "test")
        for text, label in FILMS
    ]
    json_lines(user_folder / "sst2.jsonl", rows)
    found = data.load("sst2", length=8)
    assert (found.name, found.classes, found.train.inputs.shape) == ("sst2", ("negative", "positive"), (5, 8))
