"""The small CNN of the optimal-defenses paper."""

from collections.abc import Sequence
from math import ceil

from torch import nn

from gradveil.core import checks
from gradveil.models.base import REGISTRY, ImageClassifier, activation_layer, image_shape


@REGISTRY.register("mnist-cnn")
class MnistCnn(ImageClassifier):
    """Two 3x3 convolutions (32 and 64 channels) and two linear layers, the MNIST victim of optimal defenses.

    The first linear layer has 32 units. 119,530 parameters for MNIST, in every layer as many as the paper's table 1
    lists ("120k"). LeakyReLU has no region in which gradients vanish, a case that the paper's theory leaves out.

    Table 1 calls the convolutions conv_layers.0 and conv_layers.3, so two modules lie between them: the activation and
    one without parameters, which can hardly be anything but a pool. ``pooling="max"`` has that form: convolutions of
    stride 1, each followed by the activation and a 2x2 max-pool (of which kind, the paper does not say). Our default
    shrinks the image by the convolutions' own stride of 2 instead; it stays so because all our figures come from it.

    References:
        Chen, Gürsoy & Lei, Optimal Defenses Against Gradient Reconstruction Attacks, 2024.

    Args:
        input_shape: channels, height and width of one image.
        classes: the number of logits.
        pooling: "none" (convolutions of stride 2) or "max" (a 2x2 max-pool after each, likelier to be the paper's).
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".
        init: "default" (torch's) or "uniform" (every parameter from uniform(-.5, .5)).

    Example:
        >>> MnistCnn((1, 28, 28), 10).classifier
        Linear(in_features=32, out_features=10, bias=True)
        >>> MnistCnn((1, 28, 28), 10, pooling="max").features[3]
        Conv2d(32, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    paper = "Chen et al., Optimal Defenses Against Gradient Reconstruction Attacks, 2024"

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        *,
        pooling: str = "none",
        activation: str = "leaky-relu",
        init: str = "default",
    ) -> None:
        channels, height, width = image_shape(self.name, input_shape)
        pooled = checks.choice(self.name, "pooling", pooling, ("none", "max")) == "max"
        layers: list[nn.Module] = []
        for filters in (32, 64):
            layers += [
                nn.Conv2d(channels, filters, kernel_size=3, stride=1 if pooled else 2, padding=1),
                activation_layer(self.name, activation),
                *([nn.MaxPool2d(2)] if pooled else []),
            ]
            channels = filters
        # A pool drops an odd last row, a convolution with padding keeps it. (Images too small to be pooled are refused
        # by the base class.)
        rows, columns = (max(1, side // 4) if pooled else ceil(side / 4) for side in (height, width))
        layers += [nn.Flatten(), nn.Linear(channels * rows * columns, 32), activation_layer(self.name, activation)]
        super().__init__(nn.Sequential(*layers), input_shape, classes, init=init)
