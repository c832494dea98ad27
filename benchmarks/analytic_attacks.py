"""What closed-form attacks cost, relative to one plain gradient of the same model and batch, measured in the same run.

Usage: python benchmarks/analytic_attacks.py [--only r-gap robbing-the-fed loki]

The yardstick is the victim's own cost: one `Task.gradients` of its batch, on the model that it received. Seconds are
the shortest of several runs on one thread; on a shared machine, only the ratios are meaningful.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

import gradveil
from gradveil import models
from gradveil.attacks.base import ThreatModel
from gradveil.update import Meta, Update

SHAPE = (3, 32, 32)


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The shortest of several runs, after a warm-up run."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise with random brightness; the content of an image does not affect the time."""
    generator = torch.Generator().manual_seed(seed)
    brightness = torch.rand(count, 1, 1, 1, generator=generator)
    images = (brightness + 0.2 * torch.randn(count, *SHAPE, generator=generator)).clamp(0, 1)
    return images, torch.randint(0, 10, (count,), generator=generator)


def print_row(description: str, victims: int, taken: float, yardstick: float) -> None:
    per_victim = taken / victims
    print(
        f"{description:44} {per_victim:9.4f} s per victim, gradient {yardstick:8.4f} s, "
        f"ratio {per_victim / yardstick:8.2f}",
        flush=True,
    )


def r_gap(name: str, logits: int, at_once: int) -> None:
    model = models.create(name, input_shape=SHAPE, classes=logits)
    loss, classes = ("logistic", 2) if logits == 1 else ("cross-entropy", 10)
    task = gradveil.Task(model, loss, input_shape=SHAPE, classes=classes)
    images, labels = pictures(at_once, 0)
    labels = labels % classes
    yardstick = seconds(lambda: task.gradients(images[:1], labels[:1]), 10)
    updates = [Update(task.gradients(images[i : i + 1], labels[i : i + 1])) for i in range(at_once)]
    attack = gradveil.attack("r-gap")
    taken = seconds(lambda: attack.reconstruct(task, updates, ThreatModel()), 1)
    print_row(f"r-gap, {name}, {logits} logits, {at_once} at once", at_once, taken, yardstick)


def robbing(name: str, size: int, bins: int) -> None:
    model = models.create(name, input_shape=SHAPE, classes=10)
    task = gradveil.Task(model, input_shape=SHAPE, classes=10)
    attack = gradveil.attack("robbing-the-fed", bins=bins)
    sent = attack.modify(task, public=pictures(100, 1), generator=torch.Generator().manual_seed(0))
    batch = pictures(size, 0)
    plain, yardstick = (seconds(lambda: task.gradients(*batch), 2), seconds(lambda: sent.gradients(*batch), 2))
    update = Update(sent.gradients(*batch))
    threat = ThreatModel(server="active", batch_size=size)
    taken = seconds(lambda: attack.reconstruct(sent, update, threat), 2)
    print_row(f"robbing-the-fed, {name}, batch {size}, {bins} bins", 1, taken, yardstick)
    print(f"    cost of the block for the client: {yardstick / plain:.2f} times its gradient without it")


def loki(clients: int, size: int, bins: int) -> None:
    task = gradveil.Task(models.create("lenet", input_shape=SHAPE, classes=10), input_shape=SHAPE, classes=10)
    attack = gradveil.attack("loki", clients=clients, bins=bins)
    sent = attack.modify(task, public=pictures(100, 1), generator=torch.Generator().manual_seed(0))
    batch = pictures(size, 0)
    yardstick = seconds(lambda: sent.gradients(*batch), 2)
    total: dict[str, Tensor] = {}
    for client in range(clients):
        gradients = attack.for_client(sent, client).gradients(*pictures(size, client))
        total = {name: value + total.get(name, 0) for name, value in gradients.items()}
    update, threat = Update(total, Meta()), ThreatModel(server="active", batch_size=clients * size)
    taken = seconds(lambda: attack.reconstruct(sent, update, threat), 1)
    print_row(f"loki, lenet, {clients} clients of {size}, {bins} bins", clients, taken, yardstick)


def main() -> None:
    parts = {
        "r-gap": [
            lambda n=name, k=logits, v=victims: r_gap(n, k, v)
            for name, logits in (("mlp", 10), ("lenet", 10), ("cnn6", 1), ("cnn6", 10))
            for victims in (1, 4)
        ],
        "robbing-the-fed": [
            lambda: robbing("lenet", 9, 128),
            lambda: robbing("lenet", 256, 1024),
            lambda: robbing("resnet18", 9, 128),
        ],
        "loki": [lambda: loki(10, 16, 128)],
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(parts), choices=list(parts))
    torch.set_num_threads(1)
    for part in parser.parse_args().only:
        for work in parts[part]:
            work()


if __name__ == "__main__":
    main()
