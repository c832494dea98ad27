"""What closed-form and active attacks recover of batches, and what `gradveil.inspect` notices of an active server.

ranks: which layers the recursion of r-gap cannot pass. imprint: an imprint block before the model; with `inspect`,
whether a client sees it. planted, zoo, well trained: findings on blocks in disguise and on honest models.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gradveil
from gradveil.attacks import ATTACKS
from gradveil.attacks.robbing_the_fed import RobbingTheFed
from gradveil.core.parameters import number
from gradveil.core.randomness import derived_generator
from gradveil.models.malicious import Imprint
from gradveil.theory import recursion_ranks
from kinds import Row, Session, attacked, build, described, in_order, public_of, trained


@torch.no_grad()
def rescale(block: Imprint, factors: Tensor) -> None:
    """Give the encoder's rows sizes that an ordinary layer has; the block computes the same."""
    factors = factors / factors.mean() * 0.01 / block.encode.weight.abs().mean()
    block.encode.weight.mul_(factors[:, None])
    block.encode.bias.mul_(factors)
    block.decode.weight.div_(factors)


@ATTACKS.register("jittered-robbing-the-fed")
@dataclass(frozen=True, repr=False)
class Jittered(RobbingTheFed):
    """Robbing the Fed with rows drawn apart by noise of a relative size, so that they are not seen to be alike."""

    jitter: float = number(0.0, low=0)

    def modify(self, task: gradveil.Task, **given: Any) -> gradveil.Task:
        model = super().modify(task, **given).copy_model()
        rescale(model.imprint, torch.ones(2 * self.bins))
        weight = model.imprint.encode.weight
        noise = torch.randn(weight.shape, generator=derived_generator(0, "jitter"))
        # Without a part along the mean image, by which the thresholds would shift.
        weight.data += self.jitter * weight.abs().mean() * (noise - noise.mean(1, keepdim=True))
        return task.with_model(model)


def imprint(case: Row, session: Session) -> Row:
    """How many images are recovered (`above` so many dB), and how many of those that the attacker is sure of."""
    seen, found = attacked(case, session)
    known, above = seen.case, case["above"]
    row = described({**case, "each": True}, seen, found)
    good = torch.tensor(row["psnr"]).view(known.victims.targets.shape) > above
    certain = in_order(known.victims, found.inputs, found.certain)[1]
    shares = good.double().view(len(good) * known.victims.clients, -1).mean(1)
    row |= {f"above_{above}_db": good.sum(1).tolist(), f"share_above_{above}_db": shares.tolist()}
    expected = (1 - 1 / known.attack.bins) ** (known.victims.batch_size - 1)
    row |= {"mean_share": float(shares.mean()), "expected_share": expected, "declared_single": int(certain.sum())}
    row[f"of_these_above_{above}_db"] = int((certain & good).sum())
    return row | ({"findings": findings(known.stage.sent)} if case.get("inspect") else {})


def ranks(case: Row, _session: Session) -> Row:
    names = ("name", "kind", "unknowns", "forward", "gradient", "rank", "reason")
    return {"layers": [{name: getattr(layer, name) for name in names} for layer in recursion_ranks(build(case))]}


def findings(task: gradveil.Task) -> list[str]:
    return sorted({finding.kind for finding in gradveil.inspect(task.copy_model())})


def planted(case: Row, _session: Session) -> Row:
    """What is seen of the shipped blocks, and of the same blocks in disguise."""
    generator, rows = derived_generator(case["seed"], "inspect"), {}

    def sent(model: str, spec: str) -> gradveil.Task:
        task = build({**case, "model": model})
        return gradveil.attack(spec).modify(task, public=public_of(case, task), generator=generator)

    for model in ("lenet", "resnet18"):
        for spec in ("robbing-the-fed", "robbing-the-fed:signal=1", "robbing-the-fed:bins=1024", "loki:bins=64"):
            rows[f"{spec} before {model}"] = findings(sent(model, spec))
    for disguise in ("renamed", "row-permuted", "rescaled"):
        task = sent("lenet", "robbing-the-fed")
        model = task.copy_model()
        block = model.imprint
        if disguise == "renamed":
            inner = [block.encode, block.relu, block.decode, nn.Unflatten(1, (3, 32, 32))]
            model = nn.Sequential(nn.Flatten(), *inner, model.model)
        elif disguise == "row-permuted":
            order = torch.randperm(len(block.encode.bias), generator=generator)
            for tensor in (block.encode.weight, block.encode.bias, block.decode.weight.T):
                tensor.data.copy_(tensor.data[order])
        else:
            rescale(block, torch.exp(2 * torch.randn(len(block.encode.bias), generator=generator)))
        rows[f"{disguise} block before lenet"] = findings(task.with_model(model))
    return {"findings": rows, "missed": [name for name, found in rows.items() if not found]}


def honest(case: Row, session: Session) -> Row:
    """Alarms on models that nobody tampered with: as they are made, if `untrained`, and after trainings."""
    rows = {}
    for name in case.get("untrained", []):
        for init in ("default", "uniform"):
            rows[f"{name}:init={init}"] = findings(build({**case, "model": f"{name}:init={init}"}))
    for settings in case["trainings"]:
        result = trained({**case, "defense": "none", **settings}, session, part=settings["model"])
        about = f"{settings['model']} after {len(result.rounds)} rounds, accuracy {result.accuracy:.3f}"
        rows[about] = findings(result.task)
    return {"findings": rows, "alarms": [name for name, found in rows.items() if found]}


KINDS = {"imprint": imprint, "ranks": ranks, "planted": planted, "honest": honest}
