"""How far refiner's gradient lies from the client's own, refiner without element weights, and its blended start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

import gradveil
from gradveil.audit.cases import Victims
from gradveil.defenses import DEFENSES
from gradveil.defenses.refiner import Refiner, layer_numbers
from gradveil.modality import IMAGE
from kinds import Row, Session, attacked, build, dataset_of, described, figures


@DEFENSES.register("refiner-without-element-weights")
@dataclass(frozen=True, repr=False)
class Unweighted(Refiner):
    """For the ablation: every coordinate of a layer counts alike in the utility metric."""

    def weights(self, gradients: dict[str, Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        layers = layer_numbers(gradients)
        return {name: torch.full_like(value, self.decay ** layers[name]) for name, value in gradients.items()}


def attack(case: Row, session: Session) -> Row:
    """An attack, with the distance of what was shared from the victim's own gradient."""
    seen, found = attacked(case, session)
    row, victims, task = described(case, seen, found), seen.case.victims, seen.case.stage.task
    gradients = [task.gradients(*victims.batches(victim)[0]) for victim in range(len(victims))]
    norms = [float(torch.cat([value.flatten() for value in one.values()]).norm()) for one in gradients]
    relative = [power**0.5 for power in seen.power]
    row |= {"gradient_norm": norms, "relative_distance": relative}
    row["distance"] = [norm * share for norm, share in zip(norms, relative, strict=True)]
    if itself := row.get("trained_on_itself"):
        row |= {"robust_psnr": itself["psnr"], "robust_noise_ratio": itself["noise_ratio"]}
    return row


def blended_start(case: Row, session: Session) -> Row:
    """Draw what a search finds from the images themselves, half way to noise, and what it finds from there."""
    images, labels = dataset_of(case).test.batch(range(case["images"]))
    victims, noise = Victims(images[:, None], labels[:, None]), torch.rand(images.shape, generator=torch.manual_seed(0))
    lines = {"image": images, "start": torch.lerp(images, noise, 0.5)}
    for blend in (0.0, 0.5):
        memory: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(case["seed"])
        gradveil.defense("refiner", blend=blend).share(build(case), images, labels, generator=generator, memory=memory)
        lines[f"blend {blend:g}"] = memory["trained_on"]
    shown = torch.cat([lines[name] for name in ("image", "blend 0.0", "start", "blend 0.5")], dim=2)
    (session.folder / "blended_start.png").write_bytes(IMAGE.render(interpolate(shown, scale_factor=4)))
    return {name: figures(victims, found, labels) for name, found in lines.items()}


def derive(row: Mapping[str, Any]) -> Row:
    """Whether the paper would call it private."""
    if row.get("kind") != "attack":
        return {}
    private = row["median_psnr"] < 15 and row["median_ssim"] < 0.5 and row["median_noise_ratio"] > 0.4
    return {"private": "yes" if private else "no"}


KINDS = {"attack": attack, "blended start": blended_start}
