"""Loading and checking the files of an audit folder that show examples: pictures, or text in fragments."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw

from gradveil.audit.rows import ResultRow
from gradveil.core.digests import bytes_digest
from gradveil.core.errors import DataError
from gradveil.modality import Drawn, Fragment
from gradveil.modality.written import MAX_BYTES, from_file
from gradveil.report.read import Audit

_MAX_OVERHEAD = 1_000_000  # bytes that a PNG file may have beyond 4 per pixel
_FRAGMENT, _IN_A_ROW = 12, 16  # of the sketch of a text: the side of the square of a fragment, and squares in a row
_RECOVERED, _NOT_RECOVERED, _WRITTEN = "#c2371c", "#e5e2dc", "#8a929c"


def original(audit: Audit, victim: int) -> bytes | None:
    """The file that shows the victim's own examples; None if there is none."""
    digest = next((row.original_digest for row in audit.blind if row.victim == victim), None)
    return None if digest is None else _load_once(audit, f"images/original-v{victim}.{audit.modality.shown_as}", digest)


def reconstruction(audit: Audit, row: ResultRow) -> bytes | None:
    """The file that shows what an attack recovered of a victim; None if there is none."""
    return None if row.image is None else _load_once(audit, row.image, row.image_digest)


def _load_once(audit: Audit, name: str, digest: str | None) -> bytes | None:
    if name not in audit.loaded:
        modality, limit = audit.modality, MAX_BYTES
        check: Callable[[bytes], object] = from_file
        if isinstance(modality, Drawn):
            width, height = modality.rendered_size(audit.config["input_shape"], audit.examples)
            limit, check = 4 * width * height + _MAX_OVERHEAD, _picture_check(width, height)
        audit.loaded[name] = _load(audit.folder, name, digest, limit, check)
    return audit.loaded[name]


def _load(folder: Path, name: str, digest: str | None, limit: int, check: Callable[[bytes], object]) -> bytes | None:
    """The content of the file `name` of an audit folder, or None if the file does not exist.

    Args:
        folder: the audit's folder.
        name: the path inside the folder.
        digest: the digest of the file, as recorded in its row.
        limit: the most bytes it may have, so that nothing larger is ever decoded.
        check: raises `ValueError`, or what pillow raises, for content that the audit did not write.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"image {name!r}: expected a path inside the audit folder, got one outside; correct the row")
    if not path.exists():
        return None
    try:
        if not path.is_file() or path.stat().st_size > limit:
            raise ValueError(f"it must be a regular file of at most {limit:,} bytes")
        content = path.read_bytes()
        if (got := bytes_digest(content)) != digest:
            raise ValueError(f"its digest must be {digest}, as its row says, but is {got}: this is a different image")
        check(content)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{name}: expected the {path.suffix[1:].upper()} that the audit wrote, could not use this one ({error}); "
            "restore it, or remove it together with the rows that name it and run those again with --resume"
        ) from error
    return content


def _picture_check(width: int, height: int) -> Callable[[bytes], None]:
    """Refuses all but a PNG of this size."""

    def check(content: bytes) -> None:
        with Image.open(BytesIO(content), formats=["PNG"]) as image:
            if image.size != (width, height):
                raise ValueError(f"it must have {width} x {height} pixels but has {image.width} x {image.height}")
            image.load()

    return check


def decode(audit: Audit, content: bytes | None) -> Image.Image | None:
    """The pixels of a file: of a PNG its own, of a text a sketch; None if there is none."""
    if content is None:
        return None
    if not isinstance(audit.modality, Drawn):
        return _sketch(from_file(content))
    with Image.open(BytesIO(content), formats=["PNG"]) as image:
        return image.convert("RGB")


def _sketch(examples: Sequence[Sequence[Fragment]]) -> Image.Image:
    """A square for each fragment, each example on a line of its own, in the colours of what was recovered."""
    colours = {True: _RECOVERED, False: _NOT_RECOVERED, None: _WRITTEN}
    lines = [example[at : at + _IN_A_ROW] for example in examples for at in range(0, len(example), _IN_A_ROW)]
    columns = max(map(len, lines), default=1)
    sketch = Image.new("RGB", (columns * _FRAGMENT, max(len(lines), 1) * _FRAGMENT), "#ffffff")
    draw = ImageDraw.Draw(sketch)
    for row, line in enumerate(lines):
        for column, fragment in enumerate(line):
            left, top = column * _FRAGMENT, row * _FRAGMENT
            corners = (left + 1, top + 1, left + _FRAGMENT - 2, top + _FRAGMENT - 2)
            draw.rectangle(corners, fill=colours[fragment.recovered])
    return sketch
