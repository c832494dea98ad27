"""Both verdicts on one defense in one setting: what `auto` recovers, and whose data the server can name.

Settings differ from a centre in one factor each. An attacker knows the defense; leaks are judged as an audit does it.
"""

from time import process_time

import gradveil
from gradveil.audit.cases import PreparedDefense
from gradveil.audit.games import draw_games, play
from gradveil.metrics.identification import summary
from kinds import Row, Session, attack_row, dataset_of, local_of, public_of, run_attack, scores_of


def protocol(case: Row, session: Session) -> Row:
    """Attack the victims with `auto`, and play games of identification with other clients."""
    begun = process_time()
    seen, found = run_attack(case, session)
    leaked = [score.metrics["leaked"] for score in scores_of(case, seen, found)]
    row = {**attack_row(case, seen, found), "leaked": leaked, "share_leaked": sum(leaked) / len(leaked)}
    chosen = getattr(seen.case.attack, "chosen", None)
    row |= {"chosen": chosen and chosen["members"], "attack_seconds": process_time() - begun}
    row |= named(case, seen.case.prepared, session)
    return {**row, "processor_seconds": process_time() - begun}


def named(case: Row, prepared: PreparedDefense, session: Session) -> Row:
    """Whom the server names among the candidates, of whom one has an image in the client's batch."""
    keys = ("games", "candidates", "batch_size", "inclusion", "distractors", "seed")
    games = draw_games(dataset_of(case).test, **{key: case[key] for key in keys})
    found = play(
        games,
        prepared,
        gradveil.attack("identification"),
        adaptive=case["adaptive"],
        local=local_of(case),
        local_known=case["local_known"],
        seed=case["seed"],
        public=public_of(case, prepared.task) if case["batch_size"] > 1 else None,
        progress=session.progress,
    )
    row: Row = {}
    for name, estimate in summary(found.scores.double().cpu(), games.members).items():
        row |= {name: estimate.value, f"{name}_interval": [estimate.low, estimate.high]}
    return {**row, "games_seconds": found.seconds}


KINDS = {"protocol": protocol}
