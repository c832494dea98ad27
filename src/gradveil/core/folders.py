"""Folders that audits and trainings write into: one writer at a time, and files that are there whole or not at all."""

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
    """Make the output folder of `owner`, a command, and prove that it can be written to."""
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
def locked(folder: Path, owner: str, what: str) -> Iterator[None]:
    """Keep every other audit and training out of an existing folder; the lock ends with the process that holds it.

    Args:
        folder: where `owner` is about to write.
        owner: the command, for messages.
        what: the thing it runs, for messages: an audit, a training.
    """
    lock = FileLock(folder / LOCK, blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise OutputError(
            f"{owner}: another {what} is writing into {folder}; wait for it or choose another --out"
        ) from error
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise OutputError(f"{owner}: expected a folder that can be locked, got {folder}: {error}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in words what the operating system objects to while `path` is written."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: expected a place that can be written to, got: {error.strerror or error}; what was saved before "
            "is as it was; make room, or mend what is in the way, and try again"
        ) from error


def replace_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Path:
    """Write a file whole or not at all, and wait until it is on disk; if that fails, nothing of it is left."""
    temporary = path.with_suffix(".part")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)  # else it may be a link, through which another file would be written
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
    """Write a JSON file whole or not at all."""
    replace_file(path, [json.dumps(value, indent=2).encode(), b"\n"])
