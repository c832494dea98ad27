"""What the clients of a round do: one after the other, or as one batched program.

Under FedSGD all clients differentiate at the same weights; under FedAvg each walks away on its own. Either way the
clients' gradients are one vmapped program, cut into chunks that fit into caches, wherever the defense needs only
gradients (`Defense.gradient_only`). All others go client by client through `Defense.share`.

Clients with unequal numbers of images are batched exactly: a step's batches of one length form one program. Where the
loss is plain cross-entropy and no batch statistics tie the images of a batch together, shorter batches are filled up
with images that the loss ignores, so that there are few different lengths.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import vmap

from gradveil import checks, compilation
from gradveil.defenses import Defense, Perturbation
from gradveil.defenses.base import checked_gradients
from gradveil.errors import NotFiniteError, ParameterError
from gradveil.federation.training import Training
from gradveil.task import Gradients, Task
from gradveil.update import Announced, LocalSteps, Memory, Meta, Update, compute_update, steps_of, with_momentum

EXECUTIONS = ("auto", "loop", "batch", "compile")

Batch = tuple[Tensor, Tensor]
Randomness = Callable[[int, str], torch.Generator]
"""The generator of a client for a purpose, always in the same state."""

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
    images = _images_a_step(training)
    values = images * task.activations
    if values + task.size > LARGEST_BATCHED_STEP:
        return "loop"
    steps = training.rounds * training.drawn_clients * steps_of(training.local, training.batch_size)
    programs = 1 if training.local is None else 2
    worth_it = compilation.is_worth_it(SECONDS_PER_VALUE * values * steps, programs * len(task.parameters))
    return "compile" if worth_it else "batch"


def _can_batch(task: Task, defense: Defense) -> bool:
    # A subclass of Task may have a loss that is not a function of weights, inputs and labels alone.
    return defense.gradient_only and type(task) is Task


def _images_a_step(training: Training) -> int:
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
        >>> batches = {client: (torch.rand(2, 1, 2, 2), torch.tensor([0, 1])) for client in (2, 0)}
        >>> shared = clients.share(task, batches, lambda client, purpose: torch.Generator(), {})
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
        values = _images_a_step(training) * (math.prod(task.input_shape) + task.activations)
        flowing = 3 * values * task.dtype.itemsize  # forth, back, and copies
        standing = 6 * task.size * task.dtype.itemsize  # weights, gradients, velocities and a defense's copies
        most = max(1, min(cache_bytes // flowing, MEMORY_BYTES // (flowing + standing)))
        # Chunks of one size: what is left over would be filled up, or run uncompiled.
        self._chunk = math.ceil(training.drawn_clients / math.ceil(training.drawn_clients / most))
        compiled = (self._chunk, _images_a_step(training)) if self.execution == "compile" else None
        self._batched = _BatchedUpdates(task, training.local, compiled=compiled)
        # Clients that defend themselves one layer at a time: all of a chunk can do so together.
        self._together = defense.batches_clients
        self._undefended: float | None = None

    def share(
        self,
        task: Task,
        batches: Mapping[int, Batch],
        randomness: Randomness,
        memories: Mapping[int, Memory],
        announced: Announced | None = None,
    ) -> Shared:
        """What each client sends.

        Args:
            task: at the weights of this round.
            batches: the images and labels that each client drew.
            randomness: each client's own.
            memories: each client's own.
            announced: what the elected client announced.
        """
        shared, clients = Shared(), list(batches)
        asked = _Round(task, batches, randomness, memories, announced)
        if self.execution == "loop":
            self._share_in_turn(shared, clients, asked)
            return shared
        for first in range(0, len(clients), self._chunk):
            self._share_together(shared, clients[first : first + self._chunk], asked)
        return shared

    def _share_in_turn(self, shared: Shared, clients: Sequence[int], asked: "_Round") -> None:
        for client in clients:
            try:
                if self._defense.gradient_only:
                    started = time.perf_counter()
                    generator = asked.randomness(client, "share")
                    honest = compute_update(
                        asked.task, *asked.batches[client], local=self._training.local, generator=generator
                    )
                    shared.gradient_seconds += time.perf_counter() - started
                    self._defend_one(shared, client, honest, generator, asked)
                else:
                    self._share_one(shared, client, asked)
            except NotFiniteError as error:
                shared.failed[client] = str(error)

    def _share_one(self, shared: Shared, client: int, asked: "_Round") -> None:
        """One client whose defense makes the gradients of every step itself."""
        undefended = self._seconds_undefended(asked.task, asked.batches[client])
        started = time.perf_counter()
        update = self._defense.share(
            asked.task,
            *asked.batches[client],
            generator=asked.randomness(client, "share"),
            memory=asked.memories.get(client),
            announced=asked.announced,
            local=self._training.local,
        )
        checked_gradients(self._defense.name, update)
        taken = time.perf_counter() - started
        shared.gradient_seconds += min(undefended, taken)
        shared.defense_seconds += max(0.0, taken - undefended)
        shared.updates[client] = update

    def _defend_one(
        self, shared: Shared, client: int, honest: Update, generator: torch.Generator, asked: "_Round"
    ) -> None:
        started = time.perf_counter()
        update = self._defense.perturb(
            honest, generator=generator, memory=asked.memories.get(client), announced=asked.announced
        )
        checked_gradients(self._defense.name, update)
        shared.defense_seconds += time.perf_counter() - started
        shared.updates[client] = update

    def _share_together(self, shared: Shared, clients: Sequence[int], asked: "_Round") -> None:
        started = time.perf_counter()
        generators = [asked.randomness(client, "share") for client in clients]
        batches = [asked.batches[client] for client in clients]
        stacked, metas = self._batched(asked.task, batches, generators)
        differentiated = time.perf_counter()
        shared.gradient_seconds += differentiated - started
        if not self._together:
            for row, (client, meta) in enumerate(zip(clients, metas, strict=True)):
                honest = Update({name: value[row] for name, value in stacked.items()}, meta)
                try:
                    self._defend_one(shared, client, honest, generators[row], asked)
                except NotFiniteError as error:
                    shared.failed[client] = str(error)
            return
        assert isinstance(self._defense, Perturbation)
        try:
            defended = self._defense.perturb_clients(stacked, generators=generators, announced=asked.announced)
        except NotFiniteError:
            self._share_in_turn(shared, clients, asked)  # to find out whose gradients they are
            return
        for row, (client, meta) in enumerate(zip(clients, metas, strict=True)):
            shared.updates[client] = Update({name: value[row] for name, value in defended.items()}, meta)
        shared.defense_seconds += time.perf_counter() - differentiated

    def _seconds_undefended(self, task: Task, batch: Batch) -> float:
        """What a client's gradients or local steps take without a defense; measured once, on the first client."""
        if self._undefended is None:
            for _ in range(2):  # the first one warms up
                started = time.perf_counter()
                compute_update(task, *batch, local=self._training.local, generator=torch.Generator(task.device))
                self._undefended = time.perf_counter() - started
        assert self._undefended is not None
        return self._undefended


