"""All metrics of one reconstructed batch."""

from dataclasses import dataclass

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
        >>> score = Scorer().score(images, images.flip(0), labels, labels.flip(0), blind=torch.zeros(2))
        >>> score["psnr"], score["label_correct"], score["leaked"]
        (100.0, 1.0, True)
    """

    modality: Modality = IMAGE

    @torch.no_grad()
    def score(
        self,
        originals: Tensor,
        reconstructions: Tensor,
        true_labels: Tensor,
        guessed_labels: Tensor,
        blind: Tensor | None,
    ) -> dict[str, float | None]:
        """Score one batch.

        Args:
            originals: inputs ``[B, *input_shape]``; images are in [0, 1] and at least 11 x 11.
            reconstructions: inputs of the same shape, in any order and range.
            true_labels: labels [B] of the originals.
            guessed_labels: labels [B] of the reconstructions, in their order.
            blind: the blind guess's score for each original by the primary metric, [B]; without it `leaked` is None.

        Returns:
            The mean over the batch of each metric (None: it could not be computed); `label_correct`, the share of
            correct labels; `leaked`, whether any example of the batch has leaked.
        """
        if blind is not None and blind.shape != originals.shape[:1]:
            raise InputError(
                f"scorer: blind must be one number per original, [{len(originals)}], got {list(blind.shape)}"
            )
        found = self.modality.repaired(reconstructions)
        order = match(originals, found)
        found = found[order]
        values = {metric.name: metric.compute(originals, found) for metric in METRICS.of(self.modality)}
        leaked = None
        if blind is not None:
            columns = [[None] * len(found) if value is None else value.tolist() for value in values.values()]
            rows = zip(zip(*columns, strict=True), blind.tolist(), strict=True)
            leaked = any(self.modality.leaked(dict(zip(values, row, strict=True)), guess) for row, guess in rows)
        return {
            **{name: None if value is None else value.mean().item() for name, value in values.items()},
            "label_correct": label_accuracy(true_labels, guessed_labels[order]),
            "leaked": leaked,
        }
