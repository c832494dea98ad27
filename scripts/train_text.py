"""Train a text model centrally, embedding included, so that it can be audited and trained on with frozen word vectors.

    GRADVEIL_DATA=folder python scripts/train_text.py                       # text-transformer on sst2, a few minutes
    gradveil audit --dataset sst2 --model text-transformer --weights text-transformer.safetensors

The words of the data set's training split are the vocabulary, so weights belong to a data set and its length.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil import data, models
from gradveil.core.randomness import derived_generator
from gradveil.core.registry import parse_spec
from gradveil.data import Dataset, Split

BATCH = 32
PEAK_LR = 1e-3
WORD_DROPOUT = 0.2
"""The share of the words that a step sees as unknown, so that sentences are not learned by heart."""
UNKNOWN = 1


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """The share of a split's texts that are classified correctly."""
    model.eval()
    parts = zip(split.inputs.long().split(512), split.targets.split(512), strict=True)
    right = sum(int((model(tokens).argmax(1) == labels).sum()) for tokens, labels in parts)
    model.train()
    return right / len(split)


def without_some_words(tokens: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """The tokens of a batch with random words unknown."""
    dropped = torch.rand(tokens.shape, generator=generator) < WORD_DROPOUT
    return torch.where(dropped & (tokens != padding), UNKNOWN, tokens)


def train(dataset: Dataset, spec: str, epochs: int, seed: int) -> nn.Module:
    """Adam with a cosine schedule."""
    split, modality = dataset.train, dataset.train.modality
    name, parameters = parse_spec(spec)
    known = modality.model_arguments(split.stored_shape)
    model = models.create(name, classes=len(dataset.classes), seed=seed, **known, **parameters)
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.05)
    steps, started, step = epochs * math.ceil(len(split) / BATCH), time.perf_counter(), 0
    for epoch in range(epochs):
        generator = derived_generator(seed, "text", epoch)
        for chosen in torch.randperm(len(split), generator=generator).split(BATCH):
            for group in optimiser.param_groups:
                group["lr"] = PEAK_LR * 0.5 * (1 + math.cos(math.pi * step / steps))
            tokens = without_some_words(split.inputs[chosen].long(), known["padding"], generator)
            loss = F.cross_entropy(model(tokens), split.targets[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            step += 1
        reached, seconds = accuracy(model, dataset.test), time.perf_counter() - started
        print(f"epoch {epoch + 1} of {epochs}: test accuracy {reached:.1%}, {seconds:.0f} s", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="sst2", help="texts, for example sst2:length=16")
    parser.add_argument("--model", default="text-transformer", help="a text model with its parameters")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the weights; default: NAME.safetensors")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, parameters = parse_spec(arguments.dataset)
    model = train(data.load(name, **parameters), arguments.model, arguments.epochs, arguments.seed)
    out = arguments.out or Path(f"{parse_spec(arguments.model)[0]}.safetensors")
    save_file(model.state_dict(), out)
    print(out)


if __name__ == "__main__":
    main()
