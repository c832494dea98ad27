"""Decoys of gradient dropout, lying publishers of locations, and starving coordinates.

decoys: how well an attacker tells decoys from real values, layer by layer. starvation: one client sends, over many
rounds, an artificial gradient that is constant except for noise of twice its spread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import gradveil
from gradveil import metrics
from gradveil.core.parameters import integer
from gradveil.core.randomness import derived_generator
from gradveil.defenses import DEFENSES
from gradveil.defenses.aligned_dual_pruning import AlignedDualPruning
from kinds import Row, Session, build, victims_of


@DEFENSES.register("lying-publisher")
@dataclass(frozen=True, repr=False)
class LyingPublisher(AlignedDualPruning):
    """Aligned dual pruning in which `of_ten` in ten elected clients publish the locations of their smallest values."""

    of_ten: int = integer(1, low=0, high=10)

    def publish(self, gradients: Mapping[str, Tensor], memory: Any = None) -> Mapping[str, Tensor]:
        own = torch.cat([value.flatten() for value in gradients.values()])
        draw = derived_generator(0, "liar", float(own.double().sum()))  # the same if the round is run again
        if float(torch.rand((), generator=draw)) < self.of_ten / 10:
            gradients = {name: 1 / (value.abs() + 1e-30) for name, value in gradients.items()}
        return super().publish(gradients)


def decoys(case: Row, _session: Session) -> Row:
    """Area under the curve for each layer, averaged over the victims."""
    task, victims, dropout = build(case), victims_of(case), gradveil.defense(case["defense"])
    areas: dict[str, list[float]] = {}
    for victim in range(len(victims)):
        (batch,) = victims.batches(victim)
        sent = dropout.share(task, *batch, generator=derived_generator(case["seed"], "share", victim))
        for name, gradient in task.gradients(*batch).items():
            layer = float((gradient / dropout.keep).square().mean().sqrt()) if dropout.scale == "layer" else 1.0
            spread = dropout.std * layer
            if gradient.numel() >= 100 and spread > 0:  # with fewer values an area is noise
                areas.setdefault(name, []).append(metrics.decoy_auc(gradient, sent[name], dropout.keep, spread))
    return {"auc": {name: fmean(values) for name, values in areas.items()}}


def starvation(case: Row, _session: Session) -> Row:
    """Starving coordinates (%) and energy held back, by round; the cosine between all that was sent and wanted."""
    values, generator = case["values"], torch.Generator().manual_seed(case["seed"])
    base = torch.randn(values, generator=generator) * torch.rand(values, generator=generator)
    defense, memory = gradveil.defense(case["defense"]), {}
    sent, wanted, last_sent = torch.zeros(3, values)
    starving, energy = [], []
    for round_ in range(1, case["rounds"] + 1):
        gradient = base + 2 * base.std() * torch.randn(values, generator=generator)
        update = defense.perturb({"w": gradient}, memory=memory)["w"]
        sent, wanted = sent + update, wanted + gradient
        last_sent[update != 0] = round_
        starving.append((round_, 100 * float((round_ - last_sent > case["patience"]).double().mean())))
        held = memory.get("residual/w", torch.zeros(1))
        energy.append((round_, float(held.square().sum() / base.square().sum()) or None))
    return {"starving": starving[::4], "energy": energy[::4], "cosine": float(torch.cosine_similarity(sent, wanted, 0))}


def derive(row: Mapping[str, Any]) -> Row:
    """The outcome of a training run."""
    if row.get("kind") != "training":
        return {}
    return {"ended": f"diverged in round {row['diverged']}" if row["diverged"] else f"{row['percent_accuracy']:.1f} %"}


KINDS = {"decoys": decoys, "starvation": starvation}
