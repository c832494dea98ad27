"""Measures what the sensitivity-driven defenses promise.

tradeoff: the optimal defenses compared with magnitude pruning and uniform noise. bound: attacks on smoothed victims
compared with the reconstruction bound. risk: the ranking of layers compared with that of the brute-force Jacobian.
slicing: risk slicing in a federation of 100 clients. slices: attacks on risk slicing, and how evenly its slices share
the true risk, by what they are balanced by and by the root set. compensation: how close compensated aggregates come to
the clean one, in distance and cosine.
"""

import math
from collections.abc import Mapping
from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import gradveil
from gradveil import theory
from gradveil.audit.cases import Batch, Case, Victims, attack_on, observe, prepare
from gradveil.core.randomness import derived_generator
from gradveil.data import partition
from gradveil.defenses.risk_slicing import BALANCES, cut_slices, layer_risks
from gradveil.federation.job import as_batch, evaluate
from gradveil.update import weighted_mean
from kinds import (
    Row,
    Session,
    attack,
    attack_of,
    attack_row,
    build,
    dataset_of,
    local_of,
    public_of,
    run_attack,
    run_training,
    victims_of,
)

Values = Mapping[str, Tensor]
TRUE_RISK_EXAMPLES = 200


def tradeoff(case: Row, session: Session) -> Row:
    """What is recovered, U1, U2 and tr J_F at the initial weights, and the loss after training."""
    if "u2_of" in case:
        case = {**case, "defense": noise_of_equal_u2(case)}
    seen, found = run_attack(case, session)
    prepared, batches = seen.case.prepared, batches_of(seen.case.victims)
    draws = derived_generator(case["seed"], "u2")
    use = theory.usefulness(prepared.task, batches, prepared.defense, draws=32, generator=draws)
    result = run_training(case, session)
    row = attack_row(case, seen, found) | {"defense": str(prepared.defense), "u1": use.u1, "u2": use.u2}
    row["data_information"] = data_information(prepared.task, batches, prepared.defense, case["seed"])
    row |= {"train_loss": evaluate(result.task, dataset_of(case).train)[1], "test_accuracy": result.accuracy}
    return row | {"history": result.history, "round_seconds": result.round_seconds}


def batches_of(victims: Victims) -> list[Batch]:
    return [victims.batches(victim)[0] for victim in range(len(victims))]


def noise_of_equal_u2(case: Row) -> str:
    """The spec of the uniform noise that has the same U2: noise of variance v has U2 = -v |g|^2."""
    task, batches, other = build(case), batches_of(victims_of(case)), gradveil.defense(case["u2_of"])
    u2 = theory.usefulness(task, batches, other, draws=64, generator=derived_generator(case["seed"], "u2")).u2
    squared = fmean(float(flat(task.gradients(*batch)).square().sum()) for batch in batches)
    return f"gaussian-noise:std={math.sqrt(-u2 / squared)}"


def data_information(task: gradveil.Task, batches: list[Batch], defense: gradveil.Defense, seed: int) -> float | None:
    """Mean of sum s^2 / variance; for optimal noise, the variance of its local form, which the bound leaves out."""
    if defense.name not in ("gaussian-noise", "optimal-noise"):
        return None
    total = []
    for number, batch in enumerate(batches):
        s2 = task.sensitivity(*batch, 40, generator=derived_generator(seed, "information", number))
        variance: Mapping[str, float | Tensor] = dict.fromkeys(s2, defense.std**2)
        if defense.name == "optimal-noise":
            # This must not be the estimate s2: with the same one the sum would be biased low.
            drawn = task.sensitivity(*batch, 10, generator=derived_generator(seed, "share", number))
            variance = defense.variance(drawn, {name: g.square() for name, g in task.gradients(*batch).items()})
        total.append(sum(theory.reconstruction.information(s2[name], variance[name]) for name in s2))
    return fmean(total)


