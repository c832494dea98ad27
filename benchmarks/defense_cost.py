"""What a defense costs a client in time, against drawing as many normal numbers.

Usage: python benchmarks/defense_cost.py [--spec SPEC]... [--scaling]

The gradient has the shapes of resnet18's parameters, 11 million values, and the yardstick is one `torch.randn_like` of
every layer, measured in the same run: absolute times mean little on a shared machine. Goals: dual-pruning, top-k and
gradient-dropout at most 4, error feedback at most 2 more than what it wraps. With --scaling the defenses run on one
layer of 1e5 to 1e8 values; a linear method keeps its time a value.
"""

import argparse
import time
from collections.abc import Callable

import torch

import gradveil
from gradveil import models

SPECS = ["dual-pruning", "top-k", "gradient-dropout", "aligned-dual-pruning", "dual-pruning+error-feedback"]
GOALS = {"dual-pruning": 4.0, "top-k": 4.0, "gradient-dropout": 4.0}


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The shortest of several runs, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def cost(gradients: dict[str, torch.Tensor], spec: str, repeats: int = 5) -> tuple[float, float]:
    """Seconds of the defense and of the yardstick."""
    defense = gradveil.defense(spec)
    generator = torch.Generator().manual_seed(0)
    memory: dict[str, torch.Tensor] = {}
    yardstick = seconds(lambda: [torch.randn_like(value) for value in gradients.values()], repeats)
    return seconds(lambda: defense.perturb(gradients, generator=generator, memory=memory), repeats), yardstick


def table(specs: list[str]) -> None:
    model = models.create("resnet18", input_shape=(3, 32, 32), classes=10)
    generator = torch.Generator().manual_seed(1)
    gradients = {name: torch.randn(value.shape, generator=generator) for name, value in model.named_parameters()}
    print(f"{sum(value.numel() for value in gradients.values()):,} values in {len(gradients)} layers")
    print(f"{'defense':32} {'seconds':>8} {'x randn':>8} {'goal':>6}")
    ratios = {}
    for spec in specs:
        taken, yardstick = cost(gradients, spec)
        ratios[spec] = taken / yardstick
        goal = GOALS.get(spec)
        if spec.endswith("+error-feedback") and spec.removesuffix("+error-feedback") in ratios:
            goal = ratios[spec.removesuffix("+error-feedback")] + 2
        print(f"{spec:32} {taken:8.3f} {ratios[spec]:8.2f} {'' if goal is None else f'{goal:.2f}':>6}")


def scaling(specs: list[str]) -> None:
    print(f"{'defense':32} {'values':>12} {'ns a value':>11} {'x randn':>8}")
    for spec in specs:
        for size in (10**5, 10**6, 10**7, 10**8):
            gradients = {"layer": torch.randn(size, generator=torch.Generator().manual_seed(1))}
            taken, yardstick = cost(gradients, spec, repeats=2 if size == 10**8 else 5)
            print(f"{spec:32} {size:12,} {1e9 * taken / size:11.2f} {taken / yardstick:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", action="append", help="a defense as the command line takes it; may be repeated")
    parser.add_argument("--scaling", action="store_true", help="growth from 1e5 to 1e8 values")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (scaling if arguments.scaling else table)(arguments.spec or SPECS)


if __name__ == "__main__":
    main()
