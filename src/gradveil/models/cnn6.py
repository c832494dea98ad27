"""The CNN6 that R-GAP solves in closed form."""

from collections.abc import Sequence

from torch import nn

from gradveil.models.base import REGISTRY, ImageClassifier, activation_layer, image_shape


@REGISTRY.register("cnn6")
class Cnn6(ImageClassifier):
    """Six bias-free convolutions and a bias-free linear layer, the network that R-GAP solves layer by layer.

    Channels 12-36-36-36-64-128, strides 2-2-1-1-2-1; the first kernel is 4x4 with padding 2, the others are
    3x3 with padding 1. LeakyReLU has slope .2, so every activation can be inverted. 154,256 parameters for
    CIFAR-10.

    References:
        Zhu & Blaschko, R-GAP: Recursive Gradient Attack on Privacy, ICLR 2021. https://arxiv.org/abs/2010.07733

    Args:
        input_shape: channels, height and width of one image.
        classes: the number of logits.
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".
        init: "default" (torch's) or "uniform" (every parameter from uniform(-.5, .5)).

    Example:
        >>> Cnn6((3, 32, 32), 10).classifier
        Linear(in_features=3200, out_features=10, bias=False)
    """

    paper = "Zhu & Blaschko, R-GAP: Recursive Gradient Attack on Privacy, ICLR 2021"

    def __init__(
        self, input_shape: Sequence[int], classes: int, *, activation: str = "leaky-relu", init: str = "default"
    ) -> None:
        channels, _, _ = image_shape(self.name, input_shape)
        layers: list[nn.Module] = []
        for width, kernel, padding, stride in (
            (12, 4, 2, 2),
            (36, 3, 1, 2),
            (36, 3, 1, 1),
            (36, 3, 1, 1),
            (64, 3, 1, 2),
            (128, 3, 1, 1),
        ):
            layers += [
                nn.Conv2d(channels, width, kernel, stride=stride, padding=padding, bias=False),
                activation_layer(self.name, activation, slope=0.2),
            ]
            channels = width
        super().__init__(nn.Sequential(*layers, nn.Flatten()), input_shape, classes, init=init, bias=False)
