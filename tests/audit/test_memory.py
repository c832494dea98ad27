"""Images stay bytes until they are used: what an audit of large images takes, measured in a process of its own."""

import subprocess
import sys

import numpy as np
import pytest

MEASURE = """
import sys
import torch
from gradveil.audit import AuditConfig
from gradveil.audit.plan import peak_memory
from gradveil.audit.run import Subject
from gradveil.metrics import METRICS
from gradveil.modality import IMAGE

pair = torch.rand(2, 1, 256, 256)
for metric in METRICS.of(IMAGE):  # what judging two images takes does not depend on how many there are
    metric.compute(pair, pair)
before = peak_memory()
config = AuditConfig(dataset=sys.argv[1], model=sys.argv[2], defenses=("none",), attacks=("idlg",), victims=2, games=5)
subject = Subject.of(config)
subject.describe()
subject.games
print(peak_memory() - before)
"""
MODEL = """
from torch import nn
def build(input_shape, classes):
    return nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures with /proc")
def test_an_audit_takes_a_small_multiple_of_the_bytes_of_its_images(tmp_path):
    """As float64 the same images would take eight times their size, as float32 four times."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (1500, 64, 64), dtype=np.uint8).repeat(4, 1).repeat(4, 2)
    labels = np.arange(1500) % 2
    path = tmp_path / "large.npz"
    np.savez_compressed(path, x_train=images[:1300], y_train=labels[:1300], x_test=images[1300:], y_test=labels[1300:])
    assert path.stat().st_size < images.nbytes / 5
    (tmp_path / "small.py").write_text(MODEL)
    words = [sys.executable, "-W", "ignore", "-c", MEASURE, str(path), f"{tmp_path / 'small.py'}@build"]
    taken = int(subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout)
    assert images.nbytes < taken < 2 * images.nbytes + 128 * 2**20
