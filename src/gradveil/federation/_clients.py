"""What the clients of a round do: one after the other, or as one batched program.

Under FedSGD all clients differentiate at the same weights; under FedAvg each walks away on its own. Either way the
clients' gradients are one vmapped program, cut into chunks that fit into caches, wherever the defense needs only
gradients (`Defense.gradient_only`). All others go client by client through `Defense.make_update`.

Clients with unequal numbers of examples are batched exactly: a step's batches of one length form one program. Where the
loss is plain cross-entropy on class numbers and no batch statistics tie the examples of a batch together, shorter
batches are filled up with examples that the loss ignores, so that there are few different lengths.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.core import checks, compilation
from gradveil.core.errors import NotFiniteError, ParameterError
from gradveil.core.timing import timed
from gradveil.defenses import Defense, Perturbation
from gradveil.defenses.base import Batch, checked_gradients
from gradveil.federation.training import Training
from gradveil.task import Gradients, Task
from gradveil.update import ClientRound, LocalSteps, Meta, Update, steps_of, with_momentum

EXECUTIONS = ("auto", "loop", "batch", "compile")

Ask = Callable[[int], ClientRound]
"""Makes what a client is given in this round: every time anew, its generator always in the same state."""

# Batching brings most where a step is small, because then the overhead of each operation counts. By
# `benchmarks/federation_speed.py where` on one core it gains 1.1 to 3.4 times up to 580,000 values; from 750,000 on it
# depends on the network (0.8 to 1.2 times).
LARGEST_BATCHED_STEP = 500_000
# What one value of a step takes, batched and undefended, on one core (the same benchmark: 0.7e-8 to 1.8e-8): so a run
# is known to be long enough to earn its compilation back.
SECONDS_PER_VALUE = 1.1e-8
# What flows through the clients that are worked on at once should stay in the caches, but they should be many, for the
# overhead of each operation. `benchmarks/federation_speed.py chunks` on one core, seven cases: within 6 % of the best
# uncompiled and 11 % compiled, but for one that noise hit; all clients at once take up to 1.26 times as long.
CACHE_BYTES = 48 << 20
MEMORY_BYTES = 1 << 30
IGNORED = -100
"""The label that cross-entropy leaves out of its mean."""


def choose_execution(task: Task, defense: Defense, training: Training) -> str:
    """Loop, batch or compile, by size and not by timing: they round differently, and a training must repeat itself."""
    if not _can_batch(task, defense) or training.drawn_clients == 1 or task.has_batch_statistics:
        return "loop"
    values = _examples_a_step(training) * task.activations
    if values + task.size > LARGEST_BATCHED_STEP:
        return "loop"
    steps = training.rounds * training.drawn_clients * steps_of(training.local, training.batch_size)
    programs = 1 if training.local is None else 2
    worth_it = compilation.is_worth_it(SECONDS_PER_VALUE * values * steps, programs * len(task.parameters))
    return "compile" if worth_it else "batch"


def _can_batch(task: Task, defense: Defense) -> bool:
    # A subclass of Task may have a loss that is not a function of weights, inputs and targets alone.
    return defense.gradient_only and type(task) is Task


def _examples_a_step(training: Training) -> int:
    asked = None if training.local is None else training.local.batch_size
    return min(training.batch_size, asked or training.batch_size)


@dataclass
class Shared:
    """What the clients of a round sent.

    Args:
        updates: by client, in the order in which they were drawn.
        failed: clients whose gradients were not finite, and the reason.
        gradient_seconds, defense_seconds: the time it took, see `RoundRecord`.

    Example:
        >>> Shared().updates
        {}
    """

    updates: dict[int, Update] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    gradient_seconds: float = 0.0
    defense_seconds: float = 0.0


class Clients:
    """All clients of a training, asked for their updates round by round.

    Args:
        task: the prepared task.
        defense: what every client does to its update.
        training: says what a step is.
        execution: ``"loop"``: client by client; ``"batch"``: one vmapped program; ``"compile"``: that compiled;
            ``"auto"``: `choose_execution`.
        cache_bytes: what may flow through the clients that are worked on at once.

    Example:
        >>> import gradveil
        >>> task = gradveil.Task(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)), input_shape=(1, 2, 2),
        ...                      classes=2)
        >>> clients = Clients(task, gradveil.defense("none"), Training(clients=3))
        >>> given = ClientRound(task=task, inputs=torch.rand(2, 1, 2, 2), targets=torch.tensor([0, 1]))
        >>> shared = clients.share([2, 0], lambda client: given)
        >>> clients.execution, list(shared.updates)
        ('batch', [2, 0])
    """

    def __init__(
        self,
        task: Task,
        defense: Defense,
        training: Training,
        execution: str = "auto",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        checks.choice("train", "execution", execution, EXECUTIONS)
        self.execution = choose_execution(task, defense, training) if execution == "auto" else execution
        if self.execution != "loop" and not _can_batch(task, defense):
            raise ParameterError(
                f"train: clients under {defense.name} cannot be batched, for it needs more than gradients; "
                "use execution='loop' or 'auto'"
            )
        self._defense, self._training = defense, training
        values = _examples_a_step(training) * (math.prod(task.input_shape) + task.activations)
        flowing = 3 * values * task.dtype.itemsize  # forth, back, and copies
        standing = 6 * task.size * task.dtype.itemsize  # weights, gradients, velocities and a defense's copies
        most = max(1, min(cache_bytes // flowing, MEMORY_BYTES // (flowing + standing)))
        # Chunks of one size: what is left over would be filled up, or run uncompiled.
        self._chunk = math.ceil(training.drawn_clients / math.ceil(training.drawn_clients / most))
        compiled = (self._chunk, _examples_a_step(training)) if self.execution == "compile" else None
        self._batched = _BatchedUpdates(task, training.local, compiled=compiled)
        # Clients that defend themselves one layer at a time: all of a chunk can do so together.
        self._together = defense.batches_clients
        self._undefended: float | None = None

    def share(self, clients: Sequence[int], ask: Ask) -> Shared:
        """What each client sends.

        Args:
            clients: who is asked, in order.
            ask: makes what a client is given.
        """
        shared = Shared()
        if self.execution == "loop":
            self._share_in_turn(shared, clients, ask)
            return shared
        for first in range(0, len(clients), self._chunk):
            self._share_together(shared, clients[first : first + self._chunk], ask)
        return shared

    def _share_in_turn(self, shared: Shared, clients: Sequence[int], ask: Ask) -> None:
        for client in clients:
            given = ask(client)
            try:
                if self._defense.gradient_only:
                    with timed(given.task.device) as took:
                        honest = given.update()
                    shared.gradient_seconds += took.seconds
                    self._defend_one(shared, client, honest, given)
                else:
                    self._share_one(shared, client, given)
            except NotFiniteError as error:
                shared.failed[client] = str(error)

    def _share_one(self, shared: Shared, client: int, given: ClientRound) -> None:
        """One client whose defense makes the gradients of every step itself."""
        undefended = self._seconds_undefended(given)
        with timed(given.task.device) as took:
            update = self._defense.make_update(given)
            checked_gradients(self._defense.name, update)
        shared.gradient_seconds += min(undefended, took.seconds)
        shared.defense_seconds += max(0.0, took.seconds - undefended)
        shared.updates[client] = update

    def _defend_one(self, shared: Shared, client: int, honest: Update, given: ClientRound) -> None:
        with timed(given.task.device) as took:
            update = self._defense.perturb_gradients(honest, given)
            checked_gradients(self._defense.name, update)
        shared.defense_seconds += took.seconds
        shared.updates[client] = update

    def _share_together(self, shared: Shared, clients: Sequence[int], ask: Ask) -> None:
        given = [ask(client) for client in clients]
        device, announced = given[0].task.device, given[0].announced
        with timed(device) as took:
            stacked, metas = self._batched(given)
        shared.gradient_seconds += took.seconds
        if not self._together:
            for row, client in enumerate(clients):
                honest = Update({name: value[row] for name, value in stacked.items()}, metas[row])
                try:
                    self._defend_one(shared, client, honest, given[row])
                except NotFiniteError as error:
                    shared.failed[client] = str(error)
            return
        assert isinstance(self._defense, Perturbation)
        try:
            with timed(device) as took:
                sources = [one.source for one in given]
                defended = self._defense.perturb_clients(stacked, generators=sources, announced=announced)
        except NotFiniteError:
            self._share_in_turn(shared, clients, ask)  # to find out whose gradients they are
            return
        for row, client in enumerate(clients):
            shared.updates[client] = Update({name: value[row] for name, value in defended.items()}, metas[row])
        shared.defense_seconds += took.seconds

    def _seconds_undefended(self, given: ClientRound) -> float:
        """What a client's gradients or local steps take without a defense; measured once, on the first client."""
        if self._undefended is None:
            for _ in range(2):  # the first one warms up
                with timed(given.task.device) as took:
                    replace(given, generator=torch.Generator(given.task.device)).update()
            self._undefended = took.seconds
        return self._undefended


