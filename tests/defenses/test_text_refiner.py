"""Refiner on text: robust word vectors, their padding, and the evaluation network that it is given."""

import pytest
import torch
from safetensors.torch import save_file

import gradveil
from gradveil import models
from gradveil.core.errors import DataError, InputError
from gradveil.core.randomness import source_of
from gradveil.defenses.refiner import Refiner, _utility
from gradveil.modality import Text, Words
from gradveil.models.fitted_evaluation import TextEvaluationNetwork, write_network

IDS = torch.tensor([[2, 5, 3, 0, 0], [7, 7, 4, 11, 9], [6, 0, 0, 0, 0]])
LABELS = torch.tensor([0, 1, 1])
LENGTH, WIDTH, VOCABULARY = 5, 8, 12


@pytest.fixture(scope="module")
def task():
    sizes = {"input_shape": (LENGTH,), "classes": 2, "vocabulary": VOCABULARY, "padding": 0, "width": WIDTH}
    model = models.create("text-transformer", **sizes, depth=1, heads=2)
    with torch.no_grad():
        model.embedding.weight[0] = 0.1  # a padding row that half precision cannot hold
    model, text = Text(Words(tuple("abcdefghij"))).bind(model, (LENGTH,))
    return gradveil.Task(model, input_shape=(LENGTH, WIDTH), classes=2, modality=text)


@pytest.fixture(scope="module")
def file(task, tmp_path_factory):
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("refiner") / "network.safetensors"
    write_network(TextEvaluationNetwork(task.modality), path, {})
    return str(path)


def share(task, file, memory, seed=0, **parameters):
    defense = gradveil.defense("refiner", network=file, **parameters)
    inputs = task.modality.inputs_of(IDS)
    return defense.share(task, inputs, LABELS, generator=torch.Generator().manual_seed(seed), memory=memory)


def distance(one, other):
    return torch.stack([(one[name] - other[name]).square().sum() for name in one]).sum().sqrt().item()


def test_the_shared_gradient_is_at_most_epsilon_away(task, file):
    own = task.gradients(task.modality.inputs_of(IDS), LABELS)
    assert distance(share(task, file, {}, epsilon=1e-3), own) == pytest.approx(1e-3, rel=1e-3)
    assert distance(share(task, file, {}, epsilon=0.0), own) == 0


@pytest.mark.parametrize("rounds", [1, 2], ids=["cold", "warm"])
def test_padding_stays_padding_and_the_robust_words_are_others(task, file, rounds):
    memory = {}
    for seed in range(rounds):
        update = share(task, file, memory, seed, epsilon=100.0)
    text, robust = task.modality, memory["trained_on"]
    assert torch.equal(text.tokens_of(robust) == 0, IDS == 0)
    assert (robust - text.inputs_of(IDS))[IDS != 0].abs().min() > 0
    expected = task.gradients(robust, LABELS)
    for name, value in update.items():
        torch.testing.assert_close(value, expected[name])


def test_the_search_improves_its_objective_over_the_blended_start(task, file):
    defense, text = Refiner(network=file, iterations=20), task.modality
    inputs, source = text.inputs_of(IDS), source_of(torch.Generator().manual_seed(1))
    own, noise = task.gradients(inputs, LABELS), text.noise(inputs, source)
    start = torch.lerp(inputs, noise, 0.5)
    weights = defense.search_weights(task, own, start, LABELS)

    def objective(vectors):
        return _utility(task.gradients(vectors, LABELS), own, weights) - defense.evaluation(task)(vectors).mean()

    robust = defense.refine(task, own, LABELS, start, weights, 20)
    assert objective(robust) < objective(start)


def test_noise_is_words_and_keeps_padding(task):
    text = task.modality
    noise = text.noise(text.inputs_of(IDS), source_of(torch.Generator().manual_seed(1)))
    assert torch.equal(text.decode(noise), noise)
    tokens = text.tokens_of(noise)
    assert torch.equal(tokens == 0, IDS == 0)
    many = text.noise(text.inputs_of(IDS).repeat(400, 1, 1), source_of(torch.Generator().manual_seed(2)))
    counts = text.tokens_of(many).flatten().bincount(minlength=VOCABULARY)[1:]
    assert counts.min() > 0.8 * counts.double().mean()


def test_the_network_does_not_see_padding(task):
    torch.manual_seed(0)
    network, text = TextEvaluationNetwork(task.modality), task.modality
    long, short = text.inputs_of(IDS[:1]), text.inputs_of(IDS[:1, :3])
    torch.testing.assert_close(network(long), network(short))
    leaf = long.clone().requires_grad_()
    slope = torch.autograd.grad(network(leaf).sum(), leaf)[0]
    assert slope[0, 3:].abs().max() == 0
    assert slope[0, :3].abs().max() > 0


def test_the_attackers_of_text(task, file):
    assert list(gradveil.defense("refiner", network=file).adapt(task)) == ["undo-blend", "solve-gradient"]


def test_frequent_words_are_told_from_random_ones_in_a_blend():
    """Of blends in equal parts, the frequent word is the client's; of unequal ones, that with the larger part."""
    table = torch.randn(500, 32, generator=torch.Generator().manual_seed(0))
    text = Text(Words(tuple(f"w{number}" for number in range(498))), table)
    ids = torch.tensor([[2, 30, 7, 0], [11, 4, 5, 3]])
    noise = text.noise(text.inputs_of(ids), source_of(torch.Generator().manual_seed(1)))
    drawn = text.tokens_of(noise)
    frequent = (drawn > ids) | (ids == 0)
    blends = torch.lerp(text.inputs_of(ids), noise, 0.5)
    errors = 0.05 * torch.randn(blends.shape, generator=torch.Generator().manual_seed(2))
    blends = torch.where((ids == 0)[..., None], blends, blends + errors)
    found = text.tokens_of(text.unblended(blends, 0.5, 0.1))
    assert torch.equal(found[frequent], ids[frequent])
    assert frequent.sum() >= 7
    lighter = torch.lerp(text.inputs_of(ids), noise, 0.3)
    assert torch.equal(text.tokens_of(text.unblended(lighter, 0.5, 0.1)), ids)


def test_whole_words_are_left_as_they_are(task):
    inputs = task.modality.inputs_of(IDS)
    assert torch.equal(task.modality.unblended(inputs, 0.5, 0.1), inputs)


def test_networks_that_do_not_belong_to_the_embedding_are_refused(task, file, tmp_path, tiny_task, tiny_batch):
    with pytest.raises(InputError, match="make one for this embedding with python scripts/train_refiner_network.py"):
        share(task, "images", {})
    with pytest.raises(DataError, match="expected the weights of an evaluation network for text"):
        share(task, str(tmp_path / "none.safetensors"), {})
    other = tmp_path / "other.safetensors"
    network = TextEvaluationNetwork(task.modality)
    save_file(network.state_dict(), other, {"table": "0" * 16})
    with pytest.raises(InputError, match="got one for 0000000000000000, which knows other word vectors"):
        share(task, str(other), {})
    save_file({"first": torch.zeros(1)}, other, {"table": network.digest})
    with pytest.raises(DataError, match="make the file with"):
        share(task, str(other), {})
    with pytest.raises(InputError, match="network is for text"):
        gradveil.defense("refiner", network=file).share(tiny_task, *tiny_batch)
