"""Kill an audit with workers at random moments, resume it each time, and compare its rows with an uninterrupted run.

    python benchmarks/kill_and_resume.py --kills 30

Each kill is a SIGKILL of the process that runs the audit, at a random moment between its start and twice the time that
it needs to the next row; its workers must end by themselves. After the last kill the audit runs to its end. Then no row
may be missing, none may be there twice or differ, and rows that were on disk before a kill must be there after it.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gradveil.audit import AuditConfig

FILES = ("results.jsonl", "identification.jsonl", "utility.jsonl")
CONFIG = AuditConfig(
    dataset="stripes.npz",
    model="mlp",
    defenses=("none", "gaussian-noise:std=0.1", "top-k:keep=0.1"),
    attacks=("idlg:iterations=30", "inverting-gradients:iterations=30", "lti:directions=20,draws=1,hidden=16,epochs=2"),
    victims=8,
    chunk=1,
    rounds=30,
    games=10,
    candidates=20,
    public=100,
)


def write_data() -> None:
    """Small images, bright above or below, so that starting takes longer than loading them."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 300), ("test", 60)):
        labels = np.arange(count) % 2
        images = rng.integers(0, 100, (count, 12, 12, 1), dtype=np.uint8)
        images[labels == 0, :6] += 120
        images[labels == 1, 6:] += 120
        arrays |= {f"x_{split}": images, f"y_{split}": labels}
    np.savez(CONFIG.dataset, **arrays)


def rows(folder: Path) -> dict[str, list[str]]:
    """The complete lines of each file, without what measures time."""
    found = {}
    for name in FILES:
        text = (folder / name).read_text() if (folder / name).exists() else ""
        values = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        timeless = [{k: v for k, v in row.items() if k not in ("seconds", "round_seconds", "digest")} for row in values]
        found[name] = [json.dumps(row) for row in timeless]
    return found


def count(folder: Path) -> int:
    return sum(map(len, rows(folder).values()))


def begin(folder: Path, workers: int) -> subprocess.Popen[str]:
    resume = ["--resume"] if (folder / "config.json").exists() else []
    words = [*CONFIG.command.split()[1:], "--workers", str(workers), "--out", str(folder), *resume]
    return subprocess.Popen(
        [sys.executable, "-m", "gradveil", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def children(parent: int) -> list[int]:
    """The processes that a process has started (Linux)."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(words[1]) == parent:
            found.append(int(process.name))
    return found


def alive(process: int) -> bool:
    try:
        return (Path(f"/proc/{process}") / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as place:
        os.environ["GRADVEIL_CACHE"] = str(Path(place) / "cache")
        os.chdir(place)
        write_data()
        whole, folder = Path(place) / "whole", Path(place) / "killed"
        began = time.monotonic()
        process = begin(whole, 1)
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
        total, seconds = count(whole), time.monotonic() - began
        print(f"without a kill: {total} rows in {seconds:.0f} s")
        kills = lost = outlived = with_workers = finished = 0
        before = rows(folder)
        while kills < arguments.kills:
            had, process = count(folder), begin(folder, arguments.workers)
            if moments.random() < 0.25:  # also while it starts
                time.sleep(moments.uniform(0, 4))
            else:
                while count(folder) == had and process.poll() is None:
                    time.sleep(0.01)
                time.sleep(moments.uniform(0, 2))
            workers = children(process.pid)
            with_workers += bool(workers)
            if process.poll() is not None:  # it was faster: nothing is left to kill, so it begins again
                assert process.returncode == 0, process.communicate()[1]
                finished += 1
                for name in FILES:
                    lines = (folder / name).read_text().splitlines(keepends=True)
                    (folder / name).write_text("".join(lines[: len(lines) // 3]))
                before = rows(folder)
                continue
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            kills += 1
            deadline = time.monotonic() + 30
            while any(map(alive, workers)) and time.monotonic() < deadline:
                time.sleep(0.01)
            outlived += sum(map(alive, workers))
            after = rows(folder)
            lost += sum(after[name][: len(lines)] != lines for name, lines in before.items())
            before = after
            print(f"kill {kills}: {len(workers)} workers, {count(folder)} of {total} rows", flush=True)
        process = begin(folder, arguments.workers)
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
        expected, got = rows(whole), rows(folder)
        twice = sum(len(lines) - len(set(lines)) for lines in got.values())
        missing = sum(len(set(expected[name]) - set(got[name])) for name in FILES)
        others = sum(len(set(got[name]) - set(expected[name])) for name in FILES)
    print(f"{kills} kills, {with_workers} of them with workers; {finished} runs ended before they were killed")
    print(f"rows: {missing} missing, {twice} twice, {others} that differ; files that lost rows: {lost}")
    print(f"workers that outlived the audit: {outlived}")
    sys.exit(bool(missing or twice or others or lost or outlived))


if __name__ == "__main__":
    main()
