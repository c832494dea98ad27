"""Rounds per second of the local engine, compared with a plain loop over clients and with Flower's simulation.

Usage: python benchmarks/federation_speed.py [speed] [flower] [growth] [defenses] [where] [chunks] [--threads N] ...

speed     lenet on MNIST, 100 clients, batch 1 and 16: the batched engine (with --compile also compiled), compared with
          its own execution="loop" and with a hand-written loop of torch.autograd over clients, without gradveil.
          Goals: 3 times that plain loop at batch 1, 2.5 times at batch 16. "One pass" is the same hand-written round
          with a single gradient over all images and none per client: the gain from merely not looping.
flower    the same job at batch 16 on Flower's simulation with two actors and with its default. Goal: 15 times.
growth    10 to 2,000 clients per round at batch 4: seconds of a round per client; a constant means linear growth.
defenses  what each defense adds to a round, as a share of it; the papers claim less than 10 %.
where     loop against batch for several networks and batch sizes, to choose clients.LARGEST_BATCHED_STEP.
chunks    the number of clients processed at once, by the size of their data, to choose clients.CACHE_BYTES.

Without a name, speed, growth and defenses run. A rate is computed from the times at which rounds ended, so it includes
encoding, the training loss and all other work between rounds, but not the first round, which is a warm-up. Each figure
is the best of several parts of the run (in `speed`, of several turns), because other processes can only slow it down.
The figures mean little unless the machine is idle.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import gradveil
from gradveil import data, models
from gradveil.data import Dataset
from gradveil.federation import RoundRecord, Training, train
from gradveil.federation._clients import Clients
from gradveil.federation.job import Job
from gradveil.federation.training import choose_clients

PARTS = ("speed", "flower", "growth", "defenses", "where", "chunks")
GOALS = {1: 3.0, 16: 2.5}
GOAL_FLOWER = 15.0
TURNS = 5


def build(dataset: Dataset, name: str = "lenet") -> gradveil.Task:
    shape, classes = dataset.train.input_shape, len(dataset.classes)
    model = models.create(name, input_shape=shape, classes=classes, seed=0)
    return gradveil.Task(model, input_shape=shape, classes=classes)


def seconds_per_round(run: Callable[[Callable[[int, int], None]], object], parts: int = 3) -> float:
    """The fastest of several stretches of rounds, not counting the first round, by the times at which rounds ended."""
    ends: list[float] = []
    run(lambda _done, _total: ends.append(time.perf_counter()))
    rounds = len(ends) - 1
    if rounds < 1:
        raise SystemExit("at least two rounds are needed: the first is a warm-up")
    length = max(1, rounds // parts)
    return min((ends[at + length] - ends[at]) / length for at in range(0, rounds - length + 1, length))


def engine(
    task: gradveil.Task, dataset: Dataset, training: Training, spec: str = "none", execution: str = "auto"
) -> Any:
    defense = gradveil.defense(spec)
    return seconds_per_round(lambda tick: train(task, dataset, defense, training, progress=tick, execution=execution))


def plain_loop(
    dataset: Dataset, training: Training, tick: Callable[[int, int], None], *, one_pass: bool = False
) -> None:
    """The obvious loop: a backward pass for every client, then the mean and a momentum step.

    With `one_pass`, there is a single backward pass for the images of all clients: the same step, but without updates
    of the individual clients.
    """
    task = build(dataset)
    model = task.copy_model()
    parameters = list(model.parameters())
    job = Job.prepare(task, dataset, gradveil.defense("none"), training)
    velocities = [torch.zeros_like(value) for value in parameters]
    for number in range(training.rounds):
        clients = choose_clients(training, number)
        mean: list[Tensor] = [torch.zeros_like(value) for value in parameters]
        groups = [clients] if one_pass else [[client] for client in clients]
        for group in groups:
            drawn = job.draw(task, number, *group).values()
            images, labels = (torch.cat(parts) for parts in zip(*drawn, strict=True))
            gradients = torch.autograd.grad(F.cross_entropy(model(images), labels), parameters)
            for total, gradient in zip(mean, gradients, strict=True):
                total += gradient / len(groups)
        with torch.no_grad():
            for parameter, velocity, gradient in zip(parameters, velocities, mean, strict=True):
                velocity.mul_(training.momentum).add_(gradient)
                parameter -= training.lr * velocity
        tick(number + 1, training.rounds)


def speed(dataset: Dataset, rounds: int, clients: int, compiled: bool) -> None:
    task = build(dataset)
    print(f"{'batch':>5} {'program':16} {'s/round':>10} {'rounds/s':>9} {'x loop':>7} {'x plain':>8} {'goal':>5}")
    for batch_size, goal in GOALS.items():
        training = Training(rounds=rounds, clients=clients, batch_size=batch_size)
        contenders: dict[str, Callable[[], float]] = {
            "plain loop": lambda training=training: seconds_per_round(lambda tick: plain_loop(dataset, training, tick)),
            "one pass": lambda training=training: seconds_per_round(
                lambda tick: plain_loop(dataset, training, tick, one_pass=True)
            ),
        }
        for how in ("loop", "batch", "compile") if compiled else ("loop", "batch"):
            contenders[f"engine, {how}"] = lambda training=training, how=how: engine(
                task, dataset, training, execution=how
            )
        times = dict.fromkeys(contenders, math.inf)
        for _ in range(TURNS):  # taking turns, so that a slow minute of the machine affects all alike
            for how, measure in contenders.items():
                times[how] = min(times[how], measure())
        for how, taken in times.items():
            of_loop, of_plain = times["engine, loop"] / taken, times["plain loop"] / taken
            shown_goal = goal if how in ("engine, batch", "engine, compile") else ""
            print(
                f"{batch_size:5} {how:16} {taken:10.4f} {1 / taken:9.2f} {of_loop:7.2f} {of_plain:8.2f} {shown_goal:>5}"
            )


def flower(dataset: Dataset, rounds: int, clients: int, compiled: bool) -> None:
    from gradveil.federation.flower import simulate

    task, defense = build(dataset), gradveil.defense("none")
    training = Training(rounds=rounds, clients=clients, batch_size=16)
    execution = "compile" if compiled else "batch"
    ours = engine(task, dataset, training, execution=execution)
    print(f"{'batch 16':26} {'s/round':>10} {'x':>7} {'goal':>5}")
    print(f"{f'engine, {execution}':26} {ours:10.4f} {1:7.2f}")
    for actors in (2, None):

        def run(tick: Callable[[int, int], None], actors: int | None = actors) -> object:
            def watch(record: RoundRecord) -> None:
                tick(record.round + 1, rounds)

            return simulate(task, dataset, defense, training, actors=actors, watch=watch)

        theirs = seconds_per_round(run)
        how = f"Flower, {'default' if actors is None else f'{actors} actors'}"
        print(f"{how:26} {theirs:10.4f} {theirs / ours:7.2f} {GOAL_FLOWER:5}")


def growth(dataset: Dataset, rounds: int, most: int) -> None:
    task = build(dataset)
    print(f"{'clients':>7} {'s/round':>10} {'ms/client':>12}")
    for clients in (10, 50, 200, 1000, 2000):
        if clients <= most:
            taken = engine(
                task,
                dataset,
                Training(
                    rounds=max(3, min(rounds, 4000 // clients)), clients=2000, clients_per_round=clients, batch_size=4
                ),
            )
            print(f"{clients:7} {taken:10.4f} {1000 * taken / clients:12.3f}")


def defenses(dataset: Dataset, rounds: int, clients: int) -> None:
    """Shares of the measured time of a round (gradients, defense, aggregation); `prepare` is not part of a round."""
    task = build(dataset)
    training = Training(rounds=max(2, rounds), clients=clients, clients_per_round=min(20, clients), batch_size=16)
    print(f"{'defense':40} {'execution':9} {'s/round':>10} {'defense':>8} {'server':>7}")
    for name in gradveil.list_defenses():
        defense = gradveil.defense(name)
        feedback = defense.gradient_only and not defense.removes_noise
        for spec in (name, f"{name}+error-feedback") if feedback else (name,):
            result = train(task, dataset, gradveil.defense(spec), training)
            measured = result.rounds[1:]
            total = sum(record.seconds for record in measured)
            added = sum(record.defense_seconds for record in measured) / total
            server = sum(record.aggregation_seconds for record in measured) / total
            print(
                f"{spec:40} {result.execution:9} {total / len(measured):10.4f} {added:8.1%} {server:7.1%}", flush=True
            )


def where(rounds: int) -> None:
    mnist, cifar = data.load("mnist"), data.load("cifar10")
    print(f"{'network':20} {'batch':>5} {'values/step':>13} {'loop s':>9} {'batch s':>9} {'gain':>6}")
    for dataset, name in ((mnist, "mlp"), (mnist, "lenet"), (mnist, "mnist-cnn"), (cifar, "lenet"), (cifar, "cnn6")):
        task = build(dataset, name)
        for batch_size in (1, 4, 16, 64):
            training = Training(rounds=rounds, clients=20, batch_size=batch_size)
            loop, batch = (engine(task, dataset, training, execution=how) for how in ("loop", "batch"))
            values = batch_size * task.activations + task.size
            label = f"{name} {dataset.name}"
            print(f"{label:20} {batch_size:5} {values:13,} {loop:9.4f} {batch:9.4f} {loop / batch:6.2f}", flush=True)


def chunks(rounds: int, compiled: bool) -> None:
    """Seconds for all clients' gradients, relative to the row's best; sizes take turns, so noise affects all alike."""
    mnist, cifar = data.load("mnist"), data.load("cifar10")
    execution = "compile" if compiled else "batch"
    sizes = (8, 16, 32, 48, 64, 128, 256, 512)
    print(f"{'network':20} {'batch':>5} {'clients':>7} {'best s':>8} " + " ".join(f"{size:>4} MiB" for size in sizes))
    for dataset, name, batch_size, count in (
        (mnist, "lenet", 16, 100),
        (mnist, "lenet", 4, 200),
        (mnist, "lenet", 1, 400),
        (cifar, "lenet", 8, 100),
        (mnist, "mlp", 16, 100),
        (mnist, "mnist-cnn", 4, 40),
        (cifar, "cnn6", 1, 40),
    ):
        task = build(dataset, name)
        training = Training(clients=count, batch_size=batch_size)
        job = Job.prepare(task, dataset, gradveil.defense("none"), training)
        batches = job.draw(task, 0)
        programs = {
            size: Clients(task, gradveil.defense("none"), training, execution, cache_bytes=size << 20) for size in sizes
        }
        taken = dict.fromkeys(sizes, math.inf)
        for _ in range(rounds + 1):  # the first one is a warm-up
            for size, clients in programs.items():
                shared = clients.share(
                    list(batches),
                    lambda client, job=job, task=task, batches=batches: job.client_round(
                        task, 0, client, batches[client], "share"
                    ),
                )
                taken[size] = min(taken[size], shared.gradient_seconds)
        best = min(taken.values())
        ratios = " ".join(f"{taken[size] / best:8.2f}" for size in sizes)
        print(f"{f'{name} {dataset.name}':20} {batch_size:5} {count:7} {best:8.4f} {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--most", type=int, default=2000, help="the largest number of clients per round in growth")
    parser.add_argument(
        "--compile", action="store_true", help="also measure the compiled program; compiling takes a minute"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dataset = data.load("mnist")
    rounds, clients = arguments.rounds, arguments.clients
    print(f"torch {torch.__version__}, {arguments.threads} threads, {rounds} rounds, {dataset}")
    measures: dict[str, Callable[[], None]] = {
        "speed": lambda: speed(dataset, rounds, clients, arguments.compile),
        "flower": lambda: flower(dataset, rounds, clients, arguments.compile),
        "growth": lambda: growth(dataset, rounds, arguments.most),
        "defenses": lambda: defenses(dataset, rounds, clients),
        "where": lambda: where(rounds),
        "chunks": lambda: chunks(rounds, arguments.compile),
    }
    for part in arguments.parts or ("speed", "growth", "defenses"):
        print(f"\n{part}")
        measures[part]()
        sys.stdout.flush()


if __name__ == "__main__":
    main()
