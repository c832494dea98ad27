"""VGG for small images."""

from collections.abc import Sequence

from torch import nn

from gradveil.models.base import REGISTRY, ImageClassifier, activation_layer, image_shape, norm_layer


@REGISTRY.register("vgg11")
class Vgg11(ImageClassifier):
    """VGG-11 for small images: eight 3x3 convolutions with batch norm, five max-pools and one linear layer.

    As usual at this size, the paper's three linear layers are reduced to one, behind a global average. The
    pools round up where the paper's round down, so that 28-pixel images survive all five; for 32 and 64
    pixels it is the same. 9,231,114 parameters for CIFAR-10 with batch norm.

    References:
        Simonyan & Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015.
        https://arxiv.org/abs/1409.1556

    Args:
        input_shape: channels, height and width of one image.
        classes: how many logits come out.
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".
        norm: "batch", "frozen" (batch norm with fixed statistics), "group" (32 groups) or "none".
        init: "default" (torch's) or "uniform" (every parameter from uniform(-.5, .5)).

    Example:
        >>> Vgg11((3, 32, 32), 10).classifier
        Linear(in_features=512, out_features=10, bias=True)
    """

    paper = "Simonyan & Zisserman, Very Deep Convolutional Networks, ICLR 2015"

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
        layers: list[nn.Module] = []
        for widths in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
            for width in widths:
                layers += [
                    nn.Conv2d(channels, width, kernel_size=3, padding=1),
                    norm_layer(self.name, norm, width),
                    activation_layer(self.name, activation),
                ]
                channels = width
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
        super().__init__(nn.Sequential(*layers, *pool), input_shape, classes, init=init)
