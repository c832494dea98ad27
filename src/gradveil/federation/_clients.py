"""The clients' part of a round, computed one client after the other or as one batched program.

Under FedSGD all clients differentiate at the same weights; under FedAvg the weights of each client drift apart. Either
way, if the defense needs only gradients (`Defense.gradient_only`), the clients' gradients are computed by one vmapped
program, in chunks that fit into the caches. All other defenses run client by client through `Defense.make_update`.

Clients with unequal numbers of examples are batched exactly: the batches of equal length in a step form one program. If
the loss is plain cross-entropy on class numbers and no batch statistics tie the examples of a batch together, shorter
batches are padded with examples that the loss ignores, so that there are few different lengths.
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

MakeRound = Callable[[int], ClientRound]
"""Makes a client's `ClientRound`: a new one at every call, with its generator always in the same state."""

# Batching gains most when a step is small, because then the overhead of each operation counts. According to
# `benchmarks/federation_speed.py where` on one core, it is 1.1 to 3.4 times faster up to 580,000 values; from 750,000
# on it depends on the network (0.8 to 1.2 times).
LARGEST_BATCHED_STEP = 500_000
# Time per value of a step, batched and undefended, on one core (the same benchmark: 0.7e-8 to 1.8e-8). It tells whether
# a run is long enough to be worth compiling for.
SECONDS_PER_VALUE = 1.1e-8
# The activations of a chunk of clients should stay in the caches, but larger chunks spread the overhead of each
# operation over more clients. `benchmarks/federation_speed.py chunks` on one core, seven cases: within 6 % of the best
# uncompiled and 11 % compiled, except for one that noise hit; all clients at once take up to 1.26 times as long.
CACHE_BYTES = 48 << 20
MEMORY_BYTES = 1 << 30
IGNORED_LABEL = -100
"""The label that cross-entropy leaves out of its mean."""


def choose_execution(task: Task, defense: Defense, training: Training) -> str:
    """Loop, batch or compile, by size and not by timing: they round differently, and runs must be repeatable."""
    if not _can_batch(task, defense) or training.drawn_clients == 1 or task.has_batch_statistics:
        return "loop"
    values = _examples_per_step(training) * task.activations
    if values + task.size > LARGEST_BATCHED_STEP:
        return "loop"
    steps = training.rounds * training.drawn_clients * steps_of(training.local, training.batch_size)
    programs = 1 if training.local is None else 2
    worth_it = compilation.is_worth_it(SECONDS_PER_VALUE * values * steps, programs * len(task.parameters))
    return "compile" if worth_it else "batch"


def _can_batch(task: Task, defense: Defense) -> bool:
    # A subclass of Task may have a loss that is not a function of weights, inputs and targets alone, as active dropout
    # makes it.
    return defense.gradient_only and type(task) is Task and not task.has_dropout


def _examples_per_step(training: Training) -> int:
    local_batch = None if training.local is None else training.local.batch_size
    return min(training.batch_size, local_batch or training.batch_size)


@dataclass
class Shared:
    """What the clients of a round sent.

    Args:
        updates: each client's update, in the order in which the clients were drawn.
        failed: clients whose gradients were not finite, with the reason.
        gradient_seconds, defense_seconds: see `RoundRecord`.

    Example:
        >>> Shared().updates
        {}
    """

    updates: dict[int, Update] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    gradient_seconds: float = 0.0
    defense_seconds: float = 0.0


