"""Every data test runs with its own cache and without the user's data folder."""

import os
from pathlib import Path

import pytest

REAL_DATA = os.environ.get("GRADVEIL_DATA")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder; no GRADVEIL_DATA."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRADVEIL_CACHE", str(folder))
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    return folder


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """An empty folder that GRADVEIL_DATA names."""
    folder = tmp_path / "user"
    folder.mkdir()
    monkeypatch.setenv("GRADVEIL_DATA", str(folder))
    return folder


@pytest.fixture
def real_file(monkeypatch):
    """A function that returns the path of a real data file, or skips the test and says which file is missing."""

    def get(name):
        path = Path(REAL_DATA or "", name)
        if not (REAL_DATA and path.exists()):
            pytest.skip(f"{name} is missing: set GRADVEIL_DATA to the folder that holds it")
        monkeypatch.setenv("GRADVEIL_DATA", REAL_DATA)
        return path

    return get
