"""Print the results as tables and draw docs/tradeoff.png: python experiments/sensitivity/plot.py."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
KINDS = ("tradeoff", "bound", "risk", "compensation", "slicing")
FAMILIES = {
    "top-k": "o",
    "optimal-pruning": "s",
    "gaussian-noise": "^",
    "optimal-noise": "D",
    "none": "*",
}


def table(rows: list[dict], columns: dict[str, str]) -> None:
    for row in rows:
        words = [
            f"{title} {row[key]:.4g}" if isinstance(row[key], float) else f"{title} {row[key]}"
            for key, title in columns.items()
        ]
        print(f"{row['name']:52} " + ", ".join(words))
    print()


def main() -> None:
    rows = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines()]
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    print("mnist-cnn, IG on 4 batches of 16, 200 rounds of 4 clients x 16")
    columns = {"defense": "", "mse": "MSE", "psnr": "PSNR", "u1": "U1", "u2": "U2", "data_information": "tr J_F"}
    table(kinds["tradeoff"], columns | {"train_loss": "training loss", "test_accuracy": "accuracy"})
    table(kinds["bound"], {"std": "std", "bound_mse": "bound", "mean_mse": "measured"})
    table(kinds["risk"], {"same_ranking": "same ranking", "largest_relative_error": "largest error", "ranking": ""})
    compensated = {"distance": "distance", "cosine": "cosine", "paper": "with the paper's variance"}
    table(kinds["compensation"], {"energy_left": "noise energy left"} | compensated)
    attacks = [key for key in (kinds["slicing"] or [{}])[0] if key.startswith(("idlg", "inverting"))]
    table(kinds["slicing"], {"accuracy": "accuracy", "round_seconds": "s a round"} | {key: key for key in attacks})

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for row in kinds["tradeoff"]:
        family = row["defense"].partition(":")[0]
        where = 0 if family in ("none", "top-k", "optimal-pruning") else 1
        for axis in axes if family == "none" else axes[where : where + 1]:
            axis.plot(row["mse"], row["train_loss"], FAMILIES[family], color=f"C{list(FAMILIES).index(family)}")
            label = row["name"].removeprefix("tradeoff ")
            axis.annotate(label, (row["mse"], row["train_loss"]), fontsize=7, xytext=(4, 3), textcoords="offset points")
    for axis, title in zip(axes, ("pruning", "noise"), strict=True):
        axis.set(
            title=title, xlabel="MSE of IG (further right: better protected)", ylabel="training loss after 200 rounds"
        )
        axis.margins(x=0.25)
    figure.savefig(HERE.parents[1] / "docs" / "tradeoff.png", dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
