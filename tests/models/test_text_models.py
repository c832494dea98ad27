"""The text models: shapes, masks, order, names and misuse. Their gradients are checked as those of any text model."""

import pytest
import torch
from torch.nn import functional as F

from gradveil import models
from gradveil.core.errors import InputError, ParameterError
from gradveil.modality import Text, Words
from gradveil.models.base import REGISTRY, takes_text
from gradveil.task import Task

NAMES = ["text-embedding", "text-transformer"]
VOCABULARY, LENGTH = 12, 6
IDS = torch.tensor([[2, 7, 5, 0, 0, 0], [3, 3, 9, 11, 4, 2]])


def build(name, **parameters):
    return models.create(
        name, input_shape=(LENGTH,), classes=3, vocabulary=VOCABULARY, padding=0, width=8, **parameters
    ).double()


def test_names():
    assert [name for name in models.names() if takes_text(name)] == ["smollm2", *NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_parameter_counts(name):
    model = build(name, hidden=64) if name == "text-embedding" else build(name, heads=2)
    by_hand = {
        "text-embedding": 12 * 8 + (8 * 64 + 64) + (64 * 3 + 3),
        # tokens, positions, two blocks (two norms, four projections, a hidden layer of 32), the last norm, the logits
        "text-transformer": 12 * 8 + 6 * 8 + 2 * (2 * 16 + 4 * 72 + 8 * 32 + 32 + 32 * 8 + 8) + 16 + (8 * 3 + 3),
    }
    assert sum(value.numel() for value in model.parameters()) == by_hand[name]


@pytest.mark.parametrize("parameters", [{}, {"activation": "relu"}], ids=str)
@pytest.mark.parametrize("name", [*NAMES, "causal"])
class TestEveryTextModel:
    def make(self, name, parameters):
        return build("text-transformer", causal=True, **parameters) if name == "causal" else build(name, **parameters)

    def test_padding_is_not_there(self, name, parameters):
        model = self.make(name, parameters)
        if name != "text-embedding":
            short = models.create(
                "text-transformer",
                input_shape=(3,),
                classes=3,
                vocabulary=VOCABULARY,
                padding=0,
                width=8,
                causal=name == "causal",
                **parameters,
            ).double()
            values = model.state_dict()
            values["positions.weight"] = values["positions.weight"][:3]
            short.load_state_dict(values)
        else:
            short = model
        torch.testing.assert_close(model(IDS[:1]), short(IDS[:1, :3]))

    def test_a_task_has_the_gradients_of_the_model(self, name, parameters):
        model = self.make(name, parameters)
        embedded, modality = Text(Words(tuple("abcdefghij"))).bind(model, (LENGTH,))
        task = Task(embedded, input_shape=(LENGTH, 8), classes=3, modality=modality)
        labels = torch.tensor([0, 2])
        found = task.gradients(embedded.table_now[IDS], labels)
        named = {key: value for key, value in model.named_parameters() if value.requires_grad}
        plain = torch.autograd.grad(F.cross_entropy(model(IDS), labels), list(named.values()))
        for key, value in zip(named, plain, strict=True):
            torch.testing.assert_close(found[f"model.{key}"], value)
        assert task.classifier.weight == "model.classifier.weight"


def test_only_the_transformer_knows_the_order():
    turned = IDS[1:].flip(1)
    averaging, transformer = build("text-embedding"), build("text-transformer")
    torch.testing.assert_close(averaging(turned), averaging(IDS[1:]))
    assert (transformer(turned) - transformer(IDS[1:])).abs().max() > 1e-3


def test_a_causal_position_does_not_see_what_follows():
    model = build("text-transformer", causal=True)
    vectors = model.positioned(model.embedding(IDS[1:]))
    other = vectors.clone()
    other[:, 3:] += 1
    seen = model.visible(IDS[1:] != 0)
    first, second = (model.blocks[0](one, seen) for one in (vectors, other))
    torch.testing.assert_close(first[:, :3], second[:, :3])
    assert (first[:, 3:] - second[:, 3:]).abs().min() > 0


@torch.no_grad()
def test_attention_is_the_formula():
    model = build("text-transformer", heads=2)
    attention = model.blocks[0].attention
    x = torch.randn(1, LENGTH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(LENGTH, 8, dtype=torch.float64)
    query, key, value = (part(x)[0] for part in (attention.query, attention.key, attention.value))
    for head in range(2):
        columns = slice(4 * head, 4 * head + 4)
        for position in range(LENGTH):
            scores = [float(query[position, columns] @ key[other, columns]) / 2 for other in range(3)]  # 3 words
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            expected[position, columns] = sum(w * value[other, columns] for other, w in enumerate(weights))
    got = attention(x, model.visible(IDS[:1] != 0))[0]
    torch.testing.assert_close(got, expected @ attention.output.weight.T + attention.output.bias)


def test_the_projections_have_the_names_that_attacks_look_for():
    names = {name for name, _ in build("text-transformer").named_parameters()}
    assert {f"blocks.{b}.attention.{part}.weight" for b in (0, 1) for part in ("query", "key", "value")} <= names


@pytest.mark.parametrize("name", NAMES)
def test_description_is_complete(name):
    summary, paper, parameters = models.describe(name)
    assert 20 < len(summary) <= 120
    assert summary.endswith(".")
    assert any(character.isdigit() for character in paper)
    assert "vocabulary" not in parameters
    assert REGISTRY.get(name).name == name


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"width": 6, "heads": 4}, "width must be a multiple of heads, got width=6, heads=4"),
        ({"depth": 0}, "depth must be a whole number of at least 1, got 0"),
        ({"input_shape": (3, 32, 32)}, r"input_shape must be the number of tokens such as \(32,\)"),
        ({"padding": 12}, "padding must be a whole number from 0 to 11, got 12"),
        ({"vocabulary": 1}, "vocabulary must be a whole number of at least 2, got 1"),
    ],
)
def test_wrong_parameters_are_refused(parameters, message):
    given = {"input_shape": (LENGTH,), "classes": 2, "vocabulary": VOCABULARY, "padding": 0} | parameters
    with pytest.raises(ParameterError, match=message):
        models.create("text-transformer", **given)


def test_models_and_data_must_be_of_one_kind():
    with pytest.raises(InputError, match="lenet: expected images, got token ids; use one of smollm2, text-embedding"):
        models.create("lenet", input_shape=(6,), classes=2, vocabulary=12, padding=0)
    with pytest.raises(InputError, match=r"text-embedding: expected text, got inputs of shape \(1, 8, 8\) and no voc"):
        models.create("text-embedding", input_shape=(1, 8, 8), classes=2)