@dataclass(frozen=True)
class _Round:
    """What the clients of one round are given."""

    task: Task
    batches: Mapping[int, Batch]
    randomness: Randomness
    memories: Mapping[int, Memory]
    announced: Announced | None


class _BatchedUpdates:
    """`compute_update` for many clients at once: gradients stacked ``[clients, *parameter shape]``.

    Args:
        task: the prepared task.
        local: local steps; None: one gradient.
        compiled: clients and images a step that the programs are compiled for; None: they are not.
    """

    def __init__(self, task: Task, local: LocalSteps | None, *, compiled: tuple[int, int] | None) -> None:
        self._local = local
        self._can_fill = task.loss_name == "cross-entropy" and not task.has_batch_statistics
        # Buffers that a round changes are batch-norm statistics, which no gradient depends on: see `Task`.
        self._at_shared_weights = _Program(vmap(task.gradient, in_dims=(None, 0, 0)), compiled)
        self._at_own_weights = _Program(vmap(task.gradient), compiled)

    def __call__(
        self, task: Task, batches: Sequence[Batch], generators: Sequence[torch.Generator]
    ) -> tuple[Gradients, list[Meta]]:
        """The updates and what is known of them, in the order of `batches`; one generator a client shuffles."""
        task.check(torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches]))
        plans = [self._plan(len(labels), generator) for (_, labels), generator in zip(batches, generators, strict=True)]
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
                for row, (images, _) in zip(going, steps, strict=True):
                    stepping = {name: value[row] for name, value in weights.items()} if own else weights
                    buffers[row] = task.with_parameters(stepping, buffers[row]).updated_buffers(images)
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
        metas = [
            Meta(samples=len(labels), local=self._local, buffers=statistics)
            for (_, labels), statistics in zip(batches, buffers, strict=True)
        ]
        return total, metas

    def _plan(self, images: int, generator: torch.Generator) -> list[Tensor | slice]:
        """Which images each step takes, drawn as `compute_update` draws them."""
        if self._local is None:
            return [slice(None)]
        plan: list[Tensor | slice] = []
        for _ in range(self._local.epochs):
            order = torch.randperm(images, generator=generator, device=generator.device)
            plan += torch.split(order, self._local.batch_size or images)
        return plan

    def _gradients(self, weights: Gradients, own: bool, steps: Sequence[Batch]) -> Gradients:
        """The gradient of each client's batch; with `own`, the weights have a leading client dimension too."""
        sizes = [len(labels) for _, labels in steps]
        longest = max(sizes)
        lengths = [self._filled_length(size, longest) for size in sizes]
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

    def _filled_length(self, images: int, longest: int) -> int:
        """A power of two, so that there are few lengths and at most half of a batch is filling."""
        return min(longest, 1 << (images - 1).bit_length()) if self._can_fill else images

    def _run(self, weights: Gradients, own: bool, steps: Sequence[Batch], length: int) -> Gradients:
        images = torch.stack([_filled(images, length, 0) for images, _ in steps])
        labels = torch.stack([_filled(labels, length, IGNORED) for _, labels in steps])
        if own:
            return self._at_own_weights(weights, images, labels, rows_of_weights=True)
        return self._at_shared_weights(weights, images, labels)


