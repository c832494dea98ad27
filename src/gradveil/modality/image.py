"""Images: floats in [0, 1], stored as bytes, with total variation as their prior, judged by PSNR and SSIM, plain and
blurred."""

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
BLURRED_MARGIN = 3.0  # dB above the blind guess, both blurred; `scripts/leak_rule.py` measures what the rules find


@MODALITIES.register("image")
@dataclass(frozen=True)
class Image(Modality):
    """Images ``[C, H, W]`` in [0, 1], stored as bytes. Inputs of other shapes share the range but have no prior.

    Example:
        >>> image = Image()
        >>> image.inputs_of(torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8))
        tensor([[[[0.0000, 0.2000, 1.0000]]]])
        >>> scores = {"psnr": 20.0, "ssim": 0.3, "psnr_blurred": 24.0, "ssim_blurred": 0.7}
        >>> close = {"psnr": 19.0, "ssim": 0.2, "psnr_blurred": 20.0, "ssim_blurred": 0.4}
        >>> image.leak_rule(scores, blind={**close, "psnr": 10.0}), image.leak_rule(scores, blind=close)
        ('pixels', 'perceptual')
        >>> image.leak_rule(scores, blind=scores) is None
        True
    """

    unit = "image"
    primary = "psnr"
    dimensions = 3
    bounds = (0.0, 1.0)
    guess = "the public mean image of the class"
    rule = (
        f"PSNR of at least {LEAK_PSNR:g} dB or SSIM of at least {LEAK_SSIM:g}, and a PSNR at least {LEAK_MARGIN:g} dB "
        'above the blind guess (the rule "pixels"), or if, with both images blurred by one pixel, the SSIM is at least '
        f"{LEAK_SSIM:g} and no lower, and the PSNR at least {BLURRED_MARGIN:g} dB higher, than the blind guess's (the "
        'rule "perceptual": the eye averages over noise)'
    )
    threshold = LEAK_PSNR
    margin = f"{LEAK_MARGIN:g} dB (blurred: {BLURRED_MARGIN:g} dB) above"

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
        """Sum the bytes in float64: that is exact, and needs no copy of the images as floats."""
        return (stored.sum(dim=0, dtype=torch.float64) / (255 * len(stored))).float()

    def leak_rule(self, scores: Mapping[str, float | None], blind: Mapping[str, float | None] | None) -> str | None:
        """Whether an image has leaked by its pixels, or else to the eye.

        "pixels": ``(PSNR >= 15 or SSIM >= .5) and PSNR >= blind guess's PSNR + 2``. "perceptual", with both images
        blurred by one pixel: ``SSIM >= max(.5, blind guess's SSIM) and PSNR >= blind guess's PSNR + 3``, for noisy
        copies that anyone recognises. Gains over the blind guess keep an attack from being credited with what the class
        mean alone shows. LPIPS is not asked, so that the verdict does not depend on whether its weights are there;
        besides, it takes a noisy copy for a bad one.
        """
        if self._pixels_leaked(scores, blind):
            return "pixels"
        return "perceptual" if self._seen(scores, blind) else None

    def _pixels_leaked(self, scores: Mapping[str, float | None], blind: Mapping[str, float | None] | None) -> bool:
        psnr, ssim = scores["psnr"], scores["ssim"]
        guess = None if blind is None else blind["psnr"]
        if psnr is None:
            return False
        recognisable = psnr >= LEAK_PSNR or (ssim is not None and ssim >= LEAK_SSIM)
        return recognisable and (guess is None or psnr >= guess + LEAK_MARGIN)

    def _seen(self, scores: Mapping[str, float | None], blind: Mapping[str, float | None] | None) -> bool:
        psnr, ssim = scores["psnr_blurred"], scores["ssim_blurred"]
        if psnr is None or ssim is None or ssim < LEAK_SSIM:
            return False
        if blind is None:
            return True
        guess, structure = blind["psnr_blurred"], blind["ssim_blurred"]
        return (guess is None or psnr >= guess + BLURRED_MARGIN) and (structure is None or ssim >= structure)

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
