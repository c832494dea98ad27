"""Train and score the evaluation network that the defense refiner needs on text or on the rows of a table.

    python scripts/train_refiner_network.py --dataset adult --out rows.safetensors
    gradveil audit --dataset adult --defense refiner:network=rows.safetensors

    python scripts/train_refiner_network.py --dataset sst2 --model text-transformer --out words.safetensors
    gradveil audit --dataset sst2 --defense refiner:network=words.safetensors

A network knows one table, or one embedding: for text, data, model, seed and weights must be those of the audit. The
training examples count as public. The scores are printed as the tables of src/gradveil/models/fitted_evaluation.md.
"""

import argparse
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn import functional as F

from gradveil import data
from gradveil.audit.cases import build_task
from gradveil.core.randomness import derived_generator, source_of
from gradveil.core.registry import parse_spec
from gradveil.modality import Modality, Table, Text
from gradveil.models.fitted_evaluation import FittedEvaluation, fitted_kind, write_network

SEED = 0
STEPS = 2000
BATCH = 128
PEAK_LR = 1e-3
LEVELS = torch.arange(11) / 10
SCORED = 500
PARTS = {"text": ("texts", "words"), "table": ("rows", "cells")}


def replaced(real: Tensor, shares: Tensor, generator: torch.Generator) -> Tensor:
    """Which of the `real` parts [N, parts] are to be random: as many as the share says, rounded at random."""
    order = torch.rand(real.shape, generator=generator).masked_fill(~real, 2.0).argsort(1).argsort(1)
    counts = (shares * real.sum(1) + torch.rand(len(real), generator=generator)).floor()
    return order < counts[:, None]


def mixed_texts(text: Text, ids: Tensor, shares: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The word vectors of texts, those of random words, and where whole words are to be replaced."""
    words = torch.randint(text.vocabulary - 1, ids.shape, generator=generator)
    words = torch.where(ids == text.padding, text.padding, words + (words >= text.padding))
    where = replaced(ids != text.padding, shares, generator)
    return text.vectors[ids], text.vectors[words], where[..., None]


def mixed_rows(table: Table, rows: Tensor, shares: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows as inputs, random rows, and the values of the cells that are to be replaced."""
    own = table.inputs_of(rows)
    random = table.noise(own, source_of(generator))
    cells = replaced(torch.ones_like(rows, dtype=torch.bool), shares, generator)
    widths = torch.tensor([column.width for column in table.columns])
    return own, random, cells.repeat_interleave(widths, 1)


def mixed(modality: Modality, stored: Tensor, shares: Tensor, blended: Tensor, generator: torch.Generator) -> Tensor:
    """Inputs of which a share is random: whole words or cells, or (`blended`) all of them mixed with random ones."""
    if isinstance(modality, Text):
        own, random, where = mixed_texts(modality, stored.long(), shares, generator)
    else:
        assert isinstance(modality, Table)
        own, random, where = mixed_rows(modality, stored, shares, generator)
    ones = [1] * (own.ndim - 1)
    mixture = torch.lerp(own, random, shares.view(-1, *ones))
    return torch.where(blended.view(-1, *ones), mixture, torch.where(where, random, own))


def train(modality: Modality, stored: Tensor) -> FittedEvaluation:
    """Run all steps."""
    torch.manual_seed(SEED)
    kind = fitted_kind(modality)
    assert kind is not None
    network = kind(modality)
    optimiser, started = torch.optim.Adam(network.parameters(), lr=PEAK_LR), time.perf_counter()
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = PEAK_LR * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        generator = derived_generator(SEED, f"{modality.name} evaluation network", step)
        examples = stored[torch.randint(len(stored), (BATCH,), generator=generator)]
        shares = (1.1 * torch.rand(BATCH, generator=generator) - 0.05).clamp(0, 1)
        logits = network.logits(mixed(modality, examples, shares, torch.arange(BATCH) % 2 == 0, generator))
        loss = F.binary_cross_entropy_with_logits(logits, shares)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if (step + 1) % 200 == 0:
            error = (torch.sigmoid(logits) - shares).abs().mean().item()
            print(
                f"step {step + 1}: mean absolute error {error:.3f}, {time.perf_counter() - started:.0f} s", flush=True
            )
    return network


def write(network: FittedEvaluation, out: Path, made_from: Mapping[str, Any]) -> None:
    """Write a network and how it was made."""
    write_network(network, out, {"seed": SEED, "steps": STEPS, "batch": BATCH, **made_from})


@torch.no_grad()
def print_scores(network: FittedEvaluation, modality: Modality, stored: Tensor) -> None:
    examples, part = PARTS[modality.name]
    print(f"| test {examples} with | mean absolute error | Spearman | mean prediction at r = 0, .1, ..., 1 |")
    print("|---|---|---|---|")
    chosen = stored[:SCORED]
    for kind, blended in ((f"{part} replaced", False), (f"{part} blended", True)):
        generator = derived_generator(SEED, "scores", kind)
        form = torch.full((len(chosen),), blended)
        predicted = torch.stack(
            [network(mixed(modality, chosen, level.expand(len(chosen)), form, generator)) for level in LEVELS]
        )
        true = LEVELS[:, None].expand_as(predicted)
        error = (predicted - true).abs().mean().item()
        rank = float(spearmanr(predicted.flatten(), true.flatten()).statistic)
        means = " ".join(f"{mean:.2f}" for mean in predicted.mean(1).tolist())
        print(f"| {kind} | {error:.4f} | {rank:.4f} | {means} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="texts or a table, as the audit names them")
    parser.add_argument("--model", help="for text: the model of the audit, with its parameters (text-transformer)")
    parser.add_argument("--weights", type=Path, help="for text: its weights, if the audit has --weights")
    parser.add_argument("--seed", type=int, default=0, help="the audit's seed, which decides the initial weights")
    parser.add_argument("--out", type=Path, default=Path("evaluation.safetensors"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, parameters = parse_spec(arguments.dataset)
    dataset = data.load(name, **parameters)
    modality, made_from = dataset.train.modality, {"data": arguments.dataset}
    if modality.name not in PARTS:
        parser.error(
            f"{arguments.dataset}: expected texts or a table, got {modality.unit}s, which refiner sees as it is"
        )
    if isinstance(modality, Text):
        made_from["model"] = arguments.model or "text-transformer"
        modality = build_task(dataset, made_from["model"], seed=arguments.seed, weights=arguments.weights).modality
    elif arguments.model or arguments.weights:
        parser.error("--model and --weights are for text; the network for a table is the same for every model")
    network = train(modality, dataset.train.inputs)
    write(network, arguments.out, made_from)
    print_scores(network, modality, dataset.test.inputs)
    print(arguments.out)


if __name__ == "__main__":
    main()
