"""Digests by which a resumed run recognises the model, the data and the settings that it began with."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.core.digests import DIGITS, bytes_digest
from gradveil.core.plugins import imported_files
from gradveil.core.registry import parse_spec
from gradveil.data import Dataset
from gradveil.task import Task


def weights_digest(task: Task) -> str:
    """Digest of all parameters and buffers, including their names."""
    state = hashlib.sha256()
    for name, value in (*task.parameters.items(), *task.buffers.items()):
        state.update(f"{name} {list(value.shape)} {value.dtype}".encode())
        state.update(_bytes(value))
    return state.hexdigest()[:DIGITS]


def task_digest(task: Task) -> str:
    """Digest of what the weights do not show: modules and their settings, active dropout, normalisation, loss."""
    normalisation = task.normalised(torch.stack([torch.zeros(task.input_shape), torch.ones(task.input_shape)]))
    dropout = task.dropout_rates or ""  # the same module may be active or not
    state = hashlib.sha256(f"{task.copy_model()!r} {task.loss_name}{dropout}".encode())
    state.update(_bytes(normalisation))
    return state.hexdigest()[:DIGITS]


def data_digest(dataset: Dataset) -> str:
    """Digest of all inputs and targets; 50 MB take a fraction of a second."""
    state = hashlib.sha256()
    for split in (dataset.train, dataset.test):
        state.update(f"{list(split.inputs.shape)}".encode())
        state.update(_bytes(split.inputs))
        state.update(_bytes(split.targets))
    if settings := dataset.train.modality.settings:
        state.update(json.dumps(settings).encode())
    return state.hexdigest()[:DIGITS]


def model_file_digest(model: str) -> str | None:
    """Digest of the file of a model ``FILE.py@FUNCTION``, because weights do not show activations; None: no file.

    The files next to it that it imports count too.

    >>> model_file_digest("lenet:init=uniform") is None
    True
    """
    file, at, _ = parse_spec(model)[0].rpartition("@")
    path = Path(file)
    if not at or not path.is_file():
        return None
    return bytes_digest(b"".join(imported.read_bytes() for imported in imported_files(path)))


def json_digest(value: Any) -> str:
    """Digest of a value that JSON can hold; the order of keys does not matter.

    >>> json_digest({"a": 1, "b": [2]}) == json_digest({"b": [2], "a": 1}) != json_digest({"a": 1, "b": [3]})
    True
    """
    return bytes_digest(json.dumps(value, sort_keys=True).encode())


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().numpy().data
