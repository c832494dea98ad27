"""Timing work on a device that runs asynchronously."""

import time
import types

import pytest
import torch

from gradveil.core.timing import clock, timed


@pytest.fixture
def synchronized(monkeypatch):
    """The devices that were synchronized for; each wait takes ten milliseconds."""
    calls = []

    def synchronize(device):
        calls.append(device)
        time.sleep(0.01)

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    return calls


def test_the_device_has_finished_when_the_clock_is_read(synchronized):
    device = types.SimpleNamespace(type="slow")
    before = time.perf_counter()
    assert clock(device) >= before + 0.01
    assert synchronized == [device]


def test_a_block_begins_and_ends_with_the_device_at_rest(synchronized):
    device = types.SimpleNamespace(type="slow")
    with timed(device) as timing:
        assert synchronized == [device]  # work that began earlier does not count
        assert timing.seconds == 0.0
    assert synchronized == [device, device]
    assert 0.01 <= timing.seconds < 0.02 + 0.5


def test_the_cpu_needs_no_waiting(synchronized):
    with timed(torch.device("cpu")) as timing:
        time.sleep(0.002)
    assert timing.seconds >= 0.002
    assert synchronized == []


def test_what_a_block_raises_passes():
    with pytest.raises(KeyError), timed(torch.device("cpu")):
        raise KeyError
