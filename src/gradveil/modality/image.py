"""Images: floats in [0, 1], stored as bytes, with total variation as their prior, judged by PSNR and SSIM, plain and
blurred."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO

import torch
from torch import Tensor

from gradveil.core.errors import DataError
from gradveil.core.extras import OptionalModule
from gradveil.modality.base import MODALITIES, Drawn

pillow = OptionalModule("PIL.Image", "rendering images")

NAN_GREY = 0.5
"""The value that replaces a NaN pixel: it is never wrong by more than half the range."""

LEAK_PSNR = 15.0  # dB
LEAK_SSIM = 0.5
LEAK_MARGIN = 2.0  # dB above the blind guess
# `scripts/leak_rule.py` measures what these rules find and what they take for a leak by mistake.
STRUCTURE_SSIM = 0.4
STRUCTURE_GAIN = 0.25  # SSIM above the blind guess
STRUCTURE_MARGIN = 1.0  # dB above the blind guess
BLURRED_MARGIN = 3.0  # dB above the blind guess, both blurred

_JUDGED = ("psnr", "ssim", "psnr_blurred", "ssim_blurred")


@MODALITIES.register("image")
@dataclass(frozen=True)
class Image(Drawn):
    """Images ``[C, H, W]`` in [0, 1], stored as bytes. Inputs of other shapes share the range but have no prior.

    Example:
        >>> image = Image()
        >>> image.inputs_of(torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8))
        tensor([[[[0.0000, 0.2000, 1.0000]]]])
        >>> scores = {"psnr": 20.0, "ssim": 0.3, "psnr_blurred": 24.0, "ssim_blurred": 0.7}
        >>> close = {"psnr": 19.0, "ssim": 0.2, "psnr_blurred": 20.0, "ssim_blurred": 0.4}
        >>> image.leak_rule(scores, blind={**close, "psnr": 10.0}), image.leak_rule(scores, blind=close)
        ('pixels', 'blur')
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
        f'above the blind guess (rule "pixels"); or an SSIM of at least {STRUCTURE_SSIM:g} that is {STRUCTURE_GAIN:g} '
        f'above the blind guess, and a PSNR {STRUCTURE_MARGIN:g} dB above it (rule "structure"); or, with both images '
        f"blurred by one pixel, an SSIM of at least {LEAK_SSIM:g} that is no lower, and a PSNR that is "
        f'{BLURRED_MARGIN:g} dB higher, than the blind guess (rule "blur")'
    )
    threshold = LEAK_PSNR
    margin = f"{LEAK_MARGIN:g} dB above (or closer by another rule than)"

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

    def typical(self, stored: Tensor) -> Tensor:
        """The mean, from sums of whole numbers, which are exact, of some images at a time, as torch copies them."""
        total = torch.zeros(stored.shape[1:], dtype=torch.int64, device=stored.device)
        for part in torch.split(stored, max(1, 2**21 // max(1, total.numel()))):
            total += part.sum(dim=0, dtype=torch.int64)
        return (total.double() / (255 * len(stored))).float()

    def leak_rule(self, scores: Mapping[str, float | None], blind: Mapping[str, float | None] | None) -> str | None:
        """Whether an image has leaked by its pixels, by its structure, or when it is blurred.

        - "pixels": ``(PSNR >= 15 or SSIM >= .5) and PSNR >= blind + 2``;
        - "structure", for a drawing that anyone recognises although the class mean is close in pixels:
          ``SSIM >= .4 and SSIM >= blind + .25 and PSNR >= blind + 1``;
        - "blur", for a noisy copy, since the eye averages over noise; with both images blurred by one pixel:
          ``SSIM >= max(.5, blind) and PSNR >= blind + 3``.

        Gains over the blind guess keep an attack from being credited with what the class mean alone shows. LPIPS is not
        asked: a verdict must not depend on whether its weights are there, it takes a noisy copy for a bad one, and any
        sharp image of the class for a better one than the mean.
        """
        psnr, ssim, blurred_psnr, blurred_ssim = (scores[name] for name in _JUDGED)
        if psnr is None or ssim is None or blurred_psnr is None or blurred_ssim is None:
            return None
        guess = [_known(None if blind is None else blind[name]) for name in _JUDGED]
        if (psnr >= LEAK_PSNR or ssim >= LEAK_SSIM) and psnr >= guess[0] + LEAK_MARGIN:
            return "pixels"
        if ssim >= max(STRUCTURE_SSIM, guess[1] + STRUCTURE_GAIN) and psnr >= guess[0] + STRUCTURE_MARGIN:
            return "structure"
        return (
            "blur" if blurred_ssim >= max(LEAK_SSIM, guess[3]) and blurred_psnr >= guess[2] + BLURRED_MARGIN else None
        )

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


def _known(score: float | None) -> float:
    """The score of a blind guess; if there is none, any other beats it."""
    return -math.inf if score is None else score


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
