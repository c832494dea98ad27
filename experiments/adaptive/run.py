"""What an attacker gains who has read the defense's code: plain and adaptive, for every defense, on CIFAR-10.

    GRADVEIL_DATA=/path/to/data python experiments/adaptive/run.py [--only TEXT] [SETTING ...]   # goes on where it was
    python experiments/adaptive/run.py --table [SETTING ...]

The settings are those of config.json; default: all. Results are appended to results.jsonl, one line a case (a defense,
an attack, one kind of attacker) with one figure a victim; nothing there is ever edited. Labels are known to both
attackers, so that a defense which hides the label does not make up the gain; cases with inferred labels are apart.
Where a case is another one by construction (nothing to know about the defense; all labels inferred rightly), its
figures are that one's, and `same_as` says so.

Seed 1 on purpose: the forms and their constants were chosen by looking at the first four victims of seed 0.

With several rounds, the server takes a step along the mean of the victims' updates after each, and the attackers see
every round of their victim.
"""

import argparse
import json
import math
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
from gradveil.attacks.labels import infer_labels
from gradveil.audit.run import choose_execution
from gradveil.audit.statistics import paired_difference
from gradveil.defenses.knowledge import NOTHING_TO_KNOW
from gradveil.federation.job import as_batch, split_public
from gradveil.modality import IMAGE
from gradveil.randomness import derived_generator
from gradveil.registry import parse_spec

HERE = Path(__file__).parent
CONFIG: dict[str, Any] = json.loads((HERE / "config.json").read_text())
SEED = CONFIG["seed"]
METRICS = ("psnr", "ssim", "lpips")
FIGURES = (*METRICS, "labels_right", "loss")
PLAIN = next(iter(NOTHING_TO_KNOW))
BLIND = "blind-guess"
INTRODUCTION = """Written by `run.py --table > README.md` from results.jsonl.
CIFAR-10, single images at the initial weights; median PSNR in dB / SSIM / LPIPS over the victims. Gains are medians of
the paired differences in PSNR with their bootstrap interval (of few victims: each difference); one that is
significantly negative would be bold. The blind guess is the public mean image of the class, which needs no gradient.
What the forms are: [adaptive attackers](../../docs/adaptive-attackers.md)."""
Row = dict[str, Any]


@cache
def dataset() -> data.Dataset:
    return data.load(CONFIG["dataset"])


def build(spec: str) -> gradveil.Task:
    name, parameters = parse_spec(spec)
    shape, classes = dataset().train.input_shape, len(dataset().classes)
    model = models.create(name, input_shape=shape, classes=classes, seed=SEED, **parameters)
    return gradveil.Task(model, input_shape=shape, classes=classes)


def observe(
    task: gradveil.Task, defense: gradveil.Defense, images: Tensor, labels: Tensor, rounds: int
) -> list[gradveil.Rounds]:
    """What the server sees of every victim in its first rounds."""
    memories: list[dict[str, Tensor]] = [{} for _ in images]
    seen: list[list[tuple[gradveil.Task, gradveil.Update]]] = [[] for _ in images]
    for number in range(rounds):
        updates = []
        for victim, batch in enumerate(zip(images[:, None], labels[:, None], strict=True)):

            def generator(purpose: str, victim: int = victim, number: int = number) -> torch.Generator:
                return derived_generator(SEED, purpose, victim, number)

            memory = memories[victim]
            public = defense.announce(task, *batch, generator=generator("announce"), memory=memory)
            update = defense.share(task, *batch, generator=generator("share"), memory=memory, announced=public)
            seen[victim].append((task, defense.visible([update])[0]))
            updates.append(update)
        mean = defense.aggregate(updates)
        stepped = {name: value - CONFIG["server_lr"] * mean[name] for name, value in task.parameters.items()}
        task = task.with_parameters(stepped)
    return [gradveil.Rounds(each) for each in seen]