class Clients:
    """All clients of a training run; `share` computes their updates round by round.

    Args:
        task: the prepared task.
        defense: what every client does to its update.
        training: the number of clients, their batches and local steps.
        execution: ``"loop"``: client by client; ``"batch"``: one vmapped program; ``"compile"``: that program compiled;
            ``"auto"``: see `choose_execution`.
        cache_bytes: how much memory the activations of one chunk of clients may take.
        lossless: whether every update is sure to arrive; if not, the engine says which ones did (`Defense.settle`).

    Example:
        >>> import gradveil
        >>> task = gradveil.Task(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)), input_shape=(1, 2, 2),
        ...                      classes=2)
        >>> clients = Clients(task, gradveil.defense("none"), Training(clients=3))
        >>> client_round = ClientRound(task=task, inputs=torch.rand(2, 1, 2, 2), targets=torch.tensor([0, 1]))
        >>> shared = clients.share([2, 0], lambda client: client_round)
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
        lossless: bool = True,
    ) -> None:
        checks.choice("train", "execution", execution, EXECUTIONS)
        self.execution = choose_execution(task, defense, training) if execution == "auto" else execution
        if self.execution != "loop" and not _can_batch(task, defense):
            raise ParameterError(
                f"train: clients under {defense.name} cannot be batched, because "
                f"{'dropout is active' if task.has_dropout else 'it needs more than gradients'}; "
                "use execution='loop' or 'auto'"
            )
        self._defense, self._training, self._lossless = defense, training, lossless
        values = _examples_per_step(training) * (math.prod(task.input_shape) + task.activations)
        activation_bytes = 3 * values * task.dtype.itemsize  # forward, backward, and copies
        model_bytes = 6 * task.size * task.dtype.itemsize  # weights, gradients, velocities and a defense's copies
        largest = max(1, min(cache_bytes // activation_bytes, MEMORY_BYTES // (activation_bytes + model_bytes)))
        # Chunks of equal size: a smaller last one would be padded, or run uncompiled.
        self._chunk = math.ceil(training.drawn_clients / math.ceil(training.drawn_clients / largest))
        compiled = (self._chunk, _examples_per_step(training)) if self.execution == "compile" else None
        self._batched = _BatchedUpdates(task, training.local, compiled=compiled)
        # Whether the defense can perturb all clients of a chunk together, layer by layer.
        self._defends_together = defense.batches_clients
        self._undefended_seconds: float | None = None

    def share(self, clients: Sequence[int], make_round: MakeRound) -> Shared:
        """Compute the update that each client sends.

        Args:
            clients: the clients of the round, in order.
            make_round: makes a client's `ClientRound`.
        """
        shared = Shared()
        if self.execution == "loop":
            self._share_in_turn(shared, clients, make_round)
            return shared
        for first in range(0, len(clients), self._chunk):
            self._share_together(shared, clients[first : first + self._chunk], make_round)
        return shared

    def _share_in_turn(self, shared: Shared, clients: Sequence[int], make_round: MakeRound) -> None:
        for client in clients:
            client_round = make_round(client)
            try:
                if self._defense.gradient_only:
                    with timed(client_round.task.device) as took:
                        honest = client_round.update()
                    shared.gradient_seconds += took.seconds
                    self._defend_one(shared, client, honest, client_round)
                else:
                    self._share_one(shared, client, client_round)
            except NotFiniteError as error:
                self._fail(shared, client, client_round, error)

    def _share_one(self, shared: Shared, client: int, client_round: ClientRound) -> None:
        """Add the update of one client whose defense computes the gradients of every step itself."""
        undefended = self._measure_undefended(client_round)
        with timed(client_round.task.device) as took:
            update = self._defense.make_update(client_round)
            checked_gradients(self._defense.name, update)
        shared.gradient_seconds += min(undefended, took.seconds)
        shared.defense_seconds += max(0.0, took.seconds - undefended)
        self._send(shared, client, update, client_round)

    def _defend_one(self, shared: Shared, client: int, honest: Update, client_round: ClientRound) -> None:
        with timed(client_round.task.device) as took:
            update = self._defense.perturb_gradients(honest, client_round)
            checked_gradients(self._defense.name, update)
        shared.defense_seconds += took.seconds
        self._send(shared, client, update, client_round)

    def _send(self, shared: Shared, client: int, update: Update, client_round: ClientRound) -> None:
        shared.updates[client] = update
        if self._lossless:
            self._settle(client_round, arrived=True)

    def _share_together(self, shared: Shared, clients: Sequence[int], make_round: MakeRound) -> None:
        client_rounds = [make_round(client) for client in clients]
        device, announced = client_rounds[0].task.device, client_rounds[0].announced
        with timed(device) as took:
            stacked, metas = self._batched(client_rounds)
        shared.gradient_seconds += took.seconds
        if not self._defends_together:
            for row, client in enumerate(clients):
                honest = Update({name: value[row] for name, value in stacked.items()}, metas[row])
                try:
                    self._defend_one(shared, client, honest, client_rounds[row])
                except NotFiniteError as error:
                    self._fail(shared, client, client_rounds[row], error)
            return
        assert isinstance(self._defense, Perturbation)
        try:
            with timed(device) as took:
                sources = [client_round.source for client_round in client_rounds]
                defended = self._defense.perturb_clients(stacked, generators=sources, announced=announced)
        except NotFiniteError:
            self._share_in_turn(shared, clients, make_round)  # to find out which client's gradients are not finite
            return
        for row, client in enumerate(clients):
            shared.updates[client] = Update({name: value[row] for name, value in defended.items()}, metas[row])
        shared.defense_seconds += took.seconds

    def _fail(self, shared: Shared, client: int, client_round: ClientRound, error: NotFiniteError) -> None:
        shared.failed[client] = str(error)
        self._settle(client_round, arrived=False)  # a part of a chain may have been ready before another one failed

    def _settle(self, client_round: ClientRound, *, arrived: bool) -> None:
        if client_round.memory is not None:
            self._defense.settle(client_round.memory, arrived=arrived)

    def _measure_undefended(self, client_round: ClientRound) -> float:
        """Time a client's gradients or local steps without a defense; measured once, on the first client."""
        if self._undefended_seconds is None:
            for _ in range(2):  # the first run warms up
                with timed(client_round.task.device) as took:
                    replace(client_round, generator=torch.Generator(client_round.task.device)).update()
            self._undefended_seconds = took.seconds
        return self._undefended_seconds


