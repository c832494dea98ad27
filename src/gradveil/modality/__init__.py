"""What an input is, behind one small interface: its range, its prior, its blind guess and how to render it."""

from gradveil.modality.base import MODALITIES, Modality
from gradveil.modality.image import IMAGE, Image

__all__ = ["IMAGE", "MODALITIES", "Image", "Modality"]