def attack(case: Row, victims: int, done: dict[tuple[Any, ...], Row]) -> Row:
    setting = CONFIG["settings"][case["setting"]]
    defense = gradveil.defense(case["defense"])
    places, _ = split_public(dataset().train, SEED)
    task = build(setting["model"])
    public = as_batch(task, dataset().train.batch(places[: CONFIG["public_images"]]))
    defense, task = defense.prepare(task, public=public, generator=derived_generator(SEED, "prepare"))
    order = torch.randperm(len(dataset().test), generator=derived_generator(SEED, "victims"))[:victims]
    images, labels = as_batch(task, dataset().test.batch(order))
    if case["attack"] == BLIND:
        split = dataset().train
        guess = IMAGE.blind(split.inputs[places], split.targets[places], labels, classes=task.classes)
        return measured(images, labels, guess[:, None], labels[:, None])
    seen = observe(task, defense, images, labels, case["rounds"])
    known = {"labels": "known", "known_labels": labels[:, None]} if case["labels"] == "known" else {}
    forms = defense.adapt(task)
    named: Row = {}
    if case["adaptive"]:
        name = next(iter(forms), "expectation") if case["adaptive"] is True else case["adaptive"]
        named = {"form": name, "summary": forms[name].summary if name in forms else ""}
    if twin := same_by_construction(case, named, task, seen, labels):
        row = done[key(twin)]
        same_as = {name: twin[name] for name in twin if twin[name] != case[name]}
        return {**{name: row[name] for name in FIGURES}, **named, "same_as": same_as}
    found = gradveil.attack(setting["attacks"][case["attack"]]).reconstruct(
        task,
        seen,
        gradveil.ThreatModel(adaptive=case["adaptive"], defense=defense, rounds=case["rounds"], **known),
        generator=derived_generator(SEED, "attack"),
        execution=choose_execution(task, 1),
    )
    loss = [float(f"{value:.4g}") for value in found.loss.tolist()]
    return {**measured(images, labels, found.inputs, found.labels), "loss": loss, **named}


def measured(images: Tensor, labels: Tensor, found: Tensor, guessed: Tensor) -> Row:
    rows = [
        metrics.Scorer().score(image[None], inputs.float(), label[None], guess, None)
        for image, inputs, label, guess in zip(images, found, labels, guessed, strict=True)
    ]
    figures: Row = {m: [None if row[m] is None else round(row[m], 4) for row in rows] for m in METRICS}
    return {**figures, "labels_right": sum(row["label_correct"] for row in rows)}


def same_by_construction(
    case: Row, named: Row, task: gradveil.Task, seen: list[gradveil.Rounds], labels: Tensor
) -> Row | None:
    """The case, run before, whose attack is this one's to the last step; None if there is none."""
    if named.get("form") == PLAIN:
        return {**case, "adaptive": False}
    if case["labels"] == "infer":
        inferred = [infer_labels(task, rounds[0][1], 1).labels for rounds in seen]
        if torch.cat(inferred).equal(labels):
            return {**case, "labels": "known"}
    return None


def blind(setting: str) -> Row:
    return {"setting": setting, "defense": "none", "attack": BLIND, "adaptive": False, "labels": "known", "rounds": 1}


def cases(settings: list[str]) -> Iterator[Row]:
    """First the comparison itself, then what stands apart from it."""
    for setting in settings:
        config = CONFIG["settings"][setting]
        yield blind(setting)
        pairs = [
            {"setting": setting, "defense": defense, "attack": name}
            for defense in config["defenses"]
            for name in config["attacks"]
        ]
        for pair in pairs:
            for adaptive in (False, True, *config.get("forms", {}).get(pair["defense"], [])):
                yield {**pair, "adaptive": adaptive, "labels": "known", "rounds": 1}
        for pair in pairs:
            if pair["attack"] in config.get("inferred_labels", []):
                for adaptive in (False, True):
                    yield {**pair, "adaptive": adaptive, "labels": "infer", "rounds": 1}
        for pair in pairs:
            if pair["attack"] in config.get("rounds", {}):
                for adaptive in (False, True):
                    rounds = config["rounds"][pair["attack"]]
                    yield {**pair, "adaptive": adaptive, "labels": "known", "rounds": rounds}


