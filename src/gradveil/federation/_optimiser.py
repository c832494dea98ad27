"""The server's step on the aggregated update."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.federation.training import Training
from gradveil.task import Gradients

ADAM_SECOND_DECAY = 0.999
ADAM_EPSILON = 1e-8


class ServerOptimiser:
    r"""SGD with momentum, or Adam (Kingma and Ba, ICLR 2015; as FedAdam: Reddi et al., ICLR 2021), on updates.

    .. math:: v \leftarrow \mu v + u, \quad w \leftarrow w - lr \cdot v

    Adam has the usual bias correction, a second decay rate of 0.999 and an epsilon of 1e-8.

    Args:
        training: gives the optimiser, its learning rates and momentum.
        parameters: the initial weights, which give the shapes of the moments.

    Example:
        >>> optimiser = ServerOptimiser(Training(lr=0.1, momentum=0.5), {"w": torch.zeros(1)})
        >>> weights = optimiser.step({"w": torch.zeros(1)}, {"w": torch.ones(1)}, number=0)
        >>> weights["w"].tolist(), optimiser.step(weights, {"w": torch.ones(1)}, number=1)["w"].tolist()
        ([-0.10000000149011612], [-0.25])
    """

    def __init__(self, training: Training, parameters: Mapping[str, Tensor]) -> None:
        self._training = training
        self.steps = 0
        self.first = {name: torch.zeros_like(value) for name, value in parameters.items()}
        self.second: Gradients = {}
        if training.optimiser == "adam":
            self.second = {name: torch.zeros_like(value) for name, value in parameters.items()}

    def step(self, parameters: Mapping[str, Tensor], update: Mapping[str, Tensor], number: int) -> Gradients:
        """Return the weights after round `number`; the arguments are not changed."""
        lr, decay = self._training.learning_rate(number), self._training.momentum
        self.steps += 1
        if not self.second:
            self.first = {name: decay * self.first[name] + value for name, value in update.items()}
            return {name: value - lr * self.first[name] for name, value in parameters.items()}
        self.first = {name: decay * self.first[name] + (1 - decay) * value for name, value in update.items()}
        self.second = {
            name: ADAM_SECOND_DECAY * self.second[name] + (1 - ADAM_SECOND_DECAY) * value.square()
            for name, value in update.items()
        }
        first_scale, second_scale = 1 - decay**self.steps, 1 - ADAM_SECOND_DECAY**self.steps
        return {
            name: value
            - lr * (self.first[name] / first_scale) / ((self.second[name] / second_scale).sqrt() + ADAM_EPSILON)
            for name, value in parameters.items()
        }
