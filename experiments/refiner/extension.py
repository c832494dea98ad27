"""The distance of refiner's gradient from the true one, refiner without element weights, and its blended start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

import gradveil
from gradveil.audit.cases import Victims
from gradveil.core.randomness import derived_generator, source_of
from gradveil.defenses import DEFENSES
from gradveil.defenses.refiner import Refiner, layer_numbers
from gradveil.modality import IMAGE
from gradveil.models.evaluation import evaluation_network
from kinds import Row, Session, attack_row, build, dataset_of, figures, run_attack, victims_of


@DEFENSES.register("refiner-without-element-weights")
@dataclass(frozen=True, repr=False)
class Unweighted(Refiner):
    """For the ablation: every coordinate of a layer has the same weight in the utility metric."""

    def weights(self, gradients: dict[str, Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        layers = layer_numbers(gradients)
        return {name: torch.full_like(value, self.decay ** layers[name]) for name, value in gradients.items()}


def attack(case: Row, session: Session) -> Row:
    """Run an attack, and measure how far the shared gradient lies from the victim's own."""
    seen, found = run_attack(case, session)
    row, victims, task = attack_row(case, seen, found), seen.case.victims, seen.case.prepared.task
    gradients = [task.gradients(*victims.batches(victim)[0]) for victim in range(len(victims))]
    norms = [float(torch.cat([value.flatten() for value in gradient.values()]).norm()) for gradient in gradients]
    relative = [power**0.5 for power in seen.power]
    row |= {"gradient_norm": norms, "relative_distance": relative}
    row["distance"] = [norm * share for norm, share in zip(norms, relative, strict=True)]
    if itself := row.get("trained_on_itself"):
        row |= {"robust_psnr": itself["psnr"], "robust_noise_ratio": itself["noise_ratio"]}
    return row


def search(case: Row, _session: Session) -> Row:
    """How far the search gets from the blended start: the distance to the client's gradient, D, and the error of x*."""
    task, victims, defense = build(case), victims_of(case), gradveil.defense(case["defense"])
    names = ("gradient_norm", "blend_distance", "blend_noise_ratio", "distance", "noise_ratio", "mse")
    measured: Row = {name: [] for name in names}
    for victim in range(len(victims)):
        inputs, labels = victims.batches(victim)[0]
        own, memory = task.gradients(inputs, labels), {}

        def distance(shared: Mapping[str, Tensor], own: Mapping[str, Tensor] = own) -> float:
            return float(torch.cat([(shared[name] - value).flatten() for name, value in own.items()]).norm())

        shared = defense.share(task, inputs, labels, generator=derived_generator(case["seed"], victim), memory=memory)
        noise = source_of(derived_generator(case["seed"], victim)).uniform(inputs)  # what the defense drew
        start, robust = torch.lerp(inputs, noise, defense.blend), memory["trained_on"]
        values = (
            float(torch.cat([value.flatten() for value in own.values()]).norm()),
            distance(task.gradients(start, labels)),
            float(evaluation_network()(start).mean()),
            distance(shared),
            float(evaluation_network()(robust).mean()),
            float((robust - inputs).square().mean()),
        )
        for name, value in zip(names, values, strict=True):
            measured[name].append(value)
    return measured


def blended_start(case: Row, session: Session) -> Row:
    """Draw what the search for D alone (figure 5) finds from the images, and from halfway between images and noise."""
    images, labels = dataset_of(case).test.batch(range(case["images"]))
    victims, noise = Victims(images[:, None], labels[:, None]), torch.rand(images.shape, generator=torch.manual_seed(0))
    lines = {"image": images, "start": torch.lerp(images, noise, 0.5)}
    for name, blend in (("from image", 0.0), ("from start", 0.5)):
        memory: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(case["seed"])
        gradveil.defense("refiner", blend=blend, balance=1e6).share(
            build(case), images, labels, generator=generator, memory=memory
        )
        lines[name] = memory["trained_on"]
    shown = torch.cat([lines[name] for name in ("image", "from image", "start", "from start")], dim=2)
    (session.folder / "blended_start.png").write_bytes(IMAGE.render(interpolate(shown, scale_factor=4)))
    return {name: figures(victims, found, labels) for name, found in lines.items()}


def derive(row: Mapping[str, Any]) -> Row:
    """What the attacker knows of the defense, and whether the result is private by the paper's thresholds."""
    if row.get("kind") not in ("attack", "blind guess"):
        return {}
    private = row["median_psnr"] < 15 and row["median_ssim"] < 0.5 and row["median_noise_ratio"] > 0.4
    return {"private": "yes" if private else "no", "knows": row.get("form") or "nothing", "by": row.get("by", "")}


KINDS = {"attack": attack, "blended start": blended_start, "search": search}
