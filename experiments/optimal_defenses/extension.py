"""Compares the optimal defenses with uniform noise and magnitude pruning that are matched to them, over several seeds.

compared: the tradeoff of experiments/sensitivity, once per seed; a seed decides the weights, the victims, the training
examples of each client and all noise. kept: which share of the utility U1 and of the squared sensitivity pruning keeps.
"""

from statistics import fmean

import torch

import gradveil
from gradveil.core.randomness import derived_generator
from kinds import Row, Session, build, victims_of
from sensitivity.extension import batches_of, flat, tradeoff


def compared(case: Row, session: Session) -> Row:
    """MSE of the attack, U2, tr J_F, training loss and accuracy: lists with one figure per seed."""
    # Each seed trains in a folder of its own inside that of the case, which is removed when the row is written.
    rows = [
        tradeoff({**case, "seed": seed}, Session(session.checkpoints(case) / str(seed), session.progress))
        for seed in case["seeds"]
    ]
    found: Row = {"mse": [fmean(row["mse"]) for row in rows], "power": [fmean(row["power"]) for row in rows]}
    names = ("defense", "u1", "u2", "data_information", "train_loss", "test_accuracy", "round_seconds")
    found |= {f"{name}s" if name == "defense" else name: [row[name] for row in rows] for name in names}
    return found if None not in found["data_information"] else found | {"data_information": None}


def kept(case: Row, _session: Session) -> Row:
    """Shares of U1 = |g|^2 and of the sum of s^2 that remain, with one figure per seed."""
    u1, s2 = [], []
    for seed in case["seeds"]:
        task = build({**case, "seed": seed})
        [batch] = batches_of(victims_of({**case, "seed": seed}))
        gradients = flat(task.gradients(*batch))
        # These are not the directions that the defense draws, whose errors decide what it prunes.
        squared = flat(task.sensitivity(*batch, 100, generator=derived_generator(seed, "kept")))
        arrived = flat(
            gradveil.defense(case["defense"]).share(task, *batch, generator=derived_generator(seed, "share"))
        )
        u1.append(float((arrived * gradients).sum() / gradients.square().sum()))
        s2.append(float(torch.where(arrived != 0, squared, 0).sum() / squared.sum()))
    return {"u1_share": u1, "s2_share": s2}


KINDS = {"compared": compared, "kept": kept}
