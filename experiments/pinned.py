"""The data that kept rows come from: data.json pins the size and the digest of each data set.

Most are subsets: the first examples of each class, in the original order. Whoever has the whole data set
(``gradveil data get cifar10`` brings 50,000 + 10,000 images) gets the same subset here, and so the same victims.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gradveil import data
from gradveil.core.digests import bytes_digest
from gradveil.core.errors import DataError

PINS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("data.json").read_text())


@cache
def load(name: str) -> data.Dataset:
    """The data set; if its pin is a subset and this is more, only that subset."""
    dataset, pin = data.load(name), PINS.get(name, {})
    if not pin.get("first_of_each_class"):
        return dataset
    counts = (pin[split] // len(dataset.classes) for split in ("train", "test"))
    train, test = (
        first_of_each_class(split, count) for split, count in zip((dataset.train, dataset.test), counts, strict=True)
    )
    return replace(dataset, train=train, test=test)


def first_of_each_class(split: data.Split, count: int) -> data.Split:
    """The first `count` examples of each class, in the order of the split; all, if a class has fewer."""
    members = [(split.targets == label).nonzero().flatten() for label in split.targets.unique()]
    if min(map(len, members)) < count:
        return split
    chosen = torch.cat([places[:count] for places in members]).sort().values
    return replace(split, inputs=split.inputs[chosen], targets=split.targets[chosen])


def digest_of(dataset: data.Dataset) -> str:
    """A digest of all examples and labels, in their order."""
    tensors = [tensor for split in (dataset.train, dataset.test) for tensor in (split.inputs, split.targets)]
    parts = [f"{tensor.dtype} {list(tensor.shape)} {bytes_digest(tensor.numpy().tobytes())}" for tensor in tensors]
    return bytes_digest("\n".join(parts).encode())


@cache
def check(name: str) -> None:
    """Refuse data that kept rows do not come from."""
    dataset = load(name)
    if name not in PINS:
        raise DataError(
            f"kept rows need pinned data, and data.json has no {name!r}; add it, with the digest "
            f"{digest_of(dataset)} if {dataset} is the data meant"
        )
    pin, digest = PINS[name], digest_of(dataset)
    if digest != pin["digest"]:
        subset = ", the first of each class in the original order" if pin.get("first_of_each_class") else ""
        raise DataError(
            f"kept rows come from {name} with {pin['train']:,} train and {pin['test']:,} test examples{subset} "
            f"(digest {pin['digest']}), got {dataset} (digest {digest}); set GRADVEIL_DATA to a folder with that "
            f"subset or with the whole data set ({data.catalog.entry(name).how}), or give --results FILE for rows of "
            "your own"
        )
