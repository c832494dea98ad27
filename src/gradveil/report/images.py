"""The images of an audit folder."""

from pathlib import Path

from PIL import Image

from gradveil.errors import DataError


def original(victim: int) -> str:
    """Where an audit keeps a victim's image."""
    return f"images/original-v{victim}.png"


def load(folder: Path, name: str) -> Image.Image | None:
    """The PNG `name` of an audit folder, None if it is not there."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"image {name!r}: expected a path inside the audit folder, got one outside; correct the row")
    if not path.is_file():
        return None
    try:
        with Image.open(path, formats=["PNG"]) as image:
            image.load()
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{name}: expected a PNG, could not read it ({error}); run the audit again") from error
