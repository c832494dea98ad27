import pytest
import torch
from torch import nn

import gradveil
from gradveil import models
from gradveil.attacks._labels import infer_labels
from gradveil.core.errors import ThreatModelError


@pytest.mark.parametrize("name", ["lenet", "mlp", "cnn6", "mnist-cnn"])
def test_the_label_of_one_image_is_found(name, generator):
    task = gradveil.Task(models.create(name, input_shape=(1, 28, 28), classes=10), input_shape=(1, 28, 28), classes=10)
    for label in range(10):
        image = torch.rand(1, 1, 28, 28, generator=generator)
        update = gradveil.defense("none").share(task, image, torch.tensor([label]))
        assert infer_labels(task, update, 1).labels.tolist() == [label]


@pytest.mark.parametrize("name", ["lenet", "mlp", "convnet"])
def test_repeated_labels_of_a_batch_are_counted(name, generator):
    shape = (1, 12, 12) if name == "convnet" else (1, 28, 28)  # millions of weights: a small image is enough
    task = gradveil.Task(models.create(name, input_shape=shape, classes=10), input_shape=shape, classes=10)
    right = 0
    for _ in range(20):
        labels = torch.randint(0, 10, (8,), generator=generator)
        update = gradveil.defense("none").share(task, torch.rand(8, *shape, generator=generator), labels)
        right += infer_labels(task, update, 8).labels.tolist() == sorted(labels.tolist())
    assert right >= 18


def test_noise_does_not_hide_one_of_two_labels(generator):
    """Either entry of the bias may be the larger one under noise; row sums of signed features mean nothing."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))
    task, noise = gradveil.Task(model, input_shape=(1, 4, 4), classes=2), gradveil.defense("gaussian-noise", std=0.01)
    for label in 10 * [0, 1]:
        image = torch.rand(1, 1, 4, 4, generator=generator)
        update = noise.share(task, image, torch.tensor([label]), generator=generator)
        assert infer_labels(task, update, 1).labels.tolist() == [label]


@pytest.mark.parametrize("spec", ["dual-pruning:k1=0.05,k2=0.5", "gradient-dropout:keep=0.8,std=0.005"])
def test_one_of_two_labels_that_is_hidden_in_the_bias_is_read_off_the_weights(spec, generator):
    task = gradveil.Task(models.create("mlp", input_shape=(1, 8, 8), classes=2), input_shape=(1, 8, 8), classes=2)
    for label in 10 * [0, 1]:
        image = torch.rand(1, 1, 8, 8, generator=generator)
        update = gradveil.defense(spec).share(task, image, torch.tensor([label]), generator=generator)
        assert infer_labels(task, update, 1).labels.tolist() == [label]


@pytest.mark.parametrize("name", ["lenet", "mlp", "convnet"])
@pytest.mark.parametrize("spec", ["dual-pruning:k1=0.05,k2=0.75", "gradient-dropout:keep=0.8,std=0.005"])
def test_a_label_hidden_in_the_bias_is_read_off_the_weights(name, spec, generator):
    """The bias alone does not reveal it: dual pruning always withholds the label's entry, dropout one time in five."""
    task = gradveil.Task(models.create(name, input_shape=(1, 28, 28), classes=10), input_shape=(1, 28, 28), classes=10)
    assert task.classifier is not None
    assert task.classifier.bias is not None
    defense, by_bias = gradveil.defense(spec), 0
    for label in 3 * list(range(10)):
        image = torch.rand(1, 1, 28, 28, generator=generator)
        update = defense.share(task, image, torch.tensor([label]), generator=generator)
        by_bias += int(update[task.classifier.bias].argmin()) == label
        guess = infer_labels(task, update, 1)
        assert (guess.labels.tolist(), guess.ambiguous) == ([label], False)
    assert by_bias < 30


def test_what_cannot_be_inferred_is_refused():
    task = gradveil.Task(
        models.create("cnn6", input_shape=(3, 32, 32), classes=10), input_shape=(3, 32, 32), classes=10
    )
    update = gradveil.Update(task.parameters)
    with pytest.raises(ThreatModelError, match="a batch needs a classifier with a trained bias"):
        infer_labels(task, update, 4)
    unclassified = gradveil.Task(nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()), input_shape=(1, 4, 4), classes=3)
    with pytest.raises(ThreatModelError, match="no linear classifier"):
        infer_labels(unclassified, gradveil.Update(unclassified.parameters), 1)


def own_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - nn.functional.one_hot(labels, 2)).square().mean()


