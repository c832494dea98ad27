"""What refiner protects and what it costs on CIFAR-10 and four LeNets. Run it again to go on where it was.

    GRADVEIL_DATA=/path/to/data python experiments/refiner/run.py [--only attack|training] [GROUP ...]

The groups are those of config.json; default: all. Results are appended to results.jsonl, one line a case; nothing there
is ever edited. `report.py` makes the tables and pictures of them.
"""

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradveil
from gradveil import data, metrics, models
from gradveil.defenses import DEFENSES
from gradveil.defenses.refiner import Refiner, layer_numbers
from gradveil.federation import Training, train
from gradveil.federation.job import performance_maintenance
from gradveil.randomness import derived_generator
from gradveil.registry import parse_spec

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
CONFIG = json.loads((HERE / "config.json").read_text())
SEED = CONFIG["seed"]
LAST_EVALUATIONS = 4  # accuracy is their mean: a single one jumps by some per cent from round to round


@DEFENSES.register("refiner-without-element-weights")
class Unweighted(Refiner):
    """For the ablation: every coordinate of a layer counts alike in the utility metric."""

    def weights(self, gradients: dict[str, Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        layers = layer_numbers(gradients)
        return {name: torch.full_like(value, self.decay ** layers[name]) for name, value in gradients.items()}


@cache
def dataset() -> data.Dataset:
    return data.load(CONFIG["dataset"])


def build(model: str) -> gradveil.Task:
    settings = CONFIG["models"][model]
    name, parameters = parse_spec(settings["model"])
    shape = dataset().train.input_shape
    built = models.create(name, input_shape=shape, classes=10, seed=SEED, **parameters)
    normalisation = {key: 3 * [settings[key]] for key in ("mean", "std") if key in settings}
    return gradveil.Task(built, input_shape=shape, classes=10, **normalisation)


def norm(gradients: dict[str, Tensor]) -> float:
    return torch.stack([value.double().square().sum() for value in gradients.values()]).sum().sqrt().item()


def attack(case: dict[str, Any], defense: gradveil.Defense, finished: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Attack every victim's first update; medians over the victims."""
    model, kind = case["model"], case["kind"]
    task, count = build(model), CONFIG["victims"]
    order = torch.randperm(len(dataset().test), generator=derived_generator(SEED, "victims"))[:count]
    images, labels = dataset().test.batch(order)
    memories: list[dict[str, Tensor]] = [{} for _ in range(count)]
    batches = [(images[victim : victim + 1], labels[victim : victim + 1]) for victim in range(count)]
    own = [task.gradients(*batch) for batch in batches]
    updates = [
        defense.share(task, *batch, generator=derived_generator(SEED, "share", victim), memory=memories[victim])
        for victim, batch in enumerate(batches)
    ]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for update in updates for value in update.values()))
    same = ("kind", "model", "attack", "updates")  # an epsilon that no victim reaches gives what a larger one gave
    case = {**case, "updates": digest.hexdigest()[:16]}
    for row in finished.values():
        if kind == "attack" and all(row.get(key) == case[key] for key in same):
            return {**row, **case, "same_updates_as": row["defense"]}
    found = gradveil.attack(CONFIG["attacks"][case["attack"]]).reconstruct(
        task,
        updates,
        gradveil.ThreatModel(adaptive=kind != "attack" and kind, defense=defense),
        generator=derived_generator(SEED, "attack"),
        execution="batch",
    )
    rows = [
        metrics.Scorer().score(*batch[:1], found.inputs[victim], batch[1], found.labels[victim], None)
        for victim, batch in enumerate(batches)
    ]
    distances = [norm({k: update[k] - g[k] for k in g}) for update, g in zip(updates, own, strict=True)]
    result: dict[str, Any] = {
        metric: round(statistics.median(row[metric] for row in rows), 4)  # type: ignore[literal-required]
        for metric in ("psnr", "ssim", "lpips", "noise_ratio")
        if rows[0][metric] is not None  # type: ignore[literal-required]
    }
    result["updates"] = case["updates"]
    result["each_psnr"] = [round(row["psnr"], 2) for row in rows]
    result["labels_right"] = sum(row["label_correct"] for row in rows)
    result["gradient_norm"] = round(statistics.median(map(norm, own)), 4)
    result["distance"] = round(statistics.median(distances), 5)
    result["relative_distance"] = round(statistics.median(d / norm(g) for d, g in zip(distances, own, strict=True)), 5)
    if all("trained_on" in memory for memory in memories):
        robust = torch.cat([memory["trained_on"] for memory in memories])
        result["robust_psnr"] = round(metrics.psnr(images, robust).median().item(), 2)
        result["robust_noise_ratio"] = round(metrics.noise_ratio(robust).median().item(), 4)
    return result


def train_under(model: str, defense: gradveil.Defense, finished: dict[str, dict[str, Any]]) -> dict[str, Any]:
    training = Training(seed=SEED, **CONFIG["models"][model]["training"], evaluate_every=20)
    outcome = train(build(model), dataset(), defense, training)
    accuracy = statistics.fmean(accuracy for _, accuracy in outcome.history[-LAST_EVALUATIONS:])
    undefended = finished.get(f"training/{model}/none")
    baseline = undefended["accuracy"] if undefended else accuracy  # "none" is the first of every model
    return {
        "accuracy": round(accuracy, 4),
        "history": outcome.history,
        "baseline_accuracy": baseline,
        "pmm": performance_maintenance(accuracy, baseline, dataset().test),
        "round_seconds": round(outcome.round_seconds, 4),
        "diverged": outcome.diverged,
    }


def cases(groups: list[str]) -> Iterator[dict[str, Any]]:
    for group in groups:
        for block in CONFIG["groups"][group]:
            for defense in block["defenses"]:
                adaptive = block.get("adaptive")  # the name of a form
                common = {"model": block["model"], "defense": defense}
                for name in block["attacks"]:
                    kind = adaptive or "attack"
                    yield {"name": f"{kind}/{block['model']}/{name}/{defense}", "kind": kind, "attack": name, **common}
                if block.get("train"):
                    yield {"name": f"training/{block['model']}/{defense}", "kind": "training", **common}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", default=list(CONFIG["groups"]))
    parser.add_argument("--only", choices=["attack", "training"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in cases(arguments.groups):
        lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
        finished = {row["name"]: row for row in map(json.loads, lines)}
        if case["name"] in finished or (
            arguments.only and (arguments.only == "training") != (case["kind"] == "training")
        ):
            continue
        started, defense = time.perf_counter(), gradveil.defense(case["defense"])
        if case["kind"] == "training":
            trained_as = CONFIG["trained_as"].get(case["defense"], case["defense"])  # an estimate where exact is slow
            result = {"trained_as": trained_as, **train_under(case["model"], gradveil.defense(trained_as), finished)}
        else:
            result = attack(case, defense, finished)
        row = {**case, "seed": SEED, "gradveil": gradveil.__version__, **result}
        row["seconds"] = round(time.perf_counter() - started, 1)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
