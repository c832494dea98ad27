"""A Flower SuperNode that runs only accepted apps: ``flower-supernode``, plus the SHA-256 of every app it may run.

Whoever starts a Flower run ships the client's code: the app comes as a file (a FAB) from the SuperLink, and a stock
SuperNode runs whatever comes, with or without a defense in it. Flower's own remedy, ``--trusted-entities``, asks for
signatures that only apps from Flower's hub have: it refuses everything that ``flwr run .`` sends. This SuperNode asks
for a known hash instead::

    flwr build                                                      # packs the app that you have reviewed into a file
    sha256sum gradveil.gradveil-example.1-0-0.*.fab
    python -m gradveil.federation.supernode --accept SHA256 --superlink HOST:PORT ...   # rest: as flower-supernode's

A hash alone would not be enough, so it also does this:

- An app that is not accepted is answered with an error before any of it is unpacked, and the node keeps running.
- The run must name the very app that was sent: otherwise a SuperLink could send an accepted file and have an older app
  run that is still in Flower's folder. For the same reason the node has a Flower folder of its own, initially empty.
- The next message is processed only after the context of the last one has been saved. A stock SuperNode sends the reply
  before that, so the next message could start from the old context, in which the last round is not yet marked as
  answered (`gradveil.flower.defense_mod` answers a round once).
- ``--runs N`` accepts that many runs until the node is restarted: every run begins with an empty context.

What it does not do: the accepted app still reads its run's configuration, which the server writes. Accept only apps
whose defense does not depend on anything in it.
"""

import argparse
import dataclasses
import hashlib
import importlib
import inspect
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradveil.core.errors import GradveilError, InputError, MissingPackageError, ParameterError

__all__ = ["Gate", "app_hash", "main"]

PULL = (
    "state",
    "object_store",
    "node_config",
    "receive",
    "get_run",
    "get_fab",
    "pull_object",
    "confirm_message_received",
    "trusted_entities",
)
"""Parameters of Flower's function that pulls messages, which `Gate.guard` wraps."""

WORKED_ON = ("starting", "running")
"""Flower's statuses of tasks that a process is working on."""

AGENT = "flwr-agentapp"
"""Flower's task type of agent apps, which are not client apps."""


def app_hash(app: Path) -> str:
    """The SHA-256 of an app: of a ``.fab`` file, or of the file that ``flwr run`` makes from a folder on this machine.

    Another version of zlib may pack the same folder into other bytes, so accept the file that was built, not a rebuild.
    """
    if app.is_file():
        return hashlib.sha256(app.read_bytes()).hexdigest()
    build: Any = importlib.import_module("flwr.cli.build")
    return hashlib.sha256(build.build_fab_from_disk(app)).hexdigest()


@dataclasses.dataclass
class Gate:
    """What a node accepts: apps with known hashes, in a limited number of runs.

    Args:
        accepted: SHA-256 of the accepted apps, in hexadecimal digits.
        runs: the most runs to take part in; None: any number.

    Example:
        >>> gate = Gate([hashlib.sha256(b"an app").hexdigest()], runs=1)
        >>> gate.objection(1, b"an app"), gate.objection(2, b"an app")
        (None, 'this node was started for 1 runs and has seen as many')
        >>> gate.objection(1, b"another app")  # doctest: +ELLIPSIS
        'expected an accepted app, got one with SHA-256 ...'
    """

    accepted: Sequence[str]
    runs: int | None = None
    _seen: set[int] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self.accepted = [digest.lower() for digest in self.accepted]
        for digest in self.accepted:
            if not re.fullmatch("[0-9a-f]{64}", digest):
                raise ParameterError(f"supernode: --accept must be a SHA-256 of 64 hexadecimal digits, got {digest!r}")
        if not self.accepted:
            raise ParameterError("supernode: expected --accept SHA256, at least once; without it no app could run")
        if self.runs is not None and self.runs < 1:
            raise ParameterError(f"supernode: --runs must be at least 1, got {self.runs}")

    def objection(self, run: int, content: bytes) -> str | None:
        """Why this app must not run; None: it may, and the run is counted."""
        got = hashlib.sha256(content).hexdigest()
        if got not in self.accepted:
            return f"expected an accepted app, got one with SHA-256 {got}"
        if self.runs is not None and run not in self._seen and len(self._seen) >= self.runs:
            return f"this node was started for {self.runs} runs and has seen as many"
        self._seen.add(run)
        return None

    def check(self, run: Any, fab: Any) -> None:
        """Raise `InputError` unless Flower's FAB is an accepted app, and the one that Flower's run names."""
        if reason := self.objection(run.run_id, fab.content):
            raise InputError(f"supernode: {reason}")
        # The content is accepted, but what else the SuperLink says about it decides what runs, and must be checked too.
        digest = hashlib.sha256(fab.content).hexdigest()
        config_utils: Any = importlib.import_module("flwr.cli.config_utils")
        expected = (digest, digest, *config_utils.get_fab_metadata(fab.content))
        got = (fab.hash_str, run.fab_hash, run.fab_id, run.fab_version)
        if got != expected:
            raise InputError(f"supernode: expected the run to name the app that was sent, {expected}, got {got}")
        if run.primary_task_type == AGENT:
            raise InputError("supernode: expected a run of a client app, got one of an agent, around which no mod runs")

    def guard(self, pull: Callable[..., int | None], internals: Any) -> Callable[..., int | None]:
        """Wrap Flower's function that pulls a message and its app, so that this gate checks the app.

        Args:
            pull: ``_pull_and_store_message``.
            internals: the module that it is in.
        """

        def guarded(**options: Any) -> int | None:
            received: list[Any] = []
            runs: dict[int, Any] = {}

            def receive() -> Any:
                if (message := options["receive"]()) is not None:
                    received.append(message[0])
                return message

            def get_run(run_id: int) -> Any:
                runs[run_id] = options["get_run"](run_id)
                return runs[run_id]

            def get_fab(fab_hash: str, run_id: int) -> Any:
                fab = options["get_fab"](fab_hash, run_id)
                self.check(runs[run_id], fab)
                return fab

            try:
                return pull(**{**options, "receive": receive, "get_run": get_run, "get_fab": get_fab})
            except GradveilError as error:
                # As Flower answers when a signature is wrong.
                internals.log(internals.ERROR, "gradveil: refused run %s: %s", received[0].metadata.run_id, error)
                refusal = internals.Message(internals.FAB_VERIFICATION_ERROR, reply_to=received[0])
                internals._insert_message(refusal, options["state"], options["object_store"])
                return int(received[0].metadata.run_id)

        return guarded


