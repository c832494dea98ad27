"""Time of Soteria's scores: one vectorised Jacobian, one backward pass per unit, and the forward-mode estimate.

    [GRADVEIL_DATA=/path/to/data] python benchmarks/soteria_cost.py [--models lenet resnet18:norm=frozen]

There are two yardsticks, measured in the same run on the plain model: "public" is what public code does, `backward()`
for every unit, which also computes the gradients of the weights each time; "lean" asks autograd only for the gradient
of the input. Times are processor time on one thread; only the ratios are meaningful on a shared machine.
"""

import argparse
import time
from collections.abc import Callable

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import gradveil
from gradveil import data, models
from gradveil.core.errors import GradveilError
from gradveil.core.randomness import derived_generator
from gradveil.core.registry import parse_spec
from gradveil.defenses.soteria import exact_slopes

SHAPE = (3, 32, 32)
DIRECTIONS = (16, 32, 64, 128)


def public_loop(model: nn.Module, images: Tensor) -> Tensor:
    images = images.clone().requires_grad_()
    values = model.features(images)
    slopes = []
    for unit in range(values.shape[1]):
        model.zero_grad()
        images.grad = None
        values[:, unit].sum().backward(retain_graph=True)
        slopes.append(images.grad.flatten(1).norm(dim=1))
    return torch.stack(slopes, 1)


def lean_loop(model: nn.Module, images: Tensor) -> Tensor:
    images = images.clone().requires_grad_()
    values = model.features(images)
    slopes = []
    for unit in range(values.shape[1]):
        [slope] = torch.autograd.grad(values[:, unit].sum(), images, retain_graph=True)
        slopes.append(slope.flatten(1).norm(dim=1))
    return torch.stack(slopes, 1)


def timed(work: Callable[[], Tensor], repeats: int) -> tuple[Tensor, float]:
    work_times = []
    for _ in range(repeats):
        started = time.process_time()
        result = work()
        work_times.append(time.process_time() - started)
    return result, min(work_times)


def measure(spec: str) -> None:
    name, parameters = parse_spec(spec)
    model = models.create(name, input_shape=SHAPE, classes=10, **parameters)
    task = gradveil.Task(model, input_shape=SHAPE, classes=10)
    image = sample_image()
    small = task.size < 1_000_000
    repeats = 3 if small else 1
    exact_slopes(task, image) if small else gradveil.defense("soteria:directions=1").scores(task, image)  # warm up
    public, public_time = timed(lambda: public_loop(model, image), repeats)
    lean, lean_time = timed(lambda: lean_loop(model, image), repeats)
    ours, our_time = timed(lambda: exact_slopes(task, image)[0], repeats)
    error = float(((ours - lean).abs() / lean.clamp_min(1e-30)).max())
    assert torch.allclose(public, lean, rtol=1e-4)
    print(
        f"{spec}: {ours.shape[1]} units; public loop {public_time:.2f} s, lean loop {lean_time:.2f} s, "
        f"vectorised {our_time:.2f} s = {public_time / our_time:.1f} x and {lean_time / our_time:.1f} x faster; "
        f"largest relative difference {error:.0e}"
    )
    scores = gradveil.defense("soteria").scores(task, image)
    for directions in DIRECTIONS:
        estimate = gradveil.defense("soteria", directions=directions)
        generator = derived_generator(0, "directions")
        guess, seconds = timed(lambda d=estimate, g=generator: d.scores(task, image, generator=g), repeats)
        finite = scores.isfinite()
        rank = float(spearmanr(guess[finite], scores[finite]).statistic)
        print(
            f"  {directions:4} directions: rank correlation {rank:.3f}, {seconds:.3f} s = "
            f"{public_time / seconds:.0f} x the public loop, {lean_time / seconds:.0f} x the lean loop, "
            f"{our_time / seconds:.1f} x the vectorised one"
        )


def sample_image() -> Tensor:
    try:
        return data.load("cifar10").test.batch(torch.arange(1))[0]
    except GradveilError:
        print("CIFAR-10 is not available; measuring on noise")
        return torch.rand(1, *SHAPE, generator=torch.Generator().manual_seed(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lenet", "lenet:init=uniform", "resnet18:norm=frozen"])
    torch.set_num_threads(1)
    for spec in parser.parse_args().models:
        measure(spec)


if __name__ == "__main__":
    main()
