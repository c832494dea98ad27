"""Finds the policy that ATS chooses, which the config then names in its defenses."""

import gradveil
from gradveil.core.randomness import derived_generator
from kinds import Row, Session, build, public_of


def search(case: Row, _session: Session) -> Row:
    task, generator = build(case), derived_generator(case["seed"], "prepare")
    defense, _ = gradveil.defense(case["defense"]).prepare(task, public=public_of(case, task), generator=generator)
    return {"policy": "|".join(defense.policies)}


KINDS = {"search": search}
