"""What a round costs in bytes: dense, top-k, dual pruning and aligned dual pruning, from real encodings.

    GRADVEIL_DATA=/path/to/data python benchmarks/communication.py [--models lenet ...] [--json]

Ten clients take one gradient each on 32 CIFAR-10 images, send it, and get the aggregate back. Up is the mean length of
an encoded update, down that of the encoded aggregate. If a location set is published, its bytes count too: up for the
one client that publishes it, down for the others. The table has the form of table 3 of Xue et al., AAAI 2024, whose
figures are 61 % of dense for dual pruning and 32 % for aligned dual pruning. Goals: at most 63 % and 35 %.
"""

import argparse
import json
from statistics import fmean

import torch

import gradveil
from gradveil import data, models
from gradveil.core.randomness import derived_generator
from gradveil.update import wire

MODELS = ["lenet", "vgg11", "resnet18", "cnn6"]
DEFENSES = {"dense": "none", "top-k": "top-k:keep=0.2", "DGP": "dual-pruning", "ADGP": "aligned-dual-pruning"}
CLIENTS, IMAGES = 10, 32


def round_bytes(
    task: gradveil.Task, batches: list[tuple[torch.Tensor, torch.Tensor]], spec: str
) -> tuple[float, float]:
    """Mean bytes that one client sends and receives in a round."""
    defense = gradveil.defense(spec)
    generators = [derived_generator(0, "client", client) for client in range(CLIENTS)]
    public = defense.announce(task, *batches[0], generator=generators[0])
    updates = [
        defense.share(task, *batch, generator=generator, announced=public)
        for batch, generator in zip(batches, generators, strict=True)
    ]
    known = defense.locations(public)
    aggregate = defense.aggregate(updates, announced=public)
    up = fmean(len(wire.encode(update, locations=known)) for update in updates)
    down = float(len(wire.encode(aggregate, locations=known)))
    if known is not None:
        announcement = len(wire.encode_locations(known))
        up += announcement / CLIENTS
        down += announcement * (CLIENTS - 1) / CLIENTS
    return up, down


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, for programs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dataset = data.load("cifar10")
    order = torch.randperm(len(dataset.train), generator=derived_generator(0, "images"))
    batches = [dataset.train.batch(part) for part in torch.split(order[: CLIENTS * IMAGES], IMAGES)]
    if not arguments.json:
        print(f"{'model':10} {'defense':8} {'up MB':>9} {'down MB':>9} {'of dense':>9}")
    for model in arguments.models:
        task = gradveil.Task(
            models.create(model, input_shape=(3, 32, 32), classes=10, seed=0), input_shape=(3, 32, 32), classes=10
        )
        dense = None
        for label, spec in DEFENSES.items():
            up, down = round_bytes(task, batches, spec)
            dense = dense or up + down
            if arguments.json:
                row = {"model": model, "defense": label, "up": up, "down": down, "of_dense": (up + down) / dense}
                print(json.dumps(row))
            else:
                print(f"{model:10} {label:8} {up / 1e6:9.3f} {down / 1e6:9.3f} {(up + down) / dense:9.3f}")


if __name__ == "__main__":
    main()
