"""Generators: networks that turn random latent vectors into images of the kind they were trained on."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gradveil.core import checks
from gradveil.core.errors import DataError
from gradveil.core.tensors import first_mismatch
from gradveil.data import catalog
from gradveil.data.npz import read_arrays
from gradveil.data.places import find as find_in_catalogue
from gradveil.data.places import missing, search_folders

FACES = "face-generator"
"""The name of the face generator in the catalogue."""
FOLDER = "generators"
"""Where scripts/train_generator.py puts generators, and where they are looked up: here, or below a data folder."""

_KERNEL = 4
_LARGEST_SIDE = 1024
_FACE_LATENT, _FACE_WIDTHS, _FACE_CHANNELS = 100, (512, 256, 128, 64), 3
_NORM_EPSILON = 1e-5


class Generator(nn.Module):
    r"""Turns latent vectors, drawn from a standard normal distribution, into images in [0, 1].

    A linear layer turns the latent vector into `widths[0]` planes of `side` x `side`; each transposed convolution
    (kernel 4, stride 2) doubles the side, with ReLUs between them and a sigmoid at the end. If there are `classes`,
    each has its own bias in the linear layer: the generator then draws images of a given class.

    There is no normalisation, so that images do not depend on each other and weights can be searched by functional
    transforms; trained batch norms are folded into the weights (see `load`).

    Args:
        latent: length of a latent vector.
        side: height and width of the first planes.
        widths: numbers of planes before each transposed convolution.
        channels: channels of the images.
        classes: number of classes; 0: the generator takes no labels.

    References:
        Radford, Metz & Chintala, Unsupervised Representation Learning with Deep Convolutional Generative Adversarial
        Networks, ICLR 2016, for the layers.

    Example:
        >>> generator = Generator(latent=16, side=7, widths=(8, 4), channels=1, classes=10)
        >>> generator.image_shape, generator(torch.zeros(2, 16), torch.tensor([3, 7])).shape
        ((1, 28, 28), torch.Size([2, 1, 28, 28]))
    """

    def __init__(self, *, latent: int, side: int, widths: Sequence[int], channels: int, classes: int = 0) -> None:
        super().__init__()
        self.latent = checks.integer("generator", "latent", latent, low=1)
        self.side = checks.integer("generator", "side", side, low=1)
        self.classes = checks.integer("generator", "classes", classes, low=0)
        self.widths = tuple(checks.integer("generator", "widths", width, low=1) for width in widths)
        last_side = self.side * 2 ** checks.integer("generator", "number of widths", len(widths), low=1, high=10)
        checks.integer("generator", "height of the images", last_side, high=_LARGEST_SIDE)
        self.image_shape = (checks.integer("generator", "channels", channels, low=1), last_side, last_side)
        self.first = nn.Linear(latent, self.widths[0] * side**2)
        self.biases = nn.Parameter(torch.randn(classes, self.widths[0] * side**2)) if classes else None
        pairs = zip(self.widths, (*self.widths[1:], channels), strict=True)
        self.upsample = nn.ModuleList(
            nn.ConvTranspose2d(before, after, _KERNEL, stride=2, padding=1) for before, after in pairs
        )

    def forward(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        """Images [N, C, H, W] for latent vectors [N, latent] and, if there are classes, labels [N]."""
        planes: Tensor = self.first(latents)
        if self.biases is not None:
            assert labels is not None
            planes = planes + self.biases[labels]
        planes = planes.reshape(-1, self.widths[0], self.side, self.side)
        for convolution in self.upsample:
            planes = convolution(planes.relu())
        return planes.sigmoid()


def find(name: str) -> Path:
    """The file of the generator called `name`, or named by its path.

    Args:
        name: ``"face-generator"``, a data set for which scripts/train_generator.py made one, or a file.
    """
    if name == FACES:
        path = find_in_catalogue(FACES)
        if path is None:
            raise missing(FACES)
        return path
    if Path(name).suffix in (".safetensors", ".npz"):
        return Path(name)
    file = Path(FOLDER) / f"{name}.safetensors"
    folders = [Path(), *search_folders()]
    for folder in folders:
        if (folder / file).exists():
            return folder / file
    places = ", ".join(str(folder.absolute()) for folder in folders)
    remedy = (
        f"train it: python scripts/train_generator.py {name}" if name in catalog.names() else "give the file itself"
    )
    raise DataError(f"generator {name!r}: expected {file} in one of {places}, found none; {remedy}")


def load(path: Path) -> Generator:
    """Read a generator: the safetensors of scripts/train_generator.py, or the npz of the face generator.

    The architecture follows from the shapes of the tensors. Anything but the tensors of a `Generator`, all finite, is
    refused. The face generator's batch norms are folded into its convolutions, and its tanh becomes a sigmoid:
    (1 + tanh(a)) / 2 = sigmoid(2 a).

    Args:
        path: the file, see `find`.
    """
    try:
        tensors = _face_tensors(path) if path.suffix == ".npz" else _own_tensors(path)
        generator = _untrained(tensors)
    except (SafetensorError, DataError, OSError, ValueError, KeyError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else error
        raise DataError(
            f"{path}: expected the tensors of a generator, but reading them failed ({reason}); {_remedy(path)}"
        ) from error
    for name, value in tensors.items():
        if not value.is_floating_point() or not value.isfinite().all():
            raise DataError(f"{path}: expected finite numbers, got others in {name!r}; {_remedy(path)}")
    generator.load_state_dict({name: value.float() for name, value in tensors.items()}, assign=True)
    return generator.requires_grad_(False).eval()


def _remedy(path: Path) -> str:
    if path.suffix == ".npz":
        return f"get the right file: {catalog.entry(FACES).how}"
    return "train it: python scripts/train_generator.py DATASET"


def _own_tensors(path: Path) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise OSError("there is no such file")
    tensors: Mapping[str, Tensor] = load_file(path)
    return tensors


def _face_tensors(path: Path) -> Mapping[str, Tensor]:
    """The arrays of a DCGAN with batch norm, numbered as in a `Sequential`, as the tensors of a `Generator`."""
    layers = len(_FACE_WIDTHS) + 1
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (before, after) in enumerate(
        zip((_FACE_LATENT, *_FACE_WIDTHS), (*_FACE_WIDTHS, _FACE_CHANNELS), strict=True)
    ):
        shapes[f"{3 * layer}.weight"] = (before, after, _KERNEL, _KERNEL)
        if layer < layers - 1:
            norms = ("weight", "bias", "running_mean", "running_var")
            shapes |= {f"{3 * layer + 1}.{name}": (after,) for name in norms}
    arrays = read_arrays(path, shapes)
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != shape or arrays[name].dtype.kind != "f":
            got = f"{arrays[name].dtype} of shape {arrays[name].shape}" if name in arrays else "none"
            raise ValueError(f"got {got} where floats of shape {shape} are expected in {name!r}")
    values = {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        weight, norm = values[f"{3 * layer}.weight"], f"{3 * layer + 1}"
        if layer < layers - 1:
            scale = values[f"{norm}.weight"] / (values[f"{norm}.running_var"] + _NORM_EPSILON).sqrt()
            bias = values[f"{norm}.bias"] - values[f"{norm}.running_mean"] * scale
            weight = weight * scale[:, None, None]
        else:
            weight, bias = 2 * weight, torch.zeros(_FACE_CHANNELS)
        if layer == 0:
            # On a single pixel, a transposed convolution is a linear layer.
            tensors["first.weight"] = weight.flatten(1).T.contiguous()
            tensors["first.bias"] = bias.repeat_interleave(_KERNEL**2)
        else:
            tensors[f"upsample.{layer - 1}.weight"], tensors[f"upsample.{layer - 1}.bias"] = weight, bias
    return tensors


def _untrained(tensors: Mapping[str, Tensor]) -> Generator:
    """A generator without storage whose tensors have these names and shapes."""
    convolutions = [tensors[f"upsample.{n}.weight"] for n in range(sum("upsample" in name for name in tensors) // 2)]
    rows, latent = _shape("first.weight", tensors["first.weight"], 2)
    shapes = [_shape(f"upsample.{n}.weight", weight, 4) for n, weight in enumerate(convolutions)]
    if not shapes or not shapes[0][0]:
        raise KeyError("upsample.0.weight")
    side = math.isqrt(rows // shapes[0][0])
    classes = _shape("biases", tensors["biases"], 2)[0] if "biases" in tensors else 0
    with torch.device("meta"):
        generator = Generator(
            latent=latent,
            side=side,
            widths=[shape[0] for shape in shapes],
            channels=shapes[-1][1],
            classes=classes,
        )
    if mismatch := first_mismatch(generator.state_dict(), tensors):
        name, expected, got = mismatch
        raise ValueError(f"got {got} where {expected} is expected in {name!r}")
    return generator


def _shape(name: str, value: Tensor, dimensions: int) -> tuple[int, ...]:
    if value.ndim != dimensions:
        raise ValueError(f"got {value.ndim} dimensions where {dimensions} are expected in {name!r}")
    return tuple(value.shape)
