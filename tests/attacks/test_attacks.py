import dataclasses
import inspect
import re
import tempfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gradveil
from gradveil import data, metrics, models
from gradveil.attacks import ATTACKS, Reconstruction
from gradveil.attacks._portfolio import Member
from gradveil.attacks.matching.distances import cosine_distance
from gradveil.core import parameters
from gradveil.core.errors import InputError, ParameterError, ThreatModelError, UnknownNameError
from gradveil.models.generator import Generator

FOLDER = tempfile.TemporaryDirectory()  # removed when the tests end
GENERATOR = f"{FOLDER.name}/generator.safetensors"
save_file(Generator(latent=4, side=4, widths=(4,), channels=1).state_dict(), GENERATOR)

QUICK = {
    "dlg": {"iterations": 20},
    "idlg": {"iterations": 20},
    "inverting-gradients": {"iterations": 20},
    "grad-inversion": {"iterations": 20, "seeds": 2},
    "r-gap": {"steps": 20},
    "robbing-the-fed": {"bins": 8},
    "loki": {"clients": 2, "bins": 4},
    "lti": {"directions": 8, "epochs": 2},
    "ggl": {"iterations": 20, "restarts": 2, "generator": GENERATOR},
    "gias": {"iterations": 10, "weight_iterations": 10, "seeds": 2, "generator": GENERATOR},
    "ci-net": {"iterations": 4},
    "mjolnir": {"directions": 8, "epochs": 2, "iterations": 10},
    "identification": {},
    "peel": {"iterations": 5},
    "auto": {"seconds": 0.01},
    "membership": {},
    "attribute": {"directions": 8, "epochs": 2},
    "spear": {"samples": 5000},
    "first-layer": {},
    "april": {},
    "tag": {"iterations": 20},
    "dager": {},
}
ONLY_TEXT = ("dager",)  # tests/attacks/test_dager.py has these checks for it
RECONSTRUCT = [
    name for name in gradveil.list_attacks() if ATTACKS.get(name).finds is Reconstruction and name not in ONLY_TEXT
]


