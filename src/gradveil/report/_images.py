"""Loading and checking the pictures of an audit folder."""

from io import BytesIO
from pathlib import Path

from PIL import Image

from gradveil.audit.rows import ResultRow
from gradveil.core.digests import bytes_digest
from gradveil.core.errors import DataError
from gradveil.report.read import Audit

_MAX_OVERHEAD = 1_000_000  # bytes that a PNG file may have beyond 4 per pixel


def original(audit: Audit, victim: int) -> bytes | None:
    """The victim's own picture as a PNG; None if there is none."""
    digest = next((row.original_digest for row in audit.blind if row.victim == victim), None)
    return None if digest is None else _load_once(audit, f"images/original-v{victim}.png", digest)


def reconstruction(audit: Audit, row: ResultRow) -> bytes | None:
    """What an attack recovered of a victim, as a PNG; None if there is none."""
    return None if row.image is None else _load_once(audit, row.image, row.image_digest)


def _load_once(audit: Audit, name: str, digest: str | None) -> bytes | None:
    if name not in audit.loaded:
        size = audit.modality.rendered_size(audit.config["input_shape"], audit.examples)
        audit.loaded[name] = _load(audit.folder, name, digest, size)
    return audit.loaded[name]


def _load(folder: Path, name: str, digest: str | None, size: tuple[int, int]) -> bytes | None:
    """The PNG `name` of an audit folder, or None if the file does not exist.

    Args:
        folder: the audit's folder.
        name: the path inside the folder.
        digest: the digest of the file, as recorded in its row.
        size: the required width and height, so that nothing larger is ever decoded.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"image {name!r}: expected a path inside the audit folder, got one outside; correct the row")
    if not path.exists():
        return None
    try:
        if not path.is_file() or path.stat().st_size > 4 * size[0] * size[1] + _MAX_OVERHEAD:
            raise ValueError(f"it must be a regular file, no larger than {size[0]} x {size[1]} pixels need")
        content = path.read_bytes()
        if (got := bytes_digest(content)) != digest:
            raise ValueError(f"its digest must be {digest}, as its row says, but is {got}: this is a different image")
        with Image.open(BytesIO(content), formats=["PNG"]) as image:
            if image.size != size:
                raise ValueError(f"it must have {size[0]} x {size[1]} pixels but has {image.width} x {image.height}")
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{name}: expected the PNG that the audit wrote, could not use this one ({error}); restore it, or "
            "remove it together with the rows that name it and run those again with --resume"
        ) from error
    return content


def decode(content: bytes | None) -> Image.Image | None:
    """The pixels of a PNG; None if there is none."""
    if content is None:
        return None
    with Image.open(BytesIO(content), formats=["PNG"]) as image:
        return image.convert("RGB")
