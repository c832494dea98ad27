"""One round from the client's and from the server's side: everything that a defense is given."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradveil.core.randomness import Randomness, Source, source_of
from gradveil.task import Gradients, Task
from gradveil.update.local_steps import LocalSteps
from gradveil.update.update import Update, compute_update, weighted_mean

Memory = MutableMapping[str, Tensor]
"""What a client keeps from round to round. Assign new tensors; a change in place may be lost, because memories are
written to disk or to a Flower context when an item is set."""
Announced = Mapping[str, Tensor]
"""What the elected client of a round published for all other clients."""


@dataclass(frozen=True, kw_only=True)
class ClientState:
    """What a client has in a round besides its data.

    Args:
        generator: the client's randomness. Leave it out for real clients: all draws then come from a cryptographic
            stream, and noise lies on a grid that reveals nothing about the gradient (`core.randomness`). A torch
            generator is for simulations: whoever sees some of its draws can compute the others.
        memory: the client's own state, the same mapping in every round.
        announced: what the elected client published.

    Example:
        >>> import torch
        >>> ClientState().source.secure, ClientState(generator=torch.Generator()).source.secure
        (True, False)
    """

    generator: Randomness | None = None
    memory: Memory | None = None
    announced: Announced | None = None

    def __post_init__(self) -> None:
        # Stored, so that everything derived from this state continues the same stream.
        object.__setattr__(self, "generator", source_of(self.generator))

    @property
    def source(self) -> Source:
        """The client's randomness."""
        return source_of(self.generator)


@dataclass(frozen=True, kw_only=True)
class ClientRound(ClientState):
    """One client in one round: everything that a defense is given.

    Args:
        task: the model with the weights that the server sent; in a local step, with the weights of that step.
        inputs: the client's batch.
        targets: its labels.
        local: local steps (FedAvg); None means a single gradient.

    Example:
        >>> import torch
        >>> task = Task(torch.nn.Linear(2, 3), input_shape=(2,), classes=3)
        >>> client = ClientRound(task=task, inputs=torch.rand(4, 2), targets=torch.tensor([0, 1, 2, 0]))
        >>> client.update().meta.samples
        4
    """

    task: Task
    inputs: Tensor
    targets: Tensor
    local: LocalSteps | None = None

    def update(self, gradients: Callable[[Task, Tensor, Tensor], Gradients] = Task.gradients) -> Update:
        """The update of an honest client, see `compute_update`."""
        return compute_update(
            self.task, self.inputs, self.targets, local=self.local, generator=self.source, gradients=gradients
        )


@dataclass(frozen=True)
class ServerRound:
    """What the server knows about a round when it aggregates.

    Args:
        updates: the updates that arrived, at least one.
        weights: the weight of each update; None means equal weights.
        memory: the server's own state.
        announced: what the elected client published.

    Example:
        >>> import torch
        >>> received = ServerRound([Update({"w": torch.tensor([v])}) for v in (1.0, 3.0)])
        >>> received.mean()["w"].tolist()
        [2.0]
    """

    updates: Sequence[Update]
    weights: Sequence[float] | None = None
    memory: Memory | None = None
    announced: Announced | None = None

    def mean(self) -> Update:
        """The weighted mean of the updates."""
        return weighted_mean(self.updates, self.weights)
