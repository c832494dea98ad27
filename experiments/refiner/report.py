"""Tables (tables.md) and pictures (curve.png, blended_start.png) of what run.py has measured so far.

GRADVEIL_DATA=/path/to/data python experiments/refiner/report.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import torch
from matplotlib import pyplot as plt
from run import CONFIG, HERE, RESULTS, build, dataset

import gradveil
from gradveil import metrics
from gradveil.registry import parse_spec

Row = dict[str, Any]
ATTACK_NAMES = {"idlg": "iDLG", "ig": "IG"}
ABLATIONS = {
    "balance (the paper's beta, table 5)": ("balance", [0, 1e-5, 0.001, 0.01, 0.1, 1, 10, 100, 1000]),
    "iterations (table 6)": ("iterations", [5, 10, 15, 20]),
    "blend (alpha, table 7)": ("blend", [0, 0.1, 0.3, 0.5, 0.7, 0.9]),
    "decay (tau, table 8)": ("decay", [0.91, 0.93, 0.95, 0.97, 1]),
}
FIGURE_5_IMAGES = 6


def rows() -> dict[str, Row]:
    return {row["name"]: row for row in map(json.loads, RESULTS.read_text().splitlines())}


def private(row: Row) -> bool:
    """The paper's thresholds."""
    return row["psnr"] < 15 and row["ssim"] < 0.5 and row["noise_ratio"] > 0.4


def percent(pmm: float | None) -> str:
    return "" if pmm is None else f"{100 * pmm:.0f} %"


def network(model: str) -> str:
    settings = CONFIG["models"][model]
    return f"{settings['model']}{' on normalised images' if 'mean' in settings else ''}"


def strength(row: Row) -> tuple[str, str, float]:
    """Undefended first; a defense's rows together, attack by attack, the parameter rising."""
    name, parameters = parse_spec(row["defense"])
    return "" if name == "none" else name, row["attack"], next(iter(parameters.values()), 0.0)


def curve_table(found: dict[str, Row], model: str) -> list[str]:
    lines = [
        f"## {network(model)}: protection against cost",
        "",
        "| defense | distance | distance / norm of g | attack | PSNR dB | SSIM | LPIPS | noise ratio | private | PMM |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    mine = [
        row
        for row in found.values()
        if row["kind"] == "attack" and row["model"] == model
        if "," not in row["defense"] and "without" not in row["defense"]
    ]
    for row in sorted(mine, key=strength):
        trained = found.get(f"training/{model}/{row['defense']}")
        lines.append(
            f"| {row['defense']} | {row['distance']:.4g} | {100 * row['relative_distance']:.3g} % "
            f"| {ATTACK_NAMES[row['attack']]} | {row['psnr']:.1f} | {row['ssim']:.2f} "
            f"| {row.get('lpips', float('nan')):.3f} | {row['noise_ratio']:.2f} | {'yes' if private(row) else 'no'} "
            f"| {percent(trained and trained['pmm'])} |"
        )
    return [*lines, "", *smallest(found, model), ""]


def smallest(found: dict[str, Row], model: str) -> list[str]:
    lines = []
    for attack, title in ATTACK_NAMES.items():
        mine = [
            (parse_spec(row["defense"])[1]["epsilon"], row)
            for row in found.values()
            if row["kind"] == "attack" and row["model"] == model and row.get("attack") == attack
            if row["defense"].startswith("refiner:") and "," not in row["defense"]
        ]
        good = sorted((epsilon, row["gradient_norm"]) for epsilon, row in mine if private(row))
        if good:
            epsilon, norm = good[0]
            lines.append(
                f"{title}: private (PSNR < 15, SSIM < .5, noise ratio > .4) from epsilon = {epsilon:g}, "
                f"{100 * epsilon / norm:.2g} % of the median norm {norm:.3g}."
            )
        elif mine:
            lines.append(f"{title}: not private at any epsilon measured.")
    return lines


def adaptive_table(found: dict[str, Row]) -> list[str]:
    lines = [
        "## Attackers who know the defense",
        "",
        "Appendix M of the paper is solve-gradient.",
        "",
        "| model | defense | attack | plain PSNR | SSIM | solve-gradient PSNR | SSIM | undo-blend PSNR | SSIM |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    keys = sorted(
        {
            (r["model"], r["attack"], r["defense"])
            for r in found.values()
            if r["kind"] in ("undo-blend", "solve-gradient")
        }
    )
    for model, attack, defense in keys:
        cells = []
        for kind in ("attack", "solve-gradient", "undo-blend"):
            row = found.get(f"{kind}/{model}/{attack}/{defense}")
            cells += [f"{row['psnr']:.1f}", f"{row['ssim']:.2f}"] if row else ["", ""]
        lines.append(f"| {model} | {defense} | {ATTACK_NAMES[attack]} | {' | '.join(cells)} |")
    return [*lines, ""]


