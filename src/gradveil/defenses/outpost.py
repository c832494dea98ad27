"""Outpost: noise on the informative entries by layer risk, then pruning, less and less often."""

import math
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.errors import InputError
from gradveil.core.parameters import number
from gradveil.core.randomness import Source
from gradveil.defenses._selection import keep_ranks, largest, share_of
from gradveil.defenses.base import DEFENSES, Defense, check_result
from gradveil.defenses.knowledge import Evidence, Knowledge, read_ranked
from gradveil.task import Gradients, Task
from gradveil.update import ClientRound, LocalSteps, Update

ROUNDING = 1e-6
"""Noise smaller than this, in units of a layer's largest value, is lost in the rounding of float32."""


@DEFENSES.register("outpost")
@dataclass(frozen=True, repr=False)
class Outpost(Defense):
    r"""In a decreasing share of the rounds, add noise where the Fisher information is large, then prune.

    .. math:: risk_l = \min(Var(w_l), 1), \quad
              \tilde g_l = prune\big(g_l + N(0, (scale \cdot risk_l)^2) \cdot [g^2 \text{ among the largest}]\big)

    In round t (the client's own count, from 0) this happens with probability ``1 / (1 + decay t)``; in the other
    rounds the update is sent **unchanged**. So it protects the first rounds, and an attacker only has to wait. The
    empirical Fisher information of a coordinate is its squared gradient; the largest `noised` share of each layer gets
    noise, then the smallest `pruned` share of the noisy layer is zeroed. Counts are exact: ``ceil(noised n)`` values
    get noise, ``ceil((1 - pruned) n)`` are sent.

    It needs the weights, not the data: under FedAvg it acts once, on the finished update, with the weights the server
    sent. The round count is kept in the client's `memory`.

    **The server chooses the noise.** The risk of a layer is the variance of weights that the server sent. A layer whose
    weights are all equal or tiny, such as the imprint block of `robbing-the-fed`, has risk 0 and gets no noise; there
    outpost is top-k, whatever `scale` is. It warns when a weight matrix gets none, and `gradveil.inspect` finds such
    blocks beforehand.

    Choices where the sources say nothing: the paper decays over local iterations, we over rounds; the Fisher threshold
    is per layer (a common one would leave whole layers untouched); noise comes before pruning, so that the update is as
    sparse as `pruned` says; a layer of a single weight has no variance and counts as risk 0.

    Args:
        scale: noise per unit of risk (the paper's lambda).
        noised: share of each layer's values that get noise (phi).
        pruned: share of each layer's values that are zeroed (rho).
        decay: how fast it is applied less often (beta); with 0 it acts in every round. scale = pruned = 0 is the
            identity.

    References:
        Wang, Hugh and Li, More than Enough is Too Much: Adaptive Defenses against Gradient Leakage in Production
        Federated Learning, INFOCOM 2023.

    Example:
        >>> import gradveil
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> task = gradveil.Task(model, input_shape=(1, 2, 2), classes=3)
        >>> update = Outpost().share(task, torch.rand(1, 1, 2, 2), torch.tensor([1]), memory={})
        >>> int((update["1.weight"] != 0).sum())
        3
    """

    paper = "Wang et al., INFOCOM 2023"
    caveat = (
        "its noise follows the variance of each layer's weights, and these come from the server: a layer of equal or "
        "tiny weights, such as an imprint block, gets no noise and is only pruned, as by top-k."
    )
    has_adaptive_attacker = True

    scale: float = number(0.8, low=0, strength=(1e-3, 100.0), log=True)
    noised: float = number(0.4, low=0, high=1)
    pruned: float = number(0.8, low=0, below=1)
    decay: float = number(0.1, low=0)

    def make_update(self, client: ClientRound) -> Update:
        """The update, perturbed with the probability of this round."""
        memory, source = client.memory, client.source
        if memory is None:
            raise InputError(
                f"{self.name}: needs memory=, a mapping that belongs to the client and is kept through all rounds, "
                "to count them"
            )
        update = client.update()
        rounds = int(memory.get("rounds", torch.tensor(0)))
        memory["rounds"] = torch.tensor(rounds + 1)
        draw = float(source.uniform(client.inputs.new_empty((), dtype=torch.float32)))
        if draw >= 1 / (1 + self.decay * rounds):
            return update
        weights = client.task.parameters
        self._warn_of_layers_without_noise(update, weights)
        result = {name: self._perturbed(value, weights[name], source) for name, value in update.items()}
        check_result(self, result)
        return Update(result, update.meta)

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """Match what arrived, weighted by the layers' noise; if it did not act in a round, match everything exactly."""
        stds = {name: self.scale * layer_risk(value) for name, value in task.parameters.items()}
        noisy = [std for std in stds.values() if std]
        typical = statistics.median(noisy) if noisy else 0.0

        def defended(update: Gradients) -> Tensor:
            """Whether it acted in this round: no layer has more nonzero values than pruning leaves."""
            return torch.stack(
                [(v != 0).sum() <= share_of(1 - self.pruned, v.numel(), math.ceil) for v in update.values()]
            ).all()

        def read(expected: Gradients, update: Gradients) -> Evidence:
            ranked = ordered(expected, update)
            assert ranked.weights is not None
            assert ranked.allowed is not None
            undefended = ~defended(update)
            weights, allowed = {}, {}
            for name in update:
                # No layer counts more than a hundred typical ones.
                trust = min(100.0, (typical / stds[name]) ** 2) if stds[name] else 100.0 if typical else 1.0
                weights[name] = torch.where(undefended, 1.0, trust * ranked.weights[name])
                allowed[name] = torch.where(undefended, expected[name], ranked.allowed[name])
            return Evidence(update, weights, allowed)

        def variance(update: Gradients) -> Tensor:
            return typical**2 * defended(update)

        ordered = read_ranked(withheld_top=False)
        summary = "matches what arrived, weighs a prior by the noise; an honest round is matched exactly"
        return {"arrived": Knowledge(summary, read=read, variance=variance)}

    def _warn_of_layers_without_noise(self, update: Gradients, weights: Mapping[str, Tensor]) -> None:
        if not (self.scale and self.noised):
            return
        # Only matrices and kernels: biases and normalisations of an honest model begin as constants, too.
        bare = [
            name
            for name, value in update.items()
            if value.ndim > 1 and self.scale * layer_risk(weights[name]) < ROUNDING * float(value.abs().max())
        ]
        if bare:
            warnings.warn(
                f"{self.name}: adds no noise to {', '.join(bare)}, where the weights that the server sent have no "
                "variance, so these are only pruned, as by top-k; check the model with gradveil.inspect, or use a "
                "defense whose noise the server does not choose",
                stacklevel=2,
            )

    def _perturbed(self, gradient: Tensor, weights: Tensor, source: Source) -> Tensor:
        row = gradient.reshape(1, -1)
        count = row.shape[1]
        std = self.scale * layer_risk(weights)
        informative = largest(row, share_of(self.noised, count, math.ceil))
        noisy = source.add_normal(row, std, where=informative)
        return keep_ranks(noisy, 0, share_of(1 - self.pruned, count, math.ceil)).reshape(gradient.shape)


def layer_risk(weights: Tensor) -> float:
    """How much a layer may leak by the paper's measure: the variance of its weights, at most 1."""
    return min(float(weights.var()), 1.0) if weights.numel() > 1 else 0.0
