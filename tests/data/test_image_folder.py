import numpy as np
import pytest
from PIL import Image

from gradveil.core.errors import DataError
from gradveil.data.formats import read


def save(path, shade=0, mode="L", size=(6, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    color = shade if mode in ("L", "I;16", "F") else (shade, 0, 0) if mode == "RGB" else shade
    Image.new(mode, size, color).save(path)
    return path


def two_classes(folder, **options):
    save(folder / "cat" / "1.png", 10, **options)
    save(folder / "dog" / "1.png", 20, **options)
    return folder


def test_subfolders_are_classes(tmp_path):
    two_classes(tmp_path)
    save(tmp_path / "cat" / "0.png", 9)
    arrays = read(tmp_path)
    images, labels = arrays.train
    assert arrays.classes == ("cat", "dog")
    assert arrays.test is None
    assert images.shape == (3, 4, 6, 1)
    assert images[:, 0, 0, 0].tolist() == [9, 10, 20]
    assert labels.tolist() == [0, 0, 1]


def test_train_and_test_folders(tmp_path):
    two_classes(tmp_path / "train")
    save(tmp_path / "train" / "ant" / "x.png", 30)
    two_classes(tmp_path / "test")
    arrays = read(tmp_path)
    assert arrays.classes == ("ant", "cat", "dog")
    assert arrays.train[1].tolist() == [0, 1, 2]
    assert arrays.test[1].tolist() == [1, 2]


def test_classes_are_sorted_with_numbers_in_order(tmp_path):
    for name in ("s10", "s2", "s1", "a"):
        save(tmp_path / name / "1.png")
    assert read(tmp_path).classes == ("a", "s1", "s2", "s10")


def test_one_colour_image_makes_all_colour(tmp_path):
    two_classes(tmp_path)
    save(tmp_path / "dog" / "2.png", 30, mode="RGB")
    images, _ = read(tmp_path).train
    assert images.shape == (3, 4, 6, 3)
    assert images[:, 0, 0].tolist() == [[10, 10, 10], [20, 20, 20], [30, 0, 0]]


def test_many_file_formats(tmp_path):
    for number, ending in enumerate(("png", "bmp", "pgm", "tif", "gif")):
        save(tmp_path / f"class{number}" / f"x.{ending}", 40)
    images, labels = read(tmp_path).train
    assert (images == 40).all()
    assert labels.tolist() == [0, 1, 2, 3, 4]


def test_different_sizes_need_a_size(tmp_path):
    two_classes(tmp_path)
    save(tmp_path / "dog" / "big.png", 20, size=(60, 40))
    with pytest.raises(DataError, match=r"one size, got 2 sizes from 4x6 to 40x60; resize them by passing size="):
        read(tmp_path)
    images, _ = read(tmp_path, size=5).train
    assert images.shape == (3, 5, 5, 1)
    assert images[:, 2, 2, 0].tolist() == [10, 20, 20]


def test_camera_rotation_is_applied(tmp_path):
    two_classes(tmp_path, size=(4, 6))
    rotated = Image.new("L", (6, 4))
    rotated.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # upright after a turn by 90 degrees clockwise
    rotated.save(tmp_path / "cat" / "2.png", exif=exif)
    image = read(tmp_path).train[0][1]
    assert image.shape == (6, 4, 1)
    assert np.argwhere(image).tolist() == [[0, 3, 0]]


def test_hidden_files_and_files_next_to_the_classes_are_ignored(tmp_path):
    two_classes(tmp_path)
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".git").mkdir()
    (tmp_path / "cat" / ".DS_Store").write_bytes(b"\0")
    (tmp_path / "._cat.png").write_bytes(b"\0")
    assert len(read(tmp_path).train[0]) == 2


def test_opaque_alpha_is_dropped_and_transparency_refused(tmp_path):
    two_classes(tmp_path)
    Image.new("RGBA", (6, 4), (1, 2, 3, 255)).save(tmp_path / "dog" / "2.png")
    assert read(tmp_path).train[0][2, 0, 0].tolist() == [1, 2, 3]
    Image.new("RGBA", (6, 4), (1, 2, 3, 254)).save(tmp_path / "dog" / "2.png")
    with pytest.raises(DataError, match=r"2\.png: .*transparent in places"):
        read(tmp_path)


def test_refuses_more_than_eight_bits(tmp_path):
    two_classes(tmp_path)
    save(tmp_path / "dog" / "deep.png", 1000, mode="I;16")
    with pytest.raises(DataError, match=r"deep\.png: expected an 8-bit image.*mode I;16"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"just text", b"", b"\x89PNG\r\n\x1a\n"])
def test_refuses_a_file_that_is_not_an_image(tmp_path, content):
    two_classes(tmp_path)
    (tmp_path / "dog" / "notes.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"notes\.txt: expected an 8-bit image.*convert it or move it out"):
        read(tmp_path)


def test_refuses_a_truncated_image(tmp_path):
    two_classes(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (40, 60), dtype=np.uint8)
    path = tmp_path / "dog" / "half.png"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"half\.png: expected an 8-bit image"):
        read(tmp_path)


def test_refuses_a_folder_in_a_class(tmp_path):
    two_classes(tmp_path)
    save(tmp_path / "dog" / "images" / "1.png")
    with pytest.raises(DataError, match="images: expected an 8-bit image"):
        read(tmp_path)


def test_refuses_images_outside_of_classes(tmp_path):
    save(tmp_path / "1.png")
    with pytest.raises(DataError, match=r"at least two subfolders .* got the image 1\.png outside of any"):
        read(tmp_path)


def test_refuses_fewer_than_two_classes(tmp_path):
    save(tmp_path / "cat" / "1.png")
    with pytest.raises(DataError, match="at least two subfolders of images, one per class, got 1"):
        read(tmp_path)


def test_refuses_an_empty_class(tmp_path):
    two_classes(tmp_path)
    (tmp_path / "eel").mkdir()
    with pytest.raises(DataError, match="eel: expected images, got an empty folder"):
        read(tmp_path)


def test_refuses_a_third_folder_next_to_train_and_test(tmp_path):
    for split in ("train", "test", "val"):
        two_classes(tmp_path / split)
    with pytest.raises(DataError, match="expected only train and test, but found val as well; move it out"):
        read(tmp_path)


def test_refuses_test_classes_without_training_images(tmp_path):
    two_classes(tmp_path / "train")
    two_classes(tmp_path / "test")
    save(tmp_path / "test" / "eel" / "1.png")
    with pytest.raises(DataError, match="test has classes that train lacks: eel"):
        read(tmp_path)
