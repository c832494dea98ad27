"""VGG for small images."""

from torch import nn

from gradveil.models.base import REGISTRY, NormalisedClassifier, activation_layer, convolution


@REGISTRY.register("vgg11")
class Vgg11(NormalisedClassifier):
    """VGG-11 for small images: eight 3x3 convolutions with batch norm, five max-pools and one linear layer.

    As usual at this size, the paper's three linear layers are reduced to one, after a global average. The
    pools round up while the paper's round down, so that 28-pixel images survive all five; for 32 and 64
    pixels there is no difference. 9,231,114 parameters for CIFAR-10 with batch norm.

    References:
        Simonyan & Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015.
        https://arxiv.org/abs/1409.1556

    See `NormalisedClassifier` for the parameters.

    Example:
        >>> Vgg11((3, 32, 32), 10).classifier
        Linear(in_features=512, out_features=10, bias=True)
    """

    paper = "Simonyan & Zisserman, Very Deep Convolutional Networks, ICLR 2015"

    def layers(self, channels: int, activation: str, norm: str) -> list[nn.Module]:
        """Five stages, each followed by a max-pool, and the global average."""
        layers: list[nn.Module] = []
        for widths in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
            for width in widths:
                layers += [*convolution(self.name, channels, width, norm), activation_layer(self.name, activation)]
                channels = width
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        return [*layers, nn.AdaptiveAvgPool2d(1)]
