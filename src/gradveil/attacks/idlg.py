"""iDLG: match the gradient with L-BFGS; the label is inferred from the classifier's gradient."""

from dataclasses import dataclass

import torch

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.matching import LBFGS, LEAST_PRIOR, NOTHING, SQUARED, Matching, match, matched_layers
from gradveil.attacks.problem import Problem
from gradveil.core.parameters import integer, text


@ATTACKS.register("idlg")
@dataclass(frozen=True, repr=False)
class IDLG(Attack):
    r"""Improved Deep Leakage from Gradients: find inputs whose gradient equals the shared one.

    .. math:: \min_x \sum_l |\nabla_{W_l} L(x, y) - u_l|^2

    with the label inferred from the classifier's gradient. The papers do not say how L-BFGS is kept from diverging;
    here it starts from uniform [0, 1] noise, works in float64 and uses a strong-Wolfe line search.

    Args:
        iterations: L-BFGS steps.
        restarts: independent starting points; the best by the attacker's own loss is returned. With local steps
            (FedAvg) each also assumes a different order of the labels.
        mute: layers left out of the matching, as names of parameters or modules separated by ``|``: the attacker's
            answer to a defense that spoils only some layers. ``"none"``: all are matched.

    References:
        Zhao, Mopuri and Bilen, iDLG: Improved Deep Leakage from Gradients, 2020.
        Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019.

    Example:
        >>> import gradveil
        >>> from gradveil import models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> image, label = torch.rand(1, 1, 4, 4, generator=torch.manual_seed(1)), torch.tensor([2])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> attack, generator = IDLG(iterations=100), torch.manual_seed(0)
        >>> found = attack.reconstruct(task, update, gradveil.ThreatModel(), generator=generator)
        >>> found.labels.tolist(), bool((found.inputs[0] - image).abs().max() < 0.05)
        ([[2]], True)
    """

    paper = "Zhao et al., 2020"

    adapts = True

    iterations: int = integer(300, low=1)
    restarts: int = integer(1, low=1)
    mute: str = text(NOTHING)

    def run(self, problem: Problem) -> Reconstruction:
        """Minimise the squared distance of the gradients."""
        layers = matched_layers(self.name, problem.updates, self.mute)
        matching = Matching(layers, SQUARED, least_prior=LEAST_PRIOR)
        return match(problem, problem.start(dtype=torch.float64), LBFGS(), matching, iterations=self.iterations)