class _BatchedUpdates:
    """`compute_update` for many clients at once: gradients stacked ``[clients, *parameter shape]``.

    Args:
        task: the prepared task.
        local: local steps; None: one gradient.
        compiled: number of clients and examples per step that the programs are compiled for; None: not compiled.
    """

    def __init__(self, task: Task, local: LocalSteps | None, *, compiled: tuple[int, int] | None) -> None:
        self._local = local
        self._can_pad = task.loss_name == "cross-entropy" and not task.has_batch_statistics
        # Only batch-norm statistics change during a round, and no gradient depends on those: see `Task`.
        self._at_shared_weights = _Program(vmap(task.gradient, in_dims=(None, 0, 0)), compiled)
        self._at_own_weights = _Program(vmap(task.gradient), compiled)

    def __call__(self, clients: Sequence[ClientRound]) -> tuple[Gradients, list[Meta]]:
        """Compute the stacked updates and the `Meta` of each, in the order of `clients`."""
        task, batches = clients[0].task, [(client.inputs, client.targets) for client in clients]
        task.check(*(torch.cat(part) for part in zip(*batches, strict=True)))
        plans = [self._plan(client) for client in clients]
        weights, own_weights = task.parameters, False
        velocity: Gradients = {}
        total: Gradients = {}
        buffers: list[Gradients] = [{} for _ in batches]
        for number in range(max(map(len, plans))):
            active = [row for row, plan in enumerate(plans) if number < len(plan)]
            all_active = len(active) == len(plans)
            steps = [tuple(tensor[plans[row][number]] for tensor in batches[row]) for row in active]
            step_weights = (
                weights if all_active or not own_weights else {name: value[active] for name, value in weights.items()}
            )
            gradients = self._gradients(step_weights, own_weights, steps)  # type: ignore[arg-type]
            if task.has_batch_statistics:
                for row, (inputs, _) in zip(active, steps, strict=True):
                    client_weights = {name: value[row] for name, value in weights.items()} if own_weights else weights
                    buffers[row] = task.with_parameters(client_weights, buffers[row]).updated_buffers(inputs)
            if self._local is None:
                total = gradients
                continue
            lr, momentum = self._local.lr, self._local.momentum
            if all_active:
                velocity = with_momentum(velocity, gradients, momentum)
                total = {name: total[name] + value if total else value.clone() for name, value in velocity.items()}
                weights = {name: value - lr * velocity[name] for name, value in weights.items()}
                own_weights = True
                continue
            active_velocity = with_momentum(
                {name: value[active] for name, value in velocity.items()}, gradients, momentum
            )
            rows = torch.tensor(active, device=task.device)
            for name, value in active_velocity.items():
                velocity[name] = velocity[name].index_copy(0, rows, value)
                total[name] = total[name].index_add(0, rows, value)
                weights[name] = weights[name].index_add(0, rows, value, alpha=-lr)
        sizes = [len(client.inputs) for client in clients]
        return total, [Meta(samples=n, local=self._local, buffers=b) for n, b in zip(sizes, buffers, strict=True)]

    def _plan(self, client: ClientRound) -> list[Tensor | slice]:
        """The examples that each step uses, drawn as `compute_update` draws them."""
        if self._local is None:
            return [slice(None)]
        plan: list[Tensor | slice] = []
        for _ in range(self._local.epochs):
            order = client.source.permutation(len(client.inputs), client.inputs.device)
            plan += torch.split(order, self._local.batch_size or len(order))
        return plan

    def _gradients(self, weights: Gradients, own_weights: bool, steps: Sequence[Batch]) -> Gradients:
        """The gradient of each client's batch; with `own_weights`, the weights have a leading client dimension too."""
        lengths = [len(targets) for _, targets in steps]
        if self._can_pad and all(targets.ndim == 1 and not targets.is_floating_point() for _, targets in steps):
            # A power of two, so that there are few lengths and at most half of a batch is padding.
            lengths = [min(max(lengths), 1 << (length - 1).bit_length()) for length in lengths]
        if len(set(lengths)) == 1:
            return self._run(weights, own_weights, steps, lengths[0])
        parts: Gradients = {}
        for length in sorted(set(lengths)):
            rows = [row for row, other in enumerate(lengths) if other == length]
            step_weights = {name: value[rows] for name, value in weights.items()} if own_weights else weights
            for name, value in self._run(step_weights, own_weights, [steps[row] for row in rows], length).items():
                if name not in parts:
                    parts[name] = value.new_empty(len(steps), *value.shape[1:])
                parts[name][rows] = value
        return parts

    def _run(self, weights: Gradients, own_weights: bool, steps: Sequence[Batch], length: int) -> Gradients:
        inputs = torch.stack([_padded(inputs, length, 0) for inputs, _ in steps])
        targets = torch.stack([_padded(targets, length, IGNORED_LABEL) for _, targets in steps])
        if own_weights:
            return self._at_own_weights(weights, inputs, targets, own_weights=True)
        return self._at_shared_weights(weights, inputs, targets)


