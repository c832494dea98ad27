"""What attackers recover who have public images, or a generator of such images; leaks are judged as an audit does it.

learned:     an attack and its verdicts. Of a fitted `lti` the linear rung is scored too; what it cost is given in
             units of one plain gradient of one image, measured in the same run.
denoised:    the same for `mjolnir`, with the cosine to the true gradient before and after denoising, as it is and after
             the class means of gradients have been subtracted (they are most of a gradient, and anybody knows them).
own samples: victims are samples of the attack's own generator: an attack that searches it must find them again.
noise:       the attack is given noise of the same length in place of the updates: what the generator does by itself.
sample:      no attack: a random sample of the generator for every label.

The blind guess to beat is the mean of the class over all training images.
"""

from dataclasses import replace
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

import gradveil
from gradveil.attacks import Reconstruction
from gradveil.attacks.controls import noise_like, random_samples
from gradveil.attacks.lti import LTI
from gradveil.attacks.mjolnir import Mjolnir
from gradveil.audit import cases
from gradveil.audit.cases import Observation
from gradveil.federation.job import evaluate
from gradveil.update import Rounds
from kinds import (
    Row,
    Session,
    attack_row,
    attack_seen,
    build,
    dataset_of,
    fitted_case,
    public_of,
    scores_of,
    victims_of,
)
from tables import gain


def verdicts(case: Row, seen: Observation, found: Reconstruction) -> Row:
    """The figures of an attack, and of each victim whether it leaked."""
    scores = scores_of(case, seen, found)
    # By the oldest rule alone, so that all rows of the page are alike.
    leaked = [score.metrics["leak_rule"] == "pixels" for score in scores]
    return {**attack_row(case, seen, found), "leaked": leaked, "share_leaked": sum(leaked) / len(leaked)}


def learned(case: Row, session: Session) -> Row:
    """Attack the victims' updates."""
    begun = perf_counter()
    fitted = fitted_case(case, session)
    fit_seconds = perf_counter() - begun
    seen = cases.observe(fitted)
    begun = perf_counter()
    found = attack_seen(seen, session)
    attack_seconds = perf_counter() - begun
    row = verdicts(case, seen, found)
    attack = fitted.attack
    if isinstance(attack, LTI) and attack.form != "linear":
        rung = replace(seen, case=replace(fitted, attack=attack.first_rung()))
        linear = verdicts(case, rung, attack_seen(rung, session))
        row["linear"] = {key: linear[key] for key in ("psnr", "ssim", "leaked", "share_leaked")}
    unit = gradient_seconds(fitted)
    row |= {"fit_gradients": fit_seconds / unit, "attack_gradients": attack_seconds / unit, "gradient_seconds": unit}
    if case.get("trained"):
        row["accuracy_attacked"] = evaluate(fitted.prepared.task, dataset_of(case).test)[0]
    return row


def gradient_seconds(case: cases.Case) -> float:
    """The time of one plain gradient of one image: the median of 21."""
    task, (inputs, targets) = case.prepared.task, case.victims.batches(0)[0]
    times = []
    for _ in range(21):
        begun = perf_counter()
        task.gradients(inputs[:1].to(task.dtype), targets[:1])
        times.append(perf_counter() - begun)
    return median(times)


def denoised(case: Row, session: Session) -> Row:
    """Attack with `mjolnir`, and compare what it was sent and what it made of it with the true gradients."""
    fitted = fitted_case(case, session)
    seen = cases.observe(fitted)
    task, attack = fitted.prepared.task, fitted.attack
    assert isinstance(attack, Mjolnir)
    problem = attack.pose(
        task, seen.seen, fitted.threat(fitted.victims.batch_size, seen.targets), torch.Generator().manual_seed(0)
    )
    public = public_of(case, task)
    means = class_means(task, *public)
    true = torch.stack(
        [flat(task.gradients(*fitted.victims.batches(victim)[0])) for victim in range(len(fitted.victims))]
    )
    received, found = (
        torch.stack([flat({name: value[victim] for name, value in updates.items()}) for victim in range(len(true))])
        for updates in (problem.updates, attack.denoise(problem).updates)
    )
    centres = means[fitted.victims.targets].mean(1)
    row = verdicts(case, seen, attack_seen(seen, session))
    for name, rows in (("received", received), ("denoised", found)):
        row[f"cosine_{name}"] = torch.cosine_similarity(rows, true).tolist()
        row[f"centred_cosine_{name}"] = torch.cosine_similarity(rows - centres, true - centres).tolist()
    return row


def flat(gradients: gradveil.task.Gradients) -> Tensor:
    return torch.cat([value.flatten() for value in gradients.values()])


def class_means(task: gradveil.Task, inputs: Tensor, labels: Tensor) -> Tensor:
    """The mean gradient of the public images of each class."""
    return torch.stack(
        [flat(task.gradients(inputs[labels == label], labels[labels == label])) for label in range(task.classes or 0)]
    )


def own_samples(case: Row, session: Session) -> Row:
    """Attack updates of images that the attack's generator can make."""
    task, victims = build(case), victims_of(case)
    labels = victims.targets.flatten()
    samples = random_samples(
        gradveil.attack(case["attack"]).generator, task, labels, torch.Generator().manual_seed(case["seed"])
    )
    fitted = fitted_case(case, session)
    own = replace(fitted, victims=replace(victims, inputs=samples.view_as(victims.inputs)))
    seen = cases.observe(own)
    return verdicts(case, seen, attack_seen(seen, session))


def noise(case: Row, session: Session) -> Row:
    """Attack noise of the same length as the updates, with labels known."""
    seen = cases.observe(fitted_case(case, session))
    draws = torch.Generator().manual_seed(case["seed"])
    fed = [Rounds([(task, noise_like(update, draws)) for task, update in rounds]) for rounds in seen.seen]
    seen = replace(seen, seen=fed)
    return verdicts(case, seen, attack_seen(seen, session))


def sample(case: Row, session: Session) -> Row:
    """Score a random sample of the generator for every label."""
    fitted = fitted_case(case, session)
    seen, task = cases.observe(fitted), fitted.prepared.task
    labels = fitted.victims.targets
    draws = torch.Generator().manual_seed(case["seed"])
    inputs = random_samples(fitted.attack.parameters["generator"], task, labels.flatten(), draws)
    empty = torch.zeros(len(labels))
    found = Reconstruction(inputs.view_as(fitted.victims.inputs), labels, empty, empty)
    return verdicts(case, seen, found)


def derive(row: Row) -> Row:
    """What the network gains over the linear rung, victim by victim, and how many victims were found again."""
    derived: Row = {"recovered": sum(psnr > 20 for psnr in row["psnr"])}
    if "linear" in row:
        derived["over_linear"] = gain(row["psnr"], row["linear"]["psnr"])
    return derived


KINDS = {"learned": learned, "denoised": denoised, "own samples": own_samples, "noise": noise, "sample": sample}
