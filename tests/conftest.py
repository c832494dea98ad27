"""Small tasks and data that many tests share."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch import nn

import gradveil
from gradveil.data import Dataset, Split

torch.set_num_threads(1)
# Shared machines stall; a property is not slower because of it.
settings.register_profile("gradveil", deadline=None, max_examples=50)
settings.load_profile("gradveil")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Audits keep what attacks have learned in the cache folder; tests leave the user's alone."""
    os.environ["GRADVEIL_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def seeded_torch() -> None:
    """Weights that a test draws without a seed are the same in every run."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def tiny_task() -> gradveil.Task:
    """A convolution, a sigmoid and a classifier on 6 x 6 images, in double precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(108, 4)).double()
    return gradveil.Task(model, input_shape=(1, 6, 6), classes=4)


@pytest.fixture
def tiny_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(3, 1, 6, 6, generator=generator, dtype=torch.float64), torch.tensor([0, 3, 1])


@pytest.fixture
def picture() -> torch.Tensor:
    """A disc on a slope, in three colours."""
    down, across = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    disc = ((down**2 + across**2) < 0.4).float()
    return torch.stack([0.2 + 0.6 * disc, 0.5 + 0.2 * down, 0.7 - 0.4 * disc])[None]


@pytest.fixture
def two_blobs() -> Dataset:
    """A learnable data set of 12 x 12 images: bright above, or bright below."""
    generator = torch.Generator().manual_seed(1)

    def split(count: int) -> Split:
        labels = torch.arange(count) % 2
        images = torch.randint(0, 100, (count, 1, 12, 12), generator=generator)
        images[labels == 0, :, :6] += 120
        images[labels == 1, :, 6:] += 120
        return Split(images.to(torch.uint8), labels)

    return Dataset("two-blobs", ("above", "below"), "made by the test", split(300), split(60))


@pytest.fixture
def real_data() -> Path:
    """The folder of real data sets; tests that need it are skipped where there is none."""
    folder = os.environ.get("GRADVEIL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("GRADVEIL_DATA does not name a folder of data sets")
    return Path(folder)
