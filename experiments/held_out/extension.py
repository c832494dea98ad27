"""`auto` against every single attack of its portfolio at equal work, on networks that nothing was tuned on."""

from dataclasses import replace
from pathlib import Path
from time import process_time

import torch

from gradveil.attacks import _portfolio
from gradveil.attacks._learned import Learning
from gradveil.attacks._portfolio import CLIENTS, PORTFOLIO, Calibration
from gradveil.audit import cases
from gradveil.core.errors import GradveilError
from gradveil.core.randomness import derived_generator
from kinds import Row, Session, attack_row, attack_seen, fitted_case, posed_case

MODELS = Path(__file__).with_name("models.py")


def equal_work(case: Row, session: Session) -> Row:
    """Attack with `work` nominal seconds for each victim; `auto` pays for its trials out of the same sum.

    A single attack gets as many iterations as that allows, `lti` all of it for learning. One that cannot attack this
    network has a row that says so.
    """
    torch.set_num_threads(1)
    began = process_time()
    case = {**case, "model": f"{MODELS}@{case['network']}"}
    if case["attack"] == "auto":
        share = case["victims"] / (case["victims"] + CLIENTS)
        case["attack"] = f"auto:seconds={case['work'] * share:g}"
        seen = cases.observe(fitted_case(case, session))
    else:
        member = next(member for member in PORTFOLIO if member.spec == case["attack"])
        try:
            seen = _observed_by(member, case, session)
        except GradveilError as error:
            return {"refused": str(error)}
    row = attack_row(case, seen, attack_seen(seen, session))
    chosen = getattr(seen.case.attack, "chosen", None)
    return {**row, "chosen": chosen and chosen["members"], "processor_seconds": process_time() - began}


def _observed_by(member: _portfolio.Member, case: Row, session: Session) -> cases.Observation:
    """What a single attack sees, once it has the iterations that its budget allows, or has learned."""
    unfitted = posed_case({**case, "attack": "auto"})
    threat = unfitted.threat(case.get("batch_size", 1), unfitted.victims.targets)
    learning = Learning(derived_generator(case["seed"], "held-out"))
    calibration = Calibration.of(unfitted.prepared.task, threat, learning)
    price = calibration.price(member)
    attack = member.within(case["work"], price, least=1)
    if attack.needs_public:
        attack = calibration.learned(attack, case["work"] * case["victims"], session.progress)
    return cases.observe(replace(unfitted, attack=attack))


KINDS = {"equal work": equal_work}


def derive(row: Row) -> Row:
    """What won, in words."""
    if "refused" in row:
        return {"result": "does not apply", "by": ""}
    chosen = row["chosen"] or []
    return {"result": f"{row['median_psnr']:.1f}", "by": ", ".join(spec.partition(":")[0] for spec in chosen)}
