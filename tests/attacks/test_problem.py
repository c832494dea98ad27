"""What an attack is given, with inputs and labels of any kind."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradveil
from gradveil.attacks import Problem
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.modality import Image

LOW, HIGH = torch.tensor([-3.0, 0.0, 10.0, -1.0]).double(), torch.tensor([5.0, 1.0, 20.0, 1.0]).double()


@dataclass(frozen=True)
class Grades(Image):
    """Four numbers, each in its own range, which are multiples of one half."""

    name, unit = "grades", "row"

    def start(self, shape, generator, *, dtype, device):
        drawn = torch.rand(tuple(shape), generator=generator, dtype=dtype, device=device)
        return LOW.to(drawn) + (HIGH - LOW).to(drawn) * drawn

    def project(self, inputs):
        return inputs.clamp(LOW.to(inputs), HIGH.to(inputs))

    def decode(self, found):
        return (2 * self.project(found)).round() / 2


ROW = torch.tensor([[2.5, 0.5, 13.0, -1.0]]).double()


def grades_task(head, loss="cross-entropy", classes=3):
    torch.manual_seed(0)
    scale = {"mean": ((LOW + HIGH) / 2).tolist(), "std": ((HIGH - LOW) / 2).tolist()}
    model = nn.Sequential(nn.Linear(4, 16), nn.Sigmoid(), head).double()
    return gradveil.Task(model, loss, input_shape=(4,), classes=classes, modality=Grades(), **scale)


@pytest.mark.parametrize(
    "spec",
    ["dlg", "idlg", "inverting-gradients:tv=0,lr=0.3", "inverting-gradients:tv=0,optimiser=lbfgs,iterations=200"],
)
def test_inputs_of_another_kind_are_searched_in_their_range_and_decoded(spec):
    task = grades_task(nn.Linear(16, 3))
    update = task.gradients(ROW, torch.tensor([1]))
    found = gradveil.attack(spec).reconstruct(
        task, update, gradveil.ThreatModel(), generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(found.inputs[0], ROW)
    assert found.labels.tolist() == [[1]]


@pytest.mark.parametrize("name", ["inverting-gradients", "grad-inversion"])
def test_a_prior_that_does_not_exist_is_refused(name):
    task = grades_task(nn.Linear(16, 3))
    update = task.gradients(ROW, torch.tensor([1]))
    with pytest.raises(ThreatModelError, match=r"got grades inputs of shape \[4\], which have none; use tv=0"):
        gradveil.attack(name).reconstruct(task, update, gradveil.ThreatModel())
    attack = gradveil.attack(name, tv=0.0, iterations=3)
    assert attack.reconstruct(task, update, gradveil.ThreatModel()).inputs.shape == (1, 1, 4)


@pytest.mark.parametrize("name", ["robbing-the-fed", "loki"])
def test_attacks_on_images_refuse_other_inputs(name):
    with pytest.raises(ThreatModelError, match=f"{name}: .*got a task on grades inputs"):
        gradveil.attack(name).modify(grades_task(nn.Linear(16, 3)), public=(ROW, torch.tensor([1])))


POSITIONS = nn.Sequential(nn.Linear(16, 6), nn.Unflatten(1, (3, 2)))


@pytest.mark.parametrize(
    ("task", "labels", "got"),
    [
        (grades_task(nn.Linear(16, 2), F.mse_loss, None), torch.rand(1, 2).double(), "labels that are not classes"),
        (grades_task(POSITIONS), torch.tensor([[2, 0]]), r"one for each of \[2\] positions"),
    ],
)
def test_labels_that_are_not_one_class_are_used_if_known_and_not_inferred(task, labels, got):
    update, attack = task.gradients(ROW, labels), gradveil.attack("idlg")
    known = gradveil.ThreatModel(labels="known", known_labels=labels[None])
    found = attack.reconstruct(task, update, known, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.inputs[0], ROW)
    assert torch.equal(found.labels[0], labels)
    message = f"idlg: labels can be inferred only if every input has one class, got {got}"
    with pytest.raises(ThreatModelError, match=message):
        attack.reconstruct(task, update, gradveil.ThreatModel())
    with pytest.raises(InputError, match="dlg: needs a task with one class per input"):
        gradveil.attack("dlg").reconstruct(task, update, gradveil.ThreatModel())


def test_a_closed_form_needs_class_numbers(tiny_task, tiny_batch):
    probabilities = torch.full((1, 1, 4), 0.25, dtype=torch.float64)
    update = tiny_task.gradients(tiny_batch[0][:1], probabilities[0])
    known = gradveil.ThreatModel(labels="known", known_labels=probabilities)
    with pytest.raises(ThreatModelError, match="r-gap: known_labels must be class numbers, got probabilities"):
        gradveil.attack("r-gap").reconstruct(tiny_task, update, known)
    assert gradveil.attack("idlg", iterations=1).reconstruct(tiny_task, update, known).labels.shape == (1, 1, 4)


def test_public_data_is_converted_for_the_task_or_refused(tiny_task, tiny_batch):
    updates = {name: value[None] for name, value in tiny_task.gradients(*tiny_batch).items()}

    def problem(**granted):
        threat = gradveil.ThreatModel(batch_size=3, **granted)
        return Problem([(tiny_task, updates)], tiny_batch[1][None], threat, torch.Generator())

    inputs, labels = problem(public=(tiny_batch[0].float(), tiny_batch[1])).public
    assert (inputs.dtype, labels.tolist()) == (torch.float64, tiny_batch[1].tolist())
    with pytest.raises(ThreatModelError, match="needs public data, which this threat model does not grant"):
        _ = problem().public
