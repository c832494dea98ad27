"""The baselines on CIFAR-10: what three attacks recover under each, and what each costs in accuracy.

    GRADVEIL_DATA=/path/to/data python experiments/baselines/run.py [attacks|training]   # goes on where it stopped
    python experiments/baselines/run.py table                                            # the table of README.md

Results are appended to results.jsonl, one line a case; nothing there is ever edited. "against" says what a
reconstruction was compared with: the raw image, or the image the client truly trained on (ATS).
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradveil
from gradveil import data, metrics, models
from gradveil.audit.run import choose_execution
from gradveil.data import Dataset
from gradveil.federation import Training, train
from gradveil.federation.job import as_batch, split_public
from gradveil.modality import IMAGE
from gradveil.randomness import derived_generator
from gradveil.registry import parse_spec

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
CONFIG: dict[str, Any] = json.loads((HERE / "config.json").read_text())
SEED = CONFIG["seed"]
Row = dict[str, Any]


def rows() -> dict[str, Row]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["case"]: row for row in map(json.loads, lines)}


class Bench:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.dataset: Dataset = data.load(CONFIG["dataset"])
        self.shape = self.dataset.train.input_shape
        self.classes = len(self.dataset.classes)
        self.task = self.build(CONFIG["model"])
        self.tasks = {name: self.build(spec) for name, spec in CONFIG["models"].items()}  # attacks on another network
        public, _ = split_public(self.dataset.train, SEED)
        self.public = as_batch(self.task, self.dataset.train.batch(public))

    def build(self, spec: str, **normalisation: list[float]) -> gradveil.Task:
        name, parameters = parse_spec(spec)
        model = models.create(name, input_shape=self.shape, classes=self.classes, seed=SEED, **parameters)
        return gradveil.Task(model, input_shape=self.shape, classes=self.classes, **normalisation)

    def victims(self, count: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(self.dataset.test), generator=derived_generator(SEED, "victims"))
        return self.dataset.test.batch(order[:count])

    def prepared(self, defense: gradveil.Defense, attack: str = "") -> gradveil.Task:
        task = self.tasks.get(attack, self.task)
        return defense.prepare(task, public=self.public, generator=derived_generator(SEED, "prepare"))

    def score(self, originals: Tensor, found: Tensor, labels: Tensor, guessed: Tensor) -> Row:
        """Per victim; the first axis of every tensor counts victims."""
        scores = [
            metrics.Scorer().score(*victim, None) for victim in zip(originals, found, labels, guessed, strict=True)
        ]
        result: Row = {}
        for metric in ("psnr", "ssim", "lpips"):
            values = [score[metric] for score in scores]
            result[metric] = [None if value is None else round(value, 4) for value in values]
            result[f"median_{metric}"] = None if None in values else round(statistics.median(values), 4)
            result[f"mean_{metric}"] = None if None in values else round(statistics.fmean(values), 4)
        result["label_correct"] = statistics.fmean(score["label_correct"] for score in scores)
        return result

    # -- the cases ---------------------------------------------------------------------------------------------------

    def blind_guess(self) -> Row:
        images, labels = self.victims(CONFIG["victims"])
        public = self.dataset.train
        guess = IMAGE.blind(public.inputs, public.targets, labels, classes=self.classes)
        return self.score(images[:, None], guess[:, None], labels[:, None], labels[:, None])

    def search(self) -> Row:
        defense = gradveil.defense("ats")
        started = time.perf_counter()
        self.prepared(defense)
        return {"policy": "|".join(defense.policies), "seconds": round(time.perf_counter() - started, 1)}

    def attack(self, defense_spec: str, name: str, attack_spec: str) -> Row:
        defense, attack = gradveil.defense(defense_spec), gradveil.attack(attack_spec)
        task = self.prepared(defense, name)
        images, labels = self.victims(CONFIG["victims"])
        memories: list[dict[str, Tensor]] = [{} for _ in images]
        updates = [
            defense.share(task, *batch, generator=derived_generator(SEED, "share", victim), memory=memories[victim])
            for victim, batch in enumerate(zip(images[:, None], labels[:, None], strict=True))
        ]
        row = self.reconstruct(task, attack, updates, images[:, None], labels[:, None])
        if "trained_on" in memories[0]:
            used = torch.stack([memory["trained_on"] for memory in memories])
            row["against_trained_on"] = self.score(used, row["found"], labels[:, None], row["guessed"])
            row["transformed_itself"] = self.score(images[:, None], used, labels[:, None], labels[:, None])
        return {"defense": str(defense), **{k: v for k, v in row.items() if not isinstance(v, Tensor)}}

    def reconstruct(
        self,
        task: gradveil.Task,
        attack: gradveil.Attack,
        updates: list[gradveil.Update],
        images: Tensor,
        labels: Tensor,
    ) -> Row:
        found = attack.reconstruct(
            task,
            updates,
            gradveil.ThreatModel(batch_size=images.shape[1]),
            generator=derived_generator(SEED, "attack"),
            execution=choose_execution(task, images.shape[1]),
        )
        inputs = found.inputs.float()
        return {
            "attack": str(attack),
            **self.score(images, inputs, labels, found.labels),
            "loss": [float(f"{value:.4g}") for value in found.loss.tolist()],
            "execution": found.execution,
            "seconds": round(found.seconds, 1),
            "found": inputs,
            "guessed": found.labels,
        }

    def secure_aggregation(self, clients: int, attack_spec: str) -> Row:
        """Every client holds one image; the attacker sees the sum of `clients` of them."""
        defense, attack = gradveil.defense("secure-aggregation"), gradveil.attack(attack_spec)
        images, labels = self.victims(CONFIG["secure_aggregation"]["images"])
        updates = [
            defense.share(self.task, image[None], label[None]) for image, label in zip(images, labels, strict=True)
        ]
        sums = [defense.visible(updates[first : first + clients])[0] for first in range(0, len(updates), clients)]
        groups = (len(sums), clients)
        row = self.reconstruct(self.task, attack, sums, images.view(*groups, *self.shape), labels.view(groups))
        return {"defense": str(defense), "clients": clients} | {
            k: v for k, v in row.items() if not isinstance(v, Tensor)
        }

    def train(self, defense_spec: str) -> Row:
        defense = gradveil.defense(defense_spec)
        settings = CONFIG["trained_model"]
        task = self.build(settings["model"], mean=3 * [settings["mean"]], std=3 * [settings["std"]])
        result = train(task, self.dataset, defense, Training(**CONFIG["training"], evaluate_every=100, seed=SEED))
        return {
            "defense": str(defense),
            "accuracy": round(result.accuracy, 4),
            "loss": round(result.loss, 4),
            "history": result.history,
            "round_seconds": round(result.round_seconds, 4),
            "upload_bytes": result.upload_bytes,
            "diverged": result.diverged,
            "privacy": None if result.privacy is None else str(result.privacy),
        }


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Every case by name, in the order in which they run; ATS uses the policy that the search found."""
    attacks, defenses = CONFIG["attacks"], CONFIG["defenses"]
    parts = sys.argv[1:] or ["attacks", "training"]
    if "attacks" in parts:
        yield "blind guess", bench.blind_guess
        yield "ats search", bench.search
        for name, attack in CONFIG["undefended_only"].items():
            yield f"{name} against none", partial(bench.attack, "none", name, attack)
        for name, attack in attacks.items():
            for label, spec in defenses.items():
                yield f"{name} against {label}", partial(bench.attack, with_policy(spec), name, attack)
            if name in CONFIG["muted_attacks"]:
                for label, layers in CONFIG["muted"].items():
                    muted = partial(bench.attack, defenses[label], name, f"{attack},mute={layers}")
                    yield f"{name} muted against {label}", muted
        secure = CONFIG["secure_aggregation"]
        for clients in secure["clients"]:
            for name in secure["attacks"]:
                case = f"{name} against the sum of {clients}"
                yield case, partial(bench.secure_aggregation, clients, attacks[name])
    if "training" in parts:
        for label, spec in defenses.items():
            # Exact Soteria scores of 320 images a round would take two hours; estimated ones rank almost alike.
            trained = CONFIG["trained_as"].get(label, with_policy(spec))
            yield f"training under {label}", partial(bench.train, trained)


