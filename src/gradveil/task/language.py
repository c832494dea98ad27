"""Language modelling: every position of a text predicts the token that follows it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class NextToken:
    r"""The loss of a language model: the mean over the texts of the mean over their tokens of the cross-entropy.

    .. math:: L = -\frac1N \sum_n \frac1{l_n} \sum_{t \le l_n} \log p(y_{n,t} \mid x_{n,1}, \dots, x_{n,t})

    The label of a position is the token that follows it, and that of a text's last token is padding, which stands for
    the end. The positions after it have the label `ignored` and do not count.

    Args:
        ignored: a token that no text contains, other than padding.

    Example:
        >>> loss = NextToken(ignored=1)
        >>> labels = loss.labels(torch.tensor([[5, 6, 0, 0]]), padding=0)
        >>> labels.tolist()
        [[6, 0, 1, 1]]
        >>> loss(torch.zeros(1, 8, 4), labels)  # log 8
        tensor(2.0794)
    """

    ignored: int

    def labels(self, tokens: Tensor, padding: int) -> Tensor:
        """The labels ``[..., L]`` of tokens ``[..., L]`` that are padded at the end."""
        end = torch.full_like(tokens[..., :1], padding)
        return torch.where(tokens == padding, self.ignored, torch.cat([tokens[..., 1:], end], dim=-1)).long()

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of logits ``[N, vocabulary, L]``."""
        counted = (labels != self.ignored).to(outputs.dtype)
        entropies = F.cross_entropy(outputs, labels, reduction="none") * counted
        return (entropies.sum(1) / counted.sum(1).clamp_min(1)).mean()
