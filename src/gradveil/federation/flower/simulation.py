"""The local engine's training on Flower's simulation."""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import fmean

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from gradveil.core import checks
from gradveil.core.errors import GradveilError, InputError, NotFiniteError
from gradveil.core.timing import clock
from gradveil.data import Dataset
from gradveil.defenses import Defense
from gradveil.federation._optimiser import ServerOptimiser
from gradveil.federation.faults import NOT_FINITE
from gradveil.federation.flower._arrays import split_arrays
from gradveil.federation.flower._context import answer_once, memory
from gradveil.federation.flower._messages import Instructions, announced, announcement, reply
from gradveil.federation.flower._on_ray import run_on_ray
from gradveil.federation.flower.strategy import GradveilStrategy
from gradveil.federation.job import Job, training_loss
from gradveil.federation.training import RoundRecord, Training, TrainingResult, choose_clients
from gradveil.task import Task


class _LocalServer(FedAvg):
    """A strategy that does what the local engine's server does: same clients in each round, same optimiser steps."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.number = 0  # of the current round, counted from 0 as in the local engine
        self.elapsed = 0.0  # seconds that the last round took
        self.rounds_of: Counter[int] = Counter()
        self._optimiser = ServerOptimiser(job.training, job.task.parameters)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients that the local engine would ask."""
        self.number, self._started, self._arrays = server_round - 1, clock(self.job.task.device), arrays
        while len(nodes := sorted(grid.get_node_ids())) < self.job.training.clients:
            time.sleep(0.05)  # they register while the server starts
        chosen = choose_clients(self.job.training, self.number)
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
        """Take the optimiser's step along the mean update, start - FedAvg's mean; statistics are only averaged."""
        mean, metrics = super().aggregate_train(server_round, replies)
        if mean is None:
            return None, metrics
        start = split_arrays(self._arrays, self.job.statistics)
        averaged = mean.to_torch_state_dict()
        moved = {name: averaged[name] for name in start.statistics}
        update = {name: value - averaged[name] for name, value in start.parameters.items()}
        moved |= self._optimiser.step(start.parameters, update, self.number)
        self.elapsed = clock(self.job.task.device) - self._started
        return ArrayRecord({name: moved[name] for name in self._arrays}), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No messages: the server evaluates."""
        return []


def simulate(
    task: Task,
    dataset: Dataset,
    defense: Defense,
    training: Training,
    *,
    actors: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    watch: Callable[[RoundRecord], None] | None = None,
) -> TrainingResult:
    """The training of `gradveil.federation.train` on Flower's simulation: one simulated node per client, on Ray.

    Clients, batches, seeds and the order of all draws are those of the local engine, so the weights are the same up to
    rounding. Every defense works: clients call ``defense.share``, and updates are sent as `update.wire` bytes. Bytes
    are those of Flower's messages: every client downloads the whole model and uploads the encoded update with its
    metrics. `round_seconds` is the time of a round on the server, including sending and waiting.

    Flower's own `run_simulation` is deprecated in favour of the command ``flwr run``, which needs an app in a folder
    and leaves a SuperLink running. This calls the function that both of them call (`_run_simulation`), which is not
    public: hence the narrow range of Flower versions that the extra ``gradveil[flower]`` allows. While it runs,
    Flower's and Ray's telemetry is off.

    Args:
        task: model and loss at the initial weights, on the CPU; not changed.
        dataset: as for the local engine.
        defense: as for the local engine.
        training: as for the local engine.
        actors: worker processes, one CPU each; None: Flower's default, two CPUs each.
        progress: called with (rounds done, rounds in all).
        watch: called with the record of each round; all of its time counts as time of the gradients.
    """
    if actors is not None:
        checks.integer("simulate", "actors", actors, low=1)
    if task.device.type != "cpu":
        raise InputError(f"flower: simulate trains on the CPU, got a task on {task.device}")
    job = Job.prepare(task, dataset, defense, training)
    inner = _LocalServer(job)
    # 1.0, because the learning rate is applied by the inner strategy's optimiser.
    strategy = GradveilStrategy(inner, job.defense, lr=1.0, statistics=job.statistics)
    last = ArrayRecord({**job.task.parameters, **{name: job.task.buffers[name] for name in job.statistics}})
    records: list[RoundRecord] = []
    diverged: int | None = None
    counted = 0  # uploads that earlier records count
    stopped = threading.Event()

    def record_round(done: int, arrays: ArrayRecord) -> None:
        nonlocal last, counted
        for fault in strategy.faults:
            if fault.round == done and fault.kind != NOT_FINITE:  # simulated clients fail for no other reason
                raise InputError(f"flower: {fault}")
        before, last = _task_at(job.task, last), arrays
        if not done:
            return
        uploads, counted = strategy.uploads[counted:], len(strategy.uploads)
        if not uploads:
            raise NotFiniteError("flower: no client's gradients are finite")
        batches = job.draw(before, done - 1)
        records.append(
            RoundRecord(
                round=done - 1,
                clients=len(uploads),
                loss=training_loss(before, batches),
                accuracy=job.accuracy(_task_at(job.task, arrays), done),
                gradient_seconds=inner.elapsed,
                defense_seconds=0.0,
                aggregation_seconds=0.0,
                upload_bytes=fmean(uploads),
                download_bytes=fmean(strategy.downloads[-len(batches) :]),
            )
        )
        if watch:
            watch(records[-1])
        if progress:
            progress(done, training.rounds)
        if job.has_diverged(records):
            raise NotFiniteError("flower: the loss has diverged")

    server = ServerApp()

    @server.main()
    def main(grid: Grid, _context: Context) -> None:
        nonlocal diverged
        _give_up_when(stopped, grid)
        try:
            strategy.start(grid, last, num_rounds=training.rounds, evaluate_fn=record_round)
        except NotFiniteError:
            diverged = inner.number

    try:
        run_on_ray(job, _answer_or_error, server, clients=training.clients, actors=actors)
    finally:
        stopped.set()
    return job.result(
        _task_at(job.task, last),
        records,
        inner.rounds_of,
        diverged=diverged,
        faults=[dataclasses.replace(fault, round=fault.round - 1) for fault in strategy.faults],
        execution="flower",
    )


def _task_at(task: Task, record: ArrayRecord) -> Task:
    arrays = split_arrays(record, [name for name in record if name not in task.parameters])
    return task.with_parameters(arrays.parameters, arrays.statistics)


def _give_up_when(stopped: threading.Event, grid: Grid) -> None:
    """End the server's thread when the simulation is over: it would wait an hour for clients that are gone."""
    pull = grid.pull_messages

    def pull_messages(message_ids: Iterable[str]) -> Iterable[Message]:
        if stopped.is_set():
            raise InterruptedError("the simulation was stopped")
        return pull(message_ids)

    grid.pull_messages = pull_messages  # type: ignore[method-assign]


def _answer_or_error(job: Job, message: Message, context: Context) -> Message:
    """What a client of the local engine sends in a round, or the reason why it cannot."""
    try:
        return _answer(job, message, context)
    except GradveilError as error:  # if it were raised, Flower would send and log the whole traceback
        reason = f"{type(error).__name__}: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _answer(job: Job, message: Message, context: Context) -> Message:
    answer_once(message, context, defense=job.defense)
    instructions, own_memory = Instructions.required(message), memory(context)
    number = instructions.round - 1
    client = checks.integer("simulate", "client", message.content.config_records["config"]["client"], low=0)
    current = _task_at(job.task, message.content.array_records["arrays"])
    batch = job.draw(current, number, client)[client]
    if instructions.announce:
        client_round = job.client_round(current, number, client, batch, "announce", memory=own_memory)
        return announcement(message, job.defense.make_announcement(client_round))
    state = {"memory": own_memory, "announced": announced(message)}
    client_round = job.client_round(current, number, client, batch, "share", **state)
    return reply(message, job.defense.make_update(client_round), job.defense)
