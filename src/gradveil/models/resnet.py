"""Residual networks for small images."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from gradveil.models.base import REGISTRY, ImageClassifier, activation_layer, image_shape, norm_layer


class ResNet(ImageClassifier):
    """A residual network whose stem is one 3x3 convolution, so that small images are not shrunk at once.

    Four stages of 64, 128, 256 and 512 channels, each but the first halving the image; a global average; one
    linear layer. Subclasses say how many blocks a stage has.

    References:
        He, Zhang, Ren & Sun, Deep Residual Learning for Image Recognition, CVPR 2016.
        https://arxiv.org/abs/1512.03385

    Args:
        input_shape: channels, height and width of one image.
        classes: how many logits come out.
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".
        norm: "batch", "frozen" (batch norm with fixed statistics), "group" (32 groups) or "none".
        init: "default" (torch's) or "uniform" (every parameter from uniform(-.5, .5)).

    Example:
        >>> ResNet10((3, 32, 32), 10).classifier
        Linear(in_features=512, out_features=10, bias=True)
    """

    paper = "He et al., Deep Residual Learning for Image Recognition, CVPR 2016"
    blocks_per_stage: ClassVar[int]

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
        layers: list[nn.Module] = [
            nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False),
            norm_layer(self.name, norm, 64),
            activation_layer(self.name, activation),
        ]
        channels = 64
        for width in (64, 128, 256, 512):
            for _ in range(self.blocks_per_stage):
                layers += [
                    _Residual(self.name, channels, width, activation, norm),
                    activation_layer(self.name, activation),
                ]
                channels = width
        pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
        super().__init__(nn.Sequential(*layers, *pool), input_shape, classes, init=init)


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
    """Two 3x3 convolutions beside a shortcut; more channels out than in means half the image."""

    def __init__(self, owner: str, channels: int, width: int, activation: str, norm: str) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.branch = nn.Sequential(
            nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1, bias=False),
            norm_layer(owner, norm, width),
            activation_layer(owner, activation),
            nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
            norm_layer(owner, norm, width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, kernel_size=1, stride=stride, bias=False),
                norm_layer(owner, norm, width),
            )

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.branch(inputs) + self.shortcut(inputs)
        return outputs
