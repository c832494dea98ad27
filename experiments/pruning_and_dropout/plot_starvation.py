"""Draw docs/starvation.png: which coordinates dual pruning with error feedback sends, and what it holds back.

    python experiments/pruning_and_dropout/plot_starvation.py

A made-up gradient of 2,000 values that stays the same but for noise of twice its spread, 400 rounds, one client.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt

import gradveil

VALUES, ROUNDS, PATIENCE = 2000, 400, 50
LINES = {
    "without error feedback": "dual-pruning",
    "error feedback as published": "dual-pruning+error-feedback",
    "error feedback, decay=0.9": "dual-pruning+error-feedback:decay=0.9",
    "error feedback, clip=0.75": "dual-pruning+error-feedback:clip=0.75",
}


def play(spec: str) -> tuple[list[float], list[float], float]:
    """By round: % of coordinates that starve and the residual's energy; and the cosine of all sent to all wanted."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(VALUES, generator=generator) * torch.rand(VALUES, generator=generator)
    defense, memory = gradveil.defense(spec), {}
    sent, wanted, last_sent = torch.zeros(VALUES), torch.zeros(VALUES), torch.zeros(VALUES)
    starving, energy = [], []
    for number in range(1, ROUNDS + 1):
        gradient = base + 2 * base.std() * torch.randn(VALUES, generator=generator)
        update = defense.perturb({"w": gradient}, memory=memory)["w"]
        sent, wanted = sent + update, wanted + gradient
        last_sent[update != 0] = number
        starving.append(100 * float((number - last_sent > PATIENCE).float().mean()))
        energy.append(float(memory.get("residual/w", torch.zeros(1)).square().sum() / base.square().sum()))
    return starving, energy, float(torch.cosine_similarity(sent, wanted, dim=0))


def main() -> None:
    figure, (hungry, held) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for label, spec in LINES.items():
        starving, energy, cosine = play(spec)
        hungry.plot(range(1, ROUNDS + 1), starving, label=f"{label} (cosine {cosine:.2f})")
        held.semilogy(range(1, ROUNDS + 1), [value or float("nan") for value in energy], label=label)
    hungry.set(xlabel="round", ylabel=f"coordinates not sent for {PATIENCE} rounds, %", ylim=(-0.2, 10))
    hungry.axhline(5, linestyle=":", color="grey")
    hungry.text(ROUNDS, 5.1, "k1, the share pruned at the top", ha="right", color="grey")
    hungry.legend(title="and the cosine of all sent to all wanted", loc="upper left")
    held.set(xlabel="round", ylabel="energy held back / energy of the gradient")
    held.legend()
    for axes in (hungry, held):
        axes.grid(alpha=0.3)
    figure.savefig(Path(__file__).parents[2] / "docs" / "starvation.png", dpi=110)


if __name__ == "__main__":
    main()
