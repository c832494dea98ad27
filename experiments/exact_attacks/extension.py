"""Attacks that recover inputs exactly: which batches, up to which noise, and how many clients hide each other."""

import torch

from gradveil import metrics
from kinds import Row, Session, run_attack

EXACT = 100.0
"""From this many dB on, the worst image of a batch counts as recovered exactly."""


def exact(case: Row, session: Session) -> Row:
    """The PSNR of every image without a ceiling, and which batches are exact, meaning every image of them is."""
    seen, found = run_attack(case, session)
    victims = seen.case.victims
    inputs = found.inputs.double().cpu().reshape(victims.inputs.shape)
    decibels, labels = [], 0
    guesses = found.labels.reshape(victims.targets.shape).cpu()
    for originals, guess, targets, classes in zip(victims.inputs, inputs, victims.targets, guesses, strict=True):
        order = metrics.match(originals.double(), guess.nan_to_num())
        repaired = guess.nan_to_num().clamp(0, 1)[order]
        error = (originals.double() - repaired).square().flatten(1).mean(1)
        decibels.append((-10 * error.clamp_min(1e-30).log10()).tolist())
        labels += int((classes[order] == targets).sum())
    sure = found.certain if found.certain is not None else torch.zeros(inputs.shape[:2], dtype=torch.bool)
    return {
        "attack_spec": str(seen.case.attack),
        "decibels": [value for batch in decibels for value in batch],
        "worst": [min(batch) for batch in decibels],
        "exact": [int(min(batch) >= EXACT) for batch in decibels],
        "certain": int(sure.sum()),
        "labels_right": labels,
        "loss": found.loss.tolist(),
        "attack_seconds": found.seconds / len(decibels),
    }


KINDS = {"exact": exact}


def derive(row: Row) -> Row:
    """How many images there are in all, and how many of them are above 20 dB, where they can be recognised."""
    return {"images": len(row["decibels"]), "recognisable": sum(value > 20 for value in row["decibels"])}