def with_policy(spec: str) -> str:
    return f"ats:policy={rows()['ats search']['policy']}" if spec == "ats" else spec


ANALYTIC = {
    "R-gap": ("r-gap on cnn6, 1 logits", ("lpips", "ssim", "median_psnr")),
    "Rob": ("robbing-the-fed:bins=128 on resnet18", ("lpips", "min_lpips", "ssim", "max_ssim", "median_psnr")),
}
"""Rows of the table that experiments/analytic_attacks has measured: how its cases begin, and what is shown of them."""


def analytic_rows(columns: list[str]) -> Iterator[str]:
    path = HERE.parent / "analytic_attacks" / "results.jsonl"
    done = {row["case"]: row for row in map(json.loads, path.read_text().splitlines())}
    spec_of = {"none": "none", "ATS-R": "ats", "ATS-T": "ats", "Soteria": "soteria:rate=0.8", "PRECODE": "precode"}
    spec_of |= {"noise": "gaussian-noise:std=0.01", "top-k": "top-k:keep=0.2", "Outpost": "outpost"}
    spec_of |= {"DGP": "dual-pruning"}
    for title, (case, keys) in ANALYTIC.items():
        found = [done.get(f"{case}, {spec_of.get(column)}") for column in columns]
        found[0] = done.get("blind guess beside resnet18") if title == "Rob" else None
        at_r = columns.index("ATS-R")
        found[at_r] = found[at_r] and found[at_r]["against_trained_on"]
        for key in keys:
            texts = ["–" if row is None else f"{row[key]:.3g}" for row in found]
            yield f"| {title} | {key.replace('_', ' ').replace('psnr', 'PSNR')} | " + " | ".join(texts) + " |"


