"""Processes that share the pieces of an audit: on this machine, or on a Ray cluster.

Only the process that runs the audit writes its rows. Workers are told the audit's config.json and the names of pieces,
build everything else themselves, and answer with rows in JSON; nothing is pickled on this machine. (Ray pickles what it
sends between its own processes; here that is texts in JSON.)
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from gradveil.audit.pieces import Finished, Piece
from gradveil.audit.schema import Json
from gradveil.core import errors
from gradveil.core.errors import GradveilError, WorkerError
from gradveil.core.extras import OptionalModule
from gradveil.core.folders import writing
from gradveil.data import Dataset

ray_package = OptionalModule("ray", "running an audit on a Ray cluster", "flower")

_PASSED_ON = ("GRADVEIL_DATA", "GRADVEIL_CACHE")  # settings that decide what a worker finds
_ALIGNMENT = 4096


@dataclass(frozen=True)
class Message:
    """What a worker says: that it has come to a step of its piece, or what it leaves at its end.

    Args:
        worker: the number of the worker.
        step: steps done, and steps in all.
        finished: what the piece leaves; None: it is not finished.

    Example:
        >>> Message(0, (3, 10)).finished is None
        True
    """

    worker: int
    step: tuple[float, float] = (1, 1)
    finished: Finished | None = None


class Crew(ABC):
    """Workers, numbered from 0 to `size` - 1; each performs one piece at a time.

    Use it as a context manager: when it ends, so do they, whatever they are doing.
    """

    size: int

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def begin(self, worker: int, piece: Piece, strength: str) -> None:
        """Let an idle worker perform a piece, whose defense is attacked at this strength."""

    @abstractmethod
    def next(self) -> Message:
        """Wait for the next message; an error in a worker, or its end, is raised here."""

    @abstractmethod
    def close(self) -> None:
        """End all workers at once."""


class Processes(Crew):
    """Processes on this machine, with one thread each.

    They read the data from a file that has no name, so that it is in memory once, however many there are, and is gone
    when they are.

    Args:
        size: how many.
        described: the audit's config.json.
        dataset: its data.
    """

    def __init__(self, size: int, described: Json, dataset: Dataset) -> None:
        self.size = size
        self._messages: queue.SimpleQueue[tuple[int, Json | None]] = queue.SimpleQueue()
        self._notes: set[str] = set()
        self._doing = ["starting"] * size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._listeners: list[threading.Thread] = []
        with tempfile.TemporaryFile() as file:
            data = share(dataset, file)
            assignment = {"audit": described, "folder": os.getcwd(), "data": data}
            try:
                for worker in range(size):
                    self._processes.append(_start(file))
                    self._send(worker, assignment)
                    self._listeners.append(threading.Thread(target=self._listen, args=(worker,), daemon=True))
                    self._listeners[worker].start()
            except BaseException:
                self.close()
                raise

    def _listen(self, worker: int) -> None:
        answers = self._processes[worker].stdout
        assert answers is not None
        for line in answers:
            self._messages.put((worker, json.loads(line)))
        self._messages.put((worker, None))

    def _send(self, worker: int, request: Json) -> None:
        requests = self._processes[worker].stdin
        assert requests is not None
        with suppress(BrokenPipeError):  # it has ended, as its messages will say
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()

    def begin(self, worker: int, piece: Piece, strength: str) -> None:
        """Send the piece."""
        self._doing[worker] = piece.what
        self._send(worker, {"piece": piece.to_json(), "strength": strength})

    def next(self) -> Message:
        """Wait for the next message."""
        while True:
            worker, message = self._messages.get()
            if message is None:
                raise _ended(self._processes[worker].wait(), self._doing[worker])
            if (found := _read(worker, message, self._notes)) is not None:
                return found

    def close(self) -> None:
        """Kill the processes: what they have not sent would be done again anyway."""
        for process in self._processes:
            process.kill()
        for listener in self._listeners:
            listener.join()  # what they said last is not wanted any more
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.close()
            with suppress(BrokenPipeError):
                process.stdin.close()


def _start(file: IO[bytes]) -> subprocess.Popen[bytes]:
    # One thread each: small networks run slower on several, and the other cores are for the other workers.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    # -P: nothing is imported from the working folder, which the program itself does not do either. In a session of its
    # own a worker does not hear Ctrl-C, which this process answers for all.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "gradveil.audit._worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        pass_fds=(file.fileno(),),
        start_new_session=True,
    )


def _ended(code: int, doing: str) -> WorkerError:
    reason = f"signal {-code}" if code < 0 else f"exit code {code}"
    remedy = "if memory ran out (signal 9), take fewer with --workers, or smaller batches with --chunk; " * (code < 0)
    return WorkerError(f"audit: a worker process has ended ({reason}) during {doing}; {remedy}finished rows are kept")


def _read(worker: int, message: Json, notes: set[str]) -> Message | None:
    """The message in an answer; notes are passed on once, and errors raised."""
    if "failed" in message:
        name, text = message["failed"]
        if name is None:
            raise RuntimeError(f"in a worker of the audit:\n{text}")
        kind = getattr(errors, name, WorkerError)
        raise kind(text) if issubclass(kind, GradveilError) else WorkerError(text)
    if "note" in message:
        if message["note"] not in notes:
            notes.add(message["note"])
            warnings.warn(message["note"], stacklevel=3)
        return None
    if "finished" in message:
        return Message(worker, finished=Finished.from_json(message["finished"]))
    step, steps = message["step"]
    return Message(worker, (step, steps))


def share(dataset: Dataset, file: IO[bytes]) -> Json:
    """Write the tensors of a data set to a file, and return what `_worker.dataset_from` needs to find them there."""
    tensors = []
    with writing(Path(tempfile.gettempdir())):
        for tensor in (part for split in (dataset.train, dataset.test) for part in (split.inputs, split.targets)):
            file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
            array = tensor.contiguous().numpy()
            tensors.append([file.tell(), list(array.shape), str(array.dtype)])
            file.write(array.data)
        file.flush()
    return {
        "file": file.fileno(),
        "tensors": tensors,
        "modality": dataset.train.modality.name,
        "modality_settings": dict(dataset.train.modality.settings),
        "name": dataset.name,
        "classes": list(dataset.classes),
        "source": dataset.source,
    }


class RayCluster(Crew):
    """Processes of a Ray cluster, one CPU each; every node must have the same packages, files and working folder.

    Args:
        address: where the cluster is: ``HOST:PORT``, or ``auto`` for the one that this machine belongs to.
        described: the audit's config.json.
        size: how many processes; None: one for each CPU of the cluster.
    """

    def __init__(self, address: str, described: Json, size: int | None = None) -> None:
        ray = ray_package
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        if ray.is_initialized():
            raise WorkerError(
                "audit: Ray is running in this process, and the audit would shut it down; call ray.shutdown() first"
            )
        # Ray will do this by default in a later version, and warns until then.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            ray.init(
                address=address,
                namespace="gradveil",
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=False,
                runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", **passed_on}},
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise WorkerError(
                f"audit: expected a Ray cluster at {address}, got: {str(error).splitlines()[0]}; start one with "
                "`ray start --head`, and other nodes with `ray start --address HOST:PORT`"
            ) from error
        self._notes: set[str] = set()
        self._running: dict[Any, tuple[int, str]] = {}
        self._waiting: list[Message] = []
        available = int(ray.cluster_resources().get("CPU", 0))
        self.size = max(1, min(size or available, available))
        station = ray.remote(num_cpus=1, max_restarts=0)(RayStation)
        assignment = json.dumps({"audit": described, "folder": os.getcwd(), "data": None})
        self._stations = [station.remote(assignment) for _ in range(self.size)]

    def begin(self, worker: int, piece: Piece, strength: str) -> None:
        """Let a process of the cluster perform the piece."""
        request = json.dumps({"piece": piece.to_json(), "strength": strength})
        self._running[self._stations[worker].perform.remote(request)] = worker, piece.what

    def next(self) -> Message:
        """Wait for the next piece that is finished; steps are not reported."""
        while not self._waiting:
            ended, _ = ray_package.wait(list(self._running), num_returns=1)
            worker, what = self._running.pop(ended[0])
            try:
                answers = json.loads(ray_package.get(ended[0]))
            except ray_package.exceptions.RayError as error:
                reason = str(error).splitlines()[0]
                raise WorkerError(
                    f"audit: a process of the Ray cluster has ended during {what} ({reason}); finished rows are kept"
                ) from error
            found = [_read(worker, answer, self._notes) for answer in answers]
            self._waiting += [message for message in found if message is not None]
        return self._waiting.pop(0)

    def close(self) -> None:
        """Leave the cluster; its processes for this audit end with that."""
        ray_package.shutdown()


class RayStation:
    """A process of a Ray cluster that performs pieces; see `_worker.Station`.

    Args:
        assignment: what that takes, in JSON.
    """

    def __init__(self, assignment: str) -> None:
        self._assignment: str | None = assignment
        self._answers: list[Json] = []
        self._station: Any = None

    def perform(self, request: str) -> str:
        """Perform a piece; returns the messages about it, in JSON."""
        from gradveil.audit import _worker

        self._answers.clear()
        try:
            if self._station is None:
                self._station = _worker.Station(json.loads(self._assignment or ""), self._note)
            self._station.perform(json.loads(request))
        except Exception as error:
            self._answers.append(_worker.failure(error))
        return json.dumps(self._answers)

    def _note(self, message: Json) -> None:
        if "step" not in message:
            self._answers.append(message)
