"""How well the attacks recover undefended CIFAR-10 images. Run it again to go on: finished cases are skipped.

    GRADVEIL_DATA=/path/to/data python experiments/attack_strength/run.py [--presets]

Results are appended to results.jsonl (with --presets: every preset on few images, to presets.jsonl), one line a case;
nothing there is ever edited.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch

import gradveil
from gradveil import data, metrics, models
from gradveil.attacks.presets import BUDGETS
from gradveil.audit.run import choose_threads
from gradveil.randomness import derived_generator
from gradveil.registry import parse_spec

HERE = Path(__file__).parent
PRESET_MODELS = [
    ("mnist", "lenet:init=uniform", 4),
    ("cifar10", "lenet:init=uniform", 4),
    ("cifar10", "resnet18:norm=frozen", 1),
]


def preset_cases() -> list[dict]:
    return [
        {"name": f"{dataset}-{model}-{attack}-{budget}", "dataset": dataset, "model": model, "victims": victims}
        | {"attack": str(gradveil.preset(attack, budget, dataset=dataset, model=parse_spec(model)[0]))}
        for dataset, model, victims in PRESET_MODELS
        for attack in ("idlg", "inverting-gradients")
        for budget in BUDGETS
        if not (model.startswith("resnet") and (budget == "thorough" or attack == "idlg"))  # an hour and more
    ]


def run(case: dict, seed: int) -> dict:
    dataset = data.load(case.get("dataset", "cifar10"))
    shape = dataset.train.input_shape
    name, parameters = parse_spec(case["model"])
    model = models.create(name, input_shape=shape, classes=10, seed=seed, **parameters)
    task = gradveil.Task(model, input_shape=shape, classes=10)
    torch.set_num_threads(choose_threads(task.size))
    size, victims = case.get("batch_size", 1), case["victims"]
    local = gradveil.LocalSteps(**case["local"]) if "local" in case else None
    order = torch.randperm(len(dataset.test), generator=derived_generator(seed, "victims"))[: victims * size]
    images, labels = dataset.test.batch(order)
    images, labels = images.view(victims, size, *shape), labels.view(victims, size)
    updates = [
        gradveil.defense("none").share(
            task, images[v], labels[v], local=local, generator=derived_generator(seed, "client", v)
        )
        for v in range(victims)
    ]
    started = time.perf_counter()
    found = gradveil.attack(case["attack"]).reconstruct(
        task,
        updates,
        gradveil.ThreatModel(batch_size=size, local=local),
        generator=derived_generator(seed, "attack"),
        progress=lambda done, total, left: show(case["name"], done, total, left),
    )
    scorer = metrics.Scorer()
    scores = [scorer.score(images[v], found.inputs[v], labels[v], found.labels[v], None) for v in range(victims)]
    psnr = [score["psnr"] for score in scores]
    counts_right = sum(sorted(found.labels[v].tolist()) == sorted(labels[v].tolist()) for v in range(victims))
    return {
        **case,
        "seed": seed,
        "gradveil": gradveil.__version__,
        "psnr": [round(value, 2) for value in psnr],
        "median_psnr": round(statistics.median(psnr), 2),
        "above_25_db": sum(value > 25 for value in psnr),
        "median_ssim": round(statistics.median(score["ssim"] for score in scores), 3),
        "label_counts_right": f"{counts_right} of {victims}",
        "execution": found.execution,
        "threads": torch.get_num_threads(),
        "seconds": round(time.perf_counter() - started, 1),
    }


def show(name: str, done: int, total: int, left: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{name}: {done} of {total}, {left:.0f} s left   ", end="", file=sys.stderr)


def main() -> None:
    config = json.loads((HERE / "config.json").read_text())
    presets = "--presets" in sys.argv
    results = HERE / ("presets.jsonl" if presets else "results.jsonl")
    finished = {json.loads(line)["name"] for line in results.read_text().splitlines()} if results.exists() else set()
    for case in preset_cases() if presets else config["cases"]:
        if case["name"] not in finished:
            result = run(case, config["seed"])
            with results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{case['name']:32} median {result['median_psnr']} dB, {result['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
