import pytest
import torch
from torch import nn

import gradveil
from gradveil import models
from gradveil.attacks.april import find_patches
from gradveil.core.errors import InputError, ThreatModelError


def vit(dtype):
    model = models.create("vit", input_shape=(3, 16, 16), classes=10).to(dtype)
    return gradveil.Task(model, input_shape=(3, 16, 16), classes=10, mean=3 * (0.4,), std=3 * (0.2,))


def attacked(task, defense="none"):
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.rand(2, 3, 16, 16, generator=generator, dtype=task.dtype), torch.tensor([3, 8])
    defended = gradveil.defense(defense)
    updates = [
        defended.share(task, images[i : i + 1], labels[i : i + 1], generator=torch.Generator().manual_seed(i))
        for i in range(2)
    ]
    found = gradveil.attack("april").reconstruct(task, updates, gradveil.ThreatModel(defense=defended))
    return found, (found.inputs[:, 0] - images).square().flatten(1).mean(1).sqrt(), labels


def test_images_are_recovered_exactly():
    """An error of 1e-9 is 180 dB, one of 1e-4 is 80 dB."""
    for dtype, largest, loss in ((torch.float64, 1e-9, 1e-9), (torch.float32, 1e-4, 1e-3)):
        found, error, labels = attacked(vit(dtype))
        assert error.max() < largest
        assert found.loss.max() < loss
        assert torch.equal(found.labels[:, 0], labels)


def test_noise_does_not_blow_up_and_is_told_by_the_loss():
    found, error, _ = attacked(vit(torch.float64), "gaussian-noise:std=0.01")
    assert error.max() < 1
    assert found.loss.min() > 0.1


def test_the_parts_are_found_by_what_they_do():
    patches = find_patches("april", vit(torch.float32))
    assert (patches.embedding, patches.positions, patches.first) == ("features.0.patches", "features.0.positions", 1)
    assert (patches.count, patches.side) == (16, (4, 4))


class Patched(nn.Module):
    def __init__(self, width, positions):
        super().__init__()
        self.patches, self.last = nn.Conv2d(1, width, 2, stride=2), nn.Linear(width, 3)
        self.positions = nn.Parameter(torch.randn(1, 16, width), requires_grad=positions)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.last(torch.tanh(tokens + self.positions).mean(1))


def test_it_refuses_models_without_these_parts_and_batches(tiny_task):
    attack, threat = gradveil.attack("april"), gradveil.ThreatModel()
    with pytest.raises(InputError, match="expected a model that cuts the image into patches"):
        attack.check_threat(tiny_task, threat)
    with pytest.raises(InputError, match="expected learned positions that are added to the patches"):
        attack.check_threat(gradveil.Task(Patched(20, False), input_shape=(1, 8, 8), classes=3), threat)
    with pytest.raises(InputError, match="16 patches have more values than .* an embedding of width 10"):
        attack.check_threat(gradveil.Task(Patched(10, True), input_shape=(1, 8, 8), classes=3), threat)
    attack.check_threat(gradveil.Task(Patched(16, True), input_shape=(1, 8, 8), classes=3), threat)
    with pytest.raises(ThreatModelError, match="reads single images, got batch_size=2"):
        attack.check_threat(vit(torch.float32), gradveil.ThreatModel(batch_size=2))
