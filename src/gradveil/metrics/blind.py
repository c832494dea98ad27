"""The blind guess: what someone scores who has not seen the gradient."""

import torch
from torch import Tensor

from gradveil import checks
from gradveil.errors import InputError


def blind_guess(images: Tensor, image_labels: Tensor, labels: Tensor, classes: int) -> Tensor:
    """For each label, the mean of the public images of that class.

    Scored like an attack, it tells what the label and public data alone are worth, with no gradient at all;
    that is a lot where the images of a class look alike.

    Args:
        images: the public images, uint8 [M, C, H, W].
        image_labels: their labels [M].
        labels: the victims' labels [N].
        classes: how many classes there are.

    Returns:
        Float images [N, C, H, W] in [0, 1].

    >>> public = torch.tensor([0, 255, 255], dtype=torch.uint8).reshape(3, 1, 1, 1)
    >>> blind_guess(public, torch.tensor([0, 0, 1]), torch.tensor([1, 0]), classes=2).flatten()
    tensor([1.0000, 0.5000])
    """
    checks.integer("blind guess", "classes", classes, low=1)
    if images.ndim != 4 or images.dtype != torch.uint8 or len(images) != len(image_labels):
        raise InputError(
            "blind guess: public images must be uint8 [M, C, H, W] with a label each, "
            f"got {str(images.dtype).removeprefix('torch.')} {list(images.shape)} "
            f"and {len(image_labels)} labels"
        )
    for whose, given in (("public", image_labels), ("victims'", labels)):
        if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < classes:
            raise InputError(
                f"blind guess: {whose} labels must lie between 0 and {classes - 1}, "
                f"got {int(given.min())} to {int(given.max())}"
            )
    means = {}
    for label in set(labels.tolist()):
        members = images[image_labels == label]
        if len(members) == 0:
            raise InputError(
                f"blind guess: no public image has label {label}, so its class has no mean; "
                "give public images of every class"
            )
        # The sum of whole numbers is exact in float64; the images themselves need no copy in float.
        means[label] = (members.sum(dim=0, dtype=torch.float64) / (255 * len(members))).float()
    return torch.stack([means[label] for label in labels.tolist()])
