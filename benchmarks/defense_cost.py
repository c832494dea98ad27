"""The time that a defense costs a client, relative to drawing as many normal numbers.

Usage: python benchmarks/defense_cost.py [--spec SPEC]... [--scaling | --draws]

The gradient has the shapes of resnet18's parameters, 11 million values, and the yardstick is one `torch.randn_like` of
every layer, measured in the same run, because absolute times mean little on a shared machine. Each defense is timed
with a seeded generator, as in simulations, and with draws from a cryptographic stream, as in real clients. Goals when
seeded: dual-pruning, top-k and gradient-dropout at most 4, error feedback at most 2 more than what it wraps.

--draws measures what random numbers cost. Goals: a cryptographic normal draw at most 4 times `torch.normal_`; noise on
the grid at most 12 times, and less than one gradient of resnet18 on 16 images; the memory that noise takes in addition
to its result at most a few MiB. With --scaling, the defenses run on one layer of 1e5 to 1e8 values; the time per value
of a linear method stays constant.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable

import torch

import gradveil
from gradveil import models
from gradveil.core.randomness import SecureSource

SPECS = [
    "dual-pruning",
    "top-k",
    "gradient-dropout",
    "aligned-dual-pruning",
    "dual-pruning+error-feedback",
    "gaussian-noise",
    "laplace-noise",
]
GOALS = {"dual-pruning": 4.0, "top-k": 4.0, "gradient-dropout": 4.0}
IMAGES = 16


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The shortest of several runs, after a warm-up run."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def cost(gradients: dict[str, torch.Tensor], spec: str, seeded: bool, repeats: int = 5) -> tuple[float, float]:
    """Seconds of the defense and of the yardstick."""
    defense = gradveil.defense(spec)
    generator = torch.Generator().manual_seed(0) if seeded else None
    memory: dict[str, torch.Tensor] = {}
    yardstick = seconds(lambda: [torch.randn_like(value) for value in gradients.values()], repeats)
    return seconds(lambda: defense.perturb(gradients, generator=generator, memory=memory), repeats), yardstick


def resnet() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    model = models.create("resnet18", input_shape=(3, 32, 32), classes=10)
    generator = torch.Generator().manual_seed(1)
    gradients = {name: torch.randn(value.shape, generator=generator) for name, value in model.named_parameters()}
    print(f"{sum(value.numel() for value in gradients.values()):,} values in {len(gradients)} layers")
    return model, gradients


def table(specs: list[str]) -> None:
    _, gradients = resnet()
    print(f"{'defense':32} {'seeded s':>9} {'x randn':>8} {'goal':>6} {'secure s':>9} {'x randn':>8}")
    ratios: dict[str, float] = {}
    for spec in specs:
        taken, yardstick = cost(gradients, spec, seeded=True)
        ratios[spec] = taken / yardstick
        goal = GOALS.get(spec)
        if spec.endswith("+error-feedback") and spec.removesuffix("+error-feedback") in ratios:
            goal = ratios[spec.removesuffix("+error-feedback")] + 2
        secure, secure_yardstick = cost(gradients, spec, seeded=False)
        print(
            f"{spec:32} {taken:9.3f} {ratios[spec]:8.2f} {'' if goal is None else f'{goal:.2f}':>6} "
            f"{secure:9.3f} {secure / secure_yardstick:8.2f}"
        )


def draws() -> None:
    model, gradients = resnet()
    source, empty = SecureSource(), torch.empty(sum(value.numel() for value in gradients.values()))
    values = torch.randn(len(empty), generator=torch.Generator().manual_seed(2))
    task = gradveil.Task(model, input_shape=(3, 32, 32), classes=10)
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.rand(IMAGES, 3, 32, 32, generator=generator), torch.arange(IMAGES) % 10
    works: dict[str, tuple[Callable[[], object], float | None]] = {
        "torch.normal_": (lambda: empty.normal_(), None),
        "cryptographic normal draw": (lambda: source.normal(empty), 4.0),
        "cryptographic uniform draw": (lambda: source.uniform(empty), None),
        "normal noise on the grid": (lambda: source.add_normal(values, 0.3), 12.0),
        "Laplace noise on the grid": (lambda: source.add_laplace(values, 0.3), 12.0),
        f"gradient of {IMAGES} images": (lambda: task.gradients(images, labels), None),
    }
    taken = {name: min(seconds(work, 2) for _ in range(3)) for name, (work, _) in works.items()}
    yardstick = taken["torch.normal_"]
    print(f"{'':32} {'seconds':>8} {'x normal_':>10} {'goal':>6}")
    for name, (_, goal) in works.items():
        print(
            f"{name:32} {taken[name]:8.3f} {taken[name] / yardstick:10.2f} {'' if goal is None else f'{goal:.0f}':>6}"
        )
    for name in ("normal noise on the grid", "Laplace noise on the grid"):
        print(f"{name}: {taken[name] / taken[f'gradient of {IMAGES} images']:.2f} of a gradient of {IMAGES} images")
    tracemalloc.start()
    source.add_normal(values, 0.3)
    print(f"memory of numpy at the peak of normal noise: {tracemalloc.get_traced_memory()[1] / 2**20:.1f} MiB")


def scaling(specs: list[str]) -> None:
    print(f"{'defense':32} {'values':>12} {'ns/value':>11} {'x randn':>8}")
    for spec in specs:
        for size in (10**5, 10**6, 10**7, 10**8):
            gradients = {"layer": torch.randn(size, generator=torch.Generator().manual_seed(1))}
            taken, yardstick = cost(gradients, spec, seeded=True, repeats=2 if size == 10**8 else 5)
            print(f"{spec:32} {size:12,} {1e9 * taken / size:11.2f} {taken / yardstick:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", action="append", help="spec of a defense; may be repeated")
    parser.add_argument("--scaling", action="store_true", help="measure the growth from 1e5 to 1e8 values")
    parser.add_argument("--draws", action="store_true", help="measure what random numbers cost")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.draws:
        draws()
    else:
        (scaling if arguments.scaling else table)(arguments.spec or SPECS)


if __name__ == "__main__":
    main()