def key(row: Row) -> tuple[Any, ...]:
    return tuple(str(row[name]) for name in ("setting", "defense", "attack", "adaptive", "labels", "rounds"))


def read(results: Path) -> dict[tuple[Any, ...], Row]:
    lines = results.read_text().splitlines() if results.exists() else []
    return {key(row): row for row in map(json.loads, lines)}


def gain(adaptive: Row, plain: Row) -> str:
    """PSNR that the adaptive attacker has more, paired by victim; bold if it is significantly less."""
    found = paired_difference(dict(enumerate(adaptive["psnr"])), dict(enumerate(plain["psnr"])))
    assert found is not None
    if not math.isfinite(found.low):  # too few victims
        return ", ".join(f"{a - b:+.1f}" for a, b in zip(adaptive["psnr"], plain["psnr"], strict=True))
    text = f"{found.estimate:+.1f} ({found.low:+.1f} to {found.high:+.1f})"
    return f"**{text}**" if found.high < 0 else text


def medians(row: Row) -> str:
    values = [None if None in row[metric] else statistics.median(row[metric]) for metric in METRICS]
    pairs = zip(values, (1, 2, 2), strict=True)
    return " / ".join("–" if value is None else f"{value:.{digits}f}" for value, digits in pairs)


def table(results: Path, settings: list[str]) -> str:
    """Markdown: a section for each setting, labels and number of rounds; plain and adaptive attacker side by side."""
    done, lines = read(results), ["# What an attacker gains who knows the defense", "", INTRODUCTION]
    head = None
    for case in cases(settings):
        plain, adaptive = done.get(key({**case, "adaptive": False})), done.get(key(case))
        if plain is None or adaptive is None or not case["adaptive"]:
            continue
        labels = "known" if case["labels"] == "known" else "inferred"
        section = f"{case['setting']}: labels {labels}, {case['rounds']} round{'s' if case['rounds'] > 1 else ''}"
        if section != head:
            head = section
            lines += ["", f"## {section}", ""]
            if guess := done.get(key(blind(case["setting"]))):
                lines += [f"Blind guess: {medians(guess)}.", ""]
            lines.append("| defense | attack | plain | adaptive | form | gain, dB (95 %) |")
            lines.append("|---" * 6 + "|")
            if labels == "inferred":
                lines[-2] = lines[-2].removesuffix("|") + "| labels right |"
                lines[-1] += "---|"
        cells = [case["defense"].replace("|", " or "), case["attack"], medians(plain), medians(adaptive)]
        cells += [adaptive["form"], gain(adaptive, plain)]
        if labels == "inferred":
            cells.append(f"{adaptive['labels_right']:.0f} of {len(adaptive['psnr'])}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=list(CONFIG["settings"]))
    parser.add_argument("--only", default="", help="run the cases whose JSON holds this text")
    parser.add_argument("--table", action="store_true", help="print what there is and run nothing")
    parser.add_argument("--victims", type=int, help="fewer victims, for a trial; needs --results")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    arguments = parser.parse_args()
    if arguments.victims and arguments.results == HERE / "results.jsonl":
        parser.error("a trial with other victims must not go into results.jsonl; give --results")
    if arguments.table:
        print(table(arguments.results, arguments.settings))
        return
    torch.set_num_threads(1)
    for case in cases(arguments.settings):
        done = read(arguments.results)
        if key(case) in done or arguments.only not in json.dumps(case):
            continue
        started = time.perf_counter()
        result = attack(case, arguments.victims or CONFIG["settings"][case["setting"]]["victims"], done)
        row = {**case, "seed": SEED, "gradveil": gradveil.__version__, **result}
        row["seconds"] = round(time.perf_counter() - started, 1)
        with arguments.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({**case, "median_psnr": statistics.median(row["psnr"]), "s": row["seconds"]}), flush=True)


if __name__ == "__main__":
    main()
