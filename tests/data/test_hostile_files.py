"""Malicious files are refused before they cost any memory; honest ones cost at most twice their size.

Memory is measured in a separate process, as the peak resident memory while a data set is loaded, minus the resident
memory before.
"""

import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from PIL import EpsImagePlugin, Image

from gradveil import data
from gradveil.core.errors import DataError
from gradveil.core.large_arrays import empty
from gradveil.data._image_folder import FORMATS
from gradveil.data._limits import MAX_GROWTH, check_size
from gradveil.data._pickles import read_pickled_arrays
from gradveil.data.formats import read, read_idx_folder, read_svhn_folder
from gradveil.data.npz import read_arrays

MIB = 2**20
LARGE = 80 * MIB  # large enough that a third copy exceeds the 64 MiB
RNG = np.random.default_rng(0)


def pixels(*shape) -> np.ndarray:
    """Images that compress quickly, and by a factor of less than a hundred."""
    count = int(np.prod(shape))
    return np.repeat(RNG.integers(0, 256, count // 16 + 1, dtype=np.uint8), 16)[:count].reshape(shape)


# -- memory ------------------------------------------------------------------------------------------------------------

CHILD = """
import gc, json, sys
from pathlib import Path
from gradveil import data
from gradveil.core.errors import DataError

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

data.load(sys.argv[1])  # once, so that modules imported on first use are loaded
for path in sys.argv[2:]:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, result, error = resident("VmRSS"), 0, None
    try:
        loaded = data.load(path)
        result = sum(split.inputs.nbytes + split.targets.nbytes for split in (loaded.train, loaded.test))
        del loaded
    except DataError as failed:
        error = str(failed)
    print(json.dumps([path, resident("VmHWM") - before, result, error]), flush=True)
"""


def measured(folder: Path, paths: list[Path]) -> list[tuple[int, int, str | None]]:
    """For each data set: the bytes that loading it cost, the bytes of the result, and the error."""
    small = folder / "small.npz"
    np.savez(small, x_train=pixels(40, 8, 8), y_train=np.arange(40) % 2)
    # Freed memory goes back to the system at once, so that one measurement does not affect the next.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(small), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)[1:]) for line in done.stdout.splitlines()]


linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


def write_idx(folder: Path) -> Path:
    folder.mkdir()
    count = LARGE // 784
    for stem, array in (
        ("train-images-idx3", pixels(count, 28, 28)),
        ("train-labels-idx1", np.arange(count, dtype=np.uint8) % 10),
        ("t10k-images-idx3", pixels(10, 28, 28)),
        ("t10k-labels-idx1", np.arange(10, dtype=np.uint8)),
    ):
        content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
        (folder / f"{stem}-ubyte.gz").write_bytes(gzip.compress(content, 1))
    return folder


def write_npz(path: Path) -> Path:
    count = LARGE // 3072
    np.savez_compressed(path, x_train=pixels(count, 32, 32, 3), y_train=np.arange(count) % 10)  # without a test split
    return path


def write_cifar100(folder: Path, protocol: int) -> Path:
    folder.mkdir()
    for name, count in (("train", LARGE // 3072), ("test", 10)):
        batch = {b"data": pixels(count, 3072), b"fine_labels": [place % 100 for place in range(count)]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    names = {b"fine_label_names": [b"%d" % place for place in range(100)]}
    (folder / "meta").write_bytes(pickle.dumps(names, protocol=protocol))
    return folder


def write_svhn(folder: Path) -> Path:
    folder.mkdir()
    for name, count in (("train", LARGE // 3072), ("test", 10)):
        content = {"X": pixels(32, 32, 3, count), "y": (np.arange(count, dtype=np.uint8) % 10 + 1)[:, None]}
        scipy.io.savemat(folder / f"{name}_32x32.mat", content, do_compression=True)
    return folder


def write_images(folder: Path) -> Path:
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        Image.fromarray(pixels(4096, 4096)).save(folder / name / "grey.png", compress_level=1)
        colours = Image.fromarray(pixels(4096, 4096, 3))
        colours.save(folder / name / "photo.jpg", progressive=True)  # its decoder keeps all coefficients
    return folder


HONEST = {
    "npz": lambda folder: write_npz(folder / "a.npz"),
    "gz": lambda folder: write_idx(folder / "idx"),
    "pickle of Python 2": lambda folder: write_cifar100(folder / "cifar-2", 2),
    "pickle": lambda folder: write_cifar100(folder / "cifar-4", 4),
    "MATLAB": lambda folder: write_svhn(folder / "svhn"),
    "images": lambda folder: write_images(folder / "images"),
}


@linux
def test_reading_costs_at_most_twice_the_result(tmp_path):
    found = measured(tmp_path, [write(tmp_path) for write in HONEST.values()])
    for kind, (cost, result, error) in zip(HONEST, found, strict=True):
        print(f"{kind}: result {result / MIB:.0f} MiB, cost {cost / MIB:.0f} MiB")
        assert error is None
        assert result >= LARGE
        assert result * 0.9 < cost <= 2 * result + 64 * MIB, kind


# -- bombs -------------------------------------------------------------------------------------------------------------

BOMB = 150 * MIB


def npz_bomb(folder: Path) -> Path:
    path = folder / "bomb.npz"
    np.savez_compressed(
        path, x_train=np.zeros((BOMB // 784, 28, 28), np.uint8), y_train=np.zeros(BOMB // 784, np.uint8)
    )
    return path


def npz_that_lies(folder: Path) -> Path:
    """A header that declares more than the member contains."""
    path = folder / "lies.npz"
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": (2**40, 28, 28)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", member.getvalue() + bytes(1000))
    return path


def npz_of_something_else(folder: Path) -> Path:
    path = folder / "else.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train", b"no array")
    return path


def npz_that_uses_bytes_twice(folder: Path) -> Path:
    """Several entries of the directory that share the same bytes, each 90 times as large as they are."""
    path = folder / "twice.npz"
    content = io.BytesIO()
    np.save(content, np.repeat(RNG.integers(0, 256, 2**16, dtype=np.uint8), 600).reshape(-1, 64, 64))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x_train.npy", content.getvalue())
        entry = archive.getinfo("x_train.npy")
        for name in ("x_test", "y_train", "y_test", "train_images", "jpeg_train"):
            other = zipfile.ZipInfo(f"{name}.npy")
            for key in ("compress_type", "CRC", "compress_size", "file_size", "header_offset"):
                setattr(other, key, getattr(entry, key))
            archive.filelist.append(other)
    return path


def gz_bomb(folder: Path) -> Path:
    (folder / "gz").mkdir()
    head = b"\0\0\x08\x03" + struct.pack(">3I", BOMB // 784, 28, 28)
    (folder / "gz" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + bytes(BOMB // 784 * 784), 1))
    return folder / "gz"


def gz_with_excess_data(folder: Path) -> Path:
    """A small declared size, and much more data after it."""
    (folder / "on").mkdir()
    head = b"\0\0\x08\x03" + struct.pack(">3I", 10, 28, 28)
    (folder / "on" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + bytes(BOMB), 1))
    return folder / "on"


def pickle_bomb(folder: Path) -> Path:
    """A huge memo index, for which Python's unpickler would allocate memory."""
    (folder / "memo").mkdir()
    (folder / "memo" / "train").write_bytes(b"\x80\x02}r\xff\xff\xff\x03.")
    return folder / "memo"


def nested_pickle_bomb(folder: Path) -> Path:
    """Each list holds the one before twice: a few bytes that become 2^16 lists when they are copied."""
    (folder / "nested").mkdir()
    levels = b"".join(b"](" + b"h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(16))
    (folder / "nested" / "train").write_bytes(b"\x80\x02]q\0" + levels + b"}U\x04data" + b"h\x10s.")
    return folder / "nested"


def matlab_bomb(folder: Path) -> Path:
    (folder / "mat").mkdir()
    content = {"X": np.zeros((32, 32, 3, BOMB // 3072), np.uint8), "y": np.ones((BOMB // 3072, 1), np.uint8)}
    scipy.io.savemat(folder / "mat" / "train_32x32.mat", content, do_compression=True)
    return folder / "mat"


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def image_bomb(folder: Path) -> Path:
    """A PNG of a few bytes that declares 30,000 x 30,000 pixels."""
    for name in ("cat", "dog"):
        (folder / "png" / name).mkdir(parents=True)
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0))
        body = chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")
        (folder / "png" / name / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n" + head + body)
    return folder / "png"


def many_image_bombs(folder: Path) -> Path:
    """Each image is small enough by itself, but not all of them together."""
    for name in ("cat", "dog"):
        (folder / "many" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (4096, 4096)).save(folder / "many" / name / f"{number}.png")
    return folder / "many"


BOMBS = {
    npz_bomb: f"more than {MAX_GROWTH} times as much",
    npz_that_lies: "x_train declares",
    npz_of_something_else: r"its member 'x_train' is not a plain \.npy array",
    npz_that_uses_bytes_twice: f"more than {MAX_GROWTH} times as much|[Oo]verlap",
    gz_bomb: f"more than {MAX_GROWTH} times as much",
    gz_with_excess_data: r"\[10, 28, 28\] values are declared, got 7841",
    pickle_bomb: "CIFAR batch",
    nested_pickle_bomb: "occurs in several places",
    matlab_bomb: f"more than {MAX_GROWTH} times as much",
    image_bomb: "more than 16,777,216|decompression bomb",
    many_image_bombs: f"more than {MAX_GROWTH} times as much",
}


@linux
def test_bombs_are_refused_and_cost_nothing(tmp_path):
    paths = [bomb(tmp_path) for bomb in BOMBS]
    for (bomb, message), path, (cost, _, error) in zip(BOMBS.items(), paths, measured(tmp_path, paths), strict=True):
        print(f"{bomb.__name__}: cost {cost / MIB:.1f} MiB")
        assert cost <= 64 * MIB, bomb.__name__
        assert error is not None
        with pytest.raises(DataError, match=message):
            read(path)


def test_the_largest_size_depends_on_the_machine(monkeypatch):
    monkeypatch.setattr("gradveil.data._limits.largest", lambda: 1000)
    check_size(1000, 1)
    with pytest.raises(ValueError, match="declares 1,001 bytes, more than the 1,000 allowed on this machine"):
        check_size(1001, 1001)


def test_large_arrays_lie_on_disk(tmp_path, monkeypatch):
    images = np.arange(4 * 5 * 6 * 3, dtype=np.uint8).reshape(4, 5, 6, 3)
    np.savez(tmp_path / "data.npz", x_train=images, y_train=[0, 0, 1, 1], x_test=images, y_test=[0, 0, 1, 1])
    expected = data.load(tmp_path / "data.npz").train
    monkeypatch.setattr("gradveil.core.large_arrays.ON_DISK", 100)
    assert isinstance(read_arrays(tmp_path / "data.npz")["x_train"], np.memmap)
    split = data.load(tmp_path / "data.npz").train
    assert torch.equal(split.inputs, expected.inputs)
    assert torch.equal(split.targets, expected.targets)


@linux
def test_a_full_disk_is_reported(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gradveil.core.large_arrays.ON_DISK", 100)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(DataError, match="expected room for 1,000 bytes, got No space left on device"):
        empty((1000,), np.uint8)


# -- formats -----------------------------------------------------------------------------------------------------------

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 4\n%%EndComments\nshowpage\n%%EOF\n"


def test_postscript_called_png_starts_no_program(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments: started.append(arguments))
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.png").write_bytes(POSTSCRIPT)
    with pytest.raises(DataError, match=r"cat\.png: expected an 8-bit image"):
        read(tmp_path)
    assert started == []
    assert "EPS" not in FORMATS


@pytest.mark.parametrize(("ending", "options"), [("webp", {"lossless": True}), ("ppm", {}), ("jpg", {"quality": 100})])
def test_supported_formats_are_read(tmp_path, ending, options):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (6, 4), (40, 40, 40)).save(tmp_path / name / f"x.{ending}", **options)
    images, _ = read(tmp_path).train
    assert images.shape == (2, 4, 6, 3)
    assert abs(images.astype(int) - 40).max() <= 1


def test_an_image_of_several_strips_is_read_completely(tmp_path):
    image = RNG.integers(0, 256, (150, 70, 3), dtype=np.uint8)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.fromarray(image).save(tmp_path / name / "x.png")
    np.testing.assert_array_equal(read(tmp_path).train[0][1], image)


# -- pickles -----------------------------------------------------------------------------------------------------------


def array_pickle(content: bytes, times: int) -> bytes:
    """A list of arrays that share the same bytes, which are in the file once."""
    shape = struct.pack("<i", len(content))
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01J" + shape + b"\x85cnumpy\ndtype\nU\x02u1\x85R\x89h\x01tb"
    )
    start = b"\x80\x02T" + shape + content + b"q\x01"
    return start + b"}U\x01a](" + array * times + b"es."


@pytest.mark.parametrize("length", [10, 10_000])
def test_bytes_are_used_once(tmp_path, length):
    path = tmp_path / "p"
    path.write_bytes(array_pickle(bytes(length), 1))
    assert [len(array) for array in read_pickled_arrays(path)[b"a"]] == [length]
    path.write_bytes(array_pickle(bytes(10_000), 50))
    with pytest.raises(DataError, match="several of its arrays use the same bytes"):
        read_pickled_arrays(path)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",  # bytes that are not there
        b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",  # a bytearray of the same length
        b"\x80\x02T" + struct.pack("<i", -1) + b".",
        b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b".",  # a number of a billion bytes
        b"\x80\x02" + b"]" * 100_000 + b".",
        b"\x80\x02}(" + b"K\x01" * 600_000 + b"u.",
        b"\x80\x02}2222.",  # copies of what is on the stack
        b"\x80\x02}q\0(h\0h\0u.",
        b"\x80\x02e.",
        b"\x80\x02u.",
        b"\x80\x02(R.",
        b"\x80\x02b.",
        b"\x80\x02}h\x05.",
        b"\x80\x02c" + b"a" * 10_000,
        b"\x80\x02}cnumpy\ndtype\n\x85\x85K\x01s.",
        b"",
    ],
)
def test_hostile_programs_are_refused(tmp_path, content):
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(DataError, match="expected a pickle of plain numpy arrays"):
        read_pickled_arrays(tmp_path / "p")


@pytest.mark.parametrize(
    ("name", "read_it"),
    [
        ("data_batch_1", read_pickled_arrays),
        ("own.npz", read_arrays),
        ("train_32x32.mat", lambda path: read_svhn_folder(path.parent)),
        ("train-images-idx3-ubyte", lambda path: read_idx_folder(path.parent)),
        ("train-images-idx3-ubyte.gz", lambda path: read_idx_folder(path.parent)),
    ],
)
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path, name, read_it):
    """Opening a pipe would wait forever for somebody to write into it."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="it is not a regular file"):
        read_it(tmp_path / name)
