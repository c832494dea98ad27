"""Figures that must not change when the code behind them is rewritten.

Usage: python scripts/golden.py write FILE [PART]...    write a golden file, or add parts to it
       python scripts/golden.py compare FILE [PART]...  compute the parts again and print what differs

The parts, all with fixed seeds on the embedded digits:

- ``updates``: what every registered defense shares (one gradient; FedAvg), and its aggregate of three clients. Tensors
  are stored as three fixed random projections and the norm, which must agree to 1e-6.
- ``attacks``: twenty iterations of every attack, and of the adaptive attacker of every defense; to 1e-6.
- ``training``: a FedAvg training with faults and error feedback; accuracies, losses and bytes to 1e-6.
- ``flower``: a training run on Flower's simulation; to 1e-6.
- ``adaptive``: the rows of a small audit of every registered defense, plain and adaptive (two victims, 20 iterations);
  scores to 1e-6.
- ``audit``: the rows of the default audit, without times. Full attacks amplify rounding errors, so a PSNR may differ,
  but the median of each method must lie inside its interval in the golden file.

A golden file is valid for one machine and one version of torch: write it before a change, compare after it.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradveil
from gradveil import data, models
from gradveil.attacks import ATTACKS
from gradveil.audit import AuditConfig
from gradveil.audit import run as run_audit
from gradveil.audit.statistics import median_interval
from gradveil.core.errors import GradveilError
from gradveil.core.randomness import derived_generator
from gradveil.defenses import DEFENSES
from gradveil.federation import Training, train

TOLERANCE = 1e-6
SHAPE, CLASSES = (1, 28, 28), 10
LOCAL = gradveil.LocalSteps(epochs=2, batch_size=2, lr=0.05)
COMPOSED = (
    "dual-pruning+error-feedback",
    "top-k+gaussian-noise",
    "gradient-dropout:scale=layer,std=1",
    "optimal-noise:form=global",
    "risk-slicing:clip=1",
    "soteria:directions=8",
)
ITERATIVE = {"dlg": 20, "idlg": 20, "inverting-gradients": 20, "grad-inversion": 20, "ci-net": 20}
Figures = dict[str, Any]


def task_and_data() -> tuple[gradveil.Task, data.Dataset]:
    model = models.create("mnist-cnn", input_shape=SHAPE, classes=CLASSES, seed=0)
    return gradveil.Task(model, input_shape=SHAPE, classes=CLASSES), data.load("mnist")


def projected(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Each tensor's norm and its products with three fixed random directions, all of the same scale."""
    result = {}
    for name, value in tensors.items():
        flat = value.detach().double().flatten()
        directions = torch.randn(3, len(flat), generator=derived_generator(0, "golden", name), dtype=torch.float64)
        result[name] = [float(flat.norm()), *(directions @ flat).tolist()]
    return result


def updates() -> Figures:
    task, dataset = task_and_data()
    public = dataset.train.batch(torch.arange(100, 108))
    batches = [dataset.train.batch(torch.arange(4 * client, 4 * client + 4)) for client in range(3)]
    found: Figures = {}
    for spec in (*DEFENSES.names(), *COMPOSED):
        for label, local in (("gradient", None), ("fedavg", LOCAL)):
            defense = gradveil.defense(spec)
            defense, prepared = defense.prepare(task, public=public, generator=derived_generator(1, "prepare"))
            announced = defense.announce(prepared, *batches[0], generator=derived_generator(3), memory={})
            shared = [
                defense.share(
                    prepared,
                    *batch,
                    generator=derived_generator(2, client),
                    memory={},
                    announced=announced,
                    local=local,
                )
                for client, batch in enumerate(batches)
            ]
            aggregate = defense.aggregate(shared, weights=[1.0, 2.0, 3.0], memory={}, announced=announced)
            found[f"{spec}, {label}"] = {"update": projected(shared[0]), "aggregate": projected(aggregate)}
    return found


def attacks() -> Figures:
    model = models.create("lenet", input_shape=SHAPE, classes=CLASSES, seed=0, init="uniform")
    task, dataset = gradveil.Task(model, input_shape=SHAPE, classes=CLASSES), data.load("mnist")
    public, victim = dataset.train.batch(torch.arange(100, 108)), dataset.test.batch(torch.arange(1))
    found: Figures = {}

    def run_attack(name: str, spec: str, adaptive: bool) -> Figures | str:
        attack = gradveil.attack(name, **({"iterations": ITERATIVE[name]} if name in ITERATIVE else {}))
        defense = gradveil.defense(spec)
        try:
            sent = attack.modify(task, public=dataset.train.batch(torch.arange(200)), generator=derived_generator(4))
            defense, prepared = defense.prepare(sent, public=public, generator=derived_generator(1, "prepare"))
            announced = defense.announce(prepared, *victim, generator=derived_generator(3), memory={})
            update = defense.share(prepared, *victim, generator=derived_generator(2), memory={}, announced=announced)
            threat = gradveil.ThreatModel(adaptive=adaptive, defense=defense, server=attack.server)
            result = attack.reconstruct(prepared, update, threat, generator=derived_generator(5))
        except GradveilError as error:
            return str(error)
        return {"inputs": projected({"inputs": result.inputs}), "labels": result.labels.tolist(), "loss": result.loss}

    for name in ATTACKS.names():
        found[f"{name}, none"] = run_attack(name, "none", adaptive=False)
    for spec in (*DEFENSES.names(), *COMPOSED):
        found[f"inverting-gradients, {spec}, adaptive"] = run_attack("inverting-gradients", spec, adaptive=True)
    return found


