"""Length of encoded updates relative to the entropy limit, and speed relative to a memory copy in the same run.

    python benchmarks/wire.py

Lengths are for random float32 layers of one million and of eleven million values; the limit is H2(q) bits per position
plus four bytes per value. Speed is for updates with the shapes of resnet18 on one thread; the yardstick is
``tensor.clone()`` of all layers. Yardstick and work take turns, so that both see the same machine, and times are
processor times, because others may share it. Ratios are given for the best and the median times; absolute times mean
little.
"""

import argparse
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable

import torch
from torch import Tensor

from gradveil import models
from gradveil.update import Grid, Meta, Update, wire

DENSITIES = (0.5, 0.2, 0.05, 0.01, 0.001)


def random_layer(shape: torch.Size | tuple[int, ...], density: float, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    return values.where(torch.rand(shape, generator=generator) < density, torch.tensor(0.0))


def limits(value: Tensor) -> tuple[float, float]:
    """The entropy of the positions in bytes, alone and with four bytes per value."""
    n, k = value.numel(), int(value.count_nonzero())
    q = k / n
    positions = -n * (q * math.log2(q) + (1 - q) * math.log2(1 - q)) / 8
    return positions, positions + 4 * k


def lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (1_000_000, 11_000_000):
        for density in DENSITIES:
            value = random_layer((n,), density, generator)
            positions, limit = limits(value)
            update = len(wire.encode(Update({"w": value})))
            positions_length = len(wire.encode_locations({"w": value != 0}))
            print(
                f"{n:10,} values, density {density:<5}: {update:10,} bytes = {update / limit:.3f} x the limit; "
                f"positions alone {positions_length:9,} bytes = {positions_length / positions:.3f} x the limit",
                flush=True,
            )


def known_lengths() -> None:
    """Aligned dual pruning: both sides know 40 % of the positions; half of them are uploaded, all are downloaded."""
    generator = torch.Generator().manual_seed(0)
    n = 11_000_000
    known = {"w": torch.rand(n, generator=generator) < 0.4}
    download = torch.randn(n, generator=generator).where(known["w"], torch.tensor(0.0))
    upload = download.where(torch.rand(n, generator=generator) < 0.5, torch.tensor(0.0))
    for name, value in (("upload", upload), ("download", download)):
        plain, within = len(wire.encode(Update({"w": value}))), len(wire.encode(Update({"w": value}), known))
        values = 4 * int(value.count_nonzero())
        print(
            f"{name:8} in a known set of 40 %: {within:,} bytes, {values:,} of them values; without the set {plain:,}"
        )
    print(f"the set itself: {len(wire.encode_locations(known)):,} bytes")


def compare(name: str, update: Update, locations: dict[str, Tensor] | None, rounds: int) -> None:
    message = wire.encode(update, locations)
    works: list[Callable[[], object]] = [
        lambda: [value.clone() for value in update.values()],
        lambda: wire.encode(update, locations),
        lambda: wire.decode(message, locations, like=update),
    ]
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for work, seconds in zip(works, times, strict=True):
            started = time.process_time()
            work()
            seconds.append(1000 * (time.process_time() - started))
    best = [min(seconds) for seconds in times]
    middle = [statistics.median(seconds) for seconds in times]
    tracemalloc.start()
    wire.decode(message, locations, like=update)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    declared = sum(value.nbytes for value in update.values())
    print(
        f"{name:22} {len(message):11,} bytes; copy {best[0]:5.1f} ms, encode {best[1]:6.1f} ms, "
        f"decode {best[2]:6.1f} ms; encode + decode = {(best[1] + best[2]) / best[0]:5.2f} copies (best), "
        f"{(middle[1] + middle[2]) / middle[0]:5.2f} (median); decoding takes {peak / declared:.2f} x the values",
        flush=True,
    )


def speed(rounds: int) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    model = models.create("resnet18", input_shape=(3, 32, 32), classes=10)
    shapes = {name: value.shape for name, value in model.named_parameters()}
    print(f"resnet18: {sum(map(math.prod, shapes.values())):,} values in {len(shapes)} layers, one thread")
    for density in (0.2, *(density for density in (1.0, *DENSITIES) if density != 0.2)):
        update = Update({name: random_layer(shape, density, generator) for name, shape in shapes.items()})
        compare(f"density {density}", update, None, rounds)
    known = {name: torch.rand(shape, generator=generator) < 0.4 for name, shape in shapes.items()}
    values = {
        name: random_layer(shape, 0.5, generator).where(known[name], torch.tensor(0.0))
        for name, shape in shapes.items()
    }
    compare("half of a known 40 %", Update(values), known, rounds)
    for bits in (1, 4, 8):
        grid = Grid(-1.0, 2.0 / 2**bits, bits)
        coded = {
            name: grid.values(torch.randint(0, 2**bits, shape, generator=generator)) for name, shape in shapes.items()
        }
        compare(f"quantised, {bits} bits", Update(coded, Meta(grids=dict.fromkeys(coded, grid))), None, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="number of repetitions of each time measurement")
    arguments = parser.parse_args()
    speed(arguments.rounds)
    lengths()
    known_lengths()


if __name__ == "__main__":
    main()
