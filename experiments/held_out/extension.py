"""`auto` against every single attack of its portfolio at equal work, on networks that nothing was tuned on.

equal work:  `auto`, or a member of its portfolio, with `work` nominal seconds for each victim.
peer:        Inverting Gradients of breaching 0.1.2 with `work` seconds of this processor for each victim, on the same
             updates; it is given the labels. It needs an environment with breaching, and its results depend on the
             machine. Its total variation has three channels, so it cannot be run on grey images.
"""

import importlib.util
import warnings
from dataclasses import replace
from pathlib import Path
from time import process_time

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradveil.attacks import Reconstruction, _portfolio
from gradveil.attacks._learned import Learning
from gradveil.attacks._portfolio import CLIENTS, PORTFOLIO, Calibration
from gradveil.audit import cases
from gradveil.core.errors import GradveilError
from gradveil.core.randomness import derived_generator
from gradveil.task import Task
from kinds import Row, Session, attack_row, attack_seen, fitted_case, posed_case

PEER = "invertinggradients of breaching 0.1.2"
OPERATORS = (
    *("nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_align"),
    *("_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward"),
)
"""Operators that torchvision, which the peer imports, expects; its own do not load beside this torch."""
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


def peer(case: Row, session: Session) -> Row:
    """Attack with the peer's code for as long: as many iterations as it does in that time."""
    torch.set_num_threads(1)
    if importlib.util.find_spec("breaching") is None:
        raise GradveilError(
            "peer: needs breaching; make an environment with pip install torch==2.13.0, this package and "
            "breaching==0.1.2, then torchvision==0.28.0 and lpips with --no-deps, and run this there"
        )
    observed = cases.observe(posed_case({**case, "model": f"{MODELS}@{case['network']}", "attack": "idlg"}))
    task, victims = observed.case.prepared.task, observed.case.victims
    if task.input_shape[0] != 3:
        return {"attack": PEER, "refused": "its total variation has three channels"}
    updates = [rounds[0][1] for rounds in observed.seen]
    attack, iterations = _Peer(case, task), 50
    attack.run(updates[0], victims.targets[0], iterations)  # what the first call takes is not counted
    began = process_time()
    attack.run(updates[0], victims.targets[0], iterations)
    iterations = max(1, round(case["work"] * iterations / (process_time() - began)))
    began, found = process_time(), []
    for number, update in enumerate(updates):
        found.append(attack.run(update, victims.targets[number], iterations))
        session.progress(number + 1, len(victims), 0.0)
    seconds = process_time() - began
    taken = torch.full((len(victims),), iterations)
    result = Reconstruction(torch.stack(found)[:, None], victims.targets, torch.zeros(len(victims)), taken)
    row = {**attack_row(case, observed, result), "attack": PEER, "attack_spec": f"{PEER}, {iterations} iterations"}
    return {**row, "chosen": None, "processor_seconds": seconds}


class _Peer:
    """breaching's Inverting Gradients as it comes, on the model of a task with inputs in [0, 1].

    Args:
        case: names the data set.
        task: the model that is attacked.
    """

    def __init__(self, case: Row, task: Task) -> None:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in OPERATORS:
            library.define(f"{name}(Tensor a) -> Tensor")
        import breaching

        self.library, self.breaching = library, breaching  # operators are gone with their library
        self.data = breaching.get_case_config("1_single_image_small").data
        self.data.shape, self.data.classes = list(task.input_shape), task.classes
        self.data.mean, self.data.std = [0.0] * task.input_shape[0], [1.0] * task.input_shape[0]
        self.model = task.copy_model()
        frozen = case.get("norms") == "inference"
        self.buffers = list(self.model.buffers()) if frozen else None

    def run(self, update: dict[str, Tensor], labels: Tensor, iterations: int) -> Tensor:
        """The image ``[channels, height, width]`` that it finds for an update."""
        config = self.breaching.get_attack_config("invertinggradients")
        config.optim.max_iterations = iterations
        setup = {"device": torch.device("cpu"), "dtype": torch.float}
        attacker = self.breaching.attacks.prepare_attack(self.model, torch.nn.CrossEntropyLoss(), config, setup)
        payload = {"parameters": list(self.model.parameters()), "buffers": self.buffers, "metadata": self.data}
        known = {"num_data_points": 1, "labels": labels, "local_hyperparams": None}
        gradients = [update[name] for name, _ in self.model.named_parameters()]
        shared = {"gradients": gradients, "buffers": None, "metadata": known}
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
            warnings.simplefilter("ignore")
            found, _ = attacker.reconstruct([payload], [shared], {})
        return found["data"][0].detach().clamp(0, 1)


KINDS = {"equal work": equal_work, "peer": peer}


def derive(row: Row) -> Row:
    """What won, in words."""
    if "refused" in row:
        return {"result": "does not apply", "by": ""}
    chosen = row["chosen"] or []
    return {"result": f"{row['median_psnr']:.1f}", "by": ", ".join(spec.partition(":")[0] for spec in chosen)}
