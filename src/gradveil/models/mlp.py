"""The fully connected network of the FedAvg paper."""

from collections.abc import Sequence
from math import prod

from torch import nn

from gradveil.core import checks
from gradveil.models.base import REGISTRY, ImageClassifier, activation_layer, image_shape

WIDTH = 200


@REGISTRY.register("mlp")
class Mlp(ImageClassifier):
    """Two hidden layers of 200 units, the "2NN" of the FedAvg paper; takes images of any size and rows of tables.

    The gradient of a first linear layer with a bias reveals its input in closed form, which makes this the
    easiest victim of all. 199,210 parameters for MNIST.

    References:
        McMahan, Moore, Ramage, Hampson & Agüera y Arcas, Communication-Efficient Learning of Deep Networks
        from Decentralized Data, AISTATS 2017. https://arxiv.org/abs/1602.05629

    Args:
        input_shape: channels, height and width of one image, or the number of values of a row.
        classes: the number of logits.
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".
        init: "default" (torch's) or "uniform" (every parameter from uniform(-.5, .5)).

    Example:
        >>> Mlp((1, 28, 28), 10).classifier
        Linear(in_features=200, out_features=10, bias=True)
    """

    paper = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"

    def __init__(
        self, input_shape: Sequence[int], classes: int, *, activation: str = "relu", init: str = "default"
    ) -> None:
        features = nn.Sequential(
            nn.Flatten(),
            nn.Linear(_values(self.name, input_shape), WIDTH),
            activation_layer(self.name, activation),
            nn.Linear(WIDTH, WIDTH),
            activation_layer(self.name, activation),
        )
        super().__init__(features, input_shape, classes, init=init)

    def _checked_feature_count(self, input_shape: Sequence[int]) -> int:
        return WIDTH


def _values(owner: str, input_shape: Sequence[int]) -> int:
    """How many values an input has."""
    if isinstance(input_shape, Sequence) and len(input_shape) == 1:
        return checks.integer(owner, "input_shape[0]", input_shape[0], low=1)
    return prod(image_shape(owner, input_shape))
