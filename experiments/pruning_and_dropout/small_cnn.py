"""A small convolutional network that learns CIFAR-10 in a few minutes on one core."""

from torch import nn


def small_cnn(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Three convolutions, each followed by pooling, and a linear layer."""
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for before, after in ((channels, 24), (24, 48), (48, 96)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * (height // 8) * (width // 8), classes))
