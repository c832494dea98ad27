"""Folders of images with one subfolder per class."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from gradveil.core.errors import DataError
from gradveil.core.extras import OptionalModule
from gradveil.data._arrays import Array, Arrays, listing, reading, resize
from gradveil.data._limits import MAX_PIXELS, check_size

pillow, operations = (OptionalModule(f"PIL.{name}", "reading image files") for name in ("Image", "ImageOps"))

# Listed explicitly: Pillow also knows formats that start other programs (PostScript) or that nobody needs here.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
_GREY = ("1", "L", "LA")
_STRIP_ROWS = 64  # converted together, so that there is never a second copy of an entire image
_IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp"})


def read_image_folder(folder: Path, size: int | None = None) -> Arrays:
    """Read a folder with one subfolder of images per class, or two such folders called ``train`` and ``test``.

    Classes are sorted with numbers in numerical order (s2 before s10). Files whose names begin with a dot are
    ignored; so are files next to the class folders that are not images, such as a licence.
    """
    subfolders = _subfolders(folder)
    if {"train", "test"} <= {subfolder.name for subfolder in subfolders}:
        if len(subfolders) > 2:
            extra = ", ".join(sub.name for sub in subfolders if sub.name not in ("train", "test"))
            raise DataError(f"{folder}: expected only train and test, but found {extra} as well; move it out")
        classes = _class_names(folder / "train")
        if unknown := set(_class_names(folder / "test")) - set(classes):
            raise DataError(f"{folder}: test has classes that train lacks: {', '.join(sorted(unknown))}")
        splits = [_read_classes(folder / split, classes, size) for split in ("train", "test")]
    else:
        classes = _class_names(folder)
        splits = [_read_classes(folder, classes, size)]
    # One colour image makes the entire set colour; a set of grey images keeps one channel.
    channels = max(image.shape[-1] for images, _ in splits for image in images)
    train, *test = [(_stack(folder, images, channels), np.array(labels)) for images, labels in splits]
    return Arrays(train, test[0] if test else None, classes)


def _subfolders(folder: Path) -> list[Path]:
    return [child for child in listing(folder) if child.is_dir()]


def _class_names(folder: Path) -> tuple[str, ...]:
    def numerically(name: str) -> list[tuple[str, int]]:
        return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]

    loose = next((child.name for child in listing(folder) if child.suffix.lower() in _IMAGE_SUFFIXES), None)
    names = sorted((subfolder.name for subfolder in _subfolders(folder)), key=numerically)
    if loose or len(names) < 2:
        found = f"the image {loose} outside of any" if loose else f"{len(names)}"
        raise DataError(f"{folder}: expected at least two subfolders of images, one per class, got {found}")
    return tuple(names)


def _read_classes(folder: Path, classes: tuple[str, ...], size: int | None) -> tuple[list[Array], list[int]]:
    images, labels = [], []
    pixels = stored = 0
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue
        files = listing(folder / name)
        for file in files:
            image = _read_image(file, pixels, stored)
            if size is None:  # resized images have the requested size, however large the files declare them
                pixels, stored = pixels + image.nbytes, stored + file.stat().st_size
            images.append(image if size is None else resize(image[None], size)[0])
            labels.append(label)
        if not files:
            raise DataError(f"{folder}/{name}: expected images, got an empty folder")
    return images, labels


def _read_image(path: Path, pixels: int, stored: int) -> Array:
    """The pixels of an image; `pixels` and `stored` count the bytes of earlier images, in memory and on disk."""
    with reading(path, "an 8-bit image", "convert it or move it out"):
        if not path.is_file():
            raise ValueError("it is not a file")
        with pillow.open(path, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
            if image.mode in ("I", "F") or image.mode.startswith("I;"):
                raise ValueError(f"its mode {image.mode} has more than 8 bits per channel")
            channels = 1 if image.mode in _GREY else 3
            check_size(pixels + image.width * image.height * channels, stored + path.stat().st_size)
            operations.exif_transpose(image, in_place=True)
            return _pixels(image)


def _pixels(image: Any) -> Array:
    """The pixels [H, W, C], with one channel for grey and three for colour."""
    grey = image.mode in _GREY
    pixels = np.empty((image.height, image.width, 1 if grey else 3), np.uint8)
    for top in range(0, image.height, _STRIP_ROWS):
        strip = image.crop((0, top, image.width, min(top + _STRIP_ROWS, image.height)))
        if strip.has_transparency_data and strip.convert("RGBA").getchannel("A").getextrema() != (255, 255):
            raise ValueError("it is transparent in places")
        pixels[top : top + _STRIP_ROWS] = np.asarray(strip.convert("L" if grey else "RGB")).reshape(
            strip.height, -1, pixels.shape[-1]
        )
    return pixels


def _stack(folder: Path, images: list[Array], channels: int) -> Array:
    sizes = sorted({image.shape[:2] for image in images})
    if len(sizes) > 1:
        raise DataError(
            f"{folder}: all images must have one size, got {len(sizes)} sizes "
            f"from {sizes[0][0]}x{sizes[0][1]} to {sizes[-1][0]}x{sizes[-1][1]}; resize them by passing size=, on the "
            f"command line --dataset {folder}:size=32"
        )
    return np.stack([np.broadcast_to(image, (*image.shape[:2], channels)) for image in images])
