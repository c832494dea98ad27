"""Decoders like SmolLM2: against slow references, their file, and whether the real one speaks English."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gradveil import models
from gradveil.core.errors import DataError, ParameterError
from gradveil.data.byte_pairs import SmolLM2Tokens
from gradveil.models.smollm2 import Attention, Decoder, Size, language_model, load_weights

SMALL = Size(vocabulary=11, width=16, hidden=24, blocks=2, heads=4, groups=2)


@pytest.fixture
def decoder():
    return Decoder(SMALL).double().requires_grad_(False)


@pytest.fixture(scope="module")
def trained():
    try:
        return language_model().requires_grad_(False), SmolLM2Tokens()
    except DataError:
        pytest.skip("smollm2.npz is missing: run gradveil data get smollm2")


def test_attention_is_the_sum_over_earlier_positions():
    attention = Attention(SMALL).double().requires_grad_(False)
    vectors = torch.randn(1, 5, 16, dtype=torch.float64)
    expected = torch.zeros(5, 16, dtype=torch.float64)

    def turned(values, position):
        pairs = torch.view_as_complex(values.view(-1, 2))
        angles = position * SMALL.base ** (-torch.arange(0, 4, 2, dtype=torch.float64) / 4)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten()

    for head in range(4):
        own, shared = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
        for position in range(5):
            query = turned(attention.query(vectors)[0, position, own], position)
            scores = torch.stack([query @ turned(attention.key(vectors)[0, t, shared], t) for t in range(position + 1)])
            weights = (scores / 2).softmax(0)
            expected[position, own] = weights @ attention.value(vectors)[0, : position + 1, shared]
    torch.testing.assert_close(attention(vectors)[0], attention.output(expected))
    torch.testing.assert_close(attention(vectors, 3), attention(vectors)[:, 3:])


def test_a_position_sees_nothing_after_it(decoder):
    one, other = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[3, 4, 7, 8]])
    torch.testing.assert_close(decoder(one)[..., :2], decoder(other)[..., :2])
    assert not torch.allclose(decoder(one)[..., 2], decoder(other)[..., 2])


def test_rotary_positions_are_relative(decoder):
    """The scores of a query and a key depend on the distance between them only."""
    attention = decoder.blocks[0].attention
    values = torch.randn(1, 4, 1, 4, dtype=torch.float64).expand(-1, -1, 6, -1)
    turned = attention._rotated(values, torch.arange(6))
    scores = turned @ turned.transpose(-1, -2)
    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1])


def test_a_classifier_reads_the_last_token_before_padding():
    torch.manual_seed(0)
    classifier = Decoder(SMALL, classes=3, padding=0).double()
    short, long = torch.tensor([[3, 4, 0, 0]]), torch.tensor([[3, 4]])
    torch.testing.assert_close(classifier(short), classifier(long))
    assert classifier(short).shape == (1, 3)


def test_the_head_is_the_embedding(decoder):
    changed = torch.nn.Parameter(decoder.embedding.weight.clone())
    changed.data[7] = 0
    decoder.embedding.weight = changed
    assert (decoder(torch.tensor([[3, 4]]))[0, 7] == 0).all()


def test_what_enters_the_first_blocks_is_what_it_declares(decoder):
    tokens = torch.tensor([[3, 4, 5]])
    seen = []
    handles = [
        block.attention.query.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        for block in decoder.blocks
    ]
    decoder(tokens)
    for handle in handles:
        handle.remove()
    declared = decoder.attention_blocks()
    assert [block.causal for block in declared] == [True, True]
    assert {name for block in declared for name in block.projections} < set(dict(decoder.named_parameters()))
    for number, block in enumerate(declared):
        for first in (0, 2):
            got = block.inputs(decoder.embedding(tokens), first)
            torch.testing.assert_close(got, seen[number][:, first:])


def test_a_file_gives_its_weights(decoder, tmp_path):
    arrays = {name: value.numpy().astype(np.float16) for name, value in decoder.state_dict().items()}
    np.savez(tmp_path / "x.npz", **arrays, more=np.ones(3))
    loaded = load_weights(Decoder(SMALL, classes=2), tmp_path / "x.npz")
    assert torch.equal(loaded.blocks[1].hidden.up.weight.half(), decoder.blocks[1].hidden.up.weight.half())
    assert all(value.requires_grad for value in loaded.parameters())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"expected \(16,\) in 'norm.weight', got no such tensor"),
        (np.ones(15, np.float16), r"expected \(16,\) in 'norm.weight', got \(15,\)"),
        (np.full(16, np.nan, np.float16), "expected finite numbers, got others in 'norm.weight'"),
    ],
)
def test_other_files_are_refused(decoder, tmp_path, value, message):
    arrays = {name: array.numpy().astype(np.float16) for name, array in decoder.state_dict().items()}
    changed = {name: array for name, array in {**arrays, "norm.weight": value}.items() if array is not None}
    np.savez(tmp_path / "x.npz", **changed)
    with pytest.raises(DataError, match=message):
        load_weights(Decoder(SMALL), tmp_path / "x.npz")


def test_missing_weights_and_other_tokens_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path))
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    with pytest.raises(DataError, match="run: gradveil data get smollm2"):
        language_model()
    with pytest.raises(ParameterError, match=r"smollm2: needs texts in its own 49,152 tokens.*:tokenizer=smollm2"):
        models.create("smollm2", input_shape=(8,), classes=2, vocabulary=100, padding=0)


def test_the_real_one_continues_english(trained):
    model, tokenizer = trained
    ids = tokenizer.encode("The capital of France is")
    for _ in range(2):
        ids.append(int(model(torch.tensor([ids]))[0, :, -1].argmax()))
    assert "".join(tokenizer.pieces(ids)) == "The capital of France is Paris."


def test_the_real_one_expects_sentences_and_not_their_words_in_any_order(trained):
    model, tokenizer = trained

    def perplexity(text):
        ids = torch.tensor([tokenizer.encode(text)])
        return float(F.cross_entropy(model(ids)[..., :-1], ids[:, 1:]).exp())

    text = "The sun rises in the east and sets in the west. Every morning, people wake up and go to work."
    assert perplexity(text) < 20
    assert perplexity(" ".join(sorted(text.split()))) > 200


def test_the_tokenizer_of_the_real_one(trained):
    _, tokenizer = trained
    assert tokenizer.size == 49_152
    # What the package tokenizers makes of the same vocabulary and merges.
    assert tokenizer.encode("a good film") == [81, 1123, 4771]
    text = "it's 2026, isn't it? über 👍"
    assert "".join(tokenizer.pieces(tokenizer.encode(text))) == text
    assert tokenizer.tokens[tokenizer.padding] == "<|im_end|>"
