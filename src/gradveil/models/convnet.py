"""The ConvNet of the inverting-gradients paper."""

from collections.abc import Sequence

from torch import nn

from gradveil.models.base import REGISTRY, ImageClassifier, activation_layer, image_shape, norm_layer


@REGISTRY.register("convnet")
class ConvNet(ImageClassifier):
    """Eight 3x3 convolutions and a linear layer, the usual victim of inverting-gradients.

    Channels 64-128-128-256-256-256, a 3x3 max-pool, 256-256, another max-pool; every convolution is followed
    by normalisation and activation. This is the width-64 network of the inverting-gradients code. With batch
    norm it has 2,904,970 parameters for CIFAR-10, so it also fits the LeakyReLU "ConvNet" of 2.9 million that
    the optimal-defenses paper (Chen et al. 2024) does not describe further.

    References:
        Geiping, Bauermeister, Dröge & Moeller, Inverting Gradients: How easy is it to break privacy in
        federated learning?, NeurIPS 2020. https://arxiv.org/abs/2003.14053

    Args:
        input_shape: channels, height and width of one image.
        classes: how many logits come out.
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".
        norm: "batch", "frozen" (batch norm with fixed statistics), "group" (32 groups) or "none".
        init: "default" (torch's) or "uniform" (every parameter from uniform(-.5, .5)).

    Example:
        >>> ConvNet((3, 32, 32), 10).classifier
        Linear(in_features=2304, out_features=10, bias=True)
    """

    paper = "Geiping et al., Inverting Gradients, NeurIPS 2020"

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
        for widths in ((64, 128, 128, 256, 256, 256), (256, 256)):
            for width in widths:
                layers += [
                    nn.Conv2d(channels, width, kernel_size=3, padding=1),
                    norm_layer(self.name, norm, width),
                    activation_layer(self.name, activation),
                ]
                channels = width
            layers.append(nn.MaxPool2d(3))
        super().__init__(nn.Sequential(*layers, nn.Flatten()), input_shape, classes, init=init)
