"""Train and score an evaluation network for the word vectors of a text model, which the defense refiner needs on text.

    python scripts/train_text_evaluation.py --dataset sst2 --model text-transformer --out evaluation-text.safetensors
    gradveil audit --dataset sst2 --defense refiner:network=evaluation-text.safetensors

Data, model, seed and weights must be those of the audit, because the network knows one embedding only. The training
texts are public ones. The scores are printed as the table of src/gradveil/models/text_evaluation.md.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn import functional as F

from gradveil import data
from gradveil.audit.cases import build_task
from gradveil.core.randomness import derived_generator
from gradveil.core.registry import parse_spec
from gradveil.modality import Text
from gradveil.models.text_evaluation import TextEvaluationNetwork, table_digest

SEED = 0
STEPS = 2000
BATCH = 128
PEAK_LR = 1e-3
LEVELS = torch.arange(11) / 10
SCORED = 500


def mixed(text: Text, ids: Tensor, shares: Tensor, blended: Tensor, generator: torch.Generator) -> Tensor:
    """Word vectors of which a share is random: whole words, or (`blended`) every word mixed with a random one."""
    words = torch.randint(text.vocabulary - 1, ids.shape, generator=generator)
    words = torch.where(ids == text.padding, text.padding, words + (words >= text.padding))
    own, random = text.vectors[ids], text.vectors[words]
    # As many words as the share says, rounded at random; the others stay.
    order = torch.rand(ids.shape, generator=generator).masked_fill(ids == text.padding, 2.0).argsort(1).argsort(1)
    lengths = (ids != text.padding).sum(1)
    counts = (shares * lengths + torch.rand(len(ids), generator=generator)).floor()
    replaced = torch.where((order < counts[:, None])[..., None], random, own)
    mixture = torch.lerp(own, random, shares[:, None, None])
    return torch.where(blended[:, None, None], mixture, replaced)


def train(text: Text, stored: Tensor) -> TextEvaluationNetwork:
    """Run all steps."""
    torch.manual_seed(SEED)
    network = TextEvaluationNetwork(text.vectors, text.padding)
    optimiser, started = torch.optim.Adam(network.parameters(), lr=PEAK_LR), time.perf_counter()
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = PEAK_LR * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        generator = derived_generator(SEED, "text evaluation network", step)
        ids = stored[torch.randint(len(stored), (BATCH,), generator=generator)].long()
        shares = (1.1 * torch.rand(BATCH, generator=generator) - 0.05).clamp(0, 1)
        vectors = mixed(text, ids, shares, torch.arange(BATCH) % 2 == 0, generator)
        logits = network.logits(vectors)
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


def write(network: TextEvaluationNetwork, text: Text, out: Path, *, dataset: str, model: str) -> None:
    """Write a network, with the digest of the embedding that it is for."""
    settings = {"seed": SEED, "steps": STEPS, "batch": BATCH, "data": dataset, "model": model}
    metadata = {"training": json.dumps(settings), "table": table_digest(text.vectors)}
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, out, metadata)


@torch.no_grad()
def print_scores(network: TextEvaluationNetwork, text: Text, stored: Tensor) -> None:
    print("| test texts with | mean absolute error | Spearman | mean prediction at r = 0, .1, ..., 1 |")
    print("|---|---|---|---|")
    ids = stored[:SCORED].long()
    for kind, blended in (("words replaced", False), ("words blended", True)):
        generator = derived_generator(SEED, "scores", kind)
        chosen = torch.full((len(ids),), blended)
        predicted = torch.stack(
            [network(mixed(text, ids, level.expand(len(ids)), chosen, generator)) for level in LEVELS]
        )
        true = LEVELS[:, None].expand_as(predicted)
        error = (predicted - true).abs().mean().item()
        rank = float(spearmanr(predicted.flatten(), true.flatten()).statistic)
        means = " ".join(f"{mean:.2f}" for mean in predicted.mean(1).tolist())
        print(f"| {kind} | {error:.4f} | {rank:.4f} | {means} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="sst2", help="texts, as the audit names them")
    parser.add_argument("--model", default="text-transformer", help="the model of the audit, with its parameters")
    parser.add_argument("--weights", type=Path, help="its weights, if the audit has --weights")
    parser.add_argument("--seed", type=int, default=0, help="the audit's seed, which decides the initial weights")
    parser.add_argument("--out", type=Path, default=Path("evaluation-text.safetensors"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, parameters = parse_spec(arguments.dataset)
    dataset = data.load(name, **parameters)
    text = build_task(dataset, arguments.model, seed=arguments.seed, weights=arguments.weights).modality
    assert isinstance(text, Text)
    network = train(text, dataset.train.inputs)
    write(network, text, arguments.out, dataset=arguments.dataset, model=arguments.model)
    print_scores(network, text, dataset.test.inputs)
    print(arguments.out)


if __name__ == "__main__":
    main()
