"""What dual pruning and Gradient Dropout cost in accuracy, stop of attacks, and hide of their decoys, on CIFAR-10.

    GRADVEIL_DATA=/path/to/data python experiments/pruning_and_dropout/run.py [training | liars | attacks | decoys]...

Run it again to go on: finished cases are skipped. Results are appended to results.jsonl, one line a case; nothing
there is ever edited. training: ten clients, the same rounds and seed under every defense. liars: aligned dual pruning
where 1 or all of the ten clients publish the locations of their smallest values when elected. attacks: every victim's
PSNR. decoys: how well an attacker tells the decoys of Gradient Dropout from values, layer by layer.
"""

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradveil
from gradveil import data, metrics, models
from gradveil.defenses.aligned_dual_pruning import AlignedDualPruning
from gradveil.federation import Training, train
from gradveil.modality import IMAGE
from gradveil.randomness import derived_generator
from gradveil.registry import parse_spec

HERE = Path(__file__).parent
CONFIG = json.loads((HERE / "config.json").read_text())
SEED = CONFIG["seed"]


class LyingPublisher(AlignedDualPruning):
    """Aligned dual pruning of which some elected clients publish the locations of their smallest values."""

    def __init__(self, liars: int) -> None:
        super().__init__()
        self.share_of_liars = liars / CONFIG["training"]["clients"]
        self.draws = derived_generator(SEED, "liars", liars)

    def publish(self, gradients: Mapping[str, Tensor], memory: Any = None) -> Mapping[str, Tensor]:
        if float(torch.rand((), generator=self.draws)) < self.share_of_liars:
            gradients = {name: 1 / (value.abs() + 1e-30) for name, value in gradients.items()}
        return super().publish(gradients)


def task_of(dataset: data.Dataset, spec: str, **normalisation: list[float]) -> gradveil.Task:
    shape = dataset.train.input_shape
    name, parameters = parse_spec(spec)
    model = models.create(name, input_shape=shape, classes=len(dataset.classes), seed=SEED, **parameters)
    return gradveil.Task(model, input_shape=shape, classes=len(dataset.classes), **normalisation)


def trained(defense: gradveil.Defense, rate: float) -> dict[str, Any]:
    settings = dict(CONFIG["training"])
    dataset = data.load(settings.pop("dataset"))
    mean, std = ([settings.pop(key)] * dataset.train.input_shape[0] for key in ("mean", "std"))
    task = task_of(dataset, settings.pop("model"), mean=mean, std=std)
    result = train(task, dataset, defense, Training(**settings, lr=rate, seed=SEED))
    return {
        "accuracy": result.accuracy,
        "loss": result.loss if math.isfinite(result.loss) else None,
        "diverged": result.diverged,
        "history": result.history,
        "upload_bytes": result.upload_bytes,
        "download_bytes": result.download_bytes,
        "round_seconds": result.round_seconds,
    }


def victims_of(dataset: data.Dataset) -> list[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(dataset.test), generator=derived_generator(SEED, "victims"))
    return [dataset.test.batch(order[v : v + 1]) for v in range(CONFIG["attacks"]["victims"])]


def shared(
    defense: gradveil.Defense, task: gradveil.Task, victims: list[tuple[Tensor, Tensor]]
) -> list[gradveil.Update]:
    return [
        defense.share(task, *victim, generator=derived_generator(SEED, "share", v), memory={})
        for v, victim in enumerate(victims)
    ]


def attacked(spec: str, attack_name: str) -> dict[str, Any]:
    settings = CONFIG["attacks"]
    dataset = data.load(settings["dataset"])
    task = task_of(dataset, settings["model"])
    victims = victims_of(dataset)
    defense = gradveil.defense(spec)
    attack = gradveil.preset(
        attack_name, settings["budget"], dataset=settings["dataset"], model=parse_spec(settings["model"])[0]
    )
    labels = torch.stack([labels for _, labels in victims])
    threat = gradveil.ThreatModel(labels="known", known_labels=labels, defense=defense)
    result = attack.reconstruct(
        task, shared(defense, task, victims), threat, generator=derived_generator(SEED, "attack")
    )
    truth = torch.cat([images for images, _ in victims])
    found = result.inputs[:, 0].to(truth).clamp(0, 1)
    return {"attack": str(attack), "labels": "known", **scores(found, truth)}


