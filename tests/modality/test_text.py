"""Text: a task on embedding vectors gives the gradients that plain autograd gives on token ids."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradveil
from gradveil.core.errors import DataError, InputError
from gradveil.metrics.matching import match
from gradveil.modality import MODALITIES, EmbeddedInput, Fragment, Text, Words
from gradveil.modality.embedded import nearest_rows
from gradveil.update import LocalSteps, compute_update

WORDS = Words(tuple("abcdefghij"))
LENGTH, WIDTH = 5, 6
IDS = torch.tensor([[2, 5, 3, 0, 0], [7, 7, 4, 11, 2], [9, 0, 0, 0, 0]])
LABELS = torch.tensor([0, 1, 1])


class Reader(nn.Module):
    """Attention over the tokens and their positions, with a mask that the model makes from the ids."""

    def __init__(self, rows=WORDS.size, padding_idx=0, tied=False):
        super().__init__()
        self.words = nn.Embedding(rows, WIDTH, padding_idx=padding_idx)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, rows if tied else 2, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        real = ids != 0
        x = self.words(ids) + self.positions(torch.arange(LENGTH))
        scores = self.query(x) @ self.key(x).transpose(1, 2) / WIDTH**0.5
        x = x + torch.where(real[:, None], scores, -torch.inf).softmax(-1) @ x
        x = torch.where(real[..., None], x, 0.0).sum(1) / real.sum(1, keepdim=True)
        return self.head(torch.tanh(x))[:, :2]


def reader(seed=0, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Reader(**options).double()


def task_of(model, *, withhold=True, length=LENGTH):
    embedded, modality = Text(WORDS).bind(model, (length,), withhold=withhold)
    # The modality keeps float32 rows; these models are in double precision, which the checks of gradients need.
    width = modality.table.shape[1]
    task = gradveil.Task(embedded, input_shape=(length, width), classes=2, modality=modality)
    return task, embedded


def by_autograd(model, ids, labels):
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    values = torch.autograd.grad(F.cross_entropy(model(ids), labels), list(named.values()))
    return {f"model.{name}": value for name, value in zip(named, values, strict=True)}


def assert_same(got, expected):
    assert list(got) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("options", [{}, {"padding_idx": None}, {"tied": True}, {"rows": 20}], ids=str)
@pytest.mark.parametrize("withhold", [True, False])
class TestTheSameAsTokenIds:
    def test_gradients(self, withhold, options):
        model = reader(**options)
        task, embedded = task_of(model, withhold=withhold)
        assert ("model.words.weight" in task.parameters) is not withhold
        vectors = embedded.table_now[IDS]
        assert torch.equal(task.predict(vectors), model(IDS))
        assert_same(task.gradients(vectors, LABELS), by_autograd(model, IDS, LABELS))

    def test_gradients_of_each_example(self, withhold, options):
        model = reader(**options)
        task, embedded = task_of(model, withhold=withhold)
        found = task.per_example_gradients(embedded.table_now[IDS], LABELS)
        for row in range(len(IDS)):
            expected = by_autograd(model, IDS[row : row + 1], LABELS[row : row + 1])
            assert_same({name: value[row] for name, value in found.items()}, expected)

    def test_local_steps(self, withhold, options):
        model = reader(**options)
        task, embedded = task_of(model, withhold=withhold)
        vectors = embedded.table_now[IDS].clone()
        local = LocalSteps(epochs=3, batch_size=3, lr=0.5)
        got = compute_update(task, vectors, LABELS, local=local, generator=torch.Generator().manual_seed(0))
        start = {name: value.detach().clone() for name, value in model.named_parameters()}
        trained = [value for value in model.parameters() if value.requires_grad]
        for _ in range(3):
            for value, slope in zip(trained, by_autograd(model, IDS, LABELS).values(), strict=True):
                value.data -= 0.5 * slope
        moved = {
            f"model.{name}": (start[name] - value.detach()) / 0.5
            for name, value in model.named_parameters()
            if value.requires_grad
        }
        assert_same(got, moved)

    def test_what_stands_behind_the_end_of_a_sentence_changes_nothing(self, withhold, options):
        model = reader(**options)
        task, embedded = task_of(model, withhold=withhold)
        before = task.gradients(embedded.table_now[IDS[2:]], LABELS[2:])
        with torch.no_grad():
            for row in range(1, LENGTH):
                model.positions.weight[row] += 5  # only padding is there
        after = task.gradients(embedded.table_now[IDS[2:]], LABELS[2:])
        assert_same(after, before)


def test_the_rows_of_a_shared_embeddings_gradient_are_the_bag_of_words():
    task, embedded = task_of(reader(), withhold=False)
    found = task.gradients(embedded.table_now[IDS], LABELS)["model.words.weight"]
    assert found.norm(dim=1).nonzero().flatten().tolist() == sorted(set(IDS.flatten().tolist()) - {0})


@pytest.mark.parametrize("withhold", [True, False])
def test_gradients_react_to_vectors_as_finite_differences_say(withhold):
    task, embedded = task_of(reader(), withhold=withhold)
    vectors, step = embedded.table_now[IDS[:1]].clone(), 1e-6
    exact = task.sensitivity(vectors, LABELS[:1], directions=None)
    name, total = "model.query.weight", 0.0
    real = torch.nonzero(IDS[0]).flatten().tolist()  # a step from padding makes it a word
    for position in real:
        for unit in range(WIDTH):
            moved = []
            for sign in (1, -1):
                other = vectors.clone()
                other[0, position, unit] += sign * step
                moved.append(task.gradients(other, LABELS[:1])[name])
            total = total + ((moved[0] - moved[1]) / (2 * step)).square()
    torch.testing.assert_close(exact[name], total, rtol=1e-4, atol=1e-9)


def test_attacks_can_differentiate_gradients_by_vectors():
    from gradveil.audit.cases import check_attackable

    for withhold in (True, False):
        check_attackable(task_of(reader(), withhold=withhold)[0])


def test_the_model_and_its_modes_are_left_alone():
    model = reader()
    model.add_module("dropout", nn.Dropout(0.5))
    model.query.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    task_of(model)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not model.words._forward_hooks


# -- nearest rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 7, 20_000])
@pytest.mark.parametrize("padding", [0, 1])
def test_nearest_rows_against_all_distances(rows, padding):
    generator = torch.Generator().manual_seed(rows)
    table = torch.randn(rows, 4, generator=generator)
    vectors = torch.randn(3, 5, 4, generator=generator)
    vectors[0, 0] = table[padding]
    distances = torch.cdist(vectors.double(), table.double()[None])
    distances[..., padding] = torch.inf
    distances[0, 0, padding] = -1
    assert torch.equal(nearest_rows(vectors, table, padding), distances.argmin(-1))
    assert torch.equal(torch.vmap(lambda v: nearest_rows(v, table, padding))(vectors), distances.argmin(-1))


def test_nearest_rows_tells_near_twins_apart():
    table = torch.ones(3, 50)
    table[2, 0] += 1e-6
    table[0] = 0
    assert nearest_rows(table, table, padding=0).tolist() == [0, 1, 2]


# -- the modality ---------------------------------------------------------------------------------------------------


def bound():
    return Text(WORDS).bind(reader().float(), (LENGTH,))[1]


def test_ids_become_vectors_and_come_back():
    text = bound()
    inputs = text.inputs_of(IDS)
    assert inputs.shape == (3, LENGTH, WIDTH)
    assert text.input_shape((LENGTH,)) == (LENGTH, WIDTH)
    assert torch.equal(text.tokens_of(inputs), IDS)
    assert torch.equal(text.decode(inputs), inputs)
    assert torch.equal(text.compared(inputs), torch.where(IDS == 0, -1, IDS))
    assert text.sentences(inputs) == ["a d b", "f f c j a", "h"]
    near = inputs + 1e-3 * (inputs != 0)
    assert torch.equal(text.decode(near), inputs)


def test_other_processes_get_the_same_vocabulary():
    text = Text(WORDS)
    settings = json.loads(json.dumps(text.settings))
    assert MODALITIES.create("text").with_settings(settings) == text
    assert Text().with_settings(Text().settings) == Text()


def test_recovered_words_are_marked_as_often_as_the_original_has_them():
    text = bound()
    found, original = text.inputs_of(torch.tensor([[2, 2, 7, 0, 0]])), text.inputs_of(torch.tensor([[7, 2, 3, 0, 0]]))
    assert text.write(found, original)[0] == [Fragment("a", True), Fragment(" a", False), Fragment(" f", True)]
    assert [fragment.recovered for fragment in text.write(found, None)[0]] == [None] * 3


def test_sentences_are_matched_by_their_common_words():
    text = bound()
    originals = text.inputs_of(IDS)
    turned = text.inputs_of(torch.tensor([[9, 0, 0, 0, 0], [2, 11, 4, 7, 7], [3, 5, 2, 0, 0]]))
    assert match(originals, turned, text).tolist() == [2, 1, 0]


def test_anything_that_an_attack_found_can_be_scored():
    text = bound()
    found = text.inputs_of(IDS)
    found[0], found[1], found[2, 0, 0] = torch.nan, torch.inf, 1e30
    repaired = text.repaired(found)
    assert torch.equal(text.decode(repaired), repaired)
    assert torch.equal(repaired[2, 1:], found[2, 1:])


def test_a_search_starts_at_the_tables_mean_and_spread():
    text = bound()
    drawn = text.start((4000, LENGTH, WIDTH), torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    rows = text.table[1:].double()
    torch.testing.assert_close(drawn.mean((0, 1)), rows.mean(0), rtol=0, atol=0.05)
    torch.testing.assert_close(drawn.std((0, 1)), rows.std(0, correction=0), rtol=0.05, atol=0)


def test_the_blind_guess_is_the_most_frequent_words_of_the_class():
    text = bound()
    stored = torch.tensor([[3, 4, 0, 0, 0], [4, 5, 4, 0, 0], [6, 0, 0, 0, 0], [6, 7, 8, 0, 0], [3, 4, 5, 0, 0]])
    labels = torch.tensor([0, 0, 1, 1, 0])
    guess = text.blind(stored, labels, torch.tensor([1, 0]), 2)
    # Class 0: 4 four times, then 3 and 5 twice each; median length 3. Class 1: 6 twice; the lower median is 1.
    assert text.tokens_of(guess).tolist() == [[6, 0, 0, 0, 0], [4, 3, 5, 0, 0]]


SCORES = {"exact": 0.0, "rouge_l": 0.4, "token_recall": 0.4}


@pytest.mark.parametrize(
    ("scores", "blind", "rule"),
    [
        ({}, {}, None),
        ({"exact": 1.0, "rouge_l": 1.0, "token_recall": 1.0}, {}, "sentence"),
        (
            {"exact": 1.0, "rouge_l": 1.0, "token_recall": 1.0},
            {"exact": 1.0, "rouge_l": 1.0, "token_recall": 1.0},
            None,
        ),
        ({"rouge_l": 0.5}, {"rouge_l": 0.2}, "order"),
        ({"rouge_l": 0.5}, {"rouge_l": 0.3}, None),
        ({"token_recall": 0.5}, {"token_recall": 0.25}, "words"),
        ({"token_recall": 0.49}, {"token_recall": 0.0}, None),
        ({"token_recall": 0.7}, {"token_recall": 0.5}, None),
    ],
)
def test_when_a_sentence_has_leaked(scores, blind, rule):
    guess = {"exact": 0.0, "rouge_l": 0.1, "token_recall": 0.1, **blind}
    assert Text().leak_rule({**SCORES, **scores}, guess) == rule


def test_without_a_blind_guess_only_the_threshold_counts():
    assert Text().leak_rule({**SCORES, "token_recall": 0.5}, None) == "words"
    assert Text().leak_rule(dict.fromkeys(SCORES), None) is None


def test_words_are_counted_and_unknown_ones_marked():
    words = Words.of(["b a b", "c"])
    assert words.words == ("b", "a", "c")
    assert words.encode("a x b") == [3, 1, 2]
    assert "".join(words.pieces([3, 1, 2])) == "a <unk> b"


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (IDS.float(), "must be token ids"),
        (IDS[0], "must be token ids"),
        (torch.tensor([[12]]), "token ids must lie from 0 to 11, got 12 to 12"),
        (torch.tensor([[2, 0, 3]]), "padding only at the end"),
        (torch.tensor([[0, 0]]), "at least one token"),
    ],
    ids=str,
)
def test_wrong_ids_are_refused(stored, message):
    with pytest.raises(DataError, match=f"^here: .*{message}"):
        Text(WORDS).check_stored("here:", stored)


class _Counting(Reader):
    """Also counts a word, so it uses the ids besides its embedding."""

    def forward(self, ids):
        return super().forward(ids) + (ids == 2).sum(1, keepdim=True)


class _Elsewhere(Reader):
    def forward(self, ids):
        return self.head(self.positions(torch.arange(LENGTH)).mean(0).expand(len(ids), -1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(LENGTH, 2)), "nn.Embedding that is applied to the token ids, got none;"),
        (_Elsewhere(), "got none; its embeddings words, positions get other inputs"),
        (Reader(rows=9), "a row for each of the 12 tokens of the data, got 'words' with 9"),
        (_Counting(), "uses token ids only in its embedding"),
        (nn.Sequential(nn.Embedding(12, 3, max_norm=1.0), nn.Flatten(), nn.Linear(15, 2)), "a plain embedding"),
        (nn.Sequential(nn.Embedding(12, 3), nn.Flatten(), nn.Linear(7, 2)), r"takes token ids \[N, 5\].*got an error"),
    ],
    ids=["no embedding", "not applied", "too small", "other uses", "max_norm", "another length"],
)
def test_models_that_cannot_be_split_at_an_embedding_are_refused(model, message):
    with pytest.raises(InputError, match=message):
        Text(WORDS).bind(model, (LENGTH,))


def test_a_word_with_the_row_of_padding_is_refused():
    model = reader().float()
    with torch.no_grad():
        model.words.weight[4] = model.words.weight[0]
    text = Text(WORDS).bind(model, (LENGTH,))[1]
    text.inputs_of(IDS[:1])
    with pytest.raises(InputError, match="the same row for token 4"):
        text.inputs_of(IDS[1:2])


def test_what_is_not_known_yet_is_refused():
    with pytest.raises(InputError, match="no model is known yet"):
        Text(WORDS).inputs_of(IDS)
    with pytest.raises(InputError, match="needs a tokenizer"):
        Text().vocabulary  # noqa: B018


def test_probe_ids_of_the_smallest_vocabulary():
    model = nn.Sequential(nn.Embedding(2, 3), nn.Flatten(), nn.Linear(6, 2))
    embedded = EmbeddedInput(model, length=2, vocabulary=2, padding=1)
    assert torch.equal(embedded(embedded.table_now[torch.tensor([[0, 1]])]), model(torch.tensor([[0, 1]])))