@pytest.mark.parametrize("loss", ["logistic", own_loss])
@pytest.mark.parametrize("images", [1, 4])
def test_labels_are_inferred_from_cross_entropy_alone(loss, images, generator):
    """With one logit the largest says nothing. Attackers who know the labels or find them are not affected."""
    outputs = 1 if loss == "logistic" else 2
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, outputs))
    task = gradveil.Task(model, loss, input_shape=(1, 4, 4), classes=2)
    labels = torch.ones(images, dtype=torch.long)
    update = gradveil.defense("none").share(task, torch.rand(images, 1, 4, 4, generator=generator), labels)
    attack = gradveil.attack("idlg", iterations=1)
    expected = "gradient of the cross-entropy loss, got (logistic|a custom loss); use ThreatModel.labels='known'"
    with pytest.raises(ThreatModelError, match=f"idlg: labels can be inferred only from the {expected}"):
        attack.reconstruct(task, update, gradveil.ThreatModel(batch_size=images))
    with pytest.raises(ThreatModelError, match=f"label inference: labels can be inferred only from the {expected}"):
        infer_labels(task, update, images)
    known = gradveil.ThreatModel(labels="known", known_labels=labels[None], batch_size=images)
    assert attack.reconstruct(task, update, known).labels.tolist() == [images * [1]]
    gradveil.attack("loki").check_threat(task, gradveil.ThreatModel(server="active", batch_size=images))


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
def test_half_of_a_classifier_is_enough_if_the_other_half_is_frozen(frozen, generator):
    model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
    for name in frozen:
        getattr(model.classifier, name).requires_grad_(False)
    task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
    batch = torch.rand(4, 1, 4, 4, generator=generator), torch.tensor([0, 1, 2, 2])
    update, one = (gradveil.Update(task.gradients(*(part[-size:] for part in batch))) for size in (4, 1))
    if len(frozen) == 2:
        with pytest.raises(ThreatModelError, match="the classifier 'classifier.weight' is frozen.*labels='known'"):
            gradveil.attack("idlg").reconstruct(task, one, gradveil.ThreatModel())
        return
    assert infer_labels(task, one, 1).labels.tolist() == [2]
    if frozen == ("weight",):
        assert infer_labels(task, update, 4).labels.tolist() == [0, 1, 2, 2]
    else:
        with pytest.raises(ThreatModelError, match="a batch needs a classifier with a trained bias, got one"):
            infer_labels(task, update, 4)


@pytest.mark.parametrize("images", [1, 3])
def test_a_single_class_needs_no_inference(images):
    task = gradveil.Task(nn.Sequential(nn.Flatten(), nn.Linear(16, 1)), input_shape=(1, 4, 4), classes=1)
    update = gradveil.Update(task.gradients(torch.rand(images, 1, 4, 4), torch.zeros(images, dtype=torch.long)))
    guess = infer_labels(task, update, images)
    assert (guess.labels.tolist(), guess.ambiguous) == (images * [0], False)


def test_ambiguous_counts_are_reported(generator):
    """Noise on the classifier's gradient makes the counts fractional."""
    task = gradveil.Task(models.create("mlp", input_shape=(1, 8, 8), classes=4), input_shape=(1, 8, 8), classes=4)
    batch = torch.rand(4, 1, 8, 8, generator=generator), torch.tensor([0, 1, 2, 2])
    clear = infer_labels(task, gradveil.Update(task.gradients(*batch)), 4)
    assert not clear.ambiguous
    noisy = gradveil.defense("gaussian-noise:std=1.0").share(task, *batch, generator=generator)
    assert infer_labels(task, noisy, 4).ambiguous
    defense, one = gradveil.defense("gaussian-noise:std=1.0"), (batch[0][:1], batch[1][:1])
    ambiguous = [infer_labels(task, defense.share(task, *one, generator=generator), 1).ambiguous for _ in range(20)]
    assert any(ambiguous)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_steps_are_accounted_for(generator, momentum):
    task = gradveil.Task(models.create("mlp", input_shape=(1, 8, 8), classes=4), input_shape=(1, 8, 8), classes=4)
    batch = torch.rand(4, 1, 8, 8, generator=generator), torch.tensor([0, 1, 2, 2])
    local = gradveil.LocalSteps(epochs=2, batch_size=2, lr=0.01, momentum=momentum)
    update = gradveil.defense("none").share(task, *batch, local=local)
    assert infer_labels(task, update, 4, local).labels.tolist() == [0, 1, 2, 2]
