"""What a search moves through, if not the inputs themselves: latent vectors, weights of a generator, soft labels."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks.findings import Reconstruction


@dataclass(frozen=True)
class Space:
    """Candidates that stand for inputs.

    Args:
        unpack: ``(candidate, labels)``: one victim's inputs and labels; must be vmap-able.
        surprise: how unlikely a candidate is, as -2 log of its density up to a constant: for a standard normal prior,
            its squared length. An adaptive attacker weights it by the variance of the noise, which makes the cost that
            of the most probable candidate. None: candidates have no prior, so the modality's prior of the inputs is
            used instead.
        weight: the weight of the surprise in the cost of any attacker, adaptive or not.

    Example:
        >>> circle = Space(lambda angle, labels: (torch.stack([angle.cos(), angle.sin()]).T, labels))
        >>> circle.unpack(torch.zeros(1), torch.tensor([3]))
        (tensor([[1., 0.]]), tensor([3]))
    """

    unpack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    surprise: Callable[[Tensor], Tensor] | None = None
    weight: float = 0.0

    @torch.no_grad()
    def unpacked(self, found: Reconstruction) -> Reconstruction:
        """What `match` found, with inputs and labels in place of candidates."""
        pairs = [self.unpack(*pair) for pair in zip(found.inputs, found.labels, strict=True)]
        inputs, labels = (torch.stack(values) for values in zip(*pairs, strict=True))
        return replace(found, inputs=inputs, labels=labels)

    def kept_values(self, candidate: Tensor, labels: Tensor) -> int:
        """How many values have to be kept to differentiate `unpack` at one victim's candidate."""
        kept = 0

        def count(value: Tensor) -> Tensor:
            nonlocal kept
            kept += value.numel()
            return value

        with torch.autograd.graph.saved_tensors_hooks(count, lambda value: value):
            self.unpack(candidate.detach().requires_grad_(), labels)
        return kept
