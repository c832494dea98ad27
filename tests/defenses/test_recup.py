"""RecUP: what it changes, whom it misleads, and that it says when it cannot."""

import pytest
import torch
from torch import nn

import gradveil
from gradveil.core.errors import InputError
from gradveil.defenses.recup import SKETCH, _drawn_places, _sketch, side_of_class_mean
from gradveil.models.vectors import fit_logistic

EPSILON = 0.15


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def task():
    torch.manual_seed(0)
    return gradveil.Task(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), input_shape=(1, 4, 4), classes=2)


def examples(count=160, seed=1):
    images, labels = torch.rand(count, 1, 4, 4, generator=seeded(seed)), torch.zeros(count, dtype=torch.long)
    bright = torch.arange(count) % 2
    images[..., 0] *= 0.1 + 0.9 * bright[:, None, None]
    return images, labels, bright


@pytest.fixture
def prepared(task):
    images, labels, bright = examples()
    defense = gradveil.defense("recup", epsilon=EPSILON).for_attributes(bright)
    return defense.prepare(task, public=(images, labels), generator=seeded())[0]


def test_no_value_changes_by_more_than_epsilon_and_many_change_by_that(task, prepared):
    images, labels, _ = examples(8, seed=2)
    clean = task.gradients(images, labels)
    sent = prepared.share(task, images, labels)
    change = torch.cat([(sent[name] - value).flatten().abs() for name, value in clean.items()])
    assert float(change.max()) <= EPSILON * 1.001
    assert float((change > 0.9 * EPSILON).double().mean()) > 0.5


def test_a_classifier_that_it_has_not_seen_is_misled_where_as_much_random_noise_does_nothing(task, prepared):
    """The attribute is read by logistic regression on the gradient itself, not on a sketch."""
    images, labels, bright = examples()
    rows = torch.cat([value.flatten(1) for value in task.per_example_gradients(images, labels).values()], 1)
    reader = fit_logistic(rows, torch.nn.functional.one_hot(bright, 2).float(), penalty=1e-3)
    victims, their_labels, truth = examples(60, seed=3)
    gradients = task.per_example_gradients(victims, their_labels)

    def accuracy(updates):
        shown = torch.cat([updates[name].flatten(1) for name in gradients], 1)
        return float((reader(shown).argmax(1) == truth).double().mean())

    signs = {n: torch.randn(value.shape, generator=seeded(4)).sign() for n, value in gradients.items()}
    random = accuracy({name: value + EPSILON * signs[name] for name, value in gradients.items()})
    assert accuracy(gradients) > 0.9
    assert random > 0.85
    assert accuracy(prepared.perturb_clients(gradients)) < random - 0.3


def test_many_clients_together_are_as_they_would_be_alone(task, prepared):
    images, labels, _ = examples(3, seed=2)
    gradients = task.per_example_gradients(images, labels)
    together = prepared.perturb_clients(gradients)
    for client in range(3):
        alone = prepared.perturb({name: value[client] for name, value in gradients.items()})
        for name, value in alone.items():
            torch.testing.assert_close(together[name][client], value)


def test_a_sketch_is_the_sum_that_its_places_say():
    layer = torch.arange(6.0).view(2, 3)
    places = {"w": _drawn_places(layer, seeded())}
    assert places["w"].shape == (2, 3)
    assert 1 <= int(places["w"].abs().min()) <= int(places["w"].abs().max()) <= SKETCH
    expected = torch.zeros(SKETCH)
    for value, place in zip(layer.flatten(), places["w"].flatten().tolist(), strict=True):
        expected[abs(place) - 1] += value if place > 0 else -value
    assert torch.equal(_sketch({"w": layer.view(1, 6)}, places)[0], expected)


def test_without_attributes_it_hides_the_side_of_the_class_mean(task):
    images, labels, bright = examples()
    images[:, :, :, 1:] = 0.5 + 0.3 * labels[:, None, None, None]
    sides = side_of_class_mean(task, images, torch.arange(160) // 2 % 2)
    agreement = float((sides == bright).double().mean())
    assert max(agreement, 1 - agreement) > 0.9
    defense = gradveil.defense("recup", epsilon=EPSILON)
    again = [defense.prepare(task, public=(images, labels), generator=seeded())[0] for _ in range(2)]
    assert again[0] == again[1]
    assert again[0].prepare(task, public=(images[:50], labels[:50]))[0].learned is not None


def test_attributes_that_do_not_fit_are_refused(task, prepared):
    images, labels, bright = examples()
    defense = gradveil.defense("recup")
    with pytest.raises(InputError, match="recup: attributes must be whole numbers from 0, .* of torch.float32"):
        defense.for_attributes(bright.float())
    with pytest.raises(InputError, match="one attribute for each of 160 public examples, got 5; pass those"):
        defense.for_attributes(bright[:5]).prepare(task, public=(images, labels))
    with pytest.raises(InputError, match="recup: prepare needs public="):
        defense.prepare(task)
    with pytest.raises(InputError, match="recup: prepared for layers .* prepare it for this model"):
        prepared.perturb({"w": torch.ones(3)})
    assert "no guarantee" in defense.caveat