class _Program:
    """A vmapped gradient, compiled if asked: for one shape, clients and images, and whatever fills up to it.

    The shape is known before the first call, so that the same calls run compiled when a training is resumed: compiled
    and not, they round differently.
    """

    def __init__(self, function: Callable[..., Gradients], compiled_for: tuple[int, int] | None) -> None:
        self._function, self._shape = function, compiled_for
        self._compiled = None if compiled_for is None else compilation.compiled(function)

    def __call__(
        self, weights: Gradients, images: Tensor, labels: Tensor, *, rows_of_weights: bool = False
    ) -> Gradients:
        clients, length = labels.shape[:2]
        missing = 0 if self._shape is None else self._shape[0] - clients
        if self._shape is None or self._compiled is None or length != self._shape[1] or not 0 <= missing <= clients:
            return _detached(self._function(weights, images, labels), clients)
        # One shape, one compilation: a smaller chunk is filled up with its first client.
        if rows_of_weights:
            weights = {name: _repeat_first(value, missing) for name, value in weights.items()}
        filled = self._compiled(weights, _repeat_first(images, missing), _repeat_first(labels, missing))
        return _detached(filled, clients)


def _detached(gradients: Gradients, clients: int) -> Gradients:
    return {name: value[:clients].detach() for name, value in gradients.items()}


def _repeat_first(tensor: Tensor, times: int) -> Tensor:
    return torch.cat([tensor, tensor[:1].expand(times, *tensor.shape[1:])]) if times else tensor


def _filled(tensor: Tensor, length: int, value: float) -> Tensor:
    if len(tensor) == length:
        return tensor
    return torch.cat([tensor, tensor.new_full((length - len(tensor), *tensor.shape[1:]), value)])
