from itertools import pairwise

import pytest
import torch
from torch import nn

import gradveil
from gradveil import models
from gradveil.models.base import takes_text

SHAPE = (1, 12, 12)


def planted(spec, model="lenet"):
    attack = gradveil.attack(spec)
    task = gradveil.Task(models.create(model, input_shape=SHAPE, classes=4), input_shape=SHAPE, classes=4)
    public = torch.rand(20, 1, 1, 1, generator=torch.Generator().manual_seed(0)) * torch.rand(20, *SHAPE)
    sent = attack.modify(task, public=(public, torch.arange(20) % 4), generator=torch.Generator().manual_seed(1))
    return sent.copy_model()


def kinds(model):
    return {finding.kind for finding in gradveil.inspect(model)}


@pytest.mark.parametrize("init", ["default", "uniform"])
@pytest.mark.parametrize("name", [name for name in models.names() if not takes_text(name)])
def test_no_findings_in_our_own_models(name, init):
    side = 20 if name == "vgg11" else 12
    assert gradveil.inspect(models.create(name, input_shape=(1, side, side), classes=10, init=init)) == []


@pytest.mark.parametrize("model", ["lenet", "mlp"])
@pytest.mark.parametrize("spec", ["robbing-the-fed:bins=16", "robbing-the-fed:bins=16,signal=0.01", "loki:bins=8"])
def test_shipped_blocks_are_found(spec, model):
    assert kinds(planted(spec, model)) & {"parallel-rows", "parallel-columns"}


def test_lokis_kernels_are_found():
    assert "trivial-kernels" in kinds(planted("loki:bins=8"))


@torch.no_grad()
def test_disguised_blocks_are_found():
    model = planted("robbing-the-fed:bins=16")
    block, generator = model.imprint, torch.Generator().manual_seed(2)
    order = torch.randperm(32, generator=generator)
    factors = torch.exp(torch.randn(32, generator=generator)) * 0.05 / block.encode.weight.abs().mean()
    images = torch.rand(3, *SHAPE, generator=generator)
    before = model(images)
    block.encode.weight.copy_((block.encode.weight * factors[:, None])[order])
    block.encode.bias.copy_((block.encode.bias * factors)[order])
    block.decode.weight.copy_((block.decode.weight / factors)[:, order])
    torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-4)  # disguised, but the same function
    found = kinds(model)
    assert "parallel-rows" in found
    renamed = nn.Sequential(nn.Flatten(), block.encode, nn.ReLU(), block.decode, nn.Unflatten(1, SHAPE), model.model)
    assert {"parallel-rows", "linear-before-convolution"} <= kinds(renamed)


@torch.no_grad()
def test_each_finding_by_itself():
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(100, 50)
    assert gradveil.inspect(layer) == []
    layer.weight[3:11] = layer.weight[3] * torch.randn(8, 1, generator=generator)  # some have the opposite sign
    (finding,) = gradveil.inspect(layer)
    assert finding.kind == "parallel-rows"
    assert "8 of its 50 rows" in str(finding)
    layer.weight[10] = torch.randn(100, generator=generator)  # seven are not enough
    assert gradveil.inspect(layer) == []
    assert [f.kind for f in gradveil.inspect(nn.Sequential(nn.Linear(90, 80), nn.Conv1d(3, 4, 5)))] == [
        "linear-before-convolution"
    ]
    large = nn.Linear(100, 50)
    large.weight.mul_(1000)
    assert [f.kind for f in gradveil.inspect(large)] == ["extreme-scale"]
    large.weight.zero_()  # a layer that starts at zero is not unusual
    assert gradveil.inspect(large) == []


def test_what_it_misses():
    """Rows perturbed beyond a cosine of .9 pass: the check looks for known patterns and is not a proof."""
    layer = nn.Linear(400, 32)
    with torch.no_grad():
        layer.weight.copy_(0.05 * (1 + 0.5 * torch.randn(32, 400, generator=torch.Generator().manual_seed(0))))
    assert gradveil.inspect(layer) == []


@torch.no_grad()
def test_silenced_units_are_found():
    """An active server makes gradients zero by biases that no image can outweigh."""
    linear = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    assert kinds(linear) == set()
    linear[1].bias[:4] = -1000.0
    assert kinds(linear) == {"silent-units"}
    deep = models.create("lenet", input_shape=(3, 32, 32), classes=10)
    [*_, last, _] = [module for module in deep.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    last.bias[:] = -1000.0
    assert kinds(deep) == {"silent-units"}


@torch.no_grad()
def test_a_bias_that_just_outweighs_every_image_is_found_and_a_smaller_one_is_not():
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    brightest = model[1].weight.clamp_min(0).sum(1)
    model[1].bias[:] = -1.01 * brightest
    assert kinds(model) == {"silent-units"}
    assert not model[:3](torch.rand(200, 1, 28, 28)).any()
    model[1].bias[:] = -0.99 * brightest
    assert kinds(model) == set()


@torch.no_grad()
@pytest.mark.parametrize("name", ["lenet", "mlp", "mnist-cnn"])
def test_units_that_the_next_layer_ignores_are_found(name):
    model = models.create(name, input_shape=(1, 28, 28), classes=10)
    weighted = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    for module, following in pairwise(weighted):
        inputs_per_unit = following.weight.shape[1] // len(module.weight)
        silenced = min(len(module.weight), -(-256 // module.weight[0].numel()))
        following.weight[:, : silenced * inputs_per_unit] = 0
        if silenced * module.weight[0].numel() >= 256:
            assert "unheard-units" in kinds(model)
        following.weight.normal_(std=0.05)
    assert "unheard-units" not in kinds(model)
