"""Speed of the attack engine relative to a plain eager attack on one victim at a time, measured in the same run.

    python benchmarks/attack_speed.py [--models lenet convnet resnet18] [--no-compile] [--growth]

The yardstick is what public code does: autograd with create_graph, the cosine over all layers, one signed Adam step,
one victim after another. Both sides run with one thread and with all threads, and the better figure of each counts.
Only the ratios are meaningful on a shared machine.
"""

import argparse
import os
import resource
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradveil
from gradveil import models
from gradveil.attacks.matching import COSINE, Adam, Objective
from gradveil.modality import IMAGE

VICTIMS = {"lenet": 16, "convnet": 2, "resnet18": 2}
SHAPE = (3, 32, 32)


def set_up(name: str, victims: int) -> tuple[nn.Module, gradveil.Task, Tensor, dict[str, Tensor], Tensor]:
    model = models.create(name, input_shape=SHAPE, classes=10)
    task = gradveil.Task(model, input_shape=SHAPE, classes=10)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(victims, 1, *SHAPE, generator=generator)
    labels = torch.randint(0, 10, (victims, 1), generator=generator)
    single = [task.gradients(images[v], labels[v]) for v in range(victims)]
    targets = {key: torch.stack([gradients[key] for gradients in single]) for key in single[0]}
    return model, task, torch.rand(victims, 1, *SHAPE, generator=generator), targets, labels


def plain_attack(model: nn.Module, start: Tensor, targets: dict[str, Tensor], labels: Tensor, steps: int) -> None:
    parameters = list(model.parameters())
    for victim in range(len(start)):
        candidate = start[victim].clone().requires_grad_()
        goal = [value[victim] for value in targets.values()]
        optimiser = torch.optim.Adam([candidate], lr=0.02)
        for _ in range(steps):
            optimiser.zero_grad()
            loss = F.cross_entropy(model(candidate), labels[victim])
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            product = sum((g * t).sum() for g, t in zip(gradients, goal, strict=True))
            lengths = sum(g.square().sum() for g in gradients) * sum(t.square().sum() for t in goal)
            (candidate.grad,) = torch.autograd.grad(1 - product / lengths.sqrt(), candidate)
            candidate.grad.sign_()
            optimiser.step()
            candidate.data.clamp_(0, 1)


def engine_attack(task: gradveil.Task, targets: dict[str, Tensor], labels: Tensor, execution: str) -> Objective:
    parameters = task.parameters

    def cost(candidate: Tensor, target: dict[str, Tensor], label: Tensor) -> Tensor:
        return COSINE.between(task.gradient(parameters, candidate, label), target)

    return Objective(cost, targets, labels, execution=execution)


def rate(work: object, victims: int, steps: int, evaluations: int, repeats: int = 3) -> float:
    """Victim-iterations per second, the best of several runs after a warm-up run.

    The engine scores its last candidates with one extra evaluation, which is counted here; in runs of hundreds of steps
    it is negligible.
    """
    best = 0.0
    for number in range(repeats + 1):
        started = time.perf_counter()
        work(steps)
        if number:
            best = max(best, victims * evaluations / (time.perf_counter() - started))
    return best


def measure(name: str, compile_too: bool, victims: int | None = None, quiet: bool = False) -> dict[str, float]:
    victims = victims or VICTIMS[name]
    model, task, start, targets, labels = set_up(name, victims)
    steps = 25 if name == "lenet" else 6
    figures: dict[str, float] = {}
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        runs = {"plain": lambda n: plain_attack(model, start, targets, labels, n)}
        last = threads == (os.cpu_count() or 1)  # compiling takes minutes, so it is done once, with all threads
        compiled = ("compile" if name == "lenet" else "compile-loop",) if compile_too and last else ()
        for execution in ("loop", "batch", *compiled):
            objective = engine_attack(task, targets, labels, execution)
            if execution in compiled:
                started = time.perf_counter()
                objective(start, torch.arange(victims))
                print(f"{name}: compiled for {threads} threads in {time.perf_counter() - started:.0f} s", flush=True)
            runs[execution] = lambda n, o=objective: Adam(0.02, signed=True).minimise(
                o, start, iterations=n, project=IMAGE.project
            )
        for kind, work in runs.items():
            evaluations = steps if kind == "plain" else steps + 1
            figures[kind] = max(figures.get(kind, 0.0), rate(work, victims, steps, evaluations))
    if not quiet:
        for kind, figure in figures.items():
            ratio = figure / figures["plain"]
            print(
                f"{name:9} {victims:3} victims  {kind:8} {figure:9.1f} victim-iterations/s  {ratio:5.2f} x plain",
                flush=True,
            )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{name:9} peak memory of the process so far {peak:,.0f} MiB", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(VICTIMS), choices=list(VICTIMS))
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--growth", action="store_true", help="also measure the cost per victim for 1 to 64 victims on lenet"
    )
    arguments = parser.parse_args()
    for name in arguments.models:
        measure(name, not arguments.no_compile)
    if arguments.growth:
        for victims in (1, 4, 16, 64):
            figures = measure("lenet", False, victims, quiet=True)
            best = max(figures["loop"], figures["batch"])
            text = f"{1000 / best:.2f} ms per victim-iteration, {best / figures['plain']:.2f} x plain"
            print(f"lenet {victims:3} victims: {text}", flush=True)


if __name__ == "__main__":
    main()
