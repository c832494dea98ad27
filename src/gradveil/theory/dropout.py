"""What Gradient Dropout does to an update and to the training, in expectation."""

import math

import torch
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import InputError, ParameterError


def dropout_distance(gradient: Tensor, keep: float, std: float) -> float:
    r"""The expected squared distance per coordinate between a layer's gradient and its Gradient Dropout.

    .. math:: E|\tilde g - g|^2 / d = \frac{1 - keep}{keep} \overline{g^2} + (1 - keep) std^2

    **Correction**: the proof of theorem 1 (appendix A) prints (1 - p)^2 / p + (1 - p)^2 as the factor of |g|^2. A
    dropped coordinate is wrong by g_i with probability 1 - p, so the second summand is 1 - p, and the factor
    (1 - p)^2 / p + (1 - p) = (1 - p) / p. The paper's term of sigma^2, (1 - p) sigma^2, is right, and its theorem uses
    nothing else: see `sufficient_keep`.

    Args:
        gradient: a layer's gradient.
        keep: probability of sharing a coordinate (the paper's p).
        std: standard deviation of the decoys (sigma).

    References:
        Sotthiwat et al., Safeguarding Federated Learning from Data Reconstruction Attacks via Gradient Dropout,
        appendix A.

    Example:
        >>> round(dropout_distance(torch.tensor([1.0, -3.0]), keep=0.8, std=0.1), 6)
        1.252
    """
    return dropout_variance(_energy(gradient), gradient.numel(), keep, std) / gradient.numel()


def sufficient_keep(gap: float, std: float) -> float:
    r"""The value of `keep` below which the expected squared distance per coordinate exceeds `gap` for any gradient.

    .. math:: keep < 1 - gap / std^2

    The condition is sufficient, not necessary, because it counts only the decoys' noise. For a gradient near zero, only
    the decoys' std matters.

    Example:
        >>> round(sufficient_keep(gap=0.005, std=0.1), 6)
        0.5
    """
    gap = checks.number("sufficient_keep", "gap", gap, low=0)
    std = checks.number("sufficient_keep", "std", std, above=0)
    if gap >= std**2:
        raise ParameterError(
            f"sufficient_keep: a gap of {gap:g} needs decoys of a variance above it, got {std**2:g}; "
            f"raise std above {math.sqrt(gap):g}"
        )
    return 1 - gap / std**2


def dropout_variance(squared_norm: float, size: int, keep: float, std: float) -> float:
    r"""The variance that Gradient Dropout gives one client's update, summed over its coordinates.

    .. math:: V = \frac{1 - keep}{keep} E|\nabla f|^2 + d (1 - keep) std^2

    **Correction**: the paper's equation 4 and theorems 2 and 3 have (1 - p)^2 sigma^2 in its place. That omits the
    first term, the noise of the mask, which is there even without decoys; it omits the dimension d; and it squares
    (1 - p) sigma where the decoys' standard deviation is sqrt(1 - p) sigma.

    Args:
        squared_norm: the squared norm of the client's gradient, or its mean over draws and clients. With clients whose
            data differ, it is the mean of *their* squared norms: these do not vanish where the common gradient does.
        size: number of coordinates, d.
        keep: probability of sharing a coordinate (the paper's p).
        std: standard deviation of the decoys (sigma).

    References:
        Sotthiwat et al., Safeguarding Federated Learning from Data Reconstruction Attacks via Gradient Dropout.

    Example:
        >>> round(dropout_variance(squared_norm=10.0, size=2, keep=0.8, std=0.1), 6)
        2.504
    """
    squared_norm = checks.number("dropout_variance", "squared_norm", squared_norm, low=0)
    size = checks.integer("dropout_variance", "size", size, low=1)
    keep, std = _keep(keep), checks.number("dropout_variance", "std", std, low=0)
    return (1 - keep) / keep * squared_norm + size * (1 - keep) * std**2


