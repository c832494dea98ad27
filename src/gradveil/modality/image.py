"""Images: floats in [0, 1], stored as bytes, with total variation as their prior, judged by PSNR and SSIM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO

import torch
from torch import Tensor

from gradveil.core.errors import DataError
from gradveil.core.extras import OptionalModule
from gradveil.modality.base import MODALITIES, Modality

pillow = OptionalModule("PIL.Image", "rendering images")

NAN_GREY = 0.5
"""The value that replaces a NaN pixel: it is never wrong by more than half the range."""

LEAK_PSNR = 15.0  # dB
LEAK_SSIM = 0.5
LEAK_MARGIN = 2.0  # dB above the blind guess


@MODALITIES.register("image")
@dataclass(frozen=True)
class Image(Modality):
    """Images ``[C, H, W]`` in [0, 1], stored as bytes. Inputs of other shapes share the range but have no prior.

    Example:
        >>> image = Image()
        >>> image.inputs_of(torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8))
        tensor([[[[0.0000, 0.2000, 1.0000]]]])
        >>> image.leaked({"psnr": 20.0, "ssim": 0.3}, 10.0), image.leaked({"psnr": 20.0, "ssim": 0.3}, 19.0)
        (True, False)
    """

    unit = "image"
    primary = "psnr"
    dimensions = 3
    bounds = (0.0, 1.0)
    guess = "the public mean image of the class"
    rule = (
        f"PSNR of at least {LEAK_PSNR:g} dB or SSIM of at least {LEAK_SSIM:g}, and a PSNR at least {LEAK_MARGIN:g} dB "
        "above the blind guess"
    )
    threshold = LEAK_PSNR
    margin = f"{LEAK_MARGIN:g} dB above"

    def check_stored(self, where: str, stored: Tensor) -> None:
        """Refuse anything but ``uint8 [N, C, H, W]``, grey or colour."""
        if stored.dtype != torch.uint8 or stored.ndim != 4 or stored.shape[1] not in (1, 3):
            raise DataError(
                f"{where} images must be uint8 [N, C, H, W] with 1 or 3 channels, "
                f"got {str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}"
            )

    def inputs_of(self, stored: Tensor) -> Tensor:
        """Convert bytes to float32 in [0, 1]."""
        return stored.float() / 255

    def start(
        self, shape: Sequence[int], generator: torch.Generator, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Uniform noise."""
        return torch.rand(tuple(shape), generator=generator, dtype=dtype, device=device)

    def project(self, inputs: Tensor) -> Tensor:
        """Clamp to [0, 1]."""
        return inputs.clamp(*self.bounds)

    def repaired(self, found: Tensor) -> Tensor:
        """Clamp to [0, 1], with NaN as mid-grey."""
        return self.project(found.nan_to_num(nan=NAN_GREY))

    def prior(self, inputs: Tensor, *, rounding: float = 0.0) -> Tensor | None:
        """The total variation of a batch of images; None for inputs of another shape."""
        return total_variation(inputs, rounding=rounding) if inputs.ndim == 4 else None

    def mean(self, stored: Tensor) -> Tensor:
        """Sum whole numbers: that is exact. Some images at a time, as torch sums a copy in the type of the sum."""
        total = torch.zeros(stored.shape[1:], dtype=torch.int64, device=stored.device)
        for part in torch.split(stored, max(1, 2**21 // max(1, total.numel()))):
            total += part.sum(dim=0, dtype=torch.int64)
        return (total.double() / (255 * len(stored))).float()

    def leaked(self, scores: Mapping[str, float | None], blind: float | None) -> bool:
        """Whether ``(PSNR >= 15 or SSIM >= .5) and PSNR >= blind guess's PSNR + 2``.

        The second half keeps an attack from being credited with what the class mean alone shows.
        """
        psnr, ssim = scores["psnr"], scores["ssim"]
        if psnr is None:
            return False
        recognisable = psnr >= LEAK_PSNR or (ssim is not None and ssim >= LEAK_SSIM)
        return recognisable and (blind is None or psnr >= blind + LEAK_MARGIN)

    def render(self, examples: Tensor) -> bytes:
        """Render a horizontal strip."""
        pixels = self.repaired(examples).mul(255).round().byte()
        strip = torch.cat(list(pixels), dim=-1).permute(1, 2, 0)
        content = BytesIO()
        pillow.fromarray(strip.squeeze(-1).cpu().numpy()).save(content, format="PNG")
        return content.getvalue()

    def rendered_size(self, input_shape: Sequence[int], count: int) -> tuple[int, int]:
        """Width and height of `count` images side by side."""
        _, height, width = input_shape
        return width * count, height


IMAGE = Image()


def total_variation(images: Tensor, *, rounding: float = 0.0) -> Tensor:
    """Mean absolute difference between neighbouring pixels, vertical plus horizontal.

    Args:
        images: any tensor whose last two axes are height and width.
        rounding: smooths the absolute value, ``sqrt(d^2 + rounding^2)``, for optimisers that need a smooth cost.
    """
    vertical = images[..., 1:, :] - images[..., :-1, :]
    horizontal = images[..., :, 1:] - images[..., :, :-1]
    differences = [axis for axis in (vertical, horizontal) if axis.numel()] or [images.new_zeros(1)]
    sizes = [(axis.square() + rounding**2).sqrt() if rounding else axis.abs() for axis in differences]
    return torch.stack([size.mean() for size in sizes]).sum()
