"""What sensitivity and compensation cost, relative to a yardstick measured in the same run.

    python benchmarks/sensitivity_cost.py

It prints four things: the time of sensitivity relative to one plain gradient (autograd, the same batch), as processor
time of one thread, which a busy machine disturbs less than wall time, the best of many runs that take turns; its error
relative to the exact sensitivity, by number of directions; how evenly the slices of risk slicing share the risk; and
the time to compensate an aggregate of 11 million values, relative to copying it.
"""

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

import gradveil
from gradveil import models
from gradveil.defenses.risk_slicing import cut_slices, layer_risks
from gradveil.task import sensitivity_error
from gradveil.task.sensitivity import direction_bytes

CASES = [("lenet", (1, 28, 28), 8), ("lenet", (3, 32, 32), 8), ("mnist-cnn", (1, 28, 28), 16), ("cnn6", (3, 32, 32), 8)]


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """Processor time, the best of several runs."""
    best = math.inf
    for _ in range(repeats):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def cost(name: str, shape: tuple[int, int, int], batch: int, directions: int = 10, rounds: int = 15) -> None:
    model = models.create(name, input_shape=shape, classes=10)
    task = gradveil.Task(model, input_shape=shape, classes=10)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(batch, *shape, generator=generator)
    labels = torch.randint(0, 10, (batch,), generator=generator)
    parameters = list(model.parameters())

    def plain() -> None:
        torch.autograd.grad(F.cross_entropy(model(inputs), labels), parameters)

    def together() -> None:
        task.sensitivity(inputs, labels, directions, generator=generator)

    def one_by_one() -> None:
        task.sensitivity(inputs, labels, directions, generator=generator, memory_budget=direction_bytes(task, batch))

    works = {"plain": plain, "together": together, "one by one": one_by_one}
    best = dict.fromkeys(works, math.inf)
    for _ in range(rounds):
        for kind, work in works.items():
            best[kind] = min(best[kind], seconds(work, 10 if kind == "plain" else 2))
    print(
        f"{name:10} {shape} batch {batch:2}: gradient {1000 * best['plain']:5.2f} ms; sensitivity with {directions} "
        f"directions {best['together'] / best['plain']:5.1f} x a gradient, one direction at a time "
        f"{best['one by one'] / best['plain']:5.1f} x",
        flush=True,
    )


def error() -> None:
    """How far estimates on lenet lie from the exact sensitivity, over coordinates and repeats."""
    task = gradveil.Task(
        models.create("lenet", input_shape=(1, 28, 28), classes=10), input_shape=(1, 28, 28), classes=10
    )
    generator = torch.Generator().manual_seed(0)
    batch = torch.rand(1, 1, 28, 28, generator=generator), torch.tensor([3])
    exact = torch.cat([value.flatten() for value in task.sensitivity(*batch, None).values()])
    nonzero = exact > 1e-9 * exact.max()
    for directions in (1, 3, 10, 30, 100):
        squared = []
        for _ in range(20):
            estimate = task.sensitivity(*batch, directions, generator=generator)
            ratio = torch.cat([value.flatten() for value in estimate.values()])[nonzero] / exact[nonzero]
            squared.append(float((ratio - 1).square().mean()))
        print(
            f"lenet, {directions:3} directions: relative error {math.sqrt(statistics.fmean(squared)):.3f}, "
            f"sqrt(2/k) says {sensitivity_error(directions):.3f}",
            flush=True,
        )


def slices() -> None:
    """The riskiest of ten slices relative to the mean, with risks estimated on random images."""
    for name, examples in (("lenet", 20), ("cnn6", 10), ("resnet18", 2)):
        model = models.create(name, input_shape=(3, 32, 32), classes=10)
        task = gradveil.Task(model, input_shape=(3, 32, 32), classes=10)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.rand(examples, 3, 32, 32, generator=generator)
        labels = torch.randint(0, 10, (examples,), generator=generator)
        risks = layer_risks(task, inputs, labels, generator=generator)
        total = torch.zeros(10, dtype=torch.float64)
        for layer, numbers in cut_slices(task.parameters, risks, 10).items():
            total += risks[layer] * torch.bincount(numbers.flatten(), minlength=10) / numbers.numel()
        print(f"{name:10} ten slices: largest risk {total.max() / total.mean():.4f} x the mean", flush=True)


def compensation() -> None:
    layers = dict(models.create("resnet18", input_shape=(3, 32, 32), classes=10).named_parameters())
    generator = torch.Generator().manual_seed(0)
    noisy = {name: torch.randn(value.shape, generator=generator) for name, value in layers.items()}
    size = sum(value.numel() for value in noisy.values())
    copying = seconds(lambda: {name: value.clone() for name, value in noisy.items()}, 5)
    for aspect in (6.0, 8.0, 12.0):
        taken = seconds(lambda aspect=aspect: gradveil.compensate(noisy, 1.0, aspect=aspect), 2)
        print(
            f"compensation of {size:,} values, aspect {aspect:g}: {taken:.2f} s, {taken / copying:,.0f} x a copy "
            f"({1000 * copying:.1f} ms)",
            flush=True,
        )


def main() -> None:
    torch.set_num_threads(1)
    for case in CASES:
        cost(*case)
    error()
    slices()
    compensation()


if __name__ == "__main__":
    main()
