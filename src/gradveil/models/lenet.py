"""The LeNet of the gradient-inversion papers."""

from collections.abc import Sequence

from torch import nn

from gradveil.core import checks
from gradveil.models.base import REGISTRY, ImageClassifier, activation_layer, image_shape

STRIDES = {3: (2, 2, 1), 4: (2, 2, 1, 1)}
"""The strides of the convolutions, by their number."""


@REGISTRY.register("lenet")
class LeNet(ImageClassifier):
    """Four or three 5x5 convolutions of 12 channels and a linear layer, the usual victim of DLG and iDLG.

    The first two convolutions have stride 2. Sigmoid keeps the loss smooth enough for L-BFGS, and
    ``init="uniform"`` is how the paper draws the weights.

    The published network has three convolutions (15,826 parameters for CIFAR-10): so it is in the code released with
    Deep Leakage from Gradients, and in that of Inverting Gradients, from which the dual-gradient-pruning paper takes
    its "LeNet (Zhu)". Our default has a fourth, of stride 1 (19,438 parameters), because all our figures come from it.

    References:
        Zhu, Liu & Han, Deep Leakage from Gradients, NeurIPS 2019. https://arxiv.org/abs/1906.08935
        Geiping, Bauermeister, Dröge & Moeller, Inverting Gradients, NeurIPS 2020 (three convolutions).
        Xue et al., Revisiting Gradient Pruning, AAAI 2024 (three convolutions).

    Args:
        input_shape: channels, height and width of one image.
        classes: the number of logits.
        convolutions: 4, or 3 as published.
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".
        init: "default" (torch's) or "uniform" (every parameter from uniform(-.5, .5)).

    Example:
        >>> import torch
        >>> LeNet((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
        >>> published = LeNet((3, 32, 32), 10, convolutions=3)
        >>> sum(parameter.numel() for parameter in published.parameters())
        15826
    """

    paper = "Zhu et al., Deep Leakage from Gradients, NeurIPS 2019"

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        *,
        convolutions: int = 4,
        activation: str = "sigmoid",
        init: str = "default",
    ) -> None:
        channels, _, _ = image_shape(self.name, input_shape)
        checks.integer(self.name, "convolutions", convolutions, low=min(STRIDES), high=max(STRIDES))
        layers: list[nn.Module] = []
        for stride in STRIDES[convolutions]:
            layers += [
                nn.Conv2d(channels, 12, kernel_size=5, stride=stride, padding=2),
                activation_layer(self.name, activation),
            ]
            channels = 12
        super().__init__(nn.Sequential(*layers, nn.Flatten()), input_shape, classes, init=init)
