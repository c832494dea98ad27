"""The LeNet of the gradient-inversion papers."""

from collections.abc import Sequence

from torch import nn

from gradveil.models.base import REGISTRY, ImageClassifier, activation_layer, image_shape


@REGISTRY.register("lenet")
class LeNet(ImageClassifier):
    """Four 5x5 convolutions of 12 channels and a linear layer, the usual victim of DLG and iDLG.

    The first two convolutions have stride 2. Sigmoid keeps the loss smooth enough for L-BFGS, and
    ``init="uniform"`` is how the paper draws the weights. 19,438 parameters for CIFAR-10.

    References:
        Zhu, Liu & Han, Deep Leakage from Gradients, NeurIPS 2019. https://arxiv.org/abs/1906.08935

    Args:
        input_shape: channels, height and width of one image.
        classes: the number of logits.
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".
        init: "default" (torch's) or "uniform" (every parameter from uniform(-.5, .5)).

    Example:
        >>> import torch
        >>> LeNet((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    paper = "Zhu et al., Deep Leakage from Gradients, NeurIPS 2019"

    def __init__(
        self, input_shape: Sequence[int], classes: int, *, activation: str = "sigmoid", init: str = "default"
    ) -> None:
        channels, _, _ = image_shape(self.name, input_shape)
        layers: list[nn.Module] = []
        for stride in (2, 2, 1, 1):
            layers += [
                nn.Conv2d(channels, 12, kernel_size=5, stride=stride, padding=2),
                activation_layer(self.name, activation),
            ]
            channels = 12
        super().__init__(nn.Sequential(*layers, nn.Flatten()), input_shape, classes, init=init)
