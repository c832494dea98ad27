"""A small convolutional network that learns CIFAR-10 in a few minutes on one core."""

from torch import nn


def small_cnn(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Three convolutions, each followed by pooling, and a linear layer."""
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 24, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(48, 96, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(96 * (height // 8) * (width // 8), classes),
    )
