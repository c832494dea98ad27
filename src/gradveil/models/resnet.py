"""Residual networks for small images."""

from typing import ClassVar

from torch import Tensor, nn

from gradveil.models.base import REGISTRY, NormalisedClassifier, activation_layer, convolution


class ResNet(NormalisedClassifier):
    """A residual network whose stem is one 3x3 convolution, so that small images are not shrunk at once.

    Four stages of 64, 128, 256 and 512 channels, of which all but the first halve the image; a global average; one
    linear layer. Subclasses set the number of blocks per stage.

    References:
        He, Zhang, Ren & Sun, Deep Residual Learning for Image Recognition, CVPR 2016.
        https://arxiv.org/abs/1512.03385

    See `NormalisedClassifier` for the parameters.

    Example:
        >>> ResNet10((3, 32, 32), 10).classifier
        Linear(in_features=512, out_features=10, bias=True)
    """

    paper = "He et al., Deep Residual Learning for Image Recognition, CVPR 2016"
    blocks_per_stage: ClassVar[int]

    def layers(self, channels: int, activation: str, norm: str) -> list[nn.Module]:
        """The stem, four stages of residual blocks, and the global average."""
        layers = [*convolution(self.name, channels, 64, norm, bias=False), activation_layer(self.name, activation)]
        channels = 64
        for width in (64, 128, 256, 512):
            for _ in range(self.blocks_per_stage):
                layers += [
                    _Residual(self.name, channels, width, activation, norm),
                    activation_layer(self.name, activation),
                ]
                channels = width
        return [*layers, nn.AdaptiveAvgPool2d(1)]


@REGISTRY.register("resnet10")
class ResNet10(ResNet):
    """ResNet-10 for small images: a 3x3 stem and one residual block in each of four stages.

    4,903,242 parameters for CIFAR-10 with batch norm. See `ResNet` for the parameters and the paper.

    Example:
        >>> import torch
        >>> ResNet10((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    blocks_per_stage = 1


@REGISTRY.register("resnet18")
class ResNet18(ResNet):
    """ResNet-18 for small images: a 3x3 stem and two residual blocks in each of four stages.

    11,173,962 parameters for CIFAR-10 with batch norm. See `ResNet` for the parameters and the paper.

    Example:
        >>> sum(parameter.numel() for parameter in ResNet18((3, 32, 32), 10).parameters())
        11173962
    """

    blocks_per_stage = 2


class _Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut; if the number of channels grows, the image is halved."""

    def __init__(self, owner: str, channels: int, width: int, activation: str, norm: str) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.branch = nn.Sequential(
            *convolution(owner, channels, width, norm, stride=stride, bias=False),
            activation_layer(owner, activation),
            *convolution(owner, width, width, norm, bias=False),
        )
        self.shortcut: nn.Module = nn.Identity()
        if channels != width:
            self.shortcut = nn.Sequential(
                *convolution(owner, channels, width, norm, kernel=1, stride=stride, bias=False)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.branch(inputs) + self.shortcut(inputs)
        return outputs
