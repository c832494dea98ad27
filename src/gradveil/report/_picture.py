"""overview.png: the victims and what the strongest attack recovers of them under each defense."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from gradveil.audit.rows import ResultRow
from gradveil.core.folders import replace_file
from gradveil.report import _images as images
from gradveil.report._scores import strongest
from gradveil.report.read import Audit, title

# All sizes are in pixels. The sheet is drawn at twice its intended size so that it is sharp on dense screens.
WIDTH = 1800
MAX_LABEL_WIDTH = 640
MARGIN = 44
GAP = 22
CELL = 200
MAX_VICTIMS = 8
HEADING, NAME, PARAMETERS, NOTE = 44, 40, 30, 32  # text sizes
LINE_SPACING = 12
INK, QUIET, RULE, LEAK, SAFE, PAPER = "#1d2126", "#5d6671", "#d9d5cd", "#c2371c", "#0b756b", "#ffffff"

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class _Row:
    label: Sequence[tuple[str, int, str]]  # lines of text, each with its size and colour
    images: Sequence[Image.Image | None]
    leaked: Sequence[bool]


def write_overview(audit: Audit) -> None:
    """Write overview.png into the audit's folder."""
    content = BytesIO()
    overview(audit).save(content, format="PNG", optimize=True)
    replace_file(audit.folder / "overview.png", [content.getvalue()])


def overview(audit: Audit) -> Image.Image:
    """The contact sheet: a row for the originals, a row for each defense and a column for each victim."""
    rows = _rows(audit)
    columns = len(rows[0].images)
    heading = [(_heading(audit), HEADING, INK)]
    label_width = min(MAX_LABEL_WIDTH, max(_width(line) for row in rows for line in row.label)) + 2 * GAP
    available = (WIDTH - 2 * MARGIN - label_width) // max(columns, 1) - GAP
    max_cell = min(CELL * audit.examples, available)
    pictures = [[image and _enlarge(image, max_cell) for image in row.images] for row in rows]
    cell = max((picture.width for row in pictures for picture in row if picture), default=max_cell)
    width = 2 * MARGIN + max(label_width + columns * (cell + GAP) - GAP, min(_width(heading[0]), MAX_LABEL_WIDTH))

    heights = [
        max([_height(row.label), *(picture.height for picture in row_pictures if picture)])
        for row, row_pictures in zip(rows, pictures, strict=True)
    ]
    top = MARGIN + _height(heading) + GAP
    sheet = Image.new("RGB", (width, top + sum(heights) + GAP * (len(rows) - 1) + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    _write(draw, heading, MARGIN, width - 2 * MARGIN)
    for row, row_pictures, height in zip(rows, pictures, heights, strict=True):
        _write(draw, row.label, top + (height - _height(row.label)) // 2, label_width - 2 * GAP)
        for column, (picture, leaked) in enumerate(zip(row_pictures, row.leaked, strict=True)):
            _paste(sheet, picture, MARGIN + label_width + column * (cell + GAP), top, height, leaked)
        top += height + GAP
    return sheet


def _rows(audit: Audit) -> list[_Row]:
    victims = range(min(audit.victims, MAX_VICTIMS))
    originals = [images.decode(audit, images.original(audit, victim)) for victim in victims]
    rows = [_Row([("original", NAME, INK)], originals, [False for _ in victims])]
    return rows + [_defense_row(audit, defense, victims) for defense in audit.defenses]


def _defense_row(audit: Audit, defense: str, victims: Sequence[int]) -> _Row:
    name, _, parameters = title(defense).partition(":")
    label = [(name, NAME, INK)]
    if parameters:
        label.append((parameters.replace(",", ", "), PARAMETERS, QUIET))
    by_victim: dict[int, ResultRow] = {}
    if best := strongest(audit, defense):
        attack, result = best
        by_victim = {attempt.victim: attempt for attempt in audit.rows_of(defense, attack)}
        label.append((audit.short_name(attack), PARAMETERS, QUIET))
        note = f"median {audit.primary.with_unit(result.median)}, leaked {result.leaked}/{result.victims}"
        label.append((note, NOTE, LEAK if result.leaked else SAFE))
    else:
        label.append(("not attacked yet", NOTE, QUIET))
    return _Row(
        label,
        [
            images.decode(audit, images.reconstruction(audit, by_victim[victim])) if victim in by_victim else None
            for victim in victims
        ],
        [victim in by_victim and by_victim[victim].leaked for victim in victims],
    )


def _heading(audit: Audit) -> str:
    statement = "What the strongest attack recovers" if audit.attempts else "No attack has finished yet"
    return f"{statement} ({audit.config['dataset']}, {audit.config['model']})"


def _enlarge(image: Image.Image, cell: int) -> Image.Image:
    """The image at the largest whole multiple of its size that fits the cell, or shrunk if it is larger."""
    factor = cell // image.width
    if factor >= 1:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    return image.resize((cell, max(1, image.height * cell // image.width)), Image.Resampling.LANCZOS)


def _paste(sheet: Image.Image, picture: Image.Image | None, left: int, top: int, height: int, leaked: bool) -> None:
    """Centre the picture vertically in its row, with a thick red frame if it leaked."""
    draw = ImageDraw.Draw(sheet)
    if picture is None:
        draw.text((left, top + height // 2), "missing", fill=QUIET, font=_font(PARAMETERS), anchor="lm")
        return
    top += (height - picture.height) // 2
    sheet.paste(picture, (left, top))
    frame = 7 if leaked else 1
    corners = (left - frame, top - frame, left + picture.width + frame - 1, top + picture.height + frame - 1)
    draw.rectangle(corners, outline=LEAK if leaked else RULE, width=frame)


def _write(draw: ImageDraw.ImageDraw, lines: Sequence[tuple[str, int, str]], top: int, width: int) -> None:
    for text, size, colour in lines:
        draw.text((MARGIN, top), _fit(text, _font(size), width), fill=colour, font=_font(size))
        top += size + LINE_SPACING


def _height(lines: Sequence[tuple[str, int, str]]) -> int:
    return sum(size + LINE_SPACING for _, size, _ in lines)


def _width(line: tuple[str, int, str]) -> int:
    text, size, _ = line
    return math.ceil(_font(size).getlength(text))


def _fit(text: str, font: Font, width: int) -> str:
    """The text, shortened with an ellipsis if it is too wide."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."


def _font(size: int) -> Font:
    return ImageFont.load_default(size=size)
