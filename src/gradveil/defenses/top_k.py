"""Top-k: share only the largest values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.parameters import choice, number
from gradveil.core.randomness import Draws
from gradveil.defenses._selection import keep_ranks, share_of
from gradveil.defenses.base import DEFENSES, Perturbation
from gradveil.defenses.knowledge import Knowledge, read_arrived, read_ranked
from gradveil.task import Task
from gradveil.update import Announced, LocalSteps

FORMS = ("layer", "global")


@DEFENSES.register("top-k")
@dataclass(frozen=True, repr=False)
class TopK(Perturbation):
    r"""Share the largest values of each layer, or of all layers together, and zero the rest (gradient compression).

    Of n values, those of a layer or in the global form those of all layers, the ``ceil(keep n)`` largest in magnitude
    are shared; ties go to the earlier position.

    Args:
        keep: share of values that are sent; 1 is the identity.
        form: ``"layer"``: the share of each layer; ``"global"``: the share of all values, so that a layer of small
            gradients may send nothing. Compare the global form with other methods that rank over all layers.

    References:
        Lin et al., Deep Gradient Compression, ICLR 2018.

    Example:
        >>> import torch
        >>> TopK(keep=0.5).perturb({"w": torch.tensor([1.0, -4.0, 2.0, 0.5])})["w"].tolist()
        [0.0, -4.0, 2.0, 0.0]
        >>> layers = {"small": torch.tensor([0.1, 0.2]), "large": torch.tensor([3.0, 4.0])}
        >>> [value.tolist() for value in TopK(keep=0.5, form="global").perturb(layers).values()]
        [[0.0, 0.0], [3.0, 4.0]]
    """

    paper = "Lin et al., ICLR 2018"
    has_adaptive_attacker = True
    adds_noise, keeps_zeros = False, True

    keep: float = number(0.2, above=0, high=1, strength=(1.0, 1e-4), log=True)
    form: str = choice("layer", FORMS, quiet=True)

    def perturb_layers(
        self, layers: Mapping[str, Tensor], draws: Draws, announced: Announced | None = None
    ) -> dict[str, Tensor]:
        """Keep the largest values of each layer, or in the global form those of all layers, one after the other."""
        if self.form == "layer":
            return super().perturb_layers(layers, draws, announced)
        kept = self.perturb_rows(torch.cat(list(layers.values()), dim=1), draws)
        parts = torch.split(kept, [rows.shape[1] for rows in layers.values()], dim=1)
        return {name: part.to(layers[name].dtype) for name, part in zip(layers, parts, strict=True)}

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Keep the largest values."""
        kept = share_of(self.keep, rows.shape[1], math.ceil)
        return keep_ranks(rows, 0, kept)

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """What arrived is the gradient; what did not is smaller than everything that did."""
        return {
            "ordered": Knowledge(
                "matches what arrived; the rest must be smaller",
                read=read_ranked(withheld_top=False, over_all_layers=self.form == "global"),
                sends_values=True,
            ),
            "arrived": Knowledge("matches what arrived", read=read_arrived, sends_values=True),
        }
