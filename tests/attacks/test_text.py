"""Attacks and defenses on text, with tiny models: what works on vectors works on text, or refuses in one clear line."""

import pytest
import torch

import gradveil
from gradveil import models
from gradveil.attacks import ATTACKS, Reconstruction
from gradveil.core.errors import GradveilError
from gradveil.modality import Text, Words
from gradveil.modality.text import lengths_of

IDS = torch.tensor([[2, 5, 3, 0], [7, 7, 4, 11], [9, 3, 0, 0], [6, 8, 0, 0]])
LABELS = torch.tensor([0, 1, 1, 0])
LENGTH, WIDTH, VOCABULARY = 4, 16, 12

REFUSED_DEFENSES = {"ats": "transforms work on images", "refiner": "evaluation network"}
QUICK = {
    "dlg": {"iterations": 20},
    "idlg": {"iterations": 20},
    "inverting-gradients": {"iterations": 20, "tv": 0.0},
    "lti": {"directions": 8, "epochs": 2},
    "tag": {"iterations": 20},
    "dager": {},
    "auto": {"seconds": 0.01},
    "grad-inversion": {"iterations": 10, "seeds": 2, "tv": 0.0},
}


def build(withhold=True, name="text-transformer"):
    sizes = {"input_shape": (LENGTH,), "classes": 2, "vocabulary": VOCABULARY, "padding": 0, "width": WIDTH}
    model, text = Text(Words(tuple("abcdefghij"))).bind(models.create(name, **sizes), (LENGTH,), withhold=withhold)
    return gradveil.Task(model, input_shape=(LENGTH, WIDTH), classes=2, modality=text)


@pytest.fixture(scope="module", params=[True, False], ids=["withheld", "shared"])
def task(request):
    return build(request.param)


def attack(attacker, task, rows=(0, 1), **threat):
    text, generator = task.modality, torch.Generator().manual_seed(5)
    public = text.inputs_of(torch.randint(2, VOCABULARY, (40, LENGTH), generator=generator)), torch.arange(40) % 2
    threat = gradveil.ThreatModel(server=attacker.server, public=public if attacker.needs_public else None, **threat)
    sent = attacker.modify(task, public=public, generator=generator)
    fitted = attacker.fit(sent, threat, generator=generator)
    updates = [
        gradveil.defense("none").share(sent, text.inputs_of(IDS[row : row + 1]), LABELS[row : row + 1]) for row in rows
    ]
    return fitted.reconstruct(sent, updates, threat, generator=generator, execution="batch")


@pytest.mark.parametrize("name", gradveil.list_defenses())
def test_every_defense_runs_on_text_or_refuses_in_one_line(name, task):
    inputs = task.modality.inputs_of(IDS)

    def share():
        generator, memory = torch.Generator().manual_seed(1), {}
        defense, sent = gradveil.defense(name).prepare(task, public=(inputs, LABELS), generator=generator)
        announced = None
        if defense.announces:
            announced = defense.announce(sent, inputs, LABELS, generator=generator, memory=memory)
        return sent, defense.share(sent, inputs, LABELS, generator=generator, memory=memory, announced=announced)

    if name in REFUSED_DEFENSES:
        with pytest.raises(GradveilError, match=REFUSED_DEFENSES[name]) as caught:
            share()
        assert "\n" not in str(caught.value)
        return
    sent, update = share()
    assert list(update) == list(sent.parameters)
    assert all(value.isfinite().all() for value in update.values())


@pytest.mark.parametrize(
    "name", [name for name in gradveil.list_attacks() if ATTACKS.get(name).finds is Reconstruction]
)
def test_every_attack_finds_sentences_or_refuses_in_one_line(name, task):
    attacker = gradveil.attack(name, **QUICK.get(name, {}))
    if name not in QUICK:
        with pytest.raises(GradveilError, match=f"^{name}: ") as caught:
            attack(attacker, task)
        assert "\n" not in str(caught.value)
        return
    found = attack(attacker, task)
    assert found.inputs.shape == (2, 1, LENGTH, WIDTH)
    assert torch.equal(task.modality.decode(found.inputs), found.inputs)


def test_idlg_recovers_undefended_sentences(task):
    found = attack(gradveil.attack("idlg", iterations=60), task, rows=range(4))
    assert torch.equal(task.modality.tokens_of(found.inputs[:, 0]), IDS)
    assert found.labels[:, 0].tolist() == LABELS.tolist()


def test_tag_is_stopped_by_noise():
    task = build()
    text, noisy = task.modality, gradveil.defense("gaussian-noise", std=1.0)
    generator = torch.Generator().manual_seed(0)
    update = noisy.share(task, text.inputs_of(IDS[1:2]), LABELS[1:2], generator=generator)
    found = gradveil.attack("tag", iterations=100).reconstruct(
        task, update, gradveil.ThreatModel(), generator=generator
    )
    assert not torch.equal(text.tokens_of(found.inputs[0]), IDS[1:2])


def test_the_weight_of_absolute_values_counts():
    from gradveil.attacks.tag import _absolute_distance

    one, other = {"w": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.5])}, {"w": torch.tensor([0.0, 2.0])}
    assert _absolute_distance(one, other).item() == pytest.approx(5 / 2)


def test_identification_names_the_sentence(task):
    text = task.modality
    candidates = text.inputs_of(IDS)
    updates = [
        gradveil.defense("none").share(task, candidates[row : row + 1], LABELS[row : row + 1]) for row in range(4)
    ]
    found = gradveil.attack("identification").identify(task, updates, (candidates, LABELS), gradveil.ThreatModel())
    assert found.scores.argmax(1).tolist() == [0, 1, 2, 3]


def test_local_steps_are_attacked_too():
    task, local = build(), gradveil.LocalSteps(epochs=2, lr=0.1)
    text = task.modality
    update = gradveil.defense("none").share(task, text.inputs_of(IDS[:1]), LABELS[:1], local=local)
    threat = gradveil.ThreatModel(local=local, labels="known", known_labels=LABELS[None, :1])
    generator = torch.Generator().manual_seed(0)
    found = gradveil.attack("idlg", iterations=60).reconstruct(task, update, threat, generator=generator)
    assert torch.equal(text.tokens_of(found.inputs[0]), IDS[:1])


# -- how long a sentence is -----------------------------------------------------------------------------------------


def test_the_gradient_of_the_positions_tells_the_length(task):
    text = task.modality
    for row, length in enumerate([3, 4, 2, 2]):
        gradients = task.gradients(text.inputs_of(IDS[row : row + 1]), LABELS[row : row + 1])
        start = torch.randn(1, 5, 1, LENGTH, WIDTH)
        begun = text.informed(start, {name: value[None] for name, value in gradients.items()})
        assert torch.equal(begun[..., :length, :], start[..., :length, :])
        assert torch.equal(text.compared(begun)[..., length:], torch.full((1, 5, 1, LENGTH - length), -1))


def test_without_learned_positions_nothing_tells_the_length():
    task = build(name="text-embedding")
    assert task.modality.positions is None
    start = torch.randn(1, 1, LENGTH, WIDTH)
    assert torch.equal(task.modality.informed(start, {}), start)


@pytest.mark.parametrize("noise", [0.0, 1e-4, 0.02, 0.1])
@pytest.mark.parametrize("length", [1, 5, 15, 16])
def test_lengths_are_found_under_noise(noise, length):
    generator = torch.Generator().manual_seed(length)
    rows = torch.rand(8, 16, 32, generator=generator) + 0.2
    rows[:, length:] = 0
    rows += noise * torch.randn(rows.shape, generator=generator)
    assert lengths_of(rows).tolist() == [length] * 8