class Patched(nn.Module):
    """Four patches, learned positions, a normalisation and a classifier: the least that april can read."""

    def __init__(self, input_shape, classes):
        super().__init__()
        channels, side, _ = input_shape
        self.patches = nn.Conv2d(channels, 8, side // 2, stride=side // 2)
        self.positions = nn.Parameter(torch.randn(1, 4, 8))
        self.norm, self.classifier = nn.LayerNorm(8), nn.Linear(8, classes)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.classifier(torch.tanh(self.norm(tokens)).mean(1))


def dense(input_shape, classes):
    return models.create("mlp", input_shape=input_shape, classes=classes)


NEEDED = {"spear": dense, "first-layer": dense, "april": Patched}
"""The models of attacks that read particular layers."""


def suited(name, task):
    """The task, with a model that the attack reads."""
    if name not in NEEDED:
        return task
    torch.manual_seed(0)
    return task.with_model(NEEDED[name](task.input_shape, task.classes).to(task.dtype))


@pytest.fixture(autouse=True)
def small_portfolio(monkeypatch):
    """The members of `auto` are tested by themselves."""
    monkeypatch.setattr("gradveil.attacks.auto.PORTFOLIO", (Member("idlg", 20), Member("inverting-gradients", 20)))


def begun(attack, task, **granted):
    """The fitted attack, the task that the clients are sent (an active server changes it) and the threat model."""
    generator = torch.Generator().manual_seed(9)
    images = torch.rand(40, *task.input_shape, generator=generator, dtype=task.dtype)
    public = images, torch.arange(40) % task.classes
    sent = attack.modify(task, public=public, generator=generator)
    threat = gradveil.ThreatModel(server=attack.server, public=public if attack.needs_public else None, **granted)
    return attack.fit(sent, threat, generator=torch.Generator().manual_seed(8)), sent, threat


@pytest.fixture(scope="module")
def mnist_victims():
    """Eight embedded digits and a LeNet as the default audit has them."""
    test = data.load("mnist").test
    images, labels = test.batch(torch.randperm(len(test), generator=torch.Generator().manual_seed(3))[:8])
    model = models.create("lenet", input_shape=(1, 28, 28), classes=10, init="uniform")
    return gradveil.Task(model, input_shape=(1, 28, 28), classes=10), images, labels


def attack_each(attack, task, images, labels, defense="none"):
    defended = gradveil.defense(defense)
    attack, task, threat = begun(attack, task, defense=defended)
    updates = [
        defended.share(task, images[i : i + 1], labels[i : i + 1], generator=torch.Generator().manual_seed(i))
        for i in range(len(images))
    ]
    found = attack.reconstruct(
        task,
        updates,
        threat,
        generator=torch.Generator().manual_seed(0),
        execution="batch",  # "auto" measures, and loop and batch round differently
    )
    return found, metrics.psnr(images, found.inputs[:, 0].clamp(0, 1))


def test_every_registered_attack_has_a_quick_form():
    assert sorted(QUICK) == gradveil.list_attacks()


@pytest.mark.slow
def test_idlg_recovers_undefended_digits_and_is_stopped_by_noise(mnist_victims):
    attack = gradveil.attack("idlg", iterations=300)
    found, psnr = attack_each(attack, *mnist_victims)
    assert found.labels[:, 0].tolist() == mnist_victims[2].tolist()
    assert psnr.median() >= 25
    _, defended = attack_each(attack, *mnist_victims, defense="gaussian-noise:std=0.1")
    assert defended.median() < 12


@pytest.mark.slow
def test_inverting_gradients_recovers_undefended_digits(mnist_victims):
    task, images, labels = mnist_victims
    _, psnr = attack_each(gradveil.attack("inverting-gradients", iterations=400), task, images[:4], labels[:4])
    assert psnr.median() >= 15


@pytest.mark.parametrize("name", RECONSTRUCT)
def test_an_attack_repeats_itself_and_keeps_its_shapes(name, mnist_victims):
    task, images, labels = mnist_victims
    attack, task = gradveil.attack(name, **QUICK[name]), suited(name, task)
    first, _ = attack_each(attack, task, images[:2], labels[:2])
    again, _ = attack_each(attack, task, images[:2], labels[:2])
    assert torch.equal(first.inputs, again.inputs)
    assert first.inputs.shape == (2, 1, 1, 28, 28)
    assert first.labels.shape == (2, 1)
    assert first.loss.shape == first.iterations.shape == (2,)


@pytest.mark.parametrize("name", RECONSTRUCT)
def test_victims_together_equal_victims_alone(name, tiny_task, tiny_batch):
    inputs, labels = tiny_batch
    # Without the total variation: where its kinks make a gradient vanish, the last bit decides the sign.
    smooth = {"tv": 0.0} if name in ("inverting-gradients", "grad-inversion", "ci-net") else {}
    attack, task, threat = begun(gradveil.attack(name, **QUICK[name], **smooth), suited(name, tiny_task))
    updates = [gradveil.defense("none").share(task, inputs[i : i + 1], labels[i : i + 1]) for i in range(3)]

    def run(chosen):
        return attack.reconstruct(task, chosen, threat, generator=torch.Generator().manual_seed(0))

    together, alone = run(updates), run(updates[0])
    # Rounding depends on how many threads multiply, too, and lti's map enlarges it.
    torch.testing.assert_close(together.inputs[0], alone.inputs[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", RECONSTRUCT)
def test_an_attack_is_never_given_the_data(name):
    """It gets the task, the updates and the threat model; none of them holds the victim's images."""
    taken = inspect.signature(gradveil.attack(name).reconstruct).parameters
    assert list(taken) == ["task", "updates", "threat", "generator", "progress", "execution"]


@pytest.mark.parametrize("name", RECONSTRUCT)
def test_a_reconstruction_cannot_depend_on_the_truth(name, tiny_task, tiny_batch):
    """The same update gives the same reconstruction, whatever becomes of the images and labels behind it."""
    images, labels = tiny_batch[0][:1].clone(), tiny_batch[1][:1].clone()
    attack, task, threat = begun(gradveil.attack(name, **QUICK[name]), suited(name, tiny_task))
    update = gradveil.defense("none").share(task, images, labels)
    assert not update.meta.buffers  # only numbers about the client are sent along with the gradient

    def run():
        generator = torch.Generator().manual_seed(0)
        return attack.reconstruct(task, update, threat, generator=generator, execution="loop")

    before = run()
    images.zero_()
    labels.zero_()
    after = run()
    assert torch.equal(before.inputs, after.inputs)
    assert torch.equal(before.labels, after.labels)


def test_batches_are_reconstructed_with_known_labels(tiny_task, tiny_batch):
    inputs, labels = tiny_batch
    update = gradveil.defense("none").share(tiny_task, inputs, labels)
    threat = gradveil.ThreatModel(labels="known", batch_size=3, known_labels=labels[None])
    found = gradveil.attack("idlg", iterations=400).reconstruct(
        tiny_task, update, threat, generator=torch.Generator().manual_seed(0)
    )
    assert found.inputs.shape == (1, 3, 1, 6, 6)
    assert found.loss[0] < 1e-6


def test_dlg_needs_no_labels_to_start_from(generator):
    """It finds them itself, also if none can be inferred, and ignores known labels."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Conv2d(4, 3, 2), nn.Flatten()
    convolution = gradveil.Task(nn.Sequential(*layers).double(), input_shape=(1, 4, 4), classes=3)
    assert convolution.classifier is None
    image, label = torch.rand(1, 1, 4, 4, generator=generator, dtype=torch.float64), torch.tensor([2])
    update = gradveil.defense("none").share(convolution, image, label)
    attack, wrong = gradveil.attack("dlg", iterations=200, restarts=4), torch.tensor([[0]])
    found, misled = (
        attack.reconstruct(convolution, update, threat, generator=torch.Generator().manual_seed(0), execution="loop")
        for threat in (gradveil.ThreatModel(), gradveil.ThreatModel(labels="known", known_labels=wrong))
    )
    assert found.labels.tolist() == misled.labels.tolist() == [[2]]
    assert torch.equal(found.inputs, misled.inputs)

    layers = nn.Flatten(), nn.Linear(16, 3, bias=False)
    unbiased = gradveil.Task(nn.Sequential(*layers), input_shape=(1, 4, 4), classes=3)
    images, labels = torch.rand(2, 1, 4, 4, generator=generator), torch.tensor([0, 1])
    update = gradveil.defense("none").share(unbiased, images, labels)
    found = gradveil.attack("dlg", iterations=1).reconstruct(unbiased, update, gradveil.ThreatModel(batch_size=2))
    assert found.labels.shape == (1, 2)


def test_dlg_does_not_report_ambiguity_of_an_inference_it_does_not_use(tiny_task):
    zeros = gradveil.Update({name: torch.zeros_like(value) for name, value in tiny_task.parameters.items()})
    ambiguous = [
        gradveil.attack(name, iterations=1).reconstruct(tiny_task, zeros, gradveil.ThreatModel()).ambiguous_labels
        for name in ("idlg", "dlg")
    ]
    assert [bool(labels) for labels in ambiguous] == [True, False]


def test_large_batches_with_repeated_labels(generator):
    """128 images at once: shapes, labels and memory; recovering them is another matter."""
    task = gradveil.Task(
        models.create("lenet", input_shape=(1, 28, 28), classes=10), input_shape=(1, 28, 28), classes=10
    )
    images, labels = torch.rand(128, 1, 28, 28, generator=generator), torch.randint(0, 10, (128,), generator=generator)
    update = gradveil.defense("none").share(task, images, labels)
    found = gradveil.attack("idlg", iterations=2).reconstruct(task, update, gradveil.ThreatModel(batch_size=128))
    assert found.inputs.shape == (1, 128, 1, 28, 28)
    miscounted = (found.labels[0].bincount(minlength=10) - labels.bincount(minlength=10)).abs().sum()
    assert miscounted <= 8  # of 128


def test_the_best_restart_is_chosen_by_the_attackers_loss(tiny_task, tiny_batch):
    inputs, labels = tiny_batch
    update = gradveil.defense("none").share(tiny_task, inputs[:1], labels[:1])

    def loss(restarts, seed):
        attack = gradveil.attack("inverting-gradients", iterations=5, restarts=restarts)
        generator, threat = torch.Generator().manual_seed(seed), gradveil.ThreatModel()
        return float(attack.reconstruct(tiny_task, update, threat, generator=generator, execution="loop").loss[0])

    gains = [loss(1, seed) - loss(4, seed) for seed in range(8)]  # the first of four starts is the single one
    assert min(gains) > -1e-12
    assert max(gains) > 1e-6


def test_cosine_distance():
    a = {"w": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0])}
    b = {"w": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0])}
    assert float(cosine_distance(a, b)) == pytest.approx(1 - 0.5**0.5)
    assert float(cosine_distance(a, {"w": torch.zeros(2), "b": torch.zeros(1)})) == 1.0


def test_total_variation_needs_images():
    torch.manual_seed(0)
    task = gradveil.Task(nn.Linear(10, 3), input_shape=(10,), classes=3)
    update = task.gradients(torch.rand(1, 10), torch.tensor([1]))  # a plain dict is an update too
    with pytest.raises(
        ThreatModelError,
        match=r"tv needs inputs with a prior, got image inputs of shape \[10\], which have none; use tv=0",
    ):
        gradveil.attack("inverting-gradients").reconstruct(task, update, gradveil.ThreatModel())
    found = gradveil.attack("inverting-gradients", tv=0.0, iterations=200).reconstruct(
        task, update, gradveil.ThreatModel(), generator=torch.Generator().manual_seed(0)
    )
    assert found.loss[0] < 0.1


def test_repr_builds_the_same_attack_again():
    for name in gradveil.list_attacks():
        attack = gradveil.attack(name)
        assert eval(repr(attack), {"gradveil": gradveil}) == attack
        assert gradveil.attack(str(attack)) == attack


DECLARED = [(name, parameter) for name in ATTACKS.names() for parameter in parameters.declared(ATTACKS.get(name))]


@pytest.mark.parametrize(("name", "parameter"), DECLARED)
def test_parameters_out_of_range_are_refused(name, parameter):
    refused = parameters.declared(ATTACKS.get(name))[parameter].refused
    assert refused
    for value in refused:
        with pytest.raises(ParameterError, match=f"^{name}: {parameter} must be .*, got {re.escape(repr(value))}"):
            gradveil.attack(name, **{parameter: value})


@pytest.mark.parametrize(("name", "parameter"), DECLARED)
def test_parameters_are_frozen_and_described(name, parameter):
    attack = gradveil.attack(name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(attack, parameter, getattr(attack, parameter))
    assert parameters.meanings(type(attack)).get(parameter)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("idgl", UnknownNameError, "unknown attack 'idgl'; did you mean idlg"),
        ("idlg:iterations=0", ParameterError, "idlg: iterations must be a whole number of at least 1, got 0"),
        ("inverting-gradients:lr=0", ParameterError, "inverting-gradients: lr must be a number above 0, got 0"),
        ("inverting-gradients:tv=soft", ParameterError, "tv must be a number of at least 0, got 'soft'"),
    ],
)
def test_bad_attacks_are_refused(spec, error, message):
    with pytest.raises(error, match=message):
        gradveil.attack(spec)


def test_what_the_threat_model_does_not_grant_is_refused(tiny_task, tiny_batch):
    update = gradveil.defense("none").share(tiny_task, *tiny_batch)
    attack = gradveil.attack("idlg")
    with pytest.raises(ThreatModelError, match="has no adaptive form"):
        attack.reconstruct(tiny_task, update, gradveil.ThreatModel(adaptive=True, batch_size=3))
    local = gradveil.LocalSteps()
    stepped = gradveil.defense("none").share(tiny_task, *tiny_batch, local=local)
    with pytest.raises(ThreatModelError, match="comes from 3 images and local steps LocalSteps"):
        attack.reconstruct(tiny_task, stepped, gradveil.ThreatModel(batch_size=3))
    with pytest.raises(ThreatModelError, match="comes from 3 images .* threat model says 1"):
        attack.reconstruct(tiny_task, update, gradveil.ThreatModel())
    threat = gradveil.ThreatModel(labels="known", batch_size=3, known_labels=torch.tensor([[0, 1, 4]]))
    with pytest.raises(InputError, match="known_labels must lie in 0 to 3 .*, got 0 to 4"):
        attack.reconstruct(tiny_task, update, threat)
    with pytest.raises(ParameterError, match="known_labels must be given exactly when labels='known'"):
        gradveil.ThreatModel(labels="known")
    threat = gradveil.ThreatModel(labels="known", batch_size=3, known_labels=torch.tensor([[1]]))
    with pytest.raises(InputError, match=r"known_labels must have shape \[1, 3\]"):
        attack.reconstruct(tiny_task, update, threat)


def test_plain_mappings_are_updates_in_lists_and_rounds_too(tiny_task, tiny_batch):
    plain = dict(tiny_task.gradients(tiny_batch[0][:1], tiny_batch[1][:1]))
    shared = gradveil.Update(plain)
    attack = gradveil.attack("idlg", iterations=2)

    def found(seen, rounds=1):
        threat = gradveil.ThreatModel(rounds=rounds)
        return attack.reconstruct(
            tiny_task, seen, threat, generator=torch.Generator().manual_seed(0), execution="loop"
        ).inputs

    assert torch.equal(found([plain, plain]), found([shared, shared]))
    twice = [gradveil.Rounds([(tiny_task, update), (tiny_task, update)]) for update in (plain, shared)]
    assert torch.equal(found(twice[0], rounds=2), found(twice[1], rounds=2))


def test_updates_that_do_not_fit_are_refused(tiny_task, tiny_batch):
    update = gradveil.defense("none").share(tiny_task, *tiny_batch)
    attack, threat = gradveil.attack("idlg"), gradveil.ThreatModel(batch_size=3)
    with pytest.raises(InputError, match=r"layer '3.bias' should have shape \(4,\), got \(5,\)"):
        attack.reconstruct(tiny_task, gradveil.Update({**update, "3.bias": torch.zeros(5)}), threat)
    with pytest.raises(InputError, match="must be finite, got NaN or Inf in '3.bias'"):
        attack.reconstruct(tiny_task, gradveil.Update({**update, "3.bias": torch.full((4,), torch.nan)}), threat)
    with pytest.raises(InputError, match="expected at least one update, got none"):
        attack.reconstruct(tiny_task, [], threat)


@pytest.mark.parametrize("name", ["dlg", "idlg", "inverting-gradients", "grad-inversion", "ggl", "gias", "ci-net"])
def test_a_muted_layer_does_not_matter(name, tiny_task, tiny_batch):
    """The values of a layer that is left out change nothing; those of another layer do."""
    update = gradveil.defense("none").share(tiny_task, tiny_batch[0][:1], tiny_batch[1][:1])
    other = gradveil.Update({**update, "3.weight": torch.ones_like(update["3.weight"])}, update.meta)
    threat = gradveil.ThreatModel()

    def found(attack, shared):
        generator = torch.Generator().manual_seed(0)
        return attack.reconstruct(tiny_task, shared, threat, generator=generator, execution="loop").inputs

    muted = gradveil.attack(name, **QUICK[name], mute="3.weight")
    assert torch.equal(found(muted, update), found(muted, other))
    unmuted = gradveil.attack(name, **QUICK[name])
    assert not torch.equal(found(unmuted, update), found(unmuted, other))
    both = gradveil.attack(name, **QUICK[name], mute="3.weight|3.bias")
    assert torch.equal(found(both, update), found(gradveil.attack(name, **QUICK[name], mute="3"), update))


def test_muting_beats_soteria(mnist_victims):
    """Soteria spoils one layer; an attacker who leaves it out sees the image."""
    task, images, labels = mnist_victims
    scores = {}
    for defense, mute in (("none", "none"), ("soteria", "none"), ("soteria", "classifier.weight")):
        attack = gradveil.attack("idlg", iterations=120, mute=mute)
        _, psnr = attack_each(attack, task, images[:2], labels[:2], defense=defense)
        scores[defense, mute] = float(psnr.median())
    assert scores["soteria", "none"] < 12
    assert scores["soteria", "classifier.weight"] > scores["soteria", "none"] + 6


def test_layers_to_mute_must_exist(tiny_task, tiny_batch):
    update = gradveil.defense("none").share(tiny_task, tiny_batch[0][:1], tiny_batch[1][:1])
    with pytest.raises(ParameterError, match="idlg: mute must name layers of the model, got '3.weigth'; did you mean"):
        gradveil.attack("idlg", mute="3.weigth").reconstruct(tiny_task, update, gradveil.ThreatModel())
    with pytest.raises(ParameterError, match=r"mute=0\|3 leaves no layer to match"):
        gradveil.attack("idlg", mute="0|3").reconstruct(tiny_task, update, gradveil.ThreatModel())


def test_a_sum_of_clients_is_attacked_as_the_batch_it_is(tiny_task, tiny_batch):
    defense, plain = gradveil.defense("secure-aggregation"), gradveil.defense("none")
    shares = [defense.share(tiny_task, tiny_batch[0][i : i + 1], tiny_batch[1][i : i + 1]) for i in range(3)]
    known = {"labels": "known", "known_labels": tiny_batch[1][None], "batch_size": 3}
    attack, results = gradveil.attack("idlg", iterations=5), []
    for update in (defense.visible(shares)[0], plain.share(tiny_task, *tiny_batch)):
        generator = torch.Generator().manual_seed(0)
        threat = gradveil.ThreatModel(**known)
        results.append(attack.reconstruct(tiny_task, update, threat, generator=generator, execution="loop").inputs)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
