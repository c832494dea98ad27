"""Gradient Dropout: replace a random share of the coordinates with noise."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.parameters import choice, number
from gradveil.core.randomness import Draws
from gradveil.defenses.base import DEFENSES, Perturbation
from gradveil.defenses.knowledge import NOTHING_TO_KNOW, Knowledge, read_trimmed
from gradveil.task import Task
from gradveil.update import LocalSteps


@DEFENSES.register("gradient-dropout")
@dataclass(frozen=True, repr=False)
class GradientDropout(Perturbation):
    r"""Share each coordinate with probability `keep`, scaled up, and a normal decoy otherwise.

    .. math:: \tilde g_i = g_i / keep \text{ with probability } keep, \text{ else } N(0, std^2)

    It is unbiased: the expectation is g. The expected squared distance per coordinate is
    ``(1 - keep) / keep * mean(g^2) + (1 - keep) std^2``; `gradveil.theory.dropout_distance` says where the paper's
    appendix slips, and `gradveil.theory.dropout_drift` corrects its theorems on convergence.

    The paper calls decoys indistinguishable from values. With one std for all layers that holds only for layers whose
    gradients happen to have that scale; in others the decoys stand out, and `gradveil.metrics.decoy_auc` measures by
    how much. With ``scale="layer"`` each layer's decoys have `std` times the spread of the values it shares, the root
    mean square of g / keep, so ``std=1`` disguises them best.

    What it does not stop: an attacker who scales back and believes only the values that fit its candidate best recovers
    single images at the published strength, with either scale (docs/findings.md).

    Args:
        keep: probability of sharing a coordinate; 1 is the identity.
        std: standard deviation of the decoys.
        scale: unit of std: ``"absolute"`` is the gradient's unit, as published; ``"layer"`` is each layer's own spread.

    References:
        Sotthiwat et al., Safeguarding Federated Learning from Data Reconstruction Attacks via Gradient Dropout.

    Example:
        >>> sent = GradientDropout(keep=0.5, std=0.0).perturb({"w": torch.ones(1000)})["w"]
        >>> sorted({abs(value) for value in sent.tolist()})
        [0.0, 2.0]
    """

    paper = "Sotthiwat et al., Gradient Dropout"
    has_adaptive_attacker = True

    keep: float = number(0.8, above=0, high=1, strength=(1.0, 0.01), log=True)
    std: float = number(5e-3, low=0)
    scale: str = choice("absolute", ("absolute", "layer"))

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Draw the mask, and put decoys where it drops values."""
        dropped = draws.uniform(rows) >= self.keep
        sent = rows / self.keep
        return torch.stack(
            [
                source.replace_normal(row, self._spread(row), mask)
                for source, row, mask in zip(draws.sources, sent, dropped, strict=True)
            ]
        )

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """Decoys fit no candidate: scale back, and believe only the values that fit best, as many as were kept."""
        if self.keep == 1:
            return NOTHING_TO_KNOW
        believed = read_trimmed(self.keep, scale=1 / self.keep)
        return {"trimmed": Knowledge(f"believes the {self.keep:.0%} of the values that fit best", read=believed)}

    def _spread(self, shared: Tensor) -> float:
        return self.std if self.scale == "absolute" else self.std * float(shared.double().square().mean().sqrt())
