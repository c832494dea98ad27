"""What closed-form and active attacks recover from batches, and what `gradveil.inspect` notices of an active server.

ranks: which layers the recursion of r-gap cannot pass. imprint: an imprint block before the model and, with `inspect`,
whether a client detects it. planted, honest: findings on disguised blocks and on models that nobody tampered with.
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
from kinds import Row, Session, attack_row, build, matched_to_originals, public_of, run_attack, run_training


@torch.no_grad()
def rescale(block: Imprint, factors: Tensor) -> None:
    """Scale the encoder's rows to the size of an ordinary layer's; the block's output stays the same."""
    factors = factors / factors.mean() * 0.01 / block.encode.weight.abs().mean()
    block.encode.weight.mul_(factors[:, None])
    block.encode.bias.mul_(factors)
    block.decode.weight.div_(factors)


@ATTACKS.register("jittered-robbing-the-fed")
@dataclass(frozen=True, repr=False)
class Jittered(RobbingTheFed):
    """Robbing the Fed with noise of a relative size on its rows, so that they do not look parallel."""

    jitter: float = number(0.0, low=0)

    def modify(self, task: gradveil.Task, **given: Any) -> gradveil.Task:
        model = super().modify(task, **given).copy_model()
        rescale(model.imprint, torch.ones(2 * self.bins))
        weight = model.imprint.encode.weight
        noise = torch.randn(weight.shape, generator=derived_generator(0, "jitter"))
        # The noise has no component along the mean image, which would shift the thresholds.
        weight.data += self.jitter * weight.abs().mean() * (noise - noise.mean(1, keepdim=True))
        return task.with_model(model)


def imprint(case: Row, session: Session) -> Row:
    """How many images are recovered (`above` so many dB), in all and among those that the attacker is certain of."""
    seen, found = run_attack(case, session)
    attack_case, above = seen.case, case["above"]
    row = attack_row({**case, "each": True}, seen, found)
    good = torch.tensor(row["psnr"]).view(attack_case.victims.targets.shape) > above
    certain = matched_to_originals(attack_case.victims, found.inputs, found.certain)[1]
    shares = good.double().view(len(good) * attack_case.victims.clients, -1).mean(1)
    row |= {f"above_{above}_db": good.sum(1).tolist(), f"share_above_{above}_db": shares.tolist()}
    expected = (1 - 1 / attack_case.attack.bins) ** (attack_case.victims.batch_size - 1)
    row |= {"mean_share": float(shares.mean()), "expected_share": expected, "declared_single": int(certain.sum())}
    row[f"of_these_above_{above}_db"] = int((certain & good).sum())
    return row | ({"findings": findings(attack_case.prepared.sent)} if case.get("inspect") else {})


def ranks(case: Row, _session: Session) -> Row:
    names = ("name", "kind", "unknowns", "forward", "gradient", "rank", "reason")
    return {"layers": [{name: getattr(layer, name) for name in names} for layer in recursion_ranks(build(case))]}


def findings(task: gradveil.Task) -> list[str]:
    return sorted({finding.kind for finding in gradveil.inspect(task.copy_model())})


def planted(case: Row, _session: Session) -> Row:
    """Findings on the blocks as they are shipped, and on the same blocks in disguise."""
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
    """False alarms on models that nobody tampered with: the `untrained` ones as created, and others after training."""
    rows = {}
    for name in case.get("untrained", []):
        for init in ("default", "uniform"):
            rows[f"{name}:init={init}"] = findings(build({**case, "model": f"{name}:init={init}"}))
    for settings in case["trainings"]:
        result = run_training({**case, "defense": "none", **settings}, session, part=settings["model"])
        description = f"{settings['model']} after {len(result.rounds)} rounds, accuracy {result.accuracy:.3f}"
        rows[description] = findings(result.task)
    return {"findings": rows, "alarms": [name for name, found in rows.items() if found]}


KINDS = {"imprint": imprint, "ranks": ranks, "planted": planted, "honest": honest}
