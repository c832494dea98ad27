"""What the leak rules of images find: known copies of test images, and pictures that are no copies.

Run it with: python scripts/leak_rule.py mnist bccd cifar10
It prints, for each kind, the share of images that leak by "pixels" alone and by any rule.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from gradveil import data
from gradveil.metrics import Scorer
from gradveil.metrics.blurred import blurred
from gradveil.modality import IMAGE

PUBLIC = 6000


def pictures(
    originals: Tensor, guess: Tensor, others: Tensor, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Pictures that are no copies (bad), then copies (good), by name; `others` are other images of the same classes."""

    def noisy(images: Tensor, std: float) -> Tensor:
        return (images + std * torch.randn(images.shape, generator=generator)).clamp(0, 1)

    mean = guess.mean((1, 2, 3), keepdim=True)
    yield "bad: noise", torch.rand(originals.shape, generator=generator)
    yield "bad: grey", torch.full_like(originals, 0.5)
    yield "bad: the blind guess", guess
    yield "bad: the blind guess, noisy", noisy(guess, 0.1)
    yield "bad: the blind guess, more contrast", (mean + 1.6 * (guess - mean)).clamp(0, 1)
    yield "bad: another image of the class", others
    yield "bad: another image of the class, blurred", blurred(others)
    yield "bad: another image of the class, noisy", noisy(others, 0.1)
    yield "bad: half of it, half of the guess", (others + guess) / 2
    for std in (0.05, 0.1, 0.2, 0.3):
        yield f"good: noise of {std:g}", noisy(originals, std)
    yield "good: blurred twice", blurred(blurred(originals))
    yield "good: 70 % of it, 30 % of the guess, noisy", noisy(0.7 * originals + 0.3 * guess, 0.1)
    yield "good: shifted by a pixel", torch.roll(originals, (1, 1), (2, 3))


def measure(name: str, count: int) -> dict[str, tuple[float, float]]:
    """For each kind of picture, the share that leaks by pixels alone, and by any rule."""
    generator, loaded, scorer = torch.Generator().manual_seed(0), data.load(name), Scorer()
    chosen = torch.randperm(len(loaded.test), generator=generator)[:count]
    originals, labels = loaded.test.batch(chosen)
    public, public_labels = loaded.train.batch(range(min(PUBLIC, len(loaded.train))))
    guess = IMAGE.blind(loaded.train.inputs, loaded.train.targets, labels, len(loaded.classes))
    weights = (public_labels == labels[:, None]).float()
    others = public[torch.multinomial(weights, 1, generator=generator).flatten()]
    blind = scorer.blind_scores(originals, guess)
    shares = {}
    for kind, found in pictures(originals, guess, others, generator):
        values = scorer.blind_scores(originals, found)
        rules = [
            IMAGE.leak_rule(
                *({name: float(scores[index]) for name, scores in each.items()} for each in (values, blind))
            )
            for index in range(len(originals))
        ]
        shares[kind] = rules.count("pixels") / len(rules), 1 - rules.count(None) / len(rules)
    return shares


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--images", type=int, default=300)
    asked = parser.parse_args()
    tables = {name: measure(name, asked.images) for name in asked.datasets}
    print(f"| picture | {' | '.join(tables)} |\n|---|{'---:|' * len(tables)}")
    for kind in next(iter(tables.values())):
        cells = [f"{100 * table[kind][0]:.1f} / {100 * table[kind][1]:.1f} %" for table in tables.values()]
        print(f"| {kind} | {' | '.join(cells)} |")
    for name, table in tables.items():
        bad = [share for kind, share in table.items() if kind.startswith("bad")]
        means = [sum(share[place] for share in bad) / len(bad) for place in (0, 1)]
        print(
            f"{name}: taken for a leak by mistake, {100 * means[0]:.2f} % by pixels, {100 * means[1]:.2f} % by any rule"
        )


if __name__ == "__main__":
    main()
