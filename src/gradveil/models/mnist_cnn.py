"""The small CNN of the optimal-defenses paper."""

from collections.abc import Sequence
from math import ceil

from torch import nn

from gradveil.models.base import REGISTRY, ImageClassifier, activation_layer, image_shape


@REGISTRY.register("mnist-cnn")
class MnistCnn(ImageClassifier):
    """Two 3x3 convolutions (32 and 64 channels) and two linear layers, the MNIST victim of optimal defenses.

    The first linear layer has 32 units. The paper only says "120k parameters": that both convolutions
    shrink the image by stride 2, with padding 1, rather than by pooling is our choice. LeakyReLU has no region in
    which gradients vanish, a case that the paper's theory leaves out. 119,530 parameters for MNIST.

    References:
        Chen, Gürsoy & Lei, Optimal Defenses Against Gradient Reconstruction Attacks, 2024.

    Args:
        input_shape: channels, height and width of one image.
        classes: the number of logits.
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".
        init: "default" (torch's) or "uniform" (every parameter from uniform(-.5, .5)).

    Example:
        >>> MnistCnn((1, 28, 28), 10).classifier
        Linear(in_features=32, out_features=10, bias=True)
    """

    paper = "Chen et al., Optimal Defenses Against Gradient Reconstruction Attacks, 2024"

    def __init__(
        self, input_shape: Sequence[int], classes: int, *, activation: str = "leaky-relu", init: str = "default"
    ) -> None:
        channels, height, width = image_shape(self.name, input_shape)
        features = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=3, stride=2, padding=1),
            activation_layer(self.name, activation),
            nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1),
            activation_layer(self.name, activation),
            nn.Flatten(),
            nn.Linear(64 * ceil(height / 4) * ceil(width / 4), 32),
            activation_layer(self.name, activation),
        )
        super().__init__(features, input_shape, classes, init=init)
