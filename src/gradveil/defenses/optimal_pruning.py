"""Optimal pruning: drop the coordinates that leak most relative to their utility."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.parameters import choice, flag, integer, number, state
from gradveil.core.randomness import Source
from gradveil.defenses._optimal import FORMS, Measured, SensitivityDriven
from gradveil.defenses._selection import share_of
from gradveil.defenses.base import DEFENSES, check_result
from gradveil.defenses.knowledge import NOTHING_TO_KNOW, Knowledge, read_arrived
from gradveil.task import Gradients, Task
from gradveil.update import LocalSteps, steps_of, variance_factor


@DEFENSES.register("optimal-pruning")
@dataclass(frozen=True, repr=False)
class OptimalPruning(SensitivityDriven):
    r"""Zero the share of the coordinates with the largest ratio of sensitivity to gradient.

    .. math:: k_i = |\partial g_i / \partial x| / |g_i|; \quad \text{the } \lfloor rate \cdot d \rfloor
        \text{ largest } k_i \text{ are zeroed}

    ranked over all layers together, with ties broken by position. In the global form
    :math:`k_i = \sqrt{E s_i^2 / E g_i^2}` over a public set, so the same coordinates are dropped every round. A
    coordinate whose gradient is zero is dropped first, because that costs nothing.

    With `std`, normal noise is added to what is kept and to nothing else (the paper's equation 16, with the uniform
    covariance :math:`std^2 I` for which theorem 4 is proved; the locally optimal set is the same under optimal noise):

    .. math:: \tilde g_i = g_i + N(0, std^2) \text{ where } i \text{ is kept, else } 0

    It is not the chain with ``gaussian-noise``, which puts noise on the dropped coordinates too: that costs four times
    the power at rate .8 and hides nothing more, as those coordinates carry nothing.

    There is no reconstruction bound without noise, nor in the local form, in which the data decide what is dropped. The
    global form with noise has one.

    Under FedAvg it acts in every local step.

    Args:
        rate: share of the coordinates removed; 0 is the identity.
        directions: number of random input directions that estimate the sensitivity; its relative error is
            sqrt(2 / directions).
        form: ``"local"``, by the client's own batch, or ``"global"``, by a public set.
        every: number of rounds for which a client reuses its sensitivity, to save time (local form only).
        layerwise: whether to remove the share of each layer separately.
        std: standard deviation of the noise on the coordinates that are kept; 0: none.

    References:
        Chen, Gürsoy & Lei, Optimal Defenses Against Gradient Reconstruction Attacks, 2024. **Correction**: theorem 4
        says that the smallest k_i are pruned; its proof shows the largest.

    Example:
        >>> from gradveil import Task, models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = Task(model, input_shape=(1, 4, 4), classes=3)
        >>> sent = OptimalPruning(rate=0.8).share(task, torch.rand(2, 1, 4, 4), torch.tensor([0, 2]))
        >>> bool(sum(int((value == 0).sum()) for value in sent.values()) >= 0.8 * task.size - 1)
        True
    """

    paper = "Chen et al., Optimal Defenses, 2024"
    has_adaptive_attacker = True

    rate: float = number(0.8, low=0, high=1, strength=(0.0, 1.0))
    directions: int = integer(10, low=1)
    form: str = choice("local", FORMS)
    every: int = integer(1, low=1)
    layerwise: bool = flag(False)
    std: float = number(0.0, low=0, quiet=True)
    measured: Measured | None = state()

    @property
    def idle(self) -> bool:
        """Whether nothing is removed and no noise is added."""
        return self.rate == 0 and self.std == 0

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """What arrived is the gradient, with noise of known variance, by which the attacker weighs a prior.

        If several local steps each pruned different coordinates, a coordinate that arrived may lack some of the steps,
        and nobody can say which, so the generic attacker simulates the steps.
        """
        if self.idle:
            return NOTHING_TO_KNOW
        if self.form == "local" and steps_of(local, batch_size) > 1:
            return {}
        summary = "matches what arrived, weighs a prior by the noise" if self.std else "matches what arrived"
        variance = variance_factor(local, batch_size) * self.std**2
        return {"arrived": Knowledge(summary, read=read_arrived, variance=variance)}

    def noise_variance(self, *, batch_size: int = 1) -> Mapping[str, Tensor] | None:
        """That of what the prepared global form keeps; what it drops is never sent and has infinite variance."""
        if self.measured is None or self.std == 0:
            return None
        kept = self._kept(*self.measured)
        return {name: torch.where(value, self.std**2, torch.inf) for name, value in kept.items()}

    def defend(
        self, gradients: Gradients, sensitivity: Mapping[str, Tensor], weight: Mapping[str, Tensor], source: Source
    ) -> Gradients:
        """Zero the coordinates that leak most relative to their utility, and add noise to the others."""
        kept = self._kept(sensitivity, weight)
        if self.std == 0:
            return {name: torch.where(kept[name], value, 0) for name, value in gradients.items()}
        noisy = {name: source.add_normal(value, self.std) for name, value in gradients.items()}
        result = {name: torch.where(kept[name], value, 0) for name, value in noisy.items()}
        check_result(self, result)
        return result

    def _kept(self, sensitivity: Mapping[str, Tensor], weight: Mapping[str, Tensor]) -> Gradients:
        """Masks that are False for the coordinates that leak most relative to their utility."""
        # The squares have the same order as the ratios.
        scores = {
            name: torch.where(weight[name] > 0, value.double() / weight[name].double(), torch.inf).flatten()
            for name, value in sensitivity.items()
        }
        if self.layerwise:
            kept = {name: self._kept_of(value) for name, value in scores.items()}
        else:
            all_kept = self._kept_of(torch.cat(list(scores.values())))
            parts = torch.split(all_kept, [value.numel() for value in scores.values()])
            kept = dict(zip(scores, parts, strict=True))
        return {name: kept[name].view(value.shape) for name, value in sensitivity.items()}

    def _kept_of(self, scores: Tensor) -> Tensor:
        """A mask that is False for the largest scores."""
        worst = scores.argsort(descending=True, stable=True)[: share_of(self.rate, scores.numel(), math.floor)]
        kept = torch.ones_like(scores, dtype=torch.bool)
        kept[worst] = False
        return kept