def ablation_tables(found: dict[str, Row], model: str, epsilon: float) -> list[str]:
    lines = [f"## Ablations on {network(model)}, epsilon = {epsilon:g}, inverting-gradients", ""]
    default = f"refiner:epsilon={epsilon:g}"
    defaults = gradveil.defense(default).parameters

    def line(label: str, defense: str) -> list[str]:
        row, trained = found.get(f"attack/{model}/ig/{defense}"), found.get(f"training/{model}/{defense}")
        if row is None:
            return []
        return [
            f"| {label} | {row['psnr']:.2f} | {row['ssim']:.2f} | {row['noise_ratio']:.2f} | {row['robust_psnr']:.2f} "
            f"| {row['robust_noise_ratio']:.2f} | {row['distance']:.4g} | {percent(trained and trained['pmm'])} |"
        ]

    def table(title: str, body: list[str]) -> list[str]:
        head = f"| {title} | PSNR dB | SSIM | noise ratio | x*: PSNR | x*: D | distance | PMM |"
        return [head, "|---|---|---|---|---|---|---|---|", *body, ""]

    for title, (parameter, values) in ABLATIONS.items():
        body = []
        for value in values:
            spec = default if value == defaults[parameter] else f"{default},{parameter}={value:g}"
            body += line(f"{value:g}", spec)
        lines += table(title, body)
    unweighted = default.replace("refiner", "refiner-without-element-weights")
    body = line("with", default) + line("without", unweighted)
    body += line("with, balance 0", f"{default},balance=0") + line("without, balance 0", f"{unweighted},balance=0")
    return lines + table("element weights (table 10)", body)


def draw_curve(found: dict[str, Row]) -> None:
    """Figure 6 of the paper: accuracy kept against what the attack recovers, one line a defense."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, (attack, title) in zip(axes, ATTACK_NAMES.items(), strict=True):
        lines: dict[str, list[tuple[float, float, str]]] = {}
        for row in found.values():
            trained = found.get(f"training/normalised/{row['defense']}")
            if row["kind"] == "attack" and row["model"] == "normalised" and row["attack"] == attack and trained:
                name, parameters = parse_spec(row["defense"])
                if len(parameters) <= 1 and "without" not in name and trained["pmm"] is not None:
                    label = ", ".join(f"{value:g}" for value in parameters.values())
                    lines.setdefault(name, []).append((100 * trained["pmm"], row["psnr"], label))
        for name, points in lines.items():
            points.sort(key=lambda point: -point[1])
            axis.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=name)
            for pmm, psnr, label in points:
                axis.annotate(label, (pmm, psnr), textcoords="offset points", xytext=(4, 4), fontsize=7)
        axis.axhline(15, color="grey", linewidth=0.7, linestyle="--")
        axis.set(title=title, xlabel="PMM, % (right is better)")
    axes[0].set_ylabel("PSNR of the reconstruction, dB (low is better)")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(HERE / "curve.png", dpi=110)


def draw_blended_start() -> None:
    """Figure 5 of the paper: a search from the image itself fools the network, from a blend with noise it does not."""
    images, labels = dataset().test.batch(range(FIGURE_5_IMAGES))
    columns = [("image", images)]
    for blend in (0.0, 0.5):
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
        memory: dict[str, torch.Tensor] = {}
        gradveil.defense("refiner", blend=blend).share(
            build("gelu"), images, labels, generator=generator, memory=memory
        )
        if blend:
            columns.append((f"start, blend {blend:g}", torch.lerp(images, noise, blend)))
        columns.append((f"robust data, blend {blend:g}", memory["trained_on"]))
    figure, axes = plt.subplots(len(columns), FIGURE_5_IMAGES, figsize=(1.6 * FIGURE_5_IMAGES, 1.9 * len(columns)))
    for line, (title, shown) in zip(axes, columns, strict=True):
        psnr, seen = metrics.psnr(images, shown), metrics.noise_ratio(shown)
        for place, axis in enumerate(line):
            axis.imshow(shown[place].permute(1, 2, 0).numpy())
            quality = "" if shown is images else f"{psnr[place]:.1f} dB, "
            axis.set_title(f"{quality}D {seen[place]:.2f}", fontsize=8)
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "blended_start.png", dpi=90)


def main() -> None:
    torch.set_num_threads(1)
    found = rows()
    lines = [
        "# Refiner on CIFAR-10",
        "",
        f"Medians over {CONFIG['victims']} single test images at the initial weights; written by report.py from "
        "results.jsonl. Distance is that of the shared gradient from the victim's own.",
        "",
    ]
    for model in CONFIG["models"]:
        if any(row["model"] == model and row["kind"] == "attack" for row in found.values()):
            lines += curve_table(found, model)
    lines += adaptive_table(found)
    lines += ablation_tables(found, "uniform", 10) + ablation_tables(found, "normalised", 0.9)
    Path(HERE / "tables.md").write_text("\n".join(lines))
    print("\n".join(lines))
    draw_curve(found)
    draw_blended_start()


if __name__ == "__main__":
    main()
