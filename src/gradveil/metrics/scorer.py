"""All metrics of one reconstructed batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradveil.core.errors import InputError
from gradveil.metrics.labels import label_accuracy
from gradveil.metrics.matching import match
from gradveil.metrics.record import METRICS
from gradveil.modality import IMAGE, Modality


@dataclass(frozen=True)
class Scorer:
    """Scores reconstructions by every metric of a modality, under one assignment of reconstructions to originals.

    Reconstructions are first turned into valid inputs: in an image, a NaN pixel counts as mid-grey (0.5) and everything
    else, infinities included, is clamped to [0, 1]. So a diverged attack gets the poor score it deserves, not none. The
    figures of a batch are means over its examples; PSNR is the mean of the images' PSNRs.

    Args:
        modality: what the examples are.

    Example:
        >>> images, labels = torch.linspace(0, 1, 512).reshape(2, 1, 16, 16), torch.tensor([3, 7])
        >>> guess = Scorer().blind_scores(images, torch.zeros_like(images))
        >>> score = Scorer().score(images, images.flip(0), labels, labels.flip(0), guess)
        >>> score["psnr"], score["label_correct"], score["leaked"], score["leak_rule"]
        (100.0, 1.0, True, 'pixels')
    """

    modality: Modality = IMAGE

    @torch.no_grad()
    def score(
        self,
        originals: Tensor,
        reconstructions: Tensor,
        true_labels: Tensor,
        guessed_labels: Tensor,
        blind: Mapping[str, Tensor] | None,
    ) -> dict[str, Any]:
        """Score one batch.

        Args:
            originals: inputs ``[B, *input_shape]``; images are in [0, 1] and at least 11 x 11.
            reconstructions: inputs of the same shape, in any order and range.
            true_labels: labels [B] of the originals.
            guessed_labels: labels [B] of the reconstructions, in their order.
            blind: the blind guess's score for each original by each metric, [B]; without it `leaked` is None.

        Returns:
            The mean over the batch of each metric (None: it could not be computed); `label_correct`, the share of
            correct labels; `leaked`, whether any example of the batch has leaked, and `leak_rule`, the rule by which
            the first of them has, None if none has.
        """
        for name, guessed in (blind or {}).items():
            if guessed.shape != originals.shape[:1]:
                raise InputError(
                    f"scorer: blind must hold one {name} per original, [{len(originals)}], got {list(guessed.shape)}"
                )
        found = self.modality.repaired(reconstructions)
        order = match(originals, found, self.modality)
        found = found[order]
        values = self.compute(originals, found)
        rules = []
        if blind is not None:
            pairs = zip(_by_example(values, len(found)), _by_example(blind, len(found)), strict=True)
            rules = [rule for scores, guess in pairs if (rule := self.modality.leak_rule(scores, guess))]
        return {
            **{name: None if value is None else value.mean().item() for name, value in values.items()},
            "label_correct": label_accuracy(true_labels, guessed_labels[order]),
            "leaked": None if blind is None else bool(rules),
            "leak_rule": rules[0] if rules else None,
        }

    @torch.no_grad()
    def blind_scores(self, originals: Tensor, guesses: Tensor) -> dict[str, Tensor]:
        """The scores of the blind guess at each original, ``[N]`` by metric, for `score`."""
        return {name: value for name, value in self.compute(originals, guesses).items() if value is not None}

    def compute(self, originals: Tensor, found: Tensor) -> dict[str, Tensor | None]:
        """Every metric of valid inputs that are matched one to one, ``[N]`` each; None: it cannot be computed."""
        x, y = self.modality.compared(originals), self.modality.compared(found)
        return {metric.name: metric.compute(x, y) for metric in METRICS.of(self.modality)}

    def matched(self, originals: Tensor, reconstructions: Tensor) -> Tensor:
        """The reconstructions as valid inputs, in the order of the originals that they are compared with."""
        found = self.modality.repaired(reconstructions)
        return found[match(originals, found, self.modality)]


def _by_example(values: Mapping[str, Tensor | None], count: int) -> list[dict[str, float | None]]:
    """The scores of each example by metric."""
    columns = [[None] * count if value is None else value.tolist() for value in values.values()]
    return [dict(zip(values, row, strict=True)) for row in zip(*columns, strict=True)] if columns else [{}] * count
