"""Train a generator of a data set's images, for the attacks that search one (ggl, gias).

    GRADVEIL_DATA=folder python scripts/train_generator.py mnist                  # writes generators/mnist.safetensors
    GRADVEIL_DATA=folder python scripts/train_generator.py cifar10 --out my.safetensors

It uses the train split only; victims come from the test split. The generator is the decoder of a variational
autoencoder that is told the class (Kingma & Welling, ICLR 2014; Sohn, Lee & Yan, NeurIPS 2015):

    minimise over the images   |x - G(z, y)|^2 / (2 VARIANCE) + KL(q(z | x, y), N(0, 1)),   z ~ q(z | x, y)

Why not a GAN: a GAN that is trained for minutes on one core collapses to a few images or never gets sharp, and nothing
says when to stop. An autoencoder's loss falls steadily, every image of the train split has a latent vector that gives
nearly that image, and the latent vectors follow the normal prior that the attacks pull them to. Its samples are
blurrier than a good GAN's. VARIANCE sets the balance: with a smaller one the images are closer to their originals, but
random latent vectors no longer give images of their class (on MNIST, 0.002 gave 27 dB and no digits).

An interrupted training continues from its last checkpoint. Every step has its own generator of random numbers, so the
result is the same.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from checkpoints import restore, save
from gradveil import data
from gradveil.core.randomness import derived_generator
from gradveil.data import Dataset
from gradveil.models.generator import FOLDER, Generator

SEED = 0
BATCH = 64
PEAK_LR = 1e-3
CHECKPOINT_EVERY = 200
STEPS = 10_000
VARIANCE = 0.08
LATENT = {1: 32, 3: 128}  # by channels
WIDTHS = (64, 32)


class Autoencoder(nn.Module):
    """An encoder to the mean and the log variance of the latent vector, and the generator as its decoder."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        side = height // 4
        if height != width or height % 4:
            raise SystemExit(f"images must be square with a side that 4 divides, got {height} x {width}")
        self.decoder = Generator(latent=LATENT[channels], side=side, widths=WIDTHS, channels=channels, classes=classes)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * side**2, 256),
        )
        self.label_features = nn.Embedding(classes, 256)
        self.head = nn.Linear(256, 2 * LATENT[channels])

    def loss(self, images: Tensor, labels: Tensor, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and the mean squared error in it."""
        features = (self.features(images) + self.label_features(labels)).relu()
        mean, log_variance = self.head(features).chunk(2, dim=1)
        latents = mean + (log_variance / 2).exp() * torch.randn(mean.shape, generator=draws)
        errors = (self.decoder(latents, labels) - images).square().flatten(1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return errors.sum(1).mean() / (2 * VARIANCE) + divergence, errors.mean()


def train(dataset: Dataset, checkpoint: Path, steps: int) -> Generator:
    """Run all steps, or those that the checkpoint lacks."""
    torch.manual_seed(SEED)
    network = Autoencoder(dataset.train.input_shape, len(dataset.classes))
    optimizer = torch.optim.Adam(network.parameters(), lr=PEAK_LR)
    first = restore(checkpoint, network, optimizer) if checkpoint.exists() else 0
    started = time.perf_counter()
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * 0.5 * (1 + math.cos(math.pi * step / steps))
        draws = derived_generator(SEED, "generator", step)
        images, labels = dataset.train.batch(torch.randint(len(dataset.train), (BATCH,), generator=draws))
        loss, error = network.loss(images, labels, draws)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            save(checkpoint, step + 1, network, optimizer)
            quality = -10 * math.log10(error.item())
            print(f"step {step + 1}: {quality:.2f} dB, {time.perf_counter() - started:.0f} s", flush=True)
    return network.decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=data.names())
    parser.add_argument("--out", type=Path, help=f"file for the generator; default: {FOLDER}/DATASET.safetensors")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"batches of {BATCH} images; default: {STEPS}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out = arguments.out or Path(FOLDER) / f"{arguments.dataset}.safetensors"
    out.parent.mkdir(parents=True, exist_ok=True)
    dataset, steps = data.load(arguments.dataset), arguments.steps
    decoder = train(dataset, out.with_suffix(".checkpoint"), steps)
    settings = {
        "data": arguments.dataset,
        "split": "train",
        "images": len(dataset.train),
        "seed": SEED,
        "steps": steps,
        "batch": BATCH,
        "peak_lr": PEAK_LR,
        "variance": VARIANCE,
        "architecture": {"latent": decoder.latent, "side": decoder.side, "widths": decoder.widths},
    }
    half = {name: value.detach().half().contiguous() for name, value in decoder.named_parameters()}
    save_file(half, out, {"training": json.dumps(settings)})
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
