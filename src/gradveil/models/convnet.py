"""The ConvNet of the inverting-gradients paper."""

from torch import nn

from gradveil.models.base import REGISTRY, NormalisedClassifier, activation_layer, convolution


@REGISTRY.register("convnet")
class ConvNet(NormalisedClassifier):
    """Eight 3x3 convolutions and a linear layer, the usual victim of inverting-gradients.

    Channels 64-128-128-256-256-256, a 3x3 max-pool, 256-256, another max-pool; every convolution is followed
    by normalisation and activation. This is the width-64 network of the inverting-gradients code. With batch
    norm it has 2,904,970 parameters for CIFAR-10, so it also fits the LeakyReLU "ConvNet" of 2.9 million that
    the optimal-defenses paper (Chen et al. 2024) does not describe further.

    References:
        Geiping, Bauermeister, Dröge & Moeller, Inverting Gradients: How easy is it to break privacy in
        federated learning?, NeurIPS 2020. https://arxiv.org/abs/2003.14053

    See `NormalisedClassifier` for the parameters.

    Example:
        >>> ConvNet((3, 32, 32), 10).classifier
        Linear(in_features=2304, out_features=10, bias=True)
    """

    paper = "Geiping et al., Inverting Gradients, NeurIPS 2020"

    def layers(self, channels: int, activation: str, norm: str) -> list[nn.Module]:
        """Two stages, each followed by a max-pool."""
        layers: list[nn.Module] = []
        for widths in ((64, 128, 128, 256, 256, 256), (256, 256)):
            for width in widths:
                layers += [*convolution(self.name, channels, width, norm), activation_layer(self.name, activation)]
                channels = width
            layers.append(nn.MaxPool2d(3))
        return layers
