"""DLG: match the gradient with L-BFGS, searching for inputs and labels together."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.matching import LBFGS, LEAST_PRIOR, NOTHING, SQUARED, Matching, Space, match, matched_layers
from gradveil.attacks.problem import Problem
from gradveil.core.parameters import integer, text


@ATTACKS.register("dlg")
@dataclass(frozen=True, repr=False)
class DLG(Attack):
    r"""Deep Leakage from Gradients: find inputs *and* soft labels whose gradient equals the shared one.

    .. math:: \min_{x, z} \sum_l |\nabla_{W_l} L(x, softmax(z)) - u_l|^2

    It runs L-BFGS as in `idlg`. The reported label is the largest entry of z. Known labels are not used: that would
    be iDLG.

    Args:
        iterations: L-BFGS steps.
        restarts: independent starting points; the best by the attacker's own loss is returned.
        mute: layers left out of the matching, as names of parameters or modules separated by ``|``: the attacker's
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
        """Minimise the squared distance of the gradients over inputs and label logits, packed into one vector."""
        task = problem.task
        input_shape = (problem.examples, *task.input_shape)
        logit_shape = (problem.examples, task.single_classes(self.name))
        input_size = math.prod(input_shape)

        def unpack(candidate: Tensor, _label: Tensor) -> tuple[Tensor, Tensor]:
            return candidate[:input_size].view(input_shape), candidate[input_size:].view(logit_shape).softmax(1)

        def draw_start() -> tuple[Tensor, Tensor]:
            options: dict[str, Any] = {"dtype": torch.float64, "device": task.device}
            inputs = problem.modality.start(input_shape, problem.generator, **options)
            return inputs, torch.randn(logit_shape, generator=problem.generator, **options)

        # Drawn victim by victim, so that a start does not depend on how many victims follow.
        inputs, logits = map(torch.stack, zip(*(draw_start() for _ in range(problem.victims)), strict=True))
        inputs = problem.modality.informed(inputs, problem.updates)
        start = torch.cat([inputs.flatten(1), logits.flatten(1)], 1)
        matching = Matching(matched_layers(self.name, problem.updates, self.mute), SQUARED, least_prior=LEAST_PRIOR)
        space = Space(unpack)
        found = space.unpacked(match(problem, start, LBFGS(), matching, iterations=self.iterations, space=space))
        return replace(found, labels=found.labels.argmax(2))
