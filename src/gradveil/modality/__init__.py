"""What an input is, behind one small interface: its range, its prior, its blind guess and how to render it."""

from gradveil.modality.base import MODALITIES, Modality
from gradveil.modality.embedded import EmbeddedInput
from gradveil.modality.image import IMAGE, Image
from gradveil.modality.text import Text
from gradveil.modality.words import Tokenizer, Words

__all__ = ["IMAGE", "MODALITIES", "EmbeddedInput", "Image", "Modality", "Text", "Tokenizer", "Words"]
