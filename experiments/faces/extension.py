"""Whether reconstructed faces can be recognised: attacks and their controls, with the re-identification rate.

face attack: an attack on the victims' updates, or with `update` "noise", on noise of the same length.
face guess: pictures made without the update: `guess` says which.

The gallery in which a face is looked up is the train split; victims come from the test split. With `loss` "logistic" the
classes are even and odd people, so that the label does not say who a victim is.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from gradveil.attacks.controls import noise_like, random_samples
from gradveil.audit import cases
from gradveil.audit.cases import Victims
from gradveil.core.errors import ParameterError
from gradveil.core.randomness import derived_generator
from gradveil.metrics import Gallery, reidentification_rate
from gradveil.models import face_embedding
from gradveil.update import Rounds
from kinds import Row, Session, attack_row, build, dataset_of, figures, matched_to_originals, observed, victims_of

embedding = cache(face_embedding.load)


def recognised(case: Row, victims: Victims, found: Tensor) -> Row:
    """How many of the faces are nearest to a photograph of the right person."""
    by_person = {key: value for key, value in case.items() if key != "loss"}
    train = dataset_of(by_person).train
    people = victims_of(by_person).targets.flatten()
    result = reidentification_rate(
        victims.inputs.flatten(0, 1),
        matched_to_originals(victims, found)[0].flatten(0, 1),
        people,
        Gallery(*train.batch(torch.arange(len(train)))),
        embedding().embed,
    )
    return {
        "recognised": list(result.right),
        "distance": list(result.distances),
        "rate": result.rate,
        "rate_low": result.low,
        "rate_high": result.high,
        "chance": result.chance,
    }


def face_attack(case: Row, session: Session) -> Row:
    """Attack the victims' updates, or noise in their place, and look the faces up."""
    seen = observed(case, session)
    if case.get("update") == "noise":
        noise = [
            Rounds([(task, noise_like(update, seen.case.randomness("control", number))) for task, update in rounds])
            for number, rounds in enumerate(seen.seen)
        ]
        seen = replace(seen, seen=noise)
    found = cases.attack_on(seen, progress=session.progress)
    if found.interrupted:
        raise KeyboardInterrupt
    return {**attack_row(case, seen, found), **recognised(case, seen.case.victims, found.inputs)}


def face_guess(case: Row, _session: Session) -> Row:
    """Pictures that need no update: the originals, the mean of the class or of everybody, samples of the generator."""
    victims, train = victims_of(case), dataset_of(case).train
    labels = victims.targets.flatten()
    inputs, targets = train.batch(torch.arange(len(train)))
    if case["guess"] == "original":
        found = victims.inputs
    elif case["guess"] == "class mean":
        found = train.modality.blind(train.inputs, train.targets, labels, len(dataset_of(case).classes))
    elif case["guess"] == "mean of everybody":
        found = inputs.mean(0).expand(len(labels), -1, -1, -1)
    elif case["guess"] == "random sample":
        rng = derived_generator(case["seed"], "random samples")
        found = random_samples("face-generator", build(case), labels, rng)
    else:
        raise ParameterError(f"faces: expected a guess that it knows, got {case['guess']!r}")
    return {**figures(victims, found, victims.targets), **recognised(case, victims, found)}


KINDS = {"face attack": face_attack, "face guess": face_guess}
