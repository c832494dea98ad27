"""Federated training in one process: what a defense costs in accuracy, time and bytes."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from gradveil.core.errors import ParameterError
from gradveil.core.timing import timed
from gradveil.data import Dataset
from gradveil.defenses import Defense
from gradveil.federation._clients import Clients, Shared
from gradveil.federation._optimiser import ServerOptimiser
from gradveil.federation.checkpoint import MEMORIES, Checkpoints, State, identify, training_folder
from gradveil.federation.faults import NOT_FINITE
from gradveil.federation.job import Job, after_warming_up, deal, mean_or_nan, training_loss
from gradveil.federation.memory import RAM_BYTES, ClientMemories
from gradveil.federation.protocol import OpenRound
from gradveil.federation.training import TIMES, RoundRecord, Training, TrainingResult, choose_clients
from gradveil.task import Task
from gradveil.update import Announced, ClientRound, Update, wire

Transport = Callable[[int, int, bytes], Iterable[bytes]]
"""What happens to a message on its way: maps (round, client, message) to the messages that arrive from that client."""

ENCODED_CLIENTS = 4
"""The updates of this many clients per round, the first ones drawn, are encoded to measure their length."""


def train(
    task: Task,
    dataset: Dataset,
    defense: Defense,
    training: Training,
    *,
    progress: Callable[[int, int], None] | None = None,
    watch: Callable[[RoundRecord], None] | None = None,
    execution: str = "auto",
    transport: Transport | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
    ram_bytes: int = RAM_BYTES,
) -> TrainingResult:
    """Train `task` on `dataset` with every client under `defense`; the given task is not changed.

    The same task, data, defense, training and execution give bit-identical weights on the same machine, also when the
    training was interrupted and resumed.

    Args:
        task: model and loss at the initial weights.
        dataset: training examples are dealt out to the clients, test examples measure accuracy.
        defense: what the clients do to their updates.
        training: rounds, clients, rates.
        progress: called with (rounds done, rounds in all).
        watch: called with the record of each round.
        execution: how the clients' updates are computed: ``"loop"``, ``"batch"``, ``"compile"`` or ``"auto"``, see
            `gradveil.federation._clients`.
        transport: what happens to messages on their way to the server, for tests and experiments with faults. Only with
            it are updates encoded, sent and checked as a server must check those of strangers.
        checkpoint: folder for checkpoints; None: none are saved. Only one training run at a time may write into it.
        resume: continue from the checkpoint in that folder; refused if it has none, or one of another training run.
        ram_bytes: how much of the clients' memories stays in RAM; the rest goes to disk.
    """
    if checkpoint is None and resume:
        raise ParameterError("train: resume needs checkpoint, the folder to continue in; name it or leave resume out")
    with nullcontext() if checkpoint is None else training_folder(checkpoint, resume=resume):
        job = Job.prepare(task, dataset, defense, training)
        training = job.training
        clients = Clients(job.task, job.defense, training, execution, lossless=transport is None)
        state = State(
            job.task.parameters,
            job.task.buffers,
            ServerOptimiser(training, job.task.parameters),
            ClientMemories(None if checkpoint is None else checkpoint / MEMORIES, ram_bytes, job.task.device),
        )
        checkpoints = None
        if checkpoint is not None:
            identity = identify(task, dataset, defense, training, clients.execution)
            checkpoints = Checkpoints(checkpoint, identity, job.training)
            if resume:
                checkpoints.load_into(state)
            else:
                state.memories.restore({})  # remove files of a training run that stopped before its first checkpoint
        federation = _Federation(job, clients, transport)
        while state.number < training.rounds and state.diverged is None:
            record = federation.round(state)
            if watch and record:
                watch(record)
            if progress and record:
                progress(state.number, training.rounds)
            ended = state.number == training.rounds or state.diverged is not None
            if checkpoints and (ended or state.number % training.checkpoint_every == 0):
                checkpoints.save(state)
        warm = after_warming_up(state.records)
        return job.result(
            job.task.with_parameters(state.parameters, state.buffers),
            state.records,
            state.rounds_of,
            diverged=state.diverged,
            faults=state.faults,
            execution=clients.execution,
            **{name: mean_or_nan(getattr(record, name) for record in warm) for name in TIMES},
        )


def check_settings(
    task: Task, dataset: Dataset, defenses: Iterable[Defense], training: Training, execution: str = "auto"
) -> None:
    """Raise what `train` would raise, without preparing a defense, which can take minutes; warn of clipped batches."""
    _, shares = deal(dataset.train, training)
    for defense in defenses:
        Clients(task, defense, training, execution)
    largest_share = max(map(len, shares))
    if training.batch_size > largest_share:
        warnings.warn(
            f"batches of {training.batch_size} examples were asked for, but no client holds more than {largest_share}; "
            "each uses all it has",
            stacklevel=2,
        )


@dataclass(frozen=True)
class _Federation:
    """The clients with their data, and the server; `round` runs one round."""

    job: Job
    clients: Clients
    transport: Transport | None

    def round(self, state: State) -> RoundRecord | None:
        """Run one round, from drawing the clients to the step; None if the training diverged before the step."""
        number, device = state.number, self.job.task.device
        current = self.job.task.with_parameters(state.parameters, state.buffers)
        batches = self.job.draw(current, number)
        loss = training_loss(current, batches)
        server = self._open(state)

        def make_round(client: int, purpose: str) -> ClientRound:
            own_state = {"memory": state.memories[client], "announced": server.announced}
            return self.job.client_round(current, number, client, batches[client], purpose, **own_state)

        with timed(device) as announcing:
            server.elect(lambda client: self.job.defense.make_announcement(make_round(client, "announce")))
        shared = self.clients.share(list(batches), lambda client: make_round(client, "share"))
        state.rounds_of.update(list(shared.updates))  # a mapping would be read as counts
        for client, reason in shared.failed.items():
            server.fail(client, NOT_FINITE, reason)
        if not shared.updates:
            state.diverged = number
            return None
        updates = self._arrived(server, shared, state)
        upload = download = math.nan
        with timed(device) as aggregating:
            if updates:
                aggregate = server.aggregate(updates, [update.meta.samples for update in updates], state.server_memory)
                moved = state.optimiser.step(state.parameters, aggregate, number)
                if not all(torch.isfinite(value).all() for value in moved.values()):
                    state.diverged = number
                    return None
                state.parameters, state.buffers = moved, {**state.buffers, **aggregate.meta.buffers}
        if updates:
            upload, download = _bytes(updates, aggregate, server.locations)
        state.number += 1
        record = RoundRecord(
            round=number,
            clients=len(updates),
            loss=loss,
            accuracy=self.job.accuracy(current.with_parameters(state.parameters, state.buffers), state.number),
            gradient_seconds=shared.gradient_seconds,
            defense_seconds=shared.defense_seconds + announcing.seconds,
            aggregation_seconds=aggregating.seconds,
            upload_bytes=upload,
            download_bytes=download,
        )
        state.records.append(record)
        if self.job.has_diverged(state.records):
            state.diverged = number
        return record

    def _open(self, state: State) -> OpenRound[Update]:
        """The server's side of the round that is about to begin."""
        return OpenRound(
            state.number,
            choose_clients(self.job.training, state.number),
            state.faults.append,
            defense=self.job.defense,
            parameters=state.parameters,
            statistics={name: state.buffers[name] for name in self.job.statistics},
            max_samples=self.job.training.batch_size,
            local=self.job.training.local,
        )

    def _arrived(self, server: OpenRound[Update], shared: Shared, state: State) -> list[Update]:
        """The updates that the server accepts; those missing or refused are noted as faults and taken back."""
        for update in shared.updates.values():
            update.meta.round = server.number
        if self.transport is None:
            return list(shared.updates.values())
        for client, update in shared.updates.items():
            sent = wire.encode(update, locations=server.locations)
            for message in self.transport(server.number, client, sent):
                server.receive(client, partial(server.read, message))
        accepted = server.close()
        for client in shared.updates:
            self.job.defense.settle(state.memories[client], arrived=client in accepted)
        return list(accepted.values())


def _bytes(updates: Sequence[Update], aggregate: Update, locations: Announced | None) -> tuple[float, float]:
    """The mean number of bytes that a client sends and gets back."""
    upload = fmean(len(wire.encode(update, locations=locations)) for update in updates[:ENCODED_CLIENTS])
    download = float(len(wire.encode(aggregate, locations=locations)))
    if locations is not None:  # one client uploads the announcement, all others download it
        announcement = len(wire.encode_locations(locations))
        upload += announcement / len(updates)
        download += announcement * (len(updates) - 1) / len(updates)
    return upload, download
