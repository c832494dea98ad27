"""Attacks that recover inputs exactly: which batches, up to which noise, and how many clients hide each other."""

import torch

from gradveil import metrics
from gradveil.metrics.cells import cells
from kinds import Row, Session, run_attack
from made_files import with_table_network

EXACT = 100.0
"""From this many dB on, the worst image of a batch counts as recovered exactly."""


def exact(case: Row, session: Session) -> Row:
    """The PSNR of every example without a ceiling, and which batches are exact, meaning every example of them is.

    The PSNR of a row of a table is that of its values as the model is fed them: numbers scaled to [0, 1], categories as
    ones and zeros. For tables there is also the share of the cells that were recovered.
    """
    seen, found = run_attack(case, session)
    victims, modality = seen.case.victims, seen.case.prepared.task.modality
    inputs = found.inputs.double().cpu().reshape(victims.inputs.shape)
    decibels, labels = [], 0
    scores: dict[str, list[float]] = {}
    guesses = found.labels.reshape(victims.targets.shape).cpu()
    for originals, guess, targets, classes in zip(victims.inputs, inputs, victims.targets, guesses, strict=True):
        repaired = modality.repaired(guess)
        order = metrics.match(originals.double(), repaired, modality)
        repaired = repaired[order]
        if modality.name == "table":
            pair = modality.compared(originals.double()), modality.compared(repaired)
            scores.setdefault("cells", []).append(float(cells(*pair).mean()))
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
        **scores,
    }


KINDS = {"exact": with_table_network(exact)}


def derive(row: Row) -> Row:
    """How many images there are in all, and how many of them are above 20 dB, where they can be recognised."""
    if "decibels" not in row:  # a blind guess
        return {}
    return {"images": len(row["decibels"]), "recognisable": sum(value > 20 for value in row["decibels"])}
