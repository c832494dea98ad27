"""What attacks return: one kind of findings for each kind of thing that an update may give away."""

from dataclasses import dataclass

from torch import Tensor

from gradveil.core import checks
from gradveil.task import Gradients


@dataclass(frozen=True)
class LossHistory:
    """How the attacker's loss fell; it shows whether the search had converged.

    Args:
        start: ``[victims]``, the loss of the first candidate.
        late: ``[victims]``, the best loss after nine tenths of the steps (the final loss if the search ended earlier).
        restarts: ``[victims, restarts]``, the best loss of each restart.

    Example:
        >>> import torch
        >>> LossHistory(torch.tensor([5.0]), torch.tensor([0.2]), torch.tensor([[0.1, 0.3]])).restarts.shape
        torch.Size([1, 2])
    """

    start: Tensor
    late: Tensor
    restarts: Tensor


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The base class of everything that an attack may return.

    Args:
        seconds: wall time of the whole call.
        execution: how the victims were evaluated: ``"loop"``, ``"batch"``, ``"compile-loop"`` or ``"compile"``.
        interrupted: True if Ctrl-C ended the search; the findings are then the best so far.

    Example:
        >>> Findings(execution="batch").interrupted
        False
    """

    seconds: float = 0.0
    execution: str = "loop"
    interrupted: bool = False


@dataclass(frozen=True)
class RecoveredUpdate(Findings):
    """Updates from which an attack removed what a defense had added; they may be attacked in turn.

    Args:
        updates: ``[victims, *parameter shape]`` by name.

    Example:
        >>> import torch
        >>> RecoveredUpdate({"w": torch.zeros(2, 3)}).updates["w"].shape
        torch.Size([2, 3])
    """

    updates: Gradients


@dataclass(frozen=True)
class Reconstruction(Findings):
    """The inputs behind updates, as an attack reconstructed them.

    Args:
        inputs: ``[victims, examples, *input_shape]``, as the attack found them (images may leave [0, 1]).
        labels: ``[victims, examples, ...]`` in the order of the inputs, inferred or known.
        loss: ``[victims]``, the attacker's own objective, by which it chose this result.
        iterations: ``[victims]``, steps taken; 0 for a closed form.
        ambiguous_labels: ``[victims]``, True if the inferred labels were ambiguous; False if the labels were known or
            the attack found them itself.
        certain: ``[victims, examples]``, True if the attacker can tell that this is one example and not a mixture;
            None if the attack never can.
        history: how the search went; None if there was no search.
        found_by: for each victim, the spec of the attack that found this, if an attack chose among others; else None.

    Example:
        >>> import torch
        >>> empty = torch.zeros(2, 1, 3, 8, 8)
        >>> Reconstruction(empty, torch.zeros(2, 1), torch.zeros(2), torch.zeros(2)).inputs.shape
        torch.Size([2, 1, 3, 8, 8])
    """

    inputs: Tensor
    labels: Tensor
    loss: Tensor
    iterations: Tensor
    ambiguous_labels: Tensor | None = None
    certain: Tensor | None = None
    history: LossHistory | None = None
    found_by: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Identification(Findings):
    """How likely each of some candidates is to be among the examples behind an update.

    Args:
        scores: ``[victims, candidates]``, or ``[victims, questions, candidates]`` if some were asked
            (`Attack.identify`), with minus infinity for candidates that a question is not about; the higher, the more
            likely. They rank the candidates of one victim; scores of different victims have different units.

    Example:
        >>> import torch
        >>> Identification(torch.tensor([[0.1, 2.0, -1.0, 0.5]])).named(2)
        tensor([[1, 3]])
    """

    scores: Tensor

    def named(self, count: int) -> Tensor:
        """The places of the `count` most likely candidates of each victim, ``[victims, ..., count]``, best first.

        Args:
            count: how many, usually the size of the batch.
        """
        checks.integer("Identification", "count", count, low=1, high=self.scores.shape[-1])
        return self.scores.topk(count, dim=-1).indices


@dataclass(frozen=True)
class Membership(Findings):
    """How likely each of some candidates is to be in the data that a client trained on, over all observed rounds.

    Args:
        scores: ``[victims, candidates]``; the higher, the more likely. Learned scores are log-odds; all others only
            rank the candidates of one victim.

    Example:
        >>> import torch
        >>> Membership(torch.tensor([[0.1, 2.0, -1.0]])).scores.argmax(1)
        tensor([1])
    """

    scores: Tensor


@dataclass(frozen=True)
class Attributes(Findings):
    """What an update says about a property of its examples that is not the label, and what the labels alone say.

    Args:
        scores: ``[victims, attributes]``, log-probabilities; for a batch, of an example drawn from it.
        baseline: the same for a guesser who knows the labels and the public rates of the attributes given a label, but
            not the update. Only what exceeds this was leaked by the update.

    Example:
        >>> import torch
        >>> Attributes(torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.4, 0.6]]).log()).guesses
        tensor([0])
    """

    scores: Tensor
    baseline: Tensor

    @property
    def guesses(self) -> Tensor:
        """The most likely attribute of each victim."""
        return self.scores.argmax(1)
