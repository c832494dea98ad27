"""DLG: match the gradient by L-BFGS, inputs and labels together."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.matching import LBFGS, LEAST_PRIOR, NOTHING, SQUARED, Matching, match, matched_layers
from gradveil.attacks.problem import Problem
from gradveil.core.parameters import integer, text


@ATTACKS.register("dlg")
@dataclass(frozen=True, repr=False)
class DLG(Attack):
    r"""Deep Leakage from Gradients: find inputs *and* soft labels whose gradient equals the shared one.

    .. math:: \min_{x, z} \sum_l |\nabla_{W_l} L(x, softmax(z)) - u_l|^2

    L-BFGS as in `idlg`. The label it reports is the largest entry of z. Known labels are not used: that is iDLG.

    Args:
        iterations: L-BFGS steps.
        restarts: independent starting points; the best by the attacker's own loss is returned.
        mute: layers left out of the matching, by the names of parameters or modules, separated by ``|``: the attacker's
            answer to a defense that spoils only some layers. ``"none"``: all are matched.

    References:
        Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019.

    Example:
        >>> import gradveil
        >>> from gradveil import models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3, activation="sigmoid")
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> image, label = torch.rand(1, 1, 4, 4, generator=torch.manual_seed(1)), torch.tensor([2])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> attack, generator = DLG(iterations=200, restarts=4), torch.manual_seed(0)
        >>> found = attack.reconstruct(task, update, gradveil.ThreatModel(), generator=generator)
        >>> found.labels.tolist()
        [[2]]
    """

    paper = "Zhu et al., NeurIPS 2019"

    adapts = True
    finds_labels = True

    iterations: int = integer(300, low=1)
    restarts: int = integer(1, low=1)
    mute: str = text(NOTHING)

    def run(self, problem: Problem) -> Reconstruction:
        """Minimise the squared distance of gradients over inputs and label logits, kept in one vector."""
        task, victims = problem.task, problem.victims
        shape = (problem.examples, *task.input_shape)
        answers = (problem.examples, task.single_classes(self.name))
        values = math.prod(shape)

        def unpack(candidate: Tensor, _label: Tensor) -> tuple[Tensor, Tensor]:
            return candidate[:values].view(shape), candidate[values:].view(answers).softmax(1)

        def drawn() -> Tensor:
            options: dict[str, Any] = {"dtype": torch.float64, "device": task.device}
            inputs = problem.modality.start(shape, problem.generator, **options)
            return torch.cat([inputs.flatten(), torch.randn(answers, generator=problem.generator, **options).flatten()])

        start = torch.stack([drawn() for _ in range(victims)])  # so that each victim starts where it would alone
        matching = Matching(matched_layers(self.name, problem.updates, self.mute), SQUARED, least_prior=LEAST_PRIOR)
        found = match(problem, start, LBFGS(), matching, iterations=self.iterations, unpack=unpack)
        inputs, logits = found.inputs[:, :values], found.inputs[:, values:]
        return replace(
            found, inputs=inputs.reshape(victims, *shape), labels=logits.reshape(victims, *answers).argmax(2)
        )
