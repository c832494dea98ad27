"""What an input is, behind one small interface: its range, its prior, its blind guess and how to show it."""

from gradveil.modality.base import MODALITIES, Drawn, Modality, Written
from gradveil.modality.embedded import EmbeddedInput
from gradveil.modality.image import IMAGE, Image
from gradveil.modality.table import Column, Table
from gradveil.modality.text import Text
from gradveil.modality.words import Tokenizer, Words
from gradveil.modality.written import Fragment

__all__ = [
    "IMAGE",
    "MODALITIES",
    "Column",
    "Drawn",
    "EmbeddedInput",
    "Fragment",
    "Image",
    "Modality",
    "Table",
    "Text",
    "Tokenizer",
    "Words",
    "Written",
]
