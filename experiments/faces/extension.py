"""Whether reconstructed faces can be recognised: attacks and their controls, with the re-identification rate.

face attack: an attack on the victims' updates, or with `update` "noise", on noise of the same length.
face guess: pictures made without the update: `guess` says which.

The gallery in which a face is looked up is the train split; victims come from the test split. With `loss` "logistic"
the classes are even and odd people, so that the label does not say who a victim is.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.attacks.controls import noise_like, random_samples
from gradveil.audit import cases
from gradveil.audit.cases import Victims
from gradveil.core.errors import ParameterError
from gradveil.core.randomness import derived_generator
from gradveil.metrics import Gallery, reidentification_rate
from gradveil.models import face_embedding
from gradveil.models import generator as generators
from gradveil.update import Rounds
from kinds import (
    Row,
    Session,
    attack_row,
    attack_seen,
    build,
    dataset_of,
    figures,
    fitted_case,
    matched_to_originals,
    victims_of,
)
from pinned import load

embedding = cache(face_embedding.load)


@cache
def gallery_of(dataset: str) -> tuple[Gallery, Tensor]:
    """The train split and its vectors, which are the same for every case."""
    train = load(dataset).train
    gallery = Gallery(*train.batch(torch.arange(len(train))))
    return gallery, embedding().embed(gallery.images)


def recognised(case: Row, victims: Victims, found: Tensor) -> Row:
    """How many of the faces are nearest to a photograph of the right person."""
    gallery, vectors = gallery_of(case["dataset"])
    result = reidentification_rate(
        victims.inputs.flatten(0, 1),
        matched_to_originals(victims, found)[0].flatten(0, 1),
        victims_of({key: value for key, value in case.items() if key != "loss"}).targets.flatten(),
        gallery,
        lambda images: vectors if images is gallery.images else embedding().embed(images),
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
    seen = cases.observe(fitted_case(case, session))
    if case.get("update") == "noise":
        noise = [
            Rounds([(task, noise_like(update, seen.case.randomness("control", number))) for task, update in rounds])
            for number, rounds in enumerate(seen.seen)
        ]
        seen = replace(seen, seen=noise)
    found = attack_seen(seen, session)
    return {**attack_row(case, seen, found), **recognised(case, seen.case.victims, found.inputs)}


def nearest_of_generator(originals: Tensor, seed: int, starts: int = 2, steps: int = 300) -> Tensor:
    """Images of the face generator as near to the originals as Adam comes that sees them: what `ggl` could hope for."""
    generator = generators.load(generators.find(generators.FACES))
    targets = originals.repeat(starts, 1, 1, 1)
    shape, rng = (len(targets), generator.latent), derived_generator(seed, "nearest of the generator")
    latents = torch.randn(shape, generator=rng).requires_grad_()
    optimiser = torch.optim.Adam([latents], lr=0.1)
    for step in range(steps + 1):
        # Grey and of the originals' size, as the attacks make them.
        images = F.adaptive_avg_pool2d(generator(latents).mean(1, keepdim=True), targets.shape[2:])
        errors = (images - targets).square().flatten(1).mean(1)
        if step < steps:
            optimiser.zero_grad()
            errors.sum().backward()
            optimiser.step()
    best = errors.view(starts, -1).argmin(0)
    return images.detach().view(starts, -1, *images.shape[1:])[best, torch.arange(len(originals))]


def face_guess(case: Row, _session: Session) -> Row:
    """Pictures made without the update: of the originals, means, or the generator's."""
    victims, train = victims_of(case), dataset_of(case).train
    labels = victims.targets.flatten()
    if case["guess"] == "original":
        found = victims.inputs
    elif case["guess"] == "class mean":
        found = train.modality.blind(train.inputs, train.targets, labels, len(dataset_of(case).classes))
    elif case["guess"] == "mean of everybody":
        found = train.batch(torch.arange(len(train)))[0].mean(0).expand(len(labels), -1, -1, -1)
    elif case["guess"] == "random sample":
        rng = derived_generator(case["seed"], "random samples")
        found = random_samples(generators.FACES, build(case), labels, rng)
    elif case["guess"] == "nearest of the generator":
        found = nearest_of_generator(victims.inputs.flatten(0, 1), case["seed"])
    else:
        raise ParameterError(f"faces: expected a guess that it knows, got {case['guess']!r}")
    return {**figures(victims, found, victims.targets), **recognised(case, victims, found)}


KINDS = {"face attack": face_attack, "face guess": face_guess}
