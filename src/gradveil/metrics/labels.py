"""The share of labels that the attacker found."""

from torch import Tensor

from gradveil.core.errors import InputError


def label_accuracy(true: Tensor, guessed: Tensor) -> float:
    """The share of correctly guessed labels, image by image.

    Args:
        true: labels [N] of the originals.
        guessed: labels [N] of the reconstructions, in the order given by `match`.

    >>> import torch
    >>> label_accuracy(torch.tensor([3, 1, 4, 1]), torch.tensor([3, 1, 4, 5]))
    0.75
    """
    if true.ndim != 1 or true.shape != guessed.shape or len(true) == 0:
        raise InputError(
            "label_accuracy: true and guessed labels must be two vectors of the same length, at least 1, "
            f"got shapes {list(true.shape)} and {list(guessed.shape)}"
        )
    return (true == guessed).double().mean().item()
