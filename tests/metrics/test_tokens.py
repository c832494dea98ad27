"""Metrics of text, against figures worked out by hand, slow definitions, and rouge-score where it is installed."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.metrics import METRICS, Scorer
from gradveil.metrics.tokens import exact, rouge_1, rouge_2, rouge_l, token_f1, token_recall
from gradveil.modality import Text, Words

# "police killed the gunman" and two recovered sentences: the example of ROUGE's paper (Lin 2004).
POLICE, KILLED, THE, GUNMAN, KILL = 2, 3, 4, 5, 6
ORIGINAL = [POLICE, KILLED, THE, GUNMAN]


def rows(*sentences, length=6):
    return torch.tensor([[*sentence, *[-1] * (length - len(sentence))] for sentence in sentences])


def score(metric, original, found):
    return metric(rows(original), rows(found)).item()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # rouge-1, rouge-2, rouge-l, recall, F1 of different tokens
        (ORIGINAL, (1, 1, 1, 1, 1)),
        ([POLICE, KILL, THE, GUNMAN], (3 / 4, 1 / 3, 3 / 4, 3 / 4, 3 / 4)),
        ([THE, GUNMAN, KILL, POLICE], (3 / 4, 1 / 3, 2 / 4, 3 / 4, 3 / 4)),
        ([THE, THE], (2 * 1 / 6, 0, 2 * 1 / 6, 1 / 4, 2 * 1 / 5)),
        ([GUNMAN, THE, KILLED, POLICE], (1, 0, 1 / 4, 1, 1)),
        ([KILL], (0, 0, 0, 0, 0)),
    ],
)
def test_figures_by_hand(found, expected):
    got = [score(metric, ORIGINAL, found) for metric in (rouge_1, rouge_2, rouge_l, token_recall, token_f1)]
    assert got == pytest.approx(expected)
    assert score(exact, ORIGINAL, found) == (found == ORIGINAL)


def test_repeated_words_count_as_often_as_both_have_them():
    assert score(rouge_1, [2, 2, 2, 3], [2, 2, 4]) == pytest.approx(2 * 2 / 7)
    assert score(rouge_2, [2, 2, 2, 3], [2, 2, 2]) == pytest.approx(2 * 2 / 5)
    assert score(token_recall, [2, 2, 2, 3], [2, 4]) == 0.5


def test_a_word_alone_has_no_pairs():
    assert score(rouge_2, [2], [2]) == 0
    assert score(exact, [2], [2]) == 1


def test_nothing_recovered_scores_nothing():
    for metric in METRICS.of(Text()):
        assert metric.compute(rows(ORIGINAL), rows([])).item() == 0


sentences = st.lists(st.integers(2, 5), min_size=1, max_size=6)


@given(sentences, sentences)
def test_the_longest_common_sequence_is_that_of_all_subsequences(one, other):
    def subsequences(tokens):
        return {c for size in range(len(tokens) + 1) for c in itertools.combinations(tokens, size)}

    longest = max(map(len, subsequences(one) & subsequences(other)))
    assert score(rouge_l, one, other) == pytest.approx(2 * longest / (len(one) + len(other)))


@given(sentences, sentences)
def test_every_metric_agrees_with_rouge_score(one, other):
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="rouge-score is not installed")

    class Split:
        def tokenize(self, text):
            return text.split()

    kinds = {"rouge1": rouge_1, "rouge2": rouge_2, "rougeL": rouge_l}
    found = scorer.RougeScorer([*kinds], tokenizer=Split()).score(" ".join(map(str, one)), " ".join(map(str, other)))
    for kind, metric in kinds.items():
        assert score(metric, one, other) == pytest.approx(found[kind].fmeasure)


@given(sentences, sentences)
def test_ranges_and_equality(one, other):
    for metric in METRICS.of(Text()):
        value = metric.compute(rows(one), rows(other)).item()
        assert metric.low <= value <= metric.high
        if one == other and (len(one) > 1 or metric.name != "rouge_2"):
            assert value == 1


def test_a_batch_is_scored_against_the_sentences_it_belongs_to():
    text = Text(Words(tuple("abcdefgh")), torch.eye(10))
    originals = text.inputs_of(torch.tensor([[2, 3, 4], [5, 6, 0]]))
    found = text.inputs_of(torch.tensor([[6, 5, 0], [2, 3, 4]]))
    labels = torch.tensor([0, 1])
    scorer = Scorer(text)
    blind = scorer.blind_scores(originals, text.inputs_of(torch.tensor([[2, 0, 0], [2, 0, 0]])))
    scored = scorer.score(originals, found, labels, labels.flip(0), blind)
    assert (scored["exact"], scored["token_recall"], scored["label_correct"]) == (0.5, 1.0, 1.0)
    assert (scored["leaked"], scored["leak_rule"]) == (True, "sentence")