def guessed() -> dict[str, Any]:
    """What the public mean image of the class scores: no gradient needed."""
    dataset = data.load(CONFIG["attacks"]["dataset"])
    victims = victims_of(dataset)
    truth, labels = torch.cat([images for images, _ in victims]), torch.cat([labels for _, labels in victims])
    public = dataset.train
    found = IMAGE.blind(public.inputs, public.targets, labels, classes=len(dataset.classes))
    return scores(found, truth)


def scores(found: Tensor, truth: Tensor) -> dict[str, Any]:
    """PSNR and SSIM of each victim and their medians."""
    psnr, ssim = metrics.psnr(found, truth).tolist(), metrics.ssim(found, truth).tolist()
    return {
        "psnr": [round(value, 3) for value in psnr],
        "ssim": [round(value, 4) for value in ssim],
        "median_psnr": statistics.median(psnr),
        "median_ssim": statistics.median(ssim),
    }


def decoys(spec: str, model: str) -> dict[str, Any]:
    """Mean area under the curve over the victims, by layer."""
    dataset = data.load(CONFIG["attacks"]["dataset"])
    task = task_of(dataset, model)
    victims = victims_of(dataset)
    dropout = gradveil.defense(spec)
    areas: dict[str, list[float]] = {}
    for victim, sent in zip(victims, shared(dropout, task, victims), strict=True):
        for name, gradient in task.gradients(*victim).items():
            spread = dropout.std
            if dropout.scale == "layer":
                spread *= float((gradient / dropout.keep).square().mean().sqrt())
            if gradient.numel() >= 100 and spread > 0:  # with fewer values an area is noise
                areas.setdefault(name, []).append(metrics.decoy_auc(gradient, sent[name], dropout.keep, spread))
    return {"auc": {name: round(statistics.fmean(values), 4) for name, values in areas.items()}}


def cases(parts: list[str]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    if "training" in parts:
        for rate, specs in CONFIG["rates"].items():
            for spec in specs:
                yield (
                    f"training at {rate}, {spec}",
                    lambda spec=spec, rate=rate: trained(gradveil.defense(spec), float(rate)),
                )
    if "attacks" in parts:
        yield "blind guess", guessed
        for spec in CONFIG["attacks"]["defenses"]:
            for attack in CONFIG["attacks"]["attacks"]:
                yield f"attack {attack} on {spec}", lambda spec=spec, attack=attack: attacked(spec, attack)
    if "decoys" in parts:
        for spec in CONFIG["dropouts"]:
            for model in ("lenet:init=uniform", "lenet", "mnist-cnn"):
                yield f"decoys of {spec} on {model}", lambda spec=spec, model=model: decoys(spec, model)
    if "liars" in parts:
        rate = CONFIG["liars"]["rate"]
        for count in CONFIG["liars"]["of_ten"]:
            yield (
                f"training at {rate}, aligned-dual-pruning+error-feedback, {count} of 10 lying",
                lambda count=count: trained(gradveil.ErrorFeedback(LyingPublisher(count)), rate),
            )


def main() -> None:
    torch.set_num_threads(1)
    results = HERE / "results.jsonl"
    done = {json.loads(line)["case"] for line in results.read_text().splitlines()} if results.exists() else set()
    for name, work in cases(sys.argv[1:] or ["training", "attacks", "decoys", "liars"]):
        if name in done:
            continue
        row = {"case": name, "gradveil": gradveil.__version__, "torch": torch.__version__, **work()}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(name, {key: value for key, value in row.items() if key not in ("psnr", "ssim", "history")}, flush=True)


if __name__ == "__main__":
    main()