def dropout_drift(
    drift: float, variance: float, *, lr: float, convexity: float, smoothness: float, clients: int = 1
) -> float:
    r"""How far training with Gradient Dropout can be from training without it after one more step.

    .. math:: y' \le (1 - 2 \eta \mu + \eta^2 L^2)\, y + \eta^2 V / m

    where y is the expected squared distance between the weights of the two, both trained with learning rate eta by
    the mean of m clients. As gradients without dropout vanish at the minimum, y may just as well be the expected
    squared distance from the minimum.

    **Correction** of theorems 2 and 3, which print d/dt E[delta^2] <= 2 L E[delta^2] + (1 - p)^2 sigma^2, and -2 mu in
    place of 2 L for a mu-strongly convex f. Besides the variance (see `dropout_variance`), they omit the learning rate
    and the clients. They also define delta(t) as E[w~(t)] - w(t), which is zero for any quadratic f, while the proofs
    treat it as w~(t) - w(t), which is the distance bounded here.

    Args:
        drift: y, the expected squared distance before the step; 0 at the start.
        variance: V, the mean over the clients of their `dropout_variance` at the weights trained with dropout.
        lr: the learning rate, eta.
        convexity: mu, such that (grad f(x) - grad f(y)) (x - y) >= mu |x - y|^2. Theorem 2 assumes no convexity; for
            every L-smooth function, mu = -L will do, which makes the factor (1 + eta L)^2.
        smoothness: L, the Lipschitz constant of grad f.
        clients: m, the clients whose updates are averaged, each with draws of its own.

    References:
        Sotthiwat et al., Safeguarding Federated Learning from Data Reconstruction Attacks via Gradient Dropout.

    Example:
        >>> round(dropout_drift(1.0, variance=8.0, lr=0.1, convexity=1.0, smoothness=2.0, clients=4), 6)
        0.86
    """
    drift = checks.number("dropout_drift", "drift", drift, low=0)
    factor, added = _recursion("dropout_drift", variance, lr, convexity, smoothness, clients)
    return factor * drift + added


def dropout_drift_limit(variance: float, *, lr: float, convexity: float, smoothness: float, clients: int = 1) -> float:
    r"""The expected squared distance of `dropout_drift` that no number of steps exceeds, if it begins below that.

    .. math:: y_\infty = \frac{\eta V}{m (2 \mu - \eta L^2)}, \quad \eta < 2 \mu / L^2

    **Correction**: theorem 3 prints (1 - p)^2 sigma^2 / (2 mu): see `dropout_drift` and `dropout_variance`.

    Args:
        variance: as for `dropout_drift`, the largest of all steps.
        lr: the learning rate, eta.
        convexity: mu; a limit exists only for a strongly convex function.
        smoothness: L.
        clients: m.

    References:
        Sotthiwat et al., Safeguarding Federated Learning from Data Reconstruction Attacks via Gradient Dropout.

    Example:
        >>> round(dropout_drift_limit(8.0, lr=0.1, convexity=1.0, smoothness=2.0, clients=4), 6)
        0.125
    """
    factor, added = _recursion("dropout_drift_limit", variance, lr, convexity, smoothness, clients)
    if factor >= 1:
        raise ParameterError(
            "dropout_drift_limit: there is a limit only for a strongly convex function and a small learning rate, "
            f"below 2 convexity / smoothness^2 = {2 * convexity / smoothness**2:g}, got {lr:g}; "
            "use dropout_drift for a given number of steps"
        )
    return added / (1 - factor)


