"""All metrics of one reconstructed batch."""

from typing import TypedDict

import torch
from torch import Tensor

from gradveil.errors import InputError
from gradveil.metrics.labels import label_accuracy
from gradveil.metrics.matching import match
from gradveil.metrics.noise_ratio import noise_ratio
from gradveil.metrics.perceptual_distance import Lpips
from gradveil.metrics.signal_to_noise import psnr
from gradveil.metrics.squared_error import mse
from gradveil.metrics.structural_similarity import ssim
from gradveil.modality import IMAGE


class Score(TypedDict):
    """What `Scorer.score` says of a batch; None is what could not be computed.

    Example:
        >>> sorted(Score.__annotations__)
        ['label_correct', 'leaked', 'lpips', 'mse', 'noise_ratio', 'psnr', 'ssim']
    """

    mse: float
    psnr: float
    ssim: float
    lpips: float | None
    noise_ratio: float
    label_correct: float
    leaked: bool | None


class Scorer:
    """Scores reconstructions by every metric, under one assignment of reconstructions to originals.

    Reconstructions are first made into images: a NaN pixel counts as mid-grey (0.5) and everything else,
    infinities included, is clamped to [0, 1]. So a diverged attack gets the poor score it deserves, not
    none. Figures of a batch are means over its images; PSNR is the mean of the images' PSNRs.

    Args:
        lpips: the weights of LPIPS; without them `lpips` is None in every score.

    Example:
        >>> images, labels = torch.linspace(0, 1, 512).reshape(2, 1, 16, 16), torch.tensor([3, 7])
        >>> score = Scorer().score(images, images.flip(0), labels, labels.flip(0), blind_psnr=torch.zeros(2))
        >>> score["psnr"], score["label_correct"], score["leaked"]
        (100.0, 1.0, True)
    """

    def __init__(self, lpips: Lpips | None = None) -> None:
        self.lpips = lpips

    @torch.no_grad()
    def score(
        self,
        originals: Tensor,
        reconstructions: Tensor,
        true_labels: Tensor,
        guessed_labels: Tensor,
        blind_psnr: Tensor | None,
    ) -> Score:
        """Score one batch.

        Args:
            originals: float images [B, C, H, W] in [0, 1], at least 11 x 11.
            reconstructions: likewise, in any order and range.
            true_labels: labels [B] of the originals.
            guessed_labels: labels [B] of the reconstructions, in their order.
            blind_psnr: PSNR [B] of the blind guess for each original; without it `leaked` is None.

        Returns:
            The means over the batch; `leaked` says whether any of its images has leaked.
        """
        if blind_psnr is not None and blind_psnr.shape != originals.shape[:1]:
            raise InputError(
                f"scorer: blind_psnr must be one number an original, [{len(originals)}], got {list(blind_psnr.shape)}"
            )
        images = IMAGE.repaired(reconstructions)
        order = match(originals, images)
        images = images[order]
        image_psnr, image_ssim = psnr(originals, images), ssim(originals, images)
        leaked = None
        if blind_psnr is not None:
            figures = zip(image_psnr.tolist(), image_ssim.tolist(), blind_psnr.tolist(), strict=True)
            leaked = any(IMAGE.leaked({"psnr": one, "ssim": other}, blind) for one, other, blind in figures)
        return Score(
            mse=mse(originals, images).mean().item(),
            psnr=image_psnr.mean().item(),
            ssim=image_ssim.mean().item(),
            lpips=None if self.lpips is None else self.lpips(originals, images).mean().item(),
            noise_ratio=noise_ratio(images).mean().item(),
            label_correct=label_accuracy(true_labels, guessed_labels[order]),
            leaked=leaked,
        )
