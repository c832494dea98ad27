r"""What clipping and normal noise guarantee against every attacker, as the probability of a success (f-DP).

A trade-off function f bounds how well the updates of two neighbouring data sets can be told apart: a test with a
false-positive rate of a has a false-negative rate of at least f(a) (Dong, Roth and Su, JRSSB 2022). Whoever succeeds
with probability kappa without an example's contribution to the update succeeds with probability at most
:math:`1 - f(\kappa)` with it (Hayes et al., NeurIPS 2023; Kulynych et al., NeurIPS 2025). Success may mean anything
that can be judged from the guess and the example: a reconstruction, an attribute, membership.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradveil.core import checks
from gradveil.core.errors import ParameterError
from gradveil.core.extras import OptionalModule
from gradveil.defenses import Defense
from gradveil.defenses.accounting import RELATIONS, SampledGaussian
from gradveil.update import LocalSteps

privacy_loss, pld_pmf, special = (
    OptionalModule(name, "a certificate for sampled batches")
    for name in ("dp_accounting.pld.privacy_loss_distribution", "dp_accounting.pld.pld_pmf", "scipy.special")
)

WORDS_FOR_RELATION = {"replace": RELATIONS["fixed"], "add-or-remove": RELATIONS["poisson"]}
"""The neighbouring relations, and what they are called."""

_ACCOUNTED = {"fixed": "replace", "poisson": "add-or-remove"}
_NOISE_PER_CONTRIBUTION = {"replace": 2.0, "add-or-remove": 1.0}  # how far one example moves the sum, in units of clip
_NORMAL = NormalDist()
_TAIL = 8.3  # the normal distribution has a mass of 5e-17 beyond so many deviations
_GRID_STEPS = 40_000
_POISSON_STEP = 5e-4  # of privacy losses; the bound holds at any step, finer ones lower it by less than 1e-4 of itself
_CONVOLUTION_ERROR = 1e-12  # more than the rounding of a Fourier transform adds up to


@dataclass(frozen=True)
class Certificate:
    r"""An upper bound on the probability with which any attacker succeeds against one example of a client.

    Args:
        success: the bound, for whoever sees every update of the client and knows all of its other examples.
        kappa: the probability of a success without the example's contribution to the updates.
        relation: what is compared: ``"replace"`` (with the example, or with another one in its place) or
            ``"add-or-remove"`` (with the example's contribution, or with none).
        mu: the bound is :math:`\Phi(\Phi^{-1}(\kappa) + \mu)`; None if it is not of this form.
        theorem: what the bound follows from.
        seeded: whether the noise came from a seeded generator. The bound is then that of the simulated mechanism; the
            updates themselves have none, because anyone who sees some of the draws can compute the others.

    Example:
        >>> str(Certificate(0.0917, 0.01, "add-or-remove", 1.0, "Gaussian mechanism"))
        'success at most 0.0917 for whoever has 0.01 without it (one example added or removed; Gaussian mechanism)'
        >>> str(Certificate(1.0, 0.01, "replace", 20.0, "Gaussian mechanism"))
        'none: the bound is 1 (one example replaced by another; Gaussian mechanism)'
    """

    success: float
    kappa: float
    relation: str
    mu: float | None
    theorem: str
    seeded: bool = False

    @property
    def is_vacuous(self) -> bool:
        """Whether the bound says nothing: it is 1 to three digits."""
        return self.success > 0.9995

    def __str__(self) -> str:
        details = f"{WORDS_FOR_RELATION[self.relation]}; {self.theorem}"
        if self.seeded:
            details += "; simulated with a seeded generator, in use only without one"
        if self.is_vacuous:
            return f"none: the bound is 1 ({details})"
        return f"success at most {self.success:.3g} for whoever has {self.kappa:.3g} without it ({details})"


def certificate(
    defense: Defense,
    *,
    kappa: float,
    rounds: int = 1,
    batch_size: int,
    examples: int,
    local: LocalSteps | None = None,
    relation: str | None = None,
) -> Certificate | None:
    r"""What a defense guarantees against every attacker; None if it guarantees nothing ("none" in words).

    .. math:: success \le 1 - f(\kappa), \quad
              \text{without sampling } 1 - f(\kappa) = \Phi(\Phi^{-1}(\kappa) + \mu)

    The defense declares itself which mechanism it is (`Defense.sampled_gaussian`). There is no certificate without a
    norm to which every example is clipped, however much noise is added, and none for pruning, quantisation and other
    heuristics. Whatever is done to a noisy update afterwards keeps its certificate.

    Args:
        defense: the defense.
        kappa: the attacker's chance without the example's contribution, above 0 and below 1. It depends on what the
            attacker knows of the data: 1 / N for one of N equally likely candidates.
        rounds: number of rounds the client took part in.
        batch_size: number of examples it drew in each round, without replacement.
        examples: number of examples it drew from.
        local: its local steps.
        relation: ``"replace"`` or ``"add-or-remove"``; default: the one that the accountant uses. See
            `certificate_of`.

    References:
        Kulynych et al., Unifying Re-Identification, Attribute Inference, and Data Reconstruction Risks in Differential
        Privacy, NeurIPS 2025. Hayes et al., Bounding Training Data Reconstruction in DP-SGD, NeurIPS 2023.

    Example:
        >>> import gradveil
        >>> run = {"kappa": 0.01, "batch_size": 8, "examples": 8}
        >>> bound = certificate(gradveil.defense("dp-sgd", noise_multiplier=1.0), **run)
        >>> round(bound.success, 3), bound.mu, bound.relation
        (0.372, 2.0, 'replace')
        >>> certificate(gradveil.defense("gaussian-noise", std=10.0), **run) is None
        True
    """
    checks.number("certificate", "kappa", kappa, above=0, below=1)
    if relation is not None:
        checks.choice("certificate", "relation", relation, WORDS_FOR_RELATION)
    mechanism = defense.sampled_gaussian(rounds=rounds, batch_size=batch_size, examples=examples, local=local)
    return None if mechanism is None else certificate_of(mechanism, kappa=kappa, relation=relation)


def certificate_of(mechanism: SampledGaussian, *, kappa: float, relation: str | None = None) -> Certificate | None:
    r"""What clipped gradients of random batches with normal noise guarantee; None without noise.

    In units of the clip, an example moves the sum by up to 2 if it is replaced, and by up to 1 if its contribution is
    added or left out; T noisy sums are therefore :math:`\mu`-Gaussian DP with :math:`\mu = 2 \sqrt T / \sigma` or
    :math:`\sqrt T / \sigma`. Random batches count as follows.

    - **Fixed size, replace**: a batch of m of n examples, drawn without replacement, has the trade-off function
      :math:`C_p(f)`, p = m / n, for *any* mechanism with f on the batch (Dong, Roth and Su, theorem 4.2). As a curve,
      :math:`\delta(\epsilon) = p \, \delta_f(\log(1 + (e^\epsilon - 1) / p))` for :math:`\epsilon \ge 0`, and
      symmetric. Local epochs are part of f. Rounds compose this curve, which holds for both directions and for
      adaptive rounds; a privacy-loss distribution that dominates it (connect the dots) is convolved.
    - **Fixed size, add-or-remove**: sampling is not counted, because the theorem compares batches of the same size. The
      comparison is with the same run in which the example counts as zero; the server divides by the batch size either
      way.
    - **Poisson, add-or-remove**: the accountant's privacy-loss distribution. With local epochs, sampling is not
      counted. Replacing is refused.

    Args:
        mechanism: the mechanism.
        kappa: the attacker's chance without the example's contribution.
        relation: ``"replace"`` or ``"add-or-remove"``; default: replace for batches of a fixed size, add-or-remove for
            Poisson sampling, as in the accountant.

    Example:
        >>> run = SampledGaussian(noise_multiplier=1.0, rounds=10, batch_size=10, examples=1000)
        >>> print(certificate_of(run, kappa=0.01))  # doctest: +ELLIPSIS
        success at most 0.0... for whoever has 0.01 without it (one example replaced by another; subsampling without...)
        >>> print(certificate_of(run, kappa=0.01, relation="add-or-remove").mu)
        3.1622776601683795
    """
    owner = "certificate"
    checks.number(owner, "kappa", kappa, above=0, below=1)
    relation = _ACCOUNTED[mechanism.sampling] if relation is None else relation
    checks.choice(owner, "relation", relation, WORDS_FOR_RELATION)
    if mechanism.sampling == "poisson" and relation == "replace":
        raise ParameterError(
            "certificate: for Poisson sampling, neighbours differ by one example that is added or removed; use "
            "relation='add-or-remove'"
        )
    if mechanism.noise_multiplier == 0:
        return None
    if mechanism.rounds == 0:
        return Certificate(kappa, kappa, relation, 0.0, "nothing was sent")
    sums = mechanism.rounds * mechanism.passes
    mu = _NOISE_PER_CONTRIBUTION[relation] * math.sqrt(sums) / mechanism.noise_multiplier
    unsampled = Certificate(gaussian_success(kappa, mu), kappa, relation, mu, "Gaussian mechanism")
    if mechanism.rate == 1:
        return unsampled
    if mechanism.sampling == "fixed" and relation == "replace":
        theorem = "subsampling without replacement"
    elif mechanism.sampling == "poisson" and mechanism.passes == 1:
        theorem = "Poisson subsampling"
    else:
        return unsampled
    # From e^epsilon = 1 / kappa on, the steep form of the bound is above 1; the flat one is 1 - e^-20 there.
    success = success_from_curve(kappa, *_curve(mechanism, max(20.0, -math.log(kappa))))
    # Drawing batches never weakens the guarantee, but the discretised curve can lie above the closed form.
    return Certificate(success, kappa, relation, None, theorem) if success < unsampled.success else unsampled


def in_words(found: Certificate | None) -> str:
    """The certificate as a sentence, ``"none"`` if there is none.

    >>> in_words(None)
    'none'
    """
    return "none" if found is None else str(found)


def gaussian_success(kappa: float, mu: float) -> float:
    r"""The largest probability of a success under Gaussian DP: :math:`\Phi(\Phi^{-1}(\kappa) + \mu)`.

    >>> round(gaussian_success(0.01, 1.0), 3), round(gaussian_success(0.01, 2.0), 3)
    (0.092, 0.372)
    """
    checks.number("gaussian_success", "kappa", kappa, above=0, below=1)
    checks.number("gaussian_success", "mu", mu, low=0)
    # Not `NormalDist.cdf`, which subtracts from 1 and so loses the digits of small probabilities.
    return math.erfc(-(_NORMAL.inv_cdf(kappa) + mu) / math.sqrt(2)) / 2


def success_from_curve(kappa: float, epsilons: ArrayLike, deltas: ArrayLike) -> float:
    r"""The bound on the probability of a success that pairs of (epsilon, delta) give together.

    .. math:: 1 - f(\kappa) \le \min_i \min(\delta_i + e^{\epsilon_i} \kappa, \;
              1 - e^{-\epsilon_i} (1 - \delta_i - \kappa), \; 1)

    It holds for any selection of the points of a privacy curve; more points make it tighter, and all of them exact
    (Dong, Roth and Su, proposition 2.12).

    Args:
        kappa: the chance without the example's contribution.
        epsilons: values of epsilon, none negative.
        deltas: a delta for each, all of the same run.

    >>> round(success_from_curve(0.01, [1.0], [1e-5]), 4)  # e times the chance
    0.0272
    """
    checks.number("success_from_curve", "kappa", kappa, above=0, below=1)
    epsilon, delta = np.asarray(epsilons, dtype=float), np.asarray(deltas, dtype=float)
    if epsilon.shape != delta.shape or epsilon.size == 0 or not bool((epsilon >= 0).all() and (delta >= 0).all()):
        raise ParameterError(
            "success_from_curve: expected a delta for each of one or more epsilons, none of them negative"
        )
    # exp may overflow to infinity, in which case the other form, which then tends to 1, is the smaller one.
    with np.errstate(over="ignore"):
        steep = delta + np.exp(epsilon) * kappa
    flat = 1 - np.exp(-epsilon) * (1 - delta - kappa)
    return float(min(1.0, steep.min(), flat.min()))


def curve_epsilon(mechanism: SampledGaussian, *, delta: float) -> float:
    """The epsilon at a delta on the curve behind `certificate_of`, for batches of a fixed size and a replaced example.

    It is an upper bound, exact for one round or without sampling up to a step of the grid on which it is sought, and
    lower than `accounting.privacy_spent`, which goes by Rényi divergences.

    >>> one_round = SampledGaussian(noise_multiplier=2.0, rounds=1, batch_size=1, examples=1)
    >>> round(curve_epsilon(one_round, delta=1e-5), 2)  # mu = 1
    4.38
    """
    checks.number("curve_epsilon", "delta", delta, above=0, below=1)
    checks.choice("curve_epsilon", "sampling", mechanism.sampling, ("fixed",))
    if mechanism.rounds == 0:
        return 0.0
    if mechanism.noise_multiplier == 0:
        return math.inf
    mu = _NOISE_PER_CONTRIBUTION["replace"] * math.sqrt(mechanism.passes) / mechanism.noise_multiplier
    in_all = mu * math.sqrt(mechanism.rounds)
    # Without sampling epsilon is at most this, and sampling only lowers it.
    epsilons = np.linspace(0, in_all * (in_all / 2 - _NORMAL.inv_cdf(delta)), 8001)
    found = sampled_curve(epsilons, mu, mechanism.rate, mechanism.rounds) <= delta
    return float(epsilons[np.argmax(found)]) if found.any() else float(epsilons[-1])


@lru_cache(maxsize=256)
def _curve(mechanism: SampledGaussian, top: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points of the curve of sampled batches, with epsilons up to `top`; kept, because every chance needs the same."""
    epsilons = np.linspace(0, top, 8001)
    if mechanism.sampling == "fixed":
        mu = _NOISE_PER_CONTRIBUTION["replace"] * math.sqrt(mechanism.passes) / mechanism.noise_multiplier
        return epsilons, sampled_curve(epsilons, mu, mechanism.rate, mechanism.rounds)
    one = privacy_loss.from_gaussian_mechanism(
        mechanism.noise_multiplier, sampling_prob=mechanism.rate, value_discretization_interval=_POISSON_STEP
    )
    return epsilons, _composed(one, mechanism.rounds, epsilons)


def sampled_curve(epsilons: ArrayLike, mu: float, rate: float, rounds: int = 1) -> NDArray[np.float64]:
    r"""Delta of rounds of Gaussian DP on batches of a fixed size, for neighbours that differ in a replaced example.

    One round is exact, :math:`p \, \delta_\mu(\log(1 + (e^\epsilon - 1) / p))`; several are bounded from above by
    convolving a privacy-loss distribution on a grid that dominates it (`certificate_of` says why this is sound).

    Args:
        epsilons: values of epsilon, none negative.
        mu: Gaussian DP of one round on its batch.
        rate: p, the share of the examples in a batch.
        rounds: number of rounds.

    >>> [float(round(delta, 4)) for delta in sampled_curve([0.0, 1.0], mu=1.0, rate=1.0)]
    [0.3829, 0.1269]
    >>> [float(round(delta, 4)) for delta in sampled_curve([0.0, 1.0], mu=1.0, rate=0.1)]
    [0.0383, 0.0002]
    """
    epsilon = np.asarray(epsilons, dtype=float)
    if rate == 1:
        mu, rounds = mu * math.sqrt(rounds), 1
    if rounds == 1:
        return _one_round(epsilon, mu, rate)
    top = mu * (mu / 2 + _TAIL)
    if top > 500:  # e^top overflows; so little noise is worth nothing, which is always a bound
        return np.ones_like(epsilon)
    top = math.log1p(rate * math.expm1(top))
    step = max(1e-4, 2 * top / _GRID_STEPS)
    half = math.ceil(top / step)
    upper = _one_round(np.arange(half + 1, dtype=np.float64) * step, mu, rate)
    # Both directions have the same curve: delta(-e) = 1 - exp(-e) (1 - delta(e)).
    lower = 1 - np.exp(-np.arange(half, 0, -1) * step) * (1 - upper[:0:-1])
    # Rounding must not make the curve rise, and must not lower it either.
    deltas = np.maximum.accumulate(np.concatenate([lower, upper])[::-1])[::-1]
    one = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -half, half, deltas)
    return _composed(one, rounds, epsilon)


def _composed(one: Any, rounds: int, epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
    """Delta of `rounds` rounds from the privacy-loss distribution of one."""
    delta: NDArray[np.float64] = np.asarray(one.self_compose(rounds).get_delta_for_epsilon(epsilon.tolist()))
    return np.maximum(delta, 0.0) + _CONVOLUTION_ERROR


def _one_round(epsilon: NDArray[np.float64], mu: float, rate: float) -> NDArray[np.float64]:
    inner = np.where(epsilon < 500, np.log1p(np.expm1(np.minimum(epsilon, 500)) / rate), epsilon - math.log(rate))
    low, high = mu / 2 - inner / mu, -mu / 2 - inner / mu
    delta: NDArray[np.float64] = special.ndtr(low) - np.exp(inner + special.log_ndtr(high))
    return rate * np.maximum(delta, 0)
