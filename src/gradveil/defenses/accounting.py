"""The (epsilon, delta) that a run of DP-SGD has spent, computed by the dp-accounting library."""

import math
from dataclasses import dataclass
from functools import lru_cache

from gradveil.core import checks
from gradveil.core.extras import OptionalModule

dp_accounting, pld, rdp = (
    OptionalModule(f"dp_accounting{part}", "the epsilon of dp-sgd") for part in ("", ".pld", ".rdp")
)

SAMPLINGS = ("fixed", "poisson")
RELATIONS = {"fixed": "one example replaced by another", "poisson": "one example added or removed"}


@dataclass(frozen=True)
class PrivacySpent:
    """A differential-privacy guarantee, and what it guarantees.

    Args:
        epsilon: the privacy loss.
        delta: the probability with which it may be larger.
        sampling: how batches were drawn, which decides which data sets are neighbours.
        seeded: whether the noise came from a seeded generator. The guarantee is then that of the simulated mechanism;
            the updates themselves have none, because anyone who sees some of the draws can compute the others.

    Example:
        >>> str(PrivacySpent(1.5, 1e-5, "fixed"))
        'epsilon 1.5 at delta 1e-05 (one example replaced by another; fixed-size batches)'
    """

    epsilon: float
    delta: float
    sampling: str
    seeded: bool = False

    def __str__(self) -> str:
        batches = "fixed-size" if self.sampling == "fixed" else "Poisson-sampled"
        details = f"{RELATIONS[self.sampling]}; {batches} batches"
        if self.seeded:
            details += "; simulated with a seeded generator, in use only without one"
        return f"epsilon {self.epsilon:.3g} at delta {self.delta:.3g} ({details})"


@dataclass(frozen=True)
class SampledGaussian:
    """Clipped gradients of random batches, summed, with normal noise: all that a guarantee of such a run depends on.

    A defense that returns one (`Defense.sampled_gaussian`) declares that this is what it does to a client's examples,
    up to processing of the noisy result. `gradveil.theory.certificate` turns it into a bound on attackers.

    Args:
        noise_multiplier: standard deviation of the noise on the *sum* of clipped gradients, in units of the clip.
        rounds: number of rounds in which a batch was drawn.
        batch_size: size of the batch, or its expectation.
        examples: number of examples it was drawn from.
        sampling: ``"fixed"`` or ``"poisson"``; see `privacy_spent`.
        passes: number of noised gradients per round that each drawn example takes part in (local epochs).

    Example:
        >>> SampledGaussian(noise_multiplier=2.0, rounds=10, batch_size=5, examples=50).rate
        0.1
    """

    noise_multiplier: float
    rounds: int
    batch_size: int
    examples: int
    sampling: str = "fixed"
    passes: int = 1

    def __post_init__(self) -> None:
        owner = "SampledGaussian"
        checks.number(owner, "noise_multiplier", self.noise_multiplier, low=0)
        checks.integer(owner, "rounds", self.rounds, low=0)
        checks.integer(owner, "examples", self.examples, low=1)
        checks.integer(owner, "batch_size", self.batch_size, low=1, high=self.examples)
        checks.choice(owner, "sampling", self.sampling, SAMPLINGS)
        checks.integer(owner, "passes", self.passes, low=1)

    @property
    def rate(self) -> float:
        """The probability that a given example is drawn in a round."""
        return self.batch_size / self.examples


@lru_cache(maxsize=1024)
def privacy_spent(
    *,
    noise_multiplier: float,
    rounds: int,
    batch_size: int,
    examples: int,
    delta: float,
    sampling: str = "fixed",
    passes: int = 1,
) -> PrivacySpent:
    r"""Epsilon of `rounds` rounds of clipped and noised gradients on batches drawn from `examples` examples.

    With ``"fixed"``, a batch of exactly `batch_size` different examples is drawn each round, and neighbouring data
    sets differ in one example that is *replaced*. Replacing moves a sum of gradients clipped to C by up to 2 C, so
    noise of standard deviation ``noise_multiplier * C`` counts only half. Computed by Rényi accounting (Wang, Balle
    and Kasiviswanathan, AISTATS 2019), which gives an upper bound.

    With ``"poisson"``, every example is drawn independently with probability ``batch_size / examples``, and
    neighbouring data sets differ by one example that is *added or removed*. Computed by privacy-loss distributions,
    tight up to discretisation. Most published figures are for this setting; the two kinds of epsilon must not be
    compared with each other.

    Args:
        noise_multiplier: standard deviation of the noise on the *sum* of clipped gradients, in units of the clip.
        rounds: number of rounds in which a batch was drawn.
        batch_size: size of the batch, or its expectation.
        examples: number of examples it was drawn from.
        delta: must be well below 1 / examples to mean anything.
        sampling: ``"fixed"`` or ``"poisson"``.
        passes: number of noised gradients per round that each drawn example takes part in (local epochs). Above 1,
            sampling is not counted as protection: the sampling theorems behind these figures cover one Gaussian
            mechanism per batch, and for several that build on each other only their composition is certain.

    >>> privacy_spent(noise_multiplier=1.1, rounds=100, batch_size=10, examples=1000, delta=1e-5).epsilon > 1
    True
    """
    owner = "privacy_spent"
    checks.number(owner, "noise_multiplier", noise_multiplier, low=0)
    checks.integer(owner, "rounds", rounds, low=0)
    checks.integer(owner, "examples", examples, low=1)
    checks.integer(owner, "batch_size", batch_size, low=1, high=examples)
    checks.number(owner, "delta", delta, above=0, below=1)
    checks.choice(owner, "sampling", sampling, SAMPLINGS)
    checks.integer(owner, "passes", passes, low=1)
    if rounds == 0:
        return PrivacySpent(0.0, delta, sampling)
    if noise_multiplier == 0:
        return PrivacySpent(math.inf, delta, sampling)
    relation = dp_accounting.NeighboringRelation
    if sampling == "fixed":
        event = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        if passes == 1:
            event = dp_accounting.SampledWithoutReplacementDpEvent(examples, batch_size, event)
        accountant = rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
    else:
        event = dp_accounting.GaussianDpEvent(noise_multiplier)
        if passes == 1:
            event = dp_accounting.PoissonSampledDpEvent(batch_size / examples, event)
        accountant = pld.PLDAccountant(relation.ADD_OR_REMOVE_ONE)
    accountant.compose(event, rounds * passes)
    return PrivacySpent(float(accountant.get_epsilon(delta)), delta, sampling)
