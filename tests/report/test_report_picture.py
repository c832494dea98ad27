"""The contact sheet, checked pixel by pixel."""

import numpy as np
import pytest
from PIL import Image, ImageColor

from gradveil.core.errors import DataError
from gradveil.report._picture import LEAK, MAX_VICTIMS, WIDTH, overview
from gradveil.report.read import read


def frame_pixels(sheet):
    """How many pixels have exactly the colour of a leak."""
    return int((np.asarray(sheet) == ImageColor.getrgb(LEAK)).all(axis=-1).sum())


def find(sheet, image, factor):
    """Whether `image`, enlarged by a whole factor without smoothing, is somewhere in the sheet."""
    pattern = np.asarray(image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST))
    pixels = np.asarray(sheet.convert("L"))
    height, width = pattern.shape
    places = np.argwhere(pixels[: 1 - height, : 1 - width] == pattern[0, 0])
    probes = [(0, 0), (height - 1, width - 1), (height // 2, width // 2)]
    return any(
        all(pixels[top + y, left + x] == pattern[y, x] for y, x in probes)
        and (pixels[top : top + height, left : left + width] == pattern).all()
        for top, left in places
    )


def test_the_originals_are_there_enlarged_without_smoothing(make_audit):
    folder = make_audit().write()
    sheet = overview(read(folder))
    for victim in range(4):
        assert find(sheet, Image.open(folder / f"images/original-v{victim}.png"), 7)


def test_the_reconstructions_of_the_strongest_attack_are_there(make_audit):
    draft = make_audit(defenses=[("none", {}, 0.0)])
    folder = draft.write()
    sheet = overview(read(folder))
    shown = {row["attack"]: find(sheet, Image.open(folder / row["image"]), 7) for row in draft.rows()}
    assert shown == {"idlg": True, "inverting-gradients": False}


def test_every_leak_has_a_frame(make_audit):
    draft = make_audit()
    for row in draft.rows():
        row["leaked"] = False
    without = frame_pixels(overview(read(draft.write())))
    draft.rows("none", "idlg")[0]["leaked"] = True
    one = frame_pixels(overview(read(draft.write())))
    for row in draft.rows("none", "idlg"):
        row["leaked"] = True
    four = frame_pixels(overview(read(draft.write())))
    assert without == 0
    assert one > 4 * 7 * 196
    assert four > one + 3 * 4 * 7 * 196


def test_the_sheet_grows_with_the_defenses_and_keeps_its_width(make_audit, many_defenses):
    six = overview(read(make_audit(victims=20).write()))
    twenty = overview(read(make_audit(defenses=many_defenses, victims=20).write()))
    assert six.width <= WIDTH
    assert twenty.width <= WIDTH
    assert twenty.height > 2.5 * six.height
    assert MAX_VICTIMS < 20


def test_long_labels_do_not_push_the_images_out(make_audit):
    parameters = {f"parameter{index}": 0.123456 for index in range(12)}
    sheet = overview(read(make_audit(defenses=[("none", {}, 0.0), ("refiner", parameters, 0.5)], victims=8).write()))
    assert sheet.width <= WIDTH


def test_a_batch_is_a_strip_that_fits(make_audit):
    draft = make_audit(defenses=[("none", {}, 0.0)], victims=4)
    draft.config["batch_size"] = 16
    draft.images = {name: np.tile(pixels, (1, 16)) for name, pixels in draft.images.items()}
    assert overview(read(draft.write())).width <= WIDTH


def test_an_audit_that_only_began_shows_the_originals(make_audit):
    draft = make_audit()
    draft.results = [row for row in draft.results if row["attack"] == "blind-guess"]  # which come first
    folder = draft.write()
    assert find(overview(read(folder)), Image.open(folder / "images/original-v1.png"), 7)


def test_missing_images_leave_a_gap(make_audit):
    draft = make_audit()
    draft.images.clear()
    assert overview(read(draft.write())).height > 400


def test_a_broken_image_is_refused_by_name(make_audit):
    folder = make_audit().write()
    (folder / "images/original-v0.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    with pytest.raises(DataError, match=r"images/original-v0.png: expected the PNG that the audit wrote"):
        overview(read(folder))


@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname"])
def test_an_image_outside_the_folder_is_refused(make_audit, name):
    draft = make_audit()
    draft.rows("none", "idlg")[0]["image"] = name
    with pytest.raises(DataError, match="'image' must be a path images/NAME.png"):
        overview(read(draft.write()))
