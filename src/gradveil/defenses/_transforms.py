"""Image transforms by name: the space in which `ats` searches for its policies.

A transform is written ``NAME@AMOUNT`` (``rotate@-30``), or just ``NAME`` if it has no amount; a policy is a sequence of
transforms joined by ``>``, applied from left to right. The operations are Pillow's, on 8-bit images, as in the
AutoAugment family: values are rounded to 1/255. When an image is moved, the area that becomes free is mid-grey.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import InputError, ParameterError
from gradveil.core.extras import OptionalModule
from gradveil.core.registry import suggest

if TYPE_CHECKING:
    from PIL import Image, ImageEnhance, ImageOps

    Picture = Image.Image
else:
    Picture = object
    Image, ImageEnhance, ImageOps = (
        OptionalModule(f"PIL.{name}", "ats") for name in ("Image", "ImageEnhance", "ImageOps")
    )

SEPARATOR = ">"
FILL = 128  # mid-grey


def _affine(picture: Picture, matrix: Sequence[float]) -> Picture:
    """Each pixel (x, y) of the result is the pixel ``(a x + b y + c, d x + e y + f)`` of `picture`."""
    fill = (FILL,) * len(picture.getbands())
    return picture.transform(picture.size, Image.Transform.AFFINE, list(matrix), fillcolor=fill)


def _rotate(picture: Picture, degrees: float) -> Picture:
    return picture.rotate(degrees, fillcolor=(FILL,) * len(picture.getbands()))


# Amounts: shear in pixels per pixel, translation as a share of the side, rotation in degrees, solarisation threshold
# and enhancement factors as in Pillow (factor 1 changes nothing), posterisation in bits kept.
_WITH_AMOUNT: dict[str, tuple[Callable[[Picture, float], Picture], tuple[float, ...]]] = {
    "shear-x": (lambda p, a: _affine(p, (1, a, 0, 0, 1, 0)), (-0.3, -0.15, 0.15, 0.3)),
    "shear-y": (lambda p, a: _affine(p, (1, 0, 0, a, 1, 0)), (-0.3, -0.15, 0.15, 0.3)),
    "translate-x": (lambda p, a: _affine(p, (1, 0, round(a * p.width), 0, 1, 0)), (-0.4, -0.2, 0.2, 0.4)),
    "translate-y": (lambda p, a: _affine(p, (1, 0, 0, 0, 1, round(a * p.height))), (-0.4, -0.2, 0.2, 0.4)),
    "rotate": (_rotate, (-30, -15, 15, 30)),
    "solarize": (lambda p, a: ImageOps.solarize(p, round(a)), (64, 128, 192)),
    "posterize": (lambda p, a: ImageOps.posterize(p, round(a)), (2, 4)),
    "contrast": (lambda p, a: ImageEnhance.Contrast(p).enhance(a), (0.3, 0.6, 1.5, 1.9)),
    "brightness": (lambda p, a: ImageEnhance.Brightness(p).enhance(a), (0.3, 0.6, 1.5, 1.9)),
    "saturation": (lambda p, a: ImageEnhance.Color(p).enhance(a), (0.1, 0.5, 1.5, 1.9)),
    "sharpness": (lambda p, a: ImageEnhance.Sharpness(p).enhance(a), (0.1, 0.5, 1.5, 1.9)),
}
_WITHOUT_AMOUNT: dict[str, Callable[[Picture], Picture]] = {
    "invert": lambda p: ImageOps.invert(p),
    "equalize": lambda p: ImageOps.equalize(p),
    "autocontrast": lambda p: ImageOps.autocontrast(p),
    "flip": lambda p: ImageOps.mirror(p),
}


def names() -> list[str]:
    """All 45 transforms, written as in a policy.

    >>> len(names()), names()[0], names()[-1]
    (45, 'shear-x@-0.3', 'flip')
    """
    return [f"{name}@{amount:g}" for name, (_, amounts) in _WITH_AMOUNT.items() for amount in amounts] + list(
        _WITHOUT_AMOUNT
    )


def parse_policy(text: str) -> list[str]:
    """The transforms of a policy, checked.

    >>> parse_policy("rotate@15>invert")
    ['rotate@15', 'invert']
    """
    known = names()
    parts = text.split(SEPARATOR)
    for part in parts:
        if part not in known:
            raise ParameterError(f"ats: unknown transform {part!r}; {suggest(part, known)}")
    return parts


def apply_policy(text: str, images: Tensor) -> Tensor:
    """Every image after all transforms of a policy; `images` ``[N, C, H, W]`` in [0, 1], grey or colour.

    >>> apply_policy("invert", torch.tensor([[[[0.0, 1.0]]]])).tolist()
    [[[[1.0, 0.0]]]]
    """
    parts = parse_policy(text)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise InputError(
            f"ats: transforms work on images [N, 1 or 3, height, width], got shape {list(images.shape)}; "
            "use another defense"
        )
    return torch.stack([_to_tensor(_transformed(_to_picture(image), parts), image) for image in images])


def undo_policy(text: str, images: Tensor) -> Tensor:
    """The images before a policy was applied, as far as they can be recovered; see `apply_policy` for the arguments.

    Transforms that move, scale or mirror are reversed; a posterised value becomes the middle of the values it stands
    for. What was moved out of the image stays grey, and what was clipped stays clipped. Not undone are equalize and
    autocontrast, which depend on the whole histogram, and solarize, which folds it.

    >>> undo_policy("flip>invert", torch.tensor([[[[0.0, 1.0]]]])).tolist()
    [[[[0.0, 1.0]]]]
    """
    for part in reversed(parse_policy(text)):
        name, _, amount = part.partition("@")
        images = _UNDO[name](images, float(amount or 0)) if name in _UNDO else images
    return images


def _move_back(name: str) -> Callable[[Tensor, float], Tensor]:
    """Undo a transform that moves by its amount: move as far in the opposite direction."""
    move, _ = _WITH_AMOUNT[name]
    return lambda images, amount: torch.stack([_to_tensor(move(_to_picture(i), -amount), i) for i in images])


def _unblend(base: Callable[[Tensor], Tensor]) -> Callable[[Tensor, float], Tensor]:
    """Undo ``base + amount * (image - base)`` for a base that the blended image has in common with the original."""
    return lambda images, amount: base(images) + (images - base(images)) / amount


def _grey(images: Tensor) -> Tensor:
    """Brightness as Pillow computes it: for a colour image, a weighted mean of the channels."""
    if images.shape[1] == 1:
        return images
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=images.dtype, device=images.device)
    return (images * weights.view(1, 3, 1, 1)).sum(1, keepdim=True).expand_as(images)


def _mean_grey(images: Tensor) -> Tensor:
    return _grey(images).mean(dim=(1, 2, 3), keepdim=True).expand_as(images)


def _unsharpen(images: Tensor, amount: float) -> Tensor:
    """Solve ``smooth(x) + amount * (x - smooth(x)) = images`` for x; Pillow smooths all but the outermost pixels."""
    kernel = torch.ones(3, 3, dtype=images.dtype, device=images.device)
    kernel[1, 1] = 5
    kernel = (kernel / 13)[None, None]
    estimate = images
    # The response to a frequency lies between the amount and 1, so the iteration is a contraction.
    step = 2 / (1 + amount)
    for _ in range(_UNDO_STEPS):
        smooth = estimate.clone()
        inner = torch.nn.functional.conv2d(estimate.flatten(0, 1)[:, None], kernel)
        smooth[..., 1:-1, 1:-1] = inner.view(*images.shape[:2], *inner.shape[2:])
        estimate = estimate - step * (smooth + amount * (estimate - smooth) - images)
    return estimate


_UNDO_STEPS = 100
_UNDO: dict[str, Callable[[Tensor, float], Tensor]] = {
    **{name: _move_back(name) for name in ("shear-x", "shear-y", "translate-x", "translate-y", "rotate")},
    "posterize": lambda images, bits: images + (2 ** (8 - bits) - 1) / 2 / 255,
    "contrast": _unblend(_mean_grey),
    "brightness": _unblend(torch.zeros_like),
    "saturation": _unblend(_grey),
    "sharpness": _unsharpen,
    "invert": lambda images, _: 1 - images,
    "flip": lambda images, _: images.flip(-1),
}


def _transformed(picture: Picture, parts: Sequence[str]) -> Picture:
    for part in parts:
        name, _, amount = part.partition("@")
        picture = _WITH_AMOUNT[name][0](picture, float(amount)) if amount else _WITHOUT_AMOUNT[name](picture)
    return picture


def _to_picture(image: Tensor) -> Picture:
    pixels = image.detach().clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else np.ascontiguousarray(pixels))


def _to_tensor(picture: Picture, like: Tensor) -> Tensor:
    pixels = torch.from_numpy(np.array(picture)).view(*like.shape[1:], like.shape[0]).permute(2, 0, 1)
    return pixels.to(like.device, like.dtype) / 255
