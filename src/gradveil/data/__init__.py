"""Datasets by name or path, where they come from, and how they are divided among clients."""

from gradveil.data.catalog import names
from gradveil.data.dataset import Dataset, Split
from gradveil.data.fetcher import fetch
from gradveil.data.loader import is_table, is_text, load
from gradveil.data.partitions import partition
from gradveil.data.places import Status, find, status

__all__ = ["Dataset", "Split", "Status", "fetch", "find", "is_table", "is_text", "load", "names", "partition", "status"]
