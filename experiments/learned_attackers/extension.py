"""What attackers recover who learned from public images; whether an image leaked is judged as an audit does it.

learned: an attack and its verdicts; the blind guess to beat is the mean of the class over all training images.
"""

from gradveil import metrics
from gradveil.audit import cases
from kinds import Row, Session, attack_row, dataset_of, run_attack


def learned(case: Row, session: Session) -> Row:
    """Attack the victims' updates, and say of each victim whether it leaked."""
    seen, found = run_attack(case, session)
    train, victims = dataset_of(case).train, seen.case.victims
    guess = train.modality.blind(train.inputs, train.targets, victims.targets.flatten(), len(dataset_of(case).classes))
    blind = metrics.psnr(victims.inputs.flatten(0, 1), guess).view(victims.targets.shape)
    scores = cases.score(seen, found, metrics.Scorer(train.modality), blind)
    verdicts = [bool(score.metrics["leaked"]) for score in scores]
    return {**attack_row(case, seen, found), "leaked": verdicts, "share_leaked": sum(verdicts) / len(verdicts)}


KINDS = {"learned": learned}
