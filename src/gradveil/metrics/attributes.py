"""What an update says about an attribute beyond what the label says: accuracies, their difference, and bits."""

import math

from torch import Tensor

from gradveil.core.errors import InputError
from gradveil.metrics.identification import Estimate, mean_estimate, proportion


def attribute_summary(scores: Tensor, baseline: Tensor, truths: Tensor) -> dict[str, Estimate]:
    r"""How often the attribute was guessed right, with and without the update, and what the update added.

    .. math:: lift = accuracy(scores) - accuracy(baseline), \qquad
        bits = \operatorname{mean} \log_2 \frac{p(a \mid u, y)}{p(a \mid y)}

    Accuracies have exact intervals; lift and bits are means over victims with bootstrap intervals. The bits show what
    the lift misses: an update may change the odds of an attribute without changing which is most likely. In
    expectation they are at most the information between update and attribute given the label, if the baseline has the
    true rates; a classifier that is too sure of itself makes them smaller, even negative.

    Args:
        scores: ``[victims, attributes]``, log-probabilities from the update and the label.
        baseline: the same from the label alone.
        truths: ``[victims]``, the attributes.

    >>> import torch
    >>> scores, baseline = torch.tensor([[0.9, 0.1]] * 8).log(), torch.tensor([[0.4, 0.6]] * 8).log()
    >>> found = attribute_summary(scores, baseline, torch.zeros(8, dtype=torch.long))
    >>> found["accuracy"].value, found["baseline"].value, found["lift"].value, round(found["bits"].value, 2)
    (1.0, 0.0, 1.0, 1.17)
    """
    if scores.shape != baseline.shape or scores.ndim != 2 or truths.shape != scores.shape[:1]:
        raise InputError(
            f"attribute_summary: expected scores and baseline [victims, attributes] and truths [victims], got "
            f"{list(scores.shape)}, {list(baseline.shape)} and {list(truths.shape)}"
        )
    if int(truths.min()) < 0 or int(truths.max()) >= scores.shape[1]:
        raise InputError(
            f"attribute_summary: truths must lie in 0 to {scores.shape[1] - 1}, got {int(truths.min())} to "
            f"{int(truths.max())}; public data must have every attribute"
        )
    right, guessed = (table.argmax(1) == truths for table in (scores, baseline))
    gains = (scores - baseline).gather(1, truths[:, None])[:, 0].double() / math.log(2)
    return {
        "accuracy": proportion(int(right.sum()), len(right)),
        "baseline": proportion(int(guessed.sum()), len(guessed)),
        "lift": mean_estimate(right.double() - guessed.double()),
        "bits": mean_estimate(gains),
    }