def dropout_cosine(gradient: Tensor, keep: float, std: float) -> float:
    r"""The expected cosine between a gradient and its Gradient Dropout, exact for every gradient.

    .. math:: E \cos(g, \tilde g) = \frac{1}{\sqrt\pi\, |g|} \int_0^\infty \sum_j g_j^2 e^{-s g_j^2 / keep^2}
              \prod_{k \ne j} \varphi_k(s) \frac{ds}{\sqrt s}, \quad
              \varphi_k(s) = keep\, e^{-s g_k^2 / keep^2} + \frac{1 - keep}{\sqrt{1 + 2 s\, std^2}}

    That is 1 / \|g~\| written as an integral over exp(-s \|g~\|^2), whose expectation is the product of the
    coordinates' own. The paper's theorem 4 says only that the cosine is at most about sqrt(p), for a gradient of many
    coordinates of similar size; a gradient that a few coordinates dominate exceeds that. An update of zeros, possible
    without decoys, counts as cosine 0.

    Args:
        gradient: a gradient that is not zero everywhere.
        keep: probability of sharing a coordinate (the paper's p).
        std: standard deviation of the decoys (sigma).

    References:
        Sotthiwat et al., Safeguarding Federated Learning from Data Reconstruction Attacks via Gradient Dropout,
        theorem 4.

    Example:
        One value is sent with probability 1/2, and then its direction is right:

        >>> round(dropout_cosine(torch.tensor([3.0]), keep=0.5, std=0.0), 6)
        0.5
    """
    keep, std = _keep(keep), checks.number("dropout_cosine", "std", std, low=0)
    squares = gradient.detach().double().flatten().square()
    energy = _positive_energy("dropout_cosine", gradient)
    if keep == 1:
        return 1.0
    # The trapezoidal rule for log s. What lies below `first` changes the cosine by less than 2e-9; at `last`, every
    # summand has underflowed.
    first = math.log(1e-18 * keep / (energy + len(squares) * std**2))
    last = math.log(800 * keep**2 / float(squares[squares > 0].min()))
    integral = 0.0
    for step in range(math.ceil((last - first) / _LOG_STEP)):
        s = math.exp(first + step * _LOG_STEP)
        sent = torch.exp(-s / keep**2 * squares)
        transforms = keep * sent + (1 - keep) / math.sqrt(1 + 2 * s * std**2)
        product = float(transforms.log().sum())
        if product < -100:  # it only falls from here
            break
        integral += math.sqrt(s) * math.exp(product) * float((squares * sent / transforms).sum())
    return _LOG_STEP * integral / math.sqrt(math.pi * energy)


def dropout_cosine_limit(gradient: Tensor, keep: float, std: float) -> float:
    r"""What the cosine between a gradient and its Gradient Dropout tends to, for a spread-out gradient of many values.

    .. math:: \cos(g, \tilde g) \to \frac{|g|}{\sqrt{E |\tilde g|^2}}
              = \frac{1}{\sqrt{1 / keep + (1 - keep) d\, std^2 / |g|^2}} \le \sqrt{keep}

    The paper's theorem 4 gives the last, sqrt(p), which is right only without decoys. The limit holds for, say,
    Gaussian gradients, but **not** for one dominated by a few coordinates: if one dominates, the cosine is near 1 with
    probability `keep`. `dropout_cosine` is exact for both and slower.

    Args:
        gradient: a gradient that is not zero everywhere.
        keep: probability of sharing a coordinate (the paper's p).
        std: standard deviation of the decoys (sigma).

    References:
        Sotthiwat et al., Safeguarding Federated Learning from Data Reconstruction Attacks via Gradient Dropout,
        theorem 4.

    Example:
        >>> round(dropout_cosine_limit(torch.ones(1000), keep=0.81, std=0.0), 6)
        0.9
        >>> round(dropout_cosine_limit(torch.ones(1000), keep=0.81, std=1.0), 6)
        0.837835
    """
    energy = _positive_energy("dropout_cosine_limit", gradient)
    return math.sqrt(energy / (energy + dropout_variance(energy, gradient.numel(), keep, std)))


_LOG_STEP = 0.1


def _energy(gradient: Tensor) -> float:
    return float(gradient.detach().double().square().sum())


def _positive_energy(owner: str, gradient: Tensor) -> float:
    if energy := _energy(gradient):
        return energy
    raise InputError(f"{owner}: expected a gradient that is not zero everywhere; a gradient of zeros has no direction")


def _recursion(
    owner: str, variance: float, lr: float, convexity: float, smoothness: float, clients: int
) -> tuple[float, float]:
    """The factor of the drift and what every step adds to it."""
    variance = checks.number(owner, "variance", variance, low=0)
    lr = checks.number(owner, "lr", lr, above=0)
    smoothness = checks.number(owner, "smoothness", smoothness, above=0)
    convexity = checks.number(owner, "convexity", convexity, low=-smoothness, high=smoothness)
    clients = checks.integer(owner, "clients", clients, low=1)
    return 1 - 2 * lr * convexity + (lr * smoothness) ** 2, lr**2 * variance / clients


def _keep(keep: float) -> float:
    return checks.number("theory", "keep", keep, above=0, high=1)