def training_figures(result: Any) -> Figures:
    return {
        "accuracy": result.accuracy,
        "loss": result.loss,
        "history": result.history,
        "upload_bytes": result.upload_bytes,
        "download_bytes": result.download_bytes,
        "losses": [record.loss for record in result.rounds],
        "faults": [str(fault) for fault in result.faults],
        "privacy": str(result.privacy),
        "weights": projected(result.task.parameters),
    }


def training() -> Figures:
    task, dataset = task_and_data()
    plan = Training(rounds=4, clients=6, clients_per_round=4, batch_size=8, local=LOCAL, evaluate_every=2)
    specs = ("none", "dual-pruning+error-feedback", "dp-sgd", "aligned-dual-pruning+error-feedback")
    return {spec: training_figures(train(task, dataset, gradveil.defense(spec), plan)) for spec in specs}


def flower() -> Figures:
    task, dataset = task_and_data()
    plan = Training(rounds=2, clients=3, batch_size=8, local=LOCAL)
    defense = gradveil.defense("dual-pruning+error-feedback")
    return training_figures(gradveil.flower.simulate(task, dataset, defense, plan, actors=1))


def audit_rows(config: AuditConfig) -> tuple[list[Figures], list[Figures]]:
    with tempfile.TemporaryDirectory() as folder:
        run_audit(config, Path(folder))
        results, utility = (
            [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]
            for name in ("results.jsonl", "utility.jsonl")
        )
    return results, utility


def adaptive() -> Figures:
    attacks = ("idlg:iterations=20", "inverting-gradients:optimiser=lbfgs,iterations=20,tv=0.01")
    config = AuditConfig(defenses=tuple(DEFENSES.names()), attacks=attacks, victims=2, rounds=10)
    rows, costs = audit_rows(config)
    scores = (
        "mse",
        "psnr",
        "ssim",
        "label_correct",
        "leaked",
        "power",
        "bound_mse",
        "loss",
        "trained_on",
    )
    found = {
        f"{row['defense_spec']}, {row['attack_spec']}, {row['adaptive']}, {row['victim']}": {
            score: row[score] for score in scores
        }
        for row in rows
    }
    kept = ("accuracy", "upload_bytes", "epsilon")
    return {"rows": found, "costs": {row["defense_spec"]: {name: row[name] for name in kept} for row in costs}}


def audit() -> Figures:
    rows, costs = audit_rows(AuditConfig())
    psnr: dict[str, list[float]] = {}
    for row in rows:
        psnr.setdefault(f"{row['defense_spec']}, {row['attack_spec']}, {row['adaptive']}", []).append(row["psnr"])
    medians: Figures = {}
    for name, values in psnr.items():
        interval = median_interval(values)
        medians[name] = {"psnr": values, "low": interval.low, "high": interval.high}
    return {"medians": medians, "accuracy": {row["defense_spec"]: row["accuracy"] for row in costs}}


PARTS: dict[str, Callable[[], Figures]] = {
    "updates": updates,
    "attacks": attacks,
    "training": training,
    "flower": flower,
    "adaptive": adaptive,
    "audit": audit,
}


def differences(where: str, before: Any, now: Any) -> list[str]:
    """A line for each figure that differs by more than the tolerance, relative to its size."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        return [line for key in keys for line in differences(f"{where} / {key}", before.get(key), now.get(key))]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        numbers = [value for value in before if isinstance(value, float)]
        scale = max(map(abs, numbers), default=0.0)
        pairs = enumerate(zip(before, now, strict=True))
        return [
            line
            for index, (old, new) in pairs
            if not (isinstance(old, float) and isinstance(new, float) and abs(old - new) <= TOLERANCE * scale)
            for line in differences(f"{where}[{index}]", old, new)
        ]
    if isinstance(before, float) and isinstance(now, float):
        same = math.isclose(before, now, rel_tol=TOLERANCE, abs_tol=1e-12) or (math.isnan(before) and math.isnan(now))
        return [] if same else [f"{where}: was {before!r}, is {now!r}"]
    return [] if before == now else [f"{where}: was {before!r}, is {now!r}"]


def audit_differences(before: Figures, now: Figures) -> list[str]:
    """A line for each median outside its golden interval and each accuracy outside the tolerance."""
    found = differences("audit / accuracy", before["accuracy"], now["accuracy"])
    if before["medians"].keys() != now["medians"].keys():
        found.append(f"audit: had medians of {sorted(before['medians'])}, has {sorted(now['medians'])}")
    for name, old in before["medians"].items():
        values = now["medians"].get(name, {}).get("psnr", [])
        if values == old["psnr"]:
            continue
        median = statistics.median(values) if values else math.nan
        inside = old["low"] <= median <= old["high"]
        if not inside:
            found.append(f"audit / {name}: the median is {median:.2f} dB, was {old['low']:.2f} to {old['high']:.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.pop("GRADVEIL_DATA", None)  # so that the embedded digits are used, which are the same everywhere
    golden = json.loads(arguments.file.read_text()) if arguments.file.exists() else {}
    found: list[str] = []
    for part in arguments.parts or PARTS:
        # Go through JSON, as the golden file did.
        figures = json.loads(json.dumps(PARTS[part](), default=lambda value: value.tolist()))
        if arguments.action == "write":
            golden[part] = figures
            arguments.file.write_text(json.dumps(golden, indent=1) + "\n")
            print(f"{part}: written")
            continue
        if part == "audit":
            differing = audit_differences(golden[part], figures)
        else:
            differing = differences(part, golden[part], figures)
        print(f"{part}: {len(differing)} differences")
        found += differing
    print("\n".join(found[:20]))
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
