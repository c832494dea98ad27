"""Input checks shared by the image metrics."""

from torch import Tensor

from gradveil.core.errors import InputError


def check_images(owner: str, role: str, images: Tensor) -> None:
    """Refuse anything but a batch of images in [0, 1]."""
    if images.ndim != 4 or not images.is_floating_point():
        raise InputError(
            f"{owner}: {role} must be a float tensor [N, C, H, W], "
            f"got {str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
        )
    # Written so that NaN is refused too, because it compares false with everything.
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise InputError(
            f"{owner}: {role} must lie in [0, 1], got values from {images.min().item():g} to "
            f"{images.max().item():g}; clamp them first (Scorer does, and replaces NaN by 0.5)"
        )


def check_pair(owner: str, originals: Tensor, reconstructions: Tensor) -> None:
    """Refuse anything but two equally shaped batches of images in [0, 1]."""
    check_images(owner, "originals", originals)
    check_images(owner, "reconstructions", reconstructions)
    if originals.shape != reconstructions.shape:
        raise InputError(
            f"{owner}: originals and reconstructions must have the same shape, "
            f"got {list(originals.shape)} and {list(reconstructions.shape)}"
        )
