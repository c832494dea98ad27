"""The pictures of an audit folder."""

from io import BytesIO
from pathlib import Path

from PIL import Image

from gradveil.audit.rows import ResultRow
from gradveil.audit.store import bytes_digest
from gradveil.core.errors import DataError
from gradveil.report.read import Audit

_ROOM = 1_000_000  # bytes that a PNG may have beyond its pixels


def original(audit: Audit, victim: int) -> bytes | None:
    """The victim's own picture as a PNG; None if there is none."""
    digest = next((row.original_digest for row in audit.blind if row.victim == victim), None)
    return None if digest is None else _loaded(audit, f"images/original-v{victim}.png", digest)


def found(audit: Audit, row: ResultRow) -> bytes | None:
    """What an attack made of a victim, as a PNG; None if there is none."""
    return None if row.image is None else _loaded(audit, row.image, row.image_digest)


def _loaded(audit: Audit, name: str, digest: str | None) -> bytes | None:
    if name not in audit.loaded:
        size = audit.modality.rendered_size(audit.config["input_shape"], audit.examples)
        audit.loaded[name] = _load(audit.folder, name, digest, size)
    return audit.loaded[name]


def _load(folder: Path, name: str, digest: str | None, size: tuple[int, int]) -> bytes | None:
    """The PNG `name` of an audit folder, None if it is not there.

    Args:
        folder: the audit's folder.
        name: the path inside it.
        digest: of the file, as the row has it.
        size: width and height that it must have, so that nothing larger is ever decoded.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"image {name!r}: expected a path inside the audit folder, got one outside; correct the row")
    if not path.exists():
        return None
    try:
        if not path.is_file() or path.stat().st_size > 4 * size[0] * size[1] + _ROOM:
            raise ValueError(f"it must be a file that {size[0]} x {size[1]} pixels account for")
        content = path.read_bytes()
        if (got := bytes_digest(content)) != digest:
            raise ValueError(f"its digest must be {digest}, as its row has it, and is {got}: it is another image")
        with Image.open(BytesIO(content), formats=["PNG"]) as image:
            if image.size != size:
                raise ValueError(f"it must have {size[0]} x {size[1]} pixels and has {image.width} x {image.height}")
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{name}: expected the PNG that the audit wrote, could not use this one ({error}); bring it back, or "
            "remove it and the rows that name it and run them again with --resume"
        ) from error
    return content


def opened(content: bytes | None) -> Image.Image | None:
    """A loaded PNG as pixels; None if there is none."""
    if content is None:
        return None
    with Image.open(BytesIO(content), formats=["PNG"]) as image:
        return image.convert("RGB")
