"""Blocks that an active server puts before a model to read the clients' images from their updates."""

import torch
from torch import Tensor, nn


class Imprint(nn.Module):
    """A linear layer on the raw pixels whose output, decoded, is added to the image: the block of Robbing the Fed.

    Args:
        pixels: number of values in an image.
        rows: number of units in the linear layer.

    Example:
        >>> Imprint(pixels=4, rows=6)(torch.ones(2, 1, 2, 2)).shape
        torch.Size([2, 1, 2, 2])
    """

    def __init__(self, pixels: int, rows: int) -> None:
        super().__init__()
        self.encode = nn.Linear(pixels, rows)
        self.relu = nn.ReLU()
        self.decode = nn.Linear(rows, pixels)

    def forward(self, images: Tensor) -> Tensor:
        """The images, slightly changed."""
        added: Tensor = self.decode(self.relu(self.encode(images.flatten(1))))
        return images + added.view_as(images)


class ClientImprint(nn.Module):
    """An imprint block in which each client has its own columns: the block of LOKI.

    A convolution copies the image to the channels of one client and leaves those of all others zero. Besides the
    channels, each client has one constant, its marker, so that the weight gradient contains what a bias gradient would,
    client by client. Only the weights of `select` and `marker` depend on the client, so the updates of all clients can
    be summed.

    Args:
        shape: channels, height and width of an image.
        clients: how many clients can be distinguished.
        rows: number of units in the linear layer.

    Example:
        >>> ClientImprint((1, 2, 2), clients=3, rows=6).encode
        Linear(in_features=15, out_features=6, bias=False)
    """

    def __init__(self, shape: tuple[int, int, int], clients: int, rows: int) -> None:
        super().__init__()
        channels, height, width = shape
        pixels = channels * height * width
        self.select = nn.Conv2d(channels, clients * channels, kernel_size=3, padding=1, bias=False)
        self.marker = nn.Parameter(torch.zeros(clients))
        self.encode = nn.Linear(clients * pixels + clients, rows, bias=False)
        self.relu = nn.ReLU()
        self.decode = nn.Linear(rows, pixels)

    def forward(self, images: Tensor) -> Tensor:
        """The images, slightly changed."""
        markers = self.marker.expand(len(images), -1)
        columns = torch.cat([self.select(images).flatten(1), markers], dim=1)
        added: Tensor = self.decode(self.relu(self.encode(columns)))
        return images + added.view_as(images)


class Imprinted(nn.Module):
    """A model that gets its inputs from an imprint block.

    Args:
        imprint: the block.
        model: the model that the clients intend to train.

    Example:
        >>> Imprinted(Imprint(4, 6), nn.Flatten())(torch.ones(2, 1, 2, 2)).shape
        torch.Size([2, 4])
    """

    def __init__(self, imprint: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.imprint = imprint
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """The outputs of the model for the images."""
        logits: Tensor = self.model(self.imprint(images))
        return logits