def table() -> str:
    """Rows and columns of table 1 of the Dual Gradient Pruning paper, as far as there are results."""
    done = rows()
    blind = done["blind guess"]
    columns = ["blind guess", "none", "ATS-R", "ATS-T", "Soteria", "PRECODE", "noise", "top-k", "Outpost", "DGP"]
    lines = ["| attack | metric | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]

    def cell(attack: str, column: str) -> Row | None:
        if column == "blind guess":
            return blind
        row = done.get(f"{attack} against {column.split('-')[0] if column.startswith('ATS') else column}")
        return row["against_trained_on"] if row and column == "ATS-R" else row

    for attack in CONFIG["attacks"]:
        for metric in ("lpips", "ssim", "psnr"):
            found = [cell(attack, column) for column in columns]
            texts = ["–" if row is None else f"{row[f'mean_{metric}']:.3g}" for row in found]
            lines.append(f"| {attack} | {metric.upper()} | " + " | ".join(texts) + " |")
    lines += analytic_rows(columns)
    accuracies = [
        done.get(f"training under {'ATS' if column.startswith('ATS') else column}", {}).get("accuracy")
        for column in columns
    ]
    texts = ["–" if accuracy is None else f"{100 * accuracy:.1f} %" for accuracy in accuracies]
    lines.append("| | accuracy | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def main() -> None:
    if "table" in sys.argv:
        print(table())
        return
    bench = Bench()
    for case, work in cases(bench):
        if case in rows():
            continue
        row = {"case": case, "seed": SEED, "gradveil": gradveil.__version__, **work()}
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        figures = {k: v for k, v in row.items() if k.startswith("median") or k in ("accuracy", "seconds", "policy")}
        print(f"{case}: {figures}", flush=True)


if __name__ == "__main__":
    main()
