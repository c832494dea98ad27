import errno
import json
import os
from pathlib import Path

import pytest
from filelock import FileLock

from gradveil.core.errors import OutputError
from gradveil.core.folders import LOCK, locked, prepare_folder, replace_file, write_json


def test_json_is_written_completely(tmp_path):
    write_json(tmp_path / "config.json", {"a": 1})
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OutputError, match="^train: expected a folder that can be written to"):
        prepare_folder(blocked / "inside", "train")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        prepare_folder(Path(tmp_path), "audit")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_json(path, {"a": 1})

    def pieces():
        yield b"half"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError, match=r"config.json: .* got: No space left on device; what was saved earlier"):
        replace_file(path, pieces())
    monkeypatch.setattr(os, "fsync", lambda _: next(iter(pieces())) and [*pieces()])
    with pytest.raises(OutputError, match="No space left on device"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_has_one_writer(tmp_path):
    with locked(tmp_path, "train", "training run"):
        with (
            pytest.raises(OutputError, match="^audit: another audit is writing into"),
            locked(tmp_path, "audit", "audit"),
        ):
            pass
        with (
            pytest.raises(OutputError, match="^train: another training run is writing into"),
            locked(tmp_path, "train", "training run"),
        ):
            pass
    with pytest.raises(KeyError), locked(tmp_path, "train", "training run"):
        raise KeyError
    with FileLock(tmp_path / LOCK, blocking=False):  # the lock is released, even after an error
        pass
    with (
        pytest.raises(OutputError, match="expected a folder that can be locked"),
        locked(tmp_path / LOCK, "train", "training run"),
    ):
        pass
