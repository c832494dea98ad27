"""Where data is looked up: the user's folder, then the cache, then the installation."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradveil.core.errors import DataError
from gradveil.core.extras import OptionalModule
from gradveil.data import catalog

platformdirs = OptionalModule("platformdirs", "finding the user's cache folder")

USER_FOLDER = "GRADVEIL_DATA"
CACHE_FOLDER = "GRADVEIL_CACHE"


@dataclass(frozen=True)
class Status:
    """One line of ``gradveil data list``.

    Args:
        name: the name of the dataset or weights.
        summary: what it is.
        licence: its licence.
        citation: the work to cite.
        found: where it is, ``"embedded"`` if it came with the installation, or None.
        how: how to get it (all of it, if only part is embedded).

    Example:
        >>> row = {row.name: row for row in status()}["cifar10"]
        >>> row.how
        'gradveil data get cifar10'
    """

    name: str
    summary: str
    licence: str
    citation: str
    found: Path | Literal["embedded"] | None
    how: str


def cache_folder() -> Path:
    """Where fetched data is kept: ``GRADVEIL_CACHE``, or else the user's cache folder."""
    return Path(os.environ.get(CACHE_FOLDER) or platformdirs.user_cache_dir("gradveil"))


def search_folders() -> list[Path]:
    """The folders to look in, in this order: ``GRADVEIL_DATA`` if it is set, the cache folder."""
    user_folder = os.environ.get(USER_FOLDER)
    if not user_folder:
        return [cache_folder()]
    if not Path(user_folder).is_dir():
        raise DataError(f"{USER_FOLDER} must name a folder, got {user_folder!r}; create it or unset {USER_FOLDER}")
    return [Path(user_folder), cache_folder()]


def find(name: str) -> Path | None:
    """The file or folder that holds the dataset or weights `name`, or None if no search folder has it."""
    files = catalog.entry(name).files
    paths = (folder / file for folder in search_folders() for file in files)
    return next((path for path in paths if path.exists()), None)


def missing(name: str) -> DataError:
    """The error for a name that was not found: where it was looked for, and what to do."""
    entry = catalog.entry(name)
    folders = " and ".join(str(folder) for folder in search_folders())
    hint = "" if os.environ.get(USER_FOLDER) else f" ({USER_FOLDER} is not set)"
    remedy = f"run: {entry.how}; or put {entry.by_hand} into" if entry.packages else f"put {entry.by_hand} into"
    return DataError(
        f"{name}: expected one of {', '.join(entry.files)} in {folders}{hint}, found none; "
        f"{remedy} the folder that {USER_FOLDER} names"
    )


def status() -> list[Status]:
    """All datasets and weights known by name, where they were found, and how to get them."""
    return [
        Status(
            name=entry.name,
            summary=entry.summary,
            licence=entry.licence,
            citation=entry.citation,
            found=find(entry.name) or ("embedded" if entry.embedded else None),
            how=entry.how,
        )
        for entry in (*catalog.DATASETS, *catalog.WEIGHTS)
    ]