class _BatchedUpdates:
    """`compute_update` for many clients at once: gradients stacked ``[clients, *parameter shape]``.

    Args:
        task: the prepared task.
        local: local steps; None: one gradient.
        compiled: clients and examples a step that the programs are compiled for; None: they are not.
    """

    def __init__(self, task: Task, local: LocalSteps | None, *, compiled: tuple[int, int] | None) -> None:
        self._local = local
        self._can_fill = task.loss_name == "cross-entropy" and not task.has_batch_statistics
        # Buffers that a round changes are batch-norm statistics, which no gradient depends on: see `Task`.
        self._at_shared_weights = _Program(vmap(task.gradient, in_dims=(None, 0, 0)), compiled)
        self._at_own_weights = _Program(vmap(task.gradient), compiled)

    def __call__(self, clients: Sequence[ClientRound]) -> tuple[Gradients, list[Meta]]:
        """The updates and what is known of them, in the order of `clients`."""
        task, batches = clients[0].task, [(client.inputs, client.targets) for client in clients]
        task.check(*(torch.cat(part) for part in zip(*batches, strict=True)))
        plans = [self._plan(client) for client in clients]
        weights, own = task.parameters, False
        velocity: Gradients = {}
        total: Gradients = {}
        buffers: list[Gradients] = [{} for _ in batches]
        for number in range(max(map(len, plans))):
            going = [row for row, plan in enumerate(plans) if number < len(plan)]
            all_go = len(going) == len(plans)
            steps = [tuple(tensor[plans[row][number]] for tensor in batches[row]) for row in going]
            here = weights if all_go or not own else {name: value[going] for name, value in weights.items()}
            gradients = self._gradients(here, own, steps)  # type: ignore[arg-type]
            if task.has_batch_statistics:
                for row, (inputs, _) in zip(going, steps, strict=True):
                    stepping = {name: value[row] for name, value in weights.items()} if own else weights
                    buffers[row] = task.with_parameters(stepping, buffers[row]).updated_buffers(inputs)
            if self._local is None:
                total = gradients
                continue
            lr, momentum = self._local.lr, self._local.momentum
            if all_go:
                velocity = with_momentum(velocity, gradients, momentum)
                total = {name: total[name] + value if total else value.clone() for name, value in velocity.items()}
                weights = {name: value - lr * velocity[name] for name, value in weights.items()}
                own = True
                continue
            moving = with_momentum({name: value[going] for name, value in velocity.items()}, gradients, momentum)
            rows = torch.tensor(going, device=task.device)
            for name, value in moving.items():
                velocity[name] = velocity[name].index_copy(0, rows, value)
                total[name] = total[name].index_add(0, rows, value)
                weights[name] = weights[name].index_add(0, rows, value, alpha=-lr)
        sizes = [len(client.inputs) for client in clients]
        return total, [Meta(samples=n, local=self._local, buffers=b) for n, b in zip(sizes, buffers, strict=True)]

    def _plan(self, client: ClientRound) -> list[Tensor | slice]:
        """Which examples each step takes, drawn as `compute_update` draws them."""
        if self._local is None:
            return [slice(None)]
        plan: list[Tensor | slice] = []
        for _ in range(self._local.epochs):
            order = client.source.permutation(len(client.inputs), client.inputs.device)
            plan += torch.split(order, self._local.batch_size or len(order))
        return plan

    def _gradients(self, weights: Gradients, own: bool, steps: Sequence[Batch]) -> Gradients:
        """The gradient of each client's batch; with `own`, the weights have a leading client dimension too."""
        lengths = [len(targets) for _, targets in steps]
        if self._can_fill and all(targets.ndim == 1 and not targets.is_floating_point() for _, targets in steps):
            # A power of two, so that there are few lengths and at most half of a batch is filling.
            lengths = [min(max(lengths), 1 << (length - 1).bit_length()) for length in lengths]
        if len(set(lengths)) == 1:
            return self._run(weights, own, steps, lengths[0])
        parts: Gradients = {}
        for length in sorted(set(lengths)):
            rows = [row for row, other in enumerate(lengths) if other == length]
            here = {name: value[rows] for name, value in weights.items()} if own else weights
            for name, value in self._run(here, own, [steps[row] for row in rows], length).items():
                if name not in parts:
                    parts[name] = value.new_empty(len(steps), *value.shape[1:])
                parts[name][rows] = value
        return parts

    def _run(self, weights: Gradients, own: bool, steps: Sequence[Batch], length: int) -> Gradients:
        inputs = torch.stack([_filled(inputs, length, 0) for inputs, _ in steps])
        targets = torch.stack([_filled(targets, length, IGNORED) for _, targets in steps])
        if own:
            return self._at_own_weights(weights, inputs, targets, rows_of_weights=True)
        return self._at_shared_weights(weights, inputs, targets)


