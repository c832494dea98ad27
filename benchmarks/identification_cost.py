"""What identification costs per audited update, in plain gradients measured in the same run.

    python benchmarks/identification_cost.py          # lenet
    python benchmarks/identification_cost.py deep     # resnet18 with 1,000 candidates, and its peak memory

A plain gradient is that of one example by autograd. Times are processor time of one thread, which a busy machine
disturbs less than wall time. Each cost is that of some updates that are audited together, divided by their number:
candidates' gradients are computed once for all of them, unless the clients took local steps (`path=shared`: twice).
Each measurement runs in a process of its own, whose peak memory is printed.
"""

import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

import gradveil
from gradveil import models

SHAPE, CLASSES = (3, 32, 32), 10


@dataclass(frozen=True)
class Setting:
    """One measurement."""

    model: str = "lenet"
    candidates: int = 1000
    batch: int = 16
    updates: int = 20
    defense: str = "none"
    local_epochs: int = 0
    attack: str = "identification"


LENET = [
    *(Setting(candidates=count) for count in (250, 500, 1000)),
    *(Setting(batch=batch) for batch in (1, 64)),
    Setting(updates=1),
    *(Setting(defense=defense) for defense in ("top-k:keep=0.2", "gradient-dropout:keep=0.8,std=0.005")),
    Setting(updates=4, local_epochs=5),
    Setting(local_epochs=5, attack="identification:path=shared"),
]
DEEP = [Setting("resnet18", count, updates=4) for count in (250, 1000)]


def processor_time(work: Callable[[], object], repeats: int = 1) -> float:
    """The best of several runs, in seconds."""
    best = math.inf
    for _ in range(repeats):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def measure(setting: Setting) -> None:
    """Print one line."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    model = models.create(setting.model, input_shape=SHAPE, classes=CLASSES).eval()
    task = gradveil.Task(model, input_shape=SHAPE, classes=CLASSES)
    inputs = torch.rand(setting.candidates, *SHAPE, generator=generator)
    labels = torch.arange(setting.candidates) % CLASSES
    defense = gradveil.defense(setting.defense)
    local = gradveil.LocalSteps(epochs=setting.local_epochs, lr=0.01) if setting.local_epochs else None
    updates = []
    for _ in range(setting.updates):
        members = torch.randperm(setting.candidates, generator=generator)[: setting.batch]
        updates.append(defense.share(task, inputs[members], labels[members], generator=generator, local=local))
    threat = gradveil.ThreatModel(
        batch_size=setting.batch, adaptive=defense.name != "none", defense=defense, local=local
    )
    attack, parameters = gradveil.attack(setting.attack), list(model.parameters())

    def plain() -> None:
        torch.autograd.grad(F.cross_entropy(model(inputs[:1]), labels[:1]), parameters)

    def identify(count: int) -> None:
        attack.identify(task, updates[:count], (inputs, labels), threat, generator=generator)

    identify(1)  # loads what is loaded only once
    gradient, whole = processor_time(plain, 20), processor_time(lambda: identify(setting.updates))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{setting.model:9} N {setting.candidates:5,} batch {setting.batch:2}, {setting.updates:2} updates, "
        f"{setting.local_epochs or 'no'} local steps, {setting.defense:36} {setting.attack:26} "
        f"{whole / setting.updates / gradient:7,.0f} plain gradients ({1000 * gradient:.1f} ms) per update; "
        f"peak {peak:.2f} GiB",
        flush=True,
    )


def main() -> None:
    """Measure every setting in a process of its own, or the one whose place is given."""
    kind, *place = sys.argv[1:] or ["lenet"]
    settings = {"lenet": LENET, "deep": DEEP}[kind]
    if place:
        measure(settings[int(place[0])])
        return
    for number in range(len(settings)):
        subprocess.run([sys.executable, __file__, kind, str(number)], check=True)


if __name__ == "__main__":
    main()
