"""How much faster an audit is with several workers than in one process, on the same machine in the same minutes.

python benchmarks/audit_workers.py                 # the default audit, that of `make audit`
python benchmarks/audit_workers.py --quick         # the same with shorter attacks and trainings
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from gradveil.audit import AuditConfig, run


def timed(config: AuditConfig, workers: int) -> tuple[float, list[str]]:
    """Seconds of an audit in an empty folder, and its rows without what measures time."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["GRADVEIL_CACHE"] = str(Path(place) / "cache")
        folder, began = Path(place) / "out", time.perf_counter()
        run(config, folder, workers=workers)
        seconds = time.perf_counter() - began
        lines = [
            line for name in ("results", "utility") for line in (folder / f"{name}.jsonl").read_text().splitlines()
        ]
    timeless = [
        {k: v for k, v in json.loads(line).items() if k not in ("seconds", "round_seconds", "digest")} for line in lines
    ]
    return seconds, sorted(map(json.dumps, timeless))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    config = AuditConfig()
    if arguments.quick:
        attacks = ("idlg:iterations=60", "inverting-gradients:optimiser=lbfgs,iterations=30,tv=0.01")
        config = replace(config, attacks=attacks, rounds=200, games=30)
    ratios = []
    for _ in range(arguments.repeats):
        alone, expected = timed(config, 1)
        shared, rows = timed(config, arguments.workers)
        assert rows == expected, "rows depend on the number of workers"
        ratios.append(alone / shared)
        print(f"one process {alone:.1f} s, {arguments.workers} workers {shared:.1f} s: {ratios[-1]:.2f} x", flush=True)
    print(f"{len(rows)} rows, all equal; median speed-up {statistics.median(ratios):.2f} x")


if __name__ == "__main__":
    main()