class _Program:
    """A vmapped gradient, compiled if asked: for one shape, clients and examples, and whatever fills up to it.

    The shape is known before the first call, so that the same calls run compiled when a training is resumed: compiled
    and not, they round differently.
    """

    def __init__(self, function: Callable[..., Gradients], compiled_for: tuple[int, int] | None) -> None:
        self._function, self._shape = function, compiled_for
        self._compiled = None if compiled_for is None else compilation.compiled(function)

    def __call__(
        self, weights: Gradients, inputs: Tensor, targets: Tensor, *, rows_of_weights: bool = False
    ) -> Gradients:
        clients, length = targets.shape[:2]
        missing = 0 if self._shape is None else self._shape[0] - clients
        if self._shape is None or self._compiled is None or length != self._shape[1] or not 0 <= missing <= clients:
            return _detached(self._function(weights, inputs, targets), clients)
        # One shape, one compilation: a smaller chunk is filled up with its first client.
        if rows_of_weights:
            weights = {name: _repeat_first(value, missing) for name, value in weights.items()}
        filled = self._compiled(weights, _repeat_first(inputs, missing), _repeat_first(targets, missing))
        return _detached(filled, clients)


def _detached(gradients: Gradients, clients: int) -> Gradients:
    return {name: value[:clients].detach() for name, value in gradients.items()}


def _repeat_first(tensor: Tensor, times: int) -> Tensor:
    return torch.cat([tensor, tensor[:1].expand(times, *tensor.shape[1:])]) if times else tensor


def _filled(tensor: Tensor, length: int, value: float) -> Tensor:
    if len(tensor) == length:
        return tensor
    return torch.cat([tensor, tensor.new_full((length - len(tensor), *tensor.shape[1:]), value)])
