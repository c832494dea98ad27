"""Six small networks in the styles that people write, which no attack was tuned on."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def _blocks(channels: Sequence[int], activation: type[nn.Module], norm: type[nn.Module] | None = None) -> nn.Sequential:
    """3 x 3 convolutions, each with an optional norm and an activation, halving the image from the second on."""
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise(channels)):
        layers.append(nn.Conv2d(before, after, 3, stride=1 if number == 0 else 2, padding=1))
        layers += [norm(after)] if norm else []
        layers.append(activation())
    return nn.Sequential(*layers)


def _classifier(features: nn.Module, input_shape: Sequence[int], classes: int) -> nn.Sequential:
    with torch.no_grad():
        width = features.eval()(torch.zeros(1, *input_shape)).numel()
    return nn.Sequential(features.train(), nn.Flatten(), nn.Linear(width, classes))


def relu_cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Three convolutions with ReLUs."""
    return _classifier(_blocks((input_shape[0], 16, 32, 32), nn.ReLU), input_shape, classes)


def gelu_cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """The same with GELUs."""
    return _classifier(_blocks((input_shape[0], 16, 32, 32), nn.GELU), input_shape, classes)


def batchnorm_cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Three convolutions with batch norm and ReLUs, ending in a mean over the image."""
    features = nn.Sequential(_blocks((input_shape[0], 16, 32, 64), nn.ReLU, nn.BatchNorm2d), nn.AdaptiveAvgPool2d(2))
    return _classifier(features, input_shape, classes)


def mlp(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Two hidden layers of 128 and 64 units."""
    width = torch.Size(input_shape).numel()
    layers = nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes)
    return nn.Sequential(nn.Flatten(), *layers)


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(images + self.inside(images))


def groupnorm_resnet(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Two residual blocks with group norm and a strided convolution between them."""
    features = nn.Sequential(
        nn.Conv2d(input_shape[0], 16, 3, padding=1),
        nn.ReLU(),
        _Residual(16),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        _Residual(32),
        nn.AdaptiveAvgPool2d(4),
    )
    return _classifier(features, input_shape, classes)


class _Vit(nn.Module):
    def __init__(self, input_shape: Sequence[int], classes: int, width: int = 48, patch: int = 8) -> None:
        super().__init__()
        channels, height, side = input_shape
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(height // patch * (side // patch), width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 96, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.encoder(tokens).mean(1))
        return logits


def small_vit(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Patches of 8 x 8 and two encoder layers of torch's own."""
    return _Vit(input_shape, classes)
