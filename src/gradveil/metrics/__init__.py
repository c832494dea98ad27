"""How close a reconstruction comes to the original.

There is one file per metric, which adds a record to `METRICS`. Every file in this folder is imported, so a new file
adds a metric. From outside the package, ``gradveil.metrics.METRICS.add(Metric(...))`` does the same.
"""

from importlib import import_module
from pkgutil import iter_modules

from gradveil.metrics.attributes import attribute_summary
from gradveil.metrics.blurred import psnr_blurred, ssim_blurred
from gradveil.metrics.decoys import decoy_auc, decoy_scores
from gradveil.metrics.identification import auc, information_bits, rank_one_accuracy, share_named, true_positive_rate
from gradveil.metrics.labels import label_accuracy
from gradveil.metrics.matching import match
from gradveil.metrics.noise_ratio import noise_ratio
from gradveil.metrics.perceptual_distance import LPIPS_RESOLUTION, Lpips, lpips
from gradveil.metrics.power import relative_power
from gradveil.metrics.record import METRICS, Metric, metric
from gradveil.metrics.reidentification import Gallery, Reidentification, reidentification_rate
from gradveil.metrics.scorer import Scorer
from gradveil.metrics.signal_to_noise import psnr
from gradveil.metrics.squared_error import mse
from gradveil.metrics.structural_similarity import ssim

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

of = METRICS.of

__all__ = [
    "LPIPS_RESOLUTION",
    "METRICS",
    "Gallery",
    "Lpips",
    "Metric",
    "Reidentification",
    "Scorer",
    "attribute_summary",
    "auc",
    "decoy_auc",
    "decoy_scores",
    "information_bits",
    "label_accuracy",
    "lpips",
    "match",
    "metric",
    "mse",
    "noise_ratio",
    "of",
    "psnr",
    "psnr_blurred",
    "rank_one_accuracy",
    "reidentification_rate",
    "relative_power",
    "share_named",
    "ssim",
    "ssim_blurred",
    "true_positive_rate",
]
