"""The local engine's training on Flower's simulation."""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from gradveil import checks
from gradveil.data import Dataset, Split
from gradveil.defenses import Defense
from gradveil.errors import GradveilError, InputError, NotFiniteError
from gradveil.federation.faults import NOT_FINITE
from gradveil.federation.flower.arrays import split_arrays
from gradveil.federation.flower.context import memory
from gradveil.federation.flower.messages import Instructions, announced, announcement, reply
from gradveil.federation.flower.on_ray import run_on_ray
from gradveil.federation.flower.strategy import GradveilStrategy
from gradveil.federation.local import (
    after_warming_up,
    as_batch,
    choose_clients,
    deal,
    draw,
    evaluate,
    has_grown,
    mean_or_nan,
    privacy_spent,
    split_public,
    training_loss,
)
from gradveil.federation.optimiser import ServerOptimiser
from gradveil.federation.training import RoundRecord, Training, TrainingResult
from gradveil.randomness import derived_generator
from gradveil.task import Task


@dataclass(frozen=True)
class _Job:
    """What a simulated client needs; the weights come with each message."""

    task: Task
    train: Split
    shares: Sequence[Tensor]
    defense: Defense
    training: Training


class _SameRounds(FedAvg):
    """The local engine's server: the same clients in each round, and its optimiser's steps on the weighted mean."""

    def __init__(self, training: Training, parameters: Mapping[str, Tensor], statistics: Collection[str]) -> None:
        super().__init__()
        self.training, self.statistics = training, statistics
        self.number = 0  # of the round at work, as the local engine counts
        self.elapsed = 0.0  # seconds of the last one
        self.rounds_of: Counter[int] = Counter()
        self._optimiser = ServerOptimiser(training, parameters)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients that the local engine would ask."""
        self.number, self._started, self._arrays = server_round - 1, time.perf_counter(), arrays
        training = self.training
        while len(nodes := sorted(grid.get_node_ids())) < training.clients:
            time.sleep(0.05)  # they register while the server starts
        chosen = choose_clients(training, self.number)
        self.rounds_of.update(chosen)
        return [
            Message(
                RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: ConfigRecord({"client": client})}),
                nodes[client],
                MessageType.TRAIN,
            )
            for client in chosen
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """FedAvg's mean of the arrays is one update away from the start; statistics are averaged only."""
        mean, metrics = super().aggregate_train(server_round, replies)
        if mean is None:
            return None, metrics
        start = split_arrays(self._arrays, self.statistics)
        averaged = mean.to_torch_state_dict()
        moved = {name: averaged[name] for name in start.statistics}
        update = {name: value - averaged[name] for name, value in start.parameters.items()}
        moved |= self._optimiser.step(start.parameters, update, self.number)
        self.elapsed = time.perf_counter() - self._started
        return ArrayRecord({name: moved[name] for name in self._arrays}), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: the server evaluates."""
        return []


def simulate(
    task: Task,
    dataset: Dataset,
    defense: Defense,
    training: Training,
    *,
    actors: int | None = None,
    watch: Callable[[RoundRecord], None] | None = None,
) -> TrainingResult:
    """The training of `gradveil.federation.train` on Flower's simulation: one simulated node a client, on Ray.

    Clients, batches, seeds and the order of all draws are those of the local engine, so the weights are the same up to
    rounding. Every defense works: clients call ``defense.share``, and updates travel as `gradveil.wire` bytes. Bytes
    are those of Flower's messages: down goes the whole model to every client, up the encoded update with its metrics.
    `round_seconds` is the time of a round on the server, sending and waiting included.

    Flower's own `run_simulation` is deprecated in favour of the command ``flwr run``, which needs an app in a folder
    and leaves a SuperLink running. This calls the function that both of them run (`_run_simulation`), which is not
    public: hence the narrow range of versions in the extra. While it runs, Flower's and Ray's telemetry is off.

    Args:
        task: model and loss at the initial weights, on the CPU; not changed.
        dataset: as for the local engine.
        defense: as for the local engine.
        training: as for the local engine.
        actors: processes that work for the clients, one CPU each; None: Flower's default, two CPUs each.
        watch: called with what was measured of each round; all of its time counts as that of the gradients.
    """
    if actors is not None:
        checks.integer("simulate", "actors", actors, low=1)
    if task.device.type != "cpu":
        raise InputError(f"flower: simulate trains on the CPU, got a task on {task.device}")
    seed = training.seed
    public, private = split_public(dataset.train, seed)
    shares = deal(dataset.train, private, training)
    known = as_batch(task, dataset.train.batch(public))
    defense, task = defense.prepare(task, public=known, generator=derived_generator(seed, "prepare"))
    statistics = list(task.updated_buffers(known[0][:2]))
    rounds = _SameRounds(training, task.parameters, statistics)
    # The server's steps have a rate of their own.
    strategy = GradveilStrategy(rounds, defense, lr=1.0, statistics=statistics)
    last = ArrayRecord({**task.parameters, **{name: task.buffers[name] for name in statistics}})
    records: list[RoundRecord] = []
    history: list[tuple[int, float]] = []
    diverged: int | None = None
    uploaded = 0  # replies accepted in the rounds before
    stopped = threading.Event()

    def at(arrays: ArrayRecord) -> Task:
        return _task_at(task, arrays)

    def look(done: int, arrays: ArrayRecord) -> None:
        nonlocal last, uploaded
        for fault in strategy.faults:
            if fault.round == done and fault.kind != NOT_FINITE:  # a simulated client has no other reason to fail
                raise InputError(f"flower: {fault}")
        before, last = at(last), arrays
        if not done:
            return
        uploads, uploaded = strategy.uploads[uploaded:], len(strategy.uploads)
        if not uploads:
            raise NotFiniteError("flower: no client's gradients are finite")
        batches = draw(before, dataset.train, shares, training, done - 1)
        accuracy = None
        if training.evaluate_every and done % training.evaluate_every == 0 and done < training.rounds:
            accuracy = evaluate(at(arrays), dataset.test)[0]
            history.append((done, accuracy))
        records.append(
            RoundRecord(
                round=done - 1,
                clients=len(uploads),
                loss=training_loss(before, batches),
                accuracy=accuracy,
                gradient_seconds=rounds.elapsed,
                defense_seconds=0.0,
                aggregation_seconds=0.0,
                upload_bytes=mean_or_nan(uploads),
                download_bytes=mean_or_nan(strategy.downloads[-len(batches) :]),
            )
        )
        if watch:
            watch(records[-1])
        if has_grown([record.loss for record in records], task.classes):
            raise NotFiniteError("flower: the loss has grown beyond hope")

    server = ServerApp()

    @server.main()
    def main(grid: Grid, _context: Context) -> None:
        nonlocal diverged
        _give_up_when(stopped, grid)
        try:
            strategy.start(grid, last, num_rounds=training.rounds, evaluate_fn=look)
        except NotFiniteError:
            diverged = rounds.number

    try:
        job = _Job(task, dataset.train, shares, defense, training)
        run_on_ray(job, _work, server, clients=training.clients, actors=actors)
    finally:
        stopped.set()
    trained = at(last)
    accuracy, loss = evaluate(trained, dataset.test)
    history.append((len(records), accuracy))
    return TrainingResult(
        trained,
        accuracy,
        loss,
        mean_or_nan(record.seconds for record in after_warming_up(records)),
        mean_or_nan(strategy.uploads),
        mean_or_nan(strategy.downloads),
        history,
        diverged,
        privacy_spent(defense, training, [len(share) for share in shares], rounds.rounds_of),
        records,
        faults=[dataclasses.replace(fault, round=fault.round - 1) for fault in strategy.faults],
        execution="flower",
    )


def _task_at(task: Task, record: ArrayRecord) -> Task:
    arrays = split_arrays(record, [name for name in record if name not in task.parameters])
    return task.with_parameters(arrays.parameters, arrays.statistics)


def _give_up_when(stopped: threading.Event, grid: Grid) -> None:
    """Let the server's thread end when the simulation is over: it would wait an hour for clients that are gone."""
    pull = grid.pull_messages

    def pull_messages(message_ids: Iterable[str]) -> Iterable[Message]:
        if stopped.is_set():
            raise InterruptedError("the simulation was stopped")
        return pull(message_ids)

    grid.pull_messages = pull_messages  # type: ignore[method-assign]


def _work(job: _Job, message: Message, context: Context) -> Message:
    """What a client of the local engine does in a round; if it cannot, the reason."""
    try:
        return _answer(job, message, context)
    except GradveilError as error:  # for exceptions Flower sends and logs whole tracebacks
        reason = f"{type(error).__name__}: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _answer(job: _Job, message: Message, context: Context) -> Message:
    training, instructions = job.training, Instructions.required(message)
    number = instructions.round - 1
    client = checks.integer("simulate", "client", message.content.config_records["config"]["client"], low=0)
    current = _task_at(job.task, message.content.array_records["arrays"])
    batch = draw(current, job.train, job.shares, training, number, client)[client]

    def randomness(purpose: str) -> torch.Generator:
        return derived_generator(training.seed, purpose, number, client)

    own = memory(context)
    if instructions.announce:
        published = job.defense.announce(
            current, *batch, generator=randomness("announce"), memory=own, local=training.local
        )
        return announcement(message, published)
    update = job.defense.share(
        current, *batch, generator=randomness("share"), memory=own, announced=announced(message), local=training.local
    )
    return reply(message, update, job.defense)