def bound(case: Row, _session: Session) -> Row:
    """Attack smoothed images under uniform noise and compare the errors with the bound.

    The noise makes tr J_F `share` times the prior's n / tau^2, so the bound is tau^2 / (1 + share) per value. The last
    attacker is given the image before smoothing and computes the posterior mean for the linearised gradient: nobody who
    sees one update can do much better.
    """
    tau, task, clean = theory.reconstruction.SMOOTHING, build(case).to(torch.float64), victims_of(case)
    images, labels = clean.inputs.double(), clean.targets
    generator = derived_generator(case["seed"], "smooth")
    smoothed = Victims(images + tau * torch.randn(images.shape, generator=generator, dtype=torch.float64), labels)
    traces = [task.sensitivity(*batch, 40, generator=generator).values() for batch in batches_of(smoothed)]
    trace = fmean(sum(float(value.sum()) for value in values) for values in traces)
    variance = trace * tau**2 / smoothed.inputs[0].numel() / case["share"]
    before = batches_of(Victims(images, labels))
    limit = theory.reconstruction_bound(task, before, variance, directions=40, generator=generator)
    defense, guesses = gradveil.defense("gaussian-noise", std=math.sqrt(variance)), {}
    for spec in case["attacks"]:
        attacker = gradveil.attack(spec)
        prepared = prepare(task, defense, attacker, public=None, seed=case["seed"])
        seen = observe(Case(prepared, attacker, smoothed, labels="known", seed=case["seed"]))
        guesses[spec] = attack_on(seen).inputs
    guesses["the image before smoothing"] = images
    pairs = zip(before, (rounds[0][1] for rounds in seen.seen), strict=True)
    guesses["linearised Bayes from the image before smoothing"] = torch.stack(
        [start + bayes(task, start, label, update, variance, tau**2) for (start, label), update in pairs]
    )
    errors = {name: (guess - smoothed.inputs).square().flatten(1).mean(1) for name, guess in guesses.items()}
    row = {"tau": tau, "std": defense.std, "bound_mse": limit.mse, "tau_squared_over_2": tau**2 / 2}
    row["mean_mse"] = {name: float(each.mean()) for name, each in errors.items()}
    row["standard_error"] = {name: float(each.std() / len(each) ** 0.5) for name, each in errors.items()}
    return row


def bayes(task: gradveil.Task, start: Tensor, label: Tensor, update: Values, noise: float, prior: float) -> Tensor:
    """The posterior mean of x - start, with prior variance `prior`, if the gradient were linear around `start`."""
    basis = torch.eye(start.numel(), dtype=start.dtype)

    def response(direction: Tensor) -> Tensor:
        tangent = (direction.view_as(start),)
        return flat(torch.func.jvp(lambda x: task.gradient(task.parameters, x, label), (start,), tangent)[1])

    jacobian = torch.func.vmap(response, chunk_size=98)(basis)  # [inputs, gradients]
    difference = flat(update) - flat(task.gradients(start, label))
    precision = jacobian @ jacobian.T / noise + basis / prior
    return torch.linalg.solve(precision, jacobian @ difference / noise).view_as(start)


def risk(case: Row, _session: Session) -> Row:
    """Rank the layers by estimated risk and by that of the brute-force Jacobian, on the same public images."""
    task = build(case)
    inputs, labels = (tensor[: case["examples"]] for tensor in public_of(case, task))
    estimate = layer_risks(task, inputs, labels, generator=derived_generator(case["seed"], "risk"))
    exact = layer_risks(task, inputs, labels, directions=None)
    rankings = [sorted(risks, key=risks.__getitem__, reverse=True) for risks in (estimate, exact)]
    row = {"same_ranking": rankings[0] == rankings[1], "ranking": rankings[0], "exact_ranking": rankings[1]}
    error = max(abs(estimate[name] / exact[name] - 1) for name in exact)
    return {**row, "exact": exact, "largest_relative_error": error}


def slicing(case: Row, session: Session) -> Row:
    """Run a federated training, then attacks on another network."""
    result = run_training(case, session)
    row = {name: getattr(result, name) for name in ("accuracy", "history", "round_seconds", "diverged")}
    for spec in case["attacks"]:
        found = attack({**case, "attack": spec, "model": case["attacked_model"]}, session)
        row[spec] = {metric: fmean(found[metric]) for metric in ("psnr", "ssim", "mse")}
    return row


def slices(case: Row, session: Session) -> Row:
    """Attack risk slicing prepared on a root set, and measure how evenly slices cut with that set share the true risk.

    The imbalance is the largest true risk of a slice relative to the mean, for everything slices can be balanced by.
    """
    task, attacker, defense, seed = build(case), attack_of(case), gradveil.defense(case["defense"]), case["seed"]
    root, victims, adaptive = root_set(case, task), victims_of(case), case.get("adaptive", False)
    prepared = prepare(task, defense, attacker, public=root, seed=seed)
    seen = observe(Case(prepared, attacker, victims, adaptive=adaptive, labels=case["labels"], seed=seed))
    row = attack_row(case, seen, attack_on(seen, progress=session.progress))
    estimate = layer_risks(task, *root, generator=derived_generator(seed, "risk"))
    true = true_risks(case["dataset"], case["model"], seed)
    error = max(abs(estimate[name] / risk - 1) for name, risk in true.items())
    imbalance = {}
    for balance in BALANCES:
        slice_of = cut_slices(task.parameters, estimate, defense.slices, balance)
        counts = {name: numbers.flatten().bincount(minlength=defense.slices) for name, numbers in slice_of.items()}
        total = torch.stack([true[name] * count / count.sum() for name, count in counts.items()]).sum(0)
        imbalance[balance] = float(total.max() / total.mean())
    return {**row, "imbalance": imbalance, "largest_relative_error": error, "true_risks": true}


