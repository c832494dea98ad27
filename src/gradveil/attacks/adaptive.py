"""What an attacker makes of knowing the defense and its parameters, though not its random draws.

A form acts around a plain attack: on the updates before they are inverted, or on the images after. A defense has one or
more forms by name; the first is the strongest and what ``ThreatModel(adaptive=True)`` means.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.defenses import Defense
from gradveil.defenses.refiner import STEP, Refiner
from gradveil.errors import ThreatModelError
from gradveil.task import Gradients, Task

SOLVER_STEPS = 50
DENOISING_STEPS = 500


@dataclass(frozen=True)
class Form:
    """One way to use the knowledge of a defense.

    Args:
        before: makes of the updates ``[victims, ...]`` by name those that are inverted.
        after: makes of the images ``[N, C, H, W]`` that the inversion found those that are returned.
        single_gradient: whether it supposes updates of a single gradient (no local steps).
    """

    before: Callable[[Task, Gradients, Defense, torch.Generator], Gradients] | None = None
    after: Callable[[Tensor, Defense], Tensor] | None = None
    single_gradient: bool = False


def find_form(attack: str, defense: Defense | None, adaptive: bool | str) -> Form | None:
    """The form that a threat model asks for; None for a plain attack, refused if there is none."""
    if adaptive is False:
        return None
    forms = {} if defense is None else FORMS.get(type(defense), {})
    if defense is None or not forms:
        against = "without a defense" if defense is None else f"against {defense.name}"
        raise ThreatModelError(f"{attack}: has no adaptive form {against}; use ThreatModel(adaptive=False)")
    if adaptive is True:
        return next(iter(forms.values()))
    if adaptive not in forms:
        raise ThreatModelError(
            f"{attack}: has no adaptive form {adaptive!r} against {defense.name}; it has: {', '.join(forms)}"
        )
    return forms[adaptive]


# -- refiner --------------------------------------------------------------------------------------------------------


def undo_blend(images: Tensor, defense: Defense) -> Tensor:
    r"""Recover the image from the robust data that an inversion of refiner's update leads to.

    Robust data starts as ``(1 - blend) x + blend v`` and moves little from there, so x is still in it, paler and under
    noise. The noise has a deviation s, estimated from x*, which is at most what blend and search make together; the
    share r of v is what would explain s, at most `blend`. (Less than `blend` is left where the update was projected.)

    .. math:: \hat x = TV\text{-}denoise\Big(\frac{x^* - r/2}{1 - r}, \; \frac{s}{1 - r}\Big), \quad
        r = \min(\sqrt{12} \, s, blend), \quad s \le \sqrt{blend^2 / 12 + path^2}

    The paper does not consider this attacker.
    """
    assert isinstance(defense, Refiner)
    path = STEP * defense.iterations
    deviation = noise_deviation(images).clamp(max=math.hypot(defense.blend / math.sqrt(12), path))
    share = (math.sqrt(12) * deviation).clamp(max=min(defense.blend, 0.99))
    paler = share.view(-1, 1, 1, 1)
    return denoise((images - paler / 2) / (1 - paler), deviation / (1 - share))


def solve_gradient(task: Task, shared: Gradients, defense: Defense, generator: torch.Generator) -> Gradients:
    r"""Solve the equation that refiner leaves of its utility metric for the client's gradient (appendix M).

    .. math:: \sum_i w_i(g') (u_i - g'_i)^2 = const, \quad w_i(g') = |g'_i \theta_i| \, decay^{\,layer(i)}

    One equation for as many unknowns as the model has parameters: some g' is found, hardly ever the right one. The
    paper gives neither the constant nor the start. Here the constant is what a perturbation of the known length
    `epsilon` in a random direction gives on average, `epsilon`^2 times the mean weight; the start is u with such a
    perturbation; each step is the shortest that solves the equation to first order.
    """
    assert isinstance(defense, Refiner)
    solved = []
    for victim in range(len(next(iter(shared.values())))):
        target = {name: value[victim] for name, value in shared.items()}
        solved.append(_solve_one(task.parameters, target, defense, generator))
    return {name: torch.stack([gradients[name] for gradients in solved]) for name in shared}


def _solve_one(parameters: Gradients, shared: Gradients, defense: Refiner, generator: torch.Generator) -> Gradients:
    wanted = defense.epsilon**2 * float(_flat(defense.weights(shared, parameters)).mean())
    if wanted == 0:
        return shared
    noise = {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device)
        for name, value in shared.items()
    }
    length = defense.epsilon / float(_flat(noise).norm())
    guess = {name: value + length * noise[name] for name, value in shared.items()}
    for _ in range(SOLVER_STEPS):
        leaves = {name: value.detach().requires_grad_() for name, value in guess.items()}
        with torch.enable_grad():
            weights = defense.weights(leaves, parameters)
            found = torch.stack(
                [(weights[name] * (leaves[name] - value).square()).sum() for name, value in shared.items()]
            ).sum()
            slopes = dict(zip(leaves, torch.autograd.grad(found, list(leaves.values())), strict=True))
        missing = wanted - found.item()
        if abs(missing) <= 1e-6 * wanted:
            break
        step = missing / float(_flat(slopes).square().sum())
        guess = {name: value + step * slopes[name] for name, value in guess.items()}
    return guess


def _flat(gradients: Gradients) -> Tensor:
    return torch.cat([value.flatten() for value in gradients.values()])


# -- images ---------------------------------------------------------------------------------------------------------


def noise_deviation(images: Tensor) -> Tensor:
    """Standard deviation [N] of white noise in images [N, C, H, W], blind to what is linear in them.

    References:
        Immerkær, Fast Noise Variance Estimation, Computer Vision and Image Understanding 1996.

    >>> noise = 0.1 * torch.randn(1, 1, 64, 64, generator=torch.manual_seed(0))
    >>> round(noise_deviation(torch.linspace(0, 1, 64).expand(1, 1, 64, 64) + noise).item(), 2)
    0.1
    """
    second = torch.tensor([1.0, -2.0, 1.0], dtype=images.dtype, device=images.device)
    mask = torch.outer(second, second)[None, None]
    response = F.conv2d(images.flatten(0, 1)[:, None], mask).view(len(images), -1)
    deviation: Tensor = math.sqrt(math.pi / 2) / 6 * response.abs().mean(dim=1)
    return deviation


def denoise(images: Tensor, deviation: Tensor) -> Tensor:
    r"""The image of least total variation at distance `deviation` [N] (root mean square) from each image [N, C, H, W].

    .. math:: \min_u TV(u) + |u - z|^2 / (2 \lambda)

    by Chambolle's projections, with lambda adjusted after every step until the distance is as wanted. The channels'
    derivatives at a pixel count as one vector, so edges stay where they are in all channels.

    References:
        Chambolle, An Algorithm for Total Variation Minimization and Applications, Journal of Mathematical Imaging and
        Vision 2004.
    """
    wanted = deviation.view(-1, 1, 1, 1)
    strength = wanted.clamp_min(1e-6)
    dual = torch.zeros(2, *images.shape, dtype=images.dtype, device=images.device)
    for _ in range(DENOISING_STEPS):
        slope = _derivatives(_divergence(dual) - images / strength)
        length = slope.square().sum(dim=(0, 2), keepdim=True).sqrt()
        dual = (dual + 0.125 * slope) / (1 + 0.125 * length)
        distance = (strength * _divergence(dual)).square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
        strength = (strength * wanted / distance.clamp_min(1e-12)).clamp(1e-6, 1e3)
    return images - strength * _divergence(dual)


def _derivatives(images: Tensor) -> Tensor:
    """Forward differences down and across, zero at the far edges."""
    down = F.pad(images[..., 1:, :] - images[..., :-1, :], (0, 0, 0, 1))
    across = F.pad(images[..., :, 1:] - images[..., :, :-1], (0, 1, 0, 0))
    return torch.stack([down, across])


def _divergence(field: Tensor) -> Tensor:
    """Minus the transpose of `_derivatives`."""
    down, across = field[0][..., :-1, :], field[1][..., :, :-1]
    below = F.pad(down, (0, 0, 0, 1)) - F.pad(down, (0, 0, 1, 0))
    beside = F.pad(across, (0, 1, 0, 0)) - F.pad(across, (1, 0, 0, 0))
    return below + beside


FORMS: dict[type[Defense], dict[str, Form]] = {
    Refiner: {
        "undo-blend": Form(after=undo_blend),
        "solve-gradient": Form(before=solve_gradient, single_gradient=True),
    },
}
