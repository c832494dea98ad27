"""A small vision transformer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradveil.core.errors import InputError
from gradveil.models.base import REGISTRY, ImageClassifier, activation_layer, image_shape

PATCH = 4
WIDTH = 128
HIDDEN = 512
HEADS = 4
DEPTH = 4


@REGISTRY.register("vit")
class VisionTransformer(ImageClassifier):
    """A small vision transformer: 4x4 patches, four blocks of width 128 with four heads, a class token.

    The layers are the paper's (learned positions, normalisation before attention and before the hidden layer
    of 512 units), without dropout; the size is ours, chosen for small images. 809,354 parameters for
    CIFAR-10.

    References:
        Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021. https://arxiv.org/abs/2010.11929

    Args:
        input_shape: channels, height and width of one image; height and width must be multiples of 4.
        classes: the number of logits.
        activation: "relu", "leaky-relu", "sigmoid" or "gelu".
        init: "default" (torch's, and normal with standard deviation .02 for class token and positions) or
            "uniform" (every parameter from uniform(-.5, .5)).

    Example:
        >>> VisionTransformer((3, 32, 32), 10).classifier
        Linear(in_features=128, out_features=10, bias=True)
    """

    paper = "Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021"

    def __init__(
        self, input_shape: Sequence[int], classes: int, *, activation: str = "gelu", init: str = "default"
    ) -> None:
        channels, height, width = image_shape(self.name, input_shape)
        if height % PATCH or width % PATCH:
            raise InputError(
                f"{self.name}: height and width of images must be multiples of {PATCH}, its patch size, "
                f"got {height} x {width}; resize the images or use another model"
            )
        patches = (height // PATCH) * (width // PATCH)
        blocks = [_Block(activation_layer(self.name, activation)) for _ in range(DEPTH)]
        features = nn.Sequential(_Tokens(channels, patches), *blocks, _ClassToken())
        super().__init__(features, input_shape, classes, init=init)


class _Tokens(nn.Module):
    """Turns images into tokens [N, 1 + patches, WIDTH]: a class token, then one per patch, plus their positions."""

    def __init__(self, channels: int, patches: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + patches, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(patches), -1, -1), patches], dim=1)
        return tokens + self.positions


class _Block(nn.Module):
    """Attention, then a hidden layer applied to each token; each is added to its input."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH), _Attention())
        self.hidden = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), activation, nn.Linear(HIDDEN, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(tokens)
        outputs: Tensor = tokens + self.hidden(tokens)
        return outputs


class _Attention(nn.Module):
    """Multi-head self-attention, written out: torch's fused kernels lack the second derivatives we need."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        # [N, tokens, 3 WIDTH] -> three of [N, HEADS, tokens, WIDTH / HEADS]
        heads = self.query_key_value(tokens).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attention = torch.softmax(query @ key.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5, dim=-1)
        outputs: Tensor = self.output((attention @ value).transpose(1, 2).flatten(2))
        return outputs


class _ClassToken(nn.Module):
    """Keeps only the class token, normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.norm(tokens[:, 0])
        return outputs
