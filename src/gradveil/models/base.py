"""What every model shares: the registry, activations, normalisation, initialisation and the size check."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gradveil.core import checks
from gradveil.core.errors import GradveilError, InputError, ParameterError
from gradveil.core.plugins import neighbours, place_of, run_code
from gradveil.core.registry import Registry, parameter_names

REGISTRY = Registry[nn.Module]("model")

# Never in place: an overwritten input breaks vmap and second derivatives.
ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "relu": nn.ReLU,
    "leaky-relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
}
INITS = ("default", "uniform")
NORMS = ("batch", "frozen", "group", "none")
GROUPS = 32  # of group normalisation, the default of its paper (Wu & He, ECCV 2018)

# No model here shrinks an image by more than 32; one that needs a larger side than this is broken.
_LARGEST_MINIMUM = 128


class Description(NamedTuple):
    """One line of `gradveil list`.

    Args:
        summary: what the model is, in one line.
        paper: where it comes from.
        parameters: the parameters that `create` takes for it, with their defaults.

    Example:
        >>> summary, paper, parameters = describe("lenet")
        >>> paper
        'Zhu et al., Deep Leakage from Gradients, NeurIPS 2019'
    """

    summary: str
    paper: str
    parameters: dict[str, Any]


class ImageClassifier(nn.Module):
    """A feature extractor and a linear layer from its output to the logits: the structure of every model here.

    A model is a registered subclass that names its `paper` and builds its features. Its keyword-only
    parameters are those that `create` takes for it; `gradveil list` prints the first line of its docstring.

    Args:
        features: turns a batch of images into a batch of vectors.
        input_shape: channels, height and width of one image.
        classes: the number of logits.
        init: "default" keeps torch's initial values, "uniform" draws every parameter from uniform(-.5, .5)
            as the DLG paper does (Zhu et al., NeurIPS 2019).
        bias: whether the linear layer has a bias.

    Example:
        >>> class Linear(ImageClassifier):
        ...     name = "linear"
        >>> Linear(nn.Flatten(), (1, 8, 8), classes=2, init="default").classifier
        Linear(in_features=64, out_features=2, bias=True)
    """

    name: ClassVar[str]
    paper: ClassVar[str]

    def __init__(
        self, features: nn.Module, input_shape: Sequence[int], classes: int, *, init: str, bias: bool = True
    ) -> None:
        super().__init__()
        checks.integer(self.name, "classes", classes, low=1)
        checks.choice(self.name, "init", init, INITS)
        self.features = features
        self.classifier = nn.Linear(self._checked_feature_count(input_shape), classes, bias=bias)
        if init == "uniform":
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -0.5, 0.5)

    def forward(self, images: Tensor) -> Tensor:
        """The logits [N, classes] of images [N, C, H, W]."""
        logits: Tensor = self.classifier(self.features(images))
        return logits

    def _checked_feature_count(self, input_shape: Sequence[int]) -> int:
        channels, height, width = image_shape(self.name, input_shape)
        try:
            return _feature_count(self.features, channels, height, width)
        except (RuntimeError, ValueError) as error:
            for side in range(1, _LARGEST_MINIMUM + 1):
                if _accepts(self.features, channels, side):
                    raise InputError(
                        f"{self.name}: images must be at least {side} x {side}, got {height} x {width}; "
                        "use a smaller model (mlp) or larger images"
                    ) from error
            raise


class NormalisedClassifier(ImageClassifier, ABC):
    """An image classifier made of convolutions with normalisation; a subclass builds them in `layers`.

    Args:
        input_shape: channels, height and width of one image.
        classes: the number of logits.
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".
        norm: "batch", "frozen" (batch norm with fixed statistics), "group" (32 groups) or "none".
        init: "default" (torch's) or "uniform" (every parameter from uniform(-.5, .5)).

    Example:
        >>> class Small(NormalisedClassifier):
        ...     name = "small"
        ...     def layers(self, channels, activation, norm):
        ...         return convolution(self.name, channels, 64, norm)
        >>> Small((1, 8, 8), 2).classifier
        Linear(in_features=4096, out_features=2, bias=True)
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        *,
        activation: str = "relu",
        norm: str = "batch",
        init: str = "default",
    ) -> None:
        channels, _, _ = image_shape(self.name, input_shape)
        features = nn.Sequential(*self.layers(channels, activation, norm), nn.Flatten())
        super().__init__(features, input_shape, classes, init=init)

    @abstractmethod
    def layers(self, channels: int, activation: str, norm: str) -> list[nn.Module]:
        """The layers that turn images with `channels` channels into features, without the final flattening."""


