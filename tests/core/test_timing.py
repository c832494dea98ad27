"""Times on a device that works behind our back."""

import time
import types

import pytest
import torch

from gradveil.core.timing import clock, timed


@pytest.fixture
def waited(monkeypatch):
    """A device on which everything takes ten milliseconds more, once somebody waits for it."""
    calls = []

    def synchronize(device):
        calls.append(device)
        time.sleep(0.01)

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    return calls


def test_the_device_has_finished_when_the_clock_is_read(waited):
    device = types.SimpleNamespace(type="slow")
    before = time.perf_counter()
    assert clock(device) >= before + 0.01
    assert waited == [device]


def test_a_block_begins_and_ends_with_the_device_at_rest(waited):
    device = types.SimpleNamespace(type="slow")
    with timed(device) as took:
        assert waited == [device]  # what was under way before does not count
        assert took.seconds == 0.0
    assert waited == [device, device]
    assert 0.01 <= took.seconds < 0.02 + 0.5


def test_the_cpu_needs_no_waiting(waited):
    with timed(torch.device("cpu")) as took:
        time.sleep(0.002)
    assert took.seconds >= 0.002
    assert waited == []


def test_what_a_block_raises_passes():
    with pytest.raises(KeyError), timed(torch.device("cpu")):
        raise KeyError
