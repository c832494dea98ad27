"""Infer labels from the gradient of the classifier."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.core.randomness import derived_generator
from gradveil.task import Task
from gradveil.update import LocalSteps, Update, total_weight

ROUNDING = 1e-4
"""How much larger in magnitude, relatively, another entry of the bias gradient may be than the label's, which is as
large as all others together."""
NOISE_OF_TWO = 1.0
"""The same for two classes, whose magnitudes are equal: noise makes either the larger one, and far from as large as
twice the other unless it drowns both. A label's entry that was withheld or replaced leaves a larger difference."""


@dataclass(frozen=True)
class LabelGuess:
    """Inferred labels, and whether they are ambiguous.

    Args:
        labels: sorted, ``[batch_size]``.
        ambiguous: for one image, True if no class stands out; for a batch, True if the count of some class was off by
            more than a half, so that another count would fit as well or better.

    Example:
        >>> LabelGuess(torch.tensor([0, 3, 3]), ambiguous=False).labels.tolist()
        [0, 3, 3]
    """

    labels: Tensor
    ambiguous: bool


def check_inferable(owner: str, task: Task) -> None:
    """Refuse a task from whose updates `infer_labels` cannot infer labels.

    Args:
        owner: the caller's name, for error messages.
        task: the model and its loss.
    """
    obstacle = ""
    if task.classes is None or task.positions:
        got = f"one for each of {list(task.positions)} positions" if task.positions else "labels that are not classes"
        obstacle = f"labels can be inferred only if every input has one class, got {got}"
    elif task.loss_name != "cross-entropy":
        got = task.loss_name or "a custom loss"
        obstacle = f"labels can be inferred only from the gradient of the cross-entropy loss, got {got}"
    elif task.classifier is None:
        obstacle = "the model has no linear classifier to infer labels from"
    elif not {task.classifier.weight, task.classifier.bias} & task.parameters.keys():
        obstacle = f"the classifier {task.classifier.weight!r} is frozen, so updates do not reveal labels"
    if obstacle:
        raise ThreatModelError(
            f"{owner}: {obstacle}; use ThreatModel(labels='known', known_labels=...), or --labels known"
        )


def find_labels(
    owner: str, task: Task, updates: Sequence[Update], threat: ThreatModel, *, inferred: bool
) -> tuple[Tensor, Tensor]:
    """The labels ``[victims, examples, ...]`` of a problem, and for which victims they are ambiguous, ``[victims]``.

    Args:
        owner: the caller's name, for error messages.
        task: the model and its loss.
        updates: one per victim.
        threat: holds the labels if they are known.
        inferred: whether unknown labels are inferred; otherwise they are zeros.
    """
    none_ambiguous = torch.zeros(len(updates), dtype=torch.bool)
    if threat.known_labels is not None:
        labels = threat.known_labels.to(task.device)
        if labels.shape[:2] != (len(updates), threat.batch_size):
            raise InputError(
                f"{owner}: known_labels must have shape [{len(updates)}, {threat.batch_size}] "
                f"(victims, batch size), got {list(labels.shape)}"
            )
        task.check_labels(f"{owner}: known_labels", labels.flatten(0, 1))
        return labels, none_ambiguous
    if not inferred:
        return torch.zeros(len(updates), threat.batch_size, dtype=torch.long, device=task.device), none_ambiguous
    guesses = [infer_labels(task, update, threat.batch_size, threat.local) for update in updates]
    return torch.stack([guess.labels for guess in guesses]), torch.tensor([guess.ambiguous for guess in guesses])


@torch.no_grad()
def infer_labels(task: Task, update: Update, batch_size: int, local: LocalSteps | None = None) -> LabelGuess:
    r"""Infer the labels behind an update.

    With cross-entropy the bias gradient of class c is ``mean_i p_ic - count_c / batch_size``. For one image only the
    true class is negative (Zhao et al., iDLG, 2020), and as large as all others together. For a batch, the model's mean
    prediction on uniform noise stands in for the unknown ``mean_i p_ic``, and labels are assigned one by one to the
    class that is still missing most.

    For one image the row sums of the weight gradient tell the same, ``(p_c - [c = y]) sum_j r_j``, if the features r
    are mostly positive, as after ReLU or sigmoid. They are used if there is no bias, or if its gradient is not one that
    an image can cause: a defense that withholds or replaces the one telling bias entry, as dual pruning does, leaves
    many entries of the label's row, all with the same sign.
    """
    check_inferable("label inference", task)
    assert task.classifier is not None
    if task.classes == 1:
        return LabelGuess(torch.zeros(batch_size, dtype=torch.long, device=task.device), ambiguous=False)
    weight, bias = update.get(task.classifier.weight), update.get(task.classifier.bias or "")  # None: frozen
    if batch_size == 1:
        by_weight = bias if weight is None else weight.sum(1)
        assert by_weight is not None  # at least one of them is trained
        by_bias = by_weight if bias is None else bias
        excess = NOISE_OF_TWO if task.classes == 2 else ROUNDING
        if _singles_out_a_class(by_bias) and by_bias.max() <= -(1 + excess) * by_bias.min():
            return LabelGuess(by_bias.argmin()[None], ambiguous=False)
        # The sum may be small, because dual pruning withholds the largest values of the label's row.
        if _singles_out_a_class(by_weight):
            return LabelGuess(by_weight.argmin()[None], ambiguous=False)
        return LabelGuess(by_bias.argmin()[None], ambiguous=True)
    if bias is None:
        raise ThreatModelError(
            "label inference: a batch needs a classifier with a trained bias, got one without; "
            "use ThreatModel(labels='known', known_labels=...)"
        )
    mean_gradient = bias / total_weight(local, batch_size)  # because an update sums the gradients of its steps
    generator, shape = derived_generator(0, "labels"), (64, *task.input_shape)
    noise = task.modality.start(shape, generator, dtype=task.dtype, device=generator.device).to(task.device)
    mean_prediction = task.outputs(task.parameters, noise).softmax(1).mean(0)
    missing_counts = batch_size * (mean_prediction - mean_gradient)
    labels = []
    for _ in range(batch_size):
        label = int(missing_counts.argmax())
        missing_counts[label] -= 1
        labels.append(label)
    return LabelGuess(torch.tensor(sorted(labels), device=task.device), bool(missing_counts.abs().max() > 0.5))


def _singles_out_a_class(gradient: Tensor) -> bool:
    """Whether one entry is negative and no other is even half as low; noise and decoys make others a bit negative."""
    lowest, second = gradient.topk(2, largest=False).values
    return bool(lowest < 0 and second > lowest / 2)
