"""Secure aggregation: the server sees a sum and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.core.randomness import Draws
from gradveil.defenses.base import DEFENSES, Perturbation
from gradveil.defenses.knowledge import NOTHING_TO_KNOW, Knowledge
from gradveil.task import Task
from gradveil.update import LocalSteps, Update, weighted_mean


@DEFENSES.register("secure-aggregation")
@dataclass(frozen=True, repr=False)
class SecureAggregation(Perturbation):
    r"""The server learns only the sum of the clients' updates.

    .. math:: visible = \sum_{i=1}^m u_i

    This simulates the protocol's outcome, not its cryptography: `share` is the plain update, and `visible` is what the
    server can read through the pairwise masks. How much that hides depends only on the number m of clients: the sum of
    the gradients of m single images is m times the gradient of a batch of m, and an attacker may attack that. With one
    client it hides nothing, and a server that invents all other clients is in that position.

    References:
        Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017.

    Example:
        >>> first, second = (Update({"w": torch.tensor([v])}) for v in (1.0, 3.0))
        >>> [seen] = SecureAggregation().visible([first, second])
        >>> seen["w"].tolist(), seen.meta.clients
        ([4.0], 2)
    """

    paper = "Bonawitz et al., CCS 2017"
    has_adaptive_attacker = True
    hides_updates, adds_noise, keeps_zeros = True, False, True

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """A copy; the hiding happens in `visible`."""
        return rows.clone()

    def visible(self, updates: Sequence[Update]) -> list[Update]:
        """The sum of the updates, with their number in `meta.clients`; batch-norm statistics are averaged."""
        mean = weighted_mean(updates)
        total = {name: torch.stack([update[name] for update in updates]).sum(0) for name in mean}
        local = updates[0].meta.local
        return [Update(total, replace(mean.meta, local=local, clients=len(updates)))]

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """Only who sent what is hidden, and the sum contains nothing random."""
        return NOTHING_TO_KNOW
