"""Every model: size, shapes, derivatives, seeds and misuse."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, replace_all_batch_norm_modules_, vmap
from torch.nn import functional as F

from gradveil import models
from gradveil.core.errors import InputError, ParameterError, UnknownNameError
from gradveil.core.registry import parse_spec
from gradveil.models.base import REGISTRY, ImageClassifier, takes_text

CIFAR = (3, 32, 32)
MNIST = (1, 28, 28)
NORMALISED = ["convnet", "resnet10", "resnet18", "vgg11"]
ACTIVATIONS = {"relu": nn.ReLU, "leaky-relu": nn.LeakyReLU, "sigmoid": nn.Sigmoid, "gelu": nn.GELU}

# The smallest side each model takes, worked out by hand from its kernels, strides and pools. Batch norm needs
# two values per channel even for a single image, so the last normalised map must be larger than 1 x 1.
SMALLEST = {
    "cnn6": 1,  # all convolutions are padded: one pixel stays one pixel
    "convnet": 9,  # two pools of 3
    "lenet": 1,
    "mlp": 1,
    "mnist-cnn": 1,
    "resnet10": 9,  # three halvings, rounded up, to more than one pixel
    "resnet18": 9,
    "vgg11": 17,  # four halvings before the last normalisation
    "vit": 4,  # one patch
}


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def tiny(name, **parameters):
    """The model on the smallest images it takes (a few patches for vit), in float64, with batch statistics."""
    side = max(8, SMALLEST[name])
    model = models.create(name, input_shape=(1, side, side), classes=3, **parameters).double()
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(2, 1, side, side, generator=generator, dtype=torch.float64)
    return replace_all_batch_norm_modules_(model), images, torch.tensor([0, 2])


def test_names_are_the_expected_ones():
    assert [name for name in models.names() if not takes_text(name)] == sorted(SMALLEST)


@pytest.mark.parametrize(
    ("name", "input_shape", "expected"),
    [
        ("cnn6", CIFAR, 154_256),
        ("convnet", CIFAR, 2_904_970),
        ("lenet", CIFAR, 19_438),
        ("lenet:convolutions=3", CIFAR, 15_826),  # as published
        ("mlp", MNIST, 199_210),
        ("mnist-cnn", MNIST, 119_530),
        ("mnist-cnn:pooling=max", MNIST, 119_530),
        ("resnet10", CIFAR, 4_903_242),
        ("resnet18", CIFAR, 11_173_962),
        ("vgg11", CIFAR, 9_231_114),
        ("vit", CIFAR, 809_354),
    ],
)
def test_parameter_counts(name, input_shape, expected):
    name, parameters = parse_spec(name)
    assert count(models.create(name, input_shape=input_shape, classes=10, **parameters)) == expected


@pytest.mark.parametrize("pooling", ["none", "max"])
def test_every_layer_of_mnist_cnn_has_as_many_parameters_as_the_paper_lists(pooling):
    model = models.create("mnist-cnn", input_shape=MNIST, classes=10, pooling=pooling)
    assert [parameter.numel() for parameter in model.parameters()] == [288, 32, 18_432, 64, 100_352, 32, 320, 10]
    # In its table 1 the convolutions are the modules 0 and 3, so there is a module between activation and convolution.
    positions = [place for place, layer in enumerate(model.features) if isinstance(layer, nn.Conv2d)]
    assert positions == ([0, 3] if pooling == "max" else [0, 2])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cnn6", "12k4s2p2 36k3s2p1 36k3s1p1 36k3s1p1 64k3s2p1 128k3s1p1"),
        (
            "convnet",
            "64k3s1p1 128k3s1p1 128k3s1p1 256k3s1p1 256k3s1p1 256k3s1p1 max3 256k3s1p1 256k3s1p1 max3",
        ),
        ("lenet", "12k5s2p2 12k5s2p2 12k5s1p2 12k5s1p2"),
        ("lenet:convolutions=3", "12k5s2p2 12k5s2p2 12k5s1p2"),
        ("mlp", ""),
        ("mnist-cnn", "32k3s2p1 64k3s2p1"),
        ("mnist-cnn:pooling=max", "32k3s1p1 max2 64k3s1p1 max2"),
        (
            "vgg11",
            "64k3s1p1 max2 128k3s1p1 max2 256k3s1p1 256k3s1p1 max2 512k3s1p1 512k3s1p1 max2 512k3s1p1 512k3s1p1 max2",
        ),
        (
            "resnet10",  # each stage but the first: two convolutions, then the one of the shortcut
            "64k3s1p1 64k3s1p1 64k3s1p1 128k3s2p1 128k3s1p1 128k1s2p0 256k3s2p1 256k3s1p1 256k1s2p0 "
            "512k3s2p1 512k3s1p1 512k1s2p0",
        ),
    ],
)
def test_convolutions_and_pools_match_the_paper(name, expected):
    layers, (name, parameters) = [], parse_spec(name)
    for layer in models.create(name, input_shape=CIFAR, classes=10, **parameters).modules():
        if isinstance(layer, nn.Conv2d):
            layers.append(f"{layer.out_channels}k{layer.kernel_size[0]}s{layer.stride[0]}p{layer.padding[0]}")
        elif isinstance(layer, nn.MaxPool2d):
            layers.append(f"max{layer.kernel_size}")
    assert " ".join(layers) == expected


def test_cnn6_is_the_network_r_gap_describes():
    model = models.create("cnn6", input_shape=CIFAR, classes=10)
    assert model.classifier.in_features == 3200
    assert not any("bias" in name for name, _ in model.named_parameters())
    assert {module.negative_slope for module in model.modules() if isinstance(module, nn.LeakyReLU)} == {0.2}


@pytest.mark.parametrize("side", [28, 32, 64])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", SMALLEST)
def test_every_shape_gives_logits(name, channels, side):
    model = models.create(name, input_shape=(channels, side, side), classes=7)
    assert model.training
    assert model(torch.zeros(1, channels, side, side)).shape == (1, 7)


@pytest.mark.parametrize("name", SMALLEST)
def test_images_need_not_be_square(name):
    assert models.create(name, input_shape=(1, 28, 20), classes=2)(torch.zeros(1, 1, 28, 20)).shape == (1, 2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", SMALLEST)
def test_activation_is_the_requested_one_and_never_in_place(name, activation):
    model = models.create(name, input_shape=CIFAR, classes=10, activation=activation)
    used = [module for module in model.modules() if isinstance(module, tuple(ACTIVATIONS.values()))]
    assert used
    assert {type(module) for module in used} == {ACTIVATIONS[activation]}
    assert not any(getattr(module, "inplace", False) for module in used)


@pytest.mark.parametrize("name", SMALLEST)
def test_there_is_no_dropout(name):
    model, images, _ = tiny(name)
    assert torch.equal(model(images), model(images))
    assert not any("dropout" in type(module).__name__.lower() for module in model.modules())


@pytest.mark.parametrize("name", NORMALISED)
def test_norm_is_the_requested_one(name):
    def build(norm):
        return models.create(name, input_shape=CIFAR, classes=10, norm=norm)

    def kinds(model):
        return {type(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)}

    assert kinds(build("batch")) == {nn.BatchNorm2d}
    assert kinds(build("frozen")) == {nn.BatchNorm2d}
    assert not any(m.training for m in build("frozen").modules() if isinstance(m, nn.BatchNorm2d))
    assert kinds(build("group")) == {nn.GroupNorm}
    assert kinds(build("none")) == set()
    assert count(build("batch")) == count(build("group")) > count(build("none"))


@pytest.mark.parametrize("name", SMALLEST)
def test_uniform_init_draws_every_parameter_from_its_range(name):
    model = models.create(name, input_shape=(1, 20, 20), classes=10, init="uniform")
    values = flat(model)
    assert values.abs().max() <= 0.5
    assert values.mean().item() == pytest.approx(0, abs=0.01)
    assert values.var().item() == pytest.approx(1 / 12, rel=0.02)
    for parameter in model.parameters():
        assert parameter.unique().numel() > 1  # none is left at a constant, not even batch norm's


@pytest.mark.parametrize("init", ["default", "uniform"])
@pytest.mark.parametrize("name", ["lenet", "resnet10", "vit"])
def test_seed_decides_the_weights_and_leaves_the_global_state_alone(name, init):
    def weights(seed):
        model = models.create(name, input_shape=(1, 12, 12), classes=2, seed=seed, init=init)
        return flat(model)

    before = torch.get_rng_state()
    assert torch.equal(weights(5), weights(5))
    assert not torch.equal(weights(5), weights(6))
    assert torch.equal(torch.get_rng_state(), before)


def test_building_leaves_batch_norm_statistics_untouched():
    model = models.create("resnet10", input_shape=CIFAR, classes=10)
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(int(layer.num_batches_tracked) == 0 for layer in layers)
    assert all(torch.equal(layer.running_var, torch.ones_like(layer.running_var)) for layer in layers)


CASES = [(name, {}) for name in SMALLEST] + [
    *((name, {"norm": norm}) for name in ("convnet", "resnet10") for norm in ("group", "none")),
    ("lenet", {"convolutions": 3}),
    ("mnist-cnn", {"pooling": "max"}),
]


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_torch_func_differentiates_it(name, parameters):
    """vmap of grad, grad of grad and jvp of grad agree with the plain loop and with finite differences."""
    model, images, labels = tiny(name, **parameters)
    weights = {key: value.detach() for key, value in model.named_parameters()}

    def loss(weights, images, labels):
        return F.cross_entropy(functional_call(model, weights, (images,)), labels)

    def gradient(images, labels):
        return torch.cat([value.flatten() for value in grad(loss)(weights, images, labels).values()])

    together = vmap(lambda image, label: gradient(image[None], label[None]))(images, labels)
    for row, image, label in zip(together, images, labels, strict=True):
        plain = torch.autograd.grad(F.cross_entropy(model(image[None]), label[None]), list(model.parameters()))
        torch.testing.assert_close(row, torch.cat([value.flatten() for value in plain]))

    direction = torch.randn(images.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    step = 1e-6
    forward, backward = gradient(images + step * direction, labels), gradient(images - step * direction, labels)
    _, slope = jvp(lambda inputs: gradient(inputs, labels), (images,), (direction,))
    difference = (forward - backward) / (2 * step)
    assert (slope - difference).norm() < 1e-4 * slope.norm()

    # d/dx |g(x)|^2 / 2 along the direction, by reverse over reverse, is <g, dg> by forward over reverse.
    half_square = grad(lambda inputs: gradient(inputs, labels).square().sum() / 2)(images)
    expected = (gradient(images, labels) * slope).sum()
    torch.testing.assert_close((half_square * direction).sum(), expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(("name", "smallest"), SMALLEST.items())
def test_smallest_image_works_for_a_batch_of_one(name, smallest):
    model = models.create(name, input_shape=(3, smallest, smallest), classes=10)
    assert model(torch.zeros(1, 3, smallest, smallest)).shape == (1, 10)


@pytest.mark.parametrize(("name", "smallest"), [item for item in SMALLEST.items() if item[1] > 4])
def test_smaller_image_is_refused_with_the_size_needed(name, smallest):
    with pytest.raises(InputError) as caught:
        models.create(name, input_shape=(3, smallest - 1, smallest - 1), classes=10)
    assert str(caught.value) == (
        f"{name}: images must be at least {smallest} x {smallest}, got {smallest - 1} x {smallest - 1}; "
        "use a smaller model (mlp) or larger images"
    )


def test_size_needed_depends_on_the_norm():
    assert models.create("vgg11", input_shape=(3, 4, 4), classes=10, norm="none")(torch.zeros(1, 3, 4, 4)).shape
    with pytest.raises(InputError, match="at least 17 x 17, got 4 x 4"):
        models.create("vgg11", input_shape=(3, 4, 4), classes=10)


@pytest.mark.parametrize("shape", [(1, 30, 28), (1, 28, 30), (1, 2, 2)])
def test_vit_refuses_images_that_do_not_divide_into_patches(shape):
    with pytest.raises(InputError, match=f"multiples of 4, its patch size, got {shape[1]} x {shape[2]}"):
        models.create("vit", input_shape=shape, classes=10)


def test_a_broken_model_raises_its_own_error_instead_of_a_size():
    class Broken(ImageClassifier):
        name = "broken"

    features = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(3, 2, 1), nn.Flatten())
    with pytest.raises(RuntimeError, match="channels"):
        Broken(features, (1, 8, 8), 2, init="default")


@pytest.mark.parametrize("name", SMALLEST)
def test_description_is_complete(name):
    summary, paper, parameters = models.describe(name)
    assert 20 < len(summary) <= 120
    assert summary.endswith(".")
    assert any(character.isdigit() for character in paper)
    assert parameters["init"] == "default"
    assert parameters["activation"] in ACTIVATIONS
    assert ("norm" in parameters) == (name in NORMALISED)
    assert REGISTRY.get(name).name == name
    models.create(name, input_shape=CIFAR, classes=10, **parameters)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"input_shape": (32, 32)},
            r"lenet: input_shape must be \(channels, height, width\).*got \(32, 32\)",
        ),
        ({"input_shape": "3x32"}, "lenet: input_shape must be"),
        ({"input_shape": 32}, "lenet: input_shape must be"),
        ({"input_shape": (3, 0, 32)}, r"lenet: input_shape\[1\] must be a whole number of at least 1, got 0"),
        (
            {"input_shape": (3, 32, 3.5)},
            r"lenet: input_shape\[2\] must be a whole number of at least 1, got 3.5",
        ),
        ({"classes": 0}, "lenet: classes must be a whole number of at least 1, got 0"),
        ({"classes": "10"}, "lenet: classes must be a whole number of at least 1, got '10'"),
        ({"seed": -1}, "lenet: seed must be a whole number of at least 0, got -1"),
        (
            {"activation": "tanh"},
            "lenet: activation must be one of relu, leaky-relu, sigmoid, gelu, got 'tanh'",
        ),
        ({"convolutions": 5}, "lenet: convolutions must be a whole number from 3 to 4, got 5"),
        ({"init": "zeros"}, "lenet: init must be one of default, uniform, got 'zeros'"),
    ],
)
def test_wrong_parameters_are_refused(arguments, message):
    with pytest.raises(ParameterError, match=message):
        models.create("lenet", **({"input_shape": CIFAR, "classes": 10} | arguments))


def test_wrong_norm_is_refused():
    with pytest.raises(ParameterError, match="vgg11: norm must be one of batch, frozen, group, none, got 'layer'"):
        models.create("vgg11", input_shape=CIFAR, classes=10, norm="layer")


def test_unknown_names_are_refused_with_a_suggestion():
    with pytest.raises(UnknownNameError, match="unknown model 'lennet'; did you mean lenet"):
        models.create("lennet", input_shape=CIFAR, classes=10)
    with pytest.raises(UnknownNameError, match="unknown model 'resnet-18'; did you mean resnet18"):
        models.describe("resnet-18")
    with pytest.raises(UnknownNameError, match=r"lenet: unknown parameter 'norm'; it takes: .*activation, init"):
        models.create("lenet", input_shape=CIFAR, classes=10, norm="batch")


def test_a_user_model_is_built_from_its_file(tmp_path):
    file = tmp_path / "user_model.py"
    file.write_text(
        "from torch import nn\n"
        "def build(input_shape, classes, width=3):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] ** 2, width), nn.Linear(width, classes))\n"
        "def number(input_shape, classes):\n"
        "    return 3\n"
    )
    first = models.create(f"{file}@build", input_shape=(1, 4, 4), classes=2, seed=1, width=5)
    again = models.create(f"{file}@build", input_shape=(1, 4, 4), classes=2, seed=1, width=5)
    assert torch.equal(first[1].weight, again[1].weight)
    assert first[1].weight.shape == (5, 16)
    for reference, message in (
        (f"{tmp_path}/missing.py@build", "expected FILE.py@FUNCTION, but there is no file"),
        (f"{file}@nothing", "has no function 'nothing'"),
        (f"{file}@number", "must return a torch module, got int"),
    ):
        with pytest.raises(InputError, match=message):
            models.create(reference, input_shape=(1, 4, 4), classes=2)


def test_images_too_small_to_be_pooled_are_refused():
    with pytest.raises(InputError, match="mnist-cnn: images must be at least 4 x 4, got 3 x 3"):
        models.create("mnist-cnn", input_shape=(1, 3, 3), classes=2, pooling="max")
