"""iDLG: match the gradient by L-BFGS, the label read off the classifier."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil import checks
from gradveil.attacks.base import ATTACKS, Attack, ThreatModel
from gradveil.attacks.engine import Objective, Progress, lbfgs
from gradveil.task import Task


@ATTACKS.register("idlg")
@dataclass(repr=False)
class IDLG(Attack):
    r"""Improved Deep Leakage from Gradients: find inputs whose gradient equals the shared one.

    .. math:: \min_x \sum_l |\nabla_{W_l} L(x, y) - u_l|^2

    with the label inferred from the classifier's gradient. The papers leave open how L-BFGS is kept from diverging:
    here it starts from uniform [0, 1] noise, works in float64 and uses a strong-Wolfe line search.

    Args:
        iterations: L-BFGS steps.

    References:
        Zhao, Mopuri and Bilen, iDLG: Improved Deep Leakage from Gradients, 2020.
        Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019.

    Example:
        >>> import gradveil
        >>> from gradveil import models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> image, label = torch.rand(1, 1, 4, 4), torch.tensor([2])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> found = IDLG(iterations=100).reconstruct(task, update, ThreatModel())
        >>> found.labels.tolist(), bool((found.inputs[0] - image).abs().max() < 0.05)
        ([[2]], True)
    """

    paper = "Zhao et al., 2020"

    iterations: int = 300

    def __post_init__(self) -> None:
        self.iterations = checks.integer(self.name, "iterations", self.iterations, low=1)

    def run(
        self,
        task: Task,
        targets: dict[str, Tensor],
        labels: Tensor,
        threat: ThreatModel,
        generator: torch.Generator,
        progress: Progress | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Minimise the squared distance of gradients."""
        precise = task.to(torch.float64)
        parameters = precise.parameters

        def cost(candidate: Tensor, target: dict[str, Tensor], label: Tensor) -> Tensor:
            gradients = precise.gradient(parameters, candidate, label)
            return torch.stack([(gradients[name] - target[name]).square().sum() for name in target]).sum()

        objective = Objective(cost, {name: value.double() for name, value in targets.items()}, labels)
        shape = (*labels.shape, *task.input_shape)
        start = torch.rand(shape, generator=generator, dtype=torch.float64, device=task.device)
        solution = lbfgs(objective, start, iterations=self.iterations, progress=progress)
        return solution.candidates.to(task.dtype), solution.losses, solution.iterations
