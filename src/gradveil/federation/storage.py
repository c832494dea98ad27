"""Tensors on disk: safetensors files that are there whole or not at all."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gradveil.errors import DataError, OutputError

ABOUT = "gradveil"
"""The entry of a file's metadata that holds our JSON."""


def save_atomically(path: Path, tensors: Mapping[str, Tensor], about: Any) -> None:
    """Write tensors, and `about` as JSON beside them; whoever reads finds the file before this or the one after."""
    temporary = path.with_suffix(".part")
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, temporary, {ABOUT: json.dumps(about)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{path}: expected a place that can be written to, got {error}") from error


def load(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a file that `save_atomically` wrote, and what it says about them."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[ABOUT])
            return {key: file.get_tensor(key) for key in file.keys()}, about  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"{path}: expected a file that gradveil wrote, got something else: {error}") from error
