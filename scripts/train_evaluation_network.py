"""Train and score the evaluation network that comes with gradveil.

    GRADVEIL_DATA=folder python scripts/train_evaluation_network.py            # train, write the weights, score
    GRADVEIL_DATA=folder python scripts/train_evaluation_network.py --score    # score the existing weights

An interrupted training continues from its last checkpoint. Every step has its own generator, so the result is the same.
The scores are printed as the table of src/gradveil/models/evaluation.md.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn import functional as F

from checkpoints import restore, save
from gradveil import data
from gradveil.core.randomness import derived_generator
from gradveil.models.evaluation import WEIGHTS, EvaluationNetwork

SEED = 0
STEPS = 3000
BATCH = 128
PEAK_LR = 1e-3
TRAIN_SETS = ("cifar100", "bccd", "fashion-mnist", "mnist", "mednist")
# Data sets never trained on; their test images are scored at this size.
LEFT_OUT = (("cifar10", 32), ("pneumonia", 28), ("faces-orl", 64))
SIZES = (28, 32, 32, 32, 48, 64)  # one per batch; mostly the cheap ones
GREY_SHARE = 0.4  # of the batches
LEVELS = torch.arange(11) / 10
SCORED_IMAGES = 500
CHECKPOINT_EVERY = 100


def training_batch(sets: list[Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images mixed with uniform noise, and the share of noise in each."""

    def draw(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    size = SIZES[draw(len(SIZES))]
    grey = float(torch.rand((), generator=generator)) < GREY_SHARE
    chosen = torch.randint(len(sets), (BATCH,), generator=generator)
    parts = []
    for index, images in enumerate(sets):
        picks = torch.randint(len(images), (int((chosen == index).sum()),), generator=generator)
        part = images[picks].float() / 255
        # A random square resized to the batch's size gives many scales and degrees of smoothness from few images.
        side = min(part.shape[2:])
        crop = side - draw(side // 2 + 1)
        top, left = draw(part.shape[2] - crop + 1), draw(part.shape[3] - crop + 1)
        part = part[:, :, top : top + crop, left : left + crop]
        part = F.interpolate(part, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
        if draw(2):
            part = part.flip(3)
        parts.append(part.mean(1, keepdim=True) if grey else part.expand(-1, 3, -1, -1))
    images = torch.cat(parts).clamp(0, 1)
    # Spread evenly over [-.05, 1.05] and clamped, so that pure image and pure noise get the weight of one level each.
    spread = (torch.randperm(BATCH, generator=generator) + torch.rand(BATCH, generator=generator)) / BATCH
    shares = (1.1 * spread - 0.05).clamp(0, 1)
    noise = torch.rand(images.shape, generator=generator)
    return torch.lerp(images, noise, shares[:, None, None, None]), shares


def train(checkpoint: Path) -> EvaluationNetwork:
    """Run all steps, or those that the checkpoint lacks."""
    sets = [data.load(name).train.inputs for name in TRAIN_SETS]
    torch.manual_seed(SEED)
    network = EvaluationNetwork().to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters(), lr=PEAK_LR)
    first = restore(checkpoint, network, optimizer) if checkpoint.exists() else 0
    started = time.perf_counter()
    for step in range(first, STEPS):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        images, shares = training_batch(sets, derived_generator(SEED, "evaluation network", step))
        logits = network.logits(images.contiguous(memory_format=torch.channels_last))
        # Equation 5 of the paper, with the shares between 0 and 1 as soft labels.
        loss = F.binary_cross_entropy_with_logits(logits, shares)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == STEPS:
            save(checkpoint, step + 1, network, optimizer)
            error = (torch.sigmoid(logits) - shares).abs().mean().item()
            seconds = time.perf_counter() - started
            print(f"step {step + 1}: mean absolute error of the batch {error:.3f}, {seconds:.0f} s", flush=True)
    return network


@torch.no_grad()
def scores(network: EvaluationNetwork, name: str, size: int) -> dict[str, float | list[float]]:
    """Mean absolute error, Spearman's rank correlation and the mean prediction at each level of noise."""
    images = data.load(name, size=size).test.inputs[:SCORED_IMAGES].float() / 255
    noise = torch.rand(images.shape, generator=derived_generator(SEED, "scores", name))
    predicted = torch.stack([network(torch.lerp(images, noise, float(level))) for level in LEVELS])
    true = LEVELS[:, None].expand_as(predicted)
    return {
        "error": (predicted - true).abs().mean().item(),
        "spearman": float(spearmanr(predicted.flatten(), true.flatten()).statistic),
        "means": predicted.mean(1).tolist(),
    }


def print_scores(network: EvaluationNetwork) -> None:
    print("| data set | pixels | mean absolute error | Spearman | mean prediction at r = 0, .1, ..., 1 |")
    print("|---|---|---|---|---|")
    for name, size in (*LEFT_OUT, *((name, 32) for name in TRAIN_SETS)):
        row = scores(network, name, size)
        means = " ".join(f"{mean:.2f}" for mean in row["means"])
        kind = "left out" if (name, size) in LEFT_OUT else "trained on"
        print(f"| {name} ({kind}) | {size} | {row['error']:.4f} | {row['spearman']:.4f} | {means} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--score", action="store_true", help="score the existing weights without training")
    parser.add_argument("--checkpoint", type=Path, default=Path("evaluation-checkpoint.safetensors"))
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="file for the trained weights")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.score:
        network = train(arguments.checkpoint)
        half = {name: value.detach().half().contiguous() for name, value in network.named_parameters()}
        settings = {"seed": SEED, "steps": STEPS, "batch": BATCH, "peak_lr": PEAK_LR, "data": TRAIN_SETS}
        save_file(half, arguments.weights, {"training": json.dumps(settings)})
    network = EvaluationNetwork()
    network.load_state_dict(load_file(arguments.weights))
    print_scores(network)


if __name__ == "__main__":
    main()
