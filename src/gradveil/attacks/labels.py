"""Labels from the gradient of the classifier."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.errors import ThreatModelError
from gradveil.randomness import derived_generator
from gradveil.task import Task
from gradveil.update import LocalSteps, Update, weight_of


@dataclass(frozen=True)
class LabelGuess:
    """Inferred labels, and whether the counts behind them were clear.

    Args:
        labels: sorted, ``[batch_size]``.
        ambiguous: True if the count of some class was off a whole number by more than a half, so that another count
            would fit as well or better.

    Example:
        >>> LabelGuess(torch.tensor([0, 3, 3]), ambiguous=False).labels.tolist()
        [0, 3, 3]
    """

    labels: Tensor
    ambiguous: bool


@torch.no_grad()
def infer_labels(task: Task, update: Update, batch_size: int, local: LocalSteps | None = None) -> LabelGuess:
    r"""The labels behind an update.

    With cross-entropy the bias gradient of class c is ``mean_i p_ic - count_c / batch_size``: for one image only the
    true class is negative (Zhao et al., iDLG, 2020). For a batch, the model's mean prediction on uniform noise stands
    in for the unknown ``mean_i p_ic``, and the counts are dealt out one by one to the class that lacks most.

    A classifier without bias gives the same for one image through the row sums of its weight gradient,
    ``(p_c - [c = y]) sum_j r_j``, if the features r are mostly positive, as after ReLU or sigmoid.
    """
    if task.classifier is None:
        raise ThreatModelError("label inference: the model has no linear classifier to read labels from")
    if task.classifier.bias is not None:
        pull = update[task.classifier.bias]
    elif batch_size == 1:
        pull = update[task.classifier.weight].sum(1)
    else:
        raise ThreatModelError(
            "label inference: a batch needs a classifier with a bias; use ThreatModel(labels='known', known_labels=...)"
        )
    if batch_size == 1:
        return LabelGuess(pull.argmin()[None], ambiguous=not bool((pull < 0).sum() == 1))
    pull = pull / weight_of(local, batch_size)  # an update sums the gradients of its local steps
    noise = torch.rand(64, *task.input_shape, generator=derived_generator(0, "labels"), dtype=task.dtype).to(
        task.device
    )
    expected = task.outputs(task.parameters, noise).softmax(1).mean(0)
    lacking = batch_size * (expected - pull)
    labels = []
    for _ in range(batch_size):
        label = int(lacking.argmax())
        lacking[label] -= 1
        labels.append(label)
    return LabelGuess(torch.tensor(sorted(labels), device=task.device), bool(lacking.abs().max() > 0.5))
