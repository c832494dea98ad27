"""Draw docs/curves.png from results.jsonl: accuracy by round under each defense.

python experiments/federation/plot.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

HERE = Path(__file__).parent
PANELS = {
    "mnist-two-classes": "MNIST, 100 clients, 10 a round, two classes each",
    "cifar10-1000-clients-long": "CIFAR-10, 1,000 clients, 200 a round",
}
COLOURS = {
    "none": "black",
    "dual-pruning:k1=0.05,k2=0.75": "#e07b6a",
    "dual-pruning:k1=0.05,k2=0.75+error-feedback": "#b8321a",
    "aligned-dual-pruning+error-feedback": "#8a5a00",
    "gradient-dropout": "#0b6b62",
    "risk-slicing": "#7b3fa0",
    "optimal-noise": "#3b5bb5",
    "refiner": "#c2185b",
    "dp-sgd:clip=1.0,noise_multiplier=1.0": "#1b8a3a",
}
OTHERS = "#b9bec4"


def main() -> None:
    rows = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 4.8), layout="constrained")
    for panel, (setting, title) in zip(axes, PANELS.items(), strict=True):
        shown = [row for row in rows if row["setting"] == setting]
        for row in sorted(shown, key=lambda row: row["defense"] in COLOURS):  # those in colour on top
            spec = row["defense"]
            rounds, accuracies = zip(*row["history"], strict=True)
            colour, width = (COLOURS[spec], 2) if spec in COLOURS else (OTHERS, 1)
            panel.plot(rounds, accuracies, color=colour, linewidth=width)
        panel.set_title(title, fontsize=11)
        panel.set_xlabel("round")
        panel.yaxis.set_major_formatter("{x:.0%}")
        panel.spines[["top", "right"]].set_visible(False)
    lines = [Line2D([], [], color=colour, linewidth=2, label=spec) for spec, colour in COLOURS.items()]
    lines.append(Line2D([], [], color=OTHERS, label="the others"))
    figure.legend(handles=lines, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    axes[0].set_ylabel("accuracy on the test images")
    path = HERE.parent.parent / "docs" / "curves.png"
    figure.savefig(path, dpi=110)
    print(path)


if __name__ == "__main__":
    main()
