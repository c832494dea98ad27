"""TAG: match the gradient in squares and in absolute values, over the embedding vectors of a text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.matching import LEAST_PRIOR, NOTHING, Adam, Distance, Matching, match, matched_layers
from gradveil.attacks.matching.distances import relative_distance
from gradveil.attacks.problem import Problem
from gradveil.core.parameters import integer, number, text
from gradveil.task import Gradients


@ATTACKS.register("tag")
@dataclass(frozen=True, repr=False)
class TAG(Attack):
    r"""Find embedding vectors whose gradient is near the shared one in squares and in absolute values.

    .. math:: \min_x \frac{\sum_l |D_l|^2}{|u|^2} + alpha \frac{\sum_l |D_l|_1}{|u|_1},
        \quad D_l = \nabla_{W_l} L(x, y) - u_l

    The absolute values keep small differences in play when the squares of large ones dominate. Both terms are in units
    of the shared update u, so alpha does not depend on its scale. Adam searches the vectors; each becomes the nearest
    token of the embedding. Words that are not there (padding) are found first, from the gradient of the positions, if
    the model learns these. The attack also works on inputs that are not text.

    Args:
        iterations: Adam's steps.
        lr: Adam's step size, in units of the spread of the inputs that a search starts from.
        alpha: weight of the absolute values.
        restarts: independent starting points; the best by the attacker's own loss is returned.
        mute: layers left out of the matching, as names of parameters or modules separated by ``|``; ``"none"``: all are
            matched.

    References:
        Deng et al., TAG: Gradient Attack on Transformer-based Language Models, EMNLP Findings 2021. There alpha falls
        from layer to layer; here it is one number.

    Example:
        >>> import gradveil
        >>> from gradveil import models
        >>> from gradveil.modality import Text, Words
        >>> sizes = {"input_shape": (3,), "classes": 2, "vocabulary": 12, "padding": 0}
        >>> words, model = Words(tuple("abcdefghij")), models.create("text-transformer", **sizes, width=16)
        >>> model, text = Text(words).bind(model, (3,))
        >>> task = gradveil.Task(model, input_shape=(3, 16), classes=2, modality=text)
        >>> sentence = text.inputs_of(torch.tensor([[4, 9, 2]]))
        >>> update = gradveil.defense("none").share(task, sentence, torch.tensor([1]))
        >>> attack, generator = TAG(iterations=300), torch.manual_seed(0)
        >>> found = attack.reconstruct(task, update, gradveil.ThreatModel(), generator=generator)
        >>> text.sentences(sentence), text.sentences(found.inputs[0])
        (['c h a'], ['c h a'])
    """

    paper = "Deng et al., EMNLP Findings 2021"

    adapts = True

    iterations: int = integer(500, low=1)
    lr: float = number(0.2, above=0)
    alpha: float = number(0.1, low=0)
    restarts: int = integer(1, low=1)
    mute: str = text(NOTHING)

    def run(self, problem: Problem) -> Reconstruction:
        """Minimise both distances."""
        layers = matched_layers(self.name, problem.updates, self.mute)
        start = problem.start()
        spread = start.flatten(1).std(1)

        def between(simulated: Gradients, shared: Gradients) -> Tensor:
            return relative_distance(simulated, shared) + self.alpha * _absolute_distance(simulated, shared)

        distance = Distance(between, lambda length, _signal: length.reciprocal())
        matching = Matching(layers, distance, least_prior=LEAST_PRIOR)
        return match(problem, start, Adam(self.lr * spread), matching, iterations=self.iterations)


def _absolute_distance(gradients: Gradients, target: Gradients) -> Tensor:
    """The sum of the absolute differences, in units of that of the target's values."""
    apart = torch.stack([(gradients[name] - target[name]).abs().sum() for name in target]).sum()
    size = torch.stack([value.abs().sum() for value in target.values()]).sum()
    return apart / size.clamp_min(torch.finfo(size.dtype).tiny)
