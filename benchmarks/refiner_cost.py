"""What one update under refiner costs, relative to one plain gradient, measured in the same run.

    python benchmarks/refiner_cost.py [--models lenet resnet18]

A batch of 32 colour images of 32 x 32 pixels takes 10 iterations, or 5 with a warm start of every sample. Figures are
processor time on one thread, which other programs disturb least: the best of several runs after a warm-up run, with the
kinds taking turns. Only the ratios are meaningful on a shared machine.
"""

import argparse
import time

import torch

import gradveil
from gradveil import models
from gradveil.models.evaluation import evaluation_network

SHAPE = (3, 32, 32)
BATCH = 32
RUNS = {"lenet": 5, "resnet18": 1}


def measure(name: str) -> None:
    task = gradveil.Task(models.create(name, input_shape=SHAPE, classes=10), input_shape=SHAPE, classes=10)
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.rand(BATCH, *SHAPE, generator=generator), torch.arange(BATCH) % 10
    defense, network, memory = gradveil.defense("refiner", iterations=10), evaluation_network(), {}

    def evaluate() -> None:
        leaf = inputs.clone().requires_grad_()
        torch.autograd.grad(network(leaf).mean(), leaf)

    defense.share(task, inputs, labels, memory=memory)  # fills the memory and is the warm-up run
    kinds = {
        "plain gradient": lambda: task.gradients(inputs, labels),
        "evaluation network, once": evaluate,
        "share, 10 iterations": lambda: defense.share(task, inputs, labels),
        "share, warm start, 5 iterations": lambda: defense.share(task, inputs, labels, memory=memory),
    }
    best = dict.fromkeys(kinds, float("inf"))
    for _ in range(RUNS[name]):
        for kind, work in kinds.items():
            # Short runs are repeated often enough to catch a quiet moment of the machine.
            for _ in range(1 if kind.startswith("share") else 5):
                started = time.process_time()
                work()
                best[kind] = min(best[kind], time.process_time() - started)
    for kind, seconds in best.items():
        print(
            f"{name:9} {kind:32} {1000 * seconds:9.1f} ms  {seconds / best['plain gradient']:6.1f} x plain", flush=True
        )
    ratio = best["share, warm start, 5 iterations"] / best["share, 10 iterations"]
    print(f"{name:9} warm start against cold: {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(RUNS), choices=list(RUNS))
    torch.set_num_threads(1)
    for name in parser.parse_args().models:
        measure(name)


if __name__ == "__main__":
    main()
