"""What an update says about a property that is not the label."""

import pytest
import torch
from torch import nn

import gradveil
from gradveil.attacks.attribute import attribute_rates
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.metrics import attribute_summary

PUBLIC, VICTIMS = 240, 60


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def task():
    torch.manual_seed(0)
    return gradveil.Task(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), input_shape=(1, 4, 4), classes=2)


def examples(follows=0.5):
    """Images, labels, and whether the left column is bright, which agrees with the label with probability `follows`."""
    count = PUBLIC + VICTIMS
    images, labels = torch.rand(count, 1, 4, 4, generator=seeded(1)), torch.arange(count) % 2
    agrees = torch.rand(count, generator=seeded(2)) < follows
    bright = torch.where(agrees, labels, 1 - labels)
    images[..., 0] *= 0.1 + 0.9 * bright[:, None, None]
    return images, labels, bright


def attacked(task, data, defense="none", adaptive=False, attack="attribute:hidden=32", batch_size=1):
    images, labels, attributes = data
    public, rest = slice(0, PUBLIC), [part[PUBLIC:] for part in (images, labels)]
    defense, prepared = gradveil.defense(defense).prepare(
        task, public=(images[public], labels[public]), generator=seeded()
    )
    granted = {"public": (images[public], labels[public]), "public_attributes": attributes[public]}
    groups = torch.arange(VICTIMS).view(-1, batch_size)
    threat = gradveil.ThreatModel(
        labels="known",
        known_labels=rest[1][groups],
        batch_size=batch_size,
        adaptive=adaptive,
        defense=defense,
        **granted,
    )
    updates = [
        defense.share(prepared, *(part[places] for part in rest), generator=seeded(number), memory={})
        for number, places in enumerate(groups)
    ]
    fitted = gradveil.attack(attack).fit(prepared, threat, generator=seeded(3))
    return fitted.infer(prepared, updates, threat)


def test_an_attribute_is_read_from_the_update_and_not_from_the_label(task):
    data = examples()
    found = attacked(task, data)
    assert found.scores.shape == found.baseline.shape == (VICTIMS, 2)
    assert found.seconds > 0
    torch.testing.assert_close(found.scores.exp().sum(1), torch.ones(VICTIMS, dtype=torch.float64), rtol=0, atol=1e-5)
    figures = attribute_summary(found.scores, found.baseline, data[2][PUBLIC:])
    assert figures["accuracy"].value > 0.9
    assert figures["lift"].low > 0.2
    assert figures["bits"].low > 0.3


def test_what_the_label_says_is_not_counted_as_leaked(task):
    """Under noise that hides everything, the attribute is still guessed as well as from the label, and no better."""
    data = examples(follows=0.85)
    found = attacked(task, data, "gaussian-noise:std=100", adaptive=True)
    figures = attribute_summary(found.scores, found.baseline, data[2][PUBLIC:])
    assert figures["baseline"].value > 0.7
    assert figures["accuracy"].value == pytest.approx(figures["baseline"].value, abs=0.1)
    assert figures["lift"].low <= 0
    assert figures["bits"].value < 0.1


def test_an_adaptive_attacker_learns_from_perturbed_updates(task):
    data, results = examples(), []
    for adaptive in (False, True):
        found = attacked(task, data, "recup:epsilon=0.3", adaptive)
        results.append(attribute_summary(found.scores, found.baseline, data[2][PUBLIC:])["accuracy"].value)
    assert results[1] > results[0]
    assert results[1] > 0.8


def test_a_batch_has_shares_of_attributes(task):
    data = examples()
    found = attacked(task, data, batch_size=2)
    shares = data[2][PUBLIC:].view(-1, 2).double().mean(1)
    unmixed = shares != 0.5
    assert int(unmixed.sum()) > 5
    assert float((found.guesses == shares)[unmixed].double().mean()) > 0.75
    torch.testing.assert_close(found.baseline.exp().sum(1), torch.ones(VICTIMS // 2, dtype=torch.float64))


def test_the_network_reads_what_depends_on_the_label(task):
    """The error at the output changes its sign with the label, so one linear map cannot serve both classes."""
    data = examples()
    found = [attacked(task, data, attack=f"attribute:form={form},hidden=32") for form in ("linear", "network")]
    linear, network = (float((each.guesses == data[2][PUBLIC:]).double().mean()) for each in found)
    assert network > linear


def test_rates_given_the_label_by_counting():
    kinds, attributes = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([0, 2, 2, 1, 1, 0])
    table = attribute_rates(kinds, attributes, 4, 3)
    for kind in range(4):
        for attribute in range(3):
            here = int(((kinds == kind) & (attributes == attribute)).sum())
            assert float(table[kind, attribute]) == pytest.approx((here + 0.5) / (int((kinds == kind).sum()) + 1.5))


def test_what_was_learned_is_kept_and_depends_on_the_attributes(task, tmp_path):
    images, labels, attributes = (part[:60] for part in examples())
    attack = gradveil.attack("attribute", hidden=8, epochs=2)
    fitted = []
    for known in (attributes, attributes, 1 - attributes):
        threat = gradveil.ThreatModel(public=(images, labels), public_attributes=known)
        fitted.append(attack.fit(task, threat, generator=seeded(), cache=tmp_path))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert fitted[0] == fitted[1] != fitted[2]


def test_bad_input_is_refused(task):
    images, labels, attributes = (part[:60] for part in examples())
    attack, update = gradveil.attack("attribute", hidden=8, epochs=2), task.gradients(images[:1], labels[:1])
    with pytest.raises(ThreatModelError, match="attribute: needs public data"):
        attack.fit(task, gradveil.ThreatModel())
    with pytest.raises(ThreatModelError, match="needs the attribute of every public example.*public_attributes="):
        attack.fit(task, gradveil.ThreatModel(public=(images, labels)))
    for wrong in (attributes[:5], attributes.float(), attributes - 1):
        with pytest.raises(InputError, match="public_attributes must be 60 whole numbers from 0"):
            attack.fit(task, gradveil.ThreatModel(public=(images, labels), public_attributes=wrong))
    with pytest.raises(InputError, match="expected public examples with two attributes or more, got only 0"):
        attack.fit(task, gradveil.ThreatModel(public=(images, labels), public_attributes=0 * attributes))
    threat = gradveil.ThreatModel(public=(images, labels), public_attributes=attributes)
    with pytest.raises(ThreatModelError, match="attribute: must be fitted first"):
        attack.infer(task, update, threat)
    fitted = attack.fit(task, threat, generator=seeded())
    other = task.with_parameters({name: 2 * value for name, value in task.parameters.items()})
    with pytest.raises(ThreatModelError, match="was fitted for batches of 1.*use attack = attack.fit"):
        fitted.infer(other, update, threat)
    with pytest.raises(
        ThreatModelError, match="attribute: has no reconstruction to return, it finds attributes; use inf"
    ):
        fitted.reconstruct(task, update, threat)
