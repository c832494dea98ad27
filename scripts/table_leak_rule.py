"""What the leak rule of tables takes for a leak by mistake: other rows of the same classes instead of reconstructions.

Run it with: python scripts/table_leak_rule.py adult
It prints, for several batch sizes, the share of the batches in which some row counts as leaked.
"""

import argparse

import torch

from gradveil import data
from gradveil.audit import cases
from gradveil.metrics import Scorer

BATCHES = {1: 1000, 8: 200, 32: 50}
"""How many batches are tried, by their size."""


def mistaken(dataset: data.Dataset, batch_size: int, batches: int) -> float:
    """The share of batches that seem to leak to an attacker who returns random rows with the right labels."""
    generator = torch.Generator().manual_seed(0)
    train, scorer = dataset.train, Scorer(dataset.train.modality)
    victims = cases.choose_victims(dataset.test, batches, batch_size, clients=1, seed=0)
    guess = train.modality.blind(train.inputs, train.targets, victims.targets.flatten(), len(dataset.classes))
    blind = cases.blind_scores(scorer, train, victims, guess.view_as(victims.inputs))
    leaked = 0
    for number, (rows, labels) in enumerate(zip(victims.inputs, victims.targets, strict=True)):
        weights = (train.targets == labels[:, None]).float()
        others, _ = train.batch(torch.multinomial(weights, 1, generator=generator).flatten())
        given = {name: scores[number] for name, scores in blind.items()}
        leaked += scorer.score(rows, others, labels, labels, given)["leaked"]
    return leaked / batches


def main() -> None:
    """Measure the tables that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", help="names of tables that `gradveil data list` knows")
    for name in parser.parse_args().tables:
        dataset = data.load(name)
        for batch_size, batches in BATCHES.items():
            share = mistaken(dataset, batch_size, batches)
            print(f"{name}, batch {batch_size}: {100 * share:.1f} % of {batches} batches")


if __name__ == "__main__":
    main()
