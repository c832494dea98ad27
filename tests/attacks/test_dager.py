"""dager: whole batches of sentences of tiny random models, with and without noise, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import gradveil
from gradveil.attacks import _sentences
from gradveil.attacks._sentences import Sentence
from gradveil.attacks._span import completed_row_space, estimated_variance, noisy_row_space, row_space
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.defenses.knowledge import read_arrived
from gradveil.modality import Text, Words
from gradveil.models.attention import AttentionBlock
from gradveil.models.smollm2 import Decoder, Size
from gradveil.models.text_transformer import TextTransformer
from gradveil.task import NextToken

VOCABULARY, WIDTH, LENGTH = 120, 64, 8
WORDS = Words(tuple(f"w{number}" for number in range(2, VOCABULARY)))
LOSS = NextToken(ignored=1)


def bound(model, loss="cross-entropy", classes=2):
    wrapped, text = Text(WORDS).bind(model, (LENGTH,))
    width = text.table.shape[1]
    return gradveil.Task(wrapped, loss, input_shape=(LENGTH, width), classes=classes, modality=text)


def language_task(seed=0, **size):
    torch.manual_seed(seed)
    size = {"vocabulary": VOCABULARY, "width": WIDTH, "hidden": 96, "blocks": 2, "heads": 4, "groups": 2, **size}
    return bound(Decoder(Size(**size), padding=0), LOSS, VOCABULARY)


@pytest.fixture(scope="module")
def task():
    return language_task()


def sentences(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCABULARY, (count, LENGTH), generator=generator)
    for row in tokens:
        row[int(torch.randint(3, LENGTH + 1, (1,), generator=generator)) :] = 0
    return tokens


def attack(task, tokens, defense="none", *, adaptive=False, labels=None, **parameters):
    defended = gradveil.defense(defense)
    inputs = task.modality.inputs_of(tokens)
    labels = LOSS.labels(tokens, 0) if labels is None else labels
    update = defended.share(task, inputs, labels, generator=torch.Generator().manual_seed(1))
    threat = gradveil.ThreatModel(batch_size=len(tokens), defense=defended, adaptive=adaptive)
    found = gradveil.attack("dager", **parameters).reconstruct(
        task, update, threat, generator=torch.Generator().manual_seed(2)
    )
    return found, task.modality.tokens_of(found.inputs[0])


def as_set(tokens):
    return {tuple(row) for row in tokens.tolist()}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_language_model_gives_its_batch_away(task, count):
    tokens = sentences(count, seed=count)
    found, recovered = attack(task, tokens)
    assert as_set(recovered) == as_set(tokens)
    assert found.certain.all()
    assert found.loss[0] < 1e-5
    assert torch.equal(found.labels[0], LOSS.labels(recovered, 0))


def test_victims_are_attacked_one_by_one(task):
    parts = [sentences(2, seed=seed) for seed in (5, 6)]
    updates = [gradveil.defense("none").share(task, task.modality.inputs_of(t), LOSS.labels(t, 0)) for t in parts]
    found = gradveil.attack("dager").reconstruct(task, updates, gradveil.ThreatModel(batch_size=2))
    assert [as_set(task.modality.tokens_of(inputs)) for inputs in found.inputs] == [as_set(tokens) for tokens in parts]


@pytest.mark.parametrize("count", [1, 4])
def test_tiny_noise_stops_the_plain_form_only(task, count):
    tokens, noise = sentences(count, seed=count), "gaussian-noise:std=1e-5"
    plain, _ = attack(task, tokens, noise)
    assert not plain.certain.any()
    assert plain.loss[0] == 1
    adaptive, recovered = attack(task, tokens, noise, adaptive=True)
    assert as_set(recovered) == as_set(tokens)
    assert 1e-6 < adaptive.loss[0] < 1e-2
    assert not adaptive.certain.any()  # it cannot be sure, although it is right


def test_knowing_that_there_is_no_noise_is_no_worse_than_not_knowing(task):
    tokens = sentences(4, seed=9)
    for defense in ("none", "gaussian-noise:std=0", "dp-sgd:clip=0.1,noise_multiplier=0"):
        found, recovered = attack(task, tokens, defense, adaptive=True)
        assert as_set(recovered) == as_set(tokens)
        assert found.certain.all()


def test_clipping_leaves_the_span_alone(task):
    tokens = sentences(2)
    _, recovered = attack(task, tokens, "dp-sgd:clip=0.1,noise_multiplier=1e-6", adaptive=True)
    assert as_set(recovered) == as_set(tokens)


def test_much_noise_stops_both(task):
    for adaptive in (False, True):
        found, recovered = attack(task, sentences(2), "gaussian-noise:std=1.0", adaptive=adaptive)
        assert not as_set(recovered) & as_set(sentences(2))
        assert not found.certain.any()


@pytest.mark.parametrize(
    "defense", ["top-k:keep=0.6", "dual-pruning:k1=0.02,k2=0.3", "quantization:bits=8", "gradient-dropout:keep=0.95"]
)
def test_withheld_values_stop_the_plain_form_but_tokens_are_found(task, defense):
    tokens = sentences(1, seed=3)
    plain, _ = attack(task, tokens, defense)
    assert not plain.certain.any()
    _, recovered = attack(task, tokens, defense, adaptive=True)
    true = set(tokens[tokens != 0].tolist())
    assert len(true & set(recovered.flatten().tolist())) >= 0.7 * len(true)


def test_sentences_may_begin_alike_and_repeat_words(task):
    tokens = torch.tensor([[9, 8, 7, 0, 0, 0, 0, 0], [9, 9, 5, 9, 5, 0, 0, 0], [9, 8, 3, 3, 0, 0, 0, 0]])
    found, recovered = attack(task, tokens)
    assert as_set(recovered) == as_set(tokens)
    assert found.certain.all()


def test_a_sentence_of_one_word_and_one_as_long_as_can_be(task):
    tokens = torch.tensor([[9, 0, 0, 0, 0, 0, 0, 0], [4, 5, 6, 7, 8, 10, 11, 12]])
    assert as_set(attack(task, tokens)[1]) == as_set(tokens)


def test_the_same_sentence_twice_is_found_once_and_said_to_be(task):
    tokens = sentences(1).expand(2, -1)
    found, recovered = attack(task, tokens)
    assert as_set(tokens) < as_set(recovered)
    assert sorted(found.certain[0].tolist()) == [False, True]


def test_a_span_that_is_everything_says_nothing():
    narrow = language_task(width=8, heads=2, groups=1, hidden=16)
    found, recovered = attack(narrow, sentences(4))
    assert not found.certain.any()
    assert recovered.shape == (4, LENGTH)
    assert (recovered[:, 0] != 0).all()


def test_a_span_that_holds_more_tokens_than_it_has_dimensions_is_one_of_noise():
    """Two vectors of the table span what all tokens lie in: no sentence is looked for."""
    table = torch.eye(2, dtype=torch.float64).repeat(20, 1)
    space = row_space(torch.tensor([[1.0, 0, 0], [0, 1, 0]], dtype=torch.float64), 1e-6)
    block = AttentionBlock((), lambda vectors, first: nn.functional.pad(vectors, (0, 1))[:, first:], causal=True)
    search = _sentences.Search(table, 0, 4, (block, block), (space, space), 1e-3, "none", 8)
    assert [len(tokens) for tokens in search.tokens()] == [0]
    assert [len(tokens) for tokens in replace(search, table=table[:4]).tokens()] == [3]  # all but the padding


def test_the_search_of_prefixes_is_bounded(task, monkeypatch):
    """With few tokens nothing changes; with a bound of one, only the best beginning is continued."""
    continued = []
    original = _sentences.Search._continuations

    def noted(self, beginnings, tokens):
        continued.append(len(beginnings))
        return original(self, beginnings, tokens)

    monkeypatch.setattr(_sentences.Search, "_continuations", noted)
    tokens = sentences(4, seed=4)
    assert as_set(attack(task, tokens)[1]) == as_set(tokens)
    assert max(continued) > 1
    continued.clear()
    monkeypatch.setattr(_sentences, "_MOST_CONTINUED", 1)
    attack(task, tokens)
    assert max(continued) == 1


def test_other_weights_of_the_task_count(task):
    moved = task.with_parameters({name: value * 1.1 for name, value in task.parameters.items()})
    tokens = sentences(2)
    assert as_set(attack(moved, tokens)[1]) == as_set(tokens)


def test_a_causal_classifier_with_learned_positions():
    torch.manual_seed(0)
    causal = bound(TextTransformer((LENGTH,), 2, VOCABULARY, causal=True, width=WIDTH))
    tokens = sentences(2, seed=4)
    found, recovered = attack(causal, tokens, labels=torch.tensor([0, 1]))
    assert as_set(recovered) == as_set(tokens)
    assert sorted(found.labels[0].tolist()) == [0, 1]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_encoder_gives_its_batch_away(count):
    torch.manual_seed(0)
    encoder = bound(TextTransformer((LENGTH,), 2, VOCABULARY, width=WIDTH))
    tokens = sentences(count, seed=4)
    found, recovered = attack(encoder, tokens, labels=torch.arange(count) % 2)
    assert as_set(recovered) == as_set(tokens)
    assert found.certain.all()
    assert found.labels.shape == (1, count)


def test_an_encoder_under_tiny_noise():
    torch.manual_seed(0)
    encoder = bound(TextTransformer((LENGTH,), 2, VOCABULARY, width=WIDTH))
    tokens, labels = sentences(1, seed=4), torch.tensor([1])
    plain, _ = attack(encoder, tokens, "gaussian-noise:std=1e-6", labels=labels)
    assert not plain.certain.any()
    _, recovered = attack(encoder, tokens, "gaussian-noise:std=1e-6", labels=labels, adaptive=True)
    assert as_set(recovered) == as_set(tokens)


def test_the_search_in_an_encoder_is_bounded(monkeypatch):
    torch.manual_seed(0)
    encoder = bound(TextTransformer((LENGTH,), 2, VOCABULARY, width=WIDTH))
    monkeypatch.setattr(_sentences, "_MOST_TRIED", -1)
    tokens = sentences(2, seed=4)
    found, recovered = attack(encoder, tokens, labels=torch.tensor([0, 1]))
    assert not found.certain.any()
    assert set(recovered.flatten().tolist()) <= set(tokens.flatten().tolist())
    assert len(set(recovered[0].tolist())) == LENGTH


def test_what_it_cannot_attack_is_refused(task, tiny_task):
    dager, threat = gradveil.attack("dager"), gradveil.ThreatModel()
    with pytest.raises(InputError, match="dager: needs a model of text, got a task on images"):
        dager.check_threat(tiny_task, threat)
    averaging = bound(nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Flatten(), nn.Linear(4 * LENGTH, 2)))
    with pytest.raises(InputError, match="declares its first two attention blocks, got Sequential"):
        dager.check_threat(averaging, threat)
    shallow = language_task(blocks=1)
    with pytest.raises(InputError, match="declares its first two attention blocks, got Decoder"):
        dager.check_threat(shallow, threat)
    frozen = task.copy_model().model
    frozen.blocks[1].attention.value.weight.requires_grad_(False)
    with pytest.raises(InputError, match=r"does not share 'model\.blocks\.1\.attention\.value\.weight'"):
        dager.check_threat(bound(frozen, LOSS, VOCABULARY), threat)
    with pytest.raises(ThreatModelError, match="needs the gradient of one step in one round"):
        dager.check_threat(task, gradveil.ThreatModel(local=gradveil.LocalSteps(epochs=2, lr=0.1)))
    with pytest.raises(ThreatModelError, match="needs the gradient of one step in one round"):
        dager.check_threat(task, gradveil.ThreatModel(rounds=2))


# -- the span ----------------------------------------------------------------------------------------------------------


def low_rank(rows, columns, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, rank, generator=generator, dtype=torch.float64) for size in (rows, columns))
    return left @ right.T


def test_an_exact_row_space_holds_its_rows_and_no_others():
    matrix = low_rank(40, 30, 5)
    space = row_space(matrix, 1e-9)
    assert space.basis.shape == (5, 30)
    assert space.distances(matrix).max() < 1e-6
    other = torch.eye(30, dtype=torch.float64)
    projector = torch.linalg.pinv(matrix) @ matrix
    torch.testing.assert_close(space.distances(other), (other - projector).norm(dim=1))
    assert row_space(low_rank(40, 30, 30), 1e-9).is_everything


def test_noise_is_cut_at_its_edge_and_leaves_the_distance_that_is_expected():
    std, rank = 0.05, 6
    clean = low_rank(300, 200, rank)
    noisy = clean + std * torch.randn(clean.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    space = noisy_row_space([noisy[:180], noisy[180:]], std**2)
    assert len(space.basis) == rank
    ratio = space.distances(clean).square() / space.expected(clean).square()
    assert abs(float(ratio.mean()) - 1) < 0.05
    assert not len(noisy_row_space([noisy - clean], std**2).basis)


def test_rows_that_are_only_noise_are_left_out():
    noise = torch.randn(900, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weak = 0.4 * low_rank(50, 60, 3) + noise[:50]
    assert len(noisy_row_space([weak, noise[50:]], 1.0).basis) >= len(noisy_row_space([weak], 1.0).basis) > 0


@pytest.mark.parametrize("shape", [(300, 100), (100, 300), (200, 200)])
def test_the_variance_of_noise_is_estimated(shape):
    noise = 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert abs(estimated_variance(noise + low_rank(*shape, 3)) / 0.09 - 1) < 0.1


def test_what_was_withheld_is_completed():
    matrix = low_rank(300, 100, 2)
    sent = torch.where(matrix.abs() > matrix.abs().flatten().kthvalue(12_000).values, matrix, 0.0)
    scale = torch.ones(100, dtype=torch.float64)
    first = noisy_row_space([sent], estimated_variance(sent))
    completed = completed_row_space({"w": sent}, read_arrived, scale)
    assert completed.distances(matrix).mean() < first.distances(matrix).mean() / 2


def test_a_sentence_ends_where_it_is_worth_most():
    sentence = Sentence((4, 5, 6, 7), (1.0, -3.0, 4.0, -1.0), (0.1, 0.2, 0.3, 0.4))
    assert sentence.ended() == Sentence((4, 5, 6), (1.0, -3.0, 4.0), (0.1, 0.2, 0.3))
    assert sentence.value == 1.0
    assert not sentence.repeats_its_first
    assert Sentence((4, 4), (1.0, 1.0), (0.0, 0.0)).repeats_its_first


def test_few_at_a_time_gives_the_same(task, monkeypatch):
    tokens = sentences(2)
    _, expected = attack(task, tokens)
    monkeypatch.setattr(_sentences, "_AT_ONCE", 2000)
    assert torch.equal(attack(task, tokens)[1], expected)