def serialise(handlers: Any) -> None:
    """Make a SuperNode process one message at a time, each with the context that the previous one left.

    Args:
        handlers: Flower's module with the functions that hand out tasks and take back their outputs.
    """
    acquire, push, lock = handlers.acquire_task, handlers.push_task_output, threading.Lock()

    def acquire_task(request: Any, state: Any) -> Any:
        with lock:
            if state.get_tasks(statuses=WORKED_ON, limit=1):
                return handlers.AcquireTaskResponse()
            return acquire(request, state)

    def push_task_output(request: Any, state: Any, task: Any) -> Any:
        with lock:  # Flower's function ends the task before it saves the context
            return push(request, state, task)

    handlers.acquire_task, handlers.push_task_output = acquire_task, push_task_output


def install(gate: Gate) -> None:
    """Install the gate in Flower's SuperNode in this process; refuse a version of it that we do not know."""
    try:
        internals: Any = importlib.import_module("flwr.supernode.start_client_internal")
        handlers: Any = importlib.import_module("flwr.supernode.servicer.runtime.runtime_handlers")
        known = {
            internals._pull_and_store_message: PULL,
            internals._insert_message: ("msg", "state", "store"),
            handlers.acquire_task: ("request", "state"),
            handlers.push_task_output: ("request", "state", "task"),
        }
    except (ImportError, AttributeError) as error:
        raise MissingPackageError(
            f"supernode: needs the SuperNode of Flower 1.41: pip install 'gradveil[flower]' ({error})"
        ) from error
    for function, expected in known.items():
        got = tuple(inspect.signature(function).parameters)
        if got != expected:
            raise MissingPackageError(
                f"supernode: needs the SuperNode of Flower 1.41, whose {function.__name__} takes {expected}, got {got}"
            )
    internals._pull_and_store_message = gate.guard(internals._pull_and_store_message, internals)
    serialise(handlers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Start a SuperNode: our options, and those of ``flower-supernode``."""
    parser = argparse.ArgumentParser(
        prog="python -m gradveil.federation.supernode", allow_abbrev=False, description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--accept", action="append", default=[], metavar="SHA256", help="an app that may run")
    parser.add_argument("--runs", type=int, default=None, help="most runs to take part in until restarted")
    ours, rest = parser.parse_known_args(arguments)
    try:
        install(Gate(ours.accept, ours.runs))
    except GradveilError as error:
        parser.exit(2, f"{error}\n")
    from flwr.supernode.cli import flower_supernode

    home = os.environ.get("FLWR_HOME")
    with tempfile.TemporaryDirectory(prefix="gradveil-supernode-", dir=home, ignore_cleanup_errors=True) as folder:
        os.environ["FLWR_HOME"] = folder
        sys.argv = ["flower-supernode", *rest]
        flower_supernode()


if __name__ == "__main__":
    main()