def create(name: str, /, *, input_shape: Sequence[int], classes: int, seed: int = 0, **parameters: object) -> nn.Module:
    """Build the model called `name` in training mode; the global random state is left as it was.

    Args:
        name: one of `names()`, or ``FILE.py@FUNCTION`` for a model of your own: the file is run as Python code with
            the caller's privileges and may import the modules next to it; the function, which must return the module,
            is called with `input_shape`, `classes` and the parameters (for text, also with `vocabulary` and
            `padding`). Never name a file that you would not run.
        input_shape: channels, height and width of one image; the number of positions of a text.
        classes: the number of logits.
        seed: seed of the initial weights; the same seed gives the same weights.
        parameters: parameters of the model, for example ``activation="relu"`` or ``init="uniform"``; see `describe`.
            A model of text also needs `vocabulary` and `padding`.

    >>> model = create("lenet", input_shape=(3, 32, 32), classes=10, init="uniform")
    >>> sum(parameter.numel() for parameter in model.parameters())
    19438
    """
    seed = checks.integer(name, "seed", seed, low=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if "@" in name or name.endswith(".py"):
            return _create_from_file(name, input_shape=input_shape, classes=classes, **parameters)
        _check_takes(name, input_shape, text="vocabulary" in parameters)
        return REGISTRY.create(name, input_shape=input_shape, classes=classes, **parameters)


def names() -> list[str]:
    """The names of all models, sorted."""
    return REGISTRY.names()


def describe(name: str) -> Description:
    """What the model called `name` is, where it comes from and which parameters `create` takes for it.

    >>> describe("lenet").parameters
    {'convolutions': 4, 'activation': 'sigmoid', 'init': 'default'}
    """
    factory: Any = REGISTRY.get(name)
    summary, _, _ = (inspect.getdoc(factory) or "").partition("\n")
    parameters = {
        parameter.name: parameter.default
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return Description(summary, factory.paper, parameters)


def _check_takes(name: str, input_shape: Sequence[int], *, text: bool) -> None:
    """Refuse text for a model of images, and the other way round."""
    if text == takes_text(name):
        return
    others = ", ".join(other for other in names() if takes_text(other) == text)
    got = "token ids" if text else f"inputs of shape {tuple(input_shape)} and no vocabulary"
    raise InputError(f"{name}: expected {'images' if text else 'text'}, got {got}; use one of {others}, or other data")


def takes_text(name: str) -> bool:
    """Whether the model called `name` takes token ids.

    >>> takes_text("text-transformer"), takes_text("lenet")
    (True, False)
    """
    return "vocabulary" in parameter_names(REGISTRY.get(name))


def _create_from_file(reference: str, **arguments: object) -> nn.Module:
    """Run a user's Python file, which may do anything, and call its function."""
    path, separator, function = reference.rpartition("@")
    if not separator:
        raise InputError(f"{reference}: expected FILE.py@FUNCTION, got no function; write {reference}@NAME")
    if not Path(path).is_file():
        raise InputError(f"{reference}: expected FILE.py@FUNCTION, but there is no file {path!r}")
    if Path(path).suffix != ".py":
        raise InputError(f"{reference}: expected FILE.py@FUNCTION, but {path!r} is not a Python file")
    try:
        with neighbours(Path(path)):
            module = run_code(Path(path).read_bytes(), Path(path), "gradveil_user_model")
            factory = getattr(module, function, None)
            if not callable(factory):
                raise InputError(f"{reference}: {path} has no function {function!r}")
            model = factory(**arguments)
    except GradveilError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{reference}: expected a model, but {place_of(error) or path} raises {type(error).__name__}: {reason}; "
            "correct that file"
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{reference}: {function} must return a torch module, got {type(model).__name__}")
    return model


def image_shape(owner: str, input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return `input_shape` as (channels, height, width) if it is one."""
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str) or len(input_shape) != 3:
        raise ParameterError(
            f"{owner}: input_shape must be (channels, height, width) such as (3, 32, 32), got {input_shape!r}"
        )
    channels, height, width = (
        checks.integer(owner, f"input_shape[{position}]", size, low=1) for position, size in enumerate(input_shape)
    )
    return channels, height, width


def activation_layer(owner: str, activation: str, *, slope: float = 0.01) -> nn.Module:
    """The activation called `activation`; `slope` is the negative slope of LeakyReLU."""
    checks.choice(owner, "activation", activation, ACTIVATIONS)
    return nn.LeakyReLU(slope) if activation == "leaky-relu" else ACTIVATIONS[activation]()


def norm_layer(owner: str, norm: str, channels: int) -> nn.Module:
    """The normalisation called `norm` over `channels` channels."""
    chosen = checks.choice(owner, "norm", norm, NORMS)
    if chosen in ("batch", "frozen"):
        # In eval mode it uses its running statistics and does not update them, as in fine-tuning.
        return nn.BatchNorm2d(channels).train(chosen == "batch")
    return nn.GroupNorm(GROUPS, channels) if chosen == "group" else nn.Identity()


def convolution(
    owner: str, channels: int, width: int, norm: str, *, kernel: int = 3, stride: int = 1, bias: bool = True
) -> list[nn.Module]:
    """A convolution to `width` channels that keeps the image size (apart from its stride), and normalisation."""
    return [
        nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2, bias=bias),
        norm_layer(owner, norm, width),
    ]


@torch.no_grad()
def _feature_count(features: nn.Module, channels: int, height: int, width: int) -> int:
    """How many numbers `features` outputs for one image, found by running it on one."""
    # Batch norm would write the statistics of this image into its buffers, so it gets copies.
    buffers = {name: buffer.clone() for name, buffer in features.named_buffers()}
    image = torch.zeros(1, channels, height, width)
    output: Tensor = torch.func.functional_call(features, buffers, (image,))
    return output.numel()


def _accepts(features: nn.Module, channels: int, side: int) -> bool:
    # The layers themselves decide: kernels and pools larger than their input raise an error, and so does batch norm
    # over a single value, which remains of one image shrunk to one pixel.
    try:
        _feature_count(features, channels, side, side)
    except (RuntimeError, ValueError):
        return False
    return True
