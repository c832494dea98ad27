"""How close a reconstruction comes to the original, and whether that counts as a leak."""

from gradveil.metrics.decoys import decoy_auc, decoy_scores
from gradveil.metrics.labels import label_accuracy
from gradveil.metrics.matching import match
from gradveil.metrics.noise_ratio import noise_ratio
from gradveil.metrics.perceptual_distance import LPIPS_RESOLUTION, Lpips, lpips
from gradveil.metrics.power import relative_power
from gradveil.metrics.scorer import Score, Scorer
from gradveil.metrics.signal_to_noise import psnr
from gradveil.metrics.squared_error import mse
from gradveil.metrics.structural_similarity import ssim

__all__ = [
    "LPIPS_RESOLUTION",
    "Lpips",
    "Score",
    "Scorer",
    "decoy_auc",
    "decoy_scores",
    "label_accuracy",
    "lpips",
    "match",
    "mse",
    "noise_ratio",
    "psnr",
    "relative_power",
    "ssim",
]
