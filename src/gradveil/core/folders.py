"""Folders that audits and training runs write into: one writer at a time, and no half-written files."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gradveil.core.errors import OutputError

LOCK = ".lock"


def prepare_folder(folder: Path, owner: str) -> None:
    """Create the output folder of the command `owner`, and check that it can be written to."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(
            f"{owner}: expected a folder that can be written to, got {folder}: {error.strerror}; "
            "choose another with --out"
        ) from error


@contextmanager
def locked(folder: Path, owner: str, activity: str) -> Iterator[None]:
    """Keep every other audit and training out of an existing folder; the lock ends with the process that holds it.

    Args:
        folder: where `owner` is about to write.
        owner: the command, for messages.
        activity: what the command runs, for messages: "audit" or "training".
    """
    lock = FileLock(folder / LOCK, blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise OutputError(
            f"{owner}: another {activity} is writing into {folder}; wait for it or choose another --out"
        ) from error
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise OutputError(f"{owner}: expected a folder that can be locked, got {folder}: {error}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's errors while `path` is written into an `OutputError`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: expected a place that can be written to, got: {error.strerror or error}; what was saved "
            "earlier is unchanged; free some space or fix the cause, and try again"
        ) from error


def replace_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Path:
    """Write a file completely or not at all, and wait until it is on disk; a failure leaves no part of it behind."""
    temporary = path.with_suffix(".part")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)  # it may be a link, through which another file would be overwritten
            with temporary.open("xb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    return path


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file completely or not at all."""
    replace_file(path, [json.dumps(value, indent=2).encode(), b"\n"])
