"""`torch.compile` for functions that run many times: the costs of attacks and the gradients of clients."""

import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch

# How long compiling takes, measured on two cores: lenet (10 tensors) 20 to 50 s, convnet (34) 75, resnet18 (62) 180.
SECONDS_PER_TENSOR = 3.5
# The speed-up that is certain: 1.3 on resnet18 and convnet, 1.5 to 2 on smaller networks.
GAIN = 1.3


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled for each shape that it is called with.

    All functions made by one transform, such as vmap, share one code object and therefore one cache of compiled
    programs in torch. From the ninth program on, torch would leave such functions uncompiled; here there is no limit.
    """
    program = torch.compile(function, dynamic=False)

    def run(*arguments: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize):
            return program(*arguments)

    return run


def is_worth_it(seconds: float, tensors: int) -> bool:
    """Whether compiling earns its time back; when in doubt, the answer is no.

    Args:
        seconds: how long all runs of the program take uncompiled.
        tensors: how many tensors it differentiates by or compares; compilation takes time for each.
    """
    return seconds * (1 - 1 / GAIN) > SECONDS_PER_TENSOR * tensors and has_compiler()


def has_compiler() -> bool:
    """Whether torch.compile finds the C++ compiler that it needs on the CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))