class _Program:
    """A vmapped gradient, optionally compiled for one number of clients and examples; fewer clients are padded to it.

    The shape is fixed before the first call, so that a resumed training runs the same calls compiled: compiled and
    uncompiled calls round differently.
    """

    def __init__(self, function: Callable[..., Gradients], compiled_for: tuple[int, int] | None) -> None:
        self._function, self._shape = function, compiled_for
        self._compiled = None if compiled_for is None else compilation.compiled(function)

    def __call__(self, weights: Gradients, inputs: Tensor, targets: Tensor, *, own_weights: bool = False) -> Gradients:
        clients, length = targets.shape[:2]
        missing = 0 if self._shape is None else self._shape[0] - clients
        if self._shape is None or self._compiled is None or length != self._shape[1] or not 0 <= missing <= clients:
            return _detached(self._function(weights, inputs, targets), clients)
        # One shape, one compilation: a smaller chunk is padded with copies of its first client.
        if own_weights:
            weights = {name: _repeat_first(value, missing) for name, value in weights.items()}
        padded = self._compiled(weights, _repeat_first(inputs, missing), _repeat_first(targets, missing))
        return _detached(padded, clients)


def _detached(gradients: Gradients, clients: int) -> Gradients:
    return {name: value[:clients].detach() for name, value in gradients.items()}


def _repeat_first(tensor: Tensor, times: int) -> Tensor:
    return torch.cat([tensor, tensor[:1].expand(times, *tensor.shape[1:])]) if times else tensor


def _padded(tensor: Tensor, length: int, value: float) -> Tensor:
    if len(tensor) == length:
        return tensor
    return torch.cat([tensor, tensor.new_full((length - len(tensor), *tensor.shape[1:]), value)])
