"""A process that performs pieces of an audit for another one: ``python -m gradveil.audit._worker``.

It reads JSON lines from its standard input (first `Assignment`, then pieces) and answers with JSON lines. It ends when
its input does, so it does not outlive the process that started it, however that ends.
"""

import json
import os
import queue
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradveil.audit.config import AuditConfig
from gradveil.audit.pieces import Piece
from gradveil.audit.run import Subject, _Work, learned_folder
from gradveil.core import plugins
from gradveil.core.errors import GradveilError, WorkerError
from gradveil.data import Dataset, Split
from gradveil.federation.digests import data_digest, model_file_digest, weights_digest
from gradveil.modality import MODALITIES

Tell = Callable[[dict[str, Any]], None]


class Station:
    """Performs pieces of one audit, and tells the process that runs the audit what comes of them.

    Args:
        assignment: what that process says about the audit: its config.json, the working folder, and where its data is,
            if that is in a file that both have open.
        tell: sends a message.
    """

    def __init__(self, assignment: dict[str, Any], tell: Tell) -> None:
        self._tell = tell
        warnings.showwarning = lambda message, *_rest: tell({"note": str(message)})
        described = assignment["audit"]
        folder = assignment["folder"]
        if not Path(folder).is_dir():
            raise WorkerError(f"audit: a worker needs the folder {folder}, which is not there; share it with all nodes")
        os.chdir(folder)  # paths of models, plugins and data may be relative to it
        plugins.load_files(described["plugin_files"])
        given = None if assignment["data"] is None else dataset_from(assignment["data"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the other process has said it
            _refuse("model_file_digest", described, model_file_digest(described["model"]))
            subject = Subject.of(AuditConfig.from_json(described), given)
        _refuse("plugin_files", described, plugins.loaded_files())
        _refuse("weights_digest", described, weights_digest(subject.task))
        _refuse("torch", described, torch.__version__)
        if given is None:
            _refuse("data_digest", described, data_digest(subject.dataset))
        self._work = _Work(subject, learned_folder(described))

    def perform(self, request: dict[str, Any]) -> None:
        """Perform a piece and tell its rows."""
        piece = Piece.from_json(request["piece"])
        finished = self._work.perform(
            piece, request["strength"], lambda step, steps, _left=0.0: self._tell({"step": [step, steps]})
        )
        self._tell({"finished": finished.to_json()})


def _refuse(name: str, described: dict[str, Any], here: object) -> None:
    """Refuse to work on something else than the audit: its rows would be mixed in."""
    if described[name] != here:
        raise WorkerError(
            f"audit: a worker found another {name} than the audit has: expected {described[name]!r}, got {here!r}; "
            "give it the same files and packages"
        )


def failure(error: BaseException) -> dict[str, Any]:
    """The message about an error: in words if it is meant for the user, else with all that helps to find its cause."""
    if isinstance(error, GradveilError):
        return {"failed": [type(error).__name__, str(error)]}
    return {"failed": [None, "".join(traceback.format_exception(error))]}


def dataset_from(shared: dict[str, Any]) -> Dataset:
    """The data in a file that another process has open, as `workers.share` put it there; no copy of it is made."""
    modality = MODALITIES.create(shared["modality"]).with_settings(shared["modality_settings"])
    tensors = []
    with os.fdopen(shared["file"], "rb") as file:
        for offset, shape, dtype in shared["tensors"]:
            # "c": a change, which nobody makes, would stay in this process.
            mapped = np.memmap(file, mode="c", dtype=dtype, offset=offset, shape=tuple(shape))
            tensors.append(torch.from_numpy(mapped))
    train, test = (Split(tensors[place], tensors[place + 1], modality) for place in (0, 2))
    return Dataset(shared["name"], tuple(shared["classes"]), shared["source"], train, test)


def main() -> None:
    """Perform what standard input asks for."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what models and plugins print must not be taken for an answer
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            requests.put(line)
        os._exit(0)  # the process that runs the audit has ended, so nobody wants the rest

    def tell(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message).encode() + b"\n")
        answers.flush()

    threading.Thread(target=listen, daemon=True).start()
    try:
        station = Station(json.loads(requests.get()), tell)
        while True:
            station.perform(json.loads(requests.get()))
    except BrokenPipeError:
        os._exit(0)
    except BaseException as error:
        tell(failure(error))
        os._exit(1)


if __name__ == "__main__":
    main()
