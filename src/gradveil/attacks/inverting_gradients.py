"""Inverting Gradients: match the direction of the gradient, with an image prior."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.matching import (
    COSINE,
    LBFGS,
    NOTHING,
    ROUNDING,
    Adam,
    Distance,
    Matching,
    check_prior,
    match,
    matched_layers,
)
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.parameters import choice, integer, number, text
from gradveil.task import Gradients, Task

SMOOTHING = (5.0, 20.0, 80.0)
"""Sharpness of the smoothed ReLUs in the three stages of the L-BFGS form."""


@ATTACKS.register("inverting-gradients")
@dataclass(frozen=True, repr=False)
class InvertingGradients(Attack):
    r"""Find smooth images whose gradient points in the same direction as the shared one.

    .. math:: \min_{x \in [0, 1]} 1 - \frac{\langle \nabla L(x, y), u \rangle}{|\nabla L(x, y)| |u|} + tv \cdot TV(x)

    The paper's form (``optimiser="adam"``) uses Adam on the signs of the gradients; the step size falls to a tenth
    after 3/8, 5/8 and 7/8 of the iterations. TV is the mean absolute difference of neighbouring pixels. The cosine is
    taken over all layers together.

    ``optimiser="lbfgs"`` is our stronger form. The gradients of a ReLU network jump wherever a unit switches, so the
    slope of the cost does not say which units should switch, and Adam ends far above the cost of the true image. Here
    the kinks are rounded off (`Task.smoothed`), the smooth cost is minimised by L-BFGS in float64, and the result is
    the start of the next, sharper stage. With a ReLU LeNet and 16 CIFAR-10 images, that raises the median from 17.5 to
    24.6 dB in four times the time (experiments/attack_strength).

    Args:
        iterations: number of steps; in the L-BFGS form, of each of its three stages.
        optimiser: ``"adam"`` or ``"lbfgs"``.
        lr: Adam's step size in image units.
        tv: weight of the total variation.
        layer_decay: layer l (a parameter tensor, counted from the input) has weight layer_decay^l; 1: all equal.
        restarts: independent starting points; the best by the attacker's own loss is returned.
        mute: layers left out of the matching, as names of parameters or modules separated by ``|``: the attacker's
            answer to a defense that spoils only some layers. ``"none"``: all are matched.

    References:
        Geiping et al., Inverting Gradients: How easy is it to break privacy in federated learning?, NeurIPS 2020.

    Example:
        >>> import gradveil
        >>> from gradveil import models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> image, label = torch.rand(1, 1, 4, 4, generator=torch.manual_seed(1)), torch.tensor([2])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> attack, generator = InvertingGradients(iterations=200, tv=0.0), torch.manual_seed(0)
        >>> found = attack.reconstruct(task, update, ThreatModel(), generator=generator)
        >>> bool((found.inputs[0] - image).abs().mean() < 0.1)
        True
    """

    paper = "Geiping et al., NeurIPS 2020"

    adapts = True

    iterations: int = integer(1000, low=1)
    optimiser: str = choice("adam", ["adam", "lbfgs"])
    lr: float = number(0.02, above=0)
    tv: float = number(1e-2, low=0)
    layer_decay: float = number(1.0, above=0)
    restarts: int = integer(1, low=1)
    mute: str = text(NOTHING)

    def run(self, problem: Problem) -> Reconstruction:
        """Minimise one minus the cosine, plus the total variation."""
        task, smooth = problem.task, self.optimiser == "lbfgs"
        weights = {name: self.layer_decay**depth for depth, name in enumerate(problem.updates)}

        def weighted(gradients: Gradients) -> Gradients:
            return {name: weights[name] * value for name, value in gradients.items()}

        def prior(inputs: Tensor) -> Tensor:
            penalty = problem.modality.prior(inputs, rounding=ROUNDING if smooth else 0.0)
            assert penalty is not None  # see `check_threat`
            return self.tv * penalty

        distance = COSINE
        if self.layer_decay != 1:
            distance = Distance(
                lambda simulated, shared: COSINE.between(weighted(simulated), weighted(shared)), COSINE.unit
            )
        layers = matched_layers(self.name, problem.updates, self.mute)
        return match(
            problem,
            near_the_middle(problem) if smooth else problem.start(),
            LBFGS() if smooth else Adam(self.lr, signed=True),
            Matching(layers, distance, prior if self.tv else None),
            iterations=self.iterations,
            smoothing=SMOOTHING if smooth and task.has_kinks else (),
        )

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse `tv` for inputs that have no prior."""
        super().check_threat(task, threat)
        if self.tv:
            check_prior(self.name, "tv", task)


def near_the_middle(problem: Problem) -> Tensor:
    """A start near the middle of the allowed range, if there is one: nearly grey images are smooth."""
    start, project = problem.start(), problem.modality.project
    middle = (project(torch.full_like(start, -torch.inf)) + project(torch.full_like(start, torch.inf))) / 2
    return torch.where(middle.isfinite(), 0.9 * middle + 0.1 * start, start)
