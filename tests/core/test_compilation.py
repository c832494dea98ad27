"""Compiled programs: there is no limit on their number, and compiling happens only if it pays off."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.func import vmap

from gradveil.core import compilation


@pytest.mark.filterwarnings("ignore")
def test_there_is_no_limit_to_the_number_of_programs(monkeypatch):
    """Torch stops after eight programs per code object, and all functions made by vmap share one."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    for power in range(1, 13):
        program = compilation.compiled(vmap(lambda x, power=power: (x**power).sum()))
        assert program(torch.full((2, 3), 2.0)).tolist() == [3 * 2.0**power] * 2
    assert counter.frame_count == 12
    limit = torch._dynamo.config.recompile_limit
    assert limit < 100, "the limit is lifted for our own programs only"


def test_it_is_worth_it_if_the_gain_exceeds_the_compilation(monkeypatch):
    monkeypatch.setattr(compilation, "has_compiler", lambda: True)
    enough = 10 * compilation.SECONDS_PER_TENSOR / (1 - 1 / compilation.GAIN)
    assert compilation.is_worth_it(1.01 * enough, tensors=10)
    assert not compilation.is_worth_it(0.99 * enough, tensors=10)


def test_it_is_never_worth_it_without_a_compiler(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _name: None)
    assert not compilation.is_worth_it(1e9, tensors=1)
