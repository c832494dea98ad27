"""What games refute of dp-sgd's guarantee, and of the guarantee of forms that are broken on purpose.

membership game: scores of worst-case games through the defense's own code, the bounds that follow from them, and what
the accountant and the certificate promise.
"""

from dataclasses import asdict, dataclass

import gradveil
from gradveil.defenses import DEFENSES
from gradveil.defenses.accounting import SampledGaussian, privacy_spent
from gradveil.defenses.dp_sgd import DPSGD
from gradveil.task import Gradients
from gradveil.theory import EmpiricalPrivacy, certificate_of, curve_epsilon, empirical_privacy, play
from gradveil.update import ClientRound
from kinds import Row, Session

UNLIMITED = 1000  # times the clip: longer than any gradient of the games


@DEFENSES.register("dp-sgd-without-clipping")
@dataclass(frozen=True, repr=False)
class WithoutClipping(DPSGD):
    """dp-sgd that declares its clip and does not apply it."""

    def step_gradients(self, client: ClientRound) -> Gradients:
        """The same noise on gradients of any length."""
        clip, noise_multiplier = self.clip * UNLIMITED, self.noise_multiplier / UNLIMITED
        return DPSGD(clip=clip, noise_multiplier=noise_multiplier).step_gradients(client)


@DEFENSES.register("dp-sgd-with-half-the-noise")
@dataclass(frozen=True, repr=False)
class HalfTheNoise(DPSGD):
    """dp-sgd that adds half the noise that it declares."""

    def step_gradients(self, client: ClientRound) -> Gradients:
        """The clipped gradients with too little noise."""
        return DPSGD(clip=self.clip, noise_multiplier=self.noise_multiplier / 2).step_gradients(client)


def membership_game(case: Row, session: Session) -> Row:
    """Play the games and hold the bounds against what was promised."""
    defense = gradveil.defense(case["defense"])
    setting = {"rounds": case["rounds"], "batch_size": case["batch_size"], "examples": case["examples"]}
    scores = play(
        defense,
        clip=case["clip"],
        games=case["games"],
        epochs=case["epochs"],
        progress=lambda done, games: session.progress(done, games, 0.0),
        **setting,
    )
    found = empirical_privacy(
        scores.with_member,
        scores.without,
        deltas=list(case["deltas"].values()),
        confidence=1 - (1 - case["confidence"]) / case["cases_together"],
        tuning=case["tuning"],
    )
    local = gradveil.LocalSteps(epochs=case["epochs"]) if case["epochs"] > 1 else None
    mechanism = defense.sampled_gaussian(**setting, local=local)
    row: Row = {"mu": found.mu, "declared_mu": certificate_of(mechanism, kappa=0.01).mu}
    for name, delta in case["deltas"].items():
        row[f"epsilon{name}"] = found.epsilons[delta]
        row[f"accountant{name}"] = privacy_spent(**asdict(mechanism), delta=delta).epsilon
        row[f"curve{name}"] = curve_epsilon(mechanism, delta=delta)
    row |= success_row(found, mechanism)
    return {**row, "refuted_by": refutations(row, case["deltas"])}


def success_row(found: EmpiricalPrivacy, mechanism: SampledGaussian) -> Row:
    """The counted threshold whose success comes nearest to what is certified for its chance, or exceeds it most."""
    rows = []
    for errors in found.errors.values():
        chance, missed = errors.upper(confidence=found.confidence, rules=len(found.errors))
        if chance < 1:
            certified = certificate_of(mechanism, kappa=chance).success
            rows.append({"chance": chance, "success": 1 - missed, "certified": certified})
    return max(rows, key=lambda row: row["success"] / row["certified"])


def refutations(row: Row, deltas: dict[str, float]) -> list[str]:
    """The promises that the games refute."""
    too_high = [delta for name, delta in deltas.items() if row[f"epsilon{name}"] > row[f"accountant{name}"]]
    broken = [f"epsilon at delta {delta:g}" for delta in too_high]
    if row["declared_mu"] is not None and row["mu"] > row["declared_mu"]:
        broken.append("mu")
    if row["success"] > row["certified"]:
        broken.append("certificate")
    return broken


def derive(row: Row) -> Row:
    """The verdict in words."""
    return {"verdict": ", ".join(row["refuted_by"]) or "none"} if "refuted_by" in row else {}


KINDS = {"membership game": membership_game}
