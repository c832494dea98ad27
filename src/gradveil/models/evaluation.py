"""The evaluation network, which estimates how much of an image is noise."""

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gradveil.core.errors import InputError

WEIGHTS = Path(__file__).with_name("evaluation.safetensors")
"""The trained weights that come with gradveil; ``evaluation.md`` describes how they were trained."""

_WIDTHS = (128, 256, 512)


class EvaluationNetwork(nn.Module):
    r"""Predicts the share r of uniform noise v in a picture :math:`(1-r)\,image + r\,v`.

    Three 3x3 convolutions of stride 2 with 128, 256 and 512 channels, the mean over all positions, and one linear
    layer to a logit; the noise share is its sigmoid. Thanks to the mean it takes images of any size (it is trained
    on 28 to 64 pixels); grey images are repeated on three channels.

    It is public: trained on public images only, and known to attackers as well. It is the privacy metric of the
    defense `refiner` and, applied to a reconstruction, the metric `noise_ratio`.

    References:
        Fan, Chen, Wang, Li & Zhou, Refiner: Data Refining against Gradient Leakage Attacks in Federated Learning,
        section 3.3 and appendix D. The paper does not say how the last convolution is connected to the linear layer;
        the mean over positions is our choice.

    Example:
        >>> images = torch.stack([torch.full((1, 32, 32), 0.5), torch.rand(1, 32, 32, generator=torch.manual_seed(0))])
        >>> grey, noise = evaluation_network()(images).tolist()
        >>> grey < 0.2 and noise > 0.8
        True
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((3, *_WIDTHS), _WIDTHS, strict=False):
            layers += [nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(_WIDTHS[-1], 1)

    def logits(self, images: Tensor) -> Tensor:
        """The logits [N] of the noise shares of images [N, C, H, W] in [0, 1] with 1 or 3 channels."""
        if images.ndim != 4 or images.shape[1] not in (1, 3) or not images.is_floating_point():
            raise InputError(
                "evaluation network: images must be a float tensor [N, C, H, W] with 1 or 3 channels, "
                f"got {str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
            )
        colour = images.expand(-1, 3, -1, -1)
        # Centred around 0, so that the zero padding looks like mid-grey and not like a black frame.
        features: Tensor = self.features(colour - 0.5)
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits.squeeze(1)

    def forward(self, images: Tensor) -> Tensor:
        """The noise shares [N] of images [N, C, H, W] in [0, 1] with 1 or 3 channels."""
        return torch.sigmoid(self.logits(images))


@functools.cache
def evaluation_network(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> EvaluationNetwork:
    """The trained network, read once for each dtype and device; its weights are frozen.

    >>> evaluation_network().head.weight.requires_grad
    False
    """
    weights: Mapping[str, Tensor] = load_file(WEIGHTS)
    # Built without storage, so that no initial weights are drawn; the loaded ones take their place.
    with torch.device("meta"):
        network = EvaluationNetwork()
    network.load_state_dict({name: value.to(device, dtype) for name, value in weights.items()}, assign=True)
    return network.requires_grad_(False).eval()