def root_set(case: Row, task: gradveil.Task) -> Batch:
    """The public examples: `root_examples` training images, of which a share `root_bias` shows one and the same class.

    With ten classes a share of .1 is no bias. The class is 0; the others share the rest as they come.
    """
    split, count = dataset_of(case).train, case["root_examples"]
    order = torch.randperm(len(split), generator=derived_generator(case["seed"], "root"))
    favoured = split.targets[order] == 0
    of_class = round(case["root_bias"] * count)
    chosen = torch.cat([order[favoured][:of_class], order[~favoured][: count - of_class]])
    return as_batch(task, split.batch(chosen))


@cache
def true_risks(dataset: str, model: str, seed: int) -> dict[str, float]:
    """The layers' exact risks on many examples."""
    case = {"dataset": dataset, "model": model, "seed": seed}
    task, split = build(case), dataset_of(case).train
    order = torch.randperm(len(split), generator=derived_generator(seed, "true risk"))[:TRUE_RISK_EXAMPLES]
    return layer_risks(task, *as_batch(task, split.batch(order)), directions=None)


def compensation(case: Row, _session: Session) -> Row:
    """What compensation does to the mean update of ten clients with 20 images of two classes each."""
    task, train, seed = build(case), dataset_of(case).train, case["seed"]
    generator = derived_generator(seed, "prepare")
    defense, _ = gradveil.defense(case["defense"]).prepare(task, public=public_of(case, task), generator=generator)
    shares = partition(train.targets, clients=100, scheme="classes", classes_per_client=2, seed=seed)[:10]
    none, local = gradveil.defense("none"), local_of(case)
    clean = [
        none.share(task, *train.batch(share[:20]), local=local, generator=derived_generator(seed, "clean", number))
        for number, share in enumerate(shares)
    ]
    sent = [defense.perturb(update, generator=derived_generator(seed, n)) for n, update in enumerate(clean)]
    goal, noisy = weighted_mean(clean), weighted_mean(sent)
    variance = defense.aggregate_variance([1.0] * len(sent))
    noise = {name: noisy[name] - value for name, value in goal.items()}
    aspect = defense.aspect
    left = flat(gradveil.compensate(noise, variance, aspect=aspect)).square().sum() / flat(noise).square().sum()
    results = {"before": noisy, "after": gradveil.compensate(noisy, variance, aspect=aspect)}
    results["paper"] = gradveil.compensate(noisy, variance * len(sent) ** 2, aspect=aspect)  # the variance of a sum
    distance = {name: float((flat(value) - flat(goal)).norm()) for name, value in results.items()}
    cosine = {name: float(torch.cosine_similarity(flat(value), flat(goal), 0)) for name, value in results.items()}
    paper = {"distance": distance.pop("paper"), "cosine": cosine.pop("paper")}
    norm = float(flat(goal).norm())
    return {"clean_norm": norm, "energy_left": float(left), "distance": distance, "cosine": cosine, "paper": paper}


def flat(update: Values) -> Tensor:
    return torch.cat([value.flatten() for value in update.values()]).double()


def derive(row: Mapping[str, Any]) -> Row:
    """The PSNR of each attack; of a training, the accuracy at its end, and 1 if it diverged and was stopped, else 0.

    A mean of evaluations would hide that a stopped training had lost what it had learned.
    """
    added: Row = {spec.partition(":")[0]: row[spec]["psnr"] for spec in row.get("attacks", []) if spec in row}
    if row["kind"] == "training":
        stopped = row["diverged"] is not None
        added |= {"stopped": int(stopped), "reached": row["history"][-1][1] if stopped else row["accuracy"]}
    return added


KINDS = {
    "tradeoff": tradeoff,
    "bound": bound,
    "risk": risk,
    "slicing": slicing,
    "slices": slices,
    "compensation": compensation,
}
